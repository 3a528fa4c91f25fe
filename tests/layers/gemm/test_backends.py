"""The same bits whatever computes: the definitions, the C++ libraries, and either in a process that cannot compile."""

import hashlib
import json
import os
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from te_models.kernels.backend import forget, using_backend
from te_models.layers import LayerNormMLP, Linear, autocast, recipe
from tests.fork_server import run_python

RECIPES = (None, "delayed", "current", "block", "mxfp8", "nvfp4")
DTYPES = (torch.bfloat16, torch.float32)
SIZES = ((32, 64), (48, 96), (80, 160))
"""Rows and width: whole blocks of 32, ragged ones, and more than one block of 128."""


def digest(tensors: Iterable[Tensor]) -> str:
    found = hashlib.sha256()
    for x in tensors:
        found.update(x.detach().contiguous().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def bits(name: str | None, dtype: torch.dtype, rows: int, width: int) -> str:
    """Two forward and backward passes of both layers: results and gradients."""
    torch.manual_seed(rows)
    layers = Linear(width, width, params_dtype=dtype), LayerNormMLP(width, 2 * width, params_dtype=dtype)
    x, dy = torch.randn(rows, width, dtype=dtype), torch.randn(rows, width, dtype=dtype)
    found: list[Tensor] = []
    for layer in layers:
        for _ in range(2):
            inputs = x.clone().requires_grad_()
            with autocast(enabled=name is not None, recipe=recipe(name) if name else None):
                y = layer(inputs)
            assert isinstance(y, Tensor)
            found += [y, *torch.autograd.grad(y, [inputs, *layer.parameters()], dy)]
    return digest(found)


@pytest.mark.parametrize("name", RECIPES, ids=str)
def test_definitions_and_libraries_have_the_same_bits(name: str | None) -> None:
    for dtype in DTYPES:
        for rows, width in SIZES:
            with using_backend("definition"):
                wanted = bits(name, dtype, rows, width)
            with using_backend("compiled"):
                assert bits(name, dtype, rows, width) == wanted, (dtype, rows, width)
    forget()
    assert bits(name, dtype, rows, width) == wanted, "of a process that has asked nothing"


def test_a_process_that_cannot_compile_has_the_same_bits(tmp_path: Path) -> None:
    """Nor does it matter what processes before it have compiled, of which it sees nothing."""
    code = (
        "import json, torch, warnings; warnings.simplefilter('ignore')\n"
        "from te_models.kernels.backend import fallbacks\n"
        "from tests.layers.gemm.test_backends import *\n"
        "found = [bits(name, torch.bfloat16, *SIZES[1]) for name in RECIPES]\n"
        "print(json.dumps([found, sum(fallbacks.values())]))\n"
    )
    nothing = {"CXX": "no-such", "TE_MODELS_CACHE": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)}
    run = run_python(["-c", code], env=os.environ | nothing)
    assert run.returncode == 0, run.stderr
    found, fallbacks = json.loads(run.stdout)
    assert fallbacks and not [*tmp_path.rglob("*.so")]
    assert found == [bits(name, torch.bfloat16, *SIZES[1]) for name in RECIPES]
