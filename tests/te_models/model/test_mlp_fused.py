"""GPTModel's MLP on an accelerator: what the activation makes is quantized as it is made, and no bit changes."""

import copy

import pytest
import torch
from torch import Tensor

from te_models.kernels.quantize import QuantizedOutput
from te_models.layers import autocast, recipe
from te_models.layers.gemm import autograd as dense
from te_models.layers.gemm import product as gemm_operand
from te_models.model.build import Build
from te_models.model.mlp import MLP
from tests.build import tiny


def step(mlp: MLP, name: str | None) -> list[Tensor]:
    """Return y, the gradients and the recorded amaxes of one pass of a copy."""
    mlp = copy.deepcopy(mlp)
    x = torch.randn(3, 7, mlp.linear_fc1.in_features, generator=torch.Generator().manual_seed(0)).requires_grad_()
    with autocast(enabled=name is not None, recipe=recipe(name) if name else None):
        y = mlp(x)
        amax = mlp.linear_fc2.fp8_amax.clone()
    y.square().sum().backward()
    return [y.detach(), x.grad, amax, *(p.grad for p in mlp.parameters())]


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize(("name", "fused"), [("mxfp8", 2), ("delayed", 2), ("current", 0), (None, 0)])
def test_no_bit_changes(name: str | None, fused: int, gated: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tiny()
    mlp = MLP(config.replace(mlp=config.mlp.replace(gated=gated)), 96, False, Build(), normed=True)
    on_cpu = step(mlp, None)
    monkeypatch.setattr(gemm_operand, "_DEQUANTIZING_DEVICES", ())
    defined: list[QuantizedOutput] = []
    define = QuantizedOutput.define
    monkeypatch.setattr(QuantizedOutput, "define", lambda self, *a: (defined.append(self), define(self, *a))[1])
    got = step(mlp, name)
    assert len(defined) == fused  # the norm's result and the activation's
    monkeypatch.setattr(dense, "input_quantizer", lambda *arguments: None)
    for a, b in zip(step(mlp, name), got, strict=True):
        assert torch.equal(a, b)
    assert len(defined) == fused
    if name is None:
        assert all(torch.equal(a, b) for a, b in zip(on_cpu, got, strict=True))
