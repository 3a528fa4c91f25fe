"""The mixture of experts on an accelerator: no host synchronisation, so that a CUDA graph captures forward and backward
once and replays them for tokens that go to other experts."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from te_models import MoELayer
from te_models.layers import autocast
from te_models.model.build import Build
from tests.build import one_layer, tiny_moe
from tests.layers.matrix_recipes import NAMES, build_stored, fresh

pytestmark = pytest.mark.gpu
HOW = ["eager", "compiled"]


@pytest.fixture(autouse=True)
def synchronisation_allowed_again() -> Iterator[None]:
    yield
    torch.cuda.set_sync_debug_mode("default")


def build(name: str | None, stored: bool) -> MoELayer:
    torch.manual_seed(0)
    config = one_layer(tiny_moe(aux_loss_coeff=0.01, z_loss_coeff=0.001), hidden_size=64)

    def layer() -> MoELayer:
        return MoELayer(config, build=Build(params_dtype=torch.bfloat16))

    return (build_stored(layer, name) if stored else layer()).to("cuda")


def tokens(seed: int) -> Tensor:
    """Scaled so that the router prefers other experts for other seeds."""
    x = torch.randn(2, 32, 64, generator=torch.Generator().manual_seed(seed)) + seed
    return x.to("cuda", torch.bfloat16)


def step(layer: MoELayer, run, name: str | None, x: Tensor) -> list[Tensor]:
    """Return output, counts and gradients. The gradients' memory is the same in each call."""
    for t in (x, *layer.parameters()):
        if t.grad is not None:
            t.grad.zero_()
    with autocast(enabled=name is not None, recipe=fresh(name)):
        y, routed = run(x)
    (y.float().square().mean() + routed.load_balancing_loss + routed.z_loss).backward()
    return [y.detach(), routed.tokens_per_expert, *(t.grad for t in (x, *layer.parameters()))]


def cells() -> list:
    return [pytest.param(n, s, id=f"{n or 'bf16'}-{s}") for n in NAMES for s in (False, True) if n or not s]


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize(("name", "stored"), cells())
def test_no_step_waits_for_the_device(name: str | None, stored: bool, how: str) -> None:
    layer, x = build(name, stored), tokens(0).requires_grad_()
    run = torch.compile(layer, fullgraph=True) if how == "compiled" else layer
    step(layer, run, name, x)  # compiles and tunes, which waits
    torch.cuda.set_sync_debug_mode("error")
    step(layer, run, name, x)
    torch.cuda.set_sync_debug_mode("default")
    with pytest.raises(RuntimeError, match="synchroniz"):  # the mode does refuse to wait
        torch.cuda.set_sync_debug_mode("error")
        x.sum().item()


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize(("name", "stored"), cells())
def test_a_captured_step_replays_for_other_experts(name: str | None, stored: bool, how: str) -> None:
    """Bit for bit what the captured function computes when it is called; under NVFP4 and delayed scaling, where random
    bits and scales differ from call to call, the numbers of tokens."""
    layer, x = build(name, stored), tokens(0).requires_grad_()
    run = torch.compile(layer, fullgraph=True) if how == "compiled" else layer
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step(layer, run, name, x)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step(layer, run, name, x)
    routed = []
    for seed in (1, 2):
        with torch.no_grad():
            x.copy_(tokens(seed))
        graph.replay()
        got = [t.clone() for t in captured]
        expected = step(layer, run, name, x)
        routed.append(got[1].tolist())
        assert torch.equal(got[1], expected[1])
        if name not in ("nvfp4", "delayed"):
            torch.testing.assert_close(got, expected, rtol=0, atol=0)
        assert all(torch.isfinite(t.float()).all() for t in got)
    assert routed[0] != routed[1]
