"""What an operation returns, flat as `Tensor[]` and whole again, by the description of it.

A description is a `Result` (enough to allocate one result, on a device as on fake tensors), an `Alias`, None for a
result that is None, or a tuple, list or NamedTuple of these. Its branches follow the arguments, so real and fake
calls and the caller follow the same one. `Result` is open: a folder above this one adds kinds of results, such as
quantized ones.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from te_models.suggestions import shown


class Result:
    """Base of descriptions: a value of one or more new tensors. None of them is a view of an argument or another."""

    def count(self) -> int:
        """Return how many tensors the value consists of."""
        raise NotImplementedError

    def allocate(self) -> list[Tensor]:
        """Allocate these tensors, not filled."""
        raise NotImplementedError

    def take(self, value: Any) -> list[Tensor]:
        """Return the tensors of a value that an implementation returned."""
        raise NotImplementedError

    def make(self, tensors: Sequence[Tensor]) -> Any:
        """Return the value of its tensors: what was returned, with all that is not in the tensors."""
        raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class Output(Result):
    """A new tensor.

    shape: sizes may be symbolic; transposed: the last two dimensions lie swapped in memory, else it is contiguous.
    """

    shape: Sequence[int]
    dtype: torch.dtype
    device: torch.device
    transposed: bool = False

    def empty(self) -> Tensor:
        """Allocate it, not filled."""
        if not self.transposed:
            return torch.empty(tuple(self.shape), dtype=self.dtype, device=self.device)
        *batch, rows, columns = self.shape
        return torch.empty((*batch, columns, rows), dtype=self.dtype, device=self.device).mT

    def count(self) -> int:
        return 1

    def allocate(self) -> list[Tensor]:
        return [self.empty()]

    def take(self, value: Any) -> list[Tensor]:
        return [value]

    def make(self, tensors: Sequence[Tensor]) -> Tensor:
        return tensors[0]


@dataclasses.dataclass(frozen=True)
class Alias:
    """A result that is no new value: the argument of this name, or the earlier result at this position.

    A schema cannot return it, so it is left out there and put back by the caller.
    """

    of: str | int


def like(
    x: Tensor | Output,
    shape: Sequence[int] | None = None,
    dtype: torch.dtype | None = None,
    *,
    transposed: bool = False,
) -> Output:
    """Describe a result with x's device, and x's shape and dtype where none is given."""
    return Output(x.shape if shape is None else shape, dtype or x.dtype, x.device, transposed)


def matrix_like(x: Tensor, columns: int | None = None) -> Output:
    """Describe x [..., C] as a matrix [rows, C]; columns: if not C."""
    # not x.shape.numel(), which takes symbolic sizes for constants
    return like(x, (math.prod(x.shape[:-1]), x.shape[-1] if columns is None else columns))


def absent(x: Tensor, dtype: torch.dtype | None = None) -> Output:
    """Describe a result that was not asked for: without elements, [0], because a schema cannot leave one out."""
    return like(x, (0,), dtype)


def flatten_results(described: Any, value: Any, arguments: Mapping[str, Any]) -> list[Tensor]:
    """Return the new tensors of what an implementation returned. RuntimeError where it is not what was described."""
    flat: list[Tensor] = []
    _append(described, value, arguments, value, flat)
    return flat


def _append(described: Any, value: Any, arguments: Mapping[str, Any], whole: Any, flat: list[Tensor]) -> None:
    if isinstance(described, (tuple, list)):
        if not isinstance(value, (tuple, list)) or len(value) != len(described):
            raise RuntimeError(f"an operation returned {_brief(value)} where {len(described)} results are described")
        for inner, held in zip(described, value, strict=True):
            _append(inner, held, arguments, whole, flat)
    elif isinstance(described, Alias):
        of = described.of
        if value is not (arguments[of] if isinstance(of, str) else whole[of]):
            raise RuntimeError(f"an operation returned {_brief(value)} where {shown(of)} itself is described")
    elif described is None:
        if value is not None:
            raise RuntimeError(f"an operation returned {_brief(value)} where None is described")
    else:
        tensors = described.take(value)
        if len(tensors) != described.count():
            raise RuntimeError(f"an operation returned {len(tensors)} tensors where {described.count()} are described")
        flat += tensors


def allocate_results(described: Any) -> list[Tensor]:
    """Allocate the new tensors, not filled."""
    if isinstance(described, (tuple, list)):
        return [tensor for inner in described for tensor in allocate_results(inner)]
    return described.allocate() if isinstance(described, Result) else []


def filled_up(tensors: list[Tensor], places: int) -> list[Tensor] | tuple[Tensor, ...]:
    """Return the tensors and, up to a number of places, ones without elements; places 0: the list as it is."""
    if not places:
        return tensors
    if len(tensors) > places:
        raise RuntimeError(f"an operation returned {len(tensors)} tensors; register it with places={len(tensors)}")
    device = tensors[0].device if tensors else None
    return (*tensors, *(torch.empty(0, device=device) for _ in range(places - len(tensors))))


def make_results(described: Any, tensors: Sequence[Tensor], arguments: Mapping[str, Any]) -> Any:
    """Return what the implementation returned, of its new tensors; an alias is the very object it is one of."""
    whole: list[Any] = []
    at = 0
    for inner in described if isinstance(described, (tuple, list)) else [described]:
        value, at = _made(inner, tensors, at, arguments, whole)
        whole.append(value)
    return _like(described, whole) if isinstance(described, (tuple, list)) else whole[0]


def _made(
    described: Any, tensors: Sequence[Tensor], at: int, arguments: Mapping[str, Any], whole: list[Any]
) -> tuple[Any, int]:
    """Return the value, and where the tensors of the next one begin."""
    if described is None:
        return None, at
    if isinstance(described, Alias):
        return arguments[described.of] if isinstance(described.of, str) else whole[described.of], at
    if isinstance(described, Result):
        after = at + described.count()
        return described.make(tensors[at:after]), after
    values = []
    for inner in described:
        value, at = _made(inner, tensors, at, arguments, whole)
        values.append(value)
    return _like(described, values), at


def _like(described: Any, values: list[Any]) -> Any:
    """Return the values in the container that described them."""
    if isinstance(described, list):
        return values
    return type(described)(*values) if hasattr(described, "_fields") else tuple(values)


def _brief(value: Any) -> str:
    return f"a {type(value).__name__}"
