"""Attention in a causal window, or with sinks: the numbers of one mask of all queries and keys, without such a mask."""

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from te_models.kernels import flash_attention
from te_models.kernels.packed_attention import sees_own_document
from te_models.layers import DotProductAttention
from te_models.layers.attention import dot_product_attention
from te_models.layers.attention.mask import Masking
from te_models.layers.attention.windowed import attend_in_window, saves
from tests.compare import Largest

B, N, G, D = 2, 4, 2, 16


def attention(window: int, **options: Any) -> DotProductAttention:
    torch.manual_seed(0)
    shared: dict[str, Any] = {"qkv_format": "bshd", "attn_mask_type": "causal_bottom_right", "window_size": window}
    layer = DotProductAttention(N, D, G, **(shared | options))
    if layer.softmax_offset is not None:
        torch.nn.init.normal_(layer.softmax_offset)
    return layer


def inputs(queries: int, keys: int) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(1)
    sizes = ((queries, N), (keys, G), (keys, G))
    return tuple(torch.randn(B, rows, heads, D, requires_grad=True) for rows, heads in sizes)


def documents(keys: int) -> Tensor:
    """Of many lengths, a few tokens of padding between them and at the end."""
    numbers = (torch.rand(B, keys, generator=torch.Generator().manual_seed(2)) < 0.02).long().cumsum(1)
    numbers[0, 40:] += 1
    numbers[:, -5:] = -1
    numbers[0, 30:40] = -1
    return numbers


def with_gradients(y: Tensor, tensors: tuple[Tensor, ...]) -> list[Tensor]:
    return [y, *torch.autograd.grad((y * torch.linspace(0, 1, y.numel()).view_as(y)).sum(), tensors)]


def close(found: list[Tensor], expected: list[Tensor]) -> None:
    for a, b in zip(found, expected, strict=True):
        assert (a - b).abs().max() <= 3e-6 * b.abs().max()


def masked(layer: DotProductAttention, monkeypatch: pytest.MonkeyPatch, tensors: Any, **options: Any) -> list[Tensor]:
    """Return what one mask gives."""
    with monkeypatch.context() as patch:
        patch.setattr(dot_product_attention, "saves", lambda *_: False)
        patch.setattr(flash_attention, "uses_flash_attention", lambda *_: False)
        return with_gradients(layer(*tensors, **options), tensors)


KINDS = {"flash": {}, "torch": {}, "softcap": {"softcap": 20.0}, "sinks": {"softmax_type": "learnable"}}
SIZES = [(257, 257, 8), (300, 300, 70), (400, 480, 70), (257, 297, 8), (193, 193, 64)]
"""Queries, keys, window: a last block that is not full, blocks larger than a window, earlier keys by more than a block
and by less, which is computed at once, and as few as there are blocks of."""


@pytest.mark.matrix
@pytest.mark.parametrize(("queries", "keys", "window"), SIZES)
@pytest.mark.parametrize("kind", KINDS)
def test_blocks_are_the_mask(kind: str, queries: int, keys: int, window: int, monkeypatch: pytest.MonkeyPatch) -> None:
    if kind == "torch":
        monkeypatch.setattr(flash_attention, "uses_flash_attention", lambda *_: False)
    layer, tensors = attention(window, **KINDS[kind]), inputs(queries, keys)
    for mask in [None, *(torch.rand(rows, 1, 1, keys) < 0.2 for rows in (1, B))]:
        found = with_gradients(layer(*tensors, attention_mask=mask), tensors)
        close(found, masked(layer, monkeypatch, tensors, attention_mask=mask))
    again = with_gradients(layer(*tensors, checkpoint_core_attention=True), tensors)
    assert all(map(torch.equal, again, with_gradients(layer(*tensors), tensors)))


@pytest.mark.matrix
@pytest.mark.parametrize(("queries", "keys", "window"), SIZES)
@pytest.mark.parametrize("kind", KINDS)
def test_documents_are_seen_within_the_window(
    kind: str, queries: int, keys: int, window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kind == "torch":
        monkeypatch.setattr(flash_attention, "uses_flash_attention", lambda *_: False)
    layer, tensors, numbers = attention(window, **KINDS[kind]), inputs(queries, keys), documents(keys)
    assert layer.attends_documents(torch.device("cpu"))
    mask = ~sees_own_document(numbers, numbers[:, keys - queries :])[:, None]
    found = with_gradients(layer.attend_documents(*tensors, numbers), tensors)
    close(found, masked(layer, monkeypatch, tensors, attention_mask=mask))


def test_packed_sequences_have_windows_of_their_own() -> None:
    """In "thd", of the call's window, too, in place of the module's."""
    lengths = [3, 200, 1, 90]
    q, k, v = (t[0].detach() for t in inputs(sum(lengths), sum(lengths)))
    cu = torch.tensor([0, *itertools.accumulate(lengths)])
    layer = attention(8, qkv_format="thd", attn_mask_type="padding_causal")
    alone = attention(8, attn_mask_type="causal")
    for window in (None, 70, (-1, 0)):
        packed = layer(q, k, v, cu_seqlens_q=cu, cu_seqlens_kv=cu, window_size=window)
        rows = [t.split(lengths) for t in (q, k, v)]
        each = [alone(*(t[None] for t in row), window_size=window)[0] for row in zip(*rows, strict=True)]
        close([packed], [torch.cat(each)])


@pytest.mark.parametrize("kind", KINDS)
def test_no_tensor_has_all_queries_and_keys(kind: str) -> None:
    length, window = 1024, 64
    layer, tensors, numbers = attention(window, **KINDS[kind]), inputs(length, length), documents(length)
    for run in (lambda: layer(*tensors), lambda: layer.attend_documents(*tensors, numbers)):
        with Largest() as largest:
            run().sum().backward()
        assert largest.elements <= B * N * length * 2 * window < length * length * B


@pytest.mark.parametrize("kind", ["learnable", "off-by-one"])
@pytest.mark.parametrize(("queries", "keys"), [(300, 300), (200, 330)])
def test_sinks_alone_need_no_scores(kind: str, queries: int, keys: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's flash attention is scaled by the share of the sink; the sink gets its gradient."""
    layer, tensors = attention(8, window_size=None, softmax_type=kind), inputs(queries, keys)
    trained = (*tensors, *layer.parameters())
    with Largest() as largest:
        found = with_gradients(layer(*tensors), trained)
    assert largest.elements < queries * keys
    again = with_gradients(layer(*tensors, checkpoint_core_attention=True), trained)
    assert all(map(torch.equal, again, found))
    with monkeypatch.context() as patch:
        patch.setattr(Masking, "hides_later_keys_alone", lambda *_: False)
        patch.setattr(flash_attention, "uses_flash_attention", lambda *_: False)
        close(found, with_gradients(layer(*tensors), trained))


def test_blocks_are_for_long_sequences() -> None:
    """With fewer queries than three blocks they save little; keys before the queries are a whole block, or none."""
    saved = [saves(100, queries, keys) for queries, keys in ((300, 300), (301, 301), (301, 350), (301, 401))]
    assert saved == [False, True, False, True]
    calls: list[tuple[int, ...]] = []

    def noted(q: Tensor, k: Tensor, v: Tensor, visible: Tensor) -> Tensor:
        calls.append((q.shape[0], q.shape[1], k.shape[1], *visible.shape))
        return q.flatten(2)

    q, k, v = inputs(301, 301)
    assert torch.equal(attend_in_window(noted, q, k, v, 100), q.flatten(2))
    assert calls == [(B, 100, 100, 1, 1, 100, 100), (3 * B, 100, 199, 1, 1, 100, 199)]


@pytest.mark.slow
def test_an_exported_program_has_any_length() -> None:
    layer = attention(8, attn_mask_type="causal")
    tensors = tuple(t.detach() for t in inputs(32, 32))
    length = torch.export.Dim("length", min=4, max=512)
    program = torch.export.export(layer, tensors, dynamic_shapes=({1: length}, {1: length}, {1: length})).module()
    for rows in (8, 257):
        some = tuple(t.detach() for t in inputs(rows, rows))
        close([program(*some)], [layer(*some)])


@pytest.mark.slow
@pytest.mark.parametrize("trained", [False, True])
def test_other_lengths_compile_at_most_twice(trained: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once for those with blocks, once for those without. trained: with the graphs of gradients."""
    monkeypatch.setattr(flash_attention, "uses_flash_attention", lambda *_: False)
    layer = attention(8)
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager" if trained else "eager")
    with torch.set_grad_enabled(trained):
        for length in (30, 300):
            compiled(*inputs(length, length))
        with torch.compiler.set_stance("fail_on_recompile"):
            for length in (40, 180, 257, 400):
                tensors = inputs(length, length)
                close([compiled(*tensors)], [layer(*tensors)])
