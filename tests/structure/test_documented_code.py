"""The code in README.md and docs/ runs as it stands: each page in a process and a folder of its own.

A page may name folders and variables that its reader is supposed to have; PRELUDES makes small ones. Where a page says
what no small machine has (eight GPUs, 500 steps), CHANGES says what runs instead.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from te_models.cli.main import main
from tests.byte_tokenizer import byte_tokenizer
from tests.structure.tree import ROOT

PAGES = ["README.md", *(f"docs/{page.name}" for page in sorted((ROOT / "docs").glob("*.md")))]

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
PRELUDES = {
    "docs/compile.md": MODEL
    + ONE_RANK
    + "from te_models.layers import LayerNormLinear, Linear\n"
    + "group, hidden, x = None, 32, torch.randn(4, 32)\nattention = lambda qkv: qkv[:, :32]\n",
    "docs/layers.md": "import torch\nx = torch.randn(4, 1024, dtype=torch.bfloat16)\n"
    + "rows, m_splits = torch.randn(16, 1024), torch.tensor([3, 0, 2, 4, 1, 5, 1, 0])\n",
    "docs/parallel.md": ONE_RANK + "rank, n = 0, 1\n",
    "docs/training.md": MODEL
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
    "docs/parallel.md": [('"cuda", (2, 4)', '"cpu", (1, 1)')],
    "docs/training.md": [('["--steps", "500"]', '["--steps", "2"]')],
    "docs/transformers.md": [] if HAS_TRAINER else [(TRAINING, ""), (WITH_OPTIMIZER, "")],
}


def blocks(page: str, language: str) -> list[str]:
    """The fenced code of a page in one language."""
    text = (ROOT / page).read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
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
        "max_position_embeddings": 64,
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
    (folder / "corpus").mkdir()
    (folder / "corpus/a.py").write_text("def main():\n    return 1\n" * 200)
    return folder


def small_run(folder: Path, name: str) -> None:
    """Write the run of docs/training.md as a file, with every key that it shows, smaller where it is large."""
    text = blocks("docs/training.md", "toml")[0]
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


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "python")])
def test_python_on_the_pages_runs(page: str, folder: Path) -> None:
    code = "\n".join(block for block in blocks(page, "python") if HAS_PEFT or "import peft" not in block)
    for old, new in CHANGES.get(page, []):
        assert old in code, f"{page} no longer has {old!r}"
        code = code.replace(old, new)
    small_run(folder, "run")
    script = PRELUDES.get(page, "") + code
    # what compiled code computes is tested elsewhere, and takes minutes
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TORCHDYNAMO_DISABLE": "1"}
    result = subprocess.run(
        [sys.executable, "-c", script], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr


def test_the_commands_of_the_readme_run_beside_the_quickstart(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commands = next(block for block in blocks("README.md", "sh") if "te-models" in block)
    monkeypatch.chdir(folder)
    assert main(["import", "SmolLM2-135M", "quickstart-out/model"]) == 0
    for line in commands.splitlines():
        program, *words = shlex.split(line)
        assert program == "te-models"
        assert main(words) == 0, line
