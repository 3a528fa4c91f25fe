"""The blocks of README.md, CONTRIBUTING.md and docs/ run as they stand, each page in order in a folder of its own.

`python` blocks of a page share one process, `sh` blocks run in bash between them (lines that only call te-models run in
that process, except beside the real model). The folder of a page holds what the pages name: small models of two
families, the imported model that the quickstart leaves, a text and a run. PRELUDES makes the objects that a page
supposes. Where a page says what no small machine has (eight GPUs, 500 steps), CHANGES says what runs instead. The
tutorials run a second time beside the real SmolLM2-135M in `make test-all`."""

import importlib.util
import itertools
import os
import re
import shlex
import shutil
import sys
from pathlib import Path

import pytest
import torch

from te_models.cli.main import main
from tests.byte_tokenizer import byte_tokenizer
from tests.fork_server import run_python
from tests.structure.tree import ROOT, pyproject

PAGES = [
    path.relative_to(ROOT).as_posix()
    for path in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
]
TUTORIALS = [page for page in PAGES if page.startswith("docs/tutorials/")]
SHOWN = {"text", "toml", "json"}
"""Languages of blocks that are output or input of commands; the run of docs/training.md is written to a file."""

MODEL = """
import torch
import te_models
from te_models import AttentionConfig, GPTModel, MLPConfig, ModelConfig
config = ModelConfig(vocab_size=300, hidden_size=32, num_layers=1, max_position_embeddings=64,
                     attention=AttentionConfig(num_attention_heads=2), mlp=MLPConfig(ffn_hidden_size=48))
model = GPTModel(config)
input_ids = torch.arange(8)[None]
"""
ONE_RANK = """
import torch.distributed as dist
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
"""
PLANS = """
import contextlib, io, sys
import te_models.plan.process as plans
def plan_here(module, text, told=None):
    sys.stdin, printed = io.StringIO(text), io.StringIO()
    with contextlib.redirect_stdout(printed):
        plans.main()
    return subprocess.CompletedProcess([], 0, printed.getvalue(), "")
plans.run_module = plan_here
"""
"""Plans are made by forks of the page's process; docs/planning.md starts interpreters."""
PRELUDES = {
    "docs/compile.md": MODEL
    + ONE_RANK
    + "from te_models.layers import LayerNormLinear, Linear\n"
    + "group, hidden, x = None, 32, torch.randn(4, 32)\nattention = lambda qkv: qkv[:, :32]\n",
    "docs/parallel.md": MODEL + ONE_RANK + "rank, n = 0, 1\n",
    "docs/training.md": PLANS
    + MODEL
    + "from te_models import MoEConfig, RouterConfig\n"
    + "router = RouterConfig(expert_bias=True)\n"
    + "moe = MoEConfig(num_moe_experts=4, moe_router_topk=2, moe_ffn_hidden_size=16, router=router)\n"
    + "model, steps = GPTModel(config.replace(moe=moe)), [[input_ids] * 2] * 2\n"
    + "my_documents = lambda: [[1, 2, 3], [4, 5]]\n",
    "docs/transformers.md": """
import transformers
hf_model = transformers.AutoModelForCausalLM.from_pretrained("Qwen3-30B-A3B")
data = [{"input_ids": [1, 2, 3], "labels": [1, 2, 3]}] * 2
if transformers.utils.is_accelerate_available():
    arguments = transformers.TrainingArguments(output_dir="out", max_steps=1, use_cpu=True, report_to=[])
""",
}
TRAINING = "transformers.Trainer(model, arguments, train_dataset=data).train()"
WITH_OPTIMIZER = TRAINING.replace("data)", "data, optimizers=(optimizer, None))")
HAS_PEFT = importlib.util.find_spec("peft") is not None
HAS_TRAINER = importlib.util.find_spec("accelerate") is not None
CHANGES = {
    # tests/quickstart runs it
    "docs/quickstart.md": [("te-models quickstart --recipe current", "te-models quickstart --recipe current --help")],
    "docs/parallel.md": [('"cuda", (2, 4)', '"cpu", (1, 1)')],
    "docs/rehearsal.md": [
        ("'0.5%', '--formats'", "'90%', '--steps', '1', '--tokens', '16', '--layers', '1', '--formats'")
    ],
    "docs/training.md": [
        ('["--steps", "500"]', '["--steps", "2"]'),
        # the corpus here has too little text for the windows that fit
        (
            "'train', 'lora.toml'])",
            "'train', 'lora.toml', '--steps', '2', '--schedule.warmup-steps', '1', "
            "'--data.validation-fraction', '0.3', '--data.sequence-length', '64'])",
        ),
        (
            "from te_models.lora import add_lora,",
            "mixture, model = model, GPTModel(config)\nfrom te_models.lora import add_lora,",
        ),
        ("merge_lora(model)", "merge_lora(model); model = mixture"),
    ],
    "docs/transformers.md": [
        ("HuggingFaceTB/SmolLM2-135M@main", "SmolLM2-135M"),
        *([] if HAS_TRAINER else [(TRAINING, ""), (WITH_OPTIMIZER, "")]),
    ],
}
SLOW = dict.fromkeys(
    (
        "docs/tutorials/ranks.md",
        "docs/tutorials/cluster.md",
        "docs/tutorials/quantize.md",
        "docs/tutorials/finetune.md",
        "docs/tutorials/experts.md",
        "docs/planning.md",
        "docs/rehearsal.md",
        "docs/cli.md",
        "docs/transformers.md",
        "docs/resuming.md",
        "docs/training.md",
        "docs/porting.md",
    ),
    pytest.mark.slow,
)
"""Pages that start many processes, train, quantize in every format, or plan every layout."""
WITHOUT_COMPILER = "import torch\ntorch.compiler.set_stance('force_eager')\n"
SHELL = r"""
make() { command make --dry-run --directory "$ROOT" "$@"; }
pip() {
    for word in "$@"; do
        case "$word" in .\[*\]) word="${word#.\[}"; "$PYTHON" -c "$EXTRAS" "${word%\]}";; esac
    done
}
"""
"""In place of what installs packages or runs for long: make prints what it would do, pip's extras must exist."""
KNOWN = sorted(pyproject()["project"]["optional-dependencies"])
EXTRAS = f"import sys; sys.exit(not set(sys.argv[1].split(',')) <= set({KNOWN}))"


def blocks(page: str) -> list[tuple[str, str]]:
    """The fenced blocks of a page in order: language, text."""
    text = (ROOT / page).read_text(encoding="utf-8")
    return re.findall(r"^```(\S*)\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


def runs(page: str) -> bool:
    return any(language not in SHOWN for language, _ in blocks(page))


def shell(code: str, in_process: bool) -> str:
    """A block of shell as Python. in_process: lines that only call te-models spare it a start of the interpreter."""
    parts: list[str] = []
    plain = re.compile(r"te-models (?!quickstart)[^$|&;<>`]*$" if in_process else r"(?!)")
    for alone, lines in itertools.groupby(code.splitlines(keepends=True), lambda line: bool(plain.match(line))):
        if alone:
            parts += [f"assert te_models_main({shlex.split(line, comments=True)[1:]}) == 0" for line in lines]
        else:
            text = SHELL + "".join(lines)
            parts.append(f"subprocess.run(['bash', '-euo', 'pipefail', '-c', {text!r}], check=True)")
    return "\n".join(parts) + "\n"


def script(page: str, *, in_process: bool) -> str:
    """A page as one Python program."""
    parts = ["import subprocess\nfrom te_models.cli.main import main as te_models_main\n", PRELUDES.get(page, "")]
    for language, code in blocks(page):
        if language == "sh":
            parts.append(shell(code, in_process))
        elif language == "python" and (HAS_PEFT or "import peft" not in code):
            parts.append(code)
    program = "\n".join(parts)
    for old, new in CHANGES.get(page, []):
        assert old in program, f"{page} no longer has {old!r}"
        program = program.replace(old, new)
    return program


def run(page: str, folder: Path, *, in_process: bool = True) -> None:
    """Run a page in a folder, without compiling: what compiled code computes is tested elsewhere, and takes minutes."""
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "TORCHDYNAMO_DISABLE": "1",
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "ROOT": str(ROOT),
        "PYTHON": sys.executable,
        "EXTRAS": EXTRAS,
    }
    (folder / "page.py").write_text(WITHOUT_COMPILER + script(page, in_process=in_process))
    result = run_python([str(folder / "page.py")], env=environment, cwd=folder)
    assert result.returncode == 0, (result.stdout + result.stderr)[-4000:]


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what readers have: models of two families under the names that the pages use, a text, a run."""
    transformers = pytest.importorskip("transformers", reason="makes the Hugging Face folders that the pages name")
    folder = tmp_path_factory.mktemp("reader")
    tokenizer = byte_tokenizer(["def main():\n    return 1\n"] * 20)
    sizes = {
        "vocab_size": 300,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 1024,
    }
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 8}
    torch.manual_seed(0)
    for name, config in (
        ("SmolLM2-135M", transformers.LlamaConfig(**sizes)),
        ("Qwen3-30B-A3B", transformers.Qwen3MoeConfig(**sizes, **experts)),
    ):
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    assert main(["import", str(folder / "SmolLM2-135M"), str(folder / "models/smollm2")]) == 0
    shutil.copytree(folder / "models/smollm2", folder / "quickstart-out/model")
    (folder / "corpus").mkdir()
    (folder / "corpus/a.py").write_text("def main():\n    return 1\n" * 200)
    small_run(folder, "run")
    small_run(folder, "train")
    return folder


def small_run(folder: Path, name: str) -> None:
    """Write the run of docs/training.md as a file, with every key that it shows, smaller where it is large."""
    text = next(code for language, code in blocks("docs/training.md") if language == "toml")
    small = {
        "steps": 2,
        "sequence_length": 16,
        "micro_batch_size": 1,
        "gradient_accumulation": 2,
        "warmup_steps": 1,
        "decay_steps": 1,
        "every": 2,
        "batches": 1,
        "validation_fraction": 0.1,
    }
    for key, value in small.items():
        text, count = re.subn(rf"^{key} = \S+", f"{key} = {value}", text, flags=re.MULTILINE)
        assert count, key
    text = re.sub(r"^output_dir = .*", f'output_dir = "runs/{name}"', text)
    (folder / f"{name}.toml").write_text(text)


@pytest.mark.parametrize("page", [pytest.param(p, marks=SLOW.get(p, ())) for p in PAGES if runs(p)])
def test_the_blocks_of_a_page_run_in_order(page: str, reader: Path, tmp_path: Path) -> None:
    shutil.copytree(reader, tmp_path / "page")
    run(page, tmp_path / "page")


@pytest.mark.slow
@pytest.mark.real
@pytest.mark.parametrize("page", TUTORIALS)
def test_a_tutorial_runs_beside_the_real_model(page: str, tmp_path: Path) -> None:
    from te_models.quickstart.smollm import smollm_folder

    assert main(["import", str(smollm_folder()), str(tmp_path / "quickstart-out/model")]) == 0
    run(page, tmp_path, in_process=False)


def test_every_block_is_code_that_runs_or_says_what_it_is() -> None:
    found = [(page, language) for page in PAGES for language, _ in blocks(page)]
    assert {(page, language) for page, language in found if language not in {"python", "sh", *SHOWN}} == set()
    # the keys of a run are tested with docs/training.md's block; other pages write their files in sh blocks
    assert {page for page, language in found if language == "toml"} <= {"docs/training.md"}
