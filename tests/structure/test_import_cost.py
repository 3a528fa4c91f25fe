"""`import te_models` is light: little time on top of torch, and none of the heavy optional modules."""

import json
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

from te_models import GPTModel
from tests.build import tiny

HEAVY = (
    "transformers",
    "peft",
    "accelerate",
    "triton",
    "torch._dynamo",
    "torch._inductor",
    "torch.distributed.fsdp",
    "tokenizers",
    "rich",
    "matplotlib",
    "numpy.testing",
)


def child(script: str) -> str:
    """What a fresh interpreter prints."""
    return subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True).stdout


@pytest.mark.slow
def test_import_adds_little_to_torch() -> None:
    """CPU time of both imports, one after the other in the same process, so that load on the machine cancels."""
    script = """
from time import process_time
start = process_time(); import torch
middle = process_time(); import te_models
print((process_time() - middle) / (middle - start))
"""
    child(script)  # writes the byte code
    shares = [float(child(script)) for _ in range(3)]
    assert statistics.median(shares) < 0.15, shares


def test_import_loads_nothing_heavy(tmp_path: Path) -> None:
    """Neither the layers nor a model that is read need the compiler, Triton or transformers."""
    GPTModel(tiny()).save_pretrained(tmp_path)
    script = f"""
import json, sys
import torch, safetensors.torch
before = set(sys.modules)
import te_models
import te_models.layers, te_models.checkpoints
te_models.GPTModel.from_pretrained({str(tmp_path)!r})
new = set(sys.modules) - before
print(json.dumps(sorted(n for n in new if n.startswith({HEAVY!r}))))
"""
    assert json.loads(child(script)) == []
