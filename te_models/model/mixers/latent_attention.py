"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1): keys and values from a small shared latent.

B batch, S sequence, L keys (cached ones included), H hidden, N heads, C latent of k and v, Q latent of q, D channels
without position, R rotated channels, Dv value channels.

Each head's key is [D from the latent | R shared by all heads, rotated]. The cache holds the latent and the shared part,
C + R numbers per position for all heads together, and the heads' keys and values are computed from it again.
"""

import functools

import torch
from torch import Tensor, nn

from te_models.kernels.norm import rms_norm
from te_models.kernels.rope import apply_rope
from te_models.layers.distributed.context_parallel import (
    ContextShard,
    attention_of_chunks,
    attention_of_heads,
    gather_positions,
)
from te_models.layers.distributed.sequence_parallel import gather_tokens_of_ranks
from te_models.layers.module.layernorm_linear import LayerNormLinear
from te_models.layers.module.options import PrecedingNormOptions

from ...config import AttentionConfig, ModelConfig
from ..build import Build, init_method, make_core_attention, make_input_linear, make_output_linear
from ..cache import LayerMemory
from ..rotary import Rotary
from .attention import attention_of, copied_part, hidden_of_ring, packs
from .base import MixerInputs, Selection
from .output_gate import HeadGate, gated
from .sparse_attention import Indexer, Keys


class LatentAttention(nn.Module):
    """The attention sublayer, without residual connection. `linear_qkv_down` holds the rows of q, or of its latent with
    `mla.q_lora_rank`, then of the latent of k and v, then of the rotated key part. It has no bias for q itself;
    the other rows have the bias `latent_bias` [C + R].

    Where layers are split, each rank computes its own heads; `linear_qkv_down` is on every rank, of all tokens."""

    def __init__(self, config: ModelConfig, a: AttentionConfig, layer: int, build: Build, *, normed: bool) -> None:
        super().__init__()
        mla = a.mla
        assert mla is not None
        self.mla = mla
        self.sequence_shard = build.sequence_shard
        self.context_shard: ContextShard | None = None
        rope = config.rope_of(layer)
        self.rope_style = "half" if rope is None else rope.style
        heads = a.num_attention_heads
        q_size = heads * (mla.qk_head_dim + mla.qk_pos_emb_head_dim)
        self.sizes = [mla.q_lora_rank or q_size, mla.kv_lora_rank, mla.qk_pos_emb_head_dim]
        bias, plain = a.add_qkv_bias, mla.q_lora_rank is None
        self.linear_qkv_down = make_input_linear(
            config, (sum(self.sizes),), bias and not plain, build.whole, normed=normed
        )
        self.latent_bias = build.parameter(sum(self.sizes[1:])) if bias and plain else None
        self.linear_q_up = None if mla.q_lora_rank is None else self._up(config, mla.q_lora_rank, q_size, build)
        self.linear_kv_up = self._up(config, mla.kv_lora_rank, heads * (mla.qk_head_dim + mla.v_head_dim), build)
        channels = mla.qk_head_dim + mla.qk_pos_emb_head_dim
        own_heads = heads // build.tp_size
        self.core_attention = make_core_attention(config, a, layer, own_heads, channels, own_heads, build)
        self.attention = a
        self.head_gate = HeadGate(config, heads, build) if a.has_head_gate else None
        self.linear_proj = make_output_linear(config, heads * mla.v_head_dim, a.add_output_bias, build)
        inputs = mla.q_lora_rank or config.hidden_size
        self.indexer = None if a.indexer is None else Indexer(config, a.indexer, inputs, build)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Start without a bias; the projections have their own."""
        if self.latent_bias is not None:
            self.latent_bias.zero_()

    def _up(self, config: ModelConfig, latent: int, rows: int, build: Build) -> LayerNormLinear:
        return LayerNormLinear(
            latent,
            rows,
            False,
            norm=PrecedingNormOptions("RMSNorm", self.mla.latent_norm_epsilon, cast_order=config.norm.cast_order),
            **build.of_all_tokens.gemm(init_method(config), "column"),
        )

    def forward(
        self, x: Tensor, inputs: MixerInputs, cache: LayerMemory | None = None
    ) -> Tensor | tuple[Tensor, Selection]:
        """As `SelfAttention.forward`."""
        rotary, hidden_keys, query_scale, batch_size = inputs[:4]
        mla, normed = self.mla, x
        if self.sequence_shard is not None:
            x = gather_tokens_of_ranks(x, self.sequence_shard).unflatten(0, (batch_size or 1, -1))
        q, latent, shared = self.linear_qkv_down(x).split(self.sizes, dim=-1)
        if self.latent_bias is not None:
            ours, everyones = self.latent_bias.to(latent.dtype).split(self.sizes[1:])
            latent, shared = latent + ours, shared + everyones
        # of what every rank computed and uses for its own heads, the gradient is summed over the ranks; the projections
        # up from a latent do so themselves
        split, heads = self.linear_proj, self.core_attention.num_attention_heads
        shared = split.for_own_features(shared)
        index = None
        if self.indexer is not None and not self.indexer.config.shared:
            index = self.indexer(x, x if self.linear_q_up is None else self._normed_latent(q), rotary)
        if self.linear_q_up is not None:
            q = self.linear_q_up(q).unflatten(-1, (heads, -1))
        else:
            q = split.for_own_features(q).unflatten(-1, (heads * split.tp_size, -1))
            q = q.narrow(2, heads * split.tp_rank, heads)
        plain, to_rotate = q.split([mla.qk_head_dim, mla.qk_pos_emb_head_dim], dim=-1)
        q = torch.cat((plain, self._rotated(to_rotate, rotary)), dim=-1)
        if query_scale is not None:
            q = q * query_scale.to(q.dtype)
        latent, shared = latent[:, :, None], self._rotated(shared[:, :, None], rotary)
        if self.indexer is not None:
            y, selection = self.indexer.attend(
                self.core_attention,
                index,
                q,
                (latent, shared),
                inputs,
                cache,
                self.context_shard,
                expand=self._keys_and_values,
                dense=functools.partial(attention_of, self.core_attention),
            )
            return self.linear_proj(y if batch_size is None else y.flatten(0, 1)), selection
        slots = None
        if cache is not None:
            latent, shared = cache.update(latent, shared)
            slots = cache.hidden_slots()
            if hidden_keys is not None:
                hidden_keys = hidden_keys[..., hidden_keys.shape[-1] - latent.shape[1] :]
        shard = self.context_shard
        if shard is not None and shard.cp_comm_type == "all_gather":
            # fewer numbers than keys and values, which each rank computes from them
            both = gather_positions(torch.cat((latent, shared), -1), shard)
            latent, shared = both.split(self.sizes[1:], -1)
        k, v = self._keys_and_values(latent, shared)
        if slots is not None:
            y = self.core_attention(q, k, v, slots, attn_mask_type="arbitrary", window_size=(-1, -1))
        elif shard is None:
            y = attention_of(self.core_attention, q, k, v, hidden_keys)
        elif shard.cp_comm_type == "p2p":
            y = self.core_attention.attend_ring(q, k, v, shard, hidden_of_ring(hidden_keys))
        else:
            attention = functools.partial(attention_of, self.core_attention)
            of_ranks = attention_of_heads if shard.cp_comm_type == "a2a" else attention_of_chunks
            y = of_ranks(attention, q, k, v, hidden_keys, shard)
        if self.head_gate is not None:
            y = gated(y, self.head_gate(normed, batch_size, split), self.attention)
        return self.linear_proj(y if batch_size is None else y.flatten(0, 1))

    def _keys_and_values(self, latent: Tensor, shared: Tensor) -> Keys:
        """latent: [B, L, 1, C]; shared: [B, L, 1, R], rotated -> k [B, L, N, D + R] and v [B, L, N, Dv]."""
        heads = self.core_attention.num_attention_heads
        kv = self.linear_kv_up(latent[:, :, 0]).unflatten(-1, (heads, -1))
        plain, v = kv.split([self.mla.qk_head_dim, self.mla.v_head_dim], dim=-1)
        return torch.cat((plain, shared.expand(-1, -1, heads, -1)), dim=-1), copied_part(v)

    def _normed_latent(self, q: Tensor) -> Tensor:
        """Return what the projection up from the latent of the queries reads, without gradient."""
        up = self.linear_q_up
        assert up is not None and up.layer_norm_weight is not None
        return rms_norm(q.detach(), up.layer_norm_weight.detach(), up.eps, cast_order=up.cast_order)

    def packs(self, device: torch.device) -> bool:
        """Whether the layer attends within documents without a mask."""
        return packs(self.core_attention, device)

    def _rotated(self, t: Tensor, rotary: Rotary | None) -> Tensor:
        return t if rotary is None else apply_rope(t, *rotary, self.rope_style)
