"""Every tensor that the package makes names its device: torch's default device is a user's choice, and memory of the
wrong device, or none at all, would reach a C++ function by its address."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest
from torch.utils._device import _device_constructors

from tests.structure.tree import ROOT, modules, parsed

FACTORIES = {function.__name__.removeprefix("fft_") for function in _device_constructors()}
"""Names of the functions whose results are on the default device where no other is named."""
LEGACY = {"Tensor", "FloatTensor", "LongTensor", "ByteTensor"}
"""Classes that make tensors when they are called, and take no device."""


def unplaced(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield line and name of each function of torch that may make a tensor on the default device."""
    calls = {id(node.func): node for node in ast.walk(tree) if isinstance(node, ast.Call)}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module == "torch":
            yield from ((node.lineno, alias.name) for alias in node.names if alias.name in FACTORIES)
        if not (isinstance(node, ast.Attribute) and ast.unparse(node.value) in ("torch", "torch.fft", "torch.nested")):
            continue
        call = calls.get(id(node))
        if node.attr in LEGACY and call is not None:
            yield node.lineno, node.attr
        if node.attr not in FACTORIES:
            continue
        # a function that is handed on is called where nobody sees with what
        given = [k.value for k in call.keywords if k.arg in ("device", None)] if call is not None else []
        if not given or any(isinstance(value, ast.Constant) and value.value is None for value in given):
            yield node.lineno, node.attr


def test_every_tensor_names_its_device() -> None:
    found = [
        f"{file.relative_to(ROOT)}:{line} {name}"
        for file in modules().values()
        for line, name in unplaced(parsed(file))
    ]
    assert not found, "without a device: " + ", ".join(found)


@pytest.mark.parametrize(
    "code",
    [
        "torch.empty(3)",
        "torch.zeros((), dtype=torch.int32)",
        "torch.randn(3, generator=generator)",
        "torch.full((2,), 1.0, device=None)",
        "make = torch.ones",
        "torch.Tensor([1.0])",
        "torch.fft.fftfreq(3)",
        "from torch import arange",
    ],
)
def test_tensors_on_the_default_device_are_found(code: str) -> None:
    assert len(list(unplaced(ast.parse(code)))) == 1


@pytest.mark.parametrize(
    "code", ["torch.empty(3, device=x.device)", "torch.ones(3, **new)", "x.new_empty(3)", "torch.zeros_like(x)"]
)
def test_tensors_with_a_device_are_not_found(code: str) -> None:
    assert not list(unplaced(ast.parse(code)))
