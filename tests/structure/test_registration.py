"""Operations are registered through kernels/registry, which derives what torch wants to know from one description."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest

from tests.structure.tree import modules

BY_HAND = {
    "custom_op",
    "register_fake",
    "register_autograd",
    "register_kernel",
    "impl_abstract",
    "triton_op",
    "Library",
}


def by_hand(source: str) -> Iterator[str]:
    """Names of torch.library that `source` uses itself."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and node.attr in BY_HAND:
            yield f"{node.lineno}: {node.attr}"
        elif isinstance(node, ast.ImportFrom) and node.module == "torch.library":
            yield from (f"{node.lineno}: {alias.name}" for alias in node.names if alias.name in BY_HAND)


@pytest.mark.parametrize("module", [name for name in modules() if ".kernels.registry." not in name])
def test_no_operation_is_registered_by_hand(module: str) -> None:
    assert list(by_hand(modules()[module].read_text(encoding="utf-8"))) == []


@pytest.mark.parametrize(
    "source",
    [
        '@torch.library.custom_op("te_models::f", mutates_args=())\ndef f(x): ...',
        "@f.register_fake\ndef _(x): ...",
        "f.register_autograd(backward, setup_context=setup)",
        "from torch.library import custom_op",
    ],
)
def test_a_registration_by_hand_is_found(source: str) -> None:
    assert len(list(by_hand(source))) == 1
