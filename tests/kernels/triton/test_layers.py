"""Layers as on a GPU, where GEMMs take the quantized numbers themselves: against the same layers on the CPU.

Both multiply the same quantized numbers, so results differ by the order of sums and by roundings to bfloat16.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from te_models import layers
from te_models.kernels.gemm import gemm_counts, reset_gemm_counts
from tests.kernels.triton.as_on_a_gpu import gemms_as_on_a_gpu

RECIPES = {
    "current": layers.Float8CurrentScaling(),
    "delayed": layers.DelayedScaling(),
    "block": layers.Float8BlockScaling(),
    "block, float32 scales": layers.Float8BlockScaling(use_f32_scales=True),
    "mxfp8": layers.MXFP8BlockScaling(),
}
ROWS, INNER, OUTER = 37, 40, 24
SPLITS = [5, 0, 20]


def step(kind: str, recipe: layers.Recipe, device: torch.device, main_grad: Tensor | None) -> list[Tensor]:
    """Return output and gradients of one layer, and its main gradient if it has one."""
    generator = torch.Generator().manual_seed(0)
    fused = {"fuse_wgrad_accumulation": main_grad is not None, "params_dtype": torch.bfloat16, "device": device}
    if kind == "Linear":
        module = layers.Linear(INNER, OUTER, bias=False, **fused)
    else:
        module = layers.GroupedLinear(len(SPLITS), INNER, OUTER, bias=False, **fused)
    (weight,) = module.parameters()
    with torch.no_grad():
        weight.copy_(torch.randn(weight.shape, generator=generator) / 8)
    if main_grad is not None:
        weight.main_grad = main_grad
    x = torch.randn(ROWS, INNER, generator=generator).bfloat16().to(device).requires_grad_()
    arguments = () if kind == "Linear" else (torch.tensor(SPLITS, device=device),)
    with layers.autocast(recipe=recipe):
        y = module(x, *arguments)
    y.backward(torch.randn(y.shape, generator=generator).bfloat16().to(device))
    assert x.grad is not None
    dw = weight.grad if main_grad is None else main_grad
    assert dw is not None
    return [y.detach(), x.grad, dw]


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("kind", ["Linear", "GroupedLinear"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_quantized_numbers_reach_the_kernels(
    recipe: str, kind: str, accumulate: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    def main_grad(where: torch.device) -> Tensor | None:
        shape = (OUTER, INNER) if kind == "Linear" else (len(SPLITS), OUTER, INNER)
        return torch.ones(shape, device=where) if accumulate else None

    cpu = torch.device("cpu")
    expected = step(kind, RECIPES[recipe], cpu, main_grad(cpu))
    if device.type == "cpu":
        gemms_as_on_a_gpu(monkeypatch)
    reset_gemm_counts()
    found = step(kind, RECIPES[recipe], device, main_grad(device))
    scaled = {name: rung for name, rung in gemm_counts() if name.startswith("scaled")}
    assert scaled and "emulation" not in scaled.values()
    for got, want in zip(found, expected, strict=True):
        assert (got.cpu().float() - want.float()).norm() <= 2.0**-7 * want.float().norm()
    if kind == "GroupedLinear":
        assert not found[0][sum(SPLITS) :].any()
