"""State dicts with quantized weights as plain tensors and one JSON string, for safetensors and whatever else knows no
tensor subclasses. Our model folders have these names and this metadata, with the logical shapes beside them."""

import json
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from te_models.layers import GroupedTensor, QuantizedTensor
from te_models.layers.tensor.formats import TENSOR_CLASSES

from ..io.boxes import Shape
from ..io.errors import CheckpointError
from ..io.strict_json import parse_object
from ..mapping.quantized_format import (
    METADATA_KEY,
    SUFFIXES,
    Description,
    quantized_metadata,
    quantizer_from_metadata,
    read_metadata,
    stored_fields,
    write_metadata,
)

_SHAPES = "shapes"
_TOO_MANY = 1 << 56
_PLAIN = (Tensor, nn.Parameter)


def plain_state_dict(state_dict: Mapping[str, Any]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return (tensors, metadata). `from_plain_state_dict` turns them into the same state dict, bit for bit.

    A quantized weight `w` becomes an entry per field (`w`, `w_scale_inv`, ...), contiguous; other tensors stay as they
    are. metadata: strings, for the header of a safetensors file. Raises CheckpointError for an entry that is neither (a
    shard of FSDP2, say), for a name that a field needs and another entry has, and for a logical dtype without a name.

    Example:
        tensors, metadata = plain_state_dict(layer.state_dict())
        safetensors.torch.save_file(tensors, "layer.safetensors", metadata=metadata)
    """
    tensors: dict[str, Tensor] = {}
    described: dict[str, Description] = {}
    shapes: dict[str, list[int]] = {}
    for name, value in state_dict.items():
        if isinstance(value, QuantizedTensor):
            value.require_matrix("be stored")
            entries = {entry: field.detach().contiguous() for entry, field in stored_fields(name, value).items()}
            described[name], shapes[name] = quantized_metadata(value.quantizer, value.dtype), list(value.shape)
            quantizer_from_metadata(name, described[name])
        elif type(value) in _PLAIN:
            entries = {name: value.detach()}
        else:
            raise CheckpointError(f"{name} is a {type(value).__name__}; allowed: plain tensors and quantized ones")
        for entry, tensor in entries.items():
            if entry in tensors:
                raise CheckpointError(f"{entry} is both an entry of its own and a field of a quantized weight")
            tensors[entry] = tensor
    return tensors, _with_shapes(write_metadata(described), shapes)


def from_plain_state_dict(tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None) -> dict[str, Tensor]:
    """Return the state dict that `plain_state_dict` made these of; the tensors are shared, not copied.

    Raises CheckpointError where a quantized weight's description or fields are missing or contradict each other.

    Example:
        with safetensors.safe_open("layer.safetensors", "pt") as file:
            tensors, metadata = {name: file.get_tensor(name) for name in file.keys()}, file.metadata()
        layer.load_state_dict(from_plain_state_dict(tensors, metadata))
    """
    metadata = metadata or {}
    described = read_metadata(metadata, "the state dict")
    shapes = _shapes_of(metadata) if described else {}
    rest: dict[str, Tensor] = dict(tensors)
    found: dict[str, Tensor] = {}
    for name, meta in described.items():
        shape = shapes.get(name)
        if shape is None:
            raise CheckpointError(f"the metadata has no shape of {name}; was it written by plain_state_dict?")
        quantizer, dtype = quantizer_from_metadata(name, meta)
        names = {field: name + SUFFIXES[field] for field in quantizer.field_names()}
        fields = {field: rest.pop(entry) for field, entry in names.items() if entry in rest}
        cls = GroupedTensor if len(shape) == 3 else TENSOR_CLASSES.get(quantizer.FORMAT, QuantizedTensor)
        try:
            found[name] = cls.rebuild(fields, quantizer, torch.Size(shape), dtype)
        except ValueError as error:
            raise CheckpointError(f"{name} cannot be put together: {error}") from None
    return rest | found


def _with_shapes(metadata: dict[str, str], shapes: dict[str, list[int]]) -> dict[str, str]:
    if shapes:
        values = json.loads(metadata[METADATA_KEY]) | {_SHAPES: shapes}
        metadata[METADATA_KEY] = json.dumps(values, sort_keys=True, allow_nan=False)
    return metadata


def _shapes_of(metadata: Mapping[str, str]) -> dict[str, Shape]:
    shapes = parse_object(metadata[METADATA_KEY].encode("utf-8", "surrogatepass"), "the metadata").get(_SHAPES)
    if not isinstance(shapes, dict) or not all(_is_shape(shape) for shape in shapes.values()):
        raise CheckpointError(f"the metadata does not map parameter names to {_SHAPES}; was it of plain_state_dict?")
    return {name: tuple(shape) for name, shape in shapes.items()}


def _is_shape(value: Any) -> bool:
    """Whether this is the shape of a weight or of a stack of them, of a size that can be counted in bytes."""
    if not isinstance(value, list) or math.prod(size for size in value if type(size) is int) >= _TOO_MANY:
        return False
    return len(value) in (2, 3) and all(type(size) is int and size >= 0 for size in value)
