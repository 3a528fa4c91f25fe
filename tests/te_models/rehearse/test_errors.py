"""Errors of operands and products against values that are computed here, by the definitions of the formats."""

import math

import pytest
import torch

from te_models import GPTModel
from te_models.layers import DelayedScaling
from te_models.rehearse.errors import decibels, format_errors
from te_models.rehearse.formats import FORMATS
from te_models.rehearse.observe import Product, evenly, observe, unit_groups, units_of
from te_models.training.data.windows import Batch
from tests.training.runs import tiny_model

E4M3_MAX = 448.0


def mxfp8_by_hand(x: torch.Tensor) -> torch.Tensor:
    """Rows of blocks of 32: the scale is the power of two above amax / 448, values are rounded to E4M3."""
    blocks = x.double().view(x.shape[0], -1, 32)
    scale = torch.exp2(torch.ceil(torch.log2(blocks.abs().amax(-1, keepdim=True) / E4M3_MAX)))
    _, exponent = torch.frexp(blocks / scale)
    step = torch.exp2(torch.clamp(exponent.double() - 1, min=-6) - 3)  # three bits; subnormal below 2^-6
    return ((blocks / scale / step).round() * step * scale).view_as(x)


def db(exact: torch.Tensor, rounded: torch.Tensor) -> float:
    noise = (exact.double() - rounded).square().sum()
    return float(10 * torch.log10(exact.double().square().sum() / noise))


def test_signal_to_noise_of_mxfp8_is_that_of_the_definition() -> None:
    x, weight, dy = torch.randn(64, 32), torch.randn(96, 32) * 0.02, torch.randn(64, 96) * 1e-4
    found = format_errors(Product([x], [weight], [dy]), FORMATS["mxfp8"].value()).to_dict()
    xq, xq_columns = mxfp8_by_hand(x), mxfp8_by_hand(x.T.contiguous()).T
    wq, wq_columns = mxfp8_by_hand(weight), mxfp8_by_hand(weight.T.contiguous()).T
    dyq, dyq_columns = mxfp8_by_hand(dy), mxfp8_by_hand(dy.T.contiguous()).T
    expected = {
        "x.fprop": db(x, xq),
        "x.wgrad": db(x, xq_columns),
        "weight.fprop": db(weight, wq),
        "weight.dgrad": db(weight, wq_columns),
        "dy.dgrad": db(dy, dyq),
        "dy.wgrad": db(dy, dyq_columns),
        "y": db(x.double() @ weight.double().T, xq @ wq.T),
        "dx": db(dy.double() @ weight.double(), dyq @ wq_columns),
        "dw": db(dy.double().T @ x.double(), dyq_columns.T @ xq_columns),
    }
    assert {name: found[name] for name in expected} == pytest.approx(expected, abs=1e-3)
    change = ((xq @ wq.T - x.double() @ weight.double().T) * dy).sum(-1).square().sum()
    assert found["fisher"] == pytest.approx(float(change), rel=1e-3)
    assert found["x.flushed"] == found["x.saturated"] == found["x.pinned"] == 0


def test_what_is_lost_is_counted() -> None:
    """A value of 2^-20 beside one of 1 becomes zero in E4M3; a block far below 2^-127 has the smallest scale byte."""
    x = torch.zeros(2, 64)
    x[0, 0], x[0, 1], x[0, 2] = 1.0, 2.0**-20, 2.0**-5
    x[1, 32] = 2.0**-130
    ones = torch.ones(32, 64)
    found = format_errors(Product([x], [ones], [torch.ones(2, 32)]), FORMATS["mxfp8"].value()).to_dict()
    assert found["x.flushed"] == pytest.approx(1 / 4)
    assert found["x.pinned"] == pytest.approx(1 / 2), "of the two blocks that are not all zeros"
    assert found["weight.flushed"] == 0 and found["weight.fprop"] is None, "ones are exact"


def test_delayed_scaling_saturates_what_is_larger_than_a_step_before() -> None:
    weight, dy = torch.ones(16, 16), torch.ones(16, 16)
    before, now = torch.ones(16, 16), torch.ones(16, 16)
    now[0] = 4.0
    earlier = Product([before], [weight], [dy])
    found = format_errors(Product([now], [weight], [dy]), FORMATS["delayed"].value(), earlier).to_dict()
    assert found["x.saturated"] == pytest.approx(1 / 16)
    noise, signal = 16 * 9.0, 16 * 16.0 + 240
    assert found["x.fprop"] == pytest.approx(10 * math.log10(signal / noise), abs=1e-3)
    assert found["y"] == pytest.approx(10 * math.log10((64**2 + 15 * 16**2) / 48**2), abs=1e-3)
    with pytest.raises(ValueError, match="scales by an earlier step"):
        format_errors(earlier, DelayedScaling())
    assert decibels(1.0, 0.0) is None and decibels(0.0, 0.0) is None


@pytest.mark.parametrize("moe", [False, True])
def test_every_layer_is_seen(moe: bool) -> None:
    """Products of what was seen are what the layers returned, experts each with its rows."""
    model = GPTModel(tiny_model(moe=moe), params_dtype=torch.float32)
    units = units_of(model)
    assert unit_groups(units) == ["decoder.layers.0", "decoder.layers.1"] and len(units) == 8
    ids = torch.randint(257, (2, 16))
    seen = observe(model, Batch(ids), {unit.name for unit in units}, torch.float32)
    assert {*seen} == {unit.name for unit in units}
    assert all(p.requires_grad for p in model.parameters()) and all(p.grad is None for p in model.parameters())
    model(ids, labels=ids).loss.backward()
    named = dict(model.named_parameters())
    for unit in units:
        product, gradient = seen[unit.name], named[f"{unit.name}.weight"].grad
        assert gradient is not None
        assert sum(x.shape[0] for x in product.x) == (64 if "experts" in unit.name else 32)
        sums = [dy.T @ x for x, dy in zip(product.x, product.dy, strict=True)]
        used = [g for g in gradient.unbind(0) if g.any()] if gradient.dim() == 3 else [gradient]
        torch.testing.assert_close(sums, used, rtol=1e-4, atol=1e-7)
    assert [u.flops for u in units[:4]] == [64 * 128, 64 * 64, 64 * 128 * 2, 64 * 64 * 2]


def test_layers_at_even_distances() -> None:
    layers = [f"decoder.layers.{i}" for i in range(30)]
    assert evenly(layers, 3) == [layers[0], layers[14], layers[29]]
    assert evenly(layers, 1) == [layers[0]] and evenly(layers[:2], 5) == layers[:2]
