"""compressed-tensors, the files of vLLM's tools: `quant_method` "compressed-tensors" and its `format`.

nvfp4-pack-quantized    X.weight_packed U8 [M, K/2]    X.weight_scale F8_E4M3 [M, K/16]
                        X.weight_global_scale F32 [1]            value = e2m1 * scale / global_scale
mxfp4-pack-quantized    X.weight_packed U8 [M, K/2]    X.weight_scale U8 [M, K/32]
mxfp8-quantized         X.weight F8_E4M3 [M, K]        X.weight_scale U8 [M, K/32]
float-quantized         X.weight F8_E4M3 [M, K]        X.weight_scale BF16 or F32, by `strategy`: "tensor" [1],
                                                       "channel" [M, 1], "block" [M/128, K/128]
pack-quantized          X.weight_packed I32 [M, K/8]   integers of four or eight bits: see `integers.py`

Groups of modules may have formats of their own (`format` "mixed-precision"). A module is of the group with its name
among the `targets`, else of one with a pattern (re:) that matches it, else of the group of all "Linear" modules.

The scales of the key-value cache are `self_attn.k_scale` and `self_attn.v_scale`, beside the projections. Rotations in
`transform_config` are in the stored weights where they are of weights, and undone by another weight; where they are of
activations, the model computes them, and ours do not: such folders are refused.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from te_models.layers.quantizer import IntQuantizer, NVFP4Quantizer

from ..families.base.fields import shorten_value
from ..families.base.text_part import OTHER_PARTS, TEXT
from ..io.errors import CheckpointError
from .format import MixedFormat, Part, WeightFormat, one_of, section
from .fp8 import BLOCK, blocks_128, per_channel, per_tensor
from .integers import packed_format
from .modelopt import takes_nvfp4
from .mx import mxfp4_format, mxfp8_format

_ACTIVATIONS = ("input_scale", "input_global_scale", "k_scale", "v_scale", "output_scale")
_ATTENTION = ("q_scale", "k_scale", "v_scale")

NVFP4 = WeightFormat(
    name="nvfp4-pack-quantized",
    element="e2m1",
    parts=(
        Part("data", "_packed", ("U8",), "elements", (1, 2)),
        Part("scale_inv", "_scale", ("F8_E4M3",), "scale", (1, 16)),
        Part("amax", "_global_scale", ("F32",), "divisor", None, one=True),
    ),
    storages={"nvfp4": NVFP4Quantizer(columnwise=False)},
    takes=takes_nvfp4,
    activations=_ACTIVATIONS,
    attention=_ATTENTION,
    columns=16,
)
_MXFP4 = mxfp4_format("mxfp4-pack-quantized", "_packed", "_scale", grouped=False)
MXFP4 = replace(_MXFP4, activations=_ACTIVATIONS, attention=_ATTENTION)
MXFP8 = replace(mxfp8_format("mxfp8-quantized", "_scale"), activations=_ACTIVATIONS, attention=_ATTENTION)
TENSOR = per_tensor(
    name="float-quantized", scale_suffix="_scale", activations=_ACTIVATIONS, attention=_ATTENTION, one=True
)
BLOCKS = blocks_128(
    name="float-quantized", scale_suffix="_scale", pow2=False, activations=_ACTIVATIONS, attention=_ATTENTION
)
CHANNEL = per_channel(name="float-quantized", activations=_ACTIVATIONS, attention=_ATTENTION, entries="matrix")
PACKED = "pack-quantized"
_MIXED = "mixed-precision"
_CLASSES = ("Linear", "LinearBase")
_GROUPS = (32, 64, 128, 16, 8, 256, 512, 1024)
_OF_WEIGHTS = ("weight_input", "weight_output")
_FORMATS = {f.name: f for f in (NVFP4, MXFP4, MXFP8)}
_STRATEGIES = {"tensor": TENSOR, "channel": CHANNEL, "block": BLOCKS}
_BY_SIXTEEN = {"group_size": 16, "strategy": "tensor_group", "scale_dtype": "torch.float8_e4m3fn"}
_BY_THIRTY_TWO = {"group_size": 32, "strategy": "group", "scale_dtype": "torch.uint8"}
_ACTIVATIONS_OF: dict[str, dict[str, Any]] = {
    "tensor": {"strategy": "tensor"},
    "channel": {"strategy": "token"},
    "block": {"strategy": "group", "group_size": BLOCK[1]},
}
_WEIGHTS: dict[str, dict[str, Any]] = {
    "nvfp4-pack-quantized": {"num_bits": 4} | _BY_SIXTEEN,
    "mxfp4-pack-quantized": {"num_bits": 4} | _BY_THIRTY_TWO,
    "mxfp8-quantized": {"num_bits": 8} | _BY_THIRTY_TWO,
}


def read(config: Mapping[str, Any]) -> WeightFormat | MixedFormat:
    """Return the format that `quantization_config` declares, or the formats of its groups where they have several."""
    name = one_of(config, "format", (*_FORMATS, "float-quantized", PACKED, _MIXED), None)
    _check_sparsity(config.get("sparsity_config"))
    _check_transforms(config.get("transform_config"))
    groups = config.get("config_groups")
    if name in _FORMATS and not (isinstance(groups, dict) and len(groups) > 1):
        return _FORMATS[name]
    targets: dict[str, WeightFormat] = {}
    for group in section(config, "config_groups").values():
        if isinstance(group, dict) and "weights" in group and group["weights"] is None:
            continue  # it quantizes activations alone
        weights = section(group if isinstance(group, dict) else {}, "weights")
        default = None if name == _MIXED else name
        form = _of_group(one_of(group, "format", (*_FORMATS, "float-quantized", PACKED), default), weights)
        targets |= dict.fromkeys(_strings(group, "targets"), form)
    if not targets:
        raise CheckpointError("the quantization configuration has no group that quantizes weights")
    if len({*targets.values()}) == 1:
        return next(iter(targets.values()))
    ignored = _strings(config, "ignore")
    return MixedFormat(tuple(_rules(targets, ignored)))


def _of_group(name: str | None, weights: Mapping[str, Any]) -> WeightFormat:
    """Return the format of a group of modules."""
    if name in _FORMATS:
        return _FORMATS[name]
    if name == PACKED:
        return _packed(weights)
    one_of(weights, "num_bits", (8,), None)
    one_of(weights, "type", ("float",), None)
    strategy = one_of(weights, "strategy", tuple(_STRATEGIES), None)
    if strategy == "block" and weights.get("block_structure") != list(BLOCK):
        raise CheckpointError(
            f"the quantization configuration has block_structure = {weights.get('block_structure')}; supported: "
            f"{list(BLOCK)}"
        )
    return _STRATEGIES[strategy]


def _packed(weights: Mapping[str, Any]) -> WeightFormat:
    bits = one_of(weights, "num_bits", (4, 8), None)
    one_of(weights, "type", ("int",), "int")
    strategy = one_of(weights, "strategy", ("group", "channel"), None)
    symmetric = one_of(weights, "symmetric", (True, False), True)
    size = one_of(weights, "group_size", _GROUPS, None) if strategy == "group" else 0
    return packed_format(PACKED, bits, size, zero_points=not symmetric, attention=_ATTENTION)


def _strings(config: Mapping[str, Any], name: str) -> list[str]:
    found = config.get(name) or []
    if not isinstance(found, list) or not all(isinstance(entry, str) for entry in found):
        raise CheckpointError(f"the quantization configuration has {name} = {shorten_value(found)}; allowed: names")
    return found


def _rules(
    targets: Mapping[str, WeightFormat], ignored: list[str]
) -> Iterator[tuple[Callable[[str], bool], WeightFormat]]:
    """Yield the rules of targets, names before patterns before classes of modules, as compressed-tensors takes them."""

    def matcher(target: str) -> Callable[[str], bool]:
        known = _matcher(target)
        return lambda module: known(module) and not any(ignores(module) for ignores in ignores_all)

    ignores_all = [_matcher(target) for target in ignored if target not in _CLASSES]
    order = sorted(targets, key=lambda target: (target in _CLASSES, target.startswith("re:"), target))
    for target in order:
        yield matcher(target), targets[target]


def _matcher(target: str) -> Callable[[str], bool]:
    """Return what says whether a module has a name, matches a pattern, or is of a class: all weights are linear."""
    if target in _CLASSES:
        return lambda module: True
    if target.startswith("re:"):
        try:
            pattern = re.compile(target.removeprefix("re:"))
        except re.error as error:
            raise CheckpointError(f"the quantization configuration has the target {target!r}: {error}") from None
        return lambda module: pattern.match(module) is not None
    return lambda module: module == target


def _check_sparsity(sparsity: object) -> None:
    form = sparsity.get("format") if isinstance(sparsity, dict) else sparsity
    if form not in (None, "dense"):
        raise CheckpointError(
            f"the quantization configuration has a sparsity_config with the format {shorten_value(form)}; "
            "supported: dense"
        )


def _check_transforms(transforms: object) -> None:
    """Refuse transforms of activations: the stored weights are made for them, so the model would have to compute
    them."""
    schemes = transforms.get("config_groups") if isinstance(transforms, dict) else transforms
    for scheme in schemes.values() if isinstance(schemes, dict) else [schemes]:
        places = scheme.get("apply") if isinstance(scheme, dict) else scheme
        for place in places if isinstance(places, list) else [places]:
            location = place.get("location") if isinstance(place, dict) else place
            if location is not None and location not in _OF_WEIGHTS:
                raise CheckpointError(
                    "the quantization configuration has a transform_config with the location "
                    f"{shorten_value(location)}, which models here do not compute; supported: {', '.join(_OF_WEIGHTS)}"
                )


INTEGERS = tuple(
    packed_format(PACKED, bits, group, zero_points=zero_points, attention=_ATTENTION)
    for bits in (4, 8)
    for group in (*_GROUPS, 0)
    for zero_points in (False, True)
)
"""Formats of packed integers that are written."""


def write(weight_format: WeightFormat, unquantized: list[str]) -> dict[str, Any]:
    """Return `quantization_config` for a model whose linear modules `unquantized` are not quantized.

    E4M3 with float scales asks for activations in E4M3 as they come, without a scale in the files, as fp8's
    "dynamic" does and as readers want for experts; with other weights, activations stay in high precision.
    """
    return {
        "quant_method": "compressed-tensors",
        "format": weight_format.name,
        "quantization_status": "compressed",
        "config_groups": {"group_0": _group(weight_format, ["Linear"])},
        "ignore": list(dict.fromkeys(_ignored(unquantized))),
    }


def write_mixed(formats: Mapping[str, WeightFormat], unquantized: list[str]) -> dict[str, Any]:
    """Return `quantization_config` for a model of several formats. formats: of each module."""
    modules: dict[WeightFormat, list[str]] = {}
    for module, form in formats.items():
        modules.setdefault(form, []).append(module)
    groups = {f"group_{i}": _group(form, list(_ignored(names))) for i, (form, names) in enumerate(modules.items())}
    return {
        "quant_method": "compressed-tensors",
        "format": _MIXED,
        "quantization_status": "compressed",
        "config_groups": groups,
        "ignore": list(dict.fromkeys(_ignored(unquantized))),
    }


def _group(weight_format: WeightFormat, targets: list[str]) -> dict[str, Any]:
    weights: dict[str, Any] = {"type": "float", "symmetric": True, "dynamic": False}
    activations: dict[str, Any] | None = None
    if weight_format.name == "float-quantized":
        strategy = next(s for s, f in _STRATEGIES.items() if f == weight_format)
        activations = weights | {"num_bits": 8, "dynamic": True} | _ACTIVATIONS_OF[strategy]
        weights |= {"num_bits": 8, "strategy": strategy}
        if strategy == "block":
            weights["block_structure"] = list(BLOCK)
    elif weight_format.integers:
        form = next(iter(weight_format.storages.values()))
        assert isinstance(form, IntQuantizer), "integers are stored as such"
        strategy = {"strategy": "group", "group_size": form.group_size} if form.group_size else {"strategy": "channel"}
        weights |= {"type": "int", "num_bits": form.BITS, "symmetric": not form.zero_points} | strategy
    else:
        weights |= _WEIGHTS[weight_format.name]
    return {
        "targets": targets,
        "format": weight_format.name,  # where a group has none, some versions infer another one from its numbers
        "weights": weights,
        "input_activations": activations,
        "output_activations": None,
    }


def _ignored(unquantized: Iterable[str]) -> Iterator[str]:
    """Yield the names of modules; of models that also see images, patterns of them. transformers holds those under
    other names than files, and this reader compares with the names of modules, where fp8's translates."""
    for name in unquantized:
        part = next((p.removesuffix("*") for p in OTHER_PARTS if name.removeprefix("model.").startswith(p[:-1])), None)
        if part is not None:
            yield f"re:.*{re.escape(part)}.*"
        elif name.startswith(TEXT):
            yield f"re:.*{re.escape(name.removeprefix(TEXT).removeprefix('model.'))}$"
        else:
            yield name
