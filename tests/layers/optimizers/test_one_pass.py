"""AdamW on moments in few bits in one C++ pass leaves the bits of decoding, torch's fused kernel and encoding."""

import shutil
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from te_models.kernels.backend import using_backend
from te_models.layers import FusedAdamW, Linear, quantized_model_init, recipe
from te_models.layers.optimizers import adamw_update, one_pass

pytestmark = pytest.mark.skipif(
    not any(map(shutil.which, ("g++", "clang++", "c++"))), reason="the pass is C++, and there is no compiler"
)
SHAPES = ((7, 304), (128, 16), (16,), (144,), (129,))
"""Blocks that are whole and one that is not, a part of one and of a second, and a number that torch updates alone."""


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many elements each pass has updated."""
    assert one_pass.has_the_bits()
    found: list[int] = []
    run = one_pass.cpu_moments.adamw_step

    def counting(weight: Tensor, *others: Any) -> Tensor | None:
        found.append(weight.numel())
        return run(weight, *others)

    monkeypatch.setattr(one_pass.cpu_moments, "adamw_step", counting)
    return found


def take_step(optimizer: FusedAdamW, **options: Tensor) -> None:
    """The optimizer that compiles steps with the library, another by the definitions."""
    with using_backend("compiled" if optimizer._moments._compile else "definition"):
        optimizer.step(**options)


def parameters(dtype: torch.dtype) -> list[nn.Parameter]:
    torch.manual_seed(0)
    return [nn.Parameter(torch.randn(shape).to(dtype)) for shape in SHAPES]


def states(optimizer: FusedAdamW) -> list[Tensor]:
    found = [value for state in optimizer.state.values() for _, value in sorted(state.items())]
    return found + [parameter.detach() for group in optimizer.param_groups for parameter in group["params"]]


def assert_same_bits(one: FusedAdamW, other: FusedAdamW) -> None:
    """Of all numbers; which of its NaNs torch writes depends on how many numbers it writes."""
    for a, b in zip(states(one), states(other), strict=True):
        numbers = ~a.float().isnan()
        assert a.dtype is b.dtype and torch.equal(numbers, ~b.float().isnan())
        bits = [x[numbers].view(torch.uint8) if x.dim() else x.reshape(1).view(torch.uint8) for x in (a, b)]
        assert torch.equal(*bits)


def give_gradients(optimizers: list[FusedAdamW], step: int, dtype: torch.dtype | None, nan: bool = False) -> None:
    generator = torch.Generator().manual_seed(step)
    groups = [[p for group in o.param_groups for p in group["params"]] for o in optimizers]
    for same in zip(*groups, strict=True):
        # up to moments whose scales are large, and in one parameter far below the largest of their block
        gradient = torch.randn(same[0].shape, generator=generator) * 10.0 ** (4 * step - 6)
        gradient[..., ::3] = 0.0
        if gradient.numel() == 2048:
            gradient *= torch.exp(4 * torch.randn(same[0].shape, generator=generator))
        if nan and gradient.numel() > 1000:
            gradient.view(-1)[[5, 700, 2047]] = torch.tensor([float("nan"), float("inf"), float("nan")])
        for parameter in same:
            if dtype is None:
                parameter.grad = gradient.to(parameter.dtype)
            else:
                parameter.main_grad = gradient.to(dtype)


@pytest.mark.parametrize("moment_dtype", ["float32", "bfloat16", "float8"])
@pytest.mark.parametrize(
    ("dtype", "gradient", "options"),
    [
        (torch.bfloat16, None, {}),
        (torch.float32, None, {"weight_decay": 0.0, "betas": (0.4, 0.9)}),
        (torch.bfloat16, torch.float32, {"master_weights": True, "weight_decay": 0.1}),
        (torch.float32, torch.bfloat16, {"lr": torch.tensor(3e-3)}),
    ],
    ids=["bf16", "far from the gradient", "master", "lr tensor"],
)
def test_bits_are_those_of_the_definitions(
    moment_dtype: Any, dtype: torch.dtype, gradient: torch.dtype | None, options: dict[str, Any], passes: list[int]
) -> None:
    made = {"moment_dtype": moment_dtype, "seed": 3, **options}
    fast, slow = (FusedAdamW(parameters(dtype), compile=compiles, **made) for compiles in (True, False))
    for step in range(4):
        give_gradients([fast, slow], step, gradient)
        for optimizer in (fast, slow):
            take_step(optimizer)
        assert_same_bits(fast, slow)
    weight = torch.float32 if "master_weights" in options else dtype
    is_float32 = moment_dtype == "float32" and weight is (gradient or dtype) is torch.float32
    expected = [] if is_float32 else [2128, 2048, 16, 144] * 4
    assert passes == expected, "only of the optimizer that compiles, and not what torch updates as it is"


@pytest.mark.parametrize("flush", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_blocks_of_normal_moments(dtype: torch.dtype, flush: bool, passes: list[int]) -> None:
    """Blocks normal in E4M3 before and after are held by vectors; any byte may be among them, also where flushed."""
    if flush and not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush subnormal numbers")
    torch.manual_seed(2)
    blocks = 512
    weight, codes = torch.randn(blocks, 128), torch.randint(8, 0x7F, (2, blocks, 128), dtype=torch.uint8)
    codes[0] |= torch.randint(2, (blocks, 128), dtype=torch.uint8) << 7
    some = torch.rand(2, 128, 128) < 0.01
    codes[:, 128:256][some] = 0
    codes[:, 256:384][some] = torch.randint(1, 8, (int(some.sum()),), dtype=torch.uint8)
    codes[1, 384:400, 7] |= 0x80  # a root with a sign, as no step leaves one
    codes[0, 400:404, 3], codes[1, 404:408, 3], codes[0, 408, 3] = 0x7F, 0x7F, 0x80
    weight[-3:, 5] = torch.tensor([float("nan"), float("inf"), 1e-30])
    scales = 2.0 ** torch.randint(-40, 9, (blocks, 1)).float() * (1 + torch.rand(blocks, 1))
    gradient = torch.randn(blocks, 128) * scales * 10.0 ** torch.randint(-2, 5, (blocks, 1)).float()
    gradient[410:412, 9] = torch.tensor([float("nan"), float("inf")])
    try:
        options = {"moment_dtype": "float8", "seed": 5}
        optimizers = [FusedAdamW([nn.Parameter(weight.to(dtype))], compile=c, **options) for c in (True, False)]
        for optimizer in optimizers:
            optimizer.init_state()
            (parameter,) = optimizer.param_groups[0]["params"]
            state = optimizer.state[parameter]
            for name, code in zip(("exp_avg", "exp_avg_sq"), codes, strict=True):
                state[name].view(torch.uint8).copy_(code)
                state[f"{name}_scale_inv"].copy_(scales.view(-1))
            parameter.grad = gradient.to(dtype)
            take_step(optimizer)
        assert_same_bits(*optimizers)
    finally:
        torch.set_flush_denormal(False)
    assert passes == [blocks * 128]


def test_moments_that_are_subnormal_in_their_format_are_none_in_float32(passes: list[int]) -> None:
    """Where subnormal numbers are flushed to zero, as torch.set_flush_denormal says, those of E4M3 are not."""
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush subnormal numbers")
    try:
        fast, slow = (FusedAdamW(parameters(torch.bfloat16), moment_dtype="float8", compile=c) for c in (True, False))
        for step in range(3):
            give_gradients([fast, slow], step, None)
            for optimizer in (fast, slow):
                take_step(optimizer)
            assert_same_bits(fast, slow)
    finally:
        torch.set_flush_denormal(False)
    codes = fast.state[fast.param_groups[0]["params"][1]]["exp_avg"].view(torch.uint8) & 0x7F
    assert ((codes > 0) & (codes < 8)).any() and passes


@pytest.mark.parametrize("name", ["exp_avg", "exp_avg_sq"])
def test_scales_of_moments_may_be_large(name: str, passes: list[int]) -> None:
    """2^120 times such a scale is infinite, which times zero would be a NaN: so no moment here is zero."""
    fast, slow = (FusedAdamW(parameters(torch.bfloat16), moment_dtype="float8", compile=c) for c in (True, False))
    for step in range(2):
        give_gradients([fast, slow], step, None)
        for optimizer in (fast, slow):
            for parameter in optimizer.param_groups[0]["params"]:
                parameter.grad = parameter.grad.clamp(min=0) + 1
            take_step(optimizer)
            for state in optimizer.state.values():
                state[f"{name}_scale_inv"].fill_(1e5)
        assert_same_bits(fast, slow)
    assert all(x.float().isfinite().all() for x in states(fast)) and passes


@pytest.mark.parametrize("moment_dtype", ["bfloat16", "float8"])
def test_blocks_with_a_nan_are_left_to_the_definitions(moment_dtype: Any, passes: list[int]) -> None:
    """In the step that brings it, in one that goes on with it; and the step is counted once."""
    fast, slow = (FusedAdamW(parameters(torch.bfloat16), moment_dtype=moment_dtype, compile=c) for c in (True, False))
    for step in range(3):
        give_gradients([fast, slow], step, None, nan=step == 1)
        for optimizer in (fast, slow):
            take_step(optimizer)
        assert_same_bits(fast, slow)
    first = fast.state[fast.param_groups[0]["params"][0]]
    assert first["exp_avg"].float().isnan().sum() >= 2 and first["step"] == 3


def test_quantized_weights_are_written_from_their_masters(passes: list[int]) -> None:
    made = []
    for compiles in (True, False):
        torch.manual_seed(0)
        with quantized_model_init(recipe=recipe("mxfp8")):
            layer = Linear(64, 64, bias=False)
        made.append((layer, FusedAdamW(layer.parameters(), moment_dtype="float8", compile=compiles)))
    for step in range(2):
        for layer, optimizer in made:
            generator = torch.Generator().manual_seed(step)
            layer.weight.grad = torch.randn(64, 64, generator=generator).to(layer.weight.dtype)
            take_step(optimizer)
    (one, fast), (other, slow) = made
    assert torch.equal(one.weight.dequantize(), other.weight.dequantize()) and passes == [4096] * 2
    for a, b in zip(fast.state[one.weight].values(), slow.state[other.weight].values(), strict=True):
        assert torch.equal(a, b)


def test_what_it_does_not_serve_goes_the_other_way(passes: list[int]) -> None:
    """All of it in float32, gradients in float16, and weights that are not contiguous."""
    weight = nn.Parameter(torch.randn(64, 4).T)
    for parameter, gradient, options in (
        (weight, torch.ones(4, 64), {}),
        (nn.Parameter(torch.ones(8)), torch.ones(8), {"moment_dtype": "float32"}),
        (nn.Parameter(torch.ones(8).half()), torch.ones(8).half(), {}),
    ):
        optimizer = FusedAdamW([parameter], compile=True, **{"moment_dtype": "bfloat16", **options})
        parameter.grad = gradient
        before = parameter.detach().clone()
        take_step(optimizer)
        assert not torch.equal(parameter, before)
    assert passes == []


@pytest.mark.parametrize("moment_dtype", ["float32", "bfloat16", "float8"])
def test_a_step_that_is_none_changes_nothing(moment_dtype: Any, passes: list[int]) -> None:
    made = [parameters(torch.bfloat16) for _ in range(2)]
    fast, slow = (FusedAdamW(p, moment_dtype=moment_dtype, compile=p is made[0]) for p in made)
    for step in range(3):
        give_gradients([fast, slow], step, None)
        before = [x.clone() for x in states(fast)]
        for optimizer in (fast, slow):
            take_step(optimizer, noop=torch.tensor(float(step == 1)))
        assert_same_bits(fast, slow)
        assert step != 1 or all(torch.equal(a.float(), b.float()) for a, b in zip(before, states(fast), strict=True))
    assert passes == [2128, 2048, 16, 144] * 2


def test_a_backward_pass_notices_that_a_weight_was_written(passes: list[int]) -> None:
    weight = nn.Parameter(torch.ones(16, 16, dtype=torch.bfloat16))
    optimizer = FusedAdamW([weight], compile=True)
    y = (torch.ones(1, 16, dtype=torch.bfloat16, requires_grad=True) @ weight).sum()
    weight.grad = torch.ones_like(weight)
    take_step(optimizer)
    assert passes
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()


def test_tensors_without_values_are_not_written(passes: list[int]) -> None:
    with FakeTensorMode():
        weight = nn.Parameter(torch.ones(16, 16, dtype=torch.bfloat16))
        optimizer = FusedAdamW([weight], moment_dtype="bfloat16", compile=False)
        optimizer._moments._compile = True
        weight.grad = torch.ones_like(weight)
        piece = adamw_update.whole_piece(weight, weight.grad, optimizer._state_of(weight, optimizer.param_groups[0]), 1)
        assert not one_pass.cpu_moments.updates(weight, piece.gradient, optimizer._moments.stored(piece.state))


def test_eager_code_asks_the_setting(passes: list[int]) -> None:
    """As quantization does: of a process without it, the way is the other one."""
    (parameter,) = made = [nn.Parameter(torch.ones(304, dtype=torch.bfloat16))]
    optimizer = FusedAdamW(made)
    parameter.grad = torch.ones_like(parameter)
    with using_backend("definition"):
        optimizer.step()
    assert passes == []
    optimizer.step()
    assert passes == [304]


def test_another_arithmetic_is_noticed(monkeypatch: pytest.MonkeyPatch, passes: list[int]) -> None:
    """As where torch was built without instructions that multiply and add."""
    update = one_pass.update_

    def rounded_otherwise(work: list[Any], *others: Any) -> None:
        update(work, *others)
        work[0].second.mul_(1 + 2.0**-20)

    monkeypatch.setattr(one_pass, "update_", rounded_otherwise)
    one_pass.has_the_bits.cache_clear()
    assert not one_pass.has_the_bits()
    (parameter,) = made = [nn.Parameter(torch.ones(304))]
    optimizer = FusedAdamW(made, moment_dtype="float8", compile=True)
    parameter.grad = torch.ones(304)
    passes.clear()
    optimizer.step()
    one_pass.has_the_bits.cache_clear()
    assert passes == [] and parameter.max() < 1
