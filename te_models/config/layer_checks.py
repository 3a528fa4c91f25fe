"""What the layers of a configuration must have for their parts to fit: blocks, norms, what one reads of another."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .mixers import check_compressed
from .part import check
from .residual import check_additions

if TYPE_CHECKING:
    from .model import ModelConfig


def check_layers(config: ModelConfig) -> None:
    """Raise ConfigError for layers whose parts do not fit each other."""
    _check_blocks(config)
    _check_positions(config)
    for layer, source in enumerate(config.kv_source_layers or ()):
        _check_source(config, layer, source)
    _check_indexers(config)
    _check_shared_blocks(config)
    _check_residuals(config)
    learned = config.mlp.activation == "xielu" and (config.moe or config.shared_blocks or config.activation_sparsity)
    check(not learned, "mlp.activation", "xielu", "another one with moe, shared_blocks or activation_sparsity")
    check_additions(config)
    check_compressed(config)


def _check_blocks(config: ModelConfig) -> None:
    blocks, apart = config.layer_blocks, ("pre", "post", "sandwich")
    if blocks is None:
        return
    check(
        len(blocks) == config.num_layers, "the number of layer_blocks", len(blocks), f"num_layers = {config.num_layers}"
    )
    for block in (config.block, *blocks):
        check(block in apart, "layer_blocks", block, ", ".join(map(repr, apart)))


def _check_positions(config: ModelConfig) -> None:
    """Check that layers can have the position encoding that the embedding names."""
    embedding, mtp = config.embedding, config.mtp_num_layers
    plain = embedding.position_embedding_type in ("rope", "none") and not embedding.layernorm
    allowed = "0 with embedding.layernorm, or positions that are learned, computed or ALiBi's"
    check(plain or not mtp, "mtp_num_layers", mtp, allowed)
    if embedding.position_embedding_type != "alibi":
        return
    for layer in range(config.num_layers):
        attention, where = config.attention_of(layer), "embedding.position_embedding_type"
        special = attention is not None and any((attention.mla, attention.indexer, attention.compressed))
        check(not special, where, "alibi", f"another one with mla, indexer or compressed, as in layer {layer}")
        kind = config.layer_type(layer)
        check(attention is None or kind == "full", where, "alibi", f"another one with layer_types {kind!r}")


def _check_source(config: ModelConfig, layer: int, source: int) -> None:
    """Check that a layer can read the keys and values of another one."""
    sources = config.kv_source_layers or ()
    where, fits = f"kv_source_layers[{layer}]", len(sources) == config.num_layers
    check(fits, "the number of kv_source_layers", len(sources), f"num_layers = {config.num_layers}")
    check(config.mtp_num_layers == 0, "mtp_num_layers", config.mtp_num_layers, "0 with kv_source_layers")
    if source == layer:
        return
    own = 0 <= source < layer and sources[source] == source
    check(own, where, source, f"{layer}, or an earlier layer with its own keys")
    its, own = config.attention_of(source), config.attention_of(layer)
    alike = its is not None and own is not None and its.key_value_sizes == own.key_value_sizes
    alike = alike and its is not None and own is not None and its.mla is None and own.mla is None
    alike = alike and its is not None and own is not None and its.indexer is None and own.indexer is None
    for seen in (config.window_size, config.chunk_size):
        alike = alike and seen(source) == seen(layer)
    check(alike, where, source, "a layer whose attention has the same key heads, channels and window")


def _check_indexers(config: ModelConfig) -> None:
    """Check that a layer that shares a choice has one to share, and that indexers have channels to rotate."""
    chooses = False
    for layer in range(config.num_layers):
        attention = config.attention_of(layer)
        indexer = None if attention is None else attention.indexer
        if attention is None or indexer is None:
            continue
        where = f"{'.'.join(config.place_of(layer))}.indexer"
        chooses = chooses or not indexer.shared
        check(chooses, f"{where}.shared", True, f"false in layer {layer}, before which no layer has an indexer")
        last = config.mtp_num_layers > 0 and layer == config.num_layers - 1
        check(not (last and indexer.shared), f"{where}.shared", True, "false in the last layer with mtp_num_layers")
        rope = config.rope_of(layer)
        rotated = 0 if rope is None else int(attention.rotated_channels * rope.rotary_percent)
        if not indexer.shared and indexer.rotated != "none":
            allowed = f"at least the {rotated} channels that are rotated"
            check(indexer.head_dim >= rotated, f"{where}.head_dim", indexer.head_dim, allowed)


def _check_shared_blocks(config: ModelConfig) -> None:
    """Check that layers can use the blocks that they are said to share."""
    shared = config.shared_blocks
    if shared is None:
        return
    alone = (
        (config.block, config.layer_blocks) == ("pre", None)
        and config.hyper_connections is None
        and config.deep_norm is None
    )
    alone = alone and config.kv_source_layers is None and not config.mtp_num_layers and not config.hidden_dropout
    allowed = "null with block, hyper_connections, deep_norm, kv_source_layers, mtp_num_layers or hidden_dropout"
    check(alone, "shared_blocks", shared, allowed)
    check(config.are_ordered(shared.layers), "shared_blocks.layers", shared.layers, config.ordered_layers)
    for layer in shared.layers:
        its = config.attention_of(layer)
        plain = its is not None and (its.mla or its.indexer) is None and not its.has_head_gate
        pair = plain and config.mixer_of(layer) is not None and its == config.attention_of(shared.layers[0])
        allowed = f"layers of a plain attention, the same in all, beside another mixer, which {layer} is not"
        check(pair, "shared_blocks.layers", shared.layers, allowed)


def _check_residuals(config: ModelConfig) -> None:
    one = config.blocks <= {"pre", "sandwich"} and config.residual_multiplier == 1.0 and not config.mtp_num_layers
    allowed = "null with block 'post' or 'parallel*', residual_multiplier or mtp_num_layers"
    check(one or config.hyper_connections is None, "hyper_connections", config.hyper_connections, allowed)
    one = config.blocks == {"pre"} and config.residual_multiplier == 1.0 and config.hyper_connections is None
    one = one and not config.has_dense_layers and not (config.moe is not None and config.moe.post_layernorm)
    allowed = "null with a block other than 'pre', residual_multiplier, hyper_connections, or layers with an MLP"
    check(one or config.deep_norm is None, "deep_norm", config.deep_norm, allowed)
