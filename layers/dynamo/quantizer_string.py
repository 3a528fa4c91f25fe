"""A quantizer as a text: a schema knows no objects, and sees this constant so.

The text is the same in every process and rebuilds an equal quantizer of the same class, a user's own class included.
"""

import dataclasses
import enum
import functools
import json
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from te_models.kernels.compiling import compiling
from te_models.kernels.torch_versions import constant_when_traced, register_constants

from ..quantizer import Quantizer
from ..quantizer.value import ValueObject, rebuild_value, value_class


def text_of(quantizer: Quantizer) -> str:
    """Return the text of a quantizer. TypeError for one that holds live state, and for what is no quantizer."""
    if not isinstance(quantizer, Quantizer):
        raise TypeError(f"a {type(quantizer).__name__} was passed where an operation takes a quantizer")
    if not compiling():
        return _text(quantizer)
    if register_constants is None:  # a quantizer is no constant there, but its fields are
        return _dumped(_plain(quantizer))
    # the compiler does not trace the making of a text, but it makes value objects of constants
    return _Text(quantizer).text


@functools.lru_cache(maxsize=1024)
def quantizer_from_text(text: str) -> Quantizer:
    """Undo `text_of`. ValueError where this process has imported no class, or more than one, of the name."""
    return _value(json.loads(text), Quantizer)


@functools.lru_cache(maxsize=1024)
def _text(quantizer: Quantizer) -> str:
    quantizer.__fx_repr__()  # refuses live state
    return _dumped(_plain(quantizer))


@constant_when_traced
def _dumped(plain: Any) -> str:
    return json.dumps(plain, sort_keys=True)


def _plain(value: Any) -> Any:
    if isinstance(value, ValueObject):
        fields = dataclasses.fields(value)  # type: ignore[arg-type]
        return {"class": _name(type(value))} | {f.name: _plain(getattr(value, f.name)) for f in fields}
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    if isinstance(value, float):
        # traced by torch 2.11: under dynamic=True it makes graph inputs of floats, but not of members of a set
        return next(iter({value}))
    return value.name if isinstance(value, enum.Enum) else value


def _value(plain: Any, hint: Any) -> Any:
    """Undo `_plain` for a value annotated `hint`."""
    if isinstance(plain, dict):
        cls = _class_of(plain["class"])
        hints = typing.get_type_hints(cls)
        return rebuild_value(
            cls, **{name: _value(held, hints[name]) for name, held in plain.items() if name != "class"}
        )
    for member in typing.get_args(hint) or (hint,):
        if isinstance(plain, str) and member is torch.dtype:
            return getattr(torch, plain)
        if isinstance(plain, str) and isinstance(member, type) and issubclass(member, enum.Enum):
            return member[plain]
    return plain


def _name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def _class_of(name: str) -> type:
    def below(cls: type) -> Iterator[type]:
        for inner in cls.__subclasses__():
            yield inner
            yield from below(inner)

    found = {cls for cls in below(ValueObject) if _name(cls) == name}
    if len(found) != 1:
        why = "and more than one has that name" if found else "which is not imported here; import its module first"
        raise ValueError(f"a quantizer of class {name} is named, {why}")
    return found.pop()


@value_class
@dataclass(frozen=True, init=False)
class _Text(ValueObject):
    """The text of a quantizer, as a constant of a graph."""

    text: str

    def __init__(self, quantizer: Quantizer) -> None:
        object.__setattr__(self, "text", _text(quantizer))
