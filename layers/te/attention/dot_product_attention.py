"""Softmax attention with Transformer Engine's arguments: its layouts, lengths of sequences, and context parallelism.

B batch, S query length, L key length, N query heads, G key/value heads (query groups), D head channels.
"""

from typing import Any, Literal, TypedDict, cast

import torch
import torch.distributed as dist
from torch import Tensor

from te_models.kernels.packed_attention import documents_of_lengths
from te_models.suggestions import check_choice, shown

from ...attention import dot_product_attention
from ...attention.dot_product_attention import key_value_heads
from ...attention.mask import AttentionMask, BiasType, Masking, ScoreBias, Window, mask_type_of, window_of
from ...collectives import ranks_of
from ...distributed.context_parallel import (
    CpCommType,
    attention_of_chunks,
    attention_of_heads,
    context_shard,
    gather_positions,
)
from ...module.options import ParameterOptions
from ..arguments import require_default, takes_at_default, takes_parallel_options
from ..stands_for import StandsFor
from .qkv_format import QkvFormat, batch_first, check_qkv_format, from_batch_first


class DotProductAttention(dot_product_attention.DotProductAttention, metaclass=StandsFor):
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

    CORE = dot_product_attention.DotProductAttention

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
        check_choice("attention_type", attention_type, ("self", "cross"))
        groups = key_value_heads(num_attention_heads, num_gqa_groups)
        ranks = tp_size if tp_group is None else ranks_of("tp_group", tp_group)
        if ranks < 1 or groups % ranks:
            raise ValueError(f"tp_size is {ranks}; allowed: a divisor of {groups} key/value heads")
        check_qkv_format(qkv_format)
        super().__init__(
            num_attention_heads // ranks,
            kv_channels,
            groups // ranks,
            attention_dropout,
            attn_mask_type=attn_mask_type,
            window_size=window_size,
            softmax_scale=softmax_scale,
            softcap=softcap,
            softmax_type=softmax_type,
            parameters=ParameterOptions(params_dtype, device),
        )
        self.name = name
        self.qkv_format: QkvFormat = qkv_format
        self.set_context_parallel_group(cp_group, cp_global_ranks, cp_stream, cp_comm_type)

    def set_context_parallel_group(
        self,
        cp_group: dist.ProcessGroup | None,
        cp_global_ranks: list[int] | None = None,
        cp_stream: Any = None,
        cp_comm_type: str = "p2p",
    ) -> None:
        """Share each sequence among these ranks; None: none. Rank r of n has chunks r and 2 n - 1 - r of the 2 n that a
        sequence is cut into, one after the other, of queries, keys and values, and gets its rows of the result. A
        rank's gradients of its keys and values are the sum over the ranks. cp_comm_type: by "p2p" keys and values go
        round a ring, which has no attention_dropout, by "all_gather" each rank has the keys of all, by "a2a" all
        positions of a part of the heads. Without meaning: cp_global_ranks, cp_stream.

        ValueError for another cp_comm_type ("a2a+p2p" needs two groups), for a group without this rank, and for heads
        that its ranks cannot share by "a2a".
        """
        shard = context_shard(cp_group, cast(CpCommType, cp_comm_type))
        if shard is not None and cp_comm_type == "a2a" and self.num_attention_heads % shard.ranks:
            raise ValueError(
                f"num_attention_heads is {self.num_attention_heads}; allowed with cp_comm_type 'a2a': a multiple of "
                f"the {shard.ranks} ranks of cp_group"
            )
        self.cp_shard, self.head_shard = shard, shard if cp_comm_type == "a2a" else None

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
        return from_batch_first(self.attend_masked(query, key, value, masking, checkpoint_core_attention), layout)

    def _attend_shared(self, query: Tensor, key: Tensor, value: Tensor, masking: Masking, checkpoint: bool) -> Tensor:
        """Attend from this rank's queries to the keys of all ranks."""
        shard = self.cp_shard
        assert shard is not None
        _check_shared(masking)
        if query.shape[1] != key.shape[1] or query.shape[1] % 2:
            raise ValueError(
                f"there are {query.shape[1]} queries and {key.shape[1]} keys; allowed with a context-parallel group: "
                "as many of both, an even number"
            )
        causal = masking.mask_type != "no_mask"
        if shard.cp_comm_type == "p2p":  # keeps no scores for the backward pass, whatever `checkpoint` says
            return self.attend_ring(query, key, value, shard, causal=causal, window=masking.window_size)
        if shard.cp_comm_type == "a2a":

            def attention_of_all(q: Tensor, k: Tensor, v: Tensor, _: Tensor | None) -> Tensor:
                return self.attend_masked(q, k, v, masking, checkpoint)

            return attention_of_heads(attention_of_all, query, key, value, None, shard)
        both = gather_positions(torch.cat((key, value), -1), shard)
        key, value = both.split((key.shape[-1], value.shape[-1]), -1)
        if not causal:
            return self.attend_masked(query, key, value, masking, checkpoint)
        # the queries of a chunk are the last positions of the keys that it sees
        masking = masking._replace(mask_type="causal_bottom_right", bottom_right_diagonal=None)

        def attention(q: Tensor, k: Tensor, v: Tensor, _: Tensor | None) -> Tensor:
            return self.attend_masked(q, k, v, masking, checkpoint)

        return attention_of_chunks(attention, query, key, value, None, shard)

    def _without_mask(self, masking: Masking, query: Tensor) -> bool:
        q, kv = masking.cu_seqlens
        same = masking.packed and q is kv and masking.cu_seqlens_padded == (None, None)
        same = same and "padding" in masking.mask_type and masking.bias == ScoreBias()
        return same and self.attends_documents(query.device, window_of(masking.window_size, masking.mask_type))

    def extra_repr(self) -> str:
        heads = f"heads={self.num_attention_heads}, groups={self.num_gqa_groups}, {self.qkv_format}"
        return f"{heads}, {self.attn_mask_type}, window={self.window_size}"


def _check_shared(masking: Masking) -> None:
    """Raise ValueError for what ranks that share sequences do not have."""
    kind, causal = masking.mask_type, masking.mask_type in ("causal", "causal_bottom_right")
    refused = {
        f"attn_mask_type {shown(kind)}": not (causal or kind == "no_mask"),
        "qkv_format 'thd'": masking.packed,
        "an attention_mask": masking.attention_mask is not None,
        f"core_attention_bias_type {shown(masking.bias.kind)}": masking.bias.kind != "no_bias",
        f"window_size {masking.window_size}": not causal and window_of(masking.window_size, kind) != (-1, -1),
    }
    for what, asked in refused.items():
        if asked:
            raise ValueError(
                f"a context-parallel group with {what}; allowed: attn_mask_type 'causal', 'causal_bottom_right', "
                "or 'no_mask' without a window, no mask, no bias, qkv_format 'sbhd' or 'bshd'"
            )
    masking.check()


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
