"""Operations are registered through kernels/custom_op, which derives what torch wants to know from one description."""

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
    for node in ast.walk(ast.parse(source)) if any(name in source for name in BY_HAND) else ():
        if isinstance(node, ast.Attribute) and node.attr in BY_HAND:
            yield f"{node.lineno}: {node.attr}"
        elif isinstance(node, ast.ImportFrom) and node.module == "torch.library":
            yield from (f"{node.lineno}: {alias.name}" for alias in node.names if alias.name in BY_HAND)


def test_no_operation_is_registered_by_hand() -> None:
    others = {name: file for name, file in modules().items() if ".kernels.custom_op." not in name}
    found = {name: list(by_hand(file.read_text(encoding="utf-8"))) for name, file in others.items()}
    assert {name: names for name, names in found.items() if names} == {}


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
