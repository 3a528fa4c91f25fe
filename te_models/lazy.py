"""Names of a package that are imported where they are first used: importing the package takes no time for them."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any


def lazy_names(package: str, module_of: Mapping[str, str], hint: str = "") -> tuple[Callable, Callable]:
    """Return `__getattr__` and `__dir__` of a package.

    module_of: name -> the module of the package that defines it. hint: what else the AttributeError for another name
    says.
    """

    def getattribute(name: str) -> Any:
        if name not in module_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}{hint}")
        value = getattr(importlib.import_module(f"{package}.{module_of[name]}"), name)
        setattr(sys.modules[package], name, value)
        return value

    def names() -> list[str]:
        return sorted({*vars(sys.modules[package]), *module_of})

    return getattribute, names
