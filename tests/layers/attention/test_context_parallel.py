"""Attention layers whose ranks share each sequence give each rank its part of the whole sequences' result, and of the
gradients. On two ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from te_models.layers import (
    DotProductAttention,
    MultiheadAttention,
    RotaryPositionEmbedding,
    TransformerLayer,
    apply_rotary_pos_emb,
)
from te_models.layers.distributed.context_parallel import ContextShard, own_positions
from tests.ranks import on_ranks

BATCH, LENGTH, HEADS, GROUPS, CHANNELS = 2, 16, 4, 2, 8
CORES: dict[str, dict[str, Any]] = {
    "causal": {},
    "bottom right": {"attn_mask_type": "causal_bottom_right", "softcap": 2.0},
    "no mask": {"attn_mask_type": "no_mask", "num_gqa_groups": GROUPS},
    "window": {"window_size": (3, 0), "softmax_type": "learnable", "num_gqa_groups": GROUPS},
}


def own(x: Tensor, dim: int) -> Tensor:
    return own_positions(x, ContextShard(dist.get_rank(), 2, ""), dim)


def compare(whole: nn.Module, shared: nn.Module, inputs: list[Tensor], dim: int, **options: Any) -> None:
    """Results, and gradients of inputs and parameters, whose sums over the ranks are the whole ones'."""
    assert shared.load_state_dict(whole.state_dict()) is not None
    shared.set_context_parallel_group(dist.group.WORLD, [0, 1], None, "p2p")
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


@on_ranks(2)
@pytest.mark.parametrize("layout", ["sbhd", "bshd"])
@pytest.mark.parametrize("name", CORES)
def test_a_rank_has_its_part_of_attention(name: str, layout: str) -> None:
    torch.manual_seed(0)
    options = {"qkv_format": layout, **CORES[name]}
    modules = [DotProductAttention(HEADS, CHANNELS, **options) for _ in range(2)]
    lead = (LENGTH, BATCH) if layout == "sbhd" else (BATCH, LENGTH)
    groups = options.get("num_gqa_groups", HEADS)
    inputs = [torch.randn(*lead, heads, CHANNELS) for heads in (HEADS, groups, groups)]
    compare(*modules, inputs, dim=0 if layout == "sbhd" else 1, checkpoint_core_attention=name == "window")


@on_ranks(2)
def test_a_rank_has_its_part_of_multihead_attention() -> None:
    torch.manual_seed(0)
    options = {"num_gqa_groups": GROUPS, "bias": False, "attention_dropout": 0.0}
    modules = [MultiheadAttention(HEADS * CHANNELS, HEADS, **options) for _ in range(2)]
    angles = RotaryPositionEmbedding(CHANNELS)(LENGTH)
    compare(*modules, [torch.randn(LENGTH, BATCH, HEADS * CHANNELS)], dim=0, rotary_pos_emb=angles)


@on_ranks(2)
def test_a_rank_has_its_part_of_a_layer() -> None:
    torch.manual_seed(0)
    options = {"attn_input_format": "bshd", "hidden_dropout": 0.0, "attention_dropout": 0.0}
    modules = [TransformerLayer(HEADS * CHANNELS, 64, HEADS, **options) for _ in range(2)]
    compare(*modules, [torch.randn(BATCH, LENGTH, HEADS * CHANNELS)], dim=1)


@on_ranks(2)
def test_what_ranks_cannot_share_is_refused() -> None:
    group = dist.group.WORLD
    attention = DotProductAttention(HEADS, CHANNELS, qkv_format="bshd", cp_group=group)
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
    with pytest.raises(ValueError, match="cp_comm_type is 'ring'; allowed: 'p2p', 'all_gather', 'a2a', 'a2a\\+p2p'"):
        attention.set_context_parallel_group(group, None, None, "ring")
    with pytest.raises(ValueError, match="cp_group is given with attention_type 'cross'; allowed: 'self'"):
        MultiheadAttention(32, HEADS, attention_type="cross").set_context_parallel_group(group)
    with pytest.raises(ValueError, match="cp_group is given with layer_type 'decoder'; allowed: 'encoder'"):
        TransformerLayer(32, 64, HEADS, layer_type="decoder").set_context_parallel_group(group)
    attention.set_context_parallel_group(None)
    assert attention(x[:, :3], x[:, :3], x[:, :3]).shape == (BATCH, 3, HEADS * CHANNELS)


def test_positions_that_ranks_do_not_share() -> None:
    t, angles = torch.zeros(4, 1, 2, 4), torch.zeros(16, 1, 1, 4)
    with pytest.raises(ValueError, match="cp_rank is 2 and cp_size 2; allowed: a rank from 0 to cp_size - 1"):
        apply_rotary_pos_emb(t, angles, cp_size=2, cp_rank=2)
    with pytest.raises(ValueError, match="cp_size is 2 with start_positions; allowed: 1"):
        apply_rotary_pos_emb(t, angles, start_positions=torch.zeros(1, dtype=torch.int64), cp_size=2)
    with pytest.raises(ValueError, match="freqs has 7 positions; allowed: at least 8"):
        apply_rotary_pos_emb(t, angles[:7], cp_size=2)
