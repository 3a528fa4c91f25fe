"""The stack of layers between embedding and output layer.

B batch, S sequence, L keys, H hidden, E experts.
"""

from typing import NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from te_models.kernels.asserted import asserted
from te_models.kernels.packed_attention import document_runs, sees_own_document
from te_models.layers.distributed.context_parallel import ContextShard, own_positions
from te_models.layers.distributed.sequence_parallel import norm_own_tokens

from ..config import ModelConfig, RopeConfig, TemperatureConfig, has_compressed_keys, reads_tokens
from .build import Build, make_norm
from .cache import Memory
from .hyper_connection import HyperConnection
from .layer import DecoderLayer
from .mixers import KeysValues, Selection, TokenInputs
from .moe import MoELayer, RouterOutput
from .residual import LaneProjections
from .rotary import Rotary, RotaryEmbedding
from .shared_block import SharedBlock


class LayerInputs(NamedTuple):
    """What all layers read beside the hidden states. tables: of each rotary embedding; query_scale: of the layers whose
    temperature is tuned; hidden_keys: bool, True where a query does not see a key; token_mask: [B, S] bool, False for
    padding; cache: what layers keep; batch_size: see `Decoder.forward`; documents: int64 [B, S], for layers that attend
    within documents without a mask, in place of `hidden_keys`; None where all are such layers; texts: the same numbers
    for recurrent mixers, also where a mask says them; shared: the keys and values that later layers read, by the number
    of the layer that has them, as layers run; tokens: what some layers read of the tokens."""

    tables: list[Rotary]
    query_scale: Tensor | None
    hidden_keys: Tensor | None
    token_mask: Tensor | None
    cache: Memory | None = None
    batch_size: int | None = None
    documents: Tensor | None = None
    texts: Tensor | None = None
    shared: dict[int, KeysValues] | None = None
    tokens: TokenInputs | None = None


class Decoder(nn.Module):
    """The layers, the rotary tables that they share, and the final norm.

    activation_checkpointing: keep only each layer's input for the backward pass and compute the rest again there.
    """

    def __init__(self, config: ModelConfig, build: Build) -> None:
        super().__init__()
        self.activation_checkpointing = False
        self.sequence_shard = build.sequence_shard
        self.context_shard: ContextShard | None = None
        self.layers = nn.ModuleList(DecoderLayer(config, i, build) for i in range(config.num_layers))
        shared = config.shared_blocks
        firsts = () if shared is None else shared.layers[: shared.num_blocks]
        self.shared_blocks = nn.ModuleList(SharedBlock(config, i, build) for i in firsts) if firsts else None
        self.shared_of_layer = [config.shared_block_of(i) for i in range(config.num_layers)]
        self.gets_embeddings = self.hands_on_embeddings = False
        """Whether, as in a pipeline stage, x comes with the embeddings behind its channels, and is returned so."""
        self.final_layernorm = make_norm(config.norm, config.hidden_size, build)
        self.lanes, hyper = 1, config.hyper_connections
        self.final_hyper_connection = None
        if hyper is not None:
            self.lanes = hyper.lanes
            if hyper.output == "weighted":
                self.final_hyper_connection = HyperConnection(config, hyper, build, output=True)
        updates, embedding = config.alternating_updates, config.per_layer_embedding
        self.lane_projections = self.per_layer_layernorm = None
        if updates is not None:
            self.lanes = updates.lanes
            self.lane_projections = LaneProjections(config, self.lanes, build.whole)
        if embedding is not None:
            self.per_layer_layernorm = make_norm(config.norm, embedding.channels, build)
        compressed = has_compressed_keys(config)
        self.recurrent = config.is_recurrent or compressed
        self.reads_tokens = reads_tokens(config) or compressed
        self.kv_sources = [config.kv_source(i) for i in range(config.num_layers)]
        ropes: list[tuple[RopeConfig, int]] = []
        self.rotary_of_layer: list[int | None] = []
        self.temperature: TemperatureConfig | None = None
        self.tuned_layers: list[bool] = []
        for i in range(config.num_layers):
            attention, rope = config.attention_of(i), config.rope_of(i)
            its = None if rope is None or attention is None else (rope, attention.rotated_channels)
            if its is not None and its not in ropes:
                ropes.append(its)
            self.rotary_of_layer.append(None if its is None else ropes.index(its))
            tuning = None if attention is None else attention.temperature_tuning
            self.temperature = self.temperature or tuning
            self.tuned_layers.append(tuning is not None and (tuning.layers == "all" or not config.rotates(i)))
        self.rotary_embeddings = nn.ModuleList(
            RotaryEmbedding(rope, channels, config.max_position_embeddings, build.device) for rope, channels in ropes
        )

    @property
    def by_length(self) -> bool:
        """Whether rotary frequencies depend on the length of the sequence: what a cache holds may have to be computed
        again when it grows (`rotary_stage`)."""
        return any(rotary.by_length for rotary in self._rotaries())

    def rotary_stage(self, length: int) -> tuple[int, ...]:
        """Return what the rotary frequencies depend on: sequences of the same stage are rotated alike."""
        return tuple(rotary.stage(length) for rotary in self._rotaries())

    def check_stage(self, end: int, begin: int, length: int) -> None:
        """Raise ValueError where a sequence of `end` tokens, of which `length` are new, is rotated otherwise than the
        `begin` cached ones were."""
        if self.rotary_stage(end) != self.rotary_stage(end - length):
            raise ValueError(
                f"sequences of {end} tokens are rotated otherwise than the {begin} in the cache; reset it and give "
                "all tokens again, as generate does"
            )

    def _rotaries(self) -> list[RotaryEmbedding]:
        return [rotary for rotary in self.rotary_embeddings if isinstance(rotary, RotaryEmbedding)]

    def _all_pack(self, device: torch.device) -> bool:
        """Whether every layer attends within documents without a mask."""
        blocks = (*self.layers, *(self.shared_blocks or ()))
        attentions = (cast(DecoderLayer, block).self_attention for block in blocks)
        return all(attention.packs(device) for attention in attentions if attention is not None)

    def _output(self, x: Tensor) -> Tensor:
        """Return what the final norm reads of all lanes."""
        if self.lane_projections is not None:
            return self.lane_projections(x)
        if self.final_hyper_connection is None:
            return x.unflatten(-1, (self.lanes, -1)).mean(-2)
        return self.final_hyper_connection.read(x)[0]

    def widened(self, x: Tensor) -> Tensor:
        """Return the lanes that the first layer reads, of embeddings [B, S, H]: [B, S, M H]."""
        if self.lane_projections is not None:
            return self.lane_projections.widened(x)
        return x if self.lanes == 1 else x.repeat(1, 1, self.lanes)

    def _own_tables(self, tables: Rotary) -> Rotary:
        cos, sin = tables
        return own_positions(cos, self.context_shard), own_positions(sin, self.context_shard)

    def layer_inputs(
        self,
        x: Tensor,
        position_ids: Tensor,
        attention_mask: Tensor | None,
        cache: Memory | None = None,
        batch_size: int | None = None,
        document_ids: Tensor | None = None,
    ) -> LayerInputs:
        """Return what all layers read beside the hidden states; arguments as for `forward`."""
        # of all positions, whose number the frequencies may depend on
        tables = [self._own_tables(rotary(position_ids)) for rotary in self.rotary_embeddings]
        shard, length = self.context_shard, position_ids.shape[1]
        position_ids = own_positions(position_ids, shard)
        query_scale = None if self.temperature is None else temperature_of(position_ids, self.temperature)
        rows = None if shard is not None and shard.cp_comm_type == "a2a" else shard  # of queries, where attention is
        hidden_keys = token_mask = documents = texts = None
        if attention_mask is not None and attention_mask.dim() == 3:
            hidden_keys = ~own_positions(attention_mask, rows)[:, None]
            if length == attention_mask.shape[2]:  # a token that does not even see itself is padding
                token_mask = own_positions(attention_mask.diagonal(dim1=1, dim2=2), shard)
            if self.recurrent:
                texts = texts_of_mask(attention_mask)
        elif attention_mask is not None:
            hidden_keys = ~attention_mask[:, None, None, :]
            token_mask = own_positions(attention_mask[:, -length:], shard)
        elif document_ids is not None:
            own = own_positions(document_ids, shard)
            token_mask, documents = own >= 0, document_ids
            texts = document_ids if self.recurrent else None
            if not self._all_pack(x.device):
                runs = document_runs(document_ids)
                hidden_keys = ~sees_own_document(runs, own_positions(runs, rows))[:, None]
        shared: dict[int, KeysValues] = {}
        return LayerInputs(tables, query_scale, hidden_keys, token_mask, cache, batch_size, documents, texts, shared)

    def run_layer(
        self,
        layer: DecoderLayer,
        number: int,
        x: Tensor,
        inputs: LayerInputs,
        *,
        recompute: bool,
        choice: Tensor | None = None,
        embedded: Tensor | None = None,
    ) -> tuple[Tensor, RouterOutput | None] | tuple[Tensor, RouterOutput | None, Selection]:
        """Call a layer as number `number` of this decoder is called; it may be another layer than that. choice: of
        the last sparse attention before it. embedded: the embeddings, where layers share blocks."""
        table, documents = self.rotary_of_layer[number], inputs.documents
        attention, used = layer.self_attention, None
        if layer.shared_use is not None and self.shared_blocks is not None:
            assert embedded is not None and self.shared_of_layer[number] is not None, "of a layer that uses a block"
            block = cast(SharedBlock, self.shared_blocks[cast(int, self.shared_of_layer[number])])
            attention, used = block.self_attention, (block, embedded)
        packs = documents is not None and (attention is None or attention.packs(x.device))
        assert packs or documents is None or inputs.hidden_keys is not None, "a mask is there for layers that need it"
        source, shared = self.kv_sources[number], inputs.shared
        memory = number if source is None else source
        found = layer(
            x,
            None if table is None else inputs.tables[table],
            documents if packs else inputs.hidden_keys,
            inputs.token_mask,
            None if inputs.cache is None else inputs.cache.layers[memory],
            inputs.query_scale if self.tuned_layers[number] else None,
            recompute,
            inputs.batch_size,
            inputs.texts,
            None if source is None or shared is None else shared[source],
            choice if layer.shares_choice else None,
            inputs.tokens,
            *(() if used is None else (used,)),
        )
        if len(found) == 2:
            return found
        y, decided, passed = found
        if isinstance(passed, Selection):
            return y, decided, passed
        assert shared is not None, "the layer has later ones that read its keys and values"
        shared[number] = passed
        return y, decided

    def forward(
        self,
        x: Tensor,
        position_ids: Tensor,
        attention_mask: Tensor | None = None,
        cache: Memory | None = None,
        states: list[Tensor] | None = None,
        batch_size: int | None = None,
        document_ids: Tensor | None = None,
        index_losses: list[Tensor] | None = None,
        embedded: tuple[Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, list[RouterOutput]]:
        """x: [B, S, H]; position_ids: [B or 1, S]; attention_mask: [B, L] bool, False where a key is padding, or
        [B, S, L], False where a key is hidden from a query; document_ids: [B, S], in its place.

        Returns ([B, S, H] after the final norm, what each MoE layer's router decided). states: a list that gets x, the
        result of each layer but the last, and what is returned, all [B, S, H]. batch_size: B, where x and the result
        are this rank's part of the tokens, [B S / ranks, H]. Where ranks share sequences, position_ids and
        attention_mask are of all positions, and x is of this rank's. index_losses: a list that gets the weighted loss
        of each indexer that is trained. embedded: the tokens [B, S] and their embeddings [B, S, H], the source of the
        layers' embeddings.
        """
        inputs = self.layer_inputs(x, position_ids, attention_mask, cache, batch_size, document_ids)
        if self.reads_tokens:
            norm = None if self.per_layer_layernorm is None else self.per_layer_layernorm.weight
            tokens = TokenInputs(own_positions(position_ids, self.context_shard), *(embedded or (None, None)), norm)
            inputs = inputs._replace(tokens=tokens)
        recompute = self.activation_checkpointing and torch.is_grad_enabled() and cache is None
        routed: list[RouterOutput] = []
        choice: Tensor | None = None
        first = None if self.shared_blocks is None else x
        if self.gets_embeddings:
            x, first = x.chunk(2, -1)
        for i, layer in enumerate(cast(list[DecoderLayer], self.layers)):
            if states is not None:
                states.append(x)
            x, decided, *selections = self.run_layer(
                layer, i, x, inputs, recompute=recompute, choice=choice, embedded=first
            )
            for selection in selections:
                choice = selection.choice
                if index_losses is not None and selection.loss is not None:
                    index_losses.append(selection.loss)
            if decided is not None:
                cast(MoELayer, layer.mlp).router.count(decided)
                routed.append(decided)
        if self.final_layernorm is not None:  # only the last pipeline stage has it
            if self.lanes > 1:
                x = self._output(x)
            x = norm_own_tokens(self.final_layernorm, x, self.sequence_shard)
        if self.hands_on_embeddings and first is not None:
            x = torch.cat((x, first), -1)
        if states is not None:
            states.append(x)
        return x, routed


def texts_of_mask(attention_mask: Tensor) -> Tensor:
    """Return document numbers, int64 [B, S], of a mask [B, S, S] that shows each token its own text alone: a text
    begins where a token does not see the one before it; -1 for a token that does not even see itself. Raises ValueError
    for cached keys, RuntimeError where the device finds another mask: a recurrent mixer reads all of a text."""
    length = attention_mask.shape[1]
    if attention_mask.shape[2] != length:
        raise ValueError(
            f"attention_mask has shape {tuple(attention_mask.shape)} for a model with recurrent mixers and a cache; "
            f"allowed: [{attention_mask.shape[0]}, {attention_mask.shape[2]}]"
        )
    sees = attention_mask.diagonal(offset=-1, dim1=1, dim2=2)
    texts = F.pad(~sees, (1, 0), value=True).long().cumsum(dim=-1)
    texts = texts.masked_fill(~attention_mask.diagonal(dim1=1, dim2=2), -1)
    other = (texts[:, :, None] == texts[:, None]) != attention_mask
    wrong = (other & (texts >= 0)[:, :, None]).tril().any()
    asserted(~wrong, "attention_mask hides a part of a text from a recurrent mixer, which reads all of it")
    return texts


def temperature_of(position_ids: Tensor, temperature: TemperatureConfig) -> Tensor:
    """position_ids: [B or 1, S] -> what queries are multiplied by, float32 [B or 1, S, 1, 1]."""
    steps = torch.floor((position_ids + temperature.position_offset).float() / temperature.floor_scale)
    return (torch.log1p(steps) * temperature.attn_scale + 1.0)[..., None, None]
