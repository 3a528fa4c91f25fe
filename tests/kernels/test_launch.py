"""Where kernels run: with the GPU of their tensors as the current one."""

import contextlib
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from te_models.kernels.custom_op import like, operation, registration
from te_models.kernels.launch import on_gpu_of_arguments
from te_models.kernels.norm.op import norm_fwd


@pytest.fixture
def current(monkeypatch: pytest.MonkeyPatch) -> list[torch.device | None]:
    """The GPUs that were made the current one, the last one last."""
    found: list[torch.device | None] = []

    @contextlib.contextmanager
    def device(which: torch.device | None) -> Iterator[None]:
        found.append(which)
        yield
        found.append(torch.device("cuda:0"))

    monkeypatch.setattr(torch.cuda, "device", device)
    return found


def test_functions_run_with_the_gpu_of_their_tensors(current) -> None:
    with FakeTensorMode():
        x = torch.empty(3, device="cuda:1")

    def run(*args: object) -> tuple[object, ...]:
        assert current[-1] == torch.device("cuda:1")
        return args

    for args in ((x,), (None, 2, torch.zeros(1), x), ("a", [torch.zeros(1), x]), ([], x)):
        assert on_gpu_of_arguments(run)(*args) == args
        assert current == [torch.device("cuda:1"), torch.device("cuda:0")]
        current.clear()


def test_operations_are_such_functions_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton starts a kernel on the current GPU; torch's own operations run where their tensors are."""
    guarded: list[object] = []

    def guard(function: Callable) -> Callable:
        guarded.append(function)
        return function

    def double(x: Tensor) -> Tensor:
        return 2 * x

    monkeypatch.setattr(registration, "on_gpu_of_arguments", guard)
    monkeypatch.setattr(registration, "_REGISTERED", {})
    assert operation("test_doubled_on_a_gpu", lambda x: like(x))(double)(torch.ones(2)).sum() == 4
    assert guarded == [double]
    for name in (norm_fwd._name, "test_doubled_on_a_gpu"):
        assert torch._C._dispatch_has_kernel_for_dispatch_key(f"te_models::{name}", "CUDA")


def test_elsewhere_nothing_is_asked_of_a_gpu(current) -> None:
    from te_models.kernels.embedding import embedding_backward

    y: Tensor = embedding_backward(torch.ones(2, 3), torch.tensor([0, 1]), 4)
    assert y.sum() == 6 and not current
