"""Self attention: fused q, k, v projection, norms of q and k, rotary embedding, softmax attention, output projection.

B batch, S sequence, L keys (cached ones included), H hidden, N query heads, G key/value heads, D head channels,
Dv value channels.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from te_models.kernels.norm import layer_norm, rms_norm, rms_norm_by
from te_models.kernels.packed_attention import first_positions
from te_models.kernels.rope import apply_rope
from te_models.kernels.torch_versions import exporting
from te_models.layers.attention.dot_product_attention import DotProductAttention
from te_models.layers.attention.mask import ScoreBias, usual_slopes
from te_models.layers.attention.ring import Hidden
from te_models.layers.distributed.context_parallel import (
    ContextShard,
    attention_of_chunks,
    attention_of_heads,
    gather_positions,
)
from te_models.layers.distributed.sequence_parallel import gather_tokens_of_ranks
from te_models.layers.module.norm import RMSNorm

from ...config import AttentionConfig, ModelConfig
from ..build import Build, make_core_attention, make_input_linear, make_norm, make_output_linear
from ..cache import LayerMemory
from ..rotary import Rotary
from .base import KeysValues, MixerInputs, Selection
from .output_gate import HeadGate, gated
from .sparse_attention import Indexer


class AlibiHeads(NamedTuple):
    """Scores that are lower by the distance of the key, times a slope of each head (ALiBi, arXiv 2108.12409). heads: of
    all ranks; this rank has `number` from `first` on."""

    heads: int
    first: int
    number: int

    @classmethod
    def of_rank(cls, heads: int, build: Build) -> AlibiHeads:
        """Return the share of a rank."""
        number = heads // build.tp_size
        return cls(heads, number * (0 if build.tp_group is None else build.tp_group.rank()), number)

    def biases(self, keys: int, device: torch.device) -> Tensor:
        """Return what is added to the scores of keys 0 to `keys` - 1, float32 [1, N, 1, keys]: minus their distance
        from the last one times the slope. The softmax takes no notice of what all keys of a query have in common, so
        that these serve queries at any place, in documents, behind padding, and in caches that are not full."""
        distance = torch.arange(keys - 1, -1, -1, dtype=torch.float32, device=device)
        return (-distance * self.slopes(device)[:, None])[None, :, None]

    def slopes(self, device: torch.device) -> Tensor:
        """Return the slope of each head of the rank, float32 [N]."""
        return usual_slopes(self.heads, device)[self.first : self.first + self.number]


class SelfAttention(nn.Module):
    """The attention sublayer of layer number `layer`, without residual connection.

    `linear_qkv` holds the rows of q, then k, then v, then the output gate where each channel has one, and the norm
    before them when `normed`.
    """

    def __init__(
        self,
        config: ModelConfig,
        a: AttentionConfig,
        layer: int,
        build: Build,
        *,
        normed: bool,
        in_features: int | None = None,
    ) -> None:
        super().__init__()
        all_heads, all_groups = a.num_attention_heads, a.num_query_groups or a.num_attention_heads
        self.num_heads, self.num_groups = all_heads // build.tp_size, max(1, all_groups // build.tp_size)
        self.head_dim = a.kv_channels or config.hidden_size // all_heads
        self.v_head_dim = a.v_head_dim or self.head_dim
        self.clip_qkv = a.clip_qkv
        self.norm_kind = a.qk_layernorm
        self.norm_after_rope = a.qk_layernorm_after_rope
        rope = config.rope_of(layer)
        self.rope_style = "half" if rope is None else rope.style
        self.chunk_size = config.chunk_size(layer)
        self.context_shard: ContextShard | None = None
        self.sequence_shard = build.sequence_shard
        self.epsilon = config.norm.layernorm_epsilon
        self.q_size, self.k_size = self.num_heads * self.head_dim, self.num_groups * self.head_dim
        self.own_keys = config.kv_source(layer) is None
        self.gives_keys = config.is_kv_source(layer)
        self.v_begin = self.q_size + (0 if a.key_is_value else self.k_size)
        self.v_end = self.v_begin + self.num_groups * self.v_head_dim if self.own_keys else self.q_size
        self.own_end = self.v_end
        """Rows of q, k and v that this rank has: k and v in part where fewer heads of them than ranks are shared."""
        self.parts_of_groups: tuple[int, ...] = ()
        if all_groups < build.tp_size and self.own_keys:
            each = (self.head_dim,) if a.key_is_value else (self.head_dim, self.v_head_dim)
            self.parts_of_groups = tuple(all_groups * channels // build.tp_size for channels in each)
            self.own_end = self.q_size + sum(self.parts_of_groups)
            self.group = 0 if build.tp_group is None else build.tp_group.rank() * all_groups // build.tp_size
        self.value_scale, self.value_norm = a.value_scale, a.value_layernorm
        self.attention = a
        joined_bias = a.add_qkv_bias and not a.has_bias_apart
        rows = a.qkv_rows(own_keys=self.own_keys)
        self.linear_qkv = make_input_linear(config, rows, joined_bias, build, normed=normed, in_features=in_features)
        self.qkv_bias = build.parameter(self.own_end) if a.has_bias_apart else None
        if self.norm_kind in ("head", "each_head", "full"):
            one = self.norm_kind == "head"
            norm = config.norm.replace(has_weight=True, bias=a.qk_layernorm_bias)
            self.q_layernorm = make_norm(norm, self.head_dim if one else self.q_size, build)
            if self.own_keys:
                self.k_layernorm = make_norm(norm, self.head_dim if one else self.k_size, build)
        self.core_attention = make_core_attention(
            config, a, layer, self.num_heads, self.head_dim, self.num_groups, build
        )
        alibi = config.embedding.position_embedding_type == "alibi"
        self.alibi = AlibiHeads.of_rank(all_heads, build) if alibi else None
        self.head_gate = HeadGate(config, all_heads, build) if a.has_head_gate else None
        self.linear_proj = make_output_linear(config, all_heads * self.v_head_dim, a.add_output_bias, build)
        self.indexer = None if a.indexer is None else Indexer(config, a.indexer, config.hidden_size, build)
        changed = (self.qkv_bias, self.alibi, self.head_gate, self.indexer, self.clip_qkv, self.chunk_size)
        changed = (*changed, self.value_scale, self.sequence_shard)
        self.is_plain = (
            all(value is None for value in changed)
            and (a.input_multiplier, a.output_multiplier, build.tp_size) == (1.0, 1.0, 1)
            and self.norm_kind in ("none", "head")
            and self.own_keys
            and not (self.gives_keys or self.norm_after_rope or self.value_norm or a.key_is_value or a.gate_rows)
        )
        """Whether queries, keys and values are rotated parts of one product, each head perhaps normalised, and what
        softmax attention makes of them is projected."""
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Start without a bias; the projections have their own."""
        if self.qkv_bias is not None:
            self.qkv_bias.zero_()

    def forward(
        self, x: Tensor, inputs: MixerInputs, cache: LayerMemory | None = None, adapted: Tensor | None = None
    ) -> Tensor | tuple[Tensor, KeysValues | Selection]:
        """x: [B, S, H] -> [B, S, H], with what the layer attended with where later ones read it, with a Selection where
        there is an indexer. cache: takes this call's keys and values, gives all; of the layer that has them, where this
        one has none. adapted: what is added to the result of `linear_qkv`."""
        if self.attention.input_multiplier != 1.0:
            x = x * self.attention.input_multiplier
        rotary, hidden_keys, query_scale, batch_size = inputs[:4]
        qkv = self.linear_qkv(x)
        qkv = qkv if adapted is None else qkv + adapted
        qkv = qkv if batch_size is None else qkv.unflatten(0, (batch_size, -1))
        gate = qkv[..., self.own_end :] if self.attention.gate_rows else None
        if self.qkv_bias is not None:
            qkv = qkv[..., : self.own_end] + self.qkv_bias.to(qkv.dtype)
        if self.parts_of_groups:
            qkv = self._with_group(qkv)
        if inputs.keys_values is not None:
            q, (k, v) = self._queries(qkv, rotary), inputs.keys_values
            q = q if query_scale is None else q * query_scale.to(q.dtype)
            y = self.attended(q, k, v, hidden_keys, cache)
            return self._output(y, x, gate, batch_size)
        q, k = self._queries_and_keys(qkv, rotary)
        if query_scale is not None:
            q = q * query_scale.to(q.dtype)
        v = self._clipped(qkv[..., self.v_begin : self.v_end])
        if rotary is not None and (self.norm_kind in ("none", "l2") or self.norm_after_rope):
            v = copied_part(v)  # nothing else keeps the projection's result: queries and keys are rotated copies
        v = torch.unflatten(v, -1, (self.num_groups, self.v_head_dim))
        if self.value_norm:
            v = rms_norm(v, None, self.epsilon)
        if self.value_scale is not None:
            v = v * self.value_scale
        if self.indexer is not None:
            return self._sparse(x, q, k, v, inputs, cache)
        shard = self.context_shard
        if cache is not None:
            k, v = cache.update(k, v)
        elif shard is not None and shard.cp_comm_type == "all_gather":
            both = gather_positions(torch.cat((k, v), -1), shard)
            k, v = both.split((self.head_dim, self.v_head_dim), -1)
        y = self._output(self.attended(q, k, v, hidden_keys, cache), x, gate, batch_size)
        return (y, (k, v)) if self.gives_keys else y

    def _with_group(self, qkv: Tensor) -> Tensor:
        """Return q and the one head of k and v that this rank's queries have, of which several ranks have a part."""
        parts = self.linear_proj.features_of_ranks(qkv[..., self.q_size : self.own_end], self.parts_of_groups)
        channels = (self.head_dim, self.v_head_dim)
        own = [t.narrow(-1, self.group * size, size) for t, size in zip(parts, channels, strict=False)]
        return torch.cat((qkv[..., : self.q_size], *own), -1)

    def attended(
        self, q: Tensor, k: Tensor, v: Tensor, hidden_keys: Tensor | None, cache: LayerMemory | None
    ) -> Tensor:
        """Attend to all keys and values, of a cache and of other ranks too; k and v have only this rank's
        positions where ranks that share sequences do not gather them. q: [B, S, N, D]; k: [B, L, G, D]; v:
        [B, L, G, Dv]; hidden_keys, cache: as for `forward`; returns [B, S, N Dv]."""
        slots = None if cache is None else cache.hidden_slots()
        first = 0 if cache is None else cache.length + q.shape[1] - k.shape[1]
        if slots is not None:
            biased = self._biased(k)
            return self.core_attention(q, k, v, slots, attn_mask_type="arbitrary", window_size=(-1, -1), **biased)
        if self.context_shard is None:
            return self._attention(q, k, v, hidden_keys, first)
        if self.context_shard.cp_comm_type == "p2p":
            return self._around_ring(q, k, v, hidden_keys, self.context_shard)
        of_ranks = attention_of_heads if self.context_shard.cp_comm_type == "a2a" else attention_of_chunks
        return of_ranks(self._attention, q, k, v, hidden_keys, self.context_shard)

    def _around_ring(self, q: Tensor, k: Tensor, v: Tensor, hidden_keys: Tensor | None, shard: ContextShard) -> Tensor:
        """k, v: of this rank's positions."""
        hidden, length, size = hidden_of_ring(hidden_keys), q.shape[1] * shard.ranks, self.chunk_size
        if size is not None and length > size:
            if hidden.mask is not None:
                hidden = Hidden(chunks_of_rows(hidden.mask, size, shard))
            else:
                one = torch.zeros(k.shape[0], length, dtype=torch.int64, device=q.device)
                hidden = Hidden(documents=chunks_of_documents(one if hidden_keys is None else hidden_keys, size))
        slopes = None if self.alibi is None else self.alibi.slopes(q.device)
        return self.core_attention.attend_ring(q, k, v, shard, hidden, slopes=slopes)

    def _output(self, y: Tensor, x: Tensor, gate: Tensor | None, batch_size: int | None) -> Tensor:
        """y: [B, S, N Dv], gated and projected. x: the layer's normed input."""
        if self.head_gate is not None:
            y = gated(y, self.head_gate(x, batch_size, self.linear_proj), self.attention)
        elif gate is not None:
            y = gated(y, gate, self.attention)
        y = self.linear_proj(y if batch_size is None else y.flatten(0, 1))
        return y if self.attention.output_multiplier == 1.0 else y * self.attention.output_multiplier

    def _sparse(
        self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, inputs: MixerInputs, cache: LayerMemory | None
    ) -> tuple[Tensor, Selection]:
        assert self.indexer is not None
        if self.sequence_shard is not None and not self.indexer.config.shared:
            x = gather_tokens_of_ranks(x, self.sequence_shard).unflatten(0, (inputs.batch_size or 1, -1))
        index = self.indexer(x, x, inputs.rotary)
        y, selection = self.indexer.attend(
            self.core_attention,
            index,
            q,
            (k, v),
            inputs,
            cache,
            self.context_shard,
            expand=lambda k, v: (k, v),
            dense=functools.partial(attention_of, self.core_attention),
        )
        return self.linear_proj(y if inputs.batch_size is None else y.flatten(0, 1)), selection

    def _attention(self, q: Tensor, k: Tensor, v: Tensor, hidden_keys: Tensor | None, first: int = 0) -> Tensor:
        """first: the position of the first key; hidden_keys is of those before it, too."""
        if self.alibi is not None:
            return self.core_attention(
                q, k, v, None if hidden_keys is None else hidden_keys[..., first:], **self._biased(k)
            )
        size, end = self.chunk_size, first + k.shape[1]
        if size is None or (end <= size and not exporting()):
            hidden_keys = None if hidden_keys is None else hidden_keys[..., first:]
        elif hidden_keys is not None and hidden_keys.dtype != torch.bool:
            hidden_keys = chunks_of_documents(hidden_keys, size)[:, first:]
        elif hidden_keys is None and q.shape[1] > 1 and self.packs(q.device) and not exporting():
            one = torch.zeros(k.shape[0], end, dtype=torch.int64, device=q.device)
            hidden_keys = chunks_of_documents(one, size)[:, first:]
        else:
            hidden_keys = other_chunks(q.shape[1], k.shape[1], size, hidden_keys, q.device, first)
        return attention_of(self.core_attention, q, k, v, hidden_keys)

    def _biased(self, k: Tensor) -> dict[str, Any]:
        """Return the arguments of `core_attention` for biases by the distance. k: [B, L, G, D]."""
        if self.alibi is None:
            return {}
        bias, shard = self.alibi.biases(k.shape[1], k.device), self.core_attention.head_shard
        bias = bias if shard is None else bias.chunk(shard.ranks, 1)[shard.rank]
        return {"bias": ScoreBias("post_scale_bias", bias)}

    def packs(self, device: torch.device) -> bool:
        """Whether the layer attends within documents without a mask: of a chunk, each is another document."""
        return self.alibi is None and packs(self.core_attention, device)

    def _queries_and_keys(self, qkv: Tensor, rotary: Rotary | None) -> tuple[Tensor, Tensor]:
        if self.norm_kind in ("none", "l2"):
            # One rotation of q and k side by side: half the kernels of two.
            qk = self._clipped(qkv[..., : self.q_size + self.k_size])
            qk = self._rotated(torch.unflatten(qk, -1, (-1, self.head_dim)), rotary)
            if self.norm_kind == "l2" and rotary is not None:
                qk = rms_norm(qk, None, self.epsilon)
            return qk[:, :, : self.num_heads], qk[:, :, self.num_heads :]
        q, k = qkv[..., : self.q_size], qkv[..., self.q_size : self.q_size + self.k_size]
        if self.norm_after_rope:
            q, k = (self._rotated(t.unflatten(-1, (-1, self.head_dim)), rotary).flatten(2) for t in (q, k))
            return self._normed(q, self.q_layernorm), self._normed(k, self.k_layernorm)
        q, k = self._normed(q, self.q_layernorm), self._normed(k, self.k_layernorm)
        return self._rotated(q, rotary), self._rotated(k, rotary)

    def _queries(self, qkv: Tensor, rotary: Rotary | None) -> Tensor:
        """As `_queries_and_keys`, of a layer without keys."""
        q = qkv[..., : self.q_size]
        if self.norm_kind in ("none", "l2"):
            q = self._rotated(self._clipped(q).unflatten(-1, (-1, self.head_dim)), rotary)
            return rms_norm(q, None, self.epsilon) if self.norm_kind == "l2" and rotary is not None else q
        if self.norm_after_rope:
            return self._normed(
                self._rotated(q.unflatten(-1, (-1, self.head_dim)), rotary).flatten(2), self.q_layernorm
            )
        return self._rotated(self._normed(q, self.q_layernorm), rotary)

    def _normed(self, t: Tensor, norm: nn.Module) -> Tensor:
        """[B, S, heads * D] -> [B, S, heads, D], each head normalised on its own or all heads together."""
        if self.norm_kind == "full":
            return self._clipped(self._normed_whole(t, norm)).unflatten(-1, (-1, self.head_dim))
        t = t.unflatten(-1, (-1, self.head_dim))
        if self.norm_kind == "each_head":
            return self._clipped(norm_each_head(t, norm))
        if self.linear_proj.tp_size > 1:
            # every rank has the weight and applies it to its own heads only: its gradients are summed over the ranks
            shared = {name: self.linear_proj.for_own_features(p) for name, p in norm.named_parameters()}
            return self._clipped(torch.func.functional_call(norm, shared, (t,)))
        return self._clipped(norm(t))

    def _normed_whole(self, t: Tensor, norm: nn.Module) -> Tensor:
        """[B, S, heads * D], normalised over the heads of all ranks."""
        ranks = self.linear_proj.tp_size
        if ranks == 1:
            return norm(t)
        assert isinstance(norm, RMSNorm), "the rules of layouts refuse other norms"
        squares = self.linear_proj.summed_for_all(t.float().square().sum(-1, keepdim=True))
        return rms_norm_by(
            squares / (ranks * t.shape[-1]),
            t,
            norm.weight,
            norm.eps,
            zero_centered=norm.zero_centered_gamma,
            cast_order=norm.cast_order,
        )

    def _clipped(self, t: Tensor) -> Tensor:
        return t if self.clip_qkv is None else t.clamp(-self.clip_qkv, self.clip_qkv)

    def _rotated(self, t: Tensor, rotary: Rotary | None) -> Tensor:
        return t if rotary is None else apply_rope(t, *rotary, self.rope_style)


def norm_each_head(t: Tensor, norm: Any) -> Tensor:
    """Normalise each head of t, [..., heads, D], with the head's weight. norm: an RMSNorm, or a LayerNorm without
    bias, of heads * D weights; its epsilon, order of casts and weights count."""
    wide = t.float()
    wide = rms_norm(wide, None, norm.eps) if isinstance(norm, RMSNorm) else layer_norm(wide, None, None, norm.eps)
    weight = cast(Tensor, norm.weight).unflatten(0, (-1, t.shape[-1]))
    if norm.zero_centered_gamma:
        weight = weight.float() + 1
    if norm.cast_order == "weight_first":
        return (wide * weight.float()).to(t.dtype)
    return wide.to(t.dtype) * weight


def copied_part(values: Tensor) -> Tensor:
    """Return a part of a larger tensor as one of its own, where autograd would keep all of the larger one for it."""
    return values.clone() if torch.is_grad_enabled() and values.requires_grad else values


def packs(core_attention: DotProductAttention, device: torch.device) -> bool:
    """Whether an attention takes document numbers in place of a mask."""
    return core_attention.attends_documents(device)


def attention_of(
    core_attention: DotProductAttention, q: Tensor, k: Tensor, v: Tensor, hidden_keys: Tensor | None
) -> Tensor:
    """Attend with a bool mask of hidden keys, [B, 1, 1 or S, L], or within documents, int64 [B, S]."""
    if core_attention.max_logits is not None and core_attention.training:
        core_attention.note_logits(q, k)
    if hidden_keys is not None and hidden_keys.dtype != torch.bool:
        return core_attention.attend_documents(q, k, v, hidden_keys)
    return core_attention(q, k, v, hidden_keys)


def hidden_of_ring(hidden_keys: Tensor | None) -> Hidden:
    """Return a bool mask of hidden keys, [B, 1, 1 or S, L], or documents, int64 [B, L], as a ring of ranks takes it."""
    if hidden_keys is None:
        return Hidden()
    return Hidden(hidden_keys) if hidden_keys.dtype == torch.bool else Hidden(documents=hidden_keys)


def chunks_of_documents(documents: Tensor, size: int) -> Tensor:
    """Return numbers of the chunks of `size` tokens of each document, counted from its first one, int64 [B, S]: equal
    for tokens of one chunk; these follow one another; -1 for padding. documents: int64 [B, S], negative for padding."""
    position = torch.arange(documents.shape[1], device=documents.device)
    chunk = torch.div(position - first_positions(documents), size, rounding_mode="floor")
    return torch.where(documents < 0, -1, documents * (documents.shape[1] // size + 1) + chunk)


def other_chunks(
    queries: int, keys: int, size: int, hidden_keys: Tensor | None, device: torch.device, first: int = 0
) -> Tensor:
    """Return what chunked attention hides, broadcastable to [B, 1, S, L] bool: keys outside the query's own chunk, and
    what `hidden_keys` [B, 1, 1 or S, first + L] hides already. Chunks of `size` positions count from the first position
    that is not hidden; the queries are the last positions. first: the position of the first key."""
    position = torch.arange(first, first + keys, device=device)
    if hidden_keys is None:
        chunk = (position // size)[None, None]
        return chunk[..., None, :] != chunk[..., keys - queries :, None]
    begin = hidden_keys.long().cumprod(dim=-1).sum(dim=-1, keepdim=True)
    chunk = torch.div(position - begin, size, rounding_mode="floor")
    own = torch.div(position[keys - queries :, None] - begin, size, rounding_mode="floor")
    return hidden_keys[..., first:] | (chunk != own)


def chunks_of_rows(hidden_keys: Tensor, size: int, shard: ContextShard) -> Tensor:
    """Return what chunked attention hides from a rank's queries of a sequence that ranks share, bool [B, 1, S, L], S of
    two chunks of the sequence. hidden_keys: [B, 1, 1 or S, L], as for `other_chunks`."""
    found, length = [], hidden_keys.shape[3]
    for number, (begin, end) in enumerate(shard.chunks(length)):
        rows = hidden_keys if hidden_keys.shape[2] == 1 else hidden_keys.chunk(2, 2)[number]
        hidden = other_chunks(end - begin, end, size, rows[..., :end], hidden_keys.device)
        found.append(F.pad(hidden, (0, length - end), value=True))
    return torch.cat(found, 2)
