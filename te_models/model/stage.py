"""Pipeline stages of a model: some of its layers, the embedding before the first and the output layer after the last.

A stage is a GPTModel that shares its modules with the whole one, under the same names: a parameter is called
`decoder.layers.5.…` in whichever stage it is. Megatron-Core: `pre_process` and `post_process`.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, TypeVar

from torch import Tensor, nn

from te_models.layers.distributed.context_parallel import own_positions

from ..config import ConfigError, ModelConfig
from ..layouts import Facts, check_layout_rules

if TYPE_CHECKING:
    from .gpt import GPTModel

M = TypeVar("M", bound=nn.Module)


def with_layers(model: GPTModel, layers: Sequence[int]) -> GPTModel:
    """Return a model of these layers of `model` alone, in ascending order: with the embedding if layer 0 is among them,
    and with final norm, output layer and the layers that predict further tokens if the last one is. Where embedding and
    output layer share their weight, or further tokens are predicted, the last layer brings the embedding, too, but for
    positions that the model learned. Blocks that layers share are in every stage, and stages hand the embeddings on,
    which they read. The modules are `model`'s, not copies.

    Raises ConfigError for no layer, for a layer that the model does not have, for some layers of a model whose router
    loss is of all of them, and for a layer without the one whose choice of keys it shares.
    """
    whole, own = model.config.num_layers, {int(name): layer for name, layer in model.decoder.layers._modules.items()}
    missing = [layer for layer in layers if layer not in own]
    if missing or not layers or list(layers) != sorted(set(layers)):
        raise ConfigError(
            f"a stage is asked for with layers {list(layers)}; allowed: one or more, in ascending order, of "
            f"{sorted(own)}"
        )
    check_layout_rules(Facts(model=model.config, layers=layers))
    first, last = layers[0] == 0, layers[-1] == whole - 1
    needed = {"embedding"} if first or (last and embeds_twice(model.config)) else set()
    needed |= {"output_layer", "mtp"} if last else set()
    stage = _copy_without(model, {"embedding", "output_layer", "mtp"} - needed)
    if not first and stage.embedding is not None:
        # positions are added, and the norm applied, by the first stage, and it alone updates them
        ends = {"position_embeddings", "layernorm"}
        there = {name for name in ends if getattr(stage.embedding, name) is not None}
        stage.embedding = _copy_without(stage.embedding, there) if there else stage.embedding
    object.__setattr__(stage, "whole", model.whole or model)  # no submodule
    stage.pre_process, stage.post_process = first, last
    decoder = _copy_without(model.decoder, set() if last else {"final_layernorm", "final_hyper_connection"})
    some = nn.ModuleList()
    for layer in layers:
        some.add_module(str(layer), own[layer])
    places = [list(own).index(layer) for layer in layers]
    decoder.layers = some
    decoder.rotary_of_layer = [model.decoder.rotary_of_layer[place] for place in places]
    sources = [model.decoder.kv_sources[place] for place in places]
    decoder.kv_sources = [None if source is None else places.index(source) for source in sources]
    decoder.shared_of_layer = [model.decoder.shared_of_layer[place] for place in places]
    if decoder.shared_blocks is not None:
        decoder.gets_embeddings, decoder.hands_on_embeddings = not first, not last
    decoder.tuned_layers = [model.decoder.tuned_layers[place] for place in places]
    stage.decoder = decoder
    return stage


def embeds_twice(config: ModelConfig) -> bool:
    """Whether the first and the last stage have the embedding: its weight is the output layer's, too, or layers behind
    the last one read the tokens that they predict further ones from."""
    return config.embedding.share_embeddings_and_output_weights or config.mtp_num_layers > 0


def embed_in_last_stage(model: GPTModel, input_ids: Tensor | None, position_ids: Tensor) -> Tensor:
    """Return what the first stage embedded, of this rank's tokens. input_ids: of the whole sequences; position_ids: of
    this rank's."""
    if input_ids is None:
        raise ValueError(
            "this stage predicts further tokens, and input_ids is None; allowed: what the first stage reads"
        )
    return model.embedding(own_positions(input_ids, model.context_shard), position_ids)


def shape_of_part(model: GPTModel, batch: int, length: int) -> tuple[int, ...]:
    """Return the shape of what a stage hands to the next, [B, S, H] of `batch` and `length`; where ranks share the
    tokens, of a rank's part: [B, S / ranks, H] of shared sequences, [B S / ranks, H] under sequence parallelism. Where
    layers share blocks it has as many channels again, of the embeddings."""
    own = length if model.context_shard is None else length // model.context_shard.ranks
    tokens = (batch * own // model.tp_size,) if model.sequence_parallel else (batch, own)
    embedded = 0 if model.config.shared_blocks is None else model.config.hidden_size
    return *tokens, model.config.stream_size + embedded


def size_of_parts(model: GPTModel, x: Tensor, position_ids: Tensor | None) -> tuple[int, int]:
    """Return (B, S) of the whole sequences of which a stage got a rank's part `x`, see `shape_of_part`. Raises
    ValueError without their positions, [B or 1, S], and for a part of another shape."""
    if position_ids is None or position_ids.dim() != 2:
        found = None if position_ids is None else tuple(position_ids.shape)
        raise ValueError(
            f"position_ids is {found} in a stage whose ranks share tokens; allowed: positions of the whole sequences, "
            "[batch or 1, sequence]"
        )
    tokens = x.shape[:-1].numel() * (model.tp_size if model.sequence_parallel else 1)
    tokens *= 1 if model.context_shard is None else model.context_shard.ranks
    batch, length = max(tokens // max(position_ids.shape[1], 1), 1), position_ids.shape[1]
    expected = shape_of_part(model, batch, length)
    if x.shape != expected:
        raise ValueError(
            f"inputs_embeds has shape {tuple(x.shape)} with {length} positions; allowed: {list(expected)}, the rank's "
            "part of what the stage before returned"
        )
    return batch, length


def _copy_without(module: M, names: Collection[str]) -> M:
    """Return a module with the same submodules, where these are None. What is changed in it is not in the other."""
    result = copy.copy(module)
    result._modules = {name: None if name in names else child for name, child in module._modules.items()}
    return result
