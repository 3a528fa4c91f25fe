"""MoELayer as on an accelerator: tokens are quantized on the way to their experts; results are those of the CPU."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

from te_models import ModelConfig, MoELayer, RouterConfig
from te_models.layers import autocast, recipe
from te_models.layers.gemm import grouped as grouped_function
from te_models.layers.gemm import product as gemm_operand
from te_models.layers.gemm import quantized_rows
from te_models.model.moe import dispatch
from tests.build import tiny_moe


def step(layer: MoELayer, name: str | None, run: Callable[..., object] | None = None) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(2, 16, layer.router.weight.shape[1], generator=generator).bfloat16().requires_grad_()
    layer.zero_grad()
    with autocast(enabled=name is not None, recipe=name and recipe(name)):
        y, routed = (layer if run is None else run)(x)
    y.backward(torch.randn(y.shape, generator=generator).bfloat16())
    assert routed.tokens_per_expert.sum() == 2 * 16 * 2
    return [y.detach(), x.grad, *(p.grad for p in layer.parameters())]


def built(config: ModelConfig) -> MoELayer:
    torch.manual_seed(0)
    layer = MoELayer(config).bfloat16()
    with torch.no_grad():
        for name, tensor in layer.named_parameters():
            if "bias" in name:
                tensor.normal_(std=0.2)
    return layer


CASES = {
    "block": (tiny_moe(), "block", "permute_quantized"),
    "mxfp8": (tiny_moe(), "mxfp8", "permute_quantized"),
    "shared": (tiny_moe(shared_expert_intermediate_size=40), "mxfp8", "permute_quantized"),
    "current": (tiny_moe(), "current", "permute"),
    "plain": (tiny_moe(), None, "permute"),
    "biases": (tiny_moe(bias=True), "mxfp8", "permute"),
    "weights on the input": (tiny_moe(RouterConfig(apply_on_input=True)), "mxfp8", "permute"),
}


@pytest.mark.filterwarnings("ignore:grouped_gemm.* runs as:RuntimeWarning")
@pytest.mark.parametrize("case", CASES)
def test_the_permuted_rows_are_made_quantized(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config, name, way = CASES[case]
    expected = step(built(config), name)
    monkeypatch.setattr(gemm_operand, "_DEQUANTIZING_DEVICES", ())
    calls: list[str] = []
    for where, which in ((grouped_function, "permute"), (dispatch, "permute"), (quantized_rows, "permute_quantized")):
        function = getattr(where, which)
        monkeypatch.setattr(where, which, lambda *a, w=which, f=function, **k: (calls.append(w), f(*a, **k))[1])
    found = step(built(config), name)
    assert calls == [way]
    for got, want in zip(found, expected, strict=True):
        assert want.float().norm() > 0
        assert (got.float() - want.float()).norm() <= 2.0**-7 * want.float().norm()


@pytest.mark.slow
def test_one_graph_whatever_the_router_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gemm_operand, "_DEQUANTIZING_DEVICES", ())
    layer = built(tiny_moe())
    compiled = torch.compile(layer, fullgraph=True, backend="eager")
    for seed in range(2):
        with torch.no_grad():
            layer.router.weight.copy_(
                torch.randn(layer.router.weight.shape, generator=torch.Generator().manual_seed(seed))
            )
        expected = step(layer, "mxfp8")
        found = step(layer, "mxfp8", compiled)
        for got, want in zip(found, expected, strict=True):
            torch.testing.assert_close(got, want, rtol=2.0**-7, atol=2.0**-7 * float(want.abs().max()))
    assert counters["stats"]["unique_graphs"] == 1 and not counters["graph_break"]
