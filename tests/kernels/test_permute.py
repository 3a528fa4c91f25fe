"""Permute and unpermute: properties of the permutation, sums and gradients against one-hot matrices in float64."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from te_models.kernels.permute import permute, sort_by_expert, unpermute
from tests.covering import examples

pytestmark = pytest.mark.usefixtures("each_backend")

UNIT = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8}


def routed(tokens: int, k: int, experts: int, seed: int = 0) -> torch.Tensor:
    """Distinct experts per token, [T, K]."""
    return torch.rand(tokens, experts, generator=torch.Generator().manual_seed(seed)).argsort(dim=-1)[:, :k]


sizes = st.tuples(st.integers(0, 40), st.integers(1, 4), st.integers(4, 9), st.integers(0, 2**31))


@settings(deadline=None, max_examples=examples(100))
@given(sizes)
def test_the_permutation_sorts_slots_stably(size: tuple[int, int, int, int]) -> None:
    tokens, k, experts, seed = size
    indices = routed(tokens, k, experts, seed)
    p = sort_by_expert(indices, experts)
    expected = sorted(range(tokens * k), key=lambda slot: (indices.flatten()[slot].item(), slot))
    assert p.slot_of_row.tolist() == expected and p.row_of_slot.shape == (tokens, k)
    assert p.slot_of_row[p.row_of_slot.flatten()].tolist() == list(range(tokens * k))
    assert p.tokens_per_expert.tolist() == torch.bincount(indices.flatten(), minlength=experts).tolist()


@settings(deadline=None, max_examples=50)
@given(sizes)
def test_unpermute_undoes_permute(size: tuple[int, int, int, int]) -> None:
    tokens, k, experts, seed = size
    p = sort_by_expert(routed(tokens, k, experts, seed), experts)
    x = torch.randn(tokens, 5, generator=torch.Generator().manual_seed(seed))
    rows = permute(x, p)
    assert torch.equal(rows, x[p.slot_of_row // k])
    first = torch.zeros(tokens, k)
    first[:, 0] = 1.0
    assert torch.equal(unpermute(rows, p, first), x)


def test_values_and_gradients_against_matrices() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        for tokens, k, experts, hidden in ((63, 3, 8, 33), (1, 1, 1, 1), (5, 2, 16, 8), (0, 2, 4, 8)):
            generator = torch.Generator().manual_seed(tokens)
            p = sort_by_expert(routed(tokens, k, experts), experts)
            # [T*K, T] one-hot: row r comes from token slot_of_row[r] // k.
            one_hot = torch.nn.functional.one_hot
            rows = one_hot(p.slot_of_row // k, tokens).double() if tokens else torch.zeros(0, 0).double()

            def randn(*shape: int) -> torch.Tensor:
                return torch.randn(*shape, generator=generator).to(dtype)  # noqa: B023

            x = randn(hidden, tokens).t().requires_grad_()  # not contiguous
            y = permute(x, p)
            assert torch.equal(y.double(), rows @ x.detach().double())
            grad = randn(tokens * k, hidden)
            y.backward(grad)
            exact = rows.t() @ grad.double()
            bound = (UNIT[dtype] + k * UNIT[torch.float32]) * (rows.t() @ grad.double().abs())
            assert ((x.grad.double() - exact).abs() <= bound).all()

            y = randn(hidden, tokens * k).t().requires_grad_()
            weights = torch.rand(tokens, k, generator=generator).requires_grad_()
            mixing = rows.t() * weights.detach().double().flatten()[p.slot_of_row]
            out = unpermute(y, p, weights)
            assert out.dtype == dtype
            bound = (UNIT[dtype] + 2 * k * UNIT[torch.float32]) * (mixing @ y.detach().double().abs())
            assert ((out.double() - mixing @ y.detach().double()).abs() <= bound).all()
            grad = randn(tokens, hidden)
            out.backward(grad)
            exact = mixing.t() @ grad.double()
            assert ((y.grad.double() - exact).abs() <= 2 * UNIT[dtype] * exact.abs()).all()
            products = (rows @ grad.double() * y.detach().double()).sum(-1)[p.row_of_slot]
            size = (rows @ grad.double() * y.detach().double()).abs().sum(-1)[p.row_of_slot]
            assert weights.grad.dtype == torch.float32
            assert ((weights.grad.double() - products).abs() <= hidden * UNIT[torch.float32] * size).all()


@pytest.mark.parametrize("weighted", [False, True])
def test_sums_that_stay_float32_are_rounded_by_nobody(weighted: bool) -> None:
    """Both ways, a sum in float32 and its later rounding are the sum in bfloat16, bit for bit."""
    generator = torch.Generator().manual_seed(0)
    p = sort_by_expert(routed(13, 3, 5), 5)
    x, y = (torch.randn(n, 6, generator=generator).bfloat16() for n in (13, 39))
    weights = torch.rand(13, 3, generator=generator) if weighted else None
    results = []
    for dtype in (torch.bfloat16, torch.float32):
        token, row = x.to(dtype, copy=True).requires_grad_(), y.clone().requires_grad_()
        rows, sums = permute(token, p, dtype=torch.bfloat16), unpermute(row, p, weights, dtype=dtype)
        assert rows.dtype == torch.bfloat16 and sums.dtype == dtype
        rows.backward(y)
        sums.backward(x.to(dtype))
        results.append((rows, sums, token.grad, row.grad))
    (rows, sums, token_grad, row_grad), wide = results
    assert torch.equal(rows, wide[0]) and torch.equal(row_grad, wide[3])
    for narrow, exact in ((sums, wide[1]), (token_grad, wide[2])):
        assert exact.dtype == torch.float32 and torch.equal(narrow, exact.bfloat16())
        assert not torch.equal(narrow.float(), exact)


@settings(deadline=None, max_examples=60)
@given(sizes, st.sampled_from([2, 3, 16]))
def test_aligned_experts_start_and_end_at_multiples(size: tuple[int, int, int, int], align: int) -> None:
    tokens, k, experts, seed = size
    indices = routed(tokens, k, experts, seed)
    p, plain = sort_by_expert(indices, experts, align=align), sort_by_expert(indices, experts)
    counts = plain.tokens_per_expert.tolist()
    assert p.tokens_per_expert.tolist() == counts
    assert p.rows_per_expert.tolist() == [-(-c // align) * align for c in counts]
    expected, begin = [], 0
    for count, filled in zip(counts, p.rows_per_expert.tolist(), strict=True):
        slots = plain.slot_of_row[begin : begin + count].tolist()
        expected += slots + [-1] * (filled - count)
        begin += count
    rows = p.slot_of_row.shape[0]
    assert rows % align == 0 and rows >= len(expected)
    assert rows <= tokens * k + min(experts, tokens * k) * (align - 1) + align
    expected += [-1] * (rows - len(expected))
    assert p.slot_of_row.tolist() == expected and p.padding_rows is not None
    assert p.padding_rows.tolist() == [row for row, slot in enumerate(expected) if slot < 0]
    assert p.slot_of_row[p.row_of_slot.flatten()].tolist() == list(range(tokens * k))


def test_padding_rows_are_zero_and_change_nothing() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(13, 6, generator=generator).requires_grad_()
    weights = torch.rand(13, 2, generator=generator).requires_grad_()
    results = []
    for align in (1, 8):
        p = sort_by_expert(routed(13, 2, 5), 5, align=align)
        rows = permute(x, p)
        if p.padding_rows is not None:
            assert rows[p.padding_rows].abs().max() == 0
        out = unpermute(rows * rows, p, weights) + unpermute(rows, p, None)
        results.append([out, *torch.autograd.grad(out.square().sum(), (x, weights))])
    torch.testing.assert_close(*results, rtol=0, atol=0)


def test_eight_bit_rows_move_as_they_are() -> None:
    x = torch.randn(6, 5, generator=torch.Generator().manual_seed(0)).to(torch.float8_e4m3fn)
    for align in (1, 4):
        p = sort_by_expert(routed(6, 2, 4), 4, align=align)
        rows = permute(x, p)
        assert rows.dtype == x.dtype
        kept = p.slot_of_row >= 0
        assert torch.equal(rows.float()[kept], x.float()[p.slot_of_row[kept] // 2])
        assert rows.float()[~kept].abs().sum() == 0


def test_an_alignment_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match="align is 0"):
        sort_by_expert(routed(3, 1, 4), 4, align=0)


def test_an_expert_may_get_all_tokens_or_none() -> None:
    p = sort_by_expert(torch.tensor([[2, 0], [2, 0], [2, 0]]), 4)
    assert p.tokens_per_expert.tolist() == [3, 0, 3, 0]
    assert permute(torch.tensor([[1.0], [2.0], [3.0]]), p).flatten().tolist() == [1, 2, 3, 1, 2, 3]


class _Names(TorchDispatchMode):
    """Records the operators that run."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        accumulate = "index_put" in func.name() and len(args) > 3 and args[3]
        self.seen.add(func.name() + ("+" if accumulate else ""))
        return func(*args, **(kwargs or {}))


def test_no_scatter_add_and_no_host_read() -> None:
    x = torch.randn(6, 4).requires_grad_()
    weights = torch.rand(6, 2).requires_grad_()
    with _Names() as names:
        for align in (1, 4):
            p = sort_by_expert(routed(6, 2, 4), 4, align=align)
            unpermute(permute(x, p), p, weights).sum().backward()
    assert "aten::sort.stable" in names.seen
    forbidden = ("index_add", "scatter_add", "scatter_reduce", "+", "_local_scalar_dense", "bincount", "nonzero")
    assert not [name for name in names.seen if any(word in name for word in forbidden)]


@pytest.mark.slow
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compiled_gradients_are_those_of_eager(dtype: torch.dtype, weighted: bool) -> None:
    """torch 2.11 loses the gradient where the sum's last step, the cast to the rows' dtype, does nothing."""
    order = sort_by_expert(torch.tensor([[0, 2], [1, 2], [3, 0]]), 4)
    grad = torch.randn(3, 5, generator=torch.Generator().manual_seed(0)).to(dtype)

    def gradients(function) -> list[torch.Tensor]:
        y = torch.ones(6, 5, dtype=dtype, requires_grad=True)
        weights = torch.full((3, 2), 0.5, requires_grad=True) if weighted else None
        function(y, order, weights).backward(grad)
        return [y.grad] if weights is None else [y.grad, weights.grad]

    compiled = torch.compile(unpermute, fullgraph=True, backend="aot_eager")
    for got, expected in zip(gradients(compiled), gradients(unpermute), strict=True):
        assert expected.any() and torch.equal(got, expected)


@pytest.mark.parametrize("way", [pytest.param("forth", marks=pytest.mark.slow), "back"])
def test_two_runs_and_compiled_agree(way: str) -> None:
    """Each on its own: between two fused functions the compiler keeps float32 where eager rounds."""

    def forth(x: torch.Tensor, indices: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return permute(x, sort_by_expert(indices, 5))

    def back(y: torch.Tensor, indices: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return unpermute(y, sort_by_expert(indices, 5), weights)

    for function, rows_per_token in {"forth": ((forth, 1),), "back": ((back, 2),)}[way]:
        compiled = torch.compile(function, fullgraph=True, dynamic=True)
        for tokens in (7, 33):
            generator = torch.Generator().manual_seed(tokens)
            x = torch.randn(tokens * rows_per_token, 16, generator=generator).bfloat16()
            weights, indices = torch.rand(tokens, 2, generator=generator), routed(tokens, 2, 5)
            results = []
            for run in (function, function, compiled):
                leaf, w = x.clone().requires_grad_(), weights.clone().requires_grad_()
                out = run(leaf, indices, w)
                out.backward(torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).bfloat16())
                results.append((out, leaf.grad, w.grad))
            for once, again, fused in zip(*results, strict=True):
                if once is None:
                    assert again is None and fused is None
                    continue
                assert torch.equal(once, again)
                # The compiler may sum the 16 products of a weight's gradient in another order.
                bound = 0.0 if once.dtype == torch.bfloat16 else 16 * UNIT[torch.float32] * 16
                assert (once.float() - fused.float()).abs().max() <= bound
