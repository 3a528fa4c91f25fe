"""State dicts of models that are made of Transformer Engine's modules: TransformerLayer, LayerNormLinear, LayerNormMLP,
GroupedLinear.

Of a layer the names are the modules'; around layers every script has its own; they are recognised by their shapes and
words. q, k and v are three parameters, or with `fuse_qkv_params` one: group by group, or all queries, all keys, all
values (`qkv_weight_interleaved=False`); the names do not tell. Experts are a GroupedLinear, with a weight for each
(`weight0`, `weight1`, ...) or one for all (`single_grouped_weight`).
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from te_models.config import ModelConfig

from ..families.base.family import HasShape
from ..io.boxes import Shape
from ..io.errors import CheckpointError, shorten
from ..mapping.blocks import joined
from ..mapping.layout_ops import At, Layout, Stack
from ..mapping.param_shapes import expected_tensors
from .megatron import check_covered, grouped_rows
from .system import System, is_optimizer

_LAYER = re.compile(r"(|.*\.)(\d+)\.(self_attention\.(?:layernorm_qkv|qkv)\..+)")
_TABLES = {"embedding": r"emb|wte", "output": r"head|output|lm_"}
_RENAMED = (
    ("self_attention.linear_qkv.layer_norm_", ("self_attention.layernorm_qkv.layer_norm_", "input_layernorm.")),
    ("self_attention.q_layernorm.", ("self_attention.q_norm.",)),
    ("self_attention.k_layernorm.", ("self_attention.k_norm.",)),
    ("self_attention.linear_proj.", ("self_attention.proj.",)),
    ("mlp.linear_fc1.layer_norm_", ("layernorm_mlp.layer_norm_",)),
    ("mlp.linear_fc1.", ("layernorm_mlp.fc1_",)),
    ("mlp.linear_fc2.", ("layernorm_mlp.fc2_",)),
    ("pre_mlp_layernorm.", ("pre_mlp_layernorm.", "post_attention_layernorm.")),
    ("mlp.router.", ("mlp.router.", "mlp.gate.")),
    ("mlp.experts.linear_fc1.", ("mlp.experts.linear_fc1.", "mlp.experts.fc1.", "mlp.experts_gate_up.")),
    ("mlp.experts.linear_fc2.", ("mlp.experts.linear_fc2.", "mlp.experts.fc2.", "mlp.experts_down.")),
    ("mlp.shared_experts.", ("mlp.shared_experts.",)),
)
"""Beginnings of names in a layer of ours, and those that scripts have, the first of which is written."""


def is_transformer_engine(name: str) -> bool:
    """Whether a stored name is of a module of Transformer Engine's attention."""
    return _LAYER.fullmatch(name) is not None


@dataclass(frozen=True)
class _Around:
    """Names outside of layers, and what names of layers begin with."""

    layers: str = "model.layers."
    embedding: str = "model.embed_tokens.weight"
    norm: str = "model.norm"
    output: str = "lm_head.weight"


def _around(config: ModelConfig, found: Mapping[str, HasShape] | None) -> _Around:
    """Return the names that a state dict has. Raises CheckpointError where they do not tell which is what."""
    if found is None:
        return _Around()
    begins = {match[1] for name in found if (match := _LAYER.fullmatch(name)) is not None}
    if len(begins) != 1:
        raise CheckpointError(
            f"the names of the layers begin in {len(begins)} ways ({shorten(sorted(begins), 3)}); allowed: one, as "
            "'model.layers.', before the number and self_attention.layernorm_qkv"
        )
    layers = begins.pop()
    rest = {name: info.shape for name, info in found.items() if not name.startswith(layers)}
    H = config.hidden_size
    norms = {name.rpartition(".")[0] for name, shape in rest.items() if shape == (H,)}
    named: dict[str, str] = {}
    for kind, words in _TABLES.items():
        tables = [name for name, s in rest.items() if len(s) == 2 and s[1] == H and s[0] >= config.vocab_size]
        held = [name for name in tables if re.search(words, name.lower()) and name not in named.values()]
        needed = kind == "embedding" or not config.embedding.share_embeddings_and_output_weights
        if len(held) > 1 or (needed and not held):
            raise CheckpointError(
                f"the {kind} table is not told from the names of what is outside of layers: {shorten(sorted(rest))}"
            )
        named |= dict.fromkeys([kind], held[0]) if held else {}
    if len(norms) != config.norm.has_weight:
        raise CheckpointError(f"the last norm is not told from the names of what is outside of layers: {sorted(rest)}")
    return _Around(layers, named["embedding"], "".join(norms), named.get("output", ""))


def _weights(
    config: ModelConfig, found: Mapping[str, HasShape] | None, *, grouped: bool, interleaved: bool
) -> Iterator[tuple[str, Layout]]:
    check_covered(config)
    if config.attention.mla is not None:
        raise CheckpointError("Transformer Engine's TransformerLayer has no latent attention, and this model has")
    around = _around(config, found)
    for name, shape in expected_tensors(config).items():
        match = re.fullmatch(r"decoder\.layers\.(\d+)\.(.+)", name)
        if match is not None:
            at = f"{around.layers}{match[1]}."
            if match[2] in ("self_attention.linear_qkv.weight", "self_attention.linear_qkv.bias"):
                yield name, _qkv(config, name, f"{at}self_attention.", found, interleaved)
            else:
                yield name, _in_layer(at, match[2], shape, found, grouped)
        elif name.startswith("embedding.word"):
            yield name, At(around.embedding)
        elif name.startswith("decoder.final_layernorm."):
            yield name, At(f"{around.norm}.{name.rpartition('.')[2]}")
        elif name == "output_layer.weight":
            yield name, At(around.output)
        else:
            raise CheckpointError(f"Transformer Engine has no module with {name}, and this model has")


def _in_layer(at: str, rest: str, shape: Shape, found: Mapping[str, HasShape] | None, grouped: bool) -> Layout:
    for ours, theirs in _RENAMED:
        if not rest.startswith(ours):
            continue
        names = [f"{at}{its}{rest.removeprefix(ours)}" for its in theirs]
        numbered = [name for name in names if found is not None and f"{name}0" in found]
        if rest.startswith("mlp.experts.") and (numbered or (found is None and not grouped)):
            return Stack(*(At(f"{(numbered or names)[0]}{expert}") for expert in range(shape[0])))
        return At(next((name for name in names if found is not None and name in found), names[0]))
    raise CheckpointError(f"Transformer Engine's TransformerLayer has no {rest}, and this model has")


def _qkv(config: ModelConfig, ours: str, at: str, found: Mapping[str, HasShape] | None, interleaved: bool) -> Layout:
    kind = ours.rpartition(".")[2]
    modules = [f"{at}layernorm_qkv.", f"{at}qkv."]
    for module in modules if found is not None else ():
        if found is not None and f"{module}query_{kind}" in found:
            names = (f"{module}{part}_{kind}" for part in ("query", "key", "value"))
            return joined(config, ours, *map(At, names))
    module = next((m for m in modules if found is not None and m + kind in found), modules[0])
    return grouped_rows(config.attention, module + kind) if interleaved else At(module + kind)


def transformer_engine(*, grouped: bool = False, interleaved: bool = True) -> System:
    """Return the way in which these modules store a model. grouped: write one weight of all experts. interleaved: q, k
    and v of one parameter go group by group."""

    def weights(config: ModelConfig, found: Mapping[str, HasShape] | None) -> Iterator[tuple[str, Layout]]:
        return _weights(config, found, grouped=grouped, interleaved=interleaved)

    return System(
        "Transformer Engine", weights, lambda name, state: f"optimizer.state.{name}.{state}", (), is_optimizer
    )
