"""State dicts as our files hold them, with weights stored quantized field by field: so transformers' Trainer reads
them when it resumes, and when it goes back to the best model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from te_models.checkpoints.plan.quantized_format import SUFFIXES, stored_fields
from te_models.layers import QuantizedTensor

from ..model import GPTModel

_MORE = [suffix for suffix in SUFFIXES.values() if suffix]


def joined_fields(gpt: GPTModel, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return `state` with each quantized parameter as one tensor.

    Raises ValueError where the model does not store that parameter in the same format.
    """
    joined = dict(state)
    for name, parameter in gpt.named_parameters():
        if not any(name + suffix in state for suffix in _MORE):
            continue
        given = {name + suffix: state[name + suffix] for suffix in SUFFIXES.values() if name + suffix in state}
        fields = stored_fields(name, parameter) if isinstance(parameter, QuantizedTensor) else {}
        if {n: (t.shape, t.dtype) for n, t in given.items()} != {n: (t.shape, t.dtype) for n, t in fields.items()}:
            raise ValueError(f"{name} is stored quantized, and the model does not have it in that format")
        assert isinstance(parameter, QuantizedTensor)
        for entry in given:
            del joined[entry]
        values = {field: given[name + SUFFIXES[field]] for field in parameter.fields}
        cls: Any = type(parameter)
        joined[name] = cls(values, parameter.quantizer, parameter.shape, parameter.dtype)
    return joined
