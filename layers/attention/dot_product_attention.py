"""Softmax attention over given queries, keys and values.

B batch, S query length, L key length, N query heads, G key/value heads (query groups), D head channels.
"""

import math
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor, nn

from te_models.kernels import flash_attention
from te_models.kernels.gemm import matmul
from te_models.kernels.packed_attention import flex_packed_attention, packed_attention
from te_models.kernels.torch_versions import exporting
from te_models.suggestions import check_choice, shown

from ..distributed.context_parallel import ContextShard, groups_by_ranks
from ..module.extra_state import leave_extra_state
from ..module.options import DEFAULT_PARAMETERS, ParameterOptions
from ..recipe.activation_checkpoint import checkpointed
from .core import attend
from .mask import NO_BIAS, Masking, ScoreBias, Window, mask_type_of, masks_of, window_of
from .ring import Hidden, RingRule, ring_attention
from .windowed import attend_in_window, saves

_WHOLE = ((-1, -1), (-1, 0))
"""Windows that hide nothing, of a type without and with causality."""
_FLEX_DEVICES = ("cuda",)
"""Where torch's FlexAttention attends within documents: it has no backward pass on a CPU."""
_SOFTCAP_IN_BLOCKS = 1024
"""Queries from which a CPU takes less time for soft-capped scores block by block: of fewer they are written out."""
_NOTED_QUERIES = 1024
"""Queries whose scores `note_logits` has at a time."""
_SOFTMAX_TYPES = ("vanilla", "off-by-one", "learnable")


class DotProductAttention(nn.Module):
    """Grouped-query attention over given q, k, v, [batch, length, heads, channels]: the core of
    `te_models.layers.DotProductAttention`, which says what the arguments are."""

    get_rng_state_tracker: Callable[[], Any] | None = None
    max_logits: Tensor | None = None
    """Where `note_logits` writes the largest logit of each head, float32 [N]; None: nothing is noted."""
    head_shard: ContextShard | None = None
    """The ranks that share the heads of a call, of whole sequences; None: a call is of all heads."""
    num_attention_heads: int
    num_gqa_groups: int
    attention_dropout: float
    attn_mask_type: str
    window_size: Window | None
    softcap: float | None
    softmax_type: str
    softmax_offset: nn.Parameter | None
    _scale: float
    _assigned_scale: Tensor | None  # float32 [], whatever the module's dtype
    _device: torch.device | str | None

    def __init__(
        self,
        num_attention_heads: int,
        kv_channels: int | tuple[int, int],
        num_gqa_groups: int | None = None,
        attention_dropout: float = 0.0,
        *,
        attn_mask_type: str = "causal",
        window_size: Window | None = None,
        softmax_scale: float | None = None,
        softcap: float | None = None,
        softmax_type: str = "vanilla",
        parameters: ParameterOptions = DEFAULT_PARAMETERS,
    ) -> None:
        super().__init__()
        check_choice("softmax_type", softmax_type, _SOFTMAX_TYPES)
        groups = key_value_heads(num_attention_heads, num_gqa_groups)
        if softcap is not None and softcap <= 0:
            raise ValueError(f"softcap is {softcap}; allowed: a positive number, or None")
        self.register_load_state_dict_pre_hook(leave_extra_state)
        mask_type = mask_type_of(attn_mask_type)
        window_of(window_size, mask_type)
        channels = kv_channels if isinstance(kv_channels, int) else kv_channels[0]
        vars(self).update(  # in one go: every layer of a model has one
            num_attention_heads=num_attention_heads,
            num_gqa_groups=groups,
            attention_dropout=attention_dropout,
            attn_mask_type=mask_type,
            window_size=window_size,
            _scale=1.0 / math.sqrt(channels) if softmax_scale is None else softmax_scale,
            _assigned_scale=None,
            _device=parameters.device,
            softcap=softcap,
            softmax_type=softmax_type,
            softmax_offset=None,
        )
        if softmax_type == "learnable":
            new = {"dtype": parameters.dtype or torch.get_default_dtype(), "device": parameters.device}
            self.softmax_offset = nn.Parameter(torch.zeros(num_attention_heads, **new))  # type: ignore[arg-type]

    @property
    def softmax_scale(self) -> float:
        return self._scale

    @softmax_scale.setter
    def softmax_scale(self, value: float) -> None:
        if not value > 0:
            raise ValueError(f"softmax_scale is {shown(value)}; allowed: a positive number")
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

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        *,
        attn_mask_type: str | None = None,
        window_size: Window | None = None,
        bias: ScoreBias = NO_BIAS,
    ) -> Tensor:
        """query: [B, S, N, D]; key: [B, L, G, D]; value: [B, L, G, Dv]; returns [B, S, N * Dv]. A row with every key
        hidden gives zeros, padding among them.

        attention_mask: bool, True is hidden. With a padding type [B, 1, 1, S], with any other broadcastable to
        [B, N, S, L], on top of what the type hides. attn_mask_type, window_size: in place of the module's. bias: what
        is added to the scores. ValueError for what is contradictory, missing, or not there.
        """
        own_heads, groups = self.num_attention_heads, self.num_gqa_groups
        if self.head_shard is not None:
            ranks = self.head_shard.ranks
            own_heads, groups = own_heads // ranks, groups_by_ranks(groups, ranks) // ranks
        for name, x, heads in (("query", query, own_heads), ("key", key, groups), ("value", value, groups)):
            if x.dim() != 4 or x.shape[2] != heads:
                shape = tuple(x.shape)
                raise ValueError(f"{name} has shape {shape}; allowed: [batch, length, {heads}, channels]")
        masking = Masking(
            self.attn_mask_type if attn_mask_type is None else mask_type_of(attn_mask_type),
            self.window_size if window_size is None else window_size,
            None,
            attention_mask,
            (None, None),
            (None, None),
            bias,
            packed=False,
        )
        return self.attend_masked(query, key, value, masking)

    def attend_masked(
        self, query: Tensor, key: Tensor, value: Tensor, masking: Masking, checkpoint: bool = False
    ) -> Tensor:
        """query: [B, S, N, D]; key: [B, L, G, D]; value: [B, L, G, Dv] -> [B, S, N * Dv]. checkpoint: compute it again
        in the backward pass. ValueError as `Masking.check`."""
        attend: Callable[..., Tensor] | None = self._in_linear_memory(masking, query, key, value)
        arguments: tuple[Any, ...] = (query, key, value)
        if attend is None:
            plain = self.softcap is None and self.softmax_type == "vanilla"
            attend = self._attend
            arguments += masks_of(masking, query, key, self._scale_now(), plain=plain)
        if checkpoint:
            return checkpointed(attend, *arguments, get_rng_state_tracker=self.get_rng_state_tracker)
        return attend(*arguments)

    def _in_linear_memory(
        self, masking: Masking, query: Tensor, key: Tensor, value: Tensor
    ) -> Callable[[Tensor, Tensor, Tensor], Tensor] | None:
        """Return what attends without a mask of all queries and keys where torch's kernels would need one, or have no
        sinks or soft caps; None where nothing does. An exported program has any length, so that none decides what is in
        it."""
        queries, keys = query.shape[1], key.shape[1]
        if query.device.type != "cpu" or exporting():
            return None
        window = masking.causal_window(queries, keys)
        if window is None:
            seen, is_served = _WHOLE[1], self.attends_documents(query.device, _WHOLE[1])
            is_served = is_served and masking.hides_later_keys_alone(queries, keys)
            if is_served and self.softcap is not None:
                is_served = queries >= _SOFTCAP_IN_BLOCKS or self._has_flash_attention(query, key, value)
            elif is_served and self.softmax_type == "vanilla":  # torch's needs no mask for as many queries as keys
                is_served = keys != queries and self._has_flash_attention(query, key, value)
        else:
            seen = (window - 1, 0)
            is_served = masking.attention_mask is None and self._has_flash_attention(query, key, value)
            if not is_served and saves(window, queries, keys):
                masking.check()
                return partial(self._attend_window, window=window, hidden=masking.hidden_keys)
        if not is_served:
            return None
        masking.check()
        one = torch.zeros(key.shape[:2], dtype=torch.int64, device=key.device)
        return partial(self.attend_documents, documents=one, window=seen)

    def _has_flash_attention(self, query: Tensor, key: Tensor, value: Tensor) -> bool:
        """Whether our flash attention serves these as the module is now: [B, S, heads, channels] each."""
        if self.attention_dropout > 0 and self.training:
            return False
        scale = self._scale if self._assigned_scale is None else 1.0
        return flash_attention.uses_flash_attention(
            query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), scale
        )

    def _attend_window(self, query: Tensor, key: Tensor, value: Tensor, window: int, **others: Tensor | None) -> Tensor:
        """Attend in a causal window, see `attend_in_window`."""

        def attend_block(q: Tensor, k: Tensor, v: Tensor, visible: Tensor) -> Tensor:
            return self._attend(q, k, v, visible, None, False)

        return attend_in_window(attend_block, query, key, value, window, **others)

    def attends_documents(self, device: torch.device, window: tuple[int, int] | None = None) -> bool:
        """Whether `attend_documents` serves as the module is now, in no window or in one of positions before a query.
        On CUDA it does without dropout; on a CPU in a window, or without dropout. window: in place of the module's, as
        `window_of` returns it."""
        window = window_of(self.window_size, self.attn_mask_type) if window is None else window
        dropout = self.attention_dropout > 0 and self.training
        if window not in _WHOLE and not (window[0] >= 0 and window[1] == 0):
            return False
        if device.type in _FLEX_DEVICES:
            return not dropout
        return device.type == "cpu" and (window not in _WHOLE or not dropout)

    def attend_documents(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        documents: Tensor,
        *,
        causal: bool = True,
        window: tuple[int, int] | None = None,
    ) -> Tensor:
        """Attend within documents, whatever the module's mask type, and within its window: query [B, Q, N, D], of the
        last positions, key [B, S, G, D], value [B, S, G, Dv] -> [B, Q, N * Dv]. documents: int64 [B, S], see
        `te_models.kernels.packed_attention`. window: as for `attends_documents`. The memory is
        linear in S but for a table of blocks on CUDA."""
        window = window_of(self.window_size, self.attn_mask_type) if window is None else window
        flex = query.device.type in _FLEX_DEVICES
        in_window = window not in _WHOLE
        if not flex and in_window and not self._has_flash_attention(query, key, value):
            return self._attend_window(query, key, value, window[0] + 1, documents=documents)
        if torch.is_autocast_enabled(query.device.type):
            dtype = torch.get_autocast_dtype(query.device.type)
            query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
        query, scale = self._scaled(query)
        query, key, value = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
        options: dict[str, Any] = {"scale": scale, "causal": causal, "sink": self._sink(query), "softcap": self.softcap}
        attend: Callable[..., Tensor] = packed_attention
        if in_window:
            options |= {"causal": True, "window": window[0]}
        if flex:
            attend = flex_packed_attention
        y = attend(query, key, value, documents, **options)
        return y.transpose(1, 2).flatten(2)

    def attend_ring(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        shard: ContextShard,
        hidden: Hidden = Hidden(),  # noqa: B008 (a value)
        *,
        causal: bool = True,
        window: Window | None = None,
        slopes: Tensor | None = None,
    ) -> Tensor:
        """Attend from this rank's queries to the keys of all ranks that share sequences, which go round a ring: query
        [B, S, N, D], key [B, S, G, D], value [B, S, G, Dv] of two chunks -> [B, S, N * Dv]. window: in place of the
        module's. slopes: of ALiBi, [N]. Collective. ValueError for dropout, whose numbers ranks would have to share."""
        if self.attention_dropout > 0 and self.training:
            raise ValueError(
                f"attention_dropout is {self.attention_dropout}; allowed with cp_comm_type 'p2p': 0, or another "
                "cp_comm_type"
            )
        if torch.is_autocast_enabled(query.device.type):
            dtype = torch.get_autocast_dtype(query.device.type)
            query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
        mask_type = "causal" if causal else "no_mask"
        before = window_of(self.window_size if window is None else window, mask_type)[0]
        query, scale = self._scaled(query)
        rule = RingRule(shard, scale, self.softcap, before, causal)
        y = ring_attention(query, key, value, hidden, self._sink(query), slopes, rule)
        return y.flatten(2)

    def _sink(self, query: Tensor) -> Tensor | None:
        """Return the logit of each head that takes probability, [N]."""
        sink, shard = self.softmax_offset, self.head_shard
        if self.softmax_type == "off-by-one":
            sink = query.new_zeros(self.num_attention_heads)
        return sink if sink is None or shard is None else sink.chunk(shard.ranks)[shard.rank]

    def _scaled(self, query: Tensor) -> tuple[Tensor, float]:
        """Return the query and the scale of its scores; one that was assigned is data, and multiplies the query."""
        if self._assigned_scale is None:
            return query, self._scale
        exact = query.to(torch.promote_types(query.dtype, torch.float32))
        return (exact * self._assigned_scale).to(query.dtype), 1.0

    def _scale_now(self) -> float | Tensor:
        return self._scale if self._assigned_scale is None else self._assigned_scale

    def _attend(
        self, query: Tensor, key: Tensor, value: Tensor, visible: Tensor | None, bias: Tensor | None, causal: bool
    ) -> Tensor:
        """[B, S, N, D], [B, L, G, D], [B, L, G, Dv] -> [B, S, N * Dv]. The others: see `attend`."""
        query, scale = self._scaled(query)
        sink = self._sink(query)
        query, key, value = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
        dropout = self.attention_dropout if self.training else 0.0
        options = {"causal": causal, "scale": scale, "softcap": self.softcap, "dropout": dropout}
        tracker = self.get_rng_state_tracker if dropout else None
        with nullcontext() if tracker is None else tracker().fork():
            out = attend(query, key, value, visible, bias, sink, **options)
        return out.transpose(1, 2).flatten(2)

    @torch.no_grad()
    def note_logits(self, query: Tensor, key: Tensor) -> None:
        """Take the largest scale q k of each head into `max_logits`, over all pairs of a query [B, S, N, D] and a key
        [B, L, G, D] of a row, hidden ones included, rounded to the dtype that they are multiplied in."""
        assert self.max_logits is not None
        query, scale = self._scaled(query.detach())
        q, k = query.transpose(1, 2), key.detach().transpose(1, 2).transpose(2, 3)
        largest = self.max_logits.new_full((k.shape[1], q.shape[1] // k.shape[1]), float("-inf"))
        for block in q.split(_NOTED_QUERIES, 2):
            folded = block.reshape(block.shape[0], k.shape[1], -1, block.shape[-1])
            scores = matmul(folded, k).amax((0, 3))  # [G, N / G * queries]
            largest = torch.maximum(largest, scores.view(*largest.shape, -1).amax(2).float())
        self.max_logits.copy_(torch.maximum(self.max_logits, largest.flatten() * scale))

    def extra_repr(self) -> str:
        heads = f"heads={self.num_attention_heads}, groups={self.num_gqa_groups}"
        return f"{heads}, {self.attn_mask_type}, window={self.window_size}"


def key_value_heads(heads: int, num_gqa_groups: int | None) -> int:
    """Return the number of key/value heads; None: as many as `heads`. ValueError where they cannot be shared alike."""
    groups = heads if num_gqa_groups is None else num_gqa_groups
    if groups < 1 or heads % groups:
        raise ValueError(f"num_gqa_groups is {num_gqa_groups}; allowed: a divisor of {heads} heads")
    return groups
