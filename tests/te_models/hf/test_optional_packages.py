"""`te_models.hf` with and without the optional packages of transformers' world, each set in a process of its own."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

transformers = pytest.importorskip("transformers", reason="te_models.hf needs it")

from te_models.cli.main import main  # noqa: E402
from tests.byte_tokenizer import byte_tokenizer  # noqa: E402
from tests.structure.tree import ROOT  # noqa: E402
from tests.te_models.hf_models import SIZES  # noqa: E402

SETS = ["", "accelerate,peft,bitsandbytes", "bitsandbytes", "accelerate", "accelerate,bitsandbytes", "accelerate,peft"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of ours with a tokenizer."""
    folder = tmp_path_factory.mktemp("model")
    config = transformers.LlamaConfig(**{**SIZES, "vocab_size": 300, "num_hidden_layers": 1})
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder / "hf")
    byte_tokenizer(["def main():\n    return 1\n"] * 20).save_pretrained(folder / "hf")
    assert main(["import", str(folder / "hf"), str(folder / "ours")]) == 0
    return folder / "ours"


@pytest.mark.slow
@pytest.mark.parametrize(
    "packages", [pytest.param(names, marks=[pytest.mark.slow] if names else [], id=names or "none") for names in SETS]
)
def test_every_way_of_loading(packages: str, folder: Path, tmp_path: Path) -> None:
    """peft requires accelerate, so it is never there alone."""
    absent = [n for n in packages.split(",") if n not in ("", "bitsandbytes") and importlib.util.find_spec(n) is None]
    if absent:
        pytest.skip(f"{absent[0]} is not installed")
    program = ROOT / "tests/te_models/optional_packages.py"
    result = subprocess.run(
        [sys.executable, "-W", "error::UserWarning:te_models", str(program), packages, str(folder), str(tmp_path)],
        env=os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
