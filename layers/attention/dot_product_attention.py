"""Softmax attention over given queries, keys and values.

B batch, S query length, L key length, N query heads, G key/value heads (query groups), D head channels.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any, Literal, Self, TypedDict

import torch
import torch.distributed as dist
from torch import Tensor, nn

from te_models.kernels import flash_attention
from te_models.kernels.gemm import matmul
from te_models.kernels.packed_attention import documents_of_lengths, flex_packed_attention, packed_attention
from te_models.kernels.torch_versions import exporting
from te_models.suggestions import shown

from ..collectives import ranks_of
from ..distributed.context_parallel import attention_of_chunks, context_shard, gather_positions
from ..recipe.activation_checkpoint import checkpointed
from ..te_arguments import leave_extra_state, require_default, takes_at_default, takes_parallel_options
from .core import attend
from .mask import AttentionMask, BiasType, Masking, ScoreBias, Window, mask_type_of, masks_of, window_of
from .qkv_format import QkvFormat, batch_first, check_qkv_format, from_batch_first
from .windowed import attend_in_window, saves

_WHOLE = ((-1, -1), (-1, 0))
"""Windows that hide nothing, of a type without and with causality."""
_FLEX_DEVICES = ("cuda",)
"""Where torch's FlexAttention attends within documents: it has no backward pass on a CPU."""
_SOFTCAP_IN_BLOCKS = 1024
"""Queries from which a CPU takes less time for soft-capped scores block by block: of fewer they are written out."""
_NOTED_QUERIES = 1024
"""Queries whose scores `note_logits` has at a time."""
_COMMUNICATIONS = ("p2p", "all_gather", "a2a", "a2a+p2p")
_SOFTMAX_TYPES = ("vanilla", "off-by-one", "learnable")


class DotProductAttention(nn.Module):
    """Grouped-query attention over given q, k, v. Transformer Engine: `te.pytorch.DotProductAttention`.

    kv_channels: channels of a head, or a pair, of q and k and of v. qkv_format: see `QkvFormat`. attn_mask_type: see
    `MaskType`; a KV cache wants "causal_bottom_right", in which the last query sees all keys. window_size: a pair, how
    many keys are visible before and behind a query's own place, or, with a causal type, one number of visible
    positions, the query's own included. softcap: `softcap * tanh(score / softcap)` (Gemma 2). softmax_type
    "off-by-one": one extra logit, 0, that takes probability and adds nothing; "learnable": one per head, parameter
    softmax_offset [N] (gpt-oss sinks). softmax_scale None: 1/sqrt(channels of q). It may be assigned later: from then
    on it is data, and queries are multiplied by it, so that another value recompiles nothing. tp_size or tp_group:
    how many ranks share the heads; this module has its share of them. Without meaning for the result: layer_number,
    attention_type, sequence_parallel (q, k and v are whole sequences), name. ValueError for options that it does not
    have.
    """

    get_rng_state_tracker: Callable[[], Any] | None = None
    max_logits: Tensor | None = None
    """Where `note_logits` writes the largest logit of each head, float32 [N]; None: nothing is noted."""

    @takes_parallel_options
    @takes_at_default(return_max_logit=False)
    def __init__(
        self,
        num_attention_heads: int,
        kv_channels: int | tuple[int, int],
        num_gqa_groups: int | None = None,
        attention_dropout: float = 0.0,
        *,
        qkv_format: QkvFormat = "sbhd",
        attn_mask_type: str = "causal",
        window_size: Window | None = None,
        sequence_parallel: bool = False,
        tp_size: int = 1,
        tp_group: dist.ProcessGroup | None = None,
        layer_number: int | None = None,
        attention_type: Literal["self", "cross"] = "self",
        softmax_scale: float | None = None,
        softcap: float | None = None,
        softmax_type: str = "vanilla",
        params_dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        name: str | None = None,
        cp_group: dist.ProcessGroup | None = None,
        cp_global_ranks: list[int] | None = None,
        cp_stream: Any = None,
        cp_comm_type: str = "p2p",
    ) -> None:
        super().__init__()
        for option, value, allowed in (
            ("softmax_type", softmax_type, _SOFTMAX_TYPES),
            ("attention_type", attention_type, ("self", "cross")),
        ):
            if value not in allowed:
                raise ValueError(f"{option} is {shown(value)}; allowed: {', '.join(map(repr, allowed))}")
        self.name = name
        groups = num_attention_heads if num_gqa_groups is None else num_gqa_groups
        if groups < 1 or num_attention_heads % groups:
            raise ValueError(f"num_gqa_groups is {num_gqa_groups}; allowed: a divisor of {num_attention_heads} heads")
        ranks = tp_size if tp_group is None else ranks_of("tp_group", tp_group)
        if ranks < 1 or groups % ranks:
            raise ValueError(f"tp_size is {ranks}; allowed: a divisor of {groups} key/value heads")
        if softcap is not None and softcap <= 0:
            raise ValueError(f"softcap is {softcap}; allowed: a positive number, or None")
        check_qkv_format(qkv_format)
        self.register_load_state_dict_pre_hook(leave_extra_state)
        self.num_attention_heads, self.num_gqa_groups = num_attention_heads // ranks, groups // ranks
        self.attention_dropout = attention_dropout
        self.qkv_format = qkv_format
        self.attn_mask_type = mask_type_of(attn_mask_type)
        self.window_size = window_size
        window_of(window_size, self.attn_mask_type)
        channels = kv_channels if isinstance(kv_channels, int) else kv_channels[0]
        self._scale = 1.0 / math.sqrt(channels) if softmax_scale is None else softmax_scale
        self._assigned_scale: Tensor | None = None  # float32 [], whatever the module's dtype
        self._device = device
        self.softcap = softcap
        self.softmax_type = softmax_type
        self.softmax_offset = None
        if softmax_type == "learnable":
            new = {"dtype": params_dtype or torch.get_default_dtype(), "device": device}
            self.softmax_offset = nn.Parameter(torch.zeros(self.num_attention_heads, **new))  # type: ignore[arg-type]
        self.set_context_parallel_group(cp_group, cp_global_ranks, cp_stream, cp_comm_type)

    def set_context_parallel_group(
        self,
        cp_group: dist.ProcessGroup | None,
        cp_global_ranks: list[int] | None = None,
        cp_stream: Any = None,
        cp_comm_type: str = "p2p",
    ) -> None:
        """Share each sequence among these ranks; None: none. Rank r of n has chunks r and 2 n - 1 - r of the 2 n that a
        sequence is cut into, one after the other, of queries, keys and values, and gets its rows of the result; all
        keys and values are gathered, whatever cp_comm_type ("p2p", "all_gather", "a2a", "a2a+p2p") says, and a rank's
        gradients of its keys and values are the sum over the ranks. Without meaning: cp_global_ranks, cp_stream.

        ValueError for another cp_comm_type, and for a group without this rank.
        """
        if cp_comm_type not in _COMMUNICATIONS:
            raise ValueError(f"cp_comm_type is {shown(cp_comm_type)}; allowed: {', '.join(map(repr, _COMMUNICATIONS))}")
        self.cp_shard = context_shard(cp_group)

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
        query_layer: Tensor,
        key_layer: Tensor,
        value_layer: Tensor,
        attention_mask: AttentionMask | None = None,
        *,
        qkv_format: QkvFormat | None = None,
        cu_seqlens_q: Tensor | None = None,
        cu_seqlens_kv: Tensor | None = None,
        cu_seqlens_q_padded: Tensor | None = None,
        cu_seqlens_kv_padded: Tensor | None = None,
        max_seqlen_q: int | None = None,
        max_seqlen_kv: int | None = None,
        attn_mask_type: str | None = None,
        window_size: Window | None = None,
        bottom_right_diagonal: bool | None = None,
        checkpoint_core_attention: bool = False,
        core_attention_bias_type: BiasType = "no_bias",
        core_attention_bias: Tensor | None = None,
        alibi_slopes: Tensor | None = None,
        fast_zero_fill: bool = True,
        inference_params: None = None,
        pad_between_seqs: bool | None = None,
        fp8_output: bool = False,
        num_splits: int | None = 1,
    ) -> Tensor:
        """query_layer: [S, B, N, D]; key_layer: [L, B, G, D]; value_layer: [L, B, G, Dv]; returns [S, B, N * Dv]. So in
        "sbhd"; of [B, S, N, D] in "bshd" [B, S, N * Dv], of [T, N, D] in "thd" [T, N * Dv]. A row with every key hidden
        gives zeros, padding among them.

        attention_mask: bool, True is hidden. With a padding type [B, 1, 1, S], or a pair of them, of queries and keys;
        with any other broadcastable to [B, N, S, L], on top of what the type hides. cu_seqlens_q, cu_seqlens_kv [B + 1]
        with a padding type: sums of the numbers of real rows, in place of a mask; in "thd" of the sequences' lengths,
        with cu_seqlens_*_padded where there is padding between them. They stay on the device (max_seqlen_*,
        pad_between_seqs, fast_zero_fill and num_splits may be given and change nothing). Packed sequences need no mask
        where one tensor is both cu_seqlens and `attends_documents`; else their mask is [T, T].
        core_attention_bias: added to the scores, broadcastable to [B, N, S, L]: "pre_scale_bias" before scaling,
        "post_scale_bias" behind it; "alibi": minus the distance times alibi_slopes [N] or [B, N], None: the usual ones.
        bottom_right_diagonal: whether distances count from the ends of the two sequences; None: as the mask type says.
        checkpoint_core_attention: compute it again in the backward pass. qkv_format, attn_mask_type, window_size: in
        place of the module's. ValueError for what is contradictory, missing, or not there.
        """
        require_default("fp8_output", fp8_output, False)
        require_default("inference_params", inference_params, None)
        layout = self.qkv_format if qkv_format is None else qkv_format
        check_qkv_format(layout)
        query = batch_first("query", query_layer, self.num_attention_heads, layout)
        key = batch_first("key", key_layer, self.num_gqa_groups, layout)
        value = batch_first("value", value_layer, self.num_gqa_groups, layout)
        masking = Masking(
            self.attn_mask_type if attn_mask_type is None else mask_type_of(attn_mask_type),
            self.window_size if window_size is None else window_size,
            bottom_right_diagonal,
            attention_mask,
            (cu_seqlens_q, cu_seqlens_kv),
            (cu_seqlens_q_padded, cu_seqlens_kv_padded),
            ScoreBias(core_attention_bias_type, core_attention_bias, alibi_slopes),
            packed=layout == "thd",
        )
        if self.cp_shard is not None:
            return from_batch_first(self._attend_shared(query, key, value, masking, checkpoint_core_attention), layout)
        if cu_seqlens_q is not None and self._without_mask(masking, query):
            masking.check()
            documents = documents_of_lengths(cu_seqlens_q, query.shape[1])
            options: dict[str, Any] = {"causal": "causal" in masking.mask_type}
            options["window"] = window_of(masking.window_size, masking.mask_type)
            return from_batch_first(self.attend_documents(query, key, value, documents, **options), layout)
        return from_batch_first(self._masked(query, key, value, masking, checkpoint_core_attention), layout)

    def _masked(self, query: Tensor, key: Tensor, value: Tensor, masking: Masking, checkpoint: bool) -> Tensor:
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
            seen, serves = _WHOLE[1], self.attends_documents(query.device, _WHOLE[1])
            serves = serves and masking.hides_later_keys_alone(queries, keys)
            if serves and self.softcap is not None:
                serves = queries >= _SOFTCAP_IN_BLOCKS or self._has_flash_attention(query, key, value)
            elif serves and self.softmax_type == "vanilla":  # torch's needs no mask for as many queries as keys
                serves = keys != queries and self._has_flash_attention(query, key, value)
        else:
            seen = (window - 1, 0)
            serves = masking.attention_mask is None and self._has_flash_attention(query, key, value)
            if not serves and saves(window, queries, keys):
                masking.check()
                return partial(self._attend_window, window=window, hidden=masking.hidden_keys)
        if not serves:
            return None
        masking.check()
        one = torch.zeros(key.shape[:2], dtype=torch.int64, device=key.device)
        return partial(self.attend_documents, documents=one, window=seen)

    def _has_flash_attention(self, query: Tensor, key: Tensor, value: Tensor) -> bool:
        """Whether our flash attention serves these as the module is now: [B, S, heads, channels] each."""
        if self.attention_dropout > 0 and self.training:
            return False
        scale = self._scale if self._assigned_scale is None else 1.0
        return flash_attention.serves(query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), scale)

    def _attend_window(self, query: Tensor, key: Tensor, value: Tensor, window: int, **others: Tensor | None) -> Tensor:
        """Attend in a causal window, see `attend_in_window`."""

        def attend_block(q: Tensor, k: Tensor, v: Tensor, visible: Tensor) -> Tensor:
            return self._attend(q, k, v, visible, None, False)

        return attend_in_window(attend_block, query, key, value, window, **others)

    def _attend_shared(self, query: Tensor, key: Tensor, value: Tensor, masking: Masking, checkpoint: bool) -> Tensor:
        """Attend from this rank's queries to the keys of all ranks."""
        shard = self.cp_shard
        assert shard is not None
        masking.check_shared()
        if query.shape[1] != key.shape[1] or query.shape[1] % 2:
            raise ValueError(
                f"there are {query.shape[1]} queries and {key.shape[1]} keys; allowed with a context-parallel group: "
                "as many of both, an even number"
            )
        both = gather_positions(torch.cat((key, value), -1), shard)
        key, value = both.split((key.shape[-1], value.shape[-1]), -1)
        if masking.mask_type == "no_mask":
            return self._masked(query, key, value, masking, checkpoint)
        # the queries of a chunk are the last positions of the keys that it sees
        masking = masking._replace(mask_type="causal_bottom_right", bottom_right_diagonal=None)

        def attention(q: Tensor, k: Tensor, v: Tensor, _: Tensor | None) -> Tensor:
            return self._masked(q, k, v, masking, checkpoint)

        return attention_of_chunks(attention, query, key, value, None, shard)

    def _without_mask(self, masking: Masking, query: Tensor) -> bool:
        q, kv = masking.cu_seqlens
        same = masking.packed and q is kv and masking.cu_seqlens_padded == (None, None)
        same = same and "padding" in masking.mask_type and masking.bias == ScoreBias()
        return same and self.attends_documents(query.device, window_of(masking.window_size, masking.mask_type))

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
        `te_models.kernels.packed_attention`. window: as for `attends_documents`, which says what serves. The memory is
        linear in S but for a table of blocks on CUDA."""
        window = window_of(self.window_size, self.attn_mask_type) if window is None else window
        flex = query.device.type in _FLEX_DEVICES
        in_window = window not in _WHOLE
        if not flex and in_window and not self._has_flash_attention(query, key, value):
            return self._attend_window(query, key, value, window[0] + 1, documents=documents)
        if torch.is_autocast_enabled(query.device.type):
            dtype = torch.get_autocast_dtype(query.device.type)
            query, key, value = (t.to(dtype) for t in (query, key, value))
        query, scale = self._scaled(query)
        query, key, value = (t.transpose(1, 2) for t in (query, key, value))
        options: dict[str, Any] = {"scale": scale, "causal": causal, "sink": self._sink(query), "softcap": self.softcap}
        attend: Callable[..., Tensor] = packed_attention
        if in_window:
            options |= {"causal": True, "window": window[0]}
        if flex:
            attend = flex_packed_attention
        y = attend(query, key, value, documents, **options)
        return y.transpose(1, 2).flatten(2)

    def _sink(self, query: Tensor) -> Tensor | None:
        """Return the logit of each head that takes probability, [N]."""
        if self.softmax_type == "off-by-one":
            return query.new_zeros(self.num_attention_heads)
        return self.softmax_offset

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
        query, key, value = (t.transpose(1, 2) for t in (query, key, value))
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
        heads = f"heads={self.num_attention_heads}, groups={self.num_gqa_groups}, {self.qkv_format}"
        return f"{heads}, {self.attn_mask_type}, window={self.window_size}"


class CoreOptions(TypedDict, total=False):
    """Keyword arguments of `DotProductAttention.forward` that a transformer layer passes on."""

    bottom_right_diagonal: bool | None
    checkpoint_core_attention: bool
    core_attention_bias_type: BiasType
    core_attention_bias: Tensor | None
    alibi_slopes: Tensor | None
    cu_seqlens_q: Tensor | None
    cu_seqlens_kv: Tensor | None
    cu_seqlens_q_padded: Tensor | None
    cu_seqlens_kv_padded: Tensor | None
    max_seqlen_q: int | None
    max_seqlen_kv: int | None
    fast_zero_fill: bool
    inference_params: None
    pad_between_seqs: bool | None


class AttentionOptions(CoreOptions, total=False):
    """Those that `MultiheadAttention` passes on."""

    attn_mask_type: str | None
    window_size: Window | None
