"""The values of a quantized tensor are a plain one, however asked for; writing to it leaves the quantized one."""

import contextlib
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from te_models.layers import GroupedTensor, QuantizedTensor
from tests.build import weight_quantizers

FORMATS = weight_quantizers()
F32 = torch.float32
WAYS: dict[str, Callable[[QuantizedTensor], Tensor]] = {
    "detach, clone, float": lambda w: w.detach().clone().float(),
    "clone, detach, float": lambda w: w.clone().detach().float(),
    "detach, float": lambda w: w.detach().float(),
    "detach, float, clone": lambda w: w.detach().float().clone(),
    "detach, to": lambda w: w.detach().to(F32),
    "detach, clone, to, copy": lambda w: w.detach().clone().to(F32, copy=True),
    "detach, type": lambda w: w.detach().type(F32),
    "detach, double": lambda w: w.detach().double(),
    "detach, cpu, float": lambda w: w.detach().cpu().float(),
    "data, float": lambda w: w.data.float(),
    "detach, dequantize": lambda w: w.detach().dequantize(),
    "dequantize, detach": lambda w: w.dequantize().detach(),
    "dequantize to float32, detach": lambda w: w.dequantize(F32).detach(),
    "float, detach": lambda w: w.float().detach(),
    "rows, float": lambda w: w.detach().flatten(0, -2).clone().float() if w.dim() == 2 else w.detach()[1].float(),
}
"""How a float32 master or an average is started."""


@pytest.fixture(params=[(n, g) for n in FORMATS for g in (False, True)], ids=lambda p: f"{p[0]}-{'grouped' * p[1]}")
def weight(request: pytest.FixtureRequest) -> QuantizedTensor:
    name, grouped = request.param
    torch.manual_seed(0)
    x = torch.randn(3, 40, 72).bfloat16() if grouped else torch.randn(40, 72).bfloat16()
    return nn.Parameter(FORMATS[name].quantize_grouped(x) if grouped else FORMATS[name].quantize(x))


@pytest.mark.parametrize(
    "mode", [contextlib.nullcontext, torch.no_grad, torch.inference_mode], ids=lambda m: m.__name__
)
def test_values_are_a_tensor_of_their_own(
    mode: Callable[[], contextlib.AbstractContextManager], weight: QuantizedTensor
) -> None:
    before = weight.detach().dequantize()
    for name, way in WAYS.items():
        with mode():
            master = way(weight)
            assert type(master) is Tensor, name
            expected = master + 1
        if mode is torch.inference_mode:
            with mode():
                master.add_(torch.ones_like(master))
        else:
            assert master.is_leaf, name
            if name != "dequantize, detach" and name != "float, detach":  # views of what autograd made
                assert not master._is_view(), name
            master.add_(torch.ones_like(master))
        assert torch.equal(master, expected), name
        if mode is not torch.inference_mode:
            trained = master.requires_grad_()
            (trained * trained).sum().backward()
            assert torch.equal(trained.grad, 2 * trained), name
            with torch.no_grad():
                trained.sub_(trained.grad)
    assert torch.equal(weight.detach().dequantize(), before)


def test_views_share_their_fields_in_inference_mode(weight: QuantizedTensor) -> None:
    whole = weight.detach().dequantize()
    with torch.inference_mode():
        found = {"detach": weight.detach(), "alias": torch.ops.aten.alias(weight)}
        if isinstance(weight, GroupedTensor):
            found |= {"select": weight[1], "unbind": weight.unbind(0)[1]}
    for name, view in found.items():
        wanted = whole[1] if name in ("select", "unbind") else whole
        assert isinstance(view, QuantizedTensor)
        assert torch.equal(view.dequantize(), wanted), name


def test_members_of_a_grouped_tensor_give_masters() -> None:
    stack = FORMATS["mxfp8"].quantize_grouped(torch.randn(3, 32, 64))
    for member in (*stack.unbind(0), stack[1]):
        master = member.detach().clone().float()
        master.add_(1)
        assert torch.equal(master, member.dequantize() + 1)
