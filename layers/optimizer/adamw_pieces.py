"""Large parameters in pieces, so that an optimizer's working copies stay small whatever the parameter's size."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from te_models.kernels.compiling import compiling

from ..tensor.fsdp import local_part
from ..tensor.quantized_tensor import QuantizedTensor


@dataclass
class Piece:
    """A parameter, or a flat view of a part of it, from element `begin`. parameter, gradient, state: this rank's, views
    alike; "step" of the state is shared, and the piece that begins at 0 advances it. index: the parameter's place."""

    parameter: Tensor
    gradient: Tensor
    state: dict[str, Tensor]
    index: int
    begin: int = 0


def pieces(parameter: Tensor, gradient: Tensor, state: dict[str, Tensor], index: int, limit: int) -> Iterator[Piece]:
    """Yield a parameter in pieces of at most `limit` elements, or whole where it cannot be split: quantized weights,
    moments with scales of blocks, what is not contiguous, and inside a graph, where nothing would be gained.

    index: the parameter's place among all, from 1.
    """
    whole = Piece(local_part(parameter), local_part(gradient), {k: local_part(v) for k, v in state.items()}, index)
    parts = {k: v for k, v in whole.state.items() if k != "step"}
    size = whole.parameter.numel()
    tensors = (whole.parameter, whole.gradient, *parts.values())
    alike = all(not isinstance(t, QuantizedTensor) and t.is_contiguous() and t.numel() == size for t in tensors)
    if size <= limit or not alike or compiling():
        yield whole
        return
    for begin in range(0, size, limit):
        cut = slice(begin, begin + limit)
        yield Piece(
            whole.parameter.view(-1)[cut],
            whole.gradient.view(-1)[cut],
            {"step": whole.state["step"]} | {k: v.view(-1)[cut] for k, v in parts.items()},
            index,
            begin,
        )
