"""NVIDIA ModelOpt: hf_quant_config.json, or `quant_method` "modelopt" in config.json.

    FP8          X.weight F8_E4M3 [M, K]    X.weight_scale F32 []                    value = weight * scale
      by block, "FP8_PB_WO"                 X.weight_scale F32 [M/128, 1, K/128, 1]
      by row, "FP8_PER_CHANNEL_PER_TOKEN"   X.weight_scale F32 [M]
    MXFP8        X.weight F8_E4M3 [M, K]    X.weight_scale U8 [M, K/32]              value = weight * 2^(scale - 127)
    NVFP4        X.weight U8 [M, K/2]       X.weight_scale F8_E4M3 [M, K/16]         value = e2m1 * scale * scale_2
                 X.weight_scale_2 F32 []

"MIXED_PRECISION" lists modules with the algorithm of each under `quantized_layers`, or as targets of `config_groups`;
others are not quantized. Weights in NVFP4 beside activations in FP8 ("W4A8_NVFP4_FP8") are stored as NVFP4 is.
`X.input_scale` and the scales of the key-value cache belong to activations. The latter are `self_attn.k_proj.k_scale`
and `self_attn.v_proj.v_scale` also where these projections are not quantized, or latent attention has none.
"""

import fnmatch
import itertools
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from te_models.layers.quantizer import NVFP4Quantizer, Quantizer

from ..families.base.fields import shorten_value
from ..io.errors import CheckpointError
from .format import MixedFormat, Part, WeightFormat, one_of, section
from .fp8 import blocks_128, per_channel, per_tensor
from .mx import mxfp8_format

_ACTIVATIONS = ("input_scale", "k_scale", "v_scale", "output_scale")
_ATTENTION = ("k_proj.k_scale", "v_proj.v_scale")


def takes_nvfp4(quantizer: Quantizer) -> bool:
    """Whether a form of ours has NVFP4's rowwise copy, with the factor of the matrix that these files have."""
    if not isinstance(quantizer, NVFP4Quantizer) or quantizer.row_scaled or quantizer.nvfp4_e4m3_max != 448:
        return False
    return quantizer.rowwise or quantizer.symmetric


NVFP4 = WeightFormat(
    name="modelopt-nvfp4",
    element="e2m1",
    parts=(
        Part("data", "", ("U8",), "elements", (1, 2)),
        Part("scale_inv", "_scale", ("F8_E4M3",), "scale", (1, 16)),
        Part("amax", "_scale_2", ("F32",), "factor", None),
    ),
    storages={"nvfp4": NVFP4Quantizer(columnwise=False)},
    takes=takes_nvfp4,
    activations=_ACTIVATIONS,
    attention=_ATTENTION,
    columns=16,
    transposed_stacks=True,
)
_FP8 = per_tensor(name="modelopt-fp8", scale_suffix="_scale", activations=_ACTIVATIONS, attention=_ATTENTION)
FP8 = replace(_FP8, transposed_stacks=True)
_MXFP8 = mxfp8_format("modelopt-mxfp8", "_scale")
MXFP8 = replace(_MXFP8, activations=_ACTIVATIONS, attention=_ATTENTION, transposed_stacks=True)
_BLOCKS = blocks_128(
    name="modelopt-fp8-pb-wo",
    scale_suffix="_scale",
    pow2=False,
    activations=_ACTIVATIONS,
    attention=_ATTENTION,
    entries="apart",
)
BLOCKS = replace(_BLOCKS, transposed_stacks=True)
_ROWS = per_channel(name="modelopt-fp8-per-channel", activations=_ACTIVATIONS, attention=_ATTENTION, entries="column")
CHANNEL = replace(_ROWS, transposed_stacks=True)
_MIXED = "MIXED_PRECISION"
UNCALIBRATED = (
    "readers of modelopt-fp8 need an input_scale of every layer, which these weights have not; fp8-per-tensor and "
    "float-quantized hold the same numbers without"
)
_ALGORITHMS = {
    "FP8": FP8,
    "NVFP4": NVFP4,
    "W4A16_NVFP4": NVFP4,
    "W4A8_NVFP4_FP8": NVFP4,
    "MXFP8": MXFP8,
    "FP8_PB_WO": BLOCKS,
    "FP8_PER_CHANNEL_PER_TOKEN": CHANNEL,
}
_GROUPS = {
    (8, "float", None, None): "FP8",
    (8, "float", None, "channel"): "FP8_PER_CHANNEL_PER_TOKEN",
    (8, "float", 32, None): "MXFP8",
    (4, "float", 16, None): "NVFP4",
}
"""The algorithm of a group, by num_bits, type, group_size and strategy of its weights."""
_WRITTEN: dict[str, dict[str, Any]] = {
    FP8.name: {"quant_algo": "FP8"},
    NVFP4.name: {"quant_algo": "W4A16_NVFP4", "group_size": 16},
    MXFP8.name: {"quant_algo": "MXFP8", "group_size": 32},
    BLOCKS.name: {"quant_algo": "fp8_pb_wo"},
}


def read(config: Mapping[str, Any]) -> WeightFormat | MixedFormat:
    """Return the format, or the formats of each layer, that `quantization_config`, or
    `quantization` of hf_quant_config.json, declares."""
    nested = config.get("quantization")  # some versions wrote the whole of hf_quant_config.json there
    config = nested if isinstance(nested, dict) else config
    if config.get("quant_algo") == _MIXED:
        return _read_mixed(config)
    return _read_one(config, (*_ALGORITHMS, _MIXED))


def _read_mixed(config: Mapping[str, Any]) -> WeightFormat | MixedFormat:
    """Return the formats of modules by their names; of patterns, `*` stands for anything."""
    by_group = not config.get("quantized_layers") and config.get("config_groups")
    layers = _layers_of_groups(config) if by_group else section(config, "quantized_layers")
    found: dict[str, WeightFormat] = {}
    for name, layer in layers.items():
        if not isinstance(layer, dict):
            raise CheckpointError(f"the ModelOpt configuration has quantized_layers of {name!r} that say nothing")
        found[name] = _read_one(layer, tuple(_ALGORITHMS))
    if not found:
        raise CheckpointError("the ModelOpt configuration has quant_algo = MIXED_PRECISION and no quantized_layers")
    if len({*found.values()}) == 1:
        return next(iter(found.values()))
    by_format: dict[WeightFormat, set[str]] = {}
    for name, form in found.items():
        by_format.setdefault(form, set()).add(name)
    return MixedFormat(tuple((_named(names), form) for form, names in by_format.items()))


def declares_no_layers(config: Mapping[str, Any]) -> bool:
    """Whether a declaration of several algorithms leaves the modules to hf_quant_config.json."""
    return config.get("quant_algo") == _MIXED and not (config.get("quantized_layers") or config.get("config_groups"))


def _layers_of_groups(config: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the algorithms of modules that `config_groups` targets by name."""
    found: dict[str, dict[str, Any]] = {}
    for name, group in section(config, "config_groups").items():
        weights = group.get("weights") if isinstance(group, dict) else None
        targets = group.get("targets") if isinstance(group, dict) else None
        if not isinstance(weights, dict) or not isinstance(targets, list):
            raise CheckpointError(
                f"the ModelOpt configuration has config_groups of {name!r} without weights or targets"
            )
        kind = tuple(weights.get(field) for field in ("num_bits", "type", "group_size", "strategy"))
        if kind not in _GROUPS:
            raise CheckpointError(
                f"the ModelOpt configuration has config_groups with weights {shorten_value(weights)}; supported: "
                "num_bits 8 of type float, of tensors, of channels or of groups of 32, and num_bits 4 of groups of 16"
            )
        found |= {target: {"quant_algo": _GROUPS[kind]} for target in targets}
    return found


def _named(names: set[str]) -> Callable[[str], bool]:
    patterns = [name for name in names if "*" in name]

    def matches(module: str) -> bool:
        parents = itertools.accumulate(module.split("."), "{}.{}".format)
        return not names.isdisjoint(parents) or any(fnmatch.fnmatchcase(module, pattern) for pattern in patterns)

    return matches


def _read_one(config: Mapping[str, Any], allowed: tuple[str, ...]) -> WeightFormat:
    algorithm = config.get("quant_algo")
    if not isinstance(algorithm, str) or algorithm.upper() not in _ALGORITHMS:  # ModelOpt writes fp8_pb_wo so
        raise CheckpointError(
            f"the ModelOpt configuration has quant_algo = {shorten_value(algorithm)}; supported: {', '.join(allowed)}"
        )
    found = _ALGORITHMS[algorithm.upper()]
    size = _WRITTEN.get(found.name, {}).get("group_size")
    if size is not None:
        one_of(config, "group_size", (size,), size)
    return found


def write(weight_format: WeightFormat, unquantized: list[str]) -> dict[str, Any]:
    """Return hf_quant_config.json for a model whose linear modules `unquantized` are not quantized, without scales of
    activations; FP8 has no separate name for that."""
    quantization = _WRITTEN[weight_format.name] | {"kv_cache_quant_algo": None, "exclude_modules": unquantized}
    return {"producer": {"name": "te_models", "version": "0.1.0"}, "quantization": quantization}


def write_layers(formats: Mapping[str, WeightFormat], unquantized: list[str]) -> dict[str, Any]:
    """Return hf_quant_config.json for a model of several formats. formats: of each module."""
    layers = {module: _WRITTEN[form.name] for module, form in formats.items()}
    quantization = {"quant_algo": _MIXED, "kv_cache_quant_algo": None, "quantized_layers": layers}
    return {
        "producer": {"name": "te_models", "version": "0.1.0"},
        "quantization": quantization | {"exclude_modules": unquantized},
    }
