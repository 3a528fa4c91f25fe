"""Every registered operation: what it returns against its description, for real, fake and symbolic tensors."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from torch.utils._pytree import tree_leaves, tree_map, tree_structure

from te_models import kernels
from te_models.kernels.registry import Registered, like, operation, registered, registration
from tests.kernels.triton.op_samples import FAMILIES, Arguments
from tests.kernels.triton.quantize_cases import assert_bitwise


def everything() -> dict[str, Registered]:
    """Import every module that may register an operation; return all that are."""
    for module in pkgutil.walk_packages(kernels.__path__, "te_models.kernels."):
        if not module.name.rpartition(".")[2].startswith("triton"):
            importlib.import_module(module.name)
    return registered()


OPERATIONS = everything()


def tensors(values: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


def with_tensors(function: Callable[[Tensor], Tensor], arguments: Arguments) -> Arguments:
    return tree_map(lambda a: function(a) if isinstance(a, Tensor) else a, arguments)


def description(t: Tensor) -> tuple[Any, ...]:
    """What a caller sees of a result; a symbol counts as the size that it was made from."""

    def sizes(values: Sequence[int | torch.SymInt]) -> tuple[int, ...]:
        return tuple(v.node.hint if isinstance(v, torch.SymInt) else v for v in values)

    return t.dtype, sizes(t.shape), sizes(t.stride()), t.device


SIZES = {"rows", "columns", "num_rows", "chunk_tokens"}
"""Integer arguments that callers take from shapes, so that they may be symbols, too."""


def on_fakes(entry: Registered, arguments: Arguments, *, symbolic: bool) -> Any:
    """Run an operation on fake tensors; symbolic: every size is a symbol, but 0 and 1, for which graphs are special."""
    symbols = ShapeEnv()
    mode = FakeTensorMode(shape_env=symbols if symbolic else None)

    def fake(t: Tensor) -> Tensor:
        if not symbolic:
            return mode.from_tensor(t)
        sizes = [DimDynamic.DYNAMIC if size > 1 else DimDynamic.STATIC for size in t.shape]
        return mode.from_tensor(t, symbolic_context=StatelessSymbolicContext(dynamic_sizes=sizes))

    names = [argument.name for argument in entry.op._opoverload._schema.arguments]
    given = list(with_tensors(fake, arguments))
    for at, name in enumerate(names[: len(given)]):
        if symbolic and name in SIZES:
            given[at] = fake(torch.empty(given[at])).shape[0]
    with mode:
        result = entry.op(*given)
    assert not any(value.is_number for value in symbols.replacements.values()), "a size was taken for a constant"
    return result


def memory(values: list[Tensor]) -> list[int]:
    return [t.untyped_storage().data_ptr() for t in values if t.numel()]


def check_description(entry: Registered, arguments: Arguments) -> None:
    given = with_tensors(Tensor.clone, arguments)
    result = entry.op(*given)
    real = tensors(result)
    for symbolic in (False, True):
        fake = on_fakes(entry, arguments, symbolic=symbolic)
        assert tree_structure(fake) == tree_structure(result)
        assert [description(t) for t in tensors(fake)] == [description(t) for t in real]
    own = memory(real)
    assert len(set(own)) == len(own), "a result is a view of another one"
    assert not set(own) & set(memory(tensors(given))), "a result is a view of an argument"
    names = [argument.name for argument in entry.op._opoverload._schema.arguments]
    for name, now, before in zip(names, given, arguments, strict=False):
        if isinstance(now, Tensor) and name not in entry.mutates:
            assert_bitwise(now, before)


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
