"""Attention to a window of tokens and to compressed keys (DeepSeek-V4).

B batch, S sequence, L keys (cached ones included), W compressed keys, H hidden, N heads, D channels of one, Q latent of
queries, g groups of heads, r channels that a group's output is projected to, I channels of an index head.

One head is key and value. Its rotation is undone on the output, so that what a key adds depends on its distance alone.
A cache holds the key of each token, and behind it what compressed keys are made of; these are computed from it again.
"""

import torch
from torch import Tensor, nn

from te_models.kernels.compressed_keys import compress, last_tokens, roped_last, visible_compressed_keys, window_hides
from te_models.kernels.norm import rms_norm
from te_models.layers.distributed.context_parallel import ContextShard
from te_models.layers.module.grouped_linear import GroupedLinear
from te_models.layers.module.layernorm_linear import LayerNormLinear
from te_models.layers.module.linear import Linear
from te_models.layers.module.options import PrecedingNormOptions

from ...config import AttentionConfig, ModelConfig
from ..build import Build, init_method, make_core_attention, make_input_linear, make_norm, make_output_linear
from ..cache import LayerMemory
from ..rotary import RotaryEmbedding
from .attention import attention_of
from .base import MixerInputs
from .sparse_attention import HeadWeights


class Compressor(nn.Module):
    """What compressed keys are made of. `linear_in`: rows of keys, then of gates; position_bias: [m, C]."""

    def __init__(self, config: ModelConfig, rate: int, series: int, channels: int, build: Build) -> None:
        super().__init__()
        self.rate, self.series, self.channels = rate, series, channels
        rows = 2 * series * channels
        self.linear_in = Linear(config.hidden_size, rows, False, **build.gemm(init_method(config)))
        self.position_bias = build.parameter(rate, series * channels)
        self.layernorm = make_norm(config.norm, channels, build)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Start without a bias; the projection and the norm have their own."""
        self.position_bias.zero_()

    def forward(self, rows: Tensor, ends: Tensor, before: Tensor, tables: tuple[Tensor, Tensor]) -> Tensor:
        """rows: [B, L, 2 C], of all tokens; tables: of the compressed keys' first tokens -> [B, W, D], roped."""
        keys = self.layernorm(compress(rows, self.position_bias, ends, before, self.rate, self.series))
        return roped_last(keys[:, :, None], *tables)[:, :, 0]


class CompressedAttention(nn.Module):
    """The attention sublayer, without residual connection. `linear_qkv_down` holds the rows of the queries' latent,
    then of the one key."""

    def __init__(self, config: ModelConfig, a: AttentionConfig, layer: int, build: Build, *, normed: bool) -> None:
        super().__init__()
        its, heads, channels = a.compressed, a.num_attention_heads, a.key_channels
        assert its is not None and a.window_size is not None, "the configuration has been checked"
        self.attention, self.compressed, self.window = a, its, a.window_size
        self.context_shard: ContextShard | None = None
        self.epsilon = config.norm.layernorm_epsilon
        self.sizes = [its.q_lora_rank, channels]
        self.linear_qkv_down = make_input_linear(config, (sum(self.sizes),), False, build, normed=normed)
        self.linear_q_up = LayerNormLinear(
            its.q_lora_rank,
            heads * channels,
            False,
            norm=PrecedingNormOptions("RMSNorm", self.epsilon, cast_order=config.norm.cast_order),
            **build.gemm(init_method(config)),
        )
        self.kv_layernorm = make_norm(config.norm, channels, build)
        self.core_attention = make_core_attention(config, a, layer, heads, channels, 1, build)
        self.linear_o_down = GroupedLinear(
            its.o_groups,
            heads * channels // its.o_groups,
            its.o_lora_rank,
            False,
            single_grouped_weight=True,
            **build.gemm(init_method(config)),
        )
        self.linear_proj = make_output_linear(config, its.o_groups * its.o_lora_rank, False, build)
        self.compressor = self.index_compressor = self.linear_index_q = self.index_weights = self.rotary = None
        if its.rate is None:
            return
        self.compressor = Compressor(config, its.rate, its.series, channels, build)
        rope = config.rope_of(layer)
        assert rope is not None, "the configuration has been checked"
        self.rotary = RotaryEmbedding(rope, a.rotated_channels, config.max_position_embeddings, build.device)
        if its.index_topk is not None:
            size, count, start = its.index_head_dim, its.index_n_heads, init_method(config)
            self.index_compressor = Compressor(config, its.rate, its.series, size, build)
            self.linear_index_q = Linear(its.q_lora_rank, count * size, False, **build.gemm(start))
            self.index_weights = HeadWeights(config, count, build)
            for part in (self.index_compressor, self.linear_index_q, self.index_weights):
                part.requires_grad_(False)  # no gradient passes the choice, and no loss trains it

    def packs(self, device: torch.device) -> bool:
        """Whether the layer attends within documents without a mask."""
        return False

    def forward(self, x: Tensor, inputs: MixerInputs, cache: LayerMemory | None = None) -> Tensor:
        """As `SelfAttention.forward`. Raises ValueError where ranks share sequences."""
        if self.context_shard is not None:
            raise ValueError("ranks share the sequences of a model with compressed keys; allowed: whole sequences")
        rotary, positions = inputs.rotary, inputs.positions
        assert rotary is not None and positions is not None, "the configuration has been checked"
        latent, kv = self.linear_qkv_down(x).split(self.sizes, dim=-1)
        q = self.linear_q_up(latent).unflatten(-1, (-1, self.sizes[1]))
        q = roped_last(rms_norm(q, None, self.epsilon), *rotary)
        kv = roped_last(self.kv_layernorm(kv)[:, :, None], *rotary)
        rows = [c.linear_in(x) for c in (self.compressor, self.index_compressor) if c is not None]
        rest = torch.cat(rows, -1)[:, :, None] if rows else kv[..., :0]
        slots = None
        if cache is not None:
            kv, rest = cache.update(kv, rest)
            slots = cache.hidden_slots()
        if self.compressor is None:
            y = self._windowed(q, kv, inputs.hidden_keys, slots)
        else:
            places, texts = places_of(q.shape[1], kv.shape[1], inputs, slots)
            y = self._compressed(q, kv, rest[:, :, 0], latent, x, places, texts, positions, rotary)
        cos, sin = rotary
        y = roped_last(y.unflatten(-1, (-1, self.sizes[1])), cos, -sin).flatten(2)
        return self.linear_proj(self._grouped(y))

    def _grouped(self, y: Tensor) -> Tensor:
        """Project the output of each group of heads by its own rows. y: [B, S, N D] -> [B, S, g r]."""
        groups = self.compressed.o_groups
        rows = y.unflatten(-1, (groups, -1)).movedim(2, 0)  # [g, B, S, N D / g]
        number = torch.full((groups,), rows[0, ..., 0].numel(), dtype=torch.int64, device=y.device)
        down = self.linear_o_down(rows.flatten(0, 2), number)
        return down.unflatten(0, rows.shape[:3]).movedim(0, 2).flatten(2)

    def _windowed(self, q: Tensor, kv: Tensor, hidden_keys: Tensor | None, slots: Tensor | None) -> Tensor:
        if slots is not None:
            return self.core_attention(q, kv, kv, slots, attn_mask_type="arbitrary", window_size=(-1, -1))
        hidden = None if hidden_keys is None else hidden_keys[..., hidden_keys.shape[-1] - kv.shape[1] :]
        return attention_of(self.core_attention, q, kv, kv, hidden)

    def _compressed(
        self,
        q: Tensor,
        kv: Tensor,
        rows: Tensor,
        latent: Tensor,
        x: Tensor,
        places: Tensor,
        texts: Tensor | None,
        positions: Tensor,
        rotary: tuple[Tensor, Tensor],
    ) -> Tensor:
        """kv: [B, L, 1, D]; rows: [B, L, C], of both compressors; latent, x: of the queries."""
        compressor, rotate, length = self.compressor, self.rotary, kv.shape[1]
        assert compressor is not None and rotate is not None
        hidden = window_hides(places, length, self.window, texts)
        rate = compressor.rate
        if length >= rate:
            ends, before = last_tokens(length, rate, texts, kv.device)
            first = (ends - rate + 1).clamp(max=length - 1)
            if positions.shape[1] == length:
                starts = positions.expand(len(first) if len(positions) == 1 else -1, -1)
                starts = starts.gather(1, first.expand(len(starts), -1))
            else:  # a cache's tokens have followed one another
                starts = positions[:, -1:] - (places[:, -1:] - first)
            tables = rotate(starts.clamp(min=0))
            size = 2 * compressor.series * compressor.channels
            own, index_rows = rows[..., :size], rows[..., size:]
            keys = compressor(own, ends, before, tables)
            sees = visible_compressed_keys(places, ends, texts)
            if self.index_compressor is not None:
                sees = self._chosen(index_rows, ends, before, tables, latent, x, rotary, sees)
            kv = torch.cat((kv, keys[:, :, None].to(kv.dtype)), 1)
            sees = sees.expand(len(hidden) if len(sees) == 1 else -1, -1, -1)
            hidden = torch.cat((hidden.expand(len(sees), -1, -1), ~sees), -1)
        mask = hidden[:, None].expand(len(q), -1, -1, -1)
        return self.core_attention(q, kv, kv, mask, attn_mask_type="arbitrary", window_size=(-1, -1))

    @torch.no_grad()
    def _chosen(
        self,
        rows: Tensor,
        ends: Tensor,
        before: Tensor,
        tables: tuple[Tensor, Tensor],
        latent: Tensor,
        x: Tensor,
        rotary: tuple[Tensor, Tensor],
        sees: Tensor,
    ) -> Tensor:
        """Return which compressed keys each query sees, the best of those in `sees` [B or 1, S, W] by score."""
        its, up = self.compressed, self.linear_q_up
        topk = its.index_topk
        assert topk is not None and self.index_compressor is not None and self.linear_index_q is not None
        if sees.shape[-1] <= topk:
            return sees
        keys = self.index_compressor(rows, ends, before, tables)
        normed = rms_norm(latent, up.layer_norm_weight, up.eps, cast_order=up.cast_order)
        q = roped_last(self.linear_index_q(normed).unflatten(-1, (its.index_n_heads, -1)), *rotary)
        assert self.index_weights is not None
        weights = self.index_weights(x) * (its.index_n_heads * its.index_head_dim) ** -0.5
        scores = torch.einsum("bshi,bwi->bshw", q.float(), keys.float()).relu()
        scores = (scores * weights[..., None]).sum(2).masked_fill(~sees, -torch.inf)
        best = scores.topk(topk, dim=-1).indices
        return torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, best, True) & sees


def places_of(queries: int, length: int, inputs: MixerInputs, slots: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Return where the queries are among the keys, int64 [B or 1, S], and the number of each key's text, [B, L],
    negative for padding; None: every row is one text. slots: of a cache whose keys lie in slots (in order of their
    positions), bool [B, 1, 1, L], True where one is hidden from the one query."""
    hidden = inputs.hidden_keys if slots is None else slots
    texts = inputs.documents
    if texts is None and hidden is not None:
        texts = torch.where(hidden[:, 0, -1], -1, 0)
    if slots is not None and texts is not None:
        last = torch.arange(length, device=texts.device) * (texts >= 0)
        return last.amax(1, keepdim=True), texts
    assert inputs.positions is not None
    return torch.arange(length - queries, length, device=inputs.positions.device)[None], texts
