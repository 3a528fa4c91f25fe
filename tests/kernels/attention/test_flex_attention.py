"""Attention within documents on a GPU, by torch's FlexAttention: what its mask function and tables of blocks say, on a
CPU by the definition that FlexAttention computes where it is not compiled, and on a GPU by its kernels."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.attention.flex_attention as flex
from torch import Tensor

from te_models import GPTModel
from te_models.kernels.packed_attention import flex as ours
from te_models.kernels.packed_attention import flex_packed_attention, sees_own_document
from te_models.kernels.packed_attention.flex import block_mask_of, seen_intervals
from te_models.layers import DotProductAttention
from te_models.layers.attention import dot_product_attention
from tests.covering import EVERYDAY
from tests.training.runs import tiny_model

S = 300
DOCUMENTS = torch.tensor([[0] * 10 + [1] * 120 + [3] + [4] * 130 + [-1] * 39, [5] * 150 + [6] * 150])
"""Boundaries within blocks of 128 and at none of their ends, a document of one token, padding, and a last block that is
not full."""
OPTIONS: dict[str, dict[str, Any]] = {
    "causal": {},
    "all": {"causal": False},
    "window": {"window": 40},
    "softcap": {"softcap": 1.5},
    "sink": {},
    "everything": {"window": 140, "softcap": 2.0},
}


@pytest.fixture
def differentiable(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """FlexAttention refuses gradients on a CPU, although its definition has them, which is what runs uncompiled."""
    torch._dynamo.reset()  # its softcap is a constant only of the first graph that it makes
    monkeypatch.setattr(flex, "_validate_device", lambda *_: None)
    monkeypatch.setattr(flex, "_warn_once", lambda *_, **__: None)
    monkeypatch.setattr(ours, "_compiled", lambda options: partial(ours._attend, options=options))
    yield


def visible(queries: int, causal: bool = True, window: int | None = None) -> Tensor:
    """The definition: bool [B, Q, S]."""
    place = torch.arange(S)
    distance = (place[:, None] - place)[S - queries :]
    seen = sees_own_document(DOCUMENTS, DOCUMENTS[:, S - queries :])
    if causal:
        seen = seen & (distance >= 0)
    return seen if window is None else seen & (distance <= window)


def intervals(queries: int, causal: bool = True, window: int = -1) -> tuple[Tensor, Tensor]:
    return seen_intervals(DOCUMENTS, queries, causal, window)


def masked(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, softcap: float | None, sink: Tensor | None) -> Tensor:
    """The definition: attention by all scores."""
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
    scores = 0.3 * q @ k.mT
    scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~seen[:, None], float("-inf"))
    logit = torch.full((q.shape[1],), -1e30) if sink is None else sink
    scores = torch.cat((scores, logit[None, :, None, None].expand(*scores.shape[:3], 1).to(scores)), -1)
    return torch.softmax(scores, -1)[..., :-1] @ v


def inputs(queries: int, device: str = "cpu") -> tuple[Tensor, ...]:
    torch.manual_seed(0)
    shapes = ((2, 4, queries, 32), (2, 2, S, 32), (2, 2, S, 16), (4,))
    return tuple(torch.randn(shape).to(device).requires_grad_() for shape in shapes)


def check(queries: int, case: str, device: str = "cpu", **tolerance: float) -> None:
    """Compare results and gradients with the definition's."""
    options, tensors = OPTIONS[case], inputs(queries, device)
    q, k, v, sink = tensors
    sinks = sink if case in ("sink", "everything") else None
    out = flex_packed_attention(q, k, v, DOCUMENTS.to(device), scale=0.3, sink=sinks, **options)
    seen = visible(queries, options.get("causal", True), options.get("window")).to(device)
    expected = masked(q, k, v, seen, options.get("softcap"), sinks)
    torch.testing.assert_close(out, expected, **tolerance)
    assert not out[~seen.any(-1)[:, None].expand(out.shape[:3])].any(), "padding"
    wanted = tensors if sinks is not None else tensors[:3]
    dy = torch.randn_like(out)
    found = torch.autograd.grad(out, wanted, dy)
    torch.testing.assert_close(found, torch.autograd.grad(expected, wanted, dy), **tolerance)


@pytest.mark.matrix
@pytest.mark.parametrize("case", OPTIONS)
@pytest.mark.parametrize("queries", [S, 170])
@pytest.mark.usefixtures("differentiable")
def test_values_and_gradients_are_those_of_the_mask(queries: int, case: str) -> None:
    check(queries, case, rtol=1e-5, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("case", OPTIONS)
@pytest.mark.parametrize("queries", [S, 170])
def test_kernels_compute_the_definition(queries: int, case: str) -> None:
    check(queries, case, "cuda", rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("case", ["causal", "all", "window"])
@pytest.mark.parametrize("queries", [S, 170, 5])
def test_tables_of_blocks_are_those_of_the_mask(queries: int, case: str) -> None:
    """Ours may call a block partly seen that nobody sees, between documents, or that is whole, in the last block."""
    seen = visible(queries, OPTIONS[case].get("causal", True), OPTIONS[case].get("window"))
    mask = block_mask_of(*intervals(queries, **OPTIONS[case]), S)
    torchs = flex.create_block_mask(lambda b, _, i, j: seen[b, i, j], 2, None, queries, S, device="cpu")
    dense = mask.to_dense() > 0
    assert (dense >= (torchs.to_dense() > 0)).all(), "a block that some query sees is missing"
    assert dense.sum() <= (torchs.to_dense() > 0).sum() + 1
    whole = torch.zeros_like(dense)
    for row, block in torch.cartesian_prod(torch.arange(2), torch.arange(dense.shape[2])).tolist():
        count = int(mask.full_kv_num_blocks[row, 0, block])
        whole[row, 0, block, mask.full_kv_indices[row, 0, block, :count].long()] = True
    padded = torch.nn.functional.pad(seen, (0, -S % 128, 0, -queries % 128))
    tiles = padded.unflatten(2, (-1, 128)).unflatten(1, (-1, 128))  # [B, blocks, 128, blocks of keys, 128]
    assert (tiles.all(4).all(2)[:, None] == whole).all()


def test_a_long_row_looks_at_few_blocks() -> None:
    mask = block_mask_of(*seen_intervals((torch.arange(8192) // 512)[None], 8192, True, -1), 8192)
    assert int((mask.to_dense() > 0).sum()) == 16 * (1 + 2 + 3 + 4)


@pytest.mark.costs(30)
def test_code_that_is_not_compiled_calls_kernels_that_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """And not FlexAttention's definition, which computes all scores and says so in a warning. One kernel serves all
    boundaries. Each softcap has its own: to one graph of all of them it is an argument, which FlexAttention does not
    take. The kernel is the one that torch has for a CPU, without gradients and sinks."""

    def warn(*told: object, **_: object) -> None:
        raise AssertionError(told)

    def run_graph(graph: Any, inputs: Any, **_: object) -> Any:
        assert all(isinstance(x, Tensor) for x in inputs), "the softcap is no constant"
        return graph

    monkeypatch.setattr(flex, "_warn_once", warn)
    q, k, v, _ = (t.detach() for t in inputs(S))
    graphs = torch._dynamo.utils.counters["stats"]
    before = graphs["unique_graphs"]
    causal = torch.ones(S, S, dtype=torch.bool).tril()
    for softcap in (1.5, 2.5):
        if softcap == 2.5 and EVERYDAY[0]:  # another kernel takes seconds to compile
            monkeypatch.setattr("torch._inductor.compile_fx.compile_fx", run_graph)
        for documents in (DOCUMENTS, DOCUMENTS.flip(0), torch.arange(2 * S).view(2, S) // 7):
            out = flex_packed_attention(q, k, v, documents, scale=0.3, softcap=softcap)
            expected = masked(q, k, v, sees_own_document(documents) & causal, softcap, None)
            torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
    assert graphs["unique_graphs"] == before + 2


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # where FlexAttention's definition is traced
@pytest.mark.usefixtures("differentiable")
@pytest.mark.sentinels("aot_eager-windows and soft caps", "eager-chunks")
@pytest.mark.parametrize("kind", ["plain", "windows and soft caps", "chunks"])
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_model_on_it_has_the_numbers_of_a_mask(backend: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """eager: not compiled."""
    config = tiny_model(layers=1)
    attention = config.attention
    if kind == "windows and soft caps":
        attention = attention.replace(window_size=9, softcap=3.0)
    elif kind == "chunks":
        attention = attention.replace(chunk_size=5)
    model = GPTModel(config.replace(attention=attention), dtype=torch.float32)
    ids = torch.randint(257, (2, 40))
    documents = torch.tensor([[0] * 5 + [1] * 25 + [-1] * 10, [2] * 40])
    weights = [p for p in model.parameters() if p.requires_grad]

    def numbers(run: Any, **which: Tensor) -> tuple[Tensor, ...]:
        loss = run(ids, labels=torch.where(documents < 0, -100, ids), **which).loss
        return loss.detach(), *torch.autograd.grad(loss, weights)

    expected = numbers(model, attention_mask=sees_own_document(documents))
    monkeypatch.setattr(dot_product_attention, "_FLEX_DEVICES", ("cpu",))
    if backend == "aot_eager":
        compiled = torch.compile(model, backend=backend, fullgraph=True)
        torch.testing.assert_close(numbers(compiled, document_ids=documents), expected, rtol=1e-4, atol=1e-6)
    called: list[int] = []
    monkeypatch.setattr(ours, "block_mask_of", lambda *a: called.append(1) or block_mask_of(*a))
    torch.testing.assert_close(numbers(model, document_ids=documents), expected, rtol=1e-4, atol=1e-6)
    assert len(called) == config.num_layers


def test_a_layer_that_drops_probabilities_gets_the_mask() -> None:
    """FlexAttention has no dropout."""
    cuda = torch.device("cuda")
    attention = DotProductAttention(2, 8, attention_dropout=0.1)
    assert not attention.attends_documents(cuda) and attention.eval().attends_documents(cuda)
    assert not attention.attends_documents(torch.device("meta"))


def test_bad_documents_are_named() -> None:
    q, k, v, _ = (t.detach() for t in inputs(S))
    with pytest.raises(ValueError, match=r"documents has shape \(2, 299\); allowed: \(2, 300\)"):
        flex_packed_attention(q, k, v, DOCUMENTS[:, 1:], scale=1.0)
    with pytest.raises(ValueError, match="there are 300 queries; allowed: up to 299"):
        flex_packed_attention(q, k[:, :, 1:], v[:, :, 1:], DOCUMENTS[:, 1:], scale=1.0)
