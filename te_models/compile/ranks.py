"""Ranks that compile together: the same graphs, for the same shapes, at the same calls.

Alone, each rank would decide from the shapes that it happens to see: one has a graph for any length while another
still has one for length 9, or one stops to compile while the others wait in a collective of the graph. Two things that
the compiler offers prevent that, and are switched on for the calls of a synchronised function only:

    guard collectives     before a call, ranks tell each other whether they have a graph; if one has none, all compile
    compiler collectives  while compiling, ranks compare the shapes they see; one that differs is dynamic on all

Both run over a separate gloo group, also beside NCCL: the first costs one small all-reduce per call. The compiler
expects an accelerator's device interface there, but the CPU's lacks it; it is lent one meanwhile.
"""

import contextlib
import itertools
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch._dynamo.distributed as dynamo_groups
import torch.distributed as dist
from torch._C._dynamo.eval_frame import set_guard_complete_hook
from torch._dynamo import config
from torch._dynamo.device_interface import CpuInterface

from te_models.kernels.compiling import compiling

_GRACE_S = 5.0
"""How long a rank that gave up waits for others that gave up, too."""
_calls: defaultdict[str, Iterator[int]] = defaultdict(itertools.count)
"""Numbers the calls of `synchronized` for a group, alike on all its ranks."""


class MissingRanksError(RuntimeError):
    """Ranks did not come to compile, or to call, together with this one; the message names them."""


def synchronized(
    timeout_s: float, ranks: dist.ProcessGroup | None = None
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a decorator for compiled functions that all ranks call equally often. Every rank must call this.

    timeout_s: how long a call, and this one, waits for other ranks. It then raises MissingRanksError. ranks: of
    this group only; None: all.
    """
    group = _own_group(timeout_s, ranks)

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if compiling():  # inlined into a graph that is synchronised, or not, by its caller
                return function(*args, **kwargs)
            found: list[MissingRanksError] = []
            try:
                with _together(group, found):
                    result = function(*args, **kwargs)
            except Exception:  # the compiler replaces what is raised inside it by another exception
                if not found:
                    raise
            if found:
                raise found[0]
            return result

        return call

    return decorate


@contextlib.contextmanager
def _together(group: dist.ProcessGroup, found: list[MissingRanksError]) -> Iterator[None]:
    """Switch both collectives on, over `group`. found: receives the error when ranks are missing."""

    def missing(error: RuntimeError) -> MissingRanksError:
        if not found:
            found.append(_missing(group))
            found[0].__cause__ = error
        return found[0]

    class LentDevice:
        """What the compiler enters around its collective."""

        def __init__(self, index: int) -> None:
            """There is one."""

        def __enter__(self) -> None:
            """Nothing to select."""

        def __exit__(self, kind: type | None, error: BaseException | None, trace: object) -> None:
            if isinstance(error, RuntimeError):
                raise missing(error) from None

    def guard_hook(cache_hit: bool) -> bool:
        everyone = torch.tensor(int(cache_hit), dtype=torch.int32, device="cpu")
        try:
            dist.all_reduce(everyone, dist.ReduceOp.MIN, group=group)
        except RuntimeError as error:
            missing(error)  # noted only: an exception that leaves this hook ends the process
            return cache_hit
        return bool(everyone)

    count, device, before = torch.accelerator.device_count, CpuInterface.device, dynamo_groups._COMPILE_PG
    hook = set_guard_complete_hook(guard_hook)
    torch.accelerator.device_count = lambda: max(1, count())
    CpuInterface.device = LentDevice  # type: ignore[assignment,misc]
    dynamo_groups._COMPILE_PG = group
    try:
        with config.patch(enable_compiler_collectives=True):
            yield
    finally:
        set_guard_complete_hook(hook)
        torch.accelerator.device_count, CpuInterface.device = count, device  # type: ignore[misc]
        dynamo_groups._COMPILE_PG = before


def _own_group(timeout_s: float, of: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """Return a new gloo group of the ranks of a group; None: of all."""
    whole = dist.group.WORLD if of is None else of
    assert whole is not None, "torch.distributed is initialised"
    coming = f"te_models/compiling/{whole.group_name}/{next(_calls[whole.group_name])}"
    store, me, ranks = dist.distributed_c10d._get_default_store(), dist.get_rank(), dist.get_process_group_ranks(whole)
    store.set(f"{coming}/{me}", "")
    try:
        # ranks outside of a smaller group do not come here
        group = dist.new_group(
            ranks, backend="cpu:gloo", timeout=timedelta(seconds=timeout_s), use_local_synchronization=of is not None
        )
    except RuntimeError as error:
        raise MissingRanksError(
            f"rank {me} waited in vain to compile a model together with rank {_without(coming, ranks)}: all ranks must "
            "call compile_model, and equally often"
        ) from error
    assert isinstance(group, dist.ProcessGroup), "this rank is in it"
    return group


def _without(key: str, ranks: Iterable[int]) -> str:
    """Name the ranks that have not written `key` into the store."""
    store = dist.distributed_c10d._get_default_store()
    return ", ".join(str(rank) for rank in ranks if not store.check([f"{key}/{rank}"])) or "unknown"


def _missing(group: dist.ProcessGroup) -> MissingRanksError:
    """Name the ranks that are not, like this one, waiting in vain: each that is says so in the store."""
    store = dist.distributed_c10d._get_default_store()
    ranks, me = dist.get_process_group_ranks(group), dist.get_rank()
    key = f"te_models/waiting/{group.group_name}"
    try:
        store.set(f"{key}/{me}", "")
        time.sleep(_GRACE_S)
        names = _without(key, ranks)
    except RuntimeError:  # the store lives in a rank
        return MissingRanksError(f"rank {me} waited in vain for another rank; rank 0, which keeps the store, is gone")
    return MissingRanksError(
        f"rank {me} waited in vain to call a compiled model together with rank {names}: all ranks must call it "
        "equally often, and one that fails must not leave the others waiting"
    )
