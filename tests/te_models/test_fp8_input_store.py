"""activation_func_fp8_input_store: forward as without it, derivatives at inputs rounded to E4M3, less memory."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from te_models import GPTModel, ModelConfig
from te_models.kernels.activation import Activation
from te_models.training import train
from tests.build import tiny, tiny_moe
from tests.training.runs import curve, tiny_run


def _inputs() -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    x, p, dy = torch.randn(6, 64), torch.rand(6), torch.randn(6, 32)
    x[0, 0] = 1000.0  # beyond E4M3, which saturates
    return x.requires_grad_(), p.requires_grad_(), dy


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_gradients_are_those_of_the_rounded_input(compiled: bool) -> None:
    x, p, dy = _inputs()
    storing, plain = Activation("silu", True, fp8_input_store=True), Activation("silu", True)

    def forward(x: Tensor, p: Tensor) -> Tensor:
        return storing.forward(x, p)

    function = torch.compile(forward, backend="aot_eager", fullgraph=True) if compiled else forward
    y = function(x, p)
    assert torch.equal(y, plain.forward(x, p))
    rounded = x.detach().clamp(-448, 448).to(torch.float8_e4m3fn).float().requires_grad_()
    right = torch.autograd.grad(plain.forward(rounded, p), (rounded, p), dy)
    found = torch.autograd.grad(y, (x, p), dy)
    assert all(torch.equal(a, b) for a, b in zip(found, right, strict=True))


def test_there_is_no_second_derivative() -> None:
    x, p, dy = _inputs()
    y = Activation("silu", True, fp8_input_store=True).forward(x, p)
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(y, x, dy, create_graph=True)


@pytest.mark.parametrize("config", [tiny(), tiny_moe()], ids=["dense", "mixture"])
def test_a_model_keeps_less(config: ModelConfig) -> None:
    kept: dict[bool, int] = {}
    losses = []
    for enabled in (False, True):
        torch.manual_seed(0)
        model = GPTModel(config)
        model.activation_func_fp8_input_store = enabled
        assert model.activation_func_fp8_input_store is enabled
        seen: dict[int, int] = {}

        def pack(t: Tensor, seen: dict[int, int] = seen) -> Tensor:
            seen[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
            return t

        ids = torch.arange(24).view(2, 12) % 32
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            losses.append(model(ids, labels=ids).loss)
        kept[enabled] = sum(seen.values())
    assert torch.equal(*losses) and kept[True] < kept[False]


def test_a_run_trains_with_it(tmp_path: Path) -> None:
    plain = tiny_run(tmp_path, "plain", steps=4)
    storing = tiny_run(tmp_path, "storing", steps=4, model=plain.model.replace(activation_func_fp8_input_store=True))
    for config in (plain, storing):
        train(config)
    first, others = zip(*zip(curve(plain), curve(storing), strict=True), strict=True)
    assert first[0][1] == others[0][1], "the first loss is of the same forward pass"
    assert first[-1][1] != others[-1][1] and first[-1][1] == pytest.approx(others[-1][1], rel=0.02)
