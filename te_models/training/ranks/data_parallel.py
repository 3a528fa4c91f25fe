"""Data parallelism over processes that torchrun started: which windows are mine, and the mean of everybody's gradients.

Every rank holds the whole model, but for experts where they are distributed (`expert_ranks`). Gradients are averaged in
`buckets`; the reduction gives the same bits on every rank, so parameters never drift apart. Without torchrun's
environment there is one rank and nothing here communicates. Parameters that FSDP2 shards are no concern of this file:
their gradients arrive as averages.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from te_models.layers.collectives import check_group

from ...parallel.parts import ShardOfParameter
from .buckets import BUCKET, Bucket, InOrder, ScatteredBucket, filled

if TYPE_CHECKING:
    from .monitor import RankMonitor

TIMEOUT = timedelta(minutes=10)
"""How long ranks wait for one that does not answer, unless the configuration says otherwise."""


@dataclass(frozen=True)
class Ranks:
    """This process's place. `rank` 0 writes files and shows progress. local_rank: its device; None: the current one.
    monitor: knows whether the other ranks still answer; None: only their collectives tell. group: the ranks that are
    counted, where they are a part of all."""

    rank: int = 0
    world_size: int = 1
    local_rank: int | None = None
    owns_group: bool = False
    monitor: RankMonitor | None = None
    group: dist.ProcessGroup | None = None

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def leave(self) -> None:
        """Leave the process group if this run joined it; one of its caller's stays."""
        if self.owns_group:
            dist.destroy_process_group()

    @contextlib.contextmanager
    def monitored(self, timeout: timedelta) -> Iterator[Ranks]:
        """Yield the ranks with a monitor while the block runs. Raises LostRankError, with its number, where a rank does
        not answer for `timeout` or fails: instead of the collective's error, or by ending a process that cannot leave.
        """
        if self.world_size == 1:
            yield self
            return
        from .monitor import RankMonitor

        store: Any = dist.distributed_c10d._get_default_store()  # there is no public way to the group's store
        if store is None:  # MPI's groups have none
            yield self
            return
        run = _sendable(torch.tensor(secrets.randbits(62), device="cpu"))
        dist.broadcast(run, 0)  # a process may train more than once
        with contextlib.suppress(NotImplementedError, RuntimeError):  # not every kind of store can be copied
            store = store.clone()  # one connection serves one thread
        own = dist.PrefixStore(f"te_models/{int(run)}", store)  # pyright: ignore[reportPrivateImportUsage]
        monitor = RankMonitor(own, self.rank, self.world_size, timeout.total_seconds())
        error: BaseException | None = None
        try:
            yield dataclasses.replace(self, monitor=monitor)
        except BaseException as raised:
            error = monitor.explain(raised)
            if error is not raised:
                raise error from raised
            raise
        finally:
            monitor.close(error)


def ranks_from_environment(device: str, timeout: timedelta = TIMEOUT) -> Ranks:
    """Return the place in the process group that the caller has joined, or join the one that torchrun described (RANK,
    WORLD_SIZE, MASTER_ADDR, ...); one rank without either. timeout: of the collectives of a group that is joined."""
    joined = dist.is_available() and dist.is_initialized()
    if not joined and int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return Ranks()
    if not joined:
        # numbers on the host, such as losses and random states, are exchanged, too
        backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            from torch.distributed.rendezvous import rendezvous

            store, rank, world_size = next(rendezvous("env://", timeout=timeout))
            store = _store_of_this_start(store, rank, world_size, timeout)
            dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)
        else:
            dist.init_process_group(backend, timeout=timeout)
    local = os.environ.get("LOCAL_RANK")
    return Ranks(dist.get_rank(), dist.get_world_size(), None if local is None else int(local), not joined)


def _store_of_this_start(store: Any, rank: int, world_size: int, timeout: timedelta) -> Any:
    """Return a part of the store of torchrun's agents in which no rank of an earlier start has written.

    Agents keep one store over all restarts, and a rank that read an address there which a rank of the start before had
    written was refused the connection. No variable says which start it is: agents count restarts each for itself. So
    each rank asks under a number that no other has, and rank 0 answers with its number until every rank has said that
    it knows it; an answer to a rank that is gone does no harm."""
    own, until = secrets.token_hex(8), time.monotonic() + timeout.total_seconds()
    if rank != 0:
        store.set(f"start/{rank}", own)
        start = store.get(f"start/{rank}/{own}").decode()
        store.set(f"start/{start}/{rank}", "known")
        return dist.PrefixStore(start, store)  # pyright: ignore[reportPrivateImportUsage]
    answered = dict.fromkeys(range(1, world_size), b"")
    while answered:
        for other, number in list(answered.items()):
            if store.check([f"start/{own}/{other}"]):
                del answered[other]
            elif store.check([f"start/{other}"]) and (asked := store.get(f"start/{other}")) != number:
                store.set(f"start/{other}/{asked.decode()}", own)
                answered[other] = asked
        if answered and time.monotonic() > until:
            raise dist.DistStoreError(f"rank {min(answered)} has not joined within {timeout.total_seconds():g} s")
        time.sleep(0.01 if answered else 0.0)
    return dist.PrefixStore(own, store)  # pyright: ignore[reportPrivateImportUsage]


def average_gradients(
    parameters: Iterable[torch.nn.Parameter],
    ranks: Ranks,
    *,
    distributed: Iterable[torch.nn.Parameter] = (),
    copies: dist.ProcessGroup | None = None,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Replace every gradient, `.grad` or `.main_grad`, by its mean over the ranks. A parameter without a gradient must
    lack it on all of them.

    group: the ranks that are meant, where others have other parts of the layers (`tp`): `ranks` counts those of it
    alone; None: all.
    distributed: the parameters that only a part of the ranks has, as `GPTModel.expert_parameters` lists them.
    Their gradients are sums over the ranks that share a copy of all experts, and are summed over `copies`, the ranks
    that have the same ones, too; None: no other rank has them.
    """
    for name, process_group in {"copies": copies, "group": group}.items():
        if process_group is not None:
            check_group(name, process_group)
    buckets = gradient_buckets(parameters, ranks, distributed=distributed, copies=copies, group=group)
    InOrder(buckets).finish()


def gradient_buckets(
    parameters: Iterable[torch.nn.Parameter],
    ranks: Ranks,
    *,
    distributed: Iterable[torch.nn.Parameter] = (),
    copies: dist.ProcessGroup | None = None,
    group: dist.ProcessGroup | None = None,
    limit: int = BUCKET,
    places: Mapping[int, ShardOfParameter] | None = None,
) -> list[Bucket]:
    """Return what `average_gradients` sums, in the order of the parameters. limit: bytes of a bucket. places: see
    `ScatteredBucket`; None: each rank needs the whole gradients."""
    if ranks.world_size == 1 and copies is None:
        return []
    own = {id(parameter) for parameter in distributed}
    everyone: list[torch.nn.Parameter] = []
    few: list[torch.nn.Parameter] = []
    for parameter in parameters:
        (few if id(parameter) in own else everyone).append(parameter)
    found: list[Bucket] = []
    kind: Callable[..., Bucket] = Bucket if places is None else partial(ScatteredBucket, places=places)
    if ranks.world_size > 1:
        of_all = partial(kind, ranks.group if group is None else group, ranks.world_size)
        found += filled(of_all, everyone, limit)
    shared = copies is not None and copies.size() > 1
    return [*found, *filled(partial(kind, copies, ranks.world_size, shared), few, limit)]


def mean_over_ranks(value: torch.Tensor, ranks: Ranks) -> torch.Tensor:
    """Return the mean of a tensor over the ranks, on the tensor's device."""
    if ranks.world_size == 1:
        return value
    total = _sendable(value).clone()
    dist.all_reduce(total, group=ranks.group)
    return (total / ranks.world_size).to(value.device)


def largest_over_ranks(values: torch.Tensor, ranks: Ranks) -> torch.Tensor:
    """Return, element by element, the largest value that a rank gave, on the tensor's device."""
    if ranks.world_size == 1:
        return values
    if ranks.monitor is not None:
        ranks.monitor.check()
    largest = _sendable(values).clone()
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return largest.to(values.device)


def _sendable(value: torch.Tensor) -> torch.Tensor:
    """Return the tensor where the process group takes it: NCCL takes none in main memory."""
    devices = [pair.partition(":")[0] for pair in dist.get_backend_config().split(",")]
    return value if value.device.type in devices else value.to(devices[0])


def gather_tensors(tensors: dict[str, torch.Tensor], ranks: Ranks) -> dict[str, torch.Tensor]:
    """Return every rank's tensors under `{rank}.{name}`; all ranks give the same names and shapes."""
    result = {}
    for name, tensor in sorted(tensors.items()):
        parts = [tensor]
        if ranks.world_size > 1:
            sent = _sendable(tensor)
            parts = [torch.empty_like(sent) for _ in range(ranks.world_size)]
            dist.all_gather(parts, sent)
        result |= {f"{rank}.{name}": part.to(tensor.device) for rank, part in enumerate(parts)}
    return result


def barrier(ranks: Ranks) -> None:
    """Wait until every rank is here, however long rank 0 writes: the collectives of gradients give up after minutes."""
    if ranks.monitor is not None:
        ranks.monitor.barrier()
    elif ranks.world_size > 1:
        dist.barrier()
