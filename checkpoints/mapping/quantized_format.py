"""How quantized parameters are stored: one entry per field, named by suffix, described in the header metadata.

A parameter `p` in format "mxfp8" is stored as `p` (F8_E4M3, the parameter's shape), `p_scale_inv`, `p_columnwise` and
`p_columnwise_scale_inv`; formats whose transpose has the same numbers have the first two only. A stack of G parameters
has every field stacked along a new dimension 0, so the expert layout changes without dequantizing. Each file says

    {"te_models": '{"version": 1, "tensors": {"<parameter>": {"format": "mxfp8", "logical_dtype": "bfloat16", ...}}}'}

with the quantizer that made the fields, whose declaration decides which fields there are and what their shapes must be.
The entries of one parameter are in one file.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from te_models.lazy import later

from ..io.boxes import Shape
from ..io.dtypes import dtype_name
from ..io.errors import CheckpointError, shown_untrusted
from ..io.strict_json import parse_object
from .tensor_map import TensorSpec

if TYPE_CHECKING:
    import torch

    from te_models import layers
    from te_models.layers import QuantizedTensor, Quantizer
    from te_models.layers.quantizer import schema
else:
    torch, layers, schema = later("torch"), later("te_models.layers"), later("te_models.layers.quantizer.schema")

METADATA_KEY = "te_models"

SUFFIXES = {
    "rowwise_data": "",
    "rowwise_scale_inv": "_scale_inv",
    "rowwise_zero_point": "_zero_point",
    "rowwise_amax": "_amax",
    "columnwise_data": "_columnwise",
    "columnwise_scale_inv": "_columnwise_scale_inv",
    "columnwise_amax": "_columnwise_amax",
}
"""Field of a quantized tensor -> what its entry's name adds to the parameter's name."""

_LOGICAL_DTYPES = ("float32", "bfloat16", "float16")

_ELEMENTS = 2**60
"""Of which eight bytes each are more than 63 bits count."""

Description = Mapping[str, Any]


def quantized_metadata(quantizer: Quantizer, logical_dtype: torch.dtype) -> Description:
    """Return the metadata of a parameter; `quantizer` is exact, the other entries are for readers of other projects.
    ValueError for a quantizer that could not be read back."""
    quantizer.require_storable()
    return {
        "format": quantizer.FORMAT,
        "logical_dtype": str(logical_dtype).removeprefix("torch."),
        "block": None if quantizer.block is None else list(quantizer.block),
        "usage": list(quantizer.stored_usages()),
        "quantizer": quantizer.to_dict(),
    }


def quantizer_from_metadata(name: str, meta: Description) -> tuple[Quantizer, torch.dtype]:
    """Return the quantizer and logical dtype of a description; anything inconsistent raises CheckpointError."""
    values, logical = meta.get("quantizer"), meta.get("logical_dtype")
    if not isinstance(values, dict) or not isinstance(logical, str) or logical not in _LOGICAL_DTYPES:
        raise CheckpointError(f"the metadata of {name} lacks a 'quantizer' or a known 'logical_dtype'")
    try:
        quantizer, dtype = layers.Quantizer.from_dict(values), getattr(torch, logical)
        canonical = quantized_metadata(quantizer, dtype)
    except (ValueError, TypeError) as error:
        raise CheckpointError(f"the metadata of {name} describes no known quantizer: {error}") from None
    if json.dumps(canonical, sort_keys=True) != json.dumps(meta, sort_keys=True):
        raise CheckpointError(f"the metadata of {name} contradicts itself")
    return quantizer, dtype


def field_specs(name: str, shape: Shape, meta: Description) -> dict[str, TensorSpec]:
    """Return suffix -> what the entry must be, for a parameter of this logical shape: [out, in] or [G, out, in]."""
    if len(shape) not in (2, 3):
        raise CheckpointError(
            f"{name} of shape {list(shape)} cannot be quantized; only weights [out, in] and stacks of them"
        )
    if max(*shape, math.prod(shape)) >= _ELEMENTS:
        raise CheckpointError(f"{name} of shape {list(shape)} has more elements than a tensor can")
    return _field_specs(quantizer_from_metadata(name, meta)[0], shape)


@functools.lru_cache
def _field_specs(quantizer: Quantizer, shape: Shape) -> dict[str, TensorSpec]:
    fields = schema.empty_fields(quantizer, torch.Size(shape), "meta", torch.bfloat16)
    return {
        SUFFIXES[field]: TensorSpec(tuple(t.shape), frozenset({dtype_name(t.dtype)}), convertible=False)
        for field, t in fields.items()
    }


def stored_fields(name: str, tensor: QuantizedTensor) -> dict[str, torch.Tensor]:
    """Return entry name -> field of a quantized weight."""
    if isinstance(tensor, layers.GroupedRows):
        raise CheckpointError(
            f"{name} is a {type(tensor).__name__}; only weights [out, in] and stacks of them are stored"
        )
    return {name + SUFFIXES[field]: value for field, value in tensor.fields.items()}


def rebuild(name: str, entries: Mapping[str, torch.Tensor], shape: Shape, meta: Description) -> QuantizedTensor:
    """Return the quantized tensor of logical shape `shape` whose entries are given (inverse of `stored_fields`)."""
    quantizer, dtype = quantizer_from_metadata(name, meta)
    cls = _class_of(quantizer, shape)
    fields = {field: entries[name + SUFFIXES[field]] for field in quantizer.field_names()}
    return cls(fields, quantizer, torch.Size(shape), dtype)


def empty(name: str, shape: Shape, meta: Description, device: torch.device | str | None) -> QuantizedTensor:
    """Return an uninitialised quantized tensor of logical shape `shape` as described."""
    quantizer, dtype = quantizer_from_metadata(name, meta)
    cls = _class_of(quantizer, shape)
    target = torch.empty((), device=device).device
    return cls(schema.empty_fields(quantizer, torch.Size(shape), target, dtype), quantizer, torch.Size(shape), dtype)


def _class_of(quantizer: Quantizer, shape: Shape) -> type[QuantizedTensor]:
    from te_models.layers.tensor.formats import TENSOR_CLASSES

    return layers.GroupedTensor if len(shape) == 3 else TENSOR_CLASSES.get(quantizer.FORMAT, layers.QuantizedTensor)


def read_metadata(metadata: Mapping[str, str], where: str) -> dict[str, Description]:
    """Return parameter -> description from one file's header metadata; {} where nothing is quantized."""
    if METADATA_KEY not in metadata:
        return {}
    where = f"the te_models metadata of {where}"
    values = parse_object(metadata[METADATA_KEY].encode("utf-8", "surrogatepass"), where)
    tensors = values.get("tensors")
    if values.get("version") != 1:
        raise CheckpointError(
            f"{where} has version {shown_untrusted(values.get('version'))}; this release reads version 1"
        )
    if not isinstance(tensors, dict) or not all(isinstance(v, dict) for v in tensors.values()):
        raise CheckpointError(f"{where} does not map parameter names to descriptions")
    return tensors


def write_metadata(tensors: Mapping[str, Description]) -> dict[str, str]:
    """Return the header metadata of a file that holds these quantized parameters."""
    metadata = {"format": "pt"}
    if tensors:
        metadata[METADATA_KEY] = json.dumps({"version": 1, "tensors": tensors}, sort_keys=True, allow_nan=False)
    return metadata


def merge_descriptions(stack: str, members: Iterable[Description | None]) -> Description | None:
    """Return the one description that all members of a stack share (None: not quantized)."""
    members = list(members)
    if any(meta != members[0] for meta in members):
        raise CheckpointError(f"the members of {stack} are quantized differently, so they cannot be one grouped tensor")
    return members[0]
