"""What layers add to the residual stream beside mixers and MLPs in files, and its fields: Gemma 3n's names."""

from collections.abc import Iterator
from dataclasses import dataclass

from te_models.config import ModelConfig

from ...io.errors import CheckpointError
from ...mapping.layout_ops import At, Columns, Layout, Rows
from .fields import REQUIRED, HFConfig, Values, get_path, read_typed

_OWN_NORMS = {
    "pre_shared": "pre_feedforward_layernorm",
    "post_shared": "post_feedforward_layernorm_1",
    "pre_experts": "pre_feedforward_layernorm_2",
    "post_experts": "post_feedforward_layernorm_2",
}


def layer_additions(config: ModelConfig, i: int, root: str, at: str, ours: str) -> Iterator[tuple[str, Layout]]:
    """Yield the weight map of what layer number `i` has beside mixers, MLP and their norms. root: what the names of the
    model begin with in files; at, ours: the names of the layer, in files and of parameters."""
    embedding = config.per_layer_embedding
    if config.laurel_rank is not None:
        for name in ("linear_left", "linear_right"):
            yield f"{ours}laurel.{name}.weight", At(f"{at}laurel.{name}.weight")
        yield f"{ours}laurel.layernorm.weight", At(f"{at}laurel.post_laurel_norm.weight")
    if config.alternating_updates is not None:
        for name, theirs in (
            ("router", "modality_router.weight"),
            ("prediction", "prediction_coefs.weight"),
            ("correction", "correction_coefs.weight"),
            ("scale", "correct_output_scale"),
            ("layernorm.weight", "router_norm.weight"),
        ):
            yield f"{ours}alternating_updates.{name}", At(f"{at}altup.{theirs}")
    if embedding is not None:
        begin, total = i * embedding.channels, config.num_layers * embedding.channels
        its = f"{ours}per_layer_embedding."
        yield f"{its}weight", Columns(f"{root}.embed_tokens_per_layer.weight", begin, total)
        yield f"{its}linear_in.weight", Rows(f"{root}.per_layer_model_projection.weight", begin, total)
        yield f"{its}linear_gate.weight", At(f"{at}per_layer_input_gate.weight")
        yield f"{its}linear_proj.weight", At(f"{at}per_layer_projection.weight")
        yield f"{its}layernorm.weight", At(f"{at}post_per_layer_input_norm.weight")
    if config.layer_scalar:
        yield f"{ours}layer_scalar.value", At(f"{at}layer_scalar")
    if config.is_moe_layer(i) and config.moe is not None:
        if config.moe.own_norms:
            for name, theirs in _OWN_NORMS.items():
                yield f"{ours}mlp.{name}_layernorm.weight", At(f"{at}{theirs}.weight")
        if config.moe.router.normed_input:
            yield f"{ours}mlp.router.norm_weight", At(f"{at}router.scale")
        if config.moe.router.expert_scale:
            yield f"{ours}mlp.router.expert_scale", At(f"{at}router.per_expert_scale")


def model_additions(config: ModelConfig, root: str) -> Iterator[tuple[str, Layout]]:
    """Yield the weight map of what all layers share of these."""
    if config.alternating_updates is not None:
        for end, theirs in (("in", "altup_projections"), ("out", "altup_unembed_projections")):
            for lane in range(config.alternating_updates.lanes - 1):
                name = f"decoder.lane_projections.linear_{end}.{lane}.weight"
                yield name, At(f"{root}.{theirs}.{lane}.weight")
    if config.per_layer_embedding is not None:
        yield "decoder.per_layer_layernorm.weight", At(f"{root}.per_layer_projection_norm.weight")


@dataclass(frozen=True)
class PerLayerEmbeddingSizes:
    """`hidden_size_per_layer_input` channels of embeddings of each layer, 0 or null for none where `optional`."""

    channels: int = 256
    vocab: int = 262144
    optional: bool = True
    names: tuple[str, ...] = ("hidden_size_per_layer_input", "vocab_size_per_layer_input")

    def read(self, hf: HFConfig) -> Values:
        channels = hf.get("hidden_size_per_layer_input", self.channels)
        if self.optional and channels in (None, 0):
            return {}
        channels = read_typed(hf, "hidden_size_per_layer_input", int, self.channels)
        words = read_typed(hf, "vocab_size_per_layer_input", int, self.vocab)
        return {"per_layer_embedding.channels": channels, "per_layer_embedding.vocab_size": words}

    def write(self, config: ModelConfig) -> Values:
        paths = ("per_layer_embedding.channels", "per_layer_embedding.vocab_size")
        channels, words = (get_path(config, path) for path in paths)
        if channels is None:
            return {"hidden_size_per_layer_input": 0}
        return {"hidden_size_per_layer_input": channels, "vocab_size_per_layer_input": words}


def shared_sources(hf: HFConfig, kinds: list[str], default: int) -> list[int] | None:
    """Return `kv_source_layers` by `num_kv_shared_layers`, the number of last layers that share: each reads the keys of
    the last layer of its kind before them. kinds: of all layers."""
    shared, layers = read_typed(hf, "num_kv_shared_layers", int, default), len(kinds)
    if shared == 0:
        return None
    own = layers - shared
    if not 0 < own < layers:
        raise CheckpointError(f"config.json has num_kv_shared_layers = {shared}; allowed: 0 to {layers - 1}")
    last = {kind: layer for layer, kind in enumerate(kinds[:own])}
    for layer in range(own, layers):
        if kinds[layer] not in last:
            raise CheckpointError(
                f"config.json has num_kv_shared_layers = {shared}, and no layer before these is of the kind of layer "
                f"{layer}, {kinds[layer]}"
            )
    return [layer if layer < own else last[kinds[layer]] for layer in range(layers)]


def first_shared(hf: HFConfig) -> int:
    """Return the number of the first layer that `num_kv_shared_layers` leaves without keys."""
    text = hf.get("text_config") if isinstance(hf.get("text_config"), dict) else hf
    assert text is not None
    return read_typed(text, "num_hidden_layers", int, REQUIRED) - read_typed(text, "num_kv_shared_layers", int, 0)


def shared_layers(config: ModelConfig) -> int:
    """Return how many layers read the keys of another one."""
    return sum(config.kv_source(layer) is not None for layer in range(config.num_layers))
