"""Fill a live model's parameters from an open checkpoint."""

from collections.abc import Mapping
from typing import Any

import torch

from te_models.config import ModelConfig
from te_models.layers import GroupedTensor, QuantizedTensor

from ..formats.numbers import check_scale_values
from ..io.errors import CheckpointError, shorten
from ..io.store import Store
from ..mapping.param_shapes import ExpertLayout, expected_tensors, is_expert_stack
from ..mapping.parameters import StoredParameters
from ..mapping.quantized_format import SUFFIXES
from ..mapping.rank_shards import WHOLE, ShardPlace, parts
from ..mapping.te_namespace import Formats
from ..mapping.tensor_map import Namespace


class ParameterLoad:
    """The way from stored tensors into a model's parameters, worked out once.

    place: `params` are the parts of the model that this rank owns, and only they are read. formats: grouped names of
    the quantized tensors among the stored ones, which are as `source` says.

    A quantized parameter takes over quantized values of the same format bit for bit; otherwise values are quantized, or
    dequantized, as the parameter needs, one GEMM's matrix at a time where they are in high precision.
    """

    def __init__(
        self,
        store: Store,
        source: Namespace,
        config: ModelConfig,
        formats: Formats,
        params: Mapping[str, torch.Tensor],
        place: ShardPlace,
    ) -> None:
        layout = layout_of_names(params, config, "the names of the parameters to load")
        shapes = expected_tensors(config, layout)
        self._owned, self._place = parts(config, shapes, place), place
        check_shapes(params, {name: self._owned[name].shape(shape) for name, shape in shapes.items()})
        self._params = params
        self._layout: ExpertLayout = layout
        self._store, self._stored_as = store, (source, config, formats)
        self._worked_out: dict[ExpertLayout, StoredParameters] = {}

    def _in_layout(self, layout: ExpertLayout) -> StoredParameters:
        """Return the stored tensors as parameters of a layout, worked out when they are first asked for."""
        if layout not in self._worked_out:
            self._worked_out[layout] = StoredParameters(self._store, *self._stored_as, layout)
        return self._worked_out[layout]

    def sources(self, name: str) -> set[str]:
        """Return the names of the stored tensors that a parameter is filled from, whichever part of them it reads."""
        stored = self._in_layout(self._layout)
        suffixes = SUFFIXES.values() if name in stored.formats else ("",)
        return {piece.source for suffix in suffixes for piece in stored.pieces(name + suffix)}

    def read_from(self, store: Store) -> None:
        """Read from now on from another store of the same tensors."""
        self._store = store
        for stored in self._worked_out.values():
            stored.store = store

    @torch.no_grad()
    def fill(self, name: str) -> None:
        """Fill one parameter."""
        stored, param, part = self._in_layout(self._layout), self._params[name], self._owned[name]
        if name in stored.formats:
            value = stored.quantized(name, part)
            if self._place != WHOLE:  # a whole model's parameters have been checked before anything was filled
                _check_scales(name, value)
            param.copy_(value if isinstance(param, QuantizedTensor) else value.dequantize(param.dtype))
        elif isinstance(param, GroupedTensor) and not is_expert_stack(name):  # whose members no layout names
            for member, values in zip(param.members(), stored.entry(name, part.cuts()), strict=True):
                member.copy_(values)
        elif isinstance(param, GroupedTensor):
            first = 0 if part.experts is None else part.experts[0]
            for g, member in enumerate(param.members(), first):
                member.copy_(self._in_layout("per-gemm").entry(f"{name}{g}", part.member().cuts()))
        elif isinstance(param, QuantizedTensor):
            param.copy_(stored.entry(name, part.cuts()))
        else:
            stored.fill_part(name, part.cuts(), param)

    def value(self, name: str) -> torch.Tensor:
        """Return what a plain parameter is filled with, in its dtype and on the processor."""
        stored, part = self._in_layout(self._layout), self._owned[name]
        if name in stored.formats:
            return stored.quantized(name, part).dequantize(self._params[name].dtype)
        return stored.entry(name, part.cuts()).to(self._params[name].dtype)


def _check_scales(name: str, value: QuantizedTensor) -> None:
    for field, scales in value.fields.items():
        if not field.endswith(("_data", "_zero_point")):
            check_scale_values(name + SUFFIXES[field], scales, signed=value.quantizer.SIGNED_SCALES)


def check_shapes(params: Mapping[str, torch.Tensor], shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raise CheckpointError naming the first tensor that does not have its expected shape."""
    for name, shape in shapes.items():
        if tuple(params[name].shape) != shape:
            raise CheckpointError(f"the model's {name} has shape {list(params[name].shape)}; expected: {list(shape)}")


def layout_of_names(names: Mapping[str, Any], config: ModelConfig, what: str) -> ExpertLayout:
    """Return which layout a model's parameter names are in; names that are in neither raise CheckpointError."""
    layouts: tuple[ExpertLayout, ...] = ("grouped", "per-gemm")
    closest = min(layouts, key=lambda layout: len(set(names) ^ set(expected_tensors(config, layout))))
    expected = expected_tensors(config, closest)
    missing, extra = [n for n in expected if n not in names], [n for n in names if n not in expected]
    problems = [f"{label}: {shorten(found)}" for label, found in (("missing", missing), ("unknown", extra)) if found]
    if problems:
        raise CheckpointError(f"{what} do not match the configuration: {'; '.join(problems)}")
    return closest
