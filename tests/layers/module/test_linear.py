"""What Linear, GroupedLinear and their relatives do under each recipe; the numbers: test_gemm_numerics."""

import math

import pytest
import torch

import te_models.layers as te
from tests.compare import refused
from tests.layers import emulation as em
from tests.layers.gemm.test_gemm_numerics import UNIT, assert_within

ALL = [
    te.DelayedScaling(),
    te.Float8CurrentScaling(),
    te.Float8BlockScaling(),
    te.MXFP8BlockScaling(),
    # random bits depend on where a row stands among all rows
    te.NVFP4BlockScaling(disable_stochastic_rounding=True),
]


def named(value: object) -> str | None:
    return value.NAME if isinstance(value, te.Recipe) else None


@pytest.mark.parametrize("chosen", [None, *ALL], ids=named)
@pytest.mark.parametrize("splits", [[0, 0, 0], [7, 0, 0], [0, 0, 7], [1, 1, 5], [16, 33, 17]], ids=str)
def test_grouped_linear_equals_a_linear_per_group(chosen: te.Recipe | None, splits: list[int]) -> None:
    rows = sum(splits)
    layer = te.GroupedLinear(3, 64, 32, bias=True)
    with torch.no_grad():
        layer.bias.normal_()
    x = torch.randn(rows, 64, requires_grad=True)
    dy = torch.randn(rows, 32)
    with te.autocast(enabled=chosen is not None, recipe=chosen):
        y = layer(x, splits)
    y.backward(dy)
    begin = 0
    for g, size in enumerate(splits):
        single = te.Linear(64, 32)
        with torch.no_grad():
            single.weight.copy_(layer.weight[g])
            single.bias.copy_(layer.bias[g])
        part = x[begin : begin + size].detach().requires_grad_()
        with te.autocast(enabled=chosen is not None, recipe=chosen):
            expected = single(part)
        expected.backward(dy[begin : begin + size])
        torch.testing.assert_close(y[begin : begin + size], expected, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(x.grad[begin : begin + size], part.grad, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(layer.weight.grad[g], single.weight.grad, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(layer.bias.grad[g], single.bias.grad, rtol=1e-5, atol=1e-5)
        begin += size


def test_rows_past_the_last_group_are_zero_and_get_no_gradient() -> None:
    layer = te.GroupedLinear(2, 32, 16, bias=True)
    with torch.no_grad():
        layer.bias.fill_(1.0)
    for chosen in (None, *ALL, te.NVFP4BlockScaling()):
        x = torch.randn(9, 32, requires_grad=True)
        with te.autocast(enabled=chosen is not None, recipe=chosen):
            y = layer(x, torch.tensor([3, 2]))
        y.sum().backward()
        assert torch.count_nonzero(y[5:]) == 0 and torch.count_nonzero(x.grad[5:]) == 0
        assert torch.count_nonzero(x.grad[:5]) > 0


@pytest.mark.parametrize("chosen", [None, te.MXFP8BlockScaling()], ids=str)
def test_integers_are_refused(chosen: te.Recipe | None) -> None:
    """Computing in the input's dtype would round the weights to integers, nearly all of them to 0."""
    splits = torch.tensor([2, 2])
    x = torch.ones(4, 32, dtype=torch.int64)
    for layers in (te, te.ops):
        linear, grouped = layers.Linear(32, 16), layers.GroupedLinear(2, 32, 16, bias=False)
        with te.autocast(enabled=chosen is not None, recipe=chosen):
            for run in (lambda: linear(x), lambda: grouped(x, splits)):  # noqa: B023
                refused(run, "the input has dtype torch.int64; allowed: a floating-point dtype")


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return ((a - b).norm() / b.norm()).item()


@pytest.mark.parametrize("name, expected", [("current", 0.038), ("block", 0.038), ("mxfp8", 0.038), ("nvfp4", 0.146)])
def test_quantization_error_has_the_published_size(name: str, expected: float) -> None:
    """That of NVFP4 is 0.095 of 1x16 blocks and 0.111 of 16x16 ones."""
    layer, x = te.Linear(128, 256), torch.randn(512, 128)
    with te.autocast(recipe=te.recipe(name)):
        y = layer(x)
    assert math.isclose(relative(y, layer(x)), expected, rel_tol=0.05)


def test_float32_block_scales_multiply_in_float32() -> None:
    """A float32 scale times an FP8 value is not exact in bfloat16, so those operands must not be rounded to it."""
    layer, x = te.Linear(256, 64, bias=False, params_dtype=torch.bfloat16), torch.randn(32, 256, dtype=torch.bfloat16)
    with te.autocast(recipe=te.Float8BlockScaling(use_f32_scales=True)):
        y = layer(x)
    left = em.quantize(x.float().numpy(), (1, 128), em.E4M3, "float32").values
    right = em.quantize(layer.weight.detach().float().numpy(), (128, 128), em.E4M3, "float32").values
    assert_within(y, left, right.T)


@pytest.mark.parametrize("chosen", ALL, ids=named)
def test_fused_modules_equal_their_parts(chosen: te.Recipe) -> None:
    x = torch.randn(6, 64)
    fused = te.LayerNormLinear(64, 32, normalization="RMSNorm")
    plain = te.Linear(64, 32)
    plain.load_state_dict({"weight": fused.weight, "bias": fused.bias})
    mlp = te.LayerNormMLP(64, 96, activation="swiglu")
    fc1, fc2 = te.Linear(64, 192), te.Linear(96, 64)
    fc1.load_state_dict({"weight": mlp.fc1_weight, "bias": mlp.fc1_bias})
    fc2.load_state_dict({"weight": mlp.fc2_weight, "bias": mlp.fc2_bias})
    with te.autocast(recipe=chosen):
        assert torch.equal(fused(x), plain(torch.nn.functional.rms_norm(x, (64,), eps=1e-5)))
        gate, up = fc1(torch.nn.functional.layer_norm(x, (64,))).chunk(2, -1)
        assert torch.equal(mlp(x), fc2(torch.nn.functional.silu(gate) * up))


def test_torch_autocast_decides_the_compute_dtype() -> None:
    layer, x = te.Linear(64, 32), torch.randn(4, 64)
    with torch.amp.autocast("cpu", dtype=torch.bfloat16):
        assert layer(x).dtype == torch.bfloat16
        with te.autocast(recipe=te.recipe("mxfp8")):
            y = layer(x)
    assert y.dtype == torch.bfloat16
    y.float().sum().backward()
    assert layer.weight.grad.dtype == torch.float32


def test_a_single_row_calibrates() -> None:
    layer, x = te.Linear(64, 32), torch.randn(64)
    with te.autocast(enabled=False, calibrating=True, recipe=te.DelayedScaling()):
        y = layer(x)
    assert y.shape == (32,) and layer.fp8_history[0, 0, 0] == x.abs().max()


def test_the_gradient_of_a_wide_bias_is_not_rounded_on_its_way() -> None:
    """A float32 bias under bfloat16 compute: the rows are summed in float32, and nothing rounds the sum."""
    layer, x, dy = te.Linear(32, 16), torch.randn(64, 32), torch.randn(64, 16).bfloat16()
    with torch.amp.autocast("cpu", torch.bfloat16), te.autocast(recipe=te.MXFP8BlockScaling()):
        y = layer(x)
    y.backward(dy)
    torch.testing.assert_close(layer.bias.grad.double(), dy.double().sum(0), rtol=64 * UNIT[torch.float32], atol=1e-6)


def test_stored_format_must_be_the_recipes() -> None:
    with te.quantized_model_init(recipe=te.recipe("mxfp8")):
        layers = [(te.Linear(64, 32), ()), (te.GroupedLinear(2, 64, 32, bias=False), ([2, 2],))]
    for layer, rest in layers:
        with pytest.raises(ValueError, match="stored as mxfp8"), te.autocast(recipe=te.recipe("block")):
            layer(torch.randn(4, 64), *rest)


@pytest.mark.parametrize("name", ["delayed", "current", "block", "mxfp8", "nvfp4"])
@pytest.mark.parametrize("grouped", [False, True])
def test_without_autocast_quantized_weights_compute_and_train_in_high_precision(name: str, grouped: bool) -> None:
    with te.quantized_model_init(recipe=te.recipe(name)):
        layer = te.GroupedLinear(2, 64, 32, bias=False) if grouped else te.Linear(64, 32, bias=False)
    x = torch.randn(5, 64)
    y = layer(x, [2, 3]) if grouped else layer(x)
    w = layer.weight.dequantize()
    torch.testing.assert_close(y, torch.cat([x[:2] @ w[0].t(), x[2:] @ w[1].t()]) if grouped else x @ w.t())
    y.sum().backward()
    assert layer.weight.grad.shape == layer.weight.shape and torch.count_nonzero(layer.weight.grad) > 0
