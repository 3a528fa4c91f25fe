"""What an import keeps of quantized files besides their numbers, so that an export gives back the same files.

It travels in our config.json, under "source":

    "quantization": {"separate": ... the content of hf_quant_config.json, or null ...,
                     "dtypes": {"_scale_inv": "BF16"}, "ones": {"_global_scale": true},
                     "numbers": {"model.layers.0.mlp.down_proj.weight_scale_2": 0.0003},
                     "activations": {"model.layers.0.mlp.down_proj.input_scale": ["F32", [], [0.25]]}}

dtypes and ones: how tensors are written that may be written in several ways (ones: in shape [1] instead of []);
numbers: numbers of whole matrices that no amax gives back; activations: scales of activations, with which no conversion
computes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from ..dtypes import bits_of, dtype_name, torch_dtype
from ..errors import CheckpointError
from .encode import number_amax, written_number
from .source import QuantizedFiles

_MOST_VALUES = 4096


def details_of(quantized: QuantizedFiles) -> dict[str, Any]:
    """Return the details of quantized files, as JSON values."""
    first = quantized.weights[0]
    infos = {part: quantized.files.tensors[first + part.suffix] for part in quantized.format.parts}
    return {
        "separate": None if quantized.declaration.separate is None else dict(quantized.declaration.separate),
        "dtypes": {part.suffix: info.dtype for part, info in infos.items()},
        "ones": {part.suffix: info.shape[-1:] == (1,) for part, info in infos.items() if part.block is None},
        "numbers": dict(_unrestored(quantized)),
        "activations": {name: _to_json(name, quantized.files.view(name)) for name in quantized.activations},
    }


def _unrestored(quantized: QuantizedFiles) -> Iterator[tuple[str, float]]:
    """List the numbers of matrices that are not what an export computes from the amax that stands for them."""
    found = quantized.numbers_of_matrices()
    if found is not None:
        part, numbers, names = found
        written = written_number(part, number_amax(part, numbers), imported={})
        yield from ((names[i], float(numbers[i])) for i in (written != numbers).nonzero().flatten().tolist())


def _to_json(name: str, tensor: torch.Tensor) -> list[Any]:
    if not tensor.is_floating_point() or tensor.numel() > _MOST_VALUES or not torch.isfinite(tensor.float()).all():
        raise CheckpointError(f"{name!r} is not a scale of activations: a few finite numbers")
    return [dtype_name(tensor.dtype), list(tensor.shape), tensor.double().flatten().tolist()]


def activation_scales(details: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Return the scales of activations by name, as they were stored."""
    scales = {}
    for name, (dtype, shape, values) in details["activations"].items():
        scales[name] = torch.tensor(values, dtype=torch.float64).to(torch_dtype(dtype)).view(shape)
    return scales


def check_details(details: Any) -> Mapping[str, Any]:
    """Return details that were read from a file if they are such; raise CheckpointError otherwise."""
    if not isinstance(details, dict) or set(details) != {"separate", "dtypes", "ones", "numbers", "activations"}:
        raise CheckpointError("config.json has a 'source' whose quantization is not what an import writes")
    separate, activations = details["separate"], details["activations"]
    dtypes, ones, numbers = details["dtypes"], details["ones"], details["numbers"]
    good = (separate is None or isinstance(separate, dict)) and all(
        isinstance(x, dict) for x in (dtypes, ones, numbers, activations)
    )
    good = good and all(isinstance(x, str) and bits_of(x) is not None for x in dtypes.values())
    good = good and all(isinstance(x, float) for x in numbers.values())
    good = good and all(isinstance(x, bool) for x in ones.values()) and all(map(_is_scale, activations.values()))
    if not good:
        raise CheckpointError("config.json has a 'source' whose quantization is not what an import writes")
    return details


def _is_scale(value: Any) -> bool:
    if not isinstance(value, list) or len(value) != 3 or not all(isinstance(x, list) for x in value[1:]):
        return False
    dtype, shape, values = value
    numbers = all(isinstance(x, (int, float)) and not isinstance(x, bool) for x in values)
    sizes = all(type(n) is int and 0 <= n <= _MOST_VALUES for n in shape) and len(shape) <= 4
    return dtype in ("F32", "BF16", "F16", "F64") and numbers and sizes and math.prod(shape) == len(values)
