"""Layers whose norm or activation hands FP8 over: the fused Triton kernel, against the plain one and quantization."""

from typing import Any

import pytest
import torch

from te_models.kernels.activation import Activation
from te_models.kernels.activation import op as activation_op
from te_models.kernels.activation import quantized as activation_quantized
from te_models.kernels.custom_op import flatten
from te_models.kernels.norm import Norm
from te_models.kernels.norm import op as norm_op
from te_models.kernels.norm import quantized as norm_quantized
from te_models.layers import LayerNormLinear, LayerNormMLP
from te_models.layers.gemm import autograd as dense
from te_models.layers.gemm import product as gemm_operand
from tests.layers.te.ops.steps import assert_equal, step

MODULES = {
    "layer_norm": lambda **o: LayerNormLinear(96, 64, **o),
    "rms_norm": lambda **o: LayerNormLinear(96, 64, normalization="RMSNorm", zero_centered_gamma=True, **o),
    "swiglu": lambda **o: LayerNormMLP(96, 64, normalization="RMSNorm", activation="swiglu", **o),
    "gelu": lambda **o: LayerNormMLP(96, 64, **o),
}


def kernels_as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Norms and activations of the layers run their Triton kernels on CPU, too; return the fused ones that ran."""
    fused: list[str] = []
    monkeypatch.setattr(gemm_operand, "_DEQUANTIZING_DEVICES", ())

    def rms_norm(x: Any, weight: Any, eps: float, *, zero_centered: bool, cast_order: str) -> torch.Tensor:
        return norm_op.norm_fwd(x, weight, None, eps, False, zero_centered, cast_order == "weight_last")[0]

    def layer_norm(x: Any, weight: Any, bias: Any, eps: float, *, zero_centered: bool, cast_order: str) -> torch.Tensor:
        return norm_op.norm_fwd(x, weight, bias, eps, True, zero_centered, cast_order == "weight_last")[0]

    def norm_forward_quantized(self: Norm, x: Any, weight: Any, bias: Any, output: Any, scale: Any) -> Any:
        fused.append("norm")
        found = norm_quantized.norm_quantized(x, weight, bias, self.eps, *self._flags(), scale, *flatten(output))
        return list(found[:-2]), tuple(found[-2:])

    def options(a: Activation) -> tuple[Any, ...]:
        return a.name, a.gated, a.clamp, a.alpha, a.up_offset

    def forward_quantized(self: Activation, x: Any, probabilities: Any, output: Any, scale: Any) -> Any:
        fused.append("activation")
        return activation_quantized.activation_quantized_op(x, None, *options(self), scale, *flatten(output))

    monkeypatch.setattr(norm_op, "rms_norm", rms_norm)
    monkeypatch.setattr(norm_op, "layer_norm", layer_norm)
    monkeypatch.setattr(Norm, "forward_quantized", norm_forward_quantized)
    monkeypatch.setattr(Activation, "forward", lambda self, x: activation_op.activation_fwd(x, None, *options(self)))
    monkeypatch.setattr(Activation, "forward_quantized", forward_quantized)
    backward = activation_op.activation_bwd
    monkeypatch.setattr(Activation, "backward", lambda self, dy, x: backward(dy, x, None, *options(self), False))
    return fused


@pytest.mark.matrix
@pytest.mark.parametrize("name", ["delayed", "block", "mxfp8"])
@pytest.mark.parametrize("kind", MODULES)
def test_fusing_changes_no_bit(kind: str, name: str, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    module = MODULES[kind](params_dtype=torch.bfloat16, device=device)
    x = torch.randn(35, 96, device=device, dtype=torch.bfloat16)
    if device.type == "cpu":
        fused = kernels_as_on_a_gpu(monkeypatch)
        got = step(module, name, [x])
        assert fused == (["norm", "activation"] if isinstance(module, LayerNormMLP) else ["norm"])
    else:
        got = step(module, name, [x])
    monkeypatch.setattr(dense, "input_quantizer", lambda *arguments: None)
    assert_equal(step(module, name, [x]), got)
    if device.type == "cpu":
        assert len(fused) == (2 if isinstance(module, LayerNormMLP) else 1)
