"""Attention within documents equals attention under their mask, forms no [S, S] tensor, and one graph serves every
boundary."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils._python_dispatch import TorchDispatchMode

from te_models import GPTModel
from te_models.kernels.packed_attention import documents_of_lengths, packed_attention, sees_own_document
from te_models.layers import DotProductAttention
from tests.training.runs import tiny_model

DOCUMENTS = torch.tensor([[0] * 10 + [1] * 22 + [3] + [-1] * 7, [5] * 40])


def case(heads: int, groups: int, channels: int, values: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    torch.manual_seed(0)
    shapes = ((heads, channels), (groups, channels), (groups, values))
    return [torch.randn(2, h, 40, c).to(dtype).requires_grad_() for h, c in shapes]


def masked(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    """The definition."""
    visible = sees_own_document(DOCUMENTS)[:, None]
    if causal:
        visible = visible & torch.ones(40, 40, dtype=torch.bool).tril()
    return F.scaled_dot_product_attention(q, k, v, visible, scale=0.3, enable_gqa=q.shape[1] != k.shape[1])


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("sizes", [(4, 4, 16, 16), (6, 2, 16, 16), (4, 4, 24, 16), (2, 1, 8, 20)], ids=str)
def test_values_and_gradients_are_those_of_the_mask(sizes: tuple[int, int, int, int], causal: bool) -> None:
    inputs = case(*sizes)
    out, expected = packed_attention(*inputs, DOCUMENTS, scale=0.3, causal=causal), masked(*inputs, causal)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=2e-6)
    assert not out[0, :, 33:].any(), "padding"
    dy = torch.randn_like(out)
    found, wanted = (torch.autograd.grad(y, inputs, dy) for y in (out, expected))
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=5e-6)
    assert not found[1][0, :, 33:].any(), "padding"


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("queries", [1, 8, 20, 33, 40])
def test_the_last_queries_are_those_of_all(queries: int, causal: bool) -> None:
    """Also where they begin within a document, or within padding."""
    q, k, v = case(6, 2, 16, 20)
    whole = packed_attention(q, k, v, DOCUMENTS, scale=0.3, causal=causal)[:, :, -queries:]
    last = packed_attention(q[:, :, -queries:], k, v, DOCUMENTS, scale=0.3, causal=causal)
    torch.testing.assert_close(last, whole, rtol=1e-5, atol=2e-6)
    dy = torch.randn_like(last)
    found, wanted = (torch.autograd.grad(y, (q, k, v), dy) for y in (last, whole))
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=5e-6)


def test_in_bfloat16_it_is_as_near_as_the_mask() -> None:
    inputs = case(4, 2, 16, 16, torch.bfloat16)
    q, k, v = inputs
    out = packed_attention(*inputs, DOCUMENTS, scale=0.3)
    last = packed_attention(q[:, :, -16:], k, v, DOCUMENTS, scale=0.3)
    assert out.dtype is last.dtype is torch.bfloat16
    torch.testing.assert_close(out, masked(*inputs, True), rtol=2**-7, atol=2**-7)
    torch.testing.assert_close(last, masked(*inputs, True)[:, :, -16:], rtol=2**-7, atol=2**-7)


class Largest(TorchDispatchMode):
    """Notes the most elements that a result of an operation has."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for x in result if isinstance(result, tuple) else (result,):
            if isinstance(x, Tensor):
                self.elements = max(self.elements, x.numel())
        return result


def test_no_tensor_is_quadratic_in_the_sequence() -> None:
    attention = DotProductAttention(1, 4, qkv_format="thd", attn_mask_type="padding_causal")
    q = torch.randn(600, 1, 4, requires_grad=True)
    cu_seqlens = torch.arange(0, 601, 50, dtype=torch.int32)
    same, other = Largest(), Largest()
    with same:
        attention(q, q, q, cu_seqlens_q=cu_seqlens, cu_seqlens_kv=cu_seqlens).sum().backward()
    with other:
        attention(q, q, q, cu_seqlens_q=cu_seqlens, cu_seqlens_kv=cu_seqlens.clone()).sum().backward()
    assert same.elements <= 600 * 4 and other.elements >= 600 * 600


@pytest.mark.parametrize("kind", ["padding_causal", "padding"])
def test_packed_sequences_are_those_of_the_mask(kind: str) -> None:
    """With an empty sequence, tokens behind the last one, a scale that was assigned, and heads that share keys."""
    torch.manual_seed(0)
    attention = DotProductAttention(4, 8, 2, qkv_format="thd", attn_mask_type=kind)
    attention.softmax_scale = 0.2
    q, k = torch.randn(20, 4, 8), torch.randn(20, 2, 8)
    cu_seqlens = torch.tensor([0, 5, 5, 17], dtype=torch.int32)
    assert documents_of_lengths(cu_seqlens, 20).tolist() == [[0] * 5 + [2] * 12 + [-1] * 3]
    both = [attention(q, k, k, cu_seqlens_q=cu_seqlens, cu_seqlens_kv=x) for x in (cu_seqlens, cu_seqlens.clone())]
    torch.testing.assert_close(*both, rtol=1e-5, atol=2e-6)
    assert both[0][:17].abs().sum(-1).min() > 0 and not both[0][17:].any()


def test_one_graph_serves_every_boundary() -> None:
    torch.manual_seed(0)
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
    torch.manual_seed(0)
    config = tiny_model()
    config = config.replace(attention=config.attention.replace(window_size=3))
    model = GPTModel(config, dtype=torch.float32)
    ids, documents = torch.randint(257, (1, 12)), torch.tensor([[0] * 5 + [1] * 5 + [-1] * 2])
    found = model(ids, document_ids=documents).logits
    expected = model(ids, attention_mask=sees_own_document(documents)).logits
    torch.testing.assert_close(found, expected)


def test_bad_arguments_are_named() -> None:
    inputs = case(2, 2, 8, 8)
    with pytest.raises(ValueError, match=r"documents has shape \(2, 39\); allowed: \(2, 40\)"):
        packed_attention(*inputs, DOCUMENTS[:, 1:], scale=1.0)
    with pytest.raises(ValueError, match="there are 40 queries; allowed: up to 39"):
        packed_attention(inputs[0], *(x[:, :, 1:] for x in inputs[1:]), DOCUMENTS[:, 1:], scale=1.0)
    with pytest.raises(ValueError, match="the queries are on meta; allowed: cpu"):
        packed_attention(*(x.to("meta") for x in inputs), DOCUMENTS, scale=1.0)
    model = GPTModel(tiny_model(), dtype=torch.float32)
    ids = torch.zeros(1, 4, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"document_ids has shape \(1, 3\); allowed: \[1, 4\]"):
        model(ids, document_ids=ids[:, 1:])
    with pytest.raises(ValueError, match="document_ids are given with an attention_mask"):
        model(ids, document_ids=ids, attention_mask=torch.ones_like(ids))
