"""Names and modules that are imported where they are first used: until then they take no time.

A module that needs torch for some of its work says `from te_models.lazy import torch`, and does the rest of its work in
a process that never imports torch, as the verbs that move bytes do.
"""

from __future__ import annotations

import ast
import importlib
import sys
import types
import warnings
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch as torch


def later(name: str) -> types.ModuleType:
    """Return a module that is imported when an attribute of it is first asked for; the module itself if it is there."""
    return sys.modules.get(name) or _Later(name)


def __getattr__(name: str) -> types.ModuleType:
    if name == "torch":
        return later(name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


class _Later(types.ModuleType):
    """Stands for a module. What was asked for once is an attribute like any other from then on."""

    def __getattr__(self, attribute: str) -> Any:
        value = getattr(importlib.import_module(self.__name__), attribute)
        setattr(self, attribute, value)
        return value


def lazy_names(package: str, hint: str = "", renamed: Mapping[str, str] | None = None) -> tuple[Callable, Callable]:
    """Return `__getattr__` and `__dir__` of a package, for the names that its `if TYPE_CHECKING:` imports: nothing runs
    that, and it says here as to type checkers where each is defined.

    hint: what else the AttributeError for another name says. renamed: name of an earlier release -> today's; the old
    one still works, with a DeprecationWarning.
    """
    module_of: dict[str, str] = {}

    def read() -> None:
        if not module_of:
            module_of.update(_imported_for_types(package))

    def getattribute(name: str) -> Any:
        if renamed and name in renamed:
            warnings.warn(f"{package}.{name} is {package}.{renamed[name]} now", DeprecationWarning, stacklevel=2)
            name = renamed[name]
        read()
        if name not in module_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}{hint}")
        value = getattr(importlib.import_module(f"{package}.{module_of[name]}"), name)
        setattr(sys.modules[package], name, value)
        return value

    def names() -> list[str]:
        read()
        return sorted({*vars(sys.modules[package]), *module_of})

    return getattribute, names


def _imported_for_types(package: str) -> dict[str, str]:
    """Return name -> module of the package, of what its `if TYPE_CHECKING:` imports."""
    loader: Any = sys.modules[package].__spec__.loader  # type: ignore[union-attr]
    for part in ast.parse(loader.get_source(package)).body:
        if isinstance(part, ast.If) and isinstance(part.test, ast.Name) and part.test.id == "TYPE_CHECKING":
            imports = [line for line in part.body if isinstance(line, ast.ImportFrom) and line.level == 1]
            return {name.name: str(line.module) for line in imports for name in line.names}
    raise ImportError(f"{package} imports nothing for type checkers")
