"""Attention within documents equals attention under their mask without an [S, S] tensor; one graph for all bounds."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from te_models import GPTModel
from te_models.kernels.gemm.cpu import CpuGemm, using_cpu_gemm
from te_models.kernels.packed_attention import documents_of_lengths, packed_attention, sees_own_document
from te_models.kernels.packed_attention import softcap as capped
from te_models.layers import DotProductAttention
from te_models.layers.attention import dot_product_attention
from tests.compare import Largest
from tests.training.runs import tiny_model

DOCUMENTS = torch.tensor([[0] * 10 + [1] * 22 + [3] + [-1] * 7, [5] * 40])


def case(heads: int, groups: int, channels: int, values: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    torch.manual_seed(0)
    shapes = ((heads, channels), (groups, channels), (groups, values))
    return [torch.randn(2, h, 40, c).to(dtype).requires_grad_() for h, c in shapes]


def masked(q: Tensor, k: Tensor, v: Tensor, causal: bool, softcap: float | None = None) -> Tensor:
    """The definition."""
    visible = sees_own_document(DOCUMENTS)[:, None]
    if causal:
        visible = visible & torch.ones(40, 40, dtype=torch.bool).tril()
    if softcap is not None:
        k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
        scores = softcap * torch.tanh(0.3 * q @ k.mT / softcap)
        return torch.softmax(scores.masked_fill(~visible, -1e30), -1).masked_fill(~visible, 0.0) @ v
    return F.scaled_dot_product_attention(q, k, v, visible, scale=0.3, enable_gqa=q.shape[1] != k.shape[1])


@pytest.mark.parametrize("softcap", [None, 1.5], ids=["", "softcap"])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("sizes", [(4, 4, 16, 16), (6, 2, 16, 16), (4, 4, 24, 16), (2, 1, 8, 20)], ids=str)
def test_values_and_gradients_are_those_of_the_mask(
    sizes: tuple[int, int, int, int], causal: bool, softcap: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(capped, "ELEMENTS", 1)  # 16 queries at a time
    inputs = case(*sizes)
    out = packed_attention(*inputs, DOCUMENTS, scale=0.3, causal=causal, softcap=softcap)
    expected = masked(*inputs, causal, softcap)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=2e-6)
    assert not out[0, :, 33:].any(), "padding"
    dy = torch.randn_like(out)
    found, wanted = (torch.autograd.grad(y, inputs, dy) for y in (out, expected))
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=5e-6)
    assert not found[1][0, :, 33:].any(), "padding"


@pytest.mark.parametrize("sink", [False, True])
@pytest.mark.parametrize("softcap", [None, 1.5], ids=["", "softcap"])
def test_float64_is_computed_in_float64(softcap: float | None, sink: bool) -> None:
    """Sums of exponentials, too: values and gradients are those of the definition to 1e-12."""
    q, k, v = inputs = case(4, 2, 16, 20, torch.float64)
    logit = torch.randn(4, dtype=torch.float64, requires_grad=True)
    keys, values = (t.repeat_interleave(2, 1) for t in (k, v))
    scores = 0.3 * q @ keys.mT
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    visible = sees_own_document(DOCUMENTS)[:, None] & torch.ones(40, 40, dtype=torch.bool).tril()
    scores = scores.masked_fill(~visible, -1e300)
    if sink:
        scores = torch.cat([scores, logit[None, :, None, None].expand(*scores.shape[:3], 1)], -1)
    expected = torch.softmax(scores, -1)[..., :40].masked_fill(~visible, 0.0) @ values
    asked = [*inputs, *[logit] * sink]
    options = {"scale": 0.3, "softcap": softcap, "sink": logit if sink else None}
    for queries in (40, 20):
        out = packed_attention(q[:, :, -queries:], k, v, DOCUMENTS, **options)
        wanted = expected[:, :, -queries:]
        torch.testing.assert_close(out, wanted, rtol=1e-12, atol=1e-12)
        dy = torch.randn_like(out)
        found, exact = (torch.autograd.grad(y, asked, dy, retain_graph=True) for y in (out, wanted))
        torch.testing.assert_close(found, exact, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("what", ["sinks", "document_ids", "sinks and document_ids", "softcap"])
def test_a_model_of_float64_is_trained(what: str) -> None:
    """Its gradients are those of the same model in float32, in which norms and the loss are computed."""
    config = tiny_model(hidden=16, layers=1)
    features: dict[str, Any] = {"sinks": True} if "sinks" in what else {}
    features |= {"softcap": 2.0} if what == "softcap" else {}
    model = GPTModel(config.replace(attention=config.attention.replace(**features)))
    tokens = torch.randint(257, (1, 24))
    documents = {"document_ids": torch.arange(24)[None] // 9} if "document_ids" in what else {}
    found = []
    for dtype in (torch.float32, torch.float64):
        model = model.to(dtype)
        found.append(torch.autograd.grad(model(tokens, labels=tokens, **documents).loss, [*model.parameters()]))
    assert {gradient.dtype for gradient in found[1]} == {torch.float64}
    torch.testing.assert_close([g.float() for g in found[1]], [*found[0]], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("softcap", [None, 1.5], ids=["", "softcap"])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("queries", [1, 8, 20, 33, 40])
def test_the_last_queries_are_those_of_all(queries: int, causal: bool, softcap: float | None) -> None:
    """Also where they begin within a document, or within padding."""
    q, k, v = case(6, 2, 16, 20)
    options = {"scale": 0.3, "causal": causal, "softcap": softcap}
    whole = packed_attention(q, k, v, DOCUMENTS, **options)[:, :, -queries:]
    last = packed_attention(q[:, :, -queries:], k, v, DOCUMENTS, **options)
    torch.testing.assert_close(last, whole, rtol=1e-5, atol=2e-6)
    dy = torch.randn_like(last)
    found, wanted = (torch.autograd.grad(y, (q, k, v), dy) for y in (last, whole))
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=5e-6)


@pytest.mark.parametrize("softcap", [None, 1.5], ids=["", "softcap"])
@pytest.mark.parametrize("cpu_gemm", ["bf16", "float32"])
def test_in_bfloat16_it_is_as_near_as_the_mask(cpu_gemm: CpuGemm, softcap: float | None) -> None:
    inputs = case(4, 2, 16, 16, torch.bfloat16)
    q, k, v = inputs
    with using_cpu_gemm(cpu_gemm):
        out = packed_attention(*inputs, DOCUMENTS, scale=0.3, softcap=softcap)
        last = packed_attention(q[:, :, -16:], k, v, DOCUMENTS, scale=0.3, softcap=softcap)
        gradients = torch.autograd.grad(out.float().square().sum(), inputs)
    assert {t.dtype for t in (out, last, *gradients)} == {torch.bfloat16}
    wide = [t.detach().float().requires_grad_() for t in inputs]
    expected = masked(*wide, True, softcap)
    torch.testing.assert_close(out.float(), expected, rtol=2**-6, atol=2**-6)
    torch.testing.assert_close(last.float(), expected[:, :, -16:], rtol=2**-6, atol=2**-6)
    for found, wanted in zip(gradients, torch.autograd.grad(expected.square().sum(), wide), strict=True):
        torch.testing.assert_close(found.float(), wanted, rtol=2**-4, atol=2**-4)


@pytest.mark.parametrize("softcap", [None, 1.5], ids=["", "softcap"])
def test_no_tensor_is_quadratic_in_the_sequence(softcap: float | None) -> None:
    attention = DotProductAttention(1, 4, qkv_format="thd", attn_mask_type="padding_causal", softcap=softcap)
    q = torch.randn(600, 1, 4, requires_grad=True)
    cu_seqlens = torch.arange(0, 601, 50, dtype=torch.int32)
    same, other = Largest(), Largest()
    with same:
        attention(q, q, q, cu_seqlens_q=cu_seqlens, cu_seqlens_kv=cu_seqlens).sum().backward()
    with other:
        attention(q, q, q, cu_seqlens_q=cu_seqlens, cu_seqlens_kv=cu_seqlens.clone()).sum().backward()
    assert same.elements <= 600 * 4 and other.elements >= 600 * 600


def test_soft_capped_scores_of_a_long_text_are_never_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without documents as well, and with the numbers of those that are written out."""
    monkeypatch.setattr(capped, "ELEMENTS", 1)
    monkeypatch.setattr(dot_product_attention, "_SOFTCAP_IN_BLOCKS", 600)
    torch.manual_seed(0)
    attention = DotProductAttention(2, 4, qkv_format="bshd", softcap=1.5, softmax_type="learnable")
    q = torch.randn(1, 600, 2, 4, requires_grad=True)
    tensors = (q, *attention.parameters())
    none_hidden = torch.zeros(1, 1, 1, 600, dtype=torch.bool)
    largest = Largest()
    with largest:
        y = attention(q, q, q)
        found = torch.autograd.grad(y.square().sum(), tensors)
    assert largest.elements <= 600 * 2 * 16
    wanted = attention(q, q, q, none_hidden)
    torch.testing.assert_close(y, wanted, rtol=1e-5, atol=2e-6)
    torch.testing.assert_close(found, torch.autograd.grad(wanted.square().sum(), tensors), rtol=1e-4, atol=1e-4)
    few = q[:, :599]
    with largest:
        attention(few, few, few)
    assert largest.elements >= 599 * 599, "of few queries the scores are written out, which takes less time"


@pytest.mark.parametrize("kind", ["padding_causal", "padding"])
def test_packed_sequences_are_those_of_the_mask(kind: str) -> None:
    """With an empty sequence, tokens behind the last one, a scale that was assigned, and heads that share keys."""
    attention = DotProductAttention(4, 8, 2, qkv_format="thd", attn_mask_type=kind)
    attention.softmax_scale = 0.2
    q, k = torch.randn(20, 4, 8), torch.randn(20, 2, 8)
    cu_seqlens = torch.tensor([0, 5, 5, 17], dtype=torch.int32)
    assert documents_of_lengths(cu_seqlens, 20).tolist() == [[0] * 5 + [2] * 12 + [-1] * 3]
    both = [attention(q, k, k, cu_seqlens_q=cu_seqlens, cu_seqlens_kv=x) for x in (cu_seqlens, cu_seqlens.clone())]
    torch.testing.assert_close(*both, rtol=1e-5, atol=2e-6)
    assert both[0][:17].abs().sum(-1).min() > 0 and not both[0][17:].any()


@pytest.mark.slow
def test_one_graph_serves_every_boundary() -> None:
    model = GPTModel(tiny_model(layers=1), dtype=torch.float32)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, backend=counter, fullgraph=True, dynamic=False)
    ids = torch.randint(257, (2, 12))
    for lengths in ([3, 9], [4, 4, 4], [12], [1] * 12):
        documents = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths)).repeat(2, 1)
        eager = model(ids, labels=ids, document_ids=documents)
        graph = compiled(ids, labels=ids, document_ids=documents)
        torch.testing.assert_close(graph.loss, eager.loss, rtol=1e-6, atol=1e-6)
        graph.loss.backward()
    assert counter.frame_count == 1


def test_what_it_cannot_serve_gets_the_mask() -> None:
    """A window, in one layer of a model: the same values as of a mask that the caller makes."""
    config = tiny_model()
    config = config.replace(attention=config.attention.replace(window_size=3))
    model = GPTModel(config, dtype=torch.float32)
    ids, documents = torch.randint(257, (1, 12)), torch.tensor([[0] * 5 + [1] * 5 + [-1] * 2])
    found = model(ids, document_ids=documents).logits
    torch.testing.assert_close(found, model(ids, attention_mask=sees_own_document(documents)).logits)


def test_bad_arguments_are_named() -> None:
    inputs = case(2, 2, 8, 8)
    with pytest.raises(ValueError, match=r"documents has shape \(2, 39\); allowed: \(2, 40\)"):
        packed_attention(*inputs, DOCUMENTS[:, 1:], scale=1.0)
    with pytest.raises(ValueError, match="there are 40 queries; allowed: up to 39"):
        packed_attention(inputs[0], *(x[:, :, 1:] for x in inputs[1:]), DOCUMENTS[:, 1:], scale=1.0)
    with pytest.raises(ValueError, match="the queries are on meta; allowed: cpu"):
        packed_attention(*(x.to("meta") for x in inputs), DOCUMENTS, scale=1.0)
    for options in ({"window": 4, "causal": False}, {"window": -1}):
        with pytest.raises(ValueError, match=r"window is -?\d and causal .*; allowed: None, or 0 and more"):
            packed_attention(*inputs, DOCUMENTS, scale=1.0, **options)
    with pytest.raises(ValueError, match=r"flash attention does not serve q torch.float32 \(2, 2, 40, 8\)"):
        packed_attention(*inputs, DOCUMENTS, scale=1.0, window=4)
    model = GPTModel(tiny_model(), dtype=torch.float32)
    ids = torch.zeros(1, 4, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"document_ids has shape \(1, 3\); allowed: \[1, 4\]"):
        model(ids, document_ids=ids[:, 1:])
    with pytest.raises(ValueError, match="document_ids are given with an attention_mask"):
        model(ids, document_ids=ids, attention_mask=torch.ones_like(ids))


def test_a_number_that_comes_again_begins_another_document() -> None:
    """In the mask as in packed attention, and in a model that needs the mask."""
    numbers, others = torch.tensor([[3, 3, 4, 3, 3, -1]]), torch.tensor([[0, 0, 1, 2, 2, -1]])
    assert torch.equal(sees_own_document(numbers), sees_own_document(others))
    assert sees_own_document(numbers)[0].sum(-1).tolist() == [2, 2, 1, 2, 2, 0]
    config = tiny_model()
    config = config.replace(attention=config.attention.replace(window_size=4))
    model, ids = GPTModel(config, dtype=torch.float32).eval(), torch.arange(6)[None]
    with torch.no_grad():
        again, renumbered = (model(ids, document_ids=n).logits[:, :5] for n in (numbers, others))
    assert torch.equal(again, renumbered)
