"""`quant_method` "fp8": E4M3 with a scale per 128x128 block, as DeepSeek-V3 introduced it (arXiv 2412.19437), or one
per matrix, where `weight_block_size` is null (Ministral 3 Instruct).

    X.weight F8_E4M3 [M, K]    X.weight_scale_inv F32 or BF16 [M/128, K/128], rounded up    value = weight * scale
    X.weight F8_E4M3 [M, K]    X.weight_scale_inv F32 or BF16 [] or [1]                     value = weight * scale
    X.weight F8_E4M3 [M, K]    X.weight_scale     F32 or BF16 [] or [1]                     value = weight * scale

The last is AutoFP8's, whose declaration has no `weight_block_size` but `ignored_layers`.
`scale_fmt` "ue8m0" promises scales of blocks that are powers of two; transformers writes them as bytes (F8_E8M0), and
DeepSeek in float32. `activation_scheme` "static" comes with
`X.activation_scale`. `expert_dtype` "fp4": experts are X.weight I8 [M, K/2], two E2M1 values in a byte, with
X.weight_scale_inv F8_E8M0 [M, K/32]. DeepSeek-V4's files have `expert_dtype` beside `quantization_config`, and call
all of these scales X.scale.
"""

import functools
from collections.abc import Container, Mapping
from typing import Any

from torch import Tensor

from te_models.layers.quantizer import (
    Float8BlockQuantizer,
    Float8CurrentScalingQuantizer,
    MXFP8Quantizer,
    Quantizer,
)

from ..families.base.fields import shorten_value
from ..io.boxes import Box
from ..io.errors import CheckpointError
from ..io.store import FilesSeen, FileStore
from .format import FLOAT_SCALES, WHOLE, Entries, MixedFormat, Part, WeightFormat, is_e4m3, one_of

BLOCK = (128, 128)
E4M3 = ("e4m3", "float8_e4m3fn")
"""Names of the numbers in `fmt`: DeepSeek's, and torch's, as in the files of MiniMax-M2."""

_ACTIVATIONS = ("input_scale", "activation_scale")
FLOAT_BLOCKS, POW2_BLOCKS = (Float8BlockQuantizer(force_pow_2_scales=pow2) for pow2 in (False, True))
"""The two forms that 128x128 blocks are stored in, by their scales."""


def blocks_128(
    *,
    name: str,
    scale_suffix: str,
    pow2: bool,
    activations: tuple[str, ...],
    attention: tuple[str, ...] = (),
    entries: Entries = "matrix",
) -> WeightFormat:
    """Return the format of E4M3 in 128x128 blocks with floating-point scales."""
    dtypes = (*FLOAT_SCALES, "F8_E8M0") if pow2 else FLOAT_SCALES
    return WeightFormat(
        name=name,
        element="e4m3",
        parts=(
            Part("data", "", ("F8_E4M3",), "elements", (1, 1)),
            Part("scale_inv", scale_suffix, dtypes, "scale", BLOCK, entries=entries),
        ),
        storages={
            "float8_block": POW2_BLOCKS if pow2 else FLOAT_BLOCKS,
            "mxfp8": MXFP8Quantizer(two_dimensional=True),
        },
        takes=lambda quantizer: _takes_blocks(quantizer, pow2),
        takes_even=lambda q: isinstance(q, MXFP8Quantizer) and q.two_dimensional and is_e4m3(q),
        activations=activations,
        attention=attention,
    )


def per_channel(
    *, name: str, activations: tuple[str, ...], attention: tuple[str, ...], entries: Entries
) -> WeightFormat:
    """Return the format of E4M3 with a scale per row; no form of ours has one."""
    return WeightFormat(
        name=name,
        element="e4m3",
        parts=(
            Part("data", "", ("F8_E4M3",), "elements", (1, 1)),
            Part("scale_inv", "_scale", FLOAT_SCALES, "scale", (1, WHOLE), entries=entries),
        ),
        activations=activations,
        attention=attention,
    )


def per_tensor(
    *, name: str, scale_suffix: str, activations: tuple[str, ...], attention: tuple[str, ...] = (), one: bool = False
) -> WeightFormat:
    """Return the format of E4M3 with one floating-point scale per matrix, written in shape [], or [1] with `one`.

    What a parameter joins may have several scales; then they are exact in blocks that repeat them.
    """
    return WeightFormat(
        name=name,
        element="e4m3",
        parts=(
            Part("data", "", ("F8_E4M3",), "elements", (1, 1)),
            Part("scale_inv", scale_suffix, FLOAT_SCALES, "scale", None, one=one),
        ),
        storages={
            "float8": Float8CurrentScalingQuantizer(),
            "float8_block": FLOAT_BLOCKS,
        },
        takes=lambda q: q.FORMAT == "float8" and is_e4m3(q),
        takes_even=lambda q: _takes_blocks(q, pow2=False),
        activations=activations,
        attention=attention,
    )


def _takes_blocks(quantizer: Quantizer, pow2: bool) -> bool:
    if not isinstance(quantizer, Float8BlockQuantizer) or not is_e4m3(quantizer):
        return False
    return quantizer.block_scaling_dim == 2 and (quantizer.force_pow_2_scales or not pow2)


FP4_EXPERTS = WeightFormat(
    name="fp4-experts",
    element="e2m1",
    parts=(
        Part("data", "", ("I8", "U8"), "elements", (1, 2)),
        Part("scale_inv", "_scale_inv", ("F8_E8M0", "U8"), "scale", (1, 32)),
    ),
    storages={"mxfp8": MXFP8Quantizer(columnwise=False)},
    takes=lambda q: isinstance(q, MXFP8Quantizer) and q.rowwise and not q.two_dimensional and is_e4m3(q),
    columns=2,
)
"""E2M1 with a power of two per 32, as the experts of DeepSeek-V4 have it."""
TENSOR = per_tensor(name="fp8-per-tensor", scale_suffix="_scale_inv", activations=_ACTIVATIONS)
AUTOFP8 = per_tensor(
    name="autofp8",
    scale_suffix="_scale",
    activations=("input_scale", "output_scale"),
    attention=("kv_scale", "k_scale", "v_scale"),
)


def read(config: Mapping[str, Any]) -> WeightFormat | MixedFormat:
    """Return the format that `quantization_config` declares."""
    one_of(config, "fmt", E4M3, "e4m3")
    one_of(config, "activation_scheme", ("dynamic", "static"), "dynamic")
    if "weight_block_size" not in config and "ignored_layers" in config:
        return AUTOFP8
    block = config.get("weight_block_size", list(BLOCK))
    if block is None:
        one_of(config, "scale_fmt", ("float",), "float")
        return TENSOR
    if block != list(BLOCK):
        raise CheckpointError(
            f"config.json declares FP8 with weight_block_size = {shorten_value(block)}; supported: {list(BLOCK)}, null"
        )
    found = block_format(pow2=one_of(config, "scale_fmt", ("float", "ue8m0"), "float") == "ue8m0")
    if one_of(config, "expert_dtype", ("fp8", "fp4"), "fp8") == "fp8":
        return found
    return MixedFormat(((lambda module: ".experts." in module, FP4_EXPERTS), (lambda module: True, found)))


@functools.cache
def block_format(*, pow2: bool) -> WeightFormat:
    """Return the format of 128x128 blocks; pow2: whether its scales are powers of two."""
    return blocks_128(name="fp8", scale_suffix="_scale_inv", pow2=pow2, activations=_ACTIVATIONS)


def has_power_of_two_scales(weight_format: WeightFormat) -> bool:
    """Whether the declaration promises scales that are powers of two."""
    return weight_format.storages["float8_block"] == POW2_BLOCKS


def write(weight_format: WeightFormat, unquantized: list[str]) -> dict[str, Any]:
    """Return `quantization_config` for a model whose linear modules `unquantized` are not quantized."""
    if weight_format == AUTOFP8:
        return {"quant_method": "fp8", "activation_scheme": "dynamic", "ignored_layers": unquantized}
    config: dict[str, Any] = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": None if weight_format.name == TENSOR.name else list(BLOCK),
        "modules_to_not_convert": unquantized,
    }
    return config | ({"scale_fmt": "ue8m0"} if has_power_of_two_scales(weight_format) else {})


SCALE = "scale"
"""What DeepSeek-V4's files call the scales of a module's weight."""


def scale_in_files(name: str) -> str:
    """Return what those files call scales that are seen as `X.weight_scale_inv`; other names are the same there."""
    return f"{name.removesuffix('weight_scale_inv')}{SCALE}" if name.endswith(".weight_scale_inv") else name


def seen_scales(files: FileStore, declared: WeightFormat | MixedFormat, weights: Container[str]) -> dict[str, str]:
    """Return the scales of these weights, in files of this format, that are called as in DeepSeek-V4's: the name by
    which they are seen -> the name in the files."""
    if not any(part.suffix == "_scale_inv" for form in declared.formats for part in form.parts):
        return {}
    modules = (name.removesuffix(f".{SCALE}") for name in files.tensors if name.endswith(f".{SCALE}"))
    seen = {f"{m}.weight_scale_inv": f"{m}.{SCALE}" for m in modules if f"{m}.weight" in weights}
    return {name: stored for name, stored in seen.items() if name not in files.tensors}


class NamedScales(FilesSeen):
    """Files of which some tensors are seen under other names: `names` gives the name in the files of each."""

    def __init__(self, files: FileStore, names: Mapping[str, str]) -> None:
        infos = {name: files.tensors[stored] for name, stored in names.items()}
        super().__init__(files, {name: (names[name], info.dtype, info.shape) for name, info in infos.items()})

    def compute(self, name: str, box: Box) -> Tensor:
        return self._files.read(self._seen[name][0], box)
