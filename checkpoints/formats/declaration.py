"""Which format a folder declares, by name; and the declaration that an export writes."""

import copy
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from te_models.layers.quantizer import Quantizer
from te_models.suggestions import did_you_mean

from ..families.base.fields import shorten_value
from ..io.errors import CheckpointError
from ..io.strict_json import read_object
from ..io.weight_files import plain_file
from . import bitsandbytes, columns, compressed_tensors, fp8, modelopt, mx
from .format import Declaration, MixedFormat, WeightFormat
from .separate import SEPARATE, config_within, said_of_quantization

_READERS: dict[str, Callable[[Mapping[str, Any]], WeightFormat | MixedFormat]] = {
    "fp8": fp8.read,
    "mxfp8": mx.read_mxfp8,
    "mxfp4": mx.read_mxfp4,
    "modelopt": modelopt.read,
    "compressed-tensors": compressed_tensors.read,
    "gptq": columns.read_gptq,
    "awq": columns.read_awq,
    "bitsandbytes": bitsandbytes.read,
}

WRITABLE: dict[str, tuple[WeightFormat, ...]] = {
    "fp8": (fp8.block_format(pow2=True), fp8.block_format(pow2=False)),
    "mxfp8": (mx.read_mxfp8({}),),
    "mxfp4": (mx.read_mxfp4({}),),
    "nvfp4-pack-quantized": (compressed_tensors.NVFP4,),
    "fp8-per-tensor": (fp8.TENSOR,),
    "mxfp4-pack-quantized": (compressed_tensors.MXFP4,),
    "mxfp8-quantized": (compressed_tensors.MXFP8,),
    "float-quantized": (compressed_tensors.TENSOR, compressed_tensors.BLOCKS),
    "pack-quantized": compressed_tensors.INTEGERS,
    "modelopt-fp8": (modelopt.FP8,),
    "modelopt-nvfp4": (modelopt.NVFP4,),
    "modelopt-mxfp8": (modelopt.MXFP8,),
    "modelopt-fp8-pb-wo": (modelopt.BLOCKS,),
}
"""Names that `te-models export --format` takes; the first format that takes the stored form is written. ModelOpt's come
last, since their readers also want scales of activations, and only a calibrated folder has these."""


def declared(values: Mapping[str, Any], folder: Path) -> Declaration | None:
    """Return what config.json (`values`) and hf_quant_config.json of a folder declare; None: nothing is quantized."""
    separate = None
    path = folder / SEPARATE
    if path.exists() or path.is_symlink():
        separate = read_object(plain_file(folder, SEPARATE), f"{folder}/{SEPARATE}")
    return parse(values, separate)


def parse(values: Mapping[str, Any], separate: Mapping[str, Any] | None) -> Declaration | None:
    """Return the declaration that config.json (`values`) and hf_quant_config.json make; see `Declaration`."""
    found: WeightFormat | MixedFormat | None = None
    said = said_of_quantization(values)
    config = config_within(said)
    if config is not None:
        method = config.get("quant_method") if isinstance(config, dict) else None
        if not isinstance(config, dict) or not isinstance(method, str) or method not in _READERS:
            raise CheckpointError(
                f"config.json declares quantization by {shorten_value(method)}; supported: {', '.join(_READERS)}"
            )
        if separate is None or method != "modelopt" or not modelopt.declares_no_layers(config):
            found = _READERS[method]({**said, **config})
    if separate is not None:
        quantization = separate.get("quantization")
        if not isinstance(quantization, dict):
            raise CheckpointError(f"{SEPARATE} has no 'quantization' object")
        other = modelopt.read(quantization)
        if found is not None and found.name != other.name:
            raise CheckpointError(f"config.json declares the format {found.name!r} and {SEPARATE} {other.name!r}")
        found = other
    return None if found is None else Declaration(found, None if config is None else said, separate)


def format_named(name: str, quantizers: set[Quantizer], *, allow_requantize: bool = False) -> WeightFormat:
    """Return the format called `name` that takes all these forms of ours, or of `allow_requantize` the first one."""
    if name not in WRITABLE:
        raise CheckpointError(f"the format is {name!r}; allowed: {', '.join(WRITABLE)}{did_you_mean(name, WRITABLE)}")
    for candidate in WRITABLE[name]:
        if all(candidate.takes(quantizer) for quantizer in quantizers):
            return candidate
    for candidate in WRITABLE[name]:
        if allow_requantize or all(candidate.takes(q) or candidate.takes_even(q) for q in quantizers):
            return candidate
    stored = ", ".join(sorted({quantizer.FORMAT for quantizer in quantizers}))
    raise CheckpointError(
        f"weights stored as {stored} cannot be written as {name}; {representable_in(quantizers)}, or "
        "--allow-requantize quantizes them anew, or --dequantize writes values"
    )


def representing_format(quantizers: set[Quantizer]) -> WeightFormat:
    """Return the first format that takes all these forms of ours."""
    for formats in WRITABLE.values():
        for candidate in formats:
            if all(map(candidate.takes, quantizers)):
                return candidate
    stored = ", ".join(sorted({quantizer.FORMAT for quantizer in quantizers}))
    raise CheckpointError(
        f"no format of Hugging Face files takes weights stored as {stored}; choose a format with --allow-requantize, "
        "or --dequantize"
    )


def representable_in(quantizers: set[Quantizer]) -> str:
    """Return, in words, which formats take all these forms."""
    names = [name for name, formats in WRITABLE.items() if any(all(map(f.takes, quantizers)) for f in formats)]
    return f"choose {' or '.join(names)}" if names else "no format takes all of them"


def transformers_note(weight_format: WeightFormat | MixedFormat, model_type: str, *, experts: bool) -> str | None:
    """Return what transformers does wrong, without an error, with a model of a family in a format; None: nothing."""
    name = weight_format.name
    if name.startswith("modelopt-"):
        return f"transformers reads no {SEPARATE} and takes the numbers of {name} for values; TensorRT-LLM and vLLM do"
    if name == "mxfp4" and model_type != "gpt_oss":
        return "transformers reads mxfp4 of gpt_oss's experts alone and leaves these weights random"
    if name == compressed_tensors.NVFP4.name and experts:
        return f"transformers reads experts in {name} without their weight_global_scale, which gives wrong logits"
    return None


def hf_config_of(
    declared: WeightFormat | MixedFormat, unquantized: list[str], formats: Mapping[str, WeightFormat]
) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
    """Return (`quantization_config` of config.json, hf_quant_config.json) for a model; `unquantized`: its linear
    modules that are not quantized; formats: stored weight -> its format, of a model with several."""
    if isinstance(declared, MixedFormat):
        modules = {weight.removesuffix(".weight"): form for weight, form in formats.items()}
        if all(form.name.startswith("modelopt-") for form in declared.formats):
            return None, modelopt.write_layers(modules, unquantized)
        if any(form.name == fp8.FP4_EXPERTS.name for form in declared.formats):
            (blocks,) = (form for form in declared.formats if form.name != fp8.FP4_EXPERTS.name)
            return fp8.write(blocks, unquantized) | {"expert_dtype": "fp4"}, None
        return compressed_tensors.write_mixed(modules, unquantized), None
    weight_format, name = declared, declared.name
    if name in ("fp8", fp8.TENSOR.name, fp8.AUTOFP8.name):
        return fp8.write(weight_format, unquantized), None
    if name in ("mxfp4", "mxfp8"):
        return mx.write(name, unquantized), None
    if name.startswith("modelopt-"):
        return None, modelopt.write(weight_format, unquantized)
    return compressed_tensors.write(weight_format, unquantized), None


_LISTS = ("ignore", "exclude_modules", "modules_to_not_convert", "ignored_layers")
"""Fields that name modules which are not quantized, by kinds of declarations."""
_OF_METHOD = {"compressed-tensors": "ignore", "modelopt": "ignore"}
"""Such a field, where a declaration has none yet; `modules_to_not_convert` of all others."""


def with_unquantized(
    original: Declaration, unquantized: Sequence[str]
) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
    """Return (the fields of config.json, hf_quant_config.json) of a declaration of which fewer modules are true: these
    have values now. All that it says of the others stays, for their scales of activations are in the files as before.
    """
    said, separate = copy.deepcopy(original.config), copy.deepcopy(original.separate)
    found = None if said is None else dict(said)
    if found is not None:
        config = config_within(found)
        nested = config.get("quantization")
        _amend(nested if isinstance(nested, dict) else config, unquantized)
    beside = None if separate is None else dict(separate)
    if beside is not None:
        _amend(beside["quantization"], unquantized)
    return found, beside


def _amend(declared: dict[str, Any], unquantized: Sequence[str]) -> None:
    if declared.get("quant_method") == "gptq":  # by patterns
        declared["dynamic"] = {**(declared.get("dynamic") or {}), **{f"-:^{re.escape(n)}$": {} for n in unquantized}}
        return
    name = next((name for name in _LISTS if name in declared), None)
    method = declared.get("quant_method")
    name = name or ("exclude_modules" if method is None else _OF_METHOD.get(method, "modules_to_not_convert"))
    known = list(declared.get(name) or ())
    declared[name] = [*known, *(module for module in unquantized if module not in known)]
    layers = declared.get("quantized_layers")
    if isinstance(layers, dict):
        declared["quantized_layers"] = {module: its for module, its in layers.items() if module not in unquantized}
    groups = declared.get("config_groups")
    for group in groups.values() if isinstance(groups, dict) and isinstance(layers, dict) else ():
        if isinstance(group.get("targets"), list):
            group["targets"] = [target for target in group["targets"] if target not in unquantized]
