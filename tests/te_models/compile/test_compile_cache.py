"""What one process compiled, the next one finds: on the same disk, and on another machine from saved artifacts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

CHILD = """
import json, sys
from pathlib import Path
import torch
from torch._dynamo.utils import counters
from te_models import GPTModel, compile_model
from te_models.layers import autocast, recipe
from tests.te_models.configs import one_layer, tiny, token_ids

name, artifacts, role = sys.argv[1:]
if role == "load":
    torch.compiler.load_cache_artifacts(Path(artifacts).read_bytes())
torch.manual_seed(0)
model = compile_model(GPTModel(one_layer(tiny())), "block")
ids = token_ids(2, 9)
with autocast(enabled=name != "none", recipe=None if name == "none" else recipe(name)):
    loss = model(ids, labels=ids, return_logits=False).loss
loss.backward()
if role == "save":
    data, _ = torch.compiler.save_cache_artifacts()
    Path(artifacts).write_bytes(data)
found = counters["aot_autograd"] | counters["inductor"]
norm = sum(p.grad.double().norm().item() for p in model.parameters())
print(json.dumps({"loss": loss.item(), "norm": norm, "counts": found}))
"""


def run(name: str, caches: Path, artifacts: Path, role: str, functions: bool = True) -> dict:
    """functions: whether the compiler may keep traces of autograd functions, which layers under a recipe are."""
    environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(caches)}
    environment["TORCHINDUCTOR_AUTOGRAD_CACHE_ALLOW_CUSTOM_AUTOGRAD"] = str(int(functions))
    command = [sys.executable, "-c", CHILD, name, str(artifacts), role]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=Path(__file__).parents[3])
    assert not done.returncode, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def assert_found(later: dict, first: dict, traces: int) -> None:
    """Both modules' forward and backward code came from the cache, and `traces` of the two modules' traces."""
    counts = later["counts"]
    assert (counts.get("fxgraph_cache_hit"), counts.get("fxgraph_cache_miss")) == (4, None), counts
    assert (counts.get("autograd_cache_hit"), counts.get("autograd_cache_miss")) == (traces, None), counts
    assert (later["loss"], later["norm"]) == (first["loss"], first["norm"])


@pytest.mark.slow
def test_another_machine_finds_what_was_compiled(tmp_path: Path) -> None:
    artifacts = tmp_path / "artifacts"
    first = run("mxfp8", tmp_path / "caches", artifacts, "save")
    assert first["counts"].get("autograd_cache_miss") == 2  # the layer and the output layer
    assert_found(run("mxfp8", tmp_path / "elsewhere", artifacts, "load"), first, traces=2)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["none", "delayed", "current", "block", "mxfp8", "nvfp4"])
def test_a_later_process_finds_what_was_compiled(name: str, tmp_path: Path) -> None:
    """Traces of a process that may keep those of autograd functions are no other's: each kind has a later one."""
    first, later = (run(name, tmp_path, tmp_path, "none") for _ in range(2))
    assert_found(later, first, traces=2)
    plain, later = (run(name, tmp_path, tmp_path, "none", functions=False) for _ in range(2))
    assert (plain["counts"].get("fxgraph_cache_hit"), plain["counts"].get("fxgraph_cache_miss")) == (4, None)
    assert_found(later, first, traces=2 if name == "none" else 1)  # of the output layer, and of the layer
    if name == "mxfp8":
        other = run("current", tmp_path, tmp_path, "none")
        assert other["counts"].get("autograd_cache_miss") == 1, (
            "another recipe is another layer, and the same output layer"
        )
        assert other["loss"] != first["loss"]
