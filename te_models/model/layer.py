"""One transformer layer: token mixers and MLP or experts, around the residual stream.

B batch, S sequence, H hidden.
"""

from typing import Any, cast

import torch.nn.functional as F
from torch import Tensor, nn

from te_models.kernels.hyper_connections import Mixing
from te_models.layers.distributed.sequence_parallel import gather_tokens_of_ranks, norm_own_tokens, own_tokens
from te_models.layers.recipe.activation_checkpoint import checkpointed

from ..config import DeepNormConfig, ModelConfig
from . import one_token
from .build import Build, check_supported, make_norm
from .cache import LayerMemory
from .hyper_connection import HyperConnection
from .mixers import KeysValues, MixerInputs, Selection, TokenInputs, attention_class, recurrent_class
from .mlp import MLP
from .moe import MoELayer, RouterOutput
from .one_token import is_one_token
from .residual import AlternatingUpdates, Laurel, LayerScalar, PerLayerEmbedding
from .rotary import Rotary
from .shared_block import SharedBlock, SharedUse

Passed = Selection | KeysValues
"""What attention gives later layers."""
LayerResult = tuple[Tensor, RouterOutput | None] | tuple[Tensor, RouterOutput | None, Passed]


class DecoderLayer(nn.Module):
    """Layer number `layer` (from 0) of the configured model. Megatron-Core: `DecoderLayer`.

    The five block kinds, with n1, n2 norms before and m1, m2 norms after a sublayer:
    pre                   x = x + attention(n1(x));      x = x + mlp(n2(x))
    post                  x = x + m1(attention(x));      x = x + m2(mlp(x))
    sandwich              x = x + m1(attention(n1(x)));  x = x + m2(mlp(n2(x)))
    parallel              x = x + attention(n1(x)) + mlp(n2(x))
    parallel_shared_norm  x = x + attention(n1(x)) + mlp(n1(x))
    n1 and n2 live in the linear layer that reads them, n2 of an MoE layer in `pre_mlp_layernorm`, an n1 that several
    modules read in `input_layernorm`. With hyper-connections x has several lanes, of which a sublayer reads a sum, and
    writes to all. With `deep_norm` x = alpha n1(x) + beta attention(n1(x)), and so on. What the configuration names as
    the layer's mixers stands for attention: softmax attention is `self_attention`, another kind `mixer`; two side by
    side read the same n1, and are added up. A layer without mixer, or without MLP, has the other sublayer alone.
    """

    def __init__(self, config: ModelConfig, layer: int = 0, build: Build | None = None) -> None:
        super().__init__()
        if not isinstance(config, ModelConfig):
            raise TypeError(
                f"config is {config!r}; allowed: a ModelConfig (Transformer Engine's TransformerLayer is "
                "te_models.layers.TransformerLayer)"
            )
        check_supported(config)
        build = build or Build()
        self.sequence_shard = build.sequence_shard
        self.block = config.block_of(layer)
        self.residual_multiplier = config.residual_multiplier
        self.hidden_dropout = config.hidden_dropout
        self.is_moe = config.is_moe_layer(layer)
        attention, mixer = config.attention_of(layer), config.mixer_of(layer)
        self.residual_factors = None if config.deep_norm is None else _factors(config.deep_norm, attention is not None)
        self.has_mixer, has_mlp = bool(attention or mixer), config.has_mlp(layer)
        normed, after = config.norms_before(layer), config.norms_after(layer)
        apart = config.has_input_layernorm(layer)
        indexer = None if attention is None else attention.indexer
        self.shares_choice = indexer is not None and indexer.shared
        shares = config.shared_block_of(layer) is not None
        self.shared_use = None
        if shares and config.shared_blocks is not None:
            self.shared_use = SharedUse(config, config.shared_blocks, layer, build)
        self.input_layernorm = make_norm(config.norm, config.hidden_size, build) if apart else None
        self.self_attention = self.mixer = None
        if attention is not None and not shares:
            self.self_attention = attention_class(attention)(
                config, attention, layer, build, normed=normed and not apart
            )
        if mixer is not None:
            self.mixer = recurrent_class(mixer)(config, mixer, layer, build)
        mixes = after and self.has_mixer
        self.post_self_attn_layernorm = make_norm(config.norm, config.hidden_size, build) if mixes else None
        separate = normed and self.is_moe and not (config.moe and config.moe.own_norms)
        self.pre_mlp_layernorm = make_norm(config.norm, config.hidden_size, build) if separate else None
        self.mlp: nn.Module | None = None
        if self.is_moe:
            self.mlp = MoELayer(config, build.of_all_tokens, layer)
        elif has_mlp:
            sizes = (config.ffn_hidden_size(layer), config.mlp.bias)
            self.mlp = MLP(config, *sizes, build, normed=normed, sparsity=config.sparsity(layer))
        after = has_mlp and (after or (self.is_moe and config.moe is not None and config.moe.post_layernorm))
        self.post_mlp_layernorm = make_norm(config.norm, config.hidden_size, build) if after else None

        hyper = config.hyper_connections
        self.self_attention_hyper_connection = self.mlp_hyper_connection = None
        if hyper is not None and self.has_mixer:
            self.self_attention_hyper_connection = HyperConnection(config, hyper, build)
        if hyper is not None and has_mlp:
            self.mlp_hyper_connection = HyperConnection(config, hyper, build)
        lanes, embedding, rank = config.alternating_updates, config.per_layer_embedding, config.laurel_rank
        self.laurel = None if rank is None else Laurel(config, rank, build.whole)
        self.alternating_updates = None if lanes is None else AlternatingUpdates(config, lanes, build.whole)
        self.per_layer_embedding = None if embedding is None else PerLayerEmbedding(config, embedding, build.whole)
        self.layer_scalar = LayerScalar(build) if config.layer_scalar else None
        others = (self.input_layernorm, self.mixer, self.post_self_attn_layernorm, self.post_mlp_layernorm, hyper)
        others = (*others, self.shared_use, self.sequence_shard, self.residual_factors, lanes, embedding, rank)
        whole = self.self_attention is not None and self.mlp is not None and self.block == "pre"
        self.is_plain = whole and not config.layer_scalar and all(other is None for other in others)
        """Whether it is `x = x + attention(n1(x)); x = x + mlp(n2(x))`, n1 in the attention, and nothing else."""
        self.recompute_save: list[Any] | None = None  # operations whose results a recomputation finds saved

    def forward(
        self,
        x: Tensor,
        rotary: Rotary | None = None,
        hidden_keys: Tensor | None = None,
        token_mask: Tensor | None = None,
        cache: LayerMemory | None = None,
        query_scale: Tensor | None = None,
        recompute: bool = False,
        batch_size: int | None = None,
        documents: Tensor | None = None,
        keys_values: KeysValues | None = None,
        choice: Tensor | None = None,
        tokens: TokenInputs | None = None,
        shared: tuple[SharedBlock, Tensor] | None = None,
    ) -> LayerResult:
        """x: [B, S, H] -> ([B, S, H], what the router decided; None in a dense layer), and a third, where attention is
        sparse, or later layers read its keys and values. Arguments as for `MixerInputs` and `MoELayer`. recompute: keep
        only them for the backward pass and compute the rest again there (activation checkpointing); here, not around
        the call, so that it is part of a graph of one layer. batch_size: B, where x and the result are this rank's part
        of the tokens, [B S / ranks, H]. shared: the block that the layer uses, and the embeddings."""
        arguments: tuple[Any, ...] = (
            x,
            rotary,
            hidden_keys,
            token_mask,
            cache,
            query_scale,
            batch_size,
            documents,
            keys_values,
        )
        arguments = (*arguments, choice, tokens)
        if self.shared_use is not None:
            arguments = (*arguments, shared)
        return checkpointed(self._run, *arguments, save=self.recompute_save) if recompute else self._run(*arguments)

    def _run(
        self,
        x: Tensor,
        rotary: Rotary | None,
        hidden_keys: Tensor | None,
        token_mask: Tensor | None,
        cache: LayerMemory | None,
        query_scale: Tensor | None,
        batch_size: int | None,
        documents: Tensor | None,
        keys_values: KeysValues | None,
        choice: Tensor | None,
        tokens: TokenInputs | None,
        shared: tuple[SharedBlock, Tensor] | None = None,
    ) -> LayerResult:
        if self.is_plain and cache is not None and is_one_token(x):
            attended = None
            if hidden_keys is None and query_scale is None and keys_values is None:
                attended = one_token.attention(self.self_attention, x, rotary, cache)
            if attended is not None:
                x = self._add(x, attended)
                y, routed = one_token.mlp(self.mlp, x), None
                if y is None:
                    y, routed = self._mlp(x, token_mask, batch_size, tokens)
                return self._add(x, y), routed
        positions = None if tokens is None else tokens.positions
        inputs = MixerInputs(
            rotary, hidden_keys, query_scale, batch_size, token_mask, documents, keys_values, choice, positions
        )
        if self.block in ("parallel", "parallel_shared_norm"):
            normed = x if self.input_layernorm is None else self._normed(self.input_layernorm, x)
            attended, passed = self._mixed(normed, inputs, cache)
            normed = x if self.block == "parallel" else normed
            y, routed = self._mlp(normed, token_mask, batch_size, tokens)
            if self.hidden_dropout > 0 and self.training:  # each sublayer's output has a separate mask
                attended, y = (F.dropout(part, self.hidden_dropout) for part in (attended, y))
            return _result(self._scaled_sum(x, attended + y), routed, passed)
        if self.residual_factors is not None:
            return self._run_deep(x, inputs, cache, self.residual_factors)
        passed = lanes = None
        if self.alternating_updates is not None:
            lanes, x = self.alternating_updates.predict(x)
        if self.has_mixer:
            connection = self.self_attention_hyper_connection
            inner, mixing = (x, None) if connection is None else connection.read(x)
            if self.shared_use is not None and shared is not None:
                both: Any = (None, None) if cache is None else cache  # of a pair of memories
                memory, cache = both
                inner = inner + self.shared_use(shared[0], x, shared[1], inputs, memory)
            normed = inner if self.input_layernorm is None else self._normed(self.input_layernorm, inner)
            attended, passed = self._mixed(normed, inputs, cache)
            if self.post_self_attn_layernorm is not None:
                attended = self._normed(self.post_self_attn_layernorm, attended)
            if self.laurel is not None:
                x = self.laurel(x, normed, attended)
            else:
                x = self._add(x, attended) if mixing is None else self._written(connection, x, attended, mixing)
        if self.mlp is None:
            return _result(x, None, passed)
        connection = self.mlp_hyper_connection
        inner, mixing = (x, None) if connection is None else connection.read(x)
        y, routed = self._mlp(inner, token_mask, batch_size, tokens)
        if self.post_mlp_layernorm is not None:
            y = self._normed(self.post_mlp_layernorm, y)
        x = self._add(x, y) if mixing is None else self._written(connection, x, y, mixing)
        return _result(self._ended(x, lanes, tokens), routed, passed)

    def _ended(self, x: Tensor, lanes: Tensor | None, tokens: TokenInputs | None) -> Tensor:
        """Return the stream behind the layer. x: [B, S, H], behind the MLP; lanes: [B, S, M, H], as predicted."""
        read = x
        if self.alternating_updates is not None and lanes is not None:
            lanes, read = self.alternating_updates.correct(lanes, x)
            x = lanes.flatten(-2)
        if self.per_layer_embedding is not None and tokens is not None:
            added = self.per_layer_embedding(read, tokens)
            if lanes is not None:  # the first lane has no part in it
                added = F.pad(added.repeat(1, 1, lanes.shape[-2] - 1), (added.shape[-1], 0))
            x = x + added
        return x if self.layer_scalar is None else self.layer_scalar(x)

    def _run_deep(
        self, x: Tensor, inputs: MixerInputs, cache: LayerMemory | None, factors: tuple[float, ...]
    ) -> LayerResult:
        """Run a layer whose residual connections begin behind its norms."""
        passed = routed = None
        alpha, beta, mlp_alpha, mlp_beta = factors
        if self.has_mixer:
            assert self.input_layernorm is not None, "it is apart in such a layer"
            x = self._normed(self.input_layernorm, x)
            y, passed = self._mixed(x, inputs, cache)
            x = alpha * x + beta * F.dropout(y, self.hidden_dropout, self.training)
        if self.mlp is not None:
            assert self.pre_mlp_layernorm is not None, "it is apart before experts"
            x = self._normed(self.pre_mlp_layernorm, x)
            y, routed = self._experts(x, inputs.token_mask, inputs.batch_size)
            x = mlp_alpha * x + mlp_beta * F.dropout(y, self.hidden_dropout, self.training)
        return _result(x, routed, passed)

    def _mixed(self, x: Tensor, inputs: MixerInputs, cache: LayerMemory | None) -> tuple[Tensor, Passed | None]:
        """x: [B, S, H], normed where the mixers do not norm it themselves. Return their sum, and what attention passes
        on to later layers."""
        if self.self_attention is None:
            return cast(nn.Module, self.mixer)(x, inputs, cache), None
        memories: Any = (cache, None) if self.mixer is None else (None, None) if cache is None else cache
        y, passed = self.self_attention(x, inputs, memories[0]), None
        if isinstance(y, tuple):
            y, passed = y
        return y if self.mixer is None else y + self.mixer(x, inputs, memories[1]), passed

    def _mlp(
        self, x: Tensor, token_mask: Tensor | None, batch_size: int | None, read: TokenInputs | None = None
    ) -> tuple[Tensor, RouterOutput | None]:
        if self.pre_mlp_layernorm is not None:
            x = self._normed(self.pre_mlp_layernorm, x)
        assert self.mlp is not None, "called in layers that have it"
        return self._experts(x, token_mask, batch_size, read) if self.is_moe else (self.mlp(x), None)

    def _experts(
        self, x: Tensor, token_mask: Tensor | None, batch_size: int | None, read: TokenInputs | None = None
    ) -> tuple[Tensor, RouterOutput | None]:
        """x: normed."""
        assert self.mlp is not None, "called in layers with experts"
        if self.sequence_shard is None:
            return self.mlp(x, token_mask, None if read is None else read.ids)
        # a router loss is of all tokens, so that every rank routes all of them
        assert batch_size is not None, "given where ranks share tokens"
        tokens = gather_tokens_of_ranks(x, self.sequence_shard)
        y, routed = self.mlp(tokens.view(batch_size, -1, tokens.shape[-1]), token_mask)
        return own_tokens(y.flatten(0, 1), self.sequence_shard), routed

    def _normed(self, norm: nn.Module, x: Tensor) -> Tensor:
        return norm_own_tokens(norm, x, self.sequence_shard)

    def _add(self, x: Tensor, y: Tensor) -> Tensor:
        if self.hidden_dropout > 0:
            y = F.dropout(y, self.hidden_dropout, self.training)
        return self._scaled_sum(x, y)

    def _written(self, connection: HyperConnection | None, x: Tensor, y: Tensor, mixing: Mixing) -> Tensor:
        assert connection is not None
        if self.hidden_dropout > 0:
            y = F.dropout(y, self.hidden_dropout, self.training)
        return connection.write(x, y, mixing)

    def _scaled_sum(self, x: Tensor, y: Tensor) -> Tensor:
        return x + y if self.residual_multiplier == 1.0 else x + y * self.residual_multiplier


def _factors(c: DeepNormConfig, attends: bool) -> tuple[float, float, float, float]:
    """Return alpha and beta of the mixers, and of the experts."""
    mixers = (c.attention_alpha, c.attention_beta) if attends else (c.recurrent_alpha, c.recurrent_beta)
    return *mixers, c.mlp_alpha, c.mlp_beta


def _result(x: Tensor, routed: RouterOutput | None, passed: Passed | None) -> LayerResult:
    return (x, routed) if passed is None else (x, routed, passed)
