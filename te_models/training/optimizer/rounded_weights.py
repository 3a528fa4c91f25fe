"""Quantization-aware training: passes see weights rounded to a format, and the optimizer updates what was rounded.

The weights themselves are rounded in place before the micro-batches of a step and put back after them, so that a
gradient is that of the rounded weight and goes straight through to the weight (arXiv 1308.3432), compiled or not, and
once for all micro-batches. The numbers are those of `te-models quantize` and of each export that takes its folder.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from te_models.checkpoints.plan.param_shapes import is_linear_weight
from te_models.layers.quantizer import Quantizer
from te_models.layers.tensor.fsdp import local_part

from .whole_matrix import divided_matrices

if TYPE_CHECKING:
    from ...model import GPTModel
    from ...parallel.parts import ModelParts


def rounded(weight: Tensor, quantizer: Quantizer) -> Tensor:
    """Return what a quantizer's rowwise copy of matrices [out, in] or [num_gemms, out, in] stands for, each with scales
    of its own."""
    if weight.dim() == 3:
        return torch.stack([rounded(matrix, quantizer) for matrix in weight]) if len(weight) else weight.clone()
    rowwise = quantizer.with_usage(rowwise=True, columnwise=quantizer.symmetric)
    return rowwise.dequantize_fields(rowwise.quantize_fields(weight), weight.dtype, weight.shape)


class RoundedWeights:
    """The weights of a model's linear layers, to be rounded by `quantizer`. parts: what this rank has of the model,
    where ranks divide it; None: all of it. Ranks that have parts of a matrix enter and leave `in_force` together."""

    def __init__(self, model: GPTModel, quantizer: Quantizer, parts: ModelParts | None = None) -> None:
        self._quantizer = quantizer
        self._weights = {name: p for name, p in model.named_parameters() if is_linear_weight(name)}
        self._divided = {} if parts is None else divided_matrices(parts, frozen=True)

    @contextlib.contextmanager
    def in_force(self) -> Iterator[None]:
        """Have the weights be rounded ones inside."""
        before = {name: local_part(weight).detach().clone() for name, weight in self._weights.items()}
        try:
            with torch.no_grad():
                for name, weight in self._weights.items():
                    whole = self._divided.get(name)
                    values = before[name] if whole is None else whole.gather(before[name])
                    values = rounded(values, self._quantizer)
                    local_part(weight).copy_(values if whole is None else whole.own(values))
            yield
        finally:
            with torch.no_grad():
                for name, weight in self._weights.items():
                    local_part(weight).copy_(before[name])
