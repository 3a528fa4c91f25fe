"""What one process compiled, the next one finds: on the same disk, and on another machine from saved artifacts."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from te_models import GPTModel, generate
from te_models.compile import cache
from te_models.layers import Linear
from te_models.training.config import PrecisionConfig
from te_models.training.step import make_loss_function
from tests.build import one_layer, tiny, token_ids

CHILD = """
import json, sys
from pathlib import Path
import torch
from torch._dynamo.utils import counters
from te_models import GPTModel, compile_model
from te_models.layers import autocast, recipe
from tests.build import one_layer, tiny, token_ids

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


def run(name: str, caches: Path, artifacts: Path, role: str) -> dict:
    environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(caches)}
    command = [sys.executable, "-c", CHILD, name, str(artifacts), role]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=Path(__file__).parents[3])
    assert not done.returncode, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def assert_found(later: dict, first: dict) -> None:
    """Both modules' traces, and their forward and backward code, came from the cache, and compute the same."""
    counts = later["counts"]
    assert (counts.get("fxgraph_cache_hit"), counts.get("fxgraph_cache_miss")) == (4, None), counts
    assert (counts.get("autograd_cache_hit"), counts.get("autograd_cache_miss")) == (2, None), counts
    assert (later["loss"], later["norm"]) == (first["loss"], first["norm"])


@pytest.mark.slow
def test_another_machine_finds_what_was_compiled(tmp_path: Path) -> None:
    artifacts = tmp_path / "artifacts"
    first = run("mxfp8", tmp_path / "caches", artifacts, "save")
    assert first["counts"].get("autograd_cache_miss") == 2  # the layer and the output layer
    assert_found(run("mxfp8", tmp_path / "elsewhere", artifacts, "load"), first)


def test_training_and_decoding_are_kept_whole_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of models that are this library's alone: not with a module of another package, whose functions torch cannot see
    in a graph."""
    compiled: list[str] = []

    def backend(graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        compiled.append("kept")
        return graph.forward

    monkeypatch.setattr(cache, "inductor", backend)
    model = GPTModel(one_layer(tiny()), dtype=torch.float32)
    ids = token_ids(1, 5)
    make_loss_function(model, PrecisionConfig(dtype="fp32"), "cpu", compiled=True)(ids)[0].backward()
    assert compiled == ["kept"]
    generate(model, ids, 2, compile=True)
    assert compiled == ["kept"] * 2
    model.foreign = torch.nn.Module.__new__(type("Foreign", (torch.nn.Module,), {"__module__": "elsewhere"}))
    torch.nn.Module.__init__(model.foreign)
    assert cache.backend_for(model) == "inductor"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["none", "delayed", "current", "block", "mxfp8", "nvfp4"])
def test_a_later_process_finds_what_was_compiled(name: str, tmp_path: Path) -> None:
    first, later = (run(name, tmp_path, tmp_path, "none") for _ in range(2))
    assert_found(later, first)
    if name == "mxfp8":
        other = run("current", tmp_path, tmp_path, "none")
        assert other["counts"].get("autograd_cache_miss") == 1, (
            "another recipe is another layer, and the same output layer"
        )
        assert other["loss"] != first["loss"]


def test_sources_are_part_of_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another version of the library finds nothing of this one, and a user's own tag stays in the key."""
    import torch._functorch.config as functorch
    import torch._inductor.compile_fx as compile_fx

    seen = []
    monkeypatch.setattr(
        compile_fx,
        "compile_fx",
        lambda graph, inputs: seen.append(
            (torch.compiler.config.cache_key_tag, functorch.autograd_cache_allow_custom_autograd_functions)
        ),
    )
    allowed = functorch.autograd_cache_allow_custom_autograd_functions
    graph = torch.fx.symbolic_trace(torch.nn.Linear(2, 2))
    cache.inductor(graph, [])
    monkeypatch.setattr(cache, "_sources_digest", lambda: "another")
    with torch.compiler.config.patch(cache_key_tag="mine "):
        cache.inductor(graph, [])
    (here, allowed_here), there = seen
    assert re.fullmatch("[0-9a-f]{64}", here) and allowed_here
    assert there == ("mine another", True)
    assert (torch.compiler.config.cache_key_tag, functorch.autograd_cache_allow_custom_autograd_functions) == (
        "",
        allowed,
    )


def test_modules_of_others_are_kept_as_torch_keeps_them() -> None:
    """Their graphs may call functions whose sources no key holds."""

    class Own(Linear):
        pass

    assert cache.keeps_whole_graphs(GPTModel(one_layer(tiny())))
    assert cache.keeps_whole_graphs(torch.nn.Sequential(Linear(16, 16)))
    assert not cache.keeps_whole_graphs(torch.nn.Sequential(Linear(16, 16), Own(16, 16)))
