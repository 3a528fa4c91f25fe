"""A folder of ours as the target of a conversion: a quantized parameter is one tensor per field."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING

from te_models.config import ModelConfig

from ..folder.checkpoint import Checkpoint
from ..io.dtypes import joint_dtype
from ..io.store import Store
from ..mapping.param_shapes import ExpertLayout, expected_tensors
from ..mapping.plan import OutputTensor
from ..mapping.quantized_format import SUFFIXES, quantized_metadata
from ..mapping.te_namespace import parameter_names, te_namespace
from ..mapping.tensor_map import compose
from .requantize import WrittenTensor, field_entries
from .route import WriteTarget

if TYPE_CHECKING:
    import torch

    from te_models.layers.quantizer import Quantizer


class TETarget(WriteTarget):
    """Parameters under their names in an expert layout.

    Arguments:
        moved: see `WriteTarget`.
        values: of what is quantized, by name in the layout, and what they are read from.
        dtype: the logical dtype of quantized parameters by name.
        reencoded: fields that are taken over as others than `moved` has, by name in the layout.
    """

    def __init__(
        self,
        config: ModelConfig,
        layout: ExpertLayout,
        moved: Iterable[OutputTensor],
        store: Store,
        values: Mapping[str, OutputTensor],
        dtype: Callable[[str], torch.dtype],
        reencoded: Mapping[str, list[OutputTensor]] | None = None,
    ) -> None:
        super().__init__(moved)
        self._shapes, self._names = expected_tensors(config, layout), parameter_names(config, layout)
        self._store, self._values, self._dtype, self._reencoded = store, values, dtype, reencoded or {}

    def weights(self, parameter: str) -> list[str]:
        return self._names[parameter]

    def fields(self, weight: str) -> list[OutputTensor]:
        entries = (weight + suffix for suffix in SUFFIXES.values())
        return self._reencoded.get(weight) or [self.moved[entry] for entry in entries if entry in self.moved]

    def entries(self, weight: str, quantizer: Quantizer) -> list[WrittenTensor]:
        return field_entries(weight, self._shapes[weight], quantized_metadata(quantizer, self._dtype(weight)))

    def values(self, weight: str) -> tuple[Store, OutputTensor]:
        return self._store, self._values[weight]


def value_outputs(ckpt: Checkpoint, layout: ExpertLayout) -> dict[str, OutputTensor]:
    """Return the parameters of a folder opened as plain values, by name in the layout, each in a dtype that holds the
    numbers of all tensors that it is joined from."""
    target = te_namespace(ckpt.config, layout)
    outputs = {}
    for name, pieces in compose(ckpt.namespace, target).items():
        dtype = joint_dtype(ckpt.tensors[piece.source].dtype for piece in pieces)
        outputs[name] = OutputTensor(name, dtype, target.stored[name].shape, tuple(pieces))
    return outputs
