"""Linear cross entropy by chunks of tokens: against float64, never with whole logits, one graph for all sizes."""

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.testing import CompileCounterWithBackend
from torch.profiler import ProfilerActivity, profile

from te_models.kernels.cross_entropy import (
    IGNORE_INDEX,
    cross_entropy,
    linear_cross_entropy,
    linear_cross_entropy_and_z_loss,
    rows,
)
from tests.kernels.test_cross_entropy import UNIT, exact_loss, inputs

COMPILED = torch.compile(linear_cross_entropy, fullgraph=True, backend="aot_eager")


@pytest.mark.matrix
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(
    ("with_bias", "multiplier", "softcap"), [(False, 1.0, None), (True, 1.0, None), (True, 0.5, 3.0)]
)
@pytest.mark.parametrize("chunk_tokens", [None, 1, 20, 1000])
def test_values_and_gradients(monkeypatch, chunk_tokens, with_bias, multiplier, softcap, compiled, dtype) -> None:
    if chunk_tokens is None:  # of the logits, 10 rows at a time: 63 tokens are 6 chunks and a rest
        monkeypatch.setattr(rows, "_STEP_ELEMENTS", 97 * 10)
    x, weight, bias, labels = inputs(63, 32, 97, dtype)
    bias = bias if with_bias else None
    leaves = [t.clone().requires_grad_() for t in (x, weight, bias) if t is not None]
    options = {"multiplier": multiplier, "softcap": softcap, "chunk_tokens": chunk_tokens}
    function = COMPILED if compiled else linear_cross_entropy
    loss = function(leaves[0], leaves[1], labels, leaves[2] if with_bias else None, **options)
    assert loss.dtype == torch.float32
    (loss / 3).backward()
    exact = [t.double().requires_grad_() for t in (x, weight, bias) if t is not None]
    expected = exact_loss(exact[0], exact[1], exact[2] if with_bias else None, labels, multiplier, softcap)
    (expected / 3).backward()
    # The logits are O(4) and rounded to dtype twice at most (product, bias), and once more where they are kept; the
    # loss moves at most as much as they do.
    assert abs(loss.item() - expected.item()) <= (3 if chunk_tokens is None else 2) * 4 * UNIT[dtype]
    for got, want in zip(leaves, exact, strict=True):
        assert got.grad.dtype == dtype
        # Sums of products of rounded factors: errors are random, so they stay below 8 roundings of the largest entry.
        assert (got.grad.double() - want.grad).abs().max() <= 8 * max(UNIT[dtype], 2**-22) * want.grad.abs().max()


@pytest.mark.parametrize("chunk_tokens", [None, 7])
def test_a_loss_of_float64_is_float64(chunk_tokens: int | None) -> None:
    """Whole and by chunks, with and without the z-loss: the values and gradients of torch's cross entropy."""
    x, weight, bias, labels = inputs(50, 16, 31, torch.float64)
    leaves = [t.requires_grad_() for t in (x, weight, bias)]
    logits = 3.0 * torch.tanh(F.linear(*leaves) * 0.7 / 3.0)
    expected = F.cross_entropy(logits, labels)
    squares = logits.logsumexp(-1)[labels != IGNORE_INDEX].square().mean()
    options = {"multiplier": 0.7, "softcap": 3.0, "chunk_tokens": chunk_tokens}
    found = linear_cross_entropy(x, weight, labels, bias, **options)
    both = sum(linear_cross_entropy_and_z_loss(x, weight, labels, bias, **options))
    plain = linear_cross_entropy(x, weight, labels, chunk_tokens=chunk_tokens)
    of_logits = cross_entropy(x @ weight.T, labels)
    right = F.cross_entropy(x @ weight.T, labels)
    for got, want in ((found, expected), (both, expected + squares), (plain, right), (of_logits, right)):
        assert got.dtype == torch.float64
        gradients = (torch.autograd.grad(y, leaves[:2], retain_graph=True) for y in (got, want))
        for a, b in zip([got, *next(gradients)], [want, *next(gradients)], strict=True):
            torch.testing.assert_close(a.detach(), b.detach(), rtol=1e-13, atol=1e-15)


@pytest.mark.parametrize("chunk_tokens", [None, 4])
def test_another_ignore_index(chunk_tokens) -> None:
    x, weight, _, labels = inputs(20, 8, 11, torch.float32)
    other = torch.where(labels == IGNORE_INDEX, -1, labels)
    expected = linear_cross_entropy(x, weight, labels, chunk_tokens=chunk_tokens)
    assert linear_cross_entropy(x, weight, other, ignore_index=-1, chunk_tokens=chunk_tokens) == expected


@pytest.mark.parametrize("tokens", [0, 5])
def test_without_a_valid_label(tokens) -> None:
    x, weight, _, labels = inputs(tokens, 8, 11, torch.bfloat16, ignored=1.1)
    leaves = [x.requires_grad_(), weight.requires_grad_()]
    loss = linear_cross_entropy(*leaves, labels, chunk_tokens=2)
    assert loss.item() == 0
    for leaf, gradient in zip(leaves, torch.autograd.grad(loss, leaves), strict=True):
        assert gradient.shape == leaf.shape and gradient.count_nonzero() == 0


def test_only_gradients_that_are_needed_are_computed() -> None:
    x, weight, bias, labels = inputs(9, 8, 11, torch.float32)
    expected = linear_cross_entropy(x, weight, labels, bias)
    for needed in range(8):
        leaves = [t.clone().requires_grad_(bool(needed >> i & 1)) for i, t in enumerate((x, weight, bias))]
        loss = linear_cross_entropy(leaves[0], leaves[1], labels, leaves[2], chunk_tokens=4)
        assert torch.allclose(loss, expected, rtol=1e-6) and loss.requires_grad == (needed > 0)
        if needed:
            loss.backward()
            assert [t.grad is not None for t in leaves] == [bool(needed >> i & 1) for i in range(3)]
    with torch.no_grad():
        assert not linear_cross_entropy(x.requires_grad_(), weight, labels, chunk_tokens=4).requires_grad


def test_a_chunk_below_one_is_refused() -> None:
    x, weight, _, labels = inputs(5, 8, 11, torch.float32)
    with pytest.raises(ValueError, match="chunk_tokens is 0"):
        linear_cross_entropy(x, weight, labels, chunk_tokens=0)


def largest_allocation(function) -> int:
    """Bytes that one operator allocates at most while `function` runs."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiler:
        function()
    return max(event.self_cpu_memory_usage for event in profiler.events())


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_logits_are_never_whole(compiled, monkeypatch) -> None:
    """64 tokens and 4096 words: whole logits would be 512 KiB in bfloat16, the weight's float32 gradient is 32 KiB."""
    monkeypatch.setattr(rows, "_STEP_ELEMENTS", 4096)
    x, weight, _, labels = inputs(64, 2, 4096, torch.bfloat16)
    x.requires_grad_(), weight.requires_grad_()
    whole = 64 * 4096 * 2
    for chunk_tokens, low, high in ((None, whole, 4 * whole), (4, whole // 16, whole // 4)):
        run = COMPILED if compiled and chunk_tokens else linear_cross_entropy
        run(x, weight, labels, chunk_tokens=chunk_tokens).backward()  # compile first
        largest = largest_allocation(lambda: run(x, weight, labels, chunk_tokens=chunk_tokens).backward())  # noqa: B023
        assert low <= largest < high


@pytest.mark.sentinels("dynamic-None", "mark_dynamic-4")
@pytest.mark.parametrize("chunk_tokens", [4, None])
@pytest.mark.parametrize("marked", [False, True], ids=["dynamic", "mark_dynamic"])
def test_token_counts_share_one_graph(marked, chunk_tokens) -> None:
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(linear_cross_entropy, fullgraph=True, dynamic=None if marked else True, backend=counter)
    for tokens in (5, 9, 33):
        x, weight, _, labels = inputs(tokens, 8, 11, torch.float32)
        if marked:
            torch._dynamo.mark_dynamic(x, 0)
            torch._dynamo.mark_dynamic(labels, 0)
        loss = compiled(x.requires_grad_(), weight.requires_grad_(), labels, chunk_tokens=chunk_tokens)
        loss.backward()
        assert torch.allclose(loss, linear_cross_entropy(x, weight, labels))
    assert counter.frame_count == 1


def test_multipliers_and_caps_share_one_graph() -> None:
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(linear_cross_entropy, fullgraph=True, dynamic=True, backend=counter)
    x, weight, _, labels = inputs(9, 8, 11, torch.float32)
    for multiplier, softcap in ((0.5, 3.0), (0.25, 2.5)):
        options = {"multiplier": multiplier, "softcap": softcap}
        loss = compiled(x.requires_grad_(), weight, labels, chunk_tokens=4, **options)
        assert torch.allclose(loss, linear_cross_entropy(x, weight, labels, **options))
    assert counter.frame_count == 1


@pytest.mark.sentinels("None-False", "20-False", "1000-False", "20-True")
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("chunk_tokens", [None, 20, 1000])
def test_a_main_gradient_gets_the_unrounded_sum(chunk_tokens: int | None, compiled: bool) -> None:
    """The loss and the other gradients stay as they are."""
    x, weight, bias, labels = inputs(63, 32, 97, torch.bfloat16)
    options = {"multiplier": 0.5, "softcap": 3.0, "chunk_tokens": chunk_tokens}
    function = COMPILED if compiled else linear_cross_entropy
    main_grad, results = torch.ones(97, 32), []
    for given in (None, main_grad):
        leaves = [t.clone().requires_grad_() for t in (x, weight, bias)]
        loss = function(leaves[0], leaves[1], labels, leaves[2], **options, main_grad=given)
        (loss / 4).backward()
        results.append([loss.detach(), *(leaf.grad for leaf in leaves)])
    (*before, rounded_dw, db), (*after, none, same_db) = ([r[0], r[1], r[2], r[3]] for r in results)
    torch.testing.assert_close([*after, same_db], [*before, db], rtol=2**-7, atol=1e-6)
    added = main_grad.double() - 1
    assert none is None and (added - rounded_dw.double()).norm() <= 2**-8 * rounded_dw.double().norm()
    assert (added - added.bfloat16()).norm() >= 2**-11 * added.norm()  # of sums that were not rounded
