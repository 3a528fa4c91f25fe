"""Attention layers whose two ranks share each sequence give each its part of the whole's result and gradients."""

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import te_models.layers as te
from te_models.kernels.packed_attention import sees_own_document
from te_models.layers.attention import ring as ring_module
from te_models.layers.attention.dot_product_attention import DotProductAttention as InnerAttention
from te_models.layers.attention.ring import Hidden
from te_models.layers.distributed.context_parallel import ContextShard, own_positions
from tests.compare import refused
from tests.ranks import on_ranks

BATCH, LENGTH, HEADS, GROUPS, CHANNELS = 2, 16, 4, 2, 8
CORES: dict[str, dict[str, Any]] = {
    "causal": {},
    "bottom right": {"attn_mask_type": "causal_bottom_right", "softcap": 2.0},
    "no mask": {"attn_mask_type": "no_mask", "num_gqa_groups": GROUPS},
    "window": {"window_size": (3, 0), "softmax_type": "learnable", "num_gqa_groups": GROUPS},
}
WAYS = ("p2p", "all_gather", "a2a")
RULES: dict[str, dict[str, Any]] = {
    "plain": {},
    "capped": {"softcap": 2.0},
    "window": {"window_size": 9, "softmax_type": "learnable"},
    "sinks": {"softmax_type": "learnable"},
}


def own(x: Tensor, dim: int) -> Tensor:
    return own_positions(x, ContextShard(dist.get_rank(), dist.get_world_size(), ""), dim)


def compare(
    whole: nn.Module, shared: nn.Module, inputs: list[Tensor], dim: int, way: str = "p2p", **options: Any
) -> None:
    """Results, and gradients of inputs and parameters, whose sums over the ranks are the whole ones'."""
    assert shared.load_state_dict(whole.state_dict()) is not None
    shared.set_context_parallel_group(dist.group.WORLD, [0, 1], None, way)
    inputs = [x.requires_grad_() for x in inputs]
    parts = [own(x.detach(), dim).requires_grad_() for x in inputs]
    expected, found = whole(*inputs, **options), shared(*parts, **options)
    torch.testing.assert_close(found, own(expected, dim), rtol=1e-5, atol=1e-5)
    dy = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1))
    expected.backward(dy)
    found.backward(own(dy, dim))
    for part, x in zip(parts, inputs, strict=True):
        torch.testing.assert_close(part.grad, own(x.grad, dim), rtol=1e-5, atol=1e-5)
    for (name, parameter), right in zip(shared.named_parameters(), whole.parameters(), strict=True):
        dist.all_reduce(parameter.grad)
        torch.testing.assert_close(parameter.grad, right.grad, rtol=1e-5, atol=2e-5, msg=name)


def part_of_attention(name: str, layout: str, way: str) -> None:
    torch.manual_seed(0)
    options = {"qkv_format": layout, **CORES[name]}
    modules = [te.DotProductAttention(HEADS, CHANNELS, **options) for _ in range(2)]
    lead = (LENGTH, BATCH) if layout == "sbhd" else (BATCH, LENGTH)
    groups = options.get("num_gqa_groups", HEADS)
    inputs = [torch.randn(*lead, heads, CHANNELS) for heads in (HEADS, groups, groups)]
    compare(*modules, inputs, dim=0 if layout == "sbhd" else 1, way=way, checkpoint_core_attention=name == "window")


@on_ranks(2)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("layout", ["sbhd", "bshd"])
@pytest.mark.parametrize("name", CORES)
def test_a_rank_has_its_part_of_attention(name: str, layout: str, way: str) -> None:
    part_of_attention(name, layout, way)


@on_ranks(2)
@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_one_graph_has_the_bits_of_eager_attention(way: str) -> None:
    torch.manual_seed(0)
    options: dict[str, Any] = {"qkv_format": "bshd", "num_gqa_groups": GROUPS, "window_size": (9, 0)}
    attention = te.DotProductAttention(HEADS, CHANNELS, cp_group=dist.group.WORLD, cp_comm_type=way, **options)
    graph = torch.compile(attention, fullgraph=True, dynamic=False, backend="aot_eager")
    inputs = [torch.randn(BATCH, LENGTH, n, CHANNELS).requires_grad_() for n in (HEADS, GROUPS, GROUPS)]
    results = [function(*inputs) for function in (attention, graph)]
    (y, *eager), (found, *compiled) = ((r, *torch.autograd.grad(r.square().sum(), inputs)) for r in results)
    assert torch.equal(y, found) and all(map(torch.equal, eager, compiled))


@on_ranks(4)
@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("layout", ["sbhd", "bshd"])
@pytest.mark.parametrize("name", CORES)
def test_four_ranks_have_their_parts_of_attention(name: str, layout: str, way: str) -> None:
    """Two groups of keys, which ranks that exchange heads have twice."""
    part_of_attention(name, layout, way)


def definition(
    q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None = None, *, documents: Tensor | None, core: InnerAttention
) -> Tensor:
    """Causal attention, written down."""
    length, copies = q.shape[1], q.shape[2] // k.shape[2]
    scores = torch.einsum("bsnd,blnd->bnsl", q, k.repeat_interleave(copies, 2)) * core.softmax_scale
    if core.softcap is not None:
        scores = core.softcap * torch.tanh(scores / core.softcap)
    distance = torch.arange(length)[:, None] - torch.arange(length)
    seen = ((distance >= 0) & (distance < (core.window_size or length))).expand(len(q), -1, -1)
    if documents is not None:
        seen = seen & sees_own_document(documents)
    weights = scores.exp() * seen[:, None]
    total = weights.sum(-1, keepdim=True) + (0 if sink is None else sink.exp()[:, None, None])
    p = weights / torch.where(total > 0, total, 1.0)
    return torch.einsum("bnsl,blne->bsne", p, v.repeat_interleave(copies, 2)).flatten(2)


def exact_by_ring(name: str) -> None:
    """In float32 and float64; documents, one beginning within a chunk, and padding; more queries than have scores."""
    group, rank, ranks = dist.group.WORLD, dist.get_rank(), dist.get_world_size()
    shard, wrong = ContextShard(rank, ranks, group.group_name, "p2p"), []
    length = 16 * ranks
    numbers = torch.zeros(BATCH, length, dtype=torch.int64)
    numbers[0, 5:], numbers[1, :3], numbers[1, length // 2 :] = 1, -1, 7
    for dtype, bound in ((torch.float32, 1e-6), (torch.float64, 1e-14)):
        for documents in (None, numbers):
            torch.manual_seed(0)
            core = InnerAttention(HEADS, (CHANNELS, 6), GROUPS, **RULES[name]).to(dtype)
            if core.softmax_offset is not None:
                torch.nn.init.normal_(core.softmax_offset)
            sizes = (HEADS, CHANNELS), (GROUPS, CHANNELS), (GROUPS, 6)
            inputs = [torch.randn(BATCH, length, *size, dtype=dtype).requires_grad_() for size in sizes]
            exact = [x.detach().double().requires_grad_() for x in (*inputs, *core.parameters())]
            y = definition(*exact, documents=documents, core=core)
            dy = torch.randn(y.shape, dtype=dtype)
            wanted = torch.autograd.grad(y, exact, dy.double())
            parts = [own(x.detach(), 1).requires_grad_() for x in inputs]
            with mock.patch.object(ring_module, "_ROWS", 3):
                found = core.attend_ring(*parts, shard, Hidden(documents=documents))
                got = list(torch.autograd.grad(found, [*parts, *core.parameters()], own(dy, 1)))
            for x in got[3:]:
                dist.all_reduce(x)
            pairs = [(found, own(y, 1)), *((a, own(b, 1)) for a, b in zip(got[:3], wanted[:3], strict=True))]
            for number, (a, b) in enumerate([*pairs, *zip(got[3:], wanted[3:], strict=True)]):
                error = float((a - b).abs().max() / b.abs().max())
                wrong += [] if error <= bound else [(dtype, documents is None, number, error)]
    assert wrong == [], wrong


@on_ranks(2)
@pytest.mark.parametrize("name", RULES)
def test_the_ring_is_exact(name: str) -> None:
    exact_by_ring(name)


@on_ranks(4)
@pytest.mark.slow
@pytest.mark.parametrize("name", RULES)
def test_the_ring_of_four_ranks_is_exact(name: str) -> None:
    exact_by_ring(name)


@on_ranks(2)
def test_a_rank_has_its_part_of_multihead_attention() -> None:
    options = {"num_gqa_groups": GROUPS, "bias": False, "attention_dropout": 0.0}
    modules = [te.MultiheadAttention(HEADS * CHANNELS, HEADS, **options) for _ in range(2)]
    angles = te.RotaryPositionEmbedding(CHANNELS)(LENGTH)
    compare(*modules, [torch.randn(LENGTH, BATCH, HEADS * CHANNELS)], dim=0, rotary_pos_emb=angles)


@on_ranks(2)
def test_a_rank_has_its_part_of_a_layer() -> None:
    options = {"attn_input_format": "bshd", "hidden_dropout": 0.0, "attention_dropout": 0.0}
    modules = [te.TransformerLayer(HEADS * CHANNELS, 64, HEADS, **options) for _ in range(2)]
    compare(*modules, [torch.randn(BATCH, LENGTH, HEADS * CHANNELS)], dim=1)


@on_ranks(2)
def test_what_ranks_cannot_share_is_refused() -> None:
    group = dist.group.WORLD
    attention = te.DotProductAttention(HEADS, CHANNELS, qkv_format="bshd", cp_group=group)
    x = torch.zeros(BATCH, LENGTH, HEADS, CHANNELS)
    padding = torch.zeros(BATCH, 1, 1, LENGTH, dtype=torch.bool)
    for options, what in (
        ({"attention_mask": padding, "attn_mask_type": "padding"}, "attn_mask_type 'padding'"),
        ({"attention_mask": padding}, "an attention_mask"),
        ({"core_attention_bias_type": "alibi"}, "core_attention_bias_type 'alibi'"),
        ({"attn_mask_type": "no_mask", "window_size": (2, 2)}, r"window_size \(2, 2\)"),
    ):
        with pytest.raises(ValueError, match=f"a context-parallel group with {what}; allowed: attn_mask_type 'causal'"):
            attention(x, x, x, **options)
    with pytest.raises(ValueError, match="there are 3 queries and 3 keys; allowed with a context-parallel group"):
        attention(x[:, :3], x[:, :3], x[:, :3])
    for way in ("ring", "a2a+p2p"):
        with pytest.raises(ValueError, match=r"cp_comm_type is '.*'; allowed: 'all_gather', 'p2p', 'a2a'"):
            attention.set_context_parallel_group(group, None, None, way)
    with pytest.raises(ValueError, match="num_attention_heads is 3; allowed with cp_comm_type 'a2a': a multiple"):
        te.DotProductAttention(3, CHANNELS, cp_group=group, cp_comm_type="a2a")
    dropping = te.DotProductAttention(HEADS, CHANNELS, attention_dropout=0.1, qkv_format="bshd", cp_group=group)
    refused(lambda: dropping(x, x, x), "attention_dropout is 0.1; allowed with cp_comm_type 'p2p': 0, or another")
    with pytest.raises(ValueError, match="cp_group is given with attention_type 'cross'; allowed: 'self'"):
        te.MultiheadAttention(32, HEADS, attention_type="cross").set_context_parallel_group(group)
    with pytest.raises(ValueError, match="cp_group is given with layer_type 'decoder'; allowed: 'encoder'"):
        te.TransformerLayer(32, 64, HEADS, layer_type="decoder").set_context_parallel_group(group)
    attention.set_context_parallel_group(None)
    assert attention(x[:, :3], x[:, :3], x[:, :3]).shape == (BATCH, 3, HEADS * CHANNELS)


def test_positions_that_ranks_do_not_share() -> None:
    t, angles = torch.zeros(4, 1, 2, 4), torch.zeros(16, 1, 1, 4)
    with pytest.raises(ValueError, match="cp_rank is 2 and cp_size 2; allowed: a rank from 0 to cp_size - 1"):
        te.apply_rotary_pos_emb(t, angles, cp_size=2, cp_rank=2)
    with pytest.raises(ValueError, match="cp_size is 2 with start_positions; allowed: 1"):
        te.apply_rotary_pos_emb(t, angles, start_positions=torch.zeros(1, dtype=torch.int64), cp_size=2)
    refused(lambda: te.apply_rotary_pos_emb(t, angles[:7], cp_size=2), "freqs has 7 positions; allowed: at least 8")
