"""What quantization did to each operand: noted on request, eager and compiled, changing no number."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from te_models.layers import (
    DelayedScaling,
    Float8CurrentScaling,
    GroupedLinear,
    LayerNormMLP,
    Linear,
    NVFP4BlockScaling,
    autocast,
    collect_statistics,
    quantization_statistics,
    quantized_model_init,
    recipe,
    set_rounding_seed,
)


def fp8(values: np.ndarray, dtype: torch.dtype) -> np.ndarray:
    return torch.from_numpy(values).to(dtype).float().numpy()


@pytest.mark.parametrize("compiled", [False, True])
def test_they_are_those_of_the_operands(compiled: bool) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    layer = Linear(64, 32, bias=False)
    run = torch.compile(layer, fullgraph=True) if compiled else layer
    x, dy = torch.randn(16, 64), torch.randn(16, 32)
    x[0, :4] = torch.tensor([1e-8, -1e-8, 0.0, 40.0])  # two underflows, one zero that is none, the maximum
    with autocast(recipe=Float8CurrentScaling()), collect_statistics():
        y = run(x)
    y.backward(dy)
    found = quantization_statistics(layer)
    assert set(found) == {"input", "weight", "grad_output"}
    for role, tensor, dtype in (
        ("input", x, torch.float8_e4m3fn),
        ("weight", layer.weight.detach(), torch.float8_e4m3fn),
        ("grad_output", dy, torch.float8_e5m2),
    ):
        values = tensor.numpy().astype(np.float32)
        amax = np.abs(values).max()
        scale = np.float32(torch.finfo(dtype).max) / amax
        became = fp8(values * scale, dtype)
        assert found[role]["amax"] == amax
        assert found[role]["scale_min"] == found[role]["scale_max"] == pytest.approx(scale, rel=1e-6)
        assert found[role]["underflow"] == pytest.approx(
            ((became == 0) & (values != 0)).sum() / (values != 0).sum(), abs=1e-7
        )
        assert found[role]["saturation"] == 0.0
    assert found["input"]["underflow"] >= 2 / x.numel()


def test_an_old_scale_saturates() -> None:
    layer = Linear(64, 32, bias=False)
    for size in (1.0, 100.0):
        with autocast(recipe=DelayedScaling()), collect_statistics():
            layer(torch.full((4, 64), size))
    assert quantization_statistics(layer)["input"]["saturation"] == 1.0
    assert quantization_statistics(layer)["input"]["amax"] == 100.0


def test_grouped_rows_are_judged_by_their_own_scales() -> None:
    layer = GroupedLinear(2, 32, 16, bias=False)
    x = torch.cat((torch.full((3, 32), 1.0), torch.full((5, 32), 50.0)))
    for _ in range(2):
        with autocast(recipe=DelayedScaling()), collect_statistics():
            layer(x, torch.tensor([3, 5]))
    found = quantization_statistics(layer)["input"]
    assert (found["amax"], found["saturation"]) == (50.0, 0.0)
    assert found["scale_min"] == pytest.approx(448 / 50) and found["scale_max"] == pytest.approx(448)


@pytest.mark.parametrize("name", ["delayed", "current", "block", "mxfp8", "nvfp4"])
def test_noting_them_changes_no_number(name: str) -> None:
    results = []
    for noting in (False, True):
        torch.manual_seed(0)
        layer = LayerNormMLP(64, 48, activation="swiglu")
        set_rounding_seed(layer, 1)
        for step in range(2):
            x = torch.randn(16, 64, generator=torch.Generator().manual_seed(step)).requires_grad_()
            with autocast(recipe=recipe(name)), collect_statistics(noting):
                y = layer(x)
            y.square().sum().backward()
        results.append([y.detach(), x.grad, *(p.grad for p in layer.parameters())])
        roles = ("input", "weight", "grad_output")
        names = {f"{gemm}.{role}" for gemm in ("fc1", "fc2") for role in roles}
        assert set(quantization_statistics(layer)) == (names if noting else set())
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(b, a, rtol=0, atol=0)


def test_weights_stored_quantized_have_none() -> None:
    with quantized_model_init(recipe=NVFP4BlockScaling()):
        layer = Linear(64, 32)
    with autocast(recipe=NVFP4BlockScaling()), collect_statistics():
        layer(torch.randn(4, 64)).sum().backward()
    assert set(quantization_statistics(layer)) == {"input", "grad_output"}
