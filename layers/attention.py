"""Softmax attention through torch's scaled_dot_product_attention, which picks the device's best kernel.

B batch, S query length, L key length, N query heads, G key/value heads (query groups), D head channels.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class DotProductAttention(nn.Module):
    """Grouped-query attention over given q, k, v. Transformer Engine: `te.pytorch.DotProductAttention` ("bshd").

    attn_mask_type: "causal" (query i of S sees keys up to L - S + i, so a KV cache needs no mask) or "no_mask".
    window_size: number of visible positions, the query's own included, with "causal" only. softcap:
    `softcap * tanh(score / softcap)` (Gemma 2). softmax_type "learnable": one extra logit per head, parameter
    softmax_offset [N], that takes probability and adds nothing (gpt-oss sinks); "vanilla": none. softmax_scale None:
    1/sqrt(kv_channels). It may be assigned later: from then on it is data, and queries are multiplied by it, so that
    another value recompiles nothing. ValueError for options that it does not have.
    """

    def __init__(
        self,
        num_attention_heads: int,
        kv_channels: int,
        num_gqa_groups: int | None = None,
        attention_dropout: float = 0.0,
        *,
        attn_mask_type: str = "causal",
        window_size: int | None = None,
        softmax_scale: float | None = None,
        softcap: float | None = None,
        softmax_type: str = "vanilla",
        params_dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        for name, value, allowed in (
            ("attn_mask_type", attn_mask_type, ("causal", "no_mask")),
            ("softmax_type", softmax_type, ("vanilla", "learnable")),
        ):
            if value not in allowed:
                raise ValueError(f"{name} is {value!r}; allowed: {', '.join(map(repr, allowed))}")
        self.num_attention_heads = num_attention_heads
        self.num_gqa_groups = num_attention_heads if num_gqa_groups is None else num_gqa_groups
        if self.num_gqa_groups < 1 or num_attention_heads % self.num_gqa_groups:
            raise ValueError(f"num_gqa_groups is {num_gqa_groups}; allowed: a divisor of {num_attention_heads} heads")
        if window_size is not None and not (isinstance(window_size, int) and window_size > 0):
            raise ValueError(f"window_size is {window_size!r}; allowed: a positive number of positions, or None")
        if window_size is not None and attn_mask_type != "causal":
            raise ValueError(f"window_size is {window_size} with attn_mask_type {attn_mask_type!r}; allowed: 'causal'")
        if softcap is not None and softcap <= 0:
            raise ValueError(f"softcap is {softcap}; allowed: a positive number, or None")
        self.attention_dropout = attention_dropout
        self.attn_mask_type = attn_mask_type
        self.window_size = window_size
        self._scale = 1.0 / math.sqrt(kv_channels) if softmax_scale is None else softmax_scale
        self._assigned_scale: Tensor | None = None  # float32 [], whatever the module's dtype
        self._device = device
        self.softcap = softcap
        self.softmax_offset = None
        if softmax_type == "learnable":
            self.softmax_offset = nn.Parameter(
                torch.zeros(num_attention_heads, dtype=params_dtype or torch.get_default_dtype(), device=device)
            )

    @property
    def softmax_scale(self) -> float:
        return self._scale

    @softmax_scale.setter
    def softmax_scale(self, value: float) -> None:
        if not value > 0:
            raise ValueError(f"softmax_scale is {value!r}; allowed: a positive number")
        self._scale = float(value)
        if self._assigned_scale is None:
            self._assigned_scale = torch.empty((), dtype=torch.float32, device=self._device)
        self._assigned_scale.fill_(self._scale)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        super()._apply(fn, recurse)
        self._device = fn(torch.empty(0, device=self._device)).device
        if self._assigned_scale is not None:
            self._assigned_scale = torch.tensor(self._scale, dtype=torch.float32, device=self._device)
        return self

    def reset_parameters(self) -> None:
        """Start without a preference for the sink: offset 0."""
        if self.softmax_offset is not None:
            nn.init.zeros_(self.softmax_offset)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """query: [B, S, N, D]; key: [B, L, G, D]; value: [B, L, G, Dv]; attention_mask: bool, broadcastable to
        [B, N, S, L], True where a key is hidden (Transformer Engine's convention), added to the mask type's own.
        Returns [B, S, N * Dv]. A row with every key hidden gives zeros.
        """
        for name, given, heads in (
            ("query", query, self.num_attention_heads),
            ("key", key, self.num_gqa_groups),
            ("value", value, self.num_gqa_groups),
        ):
            if given.dim() != 4 or given.shape[2] != heads:
                raise ValueError(f"{name} has shape {tuple(given.shape)}; allowed: [batch, length, {heads}, channels]")
        if self._assigned_scale is None:
            scale = self._scale
        else:
            exact = query.to(torch.promote_types(query.dtype, torch.float32))
            query, scale = (exact * self._assigned_scale).to(query.dtype), 1.0
        query, key, value = (t.transpose(1, 2) for t in (query, key, value))
        length, keys = query.shape[2], key.shape[2]
        causal = self.attn_mask_type == "causal"
        plain = self.window_size is None and attention_mask is None and length == keys
        explicit = self.softcap is not None or self.softmax_offset is not None
        visible = None
        if attention_mask is not None or (causal and (explicit or not plain)):
            visible = self._visible(length, keys, attention_mask, query.device)
        if explicit:
            out = self._explicit(query, key, value, visible, scale)
        else:
            out = F.scaled_dot_product_attention(
                query,
                key,
                value,
                attn_mask=visible,
                dropout_p=self.attention_dropout if self.training else 0.0,
                is_causal=causal and visible is None,
                scale=scale,
                enable_gqa=self.num_gqa_groups != self.num_attention_heads,
            )
        return out.transpose(1, 2).flatten(2)

    def _visible(self, length: int, keys: int, hidden: Tensor | None, device: torch.device) -> Tensor:
        """Return the bool mask, True where a query may look, broadcastable to [B, N, S, L]."""
        if self.attn_mask_type == "causal":
            distance = torch.arange(keys - length, keys, device=device)[:, None] - torch.arange(keys, device=device)
            visible = distance >= 0
            if self.window_size is not None:
                visible = visible & (distance < self.window_size)
            return visible if hidden is None else visible & ~hidden
        assert hidden is not None
        return ~hidden

    def _explicit(self, query: Tensor, key: Tensor, value: Tensor, visible: Tensor | None, scale: float) -> Tensor:
        """Attention with soft-capped scores or a sink logit, softmax in float32."""
        repeat = self.num_attention_heads // self.num_gqa_groups
        key, value = (t.repeat_interleave(repeat, dim=1) for t in (key, value))
        scores = (query @ key.transpose(2, 3)).float() * scale
        if self.softcap is not None:
            scores = self.softcap * torch.tanh(scores / self.softcap)
        if visible is not None:
            scores = scores.masked_fill(~visible, float("-inf"))
        if self.softmax_offset is not None:
            sink = self.softmax_offset.float()[None, :, None, None].expand(*scores.shape[:3], 1)
            probabilities = torch.softmax(torch.cat([scores, sink], dim=-1), dim=-1)[..., :-1]
        else:
            probabilities = torch.softmax(scores, dim=-1)
            if visible is not None:
                probabilities = probabilities.masked_fill(~visible, 0.0)
        probabilities = F.dropout(probabilities.to(value.dtype), self.attention_dropout, self.training)
        return probabilities @ value

    def extra_repr(self) -> str:
        heads = f"heads={self.num_attention_heads}, groups={self.num_gqa_groups}"
        return f"{heads}, {self.attn_mask_type}, window={self.window_size}"
