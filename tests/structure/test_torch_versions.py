"""What versions of torch do differently is known to kernels/torch_versions.py, and asked there."""

from __future__ import annotations

from tests.structure.test_rooms import identifiers
from tests.structure.tree import modules

ALLOWED = {"te_models.kernels.torch_versions", "te_models.kernels.compiling"}


def test_exporting_is_not_asked_of_torch() -> None:
    """`torch.compiler.is_exporting` is true in all that torch 2.11 compiles: experts were not counted there."""
    others = {name: file for name, file in modules().items() if name not in ALLOWED}
    assert [name for name, file in others.items() if "is_exporting" in identifiers(file.read_text("utf-8"))] == []
