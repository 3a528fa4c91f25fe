"""What each of two processes of test_context_parallel does: this module is run with RESULTS.

A case computes attention of whole sequences, and of this rank's positions of them with the other rank, and compares
its part of results and gradients.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from te_models.layers import DotProductAttention, MultiheadAttention, RotaryPositionEmbedding, TransformerLayer
from te_models.layers.distributed.context_parallel import ContextShard, own_positions
from tests.ranks import report_cases

BATCH, LENGTH, HEADS, GROUPS, CHANNELS = 2, 16, 4, 2, 8
CORES: dict[str, dict[str, Any]] = {
    "causal": {},
    "bottom right": {"attn_mask_type": "causal_bottom_right", "softcap": 2.0},
    "no mask": {"attn_mask_type": "no_mask", "num_gqa_groups": GROUPS},
    "window": {"window_size": (3, 0), "softmax_type": "learnable", "num_gqa_groups": GROUPS},
}
CASES = [*(f"{name} {layout}" for name in CORES for layout in ("sbhd", "bshd")), "multihead", "layer", "refused"]


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


def core(name: str, layout: str) -> None:
    torch.manual_seed(0)
    options = {"qkv_format": layout, **CORES[name]}
    modules = [DotProductAttention(HEADS, CHANNELS, **options) for _ in range(2)]
    lead = (LENGTH, BATCH) if layout == "sbhd" else (BATCH, LENGTH)
    groups = options.get("num_gqa_groups", HEADS)
    inputs = [torch.randn(*lead, heads, CHANNELS) for heads in (HEADS, groups, groups)]
    compare(*modules, inputs, dim=0 if layout == "sbhd" else 1, checkpoint_core_attention=name == "window")


def multihead() -> None:
    torch.manual_seed(0)
    options = {"num_gqa_groups": GROUPS, "bias": False, "attention_dropout": 0.0}
    modules = [MultiheadAttention(HEADS * CHANNELS, HEADS, **options) for _ in range(2)]
    angles = RotaryPositionEmbedding(CHANNELS)(LENGTH)
    compare(*modules, [torch.randn(LENGTH, BATCH, HEADS * CHANNELS)], dim=0, rotary_pos_emb=angles)


def layer() -> None:
    torch.manual_seed(0)
    options = {"attn_input_format": "bshd", "hidden_dropout": 0.0, "attention_dropout": 0.0}
    modules = [TransformerLayer(HEADS * CHANNELS, 64, HEADS, **options) for _ in range(2)]
    compare(*modules, [torch.randn(BATCH, LENGTH, HEADS * CHANNELS)], dim=1)


def refused() -> None:
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


if __name__ == "__main__":
    cases: dict[str, Any] = {name: functools.partial(core, *name.rsplit(" ", 1)) for name in CASES[:-3]}
    report_cases(cases | {"multihead": multihead, "layer": layer, "refused": refused}, sys.argv[1])
