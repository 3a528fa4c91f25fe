"""What replaces attributes for a while and puts them back: as the fixture of pytest does, without pytest."""

from __future__ import annotations

from types import TracebackType
from typing import Any, Protocol

from te_models.kernels.cpp_library import CompilationError

_MISSING = object()


def without_compiler(*_: object) -> Any:
    """In place of what loads a library of C++."""
    raise CompilationError("there is no C++ compiler")


class Patching(Protocol):
    """`setattr` of pytest.MonkeyPatch."""

    def setattr(self, target: Any, name: str, value: Any, raising: bool = True) -> None: ...


class Patches:
    """Replaces attributes until the end of a `with`."""

    def __init__(self) -> None:
        self._before: list[tuple[Any, str, Any]] = []

    def setattr(self, target: Any, name: str, value: Any, raising: bool = True) -> None:
        """Replace an attribute. AttributeError where there is none, unless `raising` is off."""
        before = vars(target).get(name, _MISSING)
        if raising and not hasattr(target, name):
            raise AttributeError(f"{target!r} has no attribute {name!r} to replace")
        self._before.append((target, name, before))
        setattr(target, name, value)

    def __enter__(self) -> Patches:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        while self._before:
            target, name, before = self._before.pop()
            if before is _MISSING:
                delattr(target, name)
            else:
                setattr(target, name, before)
