"""What runs here is one answer: by the setting, the machine and the call, whatever ran before."""

import os
import sys
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

from te_models.kernels import backend, launch
from te_models.kernels.backend import Backend, BackendError, Compiled, choose, explain, has_library, using_backend
from te_models.kernels.cpp_library import CompilationError
from te_models.kernels.gemm import choice
from te_models.kernels.gemm.backends import DeviceCapability
from tests.compare import refused
from tests.fork_server import run_python

BF16 = torch.bfloat16


@pytest.fixture
def loaded() -> list[tuple[Any, ...]]:
    return []


@pytest.fixture
def op(loaded: list[tuple[Any, ...]], asked_anew: None) -> Compiled:
    """An operation whose library is there for bfloat16, and cannot be had for float32."""

    def load(*key: Any) -> None:
        loaded.append(key)
        if torch.float32 in key:
            raise CompilationError("there is no C++ compiler")

    return Compiled("a sum", load, (BF16, torch.float32))


def test_the_answer_is_asked_once_of_the_machine_and_kept(op: Compiled, loaded: list[tuple[Any, ...]]) -> None:
    for size in (1, 1, 1 << 20):
        assert choose(op, torch.ones(size, dtype=BF16)) is Backend.COMPILED
    assert loaded == [(BF16,)], "neither how often nor how much decides"
    with using_backend("definition"):
        assert choose(op, torch.ones(2, dtype=BF16)) is Backend.DEFINITION
    assert choose(op, torch.ones(2, dtype=BF16)) is Backend.COMPILED


def test_what_is_missing_is_counted_and_said(op: Compiled) -> None:
    x = torch.ones(2)
    assert choose(op, x) is Backend.DEFINITION and not has_library(op, torch.float32)
    assert backend.fallbacks == {"there is no C++ compiler": 2}
    assert explain(op, x) == "a sum runs as definition; not compiled: there is no C++ compiler"
    with using_backend("compiled"):
        refused(lambda: choose(op, x), "'compiled', and a sum has no library here: there", error=BackendError)
    with using_backend("compiled"):
        assert choose(op, torch.ones(2, dtype=torch.float64)) is Backend.DEFINITION, "it is for other dtypes"


def observed(x: Tensor, see: Callable[[Tensor], object]) -> None:
    torch.func.vmap(lambda y: (see(y), y)[1])(x[None])


def forward_mode(x: Tensor, see: Callable[[Tensor], object]) -> None:
    with forward_ad.dual_level():
        see(x)


REASONS: dict[str, tuple[Callable[[Tensor, Callable[[Tensor], object]], object], str]] = {
    "gradient": (lambda x, see: see(x.requires_grad_()), "a gradient is wanted"),
    "device": (lambda x, see: see(x.to("meta")), "it is for a CPU, this is meta"),
    "nothing": (lambda x, see: see(x[:0]), "there is nothing to compute"),
    "transform": (observed, "it is for plain tensors|torch.func"),
    "forward mode": (forward_mode, "forward mode, looks on"),
    "dtype": (lambda x, see: see(x.double()), "it is for torch.bfloat16, torch.float32, not for torch.float64"),
}


@pytest.mark.parametrize("name", REASONS)
def test_the_definition_computes_what_a_library_cannot(name: str, op: Compiled) -> None:
    call, reason = REASONS[name]
    seen: list[tuple[Backend, str]] = []
    call(torch.ones(4, dtype=BF16), lambda x: seen.append((choose(op, x), explain(op, x))))
    ((found, said),) = seen
    assert found is Backend.DEFINITION
    assert any(part in said for part in reason.split("|")), said
    assert not backend.fallbacks, "which is no fallback"


def test_settings_that_are_none() -> None:
    for call in (lambda: backend.set_backend("fast"), lambda: using_backend("fast").__enter__()):
        refused(call, "the backend is 'fast'; allowed: auto, definition, compiled", error=BackendError)
    code = "from te_models.kernels.backend import backend\ntry:\n print(backend())\nexcept ValueError as e:\n print(e)"
    for value, said in (
        ("definition", "definition"),
        ("", "auto"),
        ("c++", "TE_MODELS_BACKEND is 'c++'; allowed: auto, definition, compiled"),
    ):
        variables = {"TE_MODELS_BACKEND": value, "PYTHONPATH": os.pathsep.join(sys.path)}
        assert run_python(["-c", code], env=os.environ | variables).stdout.strip() == said


def test_no_kernel_of_an_accelerator_runs_by_the_definitions() -> None:
    h100 = DeviceCapability("cuda", (9, 0), True, (12, 8))
    x = torch.zeros(1)
    with mock.patch.object(launch, "as_accelerator", True):
        assert launch.on_accelerator(x) and choice.against_device(h100, (8, 9)) is None
        with using_backend("definition"):
            assert not launch.on_accelerator(x)
            assert choice.against_device(h100, (8, 9)) == "the backend is 'definition'"
