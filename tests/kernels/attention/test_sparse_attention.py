"""Sparse attention, its choice of keys and the indexer's loss equal their definition: in blocks, graphs, documents."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from te_models.kernels.packed_attention import sees_own_document
from te_models.kernels.sparse_attention import blocks, indexer_loss, reference, select_keys, sparse_attention
from tests.compare import Largest

DOCUMENTS = torch.tensor([[0] * 9 + [1] * 20 + [2] + [-1] * 10, [5] * 40])
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2}


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "SCORES", 1)  # 16 queries at a time
    torch.manual_seed(0)


def indexer(dtype: torch.dtype, queries: int = 40, heads: int = 3) -> list[Tensor]:
    shapes = ((2, queries, heads, 8), (2, 40, 8), (2, queries, heads))
    return [torch.randn(shape).to(dtype).requires_grad_() for shape in shapes]


def attention(dtype: torch.dtype, queries: int = 40, groups: int = 2) -> list[Tensor]:
    shapes = ((queries, 6, 8), (40, groups, 8), (40, groups, 12))
    return [torch.randn(2, *shape).to(dtype).requires_grad_() for shape in shapes]


def unseen(documents: Tensor | None, queries: int = 40) -> Tensor:
    later = torch.ones(queries, 40, dtype=torch.bool).triu(1 + 40 - queries).expand(2, -1, -1)
    return later if documents is None else later | ~sees_own_document(documents)[:, -queries:]


def mask_of(choice: Tensor) -> Tensor:
    """int32 [B, S, K] -> bool [B, S, 40]."""
    found = torch.zeros(*choice.shape[:2], 41, dtype=torch.bool)
    return found.scatter(-1, torch.where(choice < 0, 40, choice).long(), True)[..., :40]


def repeated(x: Tensor) -> Tensor:
    return x.repeat_interleave(6 // x.shape[2], 2)


def assert_near(found: Tensor, wanted: Tensor, dtype: torch.dtype) -> None:
    """Within a part of the largest number."""
    assert (found.double() - wanted.double()).abs().max() <= TOLERANCE[dtype] * wanted.double().abs().max()


@pytest.mark.parametrize("documents", [None, DOCUMENTS], ids=["", "documents"])
@pytest.mark.parametrize("queries", [1, 17, 40])
def test_the_choice_is_that_of_the_definition(queries: int, documents: Tensor | None) -> None:
    q, k, weights = indexer(torch.float64, queries)
    hidden = unseen(documents, queries)
    wanted = reference.selected(reference.index_scores(q, k, weights), hidden, 7)
    choice = select_keys(q, k, weights, 7, documents)
    assert torch.equal(mask_of(choice), wanted)
    assert torch.equal(mask_of(select_keys(q, k, weights, 7, hidden)), wanted)
    assert choice.dtype == torch.int32 and choice.shape == (2, queries, 7)


def test_of_equal_scores_the_earlier_key_is_chosen_whatever_stands_around() -> None:
    """So that documents of a row choose as each by itself does."""
    q, k, weights = (torch.zeros_like(t) for t in indexer(torch.float32))
    assert select_keys(q, k, weights, 3, None)[0, 20].tolist() == [0, 1, 2]
    assert select_keys(q, k, weights, 3, DOCUMENTS)[0, 20].tolist() == [9, 10, 11]
    assert select_keys(q, k, weights, 3, DOCUMENTS)[0, 29].tolist() == [29, -1, -1]
    assert select_keys(q, k, weights, 99, None).shape[2] == 40


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("groups", [1, 2, 6])
@pytest.mark.parametrize("queries", [1, 40])
def test_values_and_gradients_are_those_of_the_definition(queries: int, groups: int, dtype: torch.dtype) -> None:
    inputs = attention(dtype, queries, groups)
    choice = select_keys(*indexer(dtype, queries), 7, DOCUMENTS)
    y = sparse_attention(*inputs, choice, scale=0.3)
    q, k, v = exact = [t.detach().double().requires_grad_() for t in inputs]
    wanted = reference.sparse_attention(q, repeated(k), repeated(v), mask_of(choice), 0.3)
    assert y.dtype == dtype
    assert_near(y, wanted, dtype)
    assert not y[0, -1].any(), "padding chooses nothing"
    dy = torch.randn_like(y)
    for found, expected in zip(torch.autograd.grad(y, inputs, dy), torch.autograd.grad(wanted, exact, dy.double())):
        assert_near(found, expected, dtype)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("documents", [None, DOCUMENTS], ids=["", "documents"])
@pytest.mark.parametrize("sparse", [False, True], ids=["warm-up", "sparse"])
def test_loss_and_gradients_are_those_of_the_definition(
    sparse: bool, documents: Tensor | None, dtype: torch.dtype
) -> None:
    own, (q, k, _) = indexer(dtype), attention(dtype)
    choice = select_keys(*own, 7, documents) if sparse else None
    loss = indexer_loss(*own, q, k, choice, documents, scale=0.3)
    exact = [t.detach().double().requires_grad_() for t in own]
    seen = ~unseen(documents) if choice is None else mask_of(choice)
    wanted = reference.indexer_loss(reference.index_scores(*exact), q.double(), repeated(k).double(), seen, 0.3)
    assert_near(loss, wanted, dtype)
    for found, expected in zip(torch.autograd.grad(2 * loss, own), torch.autograd.grad(2 * wanted, exact)):
        assert_near(found, expected, dtype)


def test_training_moves_the_indexer_to_the_keys_that_attention_uses() -> None:
    own, (q, k, _) = indexer(torch.float32, heads=8), attention(torch.float32)
    optimizer, losses = torch.optim.Adam(own, 0.05), []
    for _ in range(60):
        losses.append(indexer_loss(*own, 3 * q, 3 * k, None, None, scale=0.3))
        optimizer.zero_grad()
        losses[-1].backward()
        optimizer.step()
    assert losses[-1] < 0.5 * losses[0] and q.grad is None and k.grad is None


@pytest.mark.parametrize("function", ["attention", "loss"])
def test_graphs_compute_the_same_forward_and_backward(function: str) -> None:
    own, (q, k, v) = indexer(torch.float32), attention(torch.float32)

    def run(*tensors: Tensor) -> Tensor:
        *index, q, k, v = tensors
        choice = select_keys(*index, 7, DOCUMENTS)
        if function == "attention":
            return sparse_attention(2 * q, k, v, choice, scale=0.3).square().sum()
        return indexer_loss(*index, 2 * q, k, choice, None, scale=0.3)

    graph: Callable[..., Tensor] = torch.compile(run, fullgraph=True, backend="aot_eager")
    wanted_of = (q, k, v) if function == "attention" else own
    eager, compiled = (torch.autograd.grad(f(*own, q, k, v), wanted_of) for f in (run, graph))
    assert all(map(torch.equal, compiled, eager))


def test_nothing_has_the_size_of_all_scores() -> None:
    """Of 400 queries and keys: 160,000 scores of one head."""
    q, k, weights = (torch.randn(1, 400, *n, requires_grad=True) for n in ((2, 4), (4,), (2,)))
    with Largest() as largest:
        choice = select_keys(q, k, weights, 5, None)
        loss = indexer_loss(q, k, weights, q.detach(), k[:, :, None].detach(), choice, None, scale=0.5)
        (sparse_attention(q, k[:, :, None], k[:, :, None], choice, scale=0.5).sum() + loss).backward()
    assert largest.elements <= 400 * 16 * 4
