"""Named tuples of layers: torch 2.11 compiles a call that leaves out a field only if the default is a plain value."""

import inspect
import pkgutil
from collections.abc import Iterator
from importlib import import_module
from typing import Any

import torch

import te_models.layers
from te_models.layers.gemm.three_gemms import EncodedTensor


def named_tuples() -> Iterator[type]:
    for module in pkgutil.walk_packages(te_models.layers.__path__, f"{te_models.layers.__name__}."):
        for _, value in inspect.getmembers(import_module(module.name), inspect.isclass):
            if hasattr(value, "_field_defaults") and value.__module__ == module.name:
                yield value


def plain(value: Any) -> bool:
    if isinstance(value, tuple):
        return all(plain(part) for part in value)
    return value is None or isinstance(value, bool | int | float | str | torch.dtype)


def test_defaults_are_plain_values() -> None:
    found = list(named_tuples())
    assert EncodedTensor in found
    # the port of Transformer Engine fills this one outside of compiled functions
    wrong = {each.__name__ for each in found if not all(map(plain, each._field_defaults.values()))}  # pyright: ignore[reportAttributeAccessIssue]
    assert wrong == {"AssignedRecipe"}
