"""Which matrices a parameter joins: the declaration that Muon, learning rates, LoRA targets, tensor parallelism and the
weight maps of files go by.

`linear_qkv` joins q, k and v, a gated `linear_fc1` gate and up. Files of most families have these apart, and say
the order of their names alone (`joined`).
"""

import re
from collections.abc import Iterable

from te_models.config import ModelConfig
from te_models.sizes import plural

from ..io.boxes import Shape
from ..io.errors import CheckpointError
from .layout_ops import Concat, Layout
from .param_shapes import shape_of

_LAYER = re.compile(r"decoder\.layers\.(\d+)\.")
_ATTENTION = re.compile(
    r".*\.self_attention\.(linear_qkv\.(weight|bias)|linear_(q|kv)_up\.weight|linear_proj\.weight|"
    r"(q|k)_layernorm\.weight|core_attention\..*|head_gate\.weight|qkv_bias)"
)
_VOCABULARY = ("embedding.word_embeddings.weight", "output_layer.weight", "output_layer.bias")
_MLP = re.compile(r".*\.mlp\.(shared_experts\.|experts\.)?linear_(fc1\.(weight|bias)|fc2\.weight)(\d*)")
_SHARED_USE = re.compile(r".*\.shared_use\.(?:(fc1)_up|qkv_up\.\d+)\.weight")


def joined_blocks(config: ModelConfig, name: str, shape: Shape) -> dict[str, int]:
    """Return the rows of each matrix that a weight [out, in], or a stack of them, joins, by name: "q", "k", "v" and
    "gate" of attention, "gate" and "up" of an MLP, "q" and "kv" of a projection to latents, "kv" and "gate" of a
    compressor of keys, and the numbers of what a mixer joins; nothing for a weight that is one matrix. shape: of the
    whole parameter."""
    dim = len(shape) - 2
    if dim < 0:
        return {}
    layer = _layer_of(config, name)
    attention = config.attention_of(layer)
    if name.endswith(".linear_qkv_down.weight"):
        assert attention is not None, "the layer has its parameters"
        if attention.mla is not None:
            latent = attention.mla.kv_lora_rank + attention.mla.qk_pos_emb_head_dim
        else:
            latent = attention.key_channels
        return {"q": shape[dim] - latent, "kv": latent}
    if name.endswith("compressor.linear_in.weight"):
        return {"kv": shape[dim] // 2, "gate": shape[dim] // 2}
    if name.endswith(".shared_use.qkv_down.weight"):
        return dict.fromkeys("qkv", shape[dim] // 3)
    split = split_blocks(config, name, shape)
    if split is None or split[0] != dim or sum(split[1]) != shape[dim] or len(split[1]) < 2:
        return {}
    names: Iterable[str] = map(str, range(len(split[1])))
    if name.endswith(".self_attention.linear_qkv.weight") and attention is not None:
        names = attention.qkv_blocks(own_keys=config.kv_source(layer) is None)
    elif _MLP.fullmatch(name) is not None:
        names = ("gate", "up")
    return dict(zip(names, split[1], strict=True))


def joined(config: ModelConfig, name: str, *parts: Layout | tuple[Layout, int], dim: int = 0) -> Layout:
    """Return the layout of a parameter of which files have each matrix that it joins apart, in its order. parts: one
    for each, or (one, n) for n of them, one below the other; of a stack of experts the parts of one expert, or with
    dim=1 of all.

    Raises CheckpointError where there are more or fewer parts.
    """
    weight = f"{name.removesuffix('bias')}weight" if name.endswith(".bias") else name
    shape = shape_of(config, weight)
    rows = tuple(joined_blocks(config, weight, shape).values()) or (shape[-2],)
    counted = [part if isinstance(part, tuple) else (part, 1) for part in parts]
    if sum(count for _, count in counted) != len(rows):
        raise CheckpointError(
            f"{name} joins matrices of {list(rows)} rows; the weight map has {plural(len(parts), 'part')} of it"
        )
    sizes = iter(rows)
    return Concat(*((part, sum(next(sizes) for _ in range(count))) for part, count in counted), dim=dim)


def _layer_of(config: ModelConfig, name: str) -> int:
    """Return the number of a layer that has such parameters. Layers that predict further tokens are of the last one's
    kind; a shared block has the attention of the layers that use it."""
    match = _LAYER.match(name)
    if match is None and config.shared_blocks is not None:
        return config.shared_blocks.layers[0]
    return config.num_layers - 1 if match is None else int(match[1])


def split_blocks(config: ModelConfig, name: str, shape: Shape) -> tuple[int, tuple[int, ...]] | None:
    """Return the dimension that ranks split and the blocks along it, each of which they share; None for what every rank
    has."""
    if name in _VOCABULARY:
        return 0, (shape[0],)
    layer = _layer_of(config, name)
    _, found, within = name.partition(".mixer.")
    if found:
        mixer = config.mixer_of(layer)
        assert mixer is not None, "the layer has its parameters"
        its = next(p for p in mixer.parameters(config.hidden_size) if p.name == within)
        return (its.dim, its.blocks) if its.blocks else None
    match, attention = _ATTENTION.fullmatch(name), config.attention_of(layer)
    if match is not None and attention is not None:
        rows = attention.qkv_rows(own_keys=config.kv_source(layer) is None)
        if "_layernorm" in match[1] and attention.qk_layernorm == "head":
            return None  # one norm for every head
        norm_of_each = attention.qk_layernorm == "each_head" and "_layernorm" in match[1]
        if norm_of_each or "_up" in match[1] or "head_gate" in match[1]:
            return 0, (shape[0],)
        if match[1] == "qkv_bias":
            return 0, rows[:-1]
        if not match[1].startswith("linear_qkv"):
            dim = len(shape) - 1
            return dim, (shape[dim],)
        return 0, rows
    match = _MLP.fullmatch(name)
    if match is None:
        adapter = _SHARED_USE.fullmatch(name)
        return None if adapter is None else (0, _equal(shape[0], 2 if adapter[1] and config.mlp.gated else 1))
    if match[2] == "fc2.weight":
        dim, blocks = len(shape) - 1, 1
    else:
        dim, blocks = len(shape) - (2 if match[3] == "weight" else 1), 2 if config.mlp.gated else 1
    return dim, _equal(shape[dim], blocks)


def _equal(rows: int, blocks: int) -> tuple[int, ...]:
    return (rows // blocks,) * blocks
