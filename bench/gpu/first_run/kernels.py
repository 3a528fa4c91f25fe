"""Part 2: every Triton kernel against its definition, at the launches that the tests sample."""

from __future__ import annotations

import importlib
import pkgutil
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from te_models import kernels
from te_models.kernels.custom_op import registered
from tests.kernels.described import with_tensors
from tests.kernels.triton.definitions import Definition, definitions, difference, expected

from .setting import Setting, untimed_tiles
from .worker import WrongError

Arguments = tuple[Any, ...]
_FIRST = ("quantize", "scaled", "grouped", "gemm", "norm", "activation", "rope")
"""How the names of the operations begin that most of a training step is made of."""
_OF_EACH = 1
"""Samples of each operation in a rehearsal."""


def cases(setting: Setting) -> Iterator[tuple[str, Callable[[], None]]]:
    """Yield the first sample of every operation, then the second of every one, and so on: all kernels come early."""
    import_operations()
    defined = definitions()
    by_name = samples(defined)
    if setting.rehearse:
        by_name = {name: found[:_OF_EACH] for name, found in by_name.items()}
    else:
        untimed_tiles(in_turn=True)
    for at in range(max(map(len, by_name.values()))):
        for name, found in by_name.items():
            if at < len(found):
                run = partial(check, setting, name, found[at], defined[name])
                yield f"{name} {at}: {in_words(found[at])}", run


def import_operations() -> None:
    """Import every module of kernels that registers an operation."""
    for module in pkgutil.walk_packages(kernels.__path__, "te_models.kernels."):
        if not module.name.rpartition(".")[2].startswith("triton"):
            importlib.import_module(module.name)


def samples(defined: dict[str, Definition]) -> dict[str, list[Arguments]]:
    """Return the sampled arguments of each operation, on a CPU, where no kernel runs to make them."""
    from tests.kernels.triton.op_samples import FAMILIES, ON_A_CPU

    torch.manual_seed(0)
    by_name: dict[str, list[Arguments]] = defaultdict(list)
    for family in (family for family in FAMILIES if family not in ON_A_CPU):
        for name, arguments in family(torch.device("cpu")):
            if name in defined:
                by_name[name].append(arguments)
    order = {name: next((i for i, start in enumerate(_FIRST) if name.startswith(start)), 99) for name in by_name}
    return {name: by_name[name] for name in sorted(by_name, key=order.__getitem__)}


def check(setting: Setting, name: str, arguments: Arguments, definition: Definition) -> None:
    """Run one operation on the device and its definition on the CPU."""
    run = partial(on_device, setting)
    found = run(name, arguments)
    want = expected(name, with_tensors(Tensor.clone, arguments), definition, run)
    if len(found) != len(want):
        raise WrongError(f"it returns {len(found)} tensors instead of {len(want)}")
    both = zip(found, want, strict=True)
    wrong = [difference(one, other, definition.of(at)) for at, (one, other) in enumerate(both)]
    if any(wrong):
        raise WrongError("; ".join(f"result {at}: {why}" for at, why in enumerate(wrong) if why is not None))


def on_device(setting: Setting, name: str, arguments: Arguments) -> list[Tensor]:
    """Run an operation on the device; return its results, or what it wrote to, on the CPU. What it leaves unwritten is
    NaN, and 255 in bytes."""
    entry = registered()[name]
    given = list(with_tensors(lambda t: moved(t, setting.device), arguments))
    with poisoned(), setting.on_device():
        results: Any = entry.op(*given)
    setting.synchronize()
    if entry.mutates:
        names = [argument.name for argument in entry.op._opoverload._schema.arguments]
        results = [given[names.index(name)] for name in entry.mutates]
    return [t.cpu() for t in tree_leaves(results) if isinstance(t, Tensor)]


def moved(t: Tensor, device: torch.device) -> Tensor:
    """Return a copy on the device that lies in memory as t does."""
    whole = torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=device)
    whole.copy_(t)
    return whole


class poisoned:
    """Memory that nobody has written is NaN inside."""

    def __enter__(self) -> None:
        self._before = torch.are_deterministic_algorithms_enabled()
        torch.use_deterministic_algorithms(True, warn_only=True)

    def __exit__(self, *_: object) -> None:
        torch.use_deterministic_algorithms(self._before)


def in_words(arguments: Arguments) -> str:
    """Return arguments as a person names them: dtypes and sizes of tensors, other values as they are."""

    def word(a: Any) -> str:
        if not isinstance(a, Tensor):
            return str(a)
        return f"{a.dtype}{list(a.shape)}{'' if a.is_contiguous() else ' strided'}"

    return ", ".join(word(a).removeprefix("torch.") for a in arguments)
