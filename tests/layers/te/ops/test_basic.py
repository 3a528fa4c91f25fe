"""Each basic operation against what torch's autograd says of the same formula."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from te_models.layers import autocast, ops
from te_models.layers.quantizer.state import QuantizerState, with_gradient_state
from tests.layers.te.ops.steps import assert_equal, fresh, step


def gated(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    def run(x: Tensor) -> Tensor:
        gate, up = x.chunk(2, -1)
        return function(gate) * up

    return run


def clamped(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, -1)
    gate, up = gate.clamp(max=1.0), up.clamp(-1.0, 1.0)
    return gate * torch.sigmoid(1.5 * gate) * (up + 0.5)


def quick_gelu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(1.702 * x)


def interleaved(function: Callable[[Tensor], Tensor], size: int) -> Callable[[Tensor], Tensor]:
    """The function of gate and up that come in alternating blocks of columns."""

    def run(x: Tensor) -> Tensor:
        blocks = x.split(size, -1)
        return function(torch.cat((*blocks[::2], *blocks[1::2]), -1))

    return run


def tanh_gelu(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


CASES = {
    "identity": (ops.Identity(), lambda x: x),
    "gelu": (ops.GELU(), tanh_gelu),
    "relu": (ops.ReLU(), F.relu),
    "srelu": (ops.SReLU(), lambda x: F.relu(x) ** 2),
    "silu": (ops.SiLU(), F.silu),
    "qgelu": (ops.QGELU(), quick_gelu),
    "glu": (ops.GLU(), gated(torch.sigmoid)),
    "qgeglu": (ops.QGEGLU(), gated(quick_gelu)),
    "blocks of geglu": (ops.GEGLU(glu_interleave_size=4), interleaved(gated(tanh_gelu), 4)),
    "blocks of clamped": (ops.ClampedSwiGLU(1.0, 1.5, 0.5, glu_interleave_size=4), interleaved(clamped, 4)),
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
        if (name == "reshape" and shape[0] == 0) or (name.startswith("blocks") and shape[-1] != 24):
            continue
        x = torch.randn(*shape)
        expected = step(operation, None, [x], run=formula)
        torch.testing.assert_close(step(operation, None, [x]), expected, rtol=1e-6, atol=1e-6)


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


SCALED = {
    "swiglu": (ops.ScaledSwiGLU(), gated(F.silu)),
    "geglu": (ops.ScaledGEGLU(), gated(tanh_gelu)),
    "srelu": (ops.ScaledSReLU(), lambda x: F.relu(x) ** 2),
    "clamped": (ops.ScaledClampedQGeGLU(limit=1.0, alpha=1.5, glu_linear_offset=0.5), clamped),
    "blocks of swiglu": (ops.ScaledSwiGLU(2), interleaved(gated(F.silu), 2)),
    "blocks of clamped": (
        ops.ScaledClampedQGeGLU(2, limit=1.0, alpha=1.5, glu_linear_offset=0.5),
        interleaved(clamped, 2),
    ),
}


@pytest.mark.parametrize("name", SCALED)
def test_scaled_activations_weight_each_row(name: str) -> None:
    operation, function = SCALED[name]
    x, p = torch.randn(6, 16), torch.rand(6)
    got = step(operation, None, [x, p])
    expected = step(operation, None, [x, p], run=lambda x, p: function(x) * p[:, None])
    assert len(got) == 3
    torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-6)


def test_blocks_of_gate_and_up_have_a_size_that_fits() -> None:
    with pytest.raises(ValueError, match="glu_interleave_size is 0; allowed: a positive number of columns, or None"):
        ops.SwiGLU(glu_interleave_size=0)
    with pytest.raises(ValueError, match="the input has 24 columns; allowed with glu_interleave_size 8: a multiple"):
        ops.SwiGLU(glu_interleave_size=8)(torch.randn(2, 24))
    with pytest.raises(ValueError, match="cache_quantized_input is True, which this library does not have"):
        ops.ClampedSwiGLU(cache_quantized_input=True)


@pytest.mark.parametrize("centered", [False, True])
def test_norms_over_several_dimensions(centered: bool) -> None:
    """As of the same numbers in one dimension; in a group, too, where the next GEMM's rows are others."""
    import te_models.layers as modules

    torch.manual_seed(0)
    kind = "LayerNorm" if centered else "RMSNorm"
    operation, module = getattr(ops, kind)((3, 32), dtype=torch.float32, sm_margin=2), getattr(modules, kind)([3, 32])
    one = getattr(modules, kind)(normalized_shape=96)
    assert operation.weight.shape == module.weight.shape == (3, 32)
    with torch.no_grad():
        for parameter, flat in zip(operation.parameters(), one.parameters(), strict=True):
            flat.copy_(parameter.normal_().flatten())
    module.load_state_dict(operation.state_dict())
    x = torch.randn(4, 5, 3, 32)
    expected = step(one, None, [x.flatten(-2)])
    for layer in (operation, module):
        assert_equal([t.flatten() for t in expected], [t.flatten() for t in step(layer, None, [x])])
    linear = ops.Linear(32, 16)
    together = step(ops.Sequential(operation, linear), "mxfp8", [x])
    assert_equal(step(torch.nn.Sequential(module, linear), "mxfp8", [x]), together)
    for layer in (operation, module):
        with pytest.raises(ValueError, match=r"the input has shape \(2, 32, 3\); allowed: \[\.\.\., 3, 32\]"):
            layer(torch.randn(2, 32, 3))


def test_an_extra_input_is_added_to_in_place() -> None:
    x, extra = torch.randn(4, 8, requires_grad=True), torch.randn(4, 8)
    expected = x.detach() + extra
    into = extra.clone()
    y = ops.AddExtraInput(in_place=True)(x, into)
    assert torch.equal(y, expected) and torch.equal(into, expected) and y.data_ptr() == into.data_ptr()
    y.sum().backward()
    assert torch.equal(x.grad, torch.ones_like(x))
    fused = ops.Sequential(ops.Linear(8, 8), ops.AddExtraInput(in_place=True))
    into = extra.clone()
    torch.testing.assert_close(fused(x, into), F.linear(x, fused[0].weight) + extra)
    torch.testing.assert_close(into, F.linear(x.detach(), fused[0].weight.detach()) + extra)
    with pytest.raises(ValueError, match=r"is torch.float32 \(8,\); allowed with in_place: torch.float32 \(4, 8\)"):
        ops.AddExtraInput(in_place=True)(x, torch.zeros(8))
    got, same = (
        step(ops.Sequential(ops.MakeExtraOutput(**o), ops.GELU()), None, [x]) for o in ({}, {"in_place": True})
    )
    assert_equal(got, same)


def test_arguments_under_their_names() -> None:
    layer = ops.BasicLinear(4, 6, dtype=torch.bfloat16, accumulate_into_main_grad=True, tensor_parallel_mode=None)
    assert layer.weight.dtype is torch.bfloat16 and layer.fuse_wgrad_accumulation
    assert ops.Bias(4, dtype=torch.bfloat16, tensor_parallel=False).bias.dtype is torch.bfloat16
    grouped = ops.GroupedLinear(num_groups=2, in_features=4, out_features=6, dtype=torch.bfloat16)
    assert grouped.weight.shape == (2, 6, 4) and grouped.weight.dtype is torch.bfloat16
    assert ops.Linear(4, 6, tensor_parallel_mode="column").weight.partition_dim == 0  # of one rank
    with pytest.raises(ValueError, match=r"userbuffers_options is .*, which this library does not have; allowed: None"):
        ops.BasicLinear(4, 6, userbuffers_options={"comm_name": "qkv"})
    with pytest.raises(ValueError, match="dtype and params_dtype are both given; allowed: one, they are the same"):
        ops.Linear(4, 6, dtype=torch.float32, params_dtype=torch.float32)


def test_linear_has_its_parameters_as_attributes() -> None:
    x = torch.randn(3, 4)
    layer = ops.Linear(4, 6)
    assert layer.weight is layer.linear.weight and list(layer.state_dict()) == ["linear.weight", "bias.bias"]
    layer.weight, layer.bias = torch.nn.Parameter(torch.ones(6, 4)), torch.nn.Parameter(torch.ones(6))
    torch.testing.assert_close(layer(x), x.sum(1, keepdim=True).expand(3, 6) + 1)
    theirs = {"basic_ops.0.weight": torch.randn(6, 4), "basic_ops.1.bias": torch.randn(6)}
    extra = {f"basic_ops.{i}._extra_state": torch.empty(0, dtype=torch.uint8) for i in (0, 1)}
    ops.Sequential(layer).load_state_dict({f"0.{key}": value for key, value in (theirs | extra).items()})
    torch.testing.assert_close(layer(x), F.linear(x, *theirs.values()))
    assert ops.Linear(4, 6, bias=False).bias is None
    with pytest.raises(ValueError, match="was built with bias=False and has no bias to exchange"):
        ops.Linear(4, 6, bias=False).bias = torch.nn.Parameter(torch.ones(6))


def test_main_gradients_of_operations() -> None:
    plain, fused = ops.Linear(8, 16), ops.Linear(8, 16, accumulate_into_main_grad=True)
    fused.load_state_dict(plain.state_dict())
    fused.weight.main_grad = torch.ones(16, 8)
    x = torch.randn(5, 8)
    for layer in (plain, fused):
        layer(x).square().sum().backward()
    assert fused.weight.grad is None
    torch.testing.assert_close(fused.weight.main_grad, plain.weight.grad + 1)


@pytest.mark.parametrize("name", ["delayed", "current", "block", "mxfp8", "nvfp4"])
def test_quantize_rounds_the_gradient(name: str) -> None:
    """Bit for bit to what the recipe's quantizer of gradients makes of it; neither direction where it is not asked."""
    x = torch.randn(32, 64, requires_grad=True)
    dy = torch.randn(32, 64)
    backward, neither = ops.Quantize(forward=False, backward=True), ops.Quantize(forward=False)
    chosen = fresh(name)
    for operation in (backward, neither):
        with autocast(recipe=chosen):
            y = operation(x)
            assert torch.equal(y, x)
            (dx,) = torch.autograd.grad(y, x, dy)
        state = QuantizerState(gradient=torch.ones(3, 1))
        quantizer = with_gradient_state(chosen.quantizers("Quantize", "").grad_output, state, lambda: torch.ones(1), 0)
        assert torch.equal(dx, quantizer.quantize(dy).dequantize() if operation is backward else dy)
    whole = ops.Sequential(ops.Linear(64, 48), ops.Quantize(forward=False, backward=True))
    apart = torch.nn.Sequential(whole[0], ops.Quantize(forward=False, backward=True))
    assert_equal(step(apart, name, [x]), step(whole, name, [x]))


def test_bias_adds_and_sums_its_gradient_in_float32() -> None:
    operation = ops.Bias(16, params_dtype=torch.bfloat16)
    with torch.no_grad():
        operation.bias.normal_()
    x = torch.randn(1000, 16, dtype=torch.bfloat16)
    y, dx, db = step(operation, None, [x])
    assert torch.equal(y, x + operation.bias) and torch.equal(db, dx.float().sum(0).to(torch.bfloat16))


def test_dropout_drops_its_share_and_keeps_the_mean() -> None:
    y, dx = step(ops.Dropout(0.25), None, [torch.ones(100, 100)])
    dy = torch.linspace(-1, 1, 10000).view(100, 100)
    assert abs((y == 0).float().mean().item() - 0.25) < 0.02
    torch.testing.assert_close(y[y != 0], torch.full_like(y[y != 0], 4 / 3))
    torch.testing.assert_close(dx, y * dy)
    with pytest.raises(ValueError, match=r"p is 1\.0"):
        ops.Dropout(1.0)
