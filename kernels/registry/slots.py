"""How a value of one annotated type becomes one argument of a schema, and back.

as it is             Tensor, bool, int, float, str, torch.dtype, each also `| None`; list[Tensor], list[int], list[bool]
as another type      tuple[int, ...] of any length, or None: list[int], empty for None; Literal of strings: str;
                     enum: its name; process group: its name, looked up where the operation runs

Types of several arguments: see `kinds`.
"""

from __future__ import annotations

import enum
import types
import typing
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

_SCALARS: tuple[Any, ...] = (bool, int, float, str, torch.dtype, Tensor)
_AS_IT_IS = {*_SCALARS, *(t | None for t in _SCALARS), list[Tensor], list[int], list[bool]}


class Slot(NamedTuple):
    """One argument of a schema: its name, type, and how a value gets there and back; None: as it is.

    mutated: whether an operation that takes it writes to it, whatever it says itself.
    """

    name: str
    annotation: Any
    encode: Callable[[Any], Any] | None = None
    decode: Callable[[Any], Any] | None = None
    mutated: bool = False

    @property
    def holds_tensor(self) -> bool:
        """Whether it is a tensor, a list of them, or None in place of one."""
        return self.annotation in (Tensor, Tensor | None, list[Tensor])


def slot_of(hint: Any, name: str, owner: str) -> Slot:
    """Return the slot of a value annotated `hint`. TypeError where no schema can hold it."""
    if hint in _AS_IT_IS:
        return Slot(name, hint)
    members = typing.get_args(hint) if isinstance(hint, types.UnionType) or _is_union(hint) else (hint,)
    optional = type(None) in members
    rest = [m for m in members if m is not type(None)]
    if len(rest) == 1:
        (only,) = rest
        if typing.get_origin(only) is Literal and all(isinstance(value, str) for value in typing.get_args(only)):
            return Slot(name, str | None if optional else str)
        if typing.get_origin(only) is tuple and set(typing.get_args(only)) <= {int, Ellipsis}:
            return Slot(name, list[int], _list_of, _tuple_or_none if optional else tuple)
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return Slot(name, str, _name_of, hint.__getitem__)
    if torch.distributed.is_available() and hint is torch.distributed.ProcessGroup:
        return Slot(name, str, _group_name, _group)
    raise TypeError(
        f"{owner}.{name} is annotated {hint}; an operation takes tensors, numbers, strings, dtypes, enums, process "
        "groups, tuples of sizes, NamedTuples or frozen dataclasses of these, and types made known with `add_kind`"
    )


def _is_union(hint: Any) -> bool:
    return typing.get_origin(hint) is typing.Union  # what `Literal[...] | None` is


def _list_of(value: tuple[int, ...] | None) -> list[int]:
    return [] if value is None else list(value)


def _tuple_or_none(value: list[int]) -> tuple[int, ...] | None:
    return tuple(value) if value else None


def _name_of(value: enum.Enum) -> str:
    return value.name


def _group_name(group: torch.distributed.ProcessGroup) -> str:
    return group.group_name


def _group(name: str) -> torch.distributed.ProcessGroup:
    from torch.distributed import distributed_c10d

    return distributed_c10d._resolve_process_group(name)  # type: ignore[arg-type]
