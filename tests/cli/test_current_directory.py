"""Every verb in a folder from a stranger: modules that lie there run in no process that te_models starts."""

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from te_models import GPTModel
from te_models.cli.main import build_parser, verbs_of
from te_models.cli.main import main as run_here
from te_models.lora import add_lora, save_adapter
from tests.byte_tokenizer import byte_tokenizer
from tests.fork_server import run_python
from tests.training.runs import tiny_model

TEXT = "def f(x):\n    return x + 1\n" * 40
NAMES = (
    *("numpy", "torch", "safetensors", "tokenizers", "transformers", "json", "subprocess", "multiprocessing", "struct"),
    *("array", "resource", "contextlib", "traceback", "collections", "sitecustomize", "usercustomize", "te_models"),
)
HOSTILE = """
import os, sys
from importlib.machinery import PathFinder
from importlib.util import module_from_spec
with open({log!r}, "a") as file:
    print(__name__, os.getpid(), *sys.argv, file=file)
# and be the module that was meant, so that the process goes on to import others
here = os.path.dirname(os.path.abspath(__file__))
spec = PathFinder.find_spec(__name__, [path for path in sys.path if os.path.realpath(path) != here])
if spec is None:
    raise ModuleNotFoundError(__name__)
sys.modules[__name__] = module_from_spec(spec)
spec.loader.exec_module(sys.modules[__name__])
"""
RUN = """
output_dir = "run"
steps = 2
device = "cpu"
compile = {compiled}
[model]
path = "model"
[data]
path = "tokens"
sequence_length = 16
[log]
progress = false
"""
VERBS: dict[str, Sequence[str]] = {
    "import": ("hf", "model"),
    "inspect": ("model",),
    "certify": ("hf",),
    "info": (),
    "adopt": ("olmo", "adopted", "--again"),
    "models": ("llama",),
    "merge": ("model", "adapter", "with-adapter"),
    "upcycle": ("model", "moe", "--experts", "2", "--topk", "1"),
    "relayout": ("moe", "per-gemm", "--layout", "per-gemm"),
    "reshard": ("moe", "shards", "--max-shard-size", "100KB"),
    "merge-shards": ("shards", "merged"),
    "quantize": ("moe", "fp8", "--recipe", "block"),
    "dequantize": ("fp8", "values"),
    "export": ("model", "exported"),
    "toy": ("hf", "toy", "--layers", "1"),
    "diff": ("model", "model"),
    "verify": ("--logits", "hf", "model", "--text", "text.txt"),
    "init": ("--model", "model", "--task", "pretrain", "--tokenizer", "bytes", "--output", "init.toml"),
    "tokenize": ("text.txt", "--tokenizer", "hf", "--output", "tokens", "--workers", "2"),
    "rehearse": ("run.toml", "--formats", "mxfp8", "--steps", "1", "--tokens", "32", "--layers", "1", "--no-variants"),
    "train": ("run.toml",),
    "report": ("run", "--output", "report.html"),
    "plan": ("run.toml", "--ranks", "2"),
    "launch": ("run.toml", "--slurm", "--nproc-per-node", "1"),
    "generate": ("model", "--prompt", "def", "--max-new-tokens", "2"),
    "eval": ("model", "--text", "text.txt", "--seq-length", "16", "--stride", "8"),
    "completion": ("bash",),
    "quickstart": ("--offline-tiny", "--out", "quickstart-out"),
}
"""Each verb and its words, in an order in which each finds what it needs."""


@pytest.fixture(scope="module")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a Hugging Face model, a text and a configuration, and the modules."""
    import torch

    from te_models import GPTModel

    folder = tmp_path_factory.mktemp("stranger")
    torch.manual_seed(0)
    GPTModel(tiny_model().replace(vocab_size=300), params_dtype=torch.float32).save_pretrained(folder / "ours")
    assert run_here(["export", str(folder / "ours"), str(folder / "hf")]) == 0
    byte_tokenizer([TEXT]).save_pretrained(folder / "hf")
    (folder / "text.txt").write_text(TEXT)
    (folder / "run.toml").write_text(RUN.format(compiled="false"))
    (folder / "compiled.toml").write_text(RUN.format(compiled="true"))
    for name in NAMES:
        (folder / f"{name}.py").write_text(HOSTILE.format(log=str(folder / "log")))
    return folder


def what_ran(folder: Path) -> list[str]:
    """Return what the modules wrote, and forget it."""
    log = folder / "log"
    found = log.read_text().splitlines() if log.exists() else []
    log.unlink(missing_ok=True)
    return found


def test_every_verb_is_tested() -> None:
    assert set(VERBS) == set(verbs_of(build_parser()).choices)


@pytest.mark.slow
def test_children_of_the_verbs(stranger: Path) -> None:
    """Of those that start processes, one that reads a tokenizer: as `python -m te_models` runs, in a process that has
    imported torch already."""
    run = run_python(["-m", "te_models", "import", *VERBS["import"]], cwd=stranger)
    assert run.returncode == 0, run.stderr
    assert what_ran(stranger) == []


MODULE = [sys.executable, "-m", "te_models"]
STARTS: dict[str, tuple[list[str], dict[str, str]]] = {
    "te-models": ([str(Path(sys.executable).with_name("te-models"))], {}),
    "python -m": (MODULE, {}),
    "python -P -m": ([sys.executable, "-P", "-m", "te_models"], {}),
    "PYTHONSAFEPATH=1 python -m": (MODULE, {"PYTHONSAFEPATH": "1"}),
    "an empty entry in PYTHONPATH": (MODULE, {"PYTHONPATH": ":/none"}),
}


@pytest.mark.slow
@pytest.mark.parametrize("start", STARTS)
def test_every_verb_by_every_start(stranger: Path, tmp_path: Path, start: str) -> None:
    """What an entry of PYTHONPATH brings into the process that the user started is the user's, and what children import
    is not; `python -m` alone would take a te_models.py for the project."""
    folder = tmp_path / "stranger"
    made = shutil.ignore_patterns("model", "tokens", "log")  # by other tests
    shutil.copytree(stranger, folder, ignore=made)
    command, variables = STARTS[start]
    for file in folder.glob("*.py"):
        file.write_text(HOSTILE.format(log=str(folder / "log")))
    if start in ("python -m", "an empty entry in PYTHONPATH"):
        (folder / "te_models.py").unlink()
    for verb, words in (*VERBS.items(), ("train", ["compiled.toml", "--output-dir", "compiled"])):
        if verb == "merge":
            model = GPTModel.from_pretrained(folder / "model")
            add_lora(model, rank=1)
            save_adapter(model, folder / "adapter")
        process = subprocess.Popen(
            [*command, verb, *words], cwd=folder, env=os.environ | variables, stderr=subprocess.PIPE, text=True
        )
        _, said = process.communicate()
        assert process.returncode == 0, (verb, said)
        ran = what_ran(folder)
        if start == "an empty entry in PYTHONPATH":
            ran = [line for line in ran if line.split()[1] != str(process.pid)]
        assert ran == [], verb


CHILDREN = """
import sys
from te_models import child_process
child_process.leave_current_directory()
import multiprocessing, os
from multiprocessing import shared_memory
if __name__ == "__main__":
    for method in ("spawn", "forkserver"):
        context = multiprocessing.get_context(method)
        process = context.Process(target=os.getpid)
        process.start()
        process.join()
        assert process.exitcode == 0, method
    memory = shared_memory.SharedMemory(create=True, size=1)  # starts a resource tracker
    memory.close()
    memory.unlink()
    import subprocess
    subprocess.run([sys.executable, "-c", "import json"], check=True)
print(os.getpid())
"""


def test_interpreters_that_libraries_start(stranger: Path) -> None:
    (stranger / "te_models.py").rename(stranger / "hidden")
    run = subprocess.run(
        [sys.executable, "-c", CHILDREN],
        cwd=stranger,
        env=os.environ | {"PYTHONPATH": f":{Path(__file__).parents[2]}:."},
        capture_output=True,
        text=True,
    )
    (stranger / "hidden").rename(stranger / "te_models.py")
    assert run.returncode == 0, run.stderr
    own = run.stdout.split()[-1]
    assert [line for line in what_ran(stranger) if line.split()[1] != own] == []
