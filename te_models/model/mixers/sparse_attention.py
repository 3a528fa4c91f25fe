"""Sparse attention (DeepSeek-V3.2, arXiv 2512.02556): an indexer chooses the keys that each query sees.

B batch, S sequence, L keys (cached ones included), N query heads, H index heads, I channels of one, K chosen keys.

Queries of texts of up to `topk` tokens see all keys, by whatever attention is fastest. Of longer ones each query has a
separate list of keys; a single query of a cache gathers these, so that a step's attention costs the same at any length.
The index keys lie in the cache behind the values.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from te_models.kernels.rope import apply_rope
from te_models.kernels.sparse_attention import indexer_loss, select_keys, sparse_attention
from te_models.kernels.without_autocast import without_autocast
from te_models.layers.attention.dot_product_attention import DotProductAttention
from te_models.layers.distributed.context_parallel import ContextShard, gather_positions, mean_of_ranks
from te_models.layers.module.linear import Linear
from te_models.layers.module.norm import LayerNorm

from ...config import IndexerConfig, ModelConfig
from ..build import Build, init_method
from ..cache import LayerMemory
from ..rotary import Rotary
from .base import MixerInputs, Selection
from .index_pools import choose_pools

Keys = tuple[Tensor, Tensor]
"""What a cache holds of attention: k [B, L, G, D] and v [B, L, G, Dv], or what latent attention computes these from."""
Attend = Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]


class IndexerInputs(NamedTuple):
    """q: [B, S, H, I]; k: [B, S, I], with pools [B, S, 2 I], see `choose_pools`; weights: [B, S, H] float32,
    with the scale of the scores."""

    q: Tensor
    k: Tensor
    weights: Tensor


class Indexer(nn.Module):
    """Scores keys for queries, and attends to the best. Every rank that splits attention has all of it, and trains it
    by the attention of the heads of all. A layer that
    shares the choice of an earlier one has no parameters here. Megatron-Core: `DSAIndexer`.

    inputs: channels of what index queries are projected from.
    """

    def __init__(self, config: ModelConfig, indexer: IndexerConfig, inputs: int, build: Build) -> None:
        super().__init__()
        self.config = indexer
        self.heads_group = "" if build.tp_group is None or build.tp_size == 1 else build.tp_group.group_name
        if indexer.shared:
            return
        build = build.whole
        heads, channels, start = indexer.n_heads, indexer.head_dim, init_method(config)
        self.linear_wq_b = Linear(inputs, heads * channels, False, **build.gemm(start))
        self.linear_wk = Linear(config.hidden_size, channels, False, **build.gemm(start))
        self.k_norm = LayerNorm(channels, indexer.layernorm_epsilon, **build.new)
        self.weights_proj = HeadWeights(config, heads, build)
        if indexer.pool_size is not None:
            self.linear_wgate = Linear(config.hidden_size, channels, False, **build.gemm(start))
            self.pool_bias = build.parameter(indexer.pool_size, channels)
        self.reset_parameters()
        # without a loss no gradient comes, and weight decay alone would move what it has learned
        self.requires_grad_(indexer.loss_coeff > 0)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Start with weights in a pool that depend on the token alone; the projections have their own."""
        if self.config.pool_size is not None:
            self.pool_bias.zero_()

    def forward(self, x: Tensor, queries: Tensor, rotary: Rotary | None) -> IndexerInputs | None:
        """x: [B, S, hidden], normed; queries: [B, S, inputs]. None where the layer has no indexer of its own."""
        c = self.config
        if c.shared:
            return None
        with torch.set_grad_enabled(torch.is_grad_enabled() and self.training and c.loss_coeff > 0):
            q = self.linear_wq_b(queries.detach()).unflatten(-1, (c.n_heads, c.head_dim))
            k = self.k_norm(self.linear_wk(x.detach()))[:, :, None]
            q, k = self._rotated(q, rotary), self._rotated(k, rotary)
            weights = self.weights_proj(x.detach()) * (c.n_heads * c.head_dim) ** -0.5
            k = k[:, :, 0] if c.pool_size is None else torch.cat((k[:, :, 0], self.linear_wgate(x.detach())), -1)
        return IndexerInputs(q, k, weights)

    def _rotated(self, t: Tensor, rotary: Rotary | None) -> Tensor:
        if rotary is None or self.config.rotated == "none":
            return t
        if self.config.rotated == "first":
            return apply_rope(t, *rotary, self.config.rope_style)
        plain = t.shape[-1] - 2 * rotary[0].shape[-1]
        return torch.cat((t[..., :plain], apply_rope(t[..., plain:], *rotary, self.config.rope_style)), dim=-1)

    def attend(
        self,
        core: DotProductAttention,
        index: IndexerInputs | None,
        q: Tensor,
        keys: Keys,
        inputs: MixerInputs,
        cache: LayerMemory | None,
        shard: ContextShard | None,
        *,
        expand: Callable[[Tensor, Tensor], Keys],
        dense: Attend,
    ) -> tuple[Tensor, Selection]:
        """Return attention [B, S, N Dv] and what later layers share. index: of this call's tokens, None in a layer
        that shares. q: [B, S, N, D]; keys: of this call's tokens; expand: from such to k and v of q's heads. dense:
        attention to all keys of q, k, v and hidden keys, see `attention_of`."""
        joined, hidden, slots = cache is not None or shard is not None, inputs.hidden_keys, None
        first, second = keys
        if index is not None and joined:
            second = with_index(second, index.k)
        if cache is not None:
            first, second = cache.update(first, second)
            slots = cache.hidden_slots()
            hidden = hidden if slots is None else slots
        if shard is not None:
            both = gather_positions(torch.cat((first, second), -1), shard)
            first, second = both.split((first.shape[-1], second.shape[-1]), -1)
        if index is not None and joined:
            second, index_k = without_index(second, self.config.key_channels)
            index = index._replace(k=index_k)
        length, queries = first.shape[1], q.shape[1]
        pieces = pieces_of(queries, length, hidden, shard)
        choice = None
        if not (self.config.warmup and self.training) and length > self.config.topk:
            choice = inputs.choice if index is None else self._choose(index, pieces)
        if choice is not None and queries == 1 and shard is None and not torch.is_grad_enabled():
            places = choice[:, 0].clamp(min=0).long()[..., None, None]
            k, v = expand(*(t.gather(1, places.expand(-1, -1, *t.shape[2:])) for t in (first, second)))
            return _masked(core, q, k, v, (choice < 0)[:, None]), Selection(choice, None)
        k, v = expand(first, second)
        if choice is not None:
            parts = [
                sparse_attention(
                    q[:, p.queries], k[:, : p.end], v[:, : p.end], choice[:, p.queries], scale=core.softmax_scale
                ).flatten(2)
                for p in pieces
            ]
            y = torch.cat(parts, 1) if len(parts) > 1 else parts[0]
        elif slots is not None:
            y = _masked(core, q, k, v, slots)
        else:
            parts = [dense(q[:, p.queries], k[:, : p.end], v[:, : p.end], p.hidden) for p in pieces]
            y = torch.cat(parts, 1) if len(parts) > 1 else parts[0]
        return y, Selection(choice, self._loss(core, index, q, k, choice, pieces, shard))

    @torch.no_grad()
    def _choose(self, index: IndexerInputs, pieces: list[QueryBlock]) -> Tensor:
        """Return int32 [B, S, K]; of pieces that see fewer keys the rest is -1."""
        c = self.config
        topk, choose = c.topk, select_keys
        if c.pool_size is not None:
            topk, choose = c.topk // c.pool_size, functools.partial(choose_pools, self.pool_bias)
        parts = [
            choose(index.q[:, p.queries], index.k[:, : p.end], index.weights[:, p.queries], topk, _flat(p.hidden))
            for p in pieces
        ]
        if len(parts) == 1:
            return parts[0]
        return torch.cat([F.pad(part, (0, c.choices - part.shape[2]), value=-1) for part in parts], 1)

    def _loss(
        self,
        core: DotProductAttention,
        index: IndexerInputs | None,
        q: Tensor,
        k: Tensor,
        choice: Tensor | None,
        pieces: list[QueryBlock],
        shard: ContextShard | None,
    ) -> Tensor | None:
        """Of sequences that ranks share it is the mean over their chunks, whatever padding these have."""
        if index is None or not index.q.requires_grad:
            return None
        losses = [
            indexer_loss(
                index.q[:, p.queries],
                index.k[:, : p.end],
                index.weights[:, p.queries],
                q[:, p.queries],
                k[:, : p.end],
                None if choice is None else choice[:, p.queries],
                _flat(p.hidden),
                scale=core.softmax_scale,
                heads_group=self.heads_group,
            )
            for p in pieces
        ]
        loss = losses[0] if shard is None else mean_of_ranks(torch.stack(losses).mean(), shard)
        return self.config.loss_coeff * loss


def train_indexers(model: nn.Module, loss_coeff: float, *, warmup: bool = False) -> None:
    """Give all indexers of a model another `loss_coeff` and `warmup`, as of one that was loaded; before its optimizer
    is made, because indexers with a weight of 0 are not trained.

    Raises ValueError for a model without indexers, ConfigError for a negative weight.
    """
    found = {f"{n}.": m for n, m in model.named_modules() if isinstance(m, Indexer) and not m.config.shared}
    if not found:
        raise ValueError("the model has no indexers; allowed: a model whose attention has one")
    for indexer in found.values():
        indexer.config = indexer.config.replace(loss_coeff=float(loss_coeff), warmup=warmup)
        indexer.requires_grad_(loss_coeff > 0)


class HeadWeights(nn.Module):
    """The projection that gives each index head its weight for a token, in float32. weight: [H, hidden]."""

    def __init__(self, config: ModelConfig, heads: int, build: Build) -> None:
        super().__init__()
        self.init_method = init_method(config)
        self.weight = build.parameter(heads, config.hidden_size)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw the weight."""
        self.init_method(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        """x: [B, S, hidden] -> [B, S, H] float32."""
        with without_autocast(x):
            return F.linear(x.float(), self.weight.float())


class QueryBlock(NamedTuple):
    """Queries that are the last of the keys before `end`, and the keys that are hidden from them, as `attention_of`
    takes them."""

    queries: slice
    end: int
    hidden: Tensor | None


def pieces_of(queries: int, keys: int, hidden: Tensor | None, shard: ContextShard | None) -> list[QueryBlock]:
    """Return the pieces of this rank's queries: one, or its two chunks of a sequence that ranks share."""
    ends = [keys] if shard is None else [end for _, end in shard.chunks(keys)]
    size, found = queries // len(ends), []
    for number, end in enumerate(ends):
        rows = slice(number * size, (number + 1) * size)
        own = None if hidden is None else hidden[..., :end]
        if own is not None and own.dim() == 4 and own.shape[2] > 1:
            own = own[:, :, rows]
        found.append(QueryBlock(rows, end, own))
    return found


def with_index(values: Tensor, index_k: Tensor) -> Tensor:
    """Return values [B, L, G, C] with index keys [B, L, I] behind their channels, a part of them in each head."""
    groups = values.shape[2]
    padded = F.pad(index_k, (0, -index_k.shape[-1] % groups))
    return torch.cat((values, padded.unflatten(-1, (groups, -1)).to(values.dtype)), dim=-1)


def without_index(values: Tensor, channels: int) -> Keys:
    """Return what `with_index` joined."""
    size = -(-channels // values.shape[2])
    plain, index_k = values.split((values.shape[-1] - size, size), dim=-1)
    return plain, index_k.flatten(2)[..., :channels]


def _masked(core: DotProductAttention, q: Tensor, k: Tensor, v: Tensor, hidden: Tensor) -> Tensor:
    return core(q, k, v, hidden, attn_mask_type="arbitrary", window_size=(-1, -1))


def _flat(hidden: Tensor | None) -> Tensor | None:
    """[B, 1, 1 or S, L] bool -> [B, 1 or S, L]; documents as they are."""
    return hidden if hidden is None or hidden.dim() == 2 else hidden[:, 0]
