"""Kernels of other packages for CUDA: whether they are installed and serve a tensor, with the reason where not."""

import contextlib
import functools
import importlib.util
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from .gemm.backends import first_possible, record_choice


@functools.cache
def _installed(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def served_by(operation: str, module: str, package: str, x: Tensor) -> bool:
    """Whether the package computes the operation for x, on CUDA alone. Where it is missing, or is not for x's dtype,
    the chunked form runs, counted as a fallback (`te_models.kernels.gemm.gemm_counts`), with one warning."""
    if x.device.type != "cuda":
        return False
    reason = None if _installed(module) else f"{package} is not installed (the extra te_models[linear])"
    if x.dtype == torch.float64:
        reason = f"it has no kernel for {x.dtype}"
    choice = first_possible(operation, ((package, reason),), last="chunked", fallback=True)
    record_choice(choice, strict=False)
    return reason is None


def recomputed_gradients(
    run: Callable[..., Any], inputs: Sequence[Tensor], constants: Sequence[Any], grads: Sequence[Tensor]
) -> tuple[Tensor, ...]:
    """Return the gradients of `inputs` (zeros for an input without one) of what `run` makes of them and of the
    constants, inside the implementation of an operation."""
    with _differentiating():
        leaves = [x.detach().requires_grad_() for x in inputs]
        results = run(*leaves, *constants)
        results = (results,) if isinstance(results, Tensor) else results
        of_results = [grad.to(result.dtype) for grad, result in zip(grads, results, strict=True)]
        found = torch.autograd.grad(results, leaves, of_results, allow_unused=True)
    pairs = zip(leaves, found, strict=True)
    return tuple(torch.zeros_like(x).detach() if y is None else y.to(x.dtype).contiguous() for x, y in pairs)


@contextlib.contextmanager
def _differentiating() -> Iterator[None]:
    """Inside, operations are differentiated again: the dispatcher has left autograd behind where it calls an
    implementation."""
    exclude = torch._C._dispatch_tls_local_exclude_set()
    for key in (torch._C.DispatchKey.AutogradFunctionality, torch._C.DispatchKey.AutogradOther):
        exclude = exclude.remove(key)
    with torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), exclude), torch.enable_grad():
        yield
