"""Strictness is that of the thread that asks for it, and of the backward passes that autograd runs for it."""

import threading
import warnings
from collections.abc import Callable

import torch

from te_models.kernels.gemm import backends, gemm_counts, strict_gemms
from te_models.kernels.gemm.backends import BackendChoice, record_choice

FALLBACK = BackendChoice("a product in a test", backends.EMULATION, (("native", "there is none"),), fallback=True)


def refused() -> bool:
    with warnings.catch_warnings(action="ignore"):
        try:
            record_choice(FALLBACK, strict=False)
        except ValueError:
            return True
    return False


def in_a_thread(function: Callable[[], bool]) -> bool:
    found: list[bool] = []
    thread = threading.Thread(target=lambda: found.append(function()))
    thread.start()
    thread.join()
    return found[0]


class _InBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: object, dy: torch.Tensor) -> torch.Tensor:
        return dy * refused()


def backward() -> bool:
    x = torch.zeros((), requires_grad=True)
    return bool(torch.autograd.grad(_InBackward.apply(x), x)[0])


def test_of_this_thread_and_of_backward_passes() -> None:
    with strict_gemms():
        assert refused() and not in_a_thread(refused)
        assert backward() and in_a_thread(backward)  # a GPU's backward pass has a thread without regions
        with strict_gemms(False):
            assert not refused() and not backward()
    assert not refused() and not backward() and not in_a_thread(backward)


def test_regions_end_in_any_order() -> None:
    for strict in (False, True):
        first, second = strict_gemms(), strict_gemms(strict)
        first.__enter__()
        second.__enter__()
        first.__exit__(None, None, None)
        assert refused() == strict
        second.__exit__(None, None, None)
        assert not refused()


def test_threads_count_together() -> None:
    def count() -> None:
        for _ in range(500):
            record_choice(BackendChoice("another product in a test", "native"), strict=False)

    every = [threading.Thread(target=count) for _ in range(4)]
    for thread in every:
        thread.start()
    for thread in every:
        thread.join()
    assert gemm_counts()["another product in a test", "native"] == 2000
