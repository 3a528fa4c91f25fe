"""Every registered operation: what it returns against its description, for real, fake and symbolic tensors."""

from __future__ import annotations

import importlib
import pkgutil

import pytest
import torch
from torch import Tensor

from te_models import kernels
from te_models.kernels.registry import Registered, like, operation, registered, registration
from tests.kernels.described import Arguments, check_description, tensors
from tests.kernels.triton.op_samples import FAMILIES


def everything() -> dict[str, Registered]:
    """Import every module that may register an operation; return all that are, but for those of other tests."""
    for module in pkgutil.walk_packages(kernels.__path__, "te_models.kernels."):
        if not module.name.rpartition(".")[2].startswith("triton"):
            importlib.import_module(module.name)
    return {name: entry for name, entry in registered().items() if not name.startswith("test_")}


OPERATIONS = everything()


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.__name__)
def test_results_are_as_described(device, family) -> None:
    torch.manual_seed(0)
    for name, arguments in family(device):
        check_description(OPERATIONS[name], arguments)


DIFFERENTIABLE = {"x", "weight", "bias", "probabilities", "logits", "hidden", "a", "b", "dy"}
ONE_BYTE = (torch.float8_e4m3fn, torch.float8_e5m2)


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.__name__)
def test_opcheck(device, family) -> None:
    """torch's own checks, on a few samples of each operation; one of them cannot compare FP8."""
    torch.manual_seed(0)
    by_name: dict[str, list[Arguments]] = {}
    for name, arguments in family(device):
        by_name.setdefault(name, []).append(arguments)
    chosen = [(name, sample) for name, found in by_name.items() for sample in found[:: max(1, len(found) // 3)]]
    for name, arguments in chosen:
        op = OPERATIONS[name].op
        schema = op._opoverload._schema.arguments
        if op._backward_fn is not None:
            arguments = tuple(
                value.detach().requires_grad_() if argument.name in DIFFERENTIABLE and value is not None else value
                for argument, value in zip(schema, arguments, strict=False)
            )
        checks = ["test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"]
        checks += [] if any(t.dtype in ONE_BYTE for t in tensors(arguments)) else ["test_schema"]
        torch.library.opcheck(op, arguments, test_utils=checks)


def test_every_operation_has_samples() -> None:
    assert OPERATIONS.keys() == {name for family in FAMILIES for name, _ in family(torch.device("cpu"))}


WRONG = {
    "dtype": (lambda x: x + 1, lambda x: like(x, dtype=torch.float64)),
    "strides": (lambda x: (x + 1).mT.contiguous().mT, lambda x: like(x)),
    "sizes": (lambda x: x.mT + 1, lambda x: like(x)),
    "constants": (lambda x: x + 1, lambda x: like(x, (int(x.shape[0]), x.shape[1]))),
    "view": (lambda x: x, lambda x: like(x)),
    "mutation": (lambda x: x.add_(1).clone(), lambda x: like(x)),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_description_is_found(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registration, "_REGISTERED", {})
    compute, results = WRONG[wrong]

    @operation(f"test_wrong_{wrong}", results)
    def _(x: Tensor) -> Tensor:
        return compute(x)

    with pytest.raises((AssertionError, RuntimeError)) as error:
        check_description(registered()[f"test_wrong_{wrong}"], (torch.ones(3, 4),))
    assert error.type is AssertionError or "may not alias" in str(error.value)
