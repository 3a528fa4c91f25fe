"""A registered operation's description against what it returns: for real, on fake tensors and with symbolic sizes."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map, tree_structure

from te_models.kernels.custom_op import Registered
from tests.kernels.triton.quantize.quantize_cases import assert_bitwise

Arguments = tuple[Any, ...]


class Calls(TorchDispatchMode):
    """While it is in force: the calls of registered operations, (name, arguments as they were)."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, Arguments]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Arguments = (), kwargs: dict | None = None) -> Any:
        if func.namespace == "te_models":
            self.found.append((func._schema.name.partition("::")[2], with_tensors(Tensor.clone, args)))
        return self.answer(func, args, kwargs or {})

    def answer(self, func: Any, args: Arguments, kwargs: dict) -> Any:
        """Return what a call returns."""
        return func(*args, **kwargs)


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
"""Integer arguments that callers take from shapes, so that they may be symbols, too; likewise `*_shape`, a list."""


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
        if symbolic and name.endswith("_shape") and given[at]:
            given[at] = list(fake(torch.empty(given[at])).shape)
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
        if name not in entry.mutates:
            for new, old in zip(tensors(now), tensors(before), strict=True):
                assert_bitwise(new, old)
