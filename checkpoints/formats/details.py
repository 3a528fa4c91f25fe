"""What an import keeps of quantized files besides their numbers, so that an export gives back the same files.

It travels in our config.json, under "source":

    "quantization": {"separate": ... the content of hf_quant_config.json, or null ...,
                     "others": true, "unkept": ["decoder.layers.0.self_attention.linear_proj.weight"],
                     "stale": ["decoder.layers.1.mlp.linear_fc1.weight"],
                     "dtypes": {"_scale_inv": "BF16"}, "ones": {"_global_scale": true},
                     "scales": "scale",
                     "numbers": {"model.layers.0.mlp.down_proj.weight_scale_2": 0.0003},
                     "activations": [{"dtype": "F32", "shape": [],
                                      "scales": {"model.layers.0.mlp.down_proj.input_scale": 0.25}}]}

others: other weights are quantized here than in those files, so that their declaration is not true of an export (false
where it is absent); unkept: parameters whose scales are not the powers of two which that promises; stale: parameters
that training changed after scales of activations were measured with them ("*": every one); dtypes and ones: how tensors
are written that may be written in several ways (ones: in shape [1] instead of []), by suffix; for further formats of a
folder the number of the format precedes it; scales: what scales of blocks are called beside a module's weight, where
that is not `weight_scale_inv` (absent: it is); numbers: numbers of whole matrices that no amax gives back; activations:
scales of activations, with which no conversion computes, listed by dtype and shape: a number each, or a list where
there are several. A mixture has one for each matrix of each expert, so they must be few JSON values. Folders written
before hold {name: [dtype, shape, [numbers]]} there.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from te_models.lazy import torch

from ..io.dtypes import bit_width, dtype_name, torch_dtype
from ..io.errors import CheckpointError

if TYPE_CHECKING:
    from .files import QuantizedFiles

_MOST_VALUES = 4096
ALL = "*"
"""In place of the name of a stale parameter: every one."""
_ALWAYS = {"separate", "dtypes", "ones", "numbers", "activations"}


def details_of(quantized: QuantizedFiles, *, others: bool = False) -> dict[str, Any]:
    """Return the details of quantized files, as JSON values; others: whether other weights are quantized than there."""
    from .fp8 import FLOAT_BLOCKS, POW2_BLOCKS, SCALE

    tensors, dtypes, ones = quantized.files.tensors, dict[str, str](), dict[str, bool]()
    for number, form in enumerate(quantized.format.formats):
        first = next((weight for weight, own in quantized.formats.items() if own == form), None)
        if first is None:
            continue
        for suffix in [x.suffix for x in (*form.parts, *form.beside)]:
            if first + suffix in tensors:
                dtypes[detail_key(number, suffix)] = tensors[first + suffix].dtype
        for part in form.parts:
            if part.block is None:
                ones[detail_key(number, part.suffix)] = tensors[first + part.suffix].shape[-1:] == (1,)
    details = {
        "separate": None if quantized.declaration.separate is None else dict(quantized.declaration.separate),
        "dtypes": dtypes,
        "ones": ones,
        "numbers": dict(_unrestored(quantized)),
        "activations": group_scales({name: quantized.files.view(name) for name in quantized.activations}),
    }
    promised = any(POW2_BLOCKS in form.storages.values() for form in quantized.format.formats)
    formats = quantized.found.formats if promised else {}
    loose = FLOAT_BLOCKS.to_dict()
    unkept = [name for name, meta in formats.items() if meta["quantizer"] == loose]
    details |= ({"others": True} if others else {}) | ({"unkept": unkept} if unkept else {})
    return details | ({"scales": SCALE} if quantized.scales else {})


def detail_key(number: int, suffix: str) -> str:
    """Return under which key details of a part are: of the first format its suffix, of further ones a number first."""
    return f"{number}{suffix}" if number else suffix


def _unrestored(quantized: QuantizedFiles) -> Iterator[tuple[str, float]]:
    """List the numbers of matrices that are not what an export computes from the amax that stands for them."""
    from .encode import number_amax, written_number

    for part, numbers, names in quantized.numbers_of_matrices():
        written = written_number(part, number_amax(part, numbers), imported={})
        yield from ((names[i], float(numbers[i])) for i in (written != numbers).nonzero().flatten().tolist())


def group_scales(tensors: Mapping[str, torch.Tensor]) -> list[dict[str, Any]]:
    """Return the scales of activations as JSON values, scales of one dtype and shape together."""
    groups: dict[tuple[str, tuple[int, ...]], dict[str, Any]] = {}
    for name, tensor in tensors.items():
        if not tensor.is_floating_point() or tensor.numel() > _MOST_VALUES or not torch.isfinite(tensor.float()).all():
            raise CheckpointError(f"{name!r} is not a scale of activations: a few finite numbers")
        values = tensor.double().flatten().tolist()
        kind = (dtype_name(tensor.dtype), tuple(tensor.shape))
        groups.setdefault(kind, {})[name] = values[0] if len(values) == 1 else values
    return [{"dtype": dtype, "shape": list(shape), "scales": found} for (dtype, shape), found in groups.items()]


def activation_scales(details: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Return the scales of activations by name, as they were stored."""
    scales = {}
    for name, dtype, shape, values in _listed(details["activations"]):
        scales[name] = torch.tensor(values, dtype=torch.float64, device="cpu").to(torch_dtype(dtype)).view(shape)
    return scales


def _listed(activations: Any) -> Iterator[tuple[str, Any, Any, list[Any]]]:
    """Yield name, dtype, shape and numbers of each scale, of both ways to write them; KeyError, TypeError or ValueError
    for something else."""
    if isinstance(activations, dict):
        for name, (dtype, shape, values) in activations.items():
            if not isinstance(values, list):
                raise TypeError("not a list of numbers")
            yield name, dtype, shape, values
        return
    for group in activations:
        for name, value in group["scales"].items():
            yield name, group["dtype"], group["shape"], value if isinstance(value, list) else [value]


def check_details(details: Any) -> Mapping[str, Any]:
    """Return details that were read from a file if they are such; raise CheckpointError otherwise."""
    if not isinstance(details, dict) or set(details) - {"others", "unkept", "stale", "scales"} != _ALWAYS:
        raise CheckpointError("config.json has a 'source' whose quantization is not what an import writes")
    separate, dtypes, ones, numbers = (details[name] for name in ("separate", "dtypes", "ones", "numbers"))
    good = (separate is None or isinstance(separate, dict)) and all(
        isinstance(x, dict) for x in (dtypes, ones, numbers)
    )
    good = good and all(isinstance(x, str) and bit_width(x) is not None for x in dtypes.values())
    good = good and all(isinstance(x, float) for x in numbers.values())
    good = good and all(isinstance(x, bool) for x in (*ones.values(), details.get("others", False)))
    for names in (details.get("unkept", []), details.get("stale", [])):
        good = good and isinstance(names, list) and all(isinstance(x, str) for x in names)
    good = good and details.get("scales", "scale") == "scale" and _are_scales(details["activations"])
    if not good:
        raise CheckpointError("config.json has a 'source' whose quantization is not what an import writes")
    return details


def _are_scales(activations: Any) -> bool:
    if not isinstance(activations, list | dict):
        return False
    try:
        return all(_is_scale(dtype, shape, values) for _, dtype, shape, values in _listed(activations))
    except (KeyError, TypeError, ValueError, AttributeError):
        return False


def _is_scale(dtype: Any, shape: Any, values: list[Any]) -> bool:
    numbers = all(isinstance(x, (int, float)) and not isinstance(x, bool) for x in values)
    sizes = (
        isinstance(shape, list) and all(type(n) is int and 0 <= n <= _MOST_VALUES for n in shape) and len(shape) <= 4
    )
    return dtype in ("F32", "BF16", "F16", "F64") and numbers and sizes and math.prod(shape) == len(values)
