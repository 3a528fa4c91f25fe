"""Norms, rotations, activations and sums of rows in one C++ pass: the bits of their definitions, and where they run."""

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad

from te_models.kernels import cpu_rows
from te_models.kernels.activation import ACTIVATIONS, activation, gated_activation
from te_models.kernels.activation import reference as activations
from te_models.kernels.backend import Backend, forget, using_backend
from te_models.kernels.cpu_rows import rows
from te_models.kernels.norm import reference as norms
from te_models.kernels.norm import rms_norm
from te_models.kernels.permute import reference as permutations
from te_models.kernels.permute import sort_by_expert, unpermute
from te_models.kernels.quantize.cpu import rounding as shared
from te_models.kernels.rope import apply_rope, rope_tables
from te_models.kernels.rope import reference as rotations
from tests.patches import without_compiler

BF16, F32 = torch.bfloat16, torch.float32
DTYPES = (BF16, F32)
WIDTHS = (1, 7, 8, 33, 64, 100, 128, 576, 577, 1024, 1536, 4100, 9000)


@pytest.fixture
def library() -> Iterator[None]:
    """A process that has the libraries of both dtypes."""
    with using_backend("compiled"):
        yield


def values(*shape: int, dtype: torch.dtype = BF16, seed: int = 0) -> Tensor:
    """Numbers of many magnitudes."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator)
    return (x * torch.randn(shape, generator=generator).mul(3).exp()).to(dtype)


def special(x: Tensor) -> Tensor:
    """x with numbers that are none, infinite, zero, and too small to be normal, each in a row of its own."""
    x = x.clone()
    for row, value in enumerate((float("nan"), float("inf"), -float("inf"), 0.0, 1e-40, 3e38)):
        x[row, row % x.shape[1]] = value
    x[6] = 0.0
    x[7] = 1e-30
    return x


def assert_same(found: Tensor | None, expected: Tensor) -> None:
    assert found.dtype == expected.dtype
    assert torch.equal(found.isnan(), expected.isnan())
    integers = {2: torch.int16, 4: torch.int32}[found.dtype.itemsize]
    found, expected = (torch.where(t.isnan(), 0, t).contiguous().view(integers) for t in (found, expected))
    assert torch.equal(found, expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_norm_has_the_bits_of_the_definition(library: None, dtype: torch.dtype) -> None:
    for width in WIDTHS:
        weight = values(width, dtype=dtype, seed=1)
        for x in (values(9, width, dtype=dtype), special(values(9, width, dtype=dtype))):
            for gamma in (weight, None):
                for zero_centered in (False, True):
                    for order in ("weight_last", "weight_first"):
                        found = cpu_rows.rms_norm(x, gamma, 1e-5, zero_centered, order == "weight_last")
                        options = {"zero_centered": zero_centered, "cast_order": order}
                        assert_same(found, norms.rms_norm(x, gamma, 1e-5, **options))
    x = torch.zeros(3, 8, dtype=dtype)
    assert_same(cpu_rows.rms_norm(x, None, 0.0, False, True), norms.rms_norm(x, None, 0.0))
    weight[0] = float("nan")
    assert_same(cpu_rows.rms_norm(x[:, :1], weight[:1], 1.0, False, True), norms.rms_norm(x[:, :1], weight[:1], 1.0))


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_may_lie_apart(library: None, dtype: torch.dtype) -> None:
    x = values(2, 5, 3 * 40, dtype=dtype)
    heads = x[..., 16:112].unflatten(-1, (3, 32))
    apart = (heads, heads.transpose(1, 2), heads.transpose(0, 1), heads[:, ::2], heads[0], heads[0, 0, 0], x[0, ::2])
    for some in apart:
        weight = values(some.shape[-1], dtype=dtype, seed=1)
        assert_same(cpu_rows.rms_norm(some, weight, 1e-6, False, True), norms.rms_norm(some, weight, 1e-6))
    for other in (x[0].t(), x[:, :1].expand(-1, 5, -1), torch.zeros(2**15, dtype=dtype)):
        assert cpu_rows.rms_norm(other, None, 1e-6, False, True) is None, "torch sums these in another order"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("style", ["half", "interleaved"])
def test_a_rotation_has_the_bits_of_the_definition(library: None, dtype: torch.dtype, style: str) -> None:
    whole = values(2, 5, 3 * 40 + 8, dtype=dtype)
    for rotated in (2, 20, 40):
        positions = torch.tensor([[0, 1, 5, 100, 3000]])
        for ids in (positions, torch.cat((positions, positions + 3))):
            cos, sin = rope_tables(ids, torch.rand(rotated // 2), 1.1)
            for x in (whole[..., 8:].unflatten(-1, (3, 40)), whole[1:, :, 8:].unflatten(-1, (3, 40))):
                cosines, sines = (t[: x.shape[0]] for t in (cos, sin))
                expected = rotations.apply_rope(x, cosines, sines, style)
                assert_same(cpu_rows.apply_rope(x, cosines, sines, style == "interleaved"), expected)
                assert_same(apply_rope(x, cosines, sines, style), expected)


def test_an_activation_of_every_number_has_the_bits_of_the_definition(library: None) -> None:
    every = torch.arange(-(2**15), 2**15).to(torch.int16).view(BF16).view(64, 1024)
    both = torch.cat((every, values(64, 1024)), -1)
    every = both[:, :1024]
    probabilities = torch.rand(64)
    for name, function in ACTIVATIONS.items():
        assert_same(cpu_rows.activate_rows(every, function, False, None), function(every))
        for factor in (None, probabilities, probabilities.bfloat16()):
            expected = activations.gated_activation(both, name, probabilities=factor)
            assert_same(cpu_rows.activate_rows(both, function, True, factor), expected)
            assert_same(gated_activation(both, name, probabilities=factor), expected)
            expected = activations.activation(every, name, probabilities=factor)
            assert_same(activation(every, name, probabilities=factor), expected)
    both = both.float()
    for name, function in ACTIVATIONS.items():
        assert_same(cpu_rows.activate_rows(both, function, True, None), activations.gated_activation(both, name))
    assert cpu_rows.activate_rows(both, torch.relu, False, None) is None
    assert cpu_rows.activate_rows(both, torch.relu, True, probabilities) is None


@pytest.mark.parametrize("dtype", DTYPES)
def test_sums_of_rows_have_the_bits_of_the_definition(library: None, dtype: torch.dtype) -> None:
    for topk, experts, align in ((1, 3, 1), (2, 4, 8), (5, 6, 1)):
        scores = torch.rand(17, experts, generator=torch.Generator().manual_seed(topk))
        permutation = sort_by_expert(scores.topk(topk).indices, experts, align=align)
        y = special(values(permutation.slot_of_row.shape[0], 70, dtype=dtype))
        for weights in (None, scores[:, :topk], scores[:, :topk].bfloat16()):
            expected = permutations.sum_slots(y, permutation.row_of_slot, weights, dtype)
            assert_same(cpu_rows.sum_slots(y, permutation.row_of_slot, weights, dtype), expected)
            assert_same(unpermute(y, permutation, weights), expected)
            assert cpu_rows.sum_slots(y, permutation.row_of_slot, weights, torch.float16) is None


def test_threads_change_no_bit(library: None) -> None:
    x, weight = values(300, 576), values(576, seed=1)
    cos, sin = torch.rand(1, 300, 32), torch.rand(1, 300, 32)
    before = torch.get_num_threads()
    found = []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            summed = cpu_rows.sum_slots(x, torch.arange(300).view(150, 2), None, BF16)
            turned = apply_rope(x.view(1, 300, 9, 64), cos, sin)
            found.append((rms_norm(x, weight, 1e-5), gated_activation(x), turned, summed))
    finally:
        torch.set_num_threads(before)
    for one, two in zip(*found, strict=True):
        assert_same(one, two)


CALLS: dict[str, Callable[[Tensor], Tensor]] = {
    "norm": lambda x: rms_norm(x, None, 1e-5),
    "norm with a weight": lambda x: rms_norm(x, torch.ones(x.shape[-1], dtype=x.dtype), 1e-5),
    "rotation": lambda x: apply_rope(x[None, :, None], torch.full((1, 8, 4), 0.5), torch.full((1, 8, 4), 0.5)),
    "activation": lambda x: activation(x, "silu"),
    "gated activation": lambda x: gated_activation(x, "silu"),
    "sum": lambda x: unpermute(x, sort_by_expert(torch.tensor([[0, 1]] * 4), 2), torch.full((4, 2), 0.3)),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS.keys())
def test_gradients_are_those_of_the_definition(
    library: None, call: Callable[[Tensor], Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    def gradient() -> tuple[Tensor, Tensor, Tensor]:
        x = values(8, 16).requires_grad_()
        y = call(x)
        (first,) = torch.autograd.grad(y.float().square().sum(), x, create_graph=True)
        return y.detach(), first.detach(), torch.autograd.grad(first.sum(), x)[0]

    found = gradient()
    monkeypatch.setattr(rows, "choose", lambda *_: Backend.DEFINITION)
    for ours, expected in zip(found, gradient(), strict=True):
        assert_same(ours, expected)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, of forward-mode derivatives
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS.keys())
def test_what_is_traced_or_transformed_gets_the_definition(library: None, call: Callable[[Tensor], Tensor]) -> None:
    x, tangent = values(8, 16, dtype=F32), values(8, 16, dtype=F32, seed=5)
    with torch.no_grad():
        expected = call(x)
    with FakeTensorMode() as mode:
        assert call(mode.from_tensor(x)).shape == expected.shape
    if call is not CALLS["sum"]:  # of routes that are data
        assert torch.equal(torch.func.vmap(call)(torch.stack((x, 2 * x)))[0], expected)
        forward = torch.func.jvp(call, (x,), (tangent,))[1]
        with torch.no_grad(), forward_ad.dual_level():  # which no_grad does not end
            dual = forward_ad.unpack_dual(call(forward_ad.make_dual(x, tangent)))
        torch.testing.assert_close(dual.tangent, forward)
    compiled = torch.compile(call, fullgraph=True, backend="eager")
    with torch.no_grad():
        assert torch.equal(compiled(x), expected)


def test_it_serves_plain_matrices_that_it_has_a_library_for(library: None, monkeypatch: pytest.MonkeyPatch) -> None:
    x = values(8, 16)

    def norm(x: Tensor, weight: Tensor | None = None) -> Tensor | None:
        return cpu_rows.rms_norm(x, weight, 1e-5, False, True)

    assert norm(x) is not None and norm(x.float(), x[0].float()) is not None
    assert norm(x, torch.nn.Parameter(x[0])) is None
    assert norm(x.half()) is None and norm(x[:0]) is None and norm(x.clone().requires_grad_()) is None
    with torch.no_grad():
        assert norm(x, torch.nn.Parameter(x[0])) is not None
    assert cpu_rows.rms_norm(x, torch.ones(16), 1e-5, False, True) is None, "a product of two dtypes"
    assert cpu_rows.rms_norm(x, torch.ones(1, dtype=BF16), 1e-5, False, True) is None, "a weight that is broadcast"
    with using_backend("definition"):
        assert norm(x) is None


def test_without_a_compiler_the_definitions_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "_function", without_compiler)
    forget()
    before = shared.fallbacks["there is no C++ compiler"]
    x = values(256, 512)
    assert cpu_rows.rms_norm(x, None, 1e-5, False, True) is None
    assert_same(rms_norm(x, None, 1e-5), norms.rms_norm(x, None, 1e-5))
    assert shared.fallbacks["there is no C++ compiler"] > before
    forget()


def test_another_order_of_torchs_sums_is_noticed(library: None, monkeypatch: pytest.MonkeyPatch) -> None:
    rows._sums_as_torch.cache_clear()
    monkeypatch.setattr(torch, "rsqrt", lambda x: x.rsqrt() * 1.0000002)
    try:
        assert cpu_rows.rms_norm(values(8, 16), None, 1e-5, False, True) is None
        assert shared.fallbacks["torch adds rows up in another order"]
    finally:
        rows._sums_as_torch.cache_clear()
