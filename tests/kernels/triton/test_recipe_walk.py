"""Layers under every recipe, as on a GPU: each call of a registered operation against its description."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from te_models import layers
from te_models.kernels.registry import registered
from tests.kernels.described import Calls, check_description
from tests.kernels.triton.as_on_a_gpu import gemms_as_on_a_gpu
from tests.layers.quantizer.examples import EXAMPLES

RECIPES: dict[str, layers.Recipe] = {
    "delayed": layers.DelayedScaling(),
    "current": layers.Float8CurrentScaling(),
    "block": layers.Float8BlockScaling(),
    "mxfp8": layers.MXFP8BlockScaling(),
    "nvfp4": layers.NVFP4BlockScaling(),
    "hybrid": layers.CustomRecipe(qfactory=lambda role: EXAMPLES["hybrid"]),
}
LAYERS: dict[str, Any] = {
    "Linear": lambda **o: layers.Linear(48, 32, name="a", **o),
    "LayerNormMLP": lambda **o: layers.LayerNormMLP(48, 64, activation="swiglu", name="a", **o),
    "GroupedLinear": lambda **o: layers.GroupedLinear(2, 48, 32, bias=False, name="a", **o),
}


# no such GPU multiplies FP4, and which kernel computes is not the matter here
@pytest.mark.filterwarnings("ignore:.* runs as emulation:RuntimeWarning")
@pytest.mark.slow
@pytest.mark.parametrize("needs_input", [True, False])
@pytest.mark.parametrize("weights", ["plain", "stored", "frozen"])
@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("name", RECIPES)
def test_results_are_as_described(
    name: str, kind: str, weights: str, needs_input: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    if device.type == "cpu":
        gemms_as_on_a_gpu(monkeypatch)
    torch.manual_seed(0)
    with layers.quantized_model_init(enabled=weights == "stored", recipe=RECIPES[name]):
        layer = LAYERS[kind](params_dtype=torch.bfloat16, device=device)
    layer.requires_grad_(weights != "frozen")
    x = torch.randn(35, 48, device=device).bfloat16().requires_grad_(needs_input)
    arguments = (torch.tensor([5, 30], device=device),) if kind == "GroupedLinear" else ()
    with Calls() as calls:
        with layers.autocast(recipe=RECIPES[name]):
            y = layer(x, *arguments)
        if y.requires_grad:
            y.backward(torch.randn_like(y))
    assert calls.found
    for op, given in calls.found:
        check_description(registered()[op], given)
