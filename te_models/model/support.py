"""What ModelConfig can say and the model does not compute: refused when a model is built, in this one place."""

from __future__ import annotations

from ..config import ConfigError, ModelConfig


def unsupported(config: ModelConfig) -> list[tuple[str, object]]:
    """Return the fields (name, value) of `config` that ask for something the model does not implement."""
    a, m, layers = config.attention, config.mlp, range(config.num_layers)
    asked = {
        "attention.output_gate": (a.output_gate, a.output_gate),
        "layer_types": (a.mla is not None and any(map(config.chunk_size, layers)), config.layer_types),
        # Only the clamped activation reads these two; elsewhere they would be ignored silently.
        "mlp.alpha": (m.clamp is None and m.alpha != 1.0, m.alpha),
        "mlp.up_offset": (m.clamp is None and m.up_offset != 0.0, m.up_offset),
        "mlp.clamp": (m.clamp is not None and not m.gated, m.clamp),
    }
    return [(name, value) for name, (is_asked, value) in asked.items() if is_asked]


def check_supported(config: ModelConfig) -> None:
    """Raise ConfigError naming the first field that the model does not implement."""
    for name, value in unsupported(config):
        raise ConfigError(f"{name} is {value!r}, which GPTModel does not implement")
