"""A torch that cannot register constants of graphs compiles the same graphs, with the same bits."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from te_models.kernels.torch_versions import register_constants

RECIPES = ["mxfp8", "current", "block", "delayed", "nvfp4"]


def run(*arguments: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "tests.layers.registered.graphs_of_recipes", *arguments]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


@pytest.mark.slow
@pytest.mark.skipif(register_constants is None, reason="this torch has no constants of graphs to take away")
def test_the_package_works_where_the_registration_is_absent() -> None:
    assert run("absent") == {}


@pytest.mark.slow
@pytest.mark.skipif(register_constants is None, reason="this torch has no constants of graphs to take away")
def test_the_same_graphs_and_bits_without_registration() -> None:
    found, expected = run("absent", *RECIPES), run(*RECIPES)
    assert found == expected
    for name, counted in found.items():  # rows and recipes made again: one graph; another recipe: one more
        assert counted["graphs"] == [1, 1, 1, 2] and counted["same"], name
