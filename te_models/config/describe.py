"""A configuration in words: which mixers its layers have."""

from .mixers import AttentionConfig
from .model import ModelConfig


def mixer_words(config: ModelConfig) -> dict[str, int]:
    """Return the kinds of layers in words, with the number of layers of each: what queries see, the mixer and its
    elements, as "sliding attention with sinks", "gated_delta", "an MLP alone"."""
    found: dict[str, int] = {}
    for layer in range(config.num_layers):
        attention, mixer = config.attention_of(layer), config.mixer_of(layer)
        parts = [] if attention is None else [_attention(attention, config.layer_type(layer))]
        parts += [] if mixer is None else [mixer.kind]
        between = " beside " if config.shared_block_of(layer) is None else " in a shared block before "
        words = between.join(parts) or "an MLP alone"
        words += "" if config.has_mlp(layer) else ", without an MLP"
        found[words] = found.get(words, 0) + 1
    return found


def _attention(a: AttentionConfig, seen: str) -> str:
    kind, _, unrotated = seen.partition("_")
    unrotated, kind = unrotated or ("nope" if kind == "nope" else ""), "full" if kind == "nope" else kind
    gate = f"{a.output_gate_activation} gate by {a.output_gate_by}"
    pools = a.indexer is not None and a.indexer.pool_size is not None
    elements = {
        "compressed keys": a.compressed is not None and a.compressed.rate is not None,
        f"an indexer{' of pools' if pools else ''}": a.index_channels > 0,
        "the keys of another layer's indexer": a.indexer is not None and a.indexer.shared,
        "sinks": a.sinks,
        gate: a.output_gate,
        "scaled values": a.value_scale,
        "K = V": a.key_is_value,
    }
    named = [name for name, has in elements.items() if has]
    words = f"{kind} {'attention' if a.mla is None else 'latent attention'}"
    return words + (" without rope" if unrotated else "") + (f" with {' and '.join(named)}" if named else "")
