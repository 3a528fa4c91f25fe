"""Each basic operation against what torch's autograd says of the same formula."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from te_models.layers import ops
from tests.layers.ops.steps import assert_equal, step


def gated(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    def run(x: Tensor) -> Tensor:
        gate, up = x.chunk(2, -1)
        return function(gate) * up

    return run


def clamped(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, -1)
    gate, up = gate.clamp(max=1.0), up.clamp(-1.0, 1.0)
    return gate * torch.sigmoid(1.5 * gate) * (up + 0.5)


def tanh_gelu(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


CASES = {
    "identity": (ops.Identity(), lambda x: x),
    "gelu": (ops.GELU(), tanh_gelu),
    "relu": (ops.ReLU(), F.relu),
    "srelu": (ops.SReLU(), lambda x: F.relu(x) ** 2),
    "silu": (ops.SiLU(), F.silu),
    "geglu": (ops.GEGLU(), gated(tanh_gelu)),
    "reglu": (ops.ReGLU(), gated(F.relu)),
    "sreglu": (ops.SReGLU(), gated(lambda x: F.relu(x) ** 2)),
    "swiglu": (ops.SwiGLU(), gated(F.silu)),
    "clamped_swiglu": (ops.ClampedSwiGLU(1.0, 1.5, 0.5), clamped),
    "constant_scale": (ops.ConstantScale(-2.5), lambda x: -2.5 * x),
    "reshape": (ops.Reshape(-1, 3, 8), lambda x: x.reshape(-1, 3, 8)),
    "l2_norm": (ops.L2Norm(1e-6), lambda x: x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)),
    "dropout_eval": (ops.Dropout(0.5).eval(), lambda x: x),
}


@pytest.mark.parametrize("name", CASES)
def test_operation_equals_its_formula(name: str) -> None:
    operation, formula = CASES[name]
    torch.manual_seed(0)
    for shape in ((7, 24), (2, 3, 8), (0, 24)):
        if name == "reshape" and shape[0] == 0:
            continue
        x = torch.randn(*shape)
        for got, expected in zip(step(operation, None, [x]), step(operation, None, [x], run=formula), strict=True):
            torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("zero_centered", [False, True])
@pytest.mark.parametrize("kind", ["RMSNorm", "LayerNorm"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norms_equal_the_modules(kind: str, zero_centered: bool, dtype: torch.dtype) -> None:
    import te_models.layers as modules

    torch.manual_seed(0)
    options = {"zero_centered_gamma": zero_centered, "params_dtype": dtype}
    operation, module = getattr(ops, kind)(33, **options), getattr(modules, kind)(33, **options)
    with torch.no_grad():
        for parameter in operation.parameters():
            parameter.normal_()
    module.load_state_dict(operation.state_dict())
    x = torch.randn(4, 5, 33, dtype=dtype)
    assert_equal(step(module, None, [x]), step(operation, None, [x]))


def test_probabilities_are_one_for_each_row() -> None:
    with pytest.raises(ValueError, match=r"\(6, 1\); allowed with an input of shape \(6, 32\): \(6,\)"):
        ops.ScaledSwiGLU()(torch.randn(6, 32), torch.rand(6, 1))


@pytest.mark.parametrize("kind, function", [(ops.ScaledSwiGLU, F.silu), (ops.ScaledGEGLU, tanh_gelu)])
def test_scaled_glu_weights_each_row(kind: type, function: Callable) -> None:
    x, p = torch.randn(6, 16), torch.rand(6)
    got = step(kind(), None, [x, p])
    expected = step(kind(), None, [x, p], run=lambda x, p: gated(function)(x) * p[:, None])
    assert len(got) == 3
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


def test_bias_adds_and_sums_its_gradient_in_float32() -> None:
    operation = ops.Bias(16, params_dtype=torch.bfloat16)
    with torch.no_grad():
        operation.bias.normal_()
    x = torch.randn(1000, 16, dtype=torch.bfloat16)
    y, dx, db = step(operation, None, [x])
    assert torch.equal(y, x + operation.bias)
    assert torch.equal(db, dx.float().sum(0).to(torch.bfloat16))


def test_dropout_drops_its_share_and_keeps_the_mean() -> None:
    torch.manual_seed(0)
    operation = ops.Dropout(0.25)
    y, dx = step(operation, None, [torch.ones(100, 100)])
    dy = torch.linspace(-1, 1, 10000).view(100, 100)
    assert abs((y == 0).float().mean().item() - 0.25) < 0.02
    torch.testing.assert_close(y[y != 0], torch.full_like(y[y != 0], 4 / 3))
    torch.testing.assert_close(dx, y * dy)
    with pytest.raises(ValueError, match=r"p is 1\.0"):
        ops.Dropout(1.0)
