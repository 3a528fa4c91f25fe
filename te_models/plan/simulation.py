"""One rank of many, simulated: a process group whose collectives return at once, tensors without values, and a record
of what a piece of work allocates and sends.

torch's fake process group and fake tensors: every operation runs as far as shapes and dtypes go, for any number of
ranks, on one machine without their memory.
"""

import contextlib
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Self

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from te_models.layers import QuantizedTensor
from te_models.layers.collectives import resolve_group

from ..config import ConfigError
from .result import Moved, Traffic, added_traffic

_KINDS = {
    "all_gather": ("all_gather", "allgather"),
    "reduce_scatter": ("reduce_scatter",),
    "all_reduce": ("all_reduce", "allreduce"),
    "all_to_all": ("all_to_all", "alltoall"),
    "broadcast": ("broadcast",),
    "send": ("send",),
}
"""Collective -> what the names of torch's operations contain; `c10d` and `_c10d_functional` spell them differently."""


@dataclass
class Apart:
    """What a piece of work took by itself. peak: bytes at its highest point beyond those before."""

    peak: float = 0.0
    traffic: Moved = field(default_factory=dict)


class Recorder(TorchDispatchMode):
    """Counts, in a `with`, the bytes of the storages that live and the collectives that run.

    groups: name of a process group -> the dimension of the mesh that it is. live, peak: bytes, now and at most, of
    storages that were created or used inside. traffic: (collective, dimension) -> what it moved.
    """

    def __init__(self, groups: Mapping[str, str]) -> None:
        super().__init__()
        self._groups = groups
        self._storages: dict[int, int] = {}
        self._fake: Any = fake_tensor_class() if without_values() else None
        self.live: float = 0
        self.peak: float = 0
        self.traffic: Moved = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Whether torch looks out for a compiler at each operation, of which a plan has tens of thousands."""
        return False

    def hold(self, tensors: Any) -> None:
        """Count tensors that were made before."""
        for tensor in tree_leaves(tensors):
            if isinstance(tensor, Tensor):
                self._see(tensor)

    def add(self, held: float, peak: float, traffic: Moved) -> None:
        """Count work that is known and not done: bytes that stay, bytes at its highest point, and collectives."""
        self.peak = max(self.peak, self.live + peak)
        self.live += held
        self.traffic = added_traffic(self.traffic, traffic)

    @contextlib.contextmanager
    def apart(self) -> Iterator[Apart]:
        """Inside, peak and traffic are recorded by themselves, in what the `with` yields, and count as before."""
        found, before, peak, traffic = Apart(), self.live, self.peak, self.traffic
        self.peak, self.traffic = before, {}
        try:
            yield found
        finally:
            found.peak, found.traffic = self.peak - before, self.traffic
            self.peak, self.traffic = max(peak, self.peak), added_traffic(traffic, self.traffic)

    def __enter__(self) -> Self:
        resize = self._resize = torch.UntypedStorage.resize_

        def measured(storage: torch.UntypedStorage, size: int) -> Any:
            result = resize(storage, size)
            if id(storage) in self._storages:
                self._measure(storage)
            return result

        # FSDP2 frees and fills the buffers that it gathers into so, and no operation tells
        torch.UntypedStorage.resize_ = measured  # pyright: ignore[reportAttributeAccessIssue]
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        torch.UntypedStorage.resize_ = self._resize
        super().__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func is torch.ops.prim.device.default and self._fake is not None and isinstance(args[0], self._fake):
            return args[0].fake_device  # a fifth of all that is asked
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                self._see(tensor)
        if "c10d" in func.namespace and "wait" not in func._opname:
            self._count(func._opname, args, result)
        return result

    def _see(self, tensor: Tensor) -> None:
        inner = getattr(tensor, "_local_tensor", None)
        if inner is not None:
            return self._see(inner)
        flatten: Any = getattr(tensor, "__tensor_flatten__", None)
        if flatten is not None:
            names, _ = flatten()
            for name in names:
                self._see(getattr(tensor, name))
            return None
        if tensor.is_meta:
            return None
        storage = tensor.untyped_storage()
        if id(storage) not in self._storages:
            self._storages[id(storage)] = 0
            weakref.finalize(storage, self._free, id(storage))
            self._measure(storage)
        return None

    def _measure(self, storage: torch.UntypedStorage) -> None:
        grown = storage.nbytes() - self._storages[id(storage)]
        self._storages[id(storage)] += grown
        self.live += grown
        self.peak = max(self.peak, self.live)

    def _free(self, key: int) -> None:
        self.live -= self._storages.pop(key, 0)

    def _count(self, name: str, args: tuple[Any, ...], result: Any) -> None:
        kind = next((kind for kind, words in _KINDS.items() if any(word in name for word in words)), None)
        if kind is None:  # barriers and the like move nothing
            return
        group = _group_of(args)
        # where an operation has both tensors, one is the ranks' together and the other this rank's part
        payload = max(_bytes(part) for part in (*args, *(result if isinstance(result, tuple) else (result,))))
        size = group.size()
        kind = "send" if kind == "all_to_all" and _to_one(args, group) else kind
        key = kind, self._groups.get(group.group_name, group.group_name)
        self.traffic[key] = self.traffic.get(key, Traffic()) + Traffic.of(kind, payload, size)


def _bytes(values: Any) -> int:
    return sum(value.numel() * value.element_size() for value in tree_leaves(values) if isinstance(value, Tensor))


def _to_one(args: tuple[Any, ...], group: dist.ProcessGroup) -> bool:
    """Whether all that an all-to-all of these arguments sends goes to one other rank, as in a ring."""
    sizes = args[2] if len(args) > 2 and isinstance(args[2], list) else []
    if not sizes or not all(isinstance(size, int) for size in sizes):
        return False
    return sizes[group.rank()] == 0 and sum(size > 0 for size in sizes) == 1


def _group_of(args: tuple[Any, ...]) -> dist.ProcessGroup:
    """Return the process group among an operation's arguments: an object of c10d, at the end a name elsewhere."""
    found = next((argument for argument in args if isinstance(argument, torch.ScriptObject)), None)
    if found is not None:
        return dist.ProcessGroup.unbox(found)
    last = args[-1]
    return resolve_group(last) if isinstance(last, str) else last


@contextlib.contextmanager
def fake_ranks(ranks: int, rank: int = 0) -> Iterator[None]:
    """Inside, this process is rank `rank` of `ranks`: one whose shards of sharded parameters are the first ones.

    Raises ConfigError where the process has a process group: only one can be the default.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if dist.is_initialized():
        raise ConfigError("this process belongs to a process group; a plan is made in a process of its own")
    dist.init_process_group("fake", rank=rank, world_size=ranks, store=FakeStore())
    try:
        with _first_shards():
            yield
    finally:
        dist.destroy_process_group()


@contextlib.contextmanager
def _first_shards() -> Iterator[None]:
    """Inside, FSDP2 makes no tensor for each rank, which took most of a plan's time: from a parameter it cuts the first
    rank's shard, the only one that it uses here, and parameters that are cut along another dimension than their first
    are put together, and their gradients taken apart, as a whole."""
    from torch.distributed.fsdp._fully_shard import _fsdp_collectives, _fsdp_param

    every = getattr(_fsdp_param, "_chunk_with_empty", None)  # another torch may call it otherwise

    def first(tensor: Tensor, num_chunks: int, dim: int) -> list[Tensor]:
        if isinstance(tensor, QuantizedTensor):  # whose shards are whole blocks
            return every(tensor, num_chunks, dim) if every is not None else []
        return [tensor.narrow(dim, 0, -(-tensor.size(dim) // num_chunks))] * num_chunks

    if every is not None:
        _fsdp_param._chunk_with_empty = first  # pyright: ignore[reportPrivateImportUsage]
    _fsdp_collectives.torch = _WithoutChunks()  # pyright: ignore[reportPrivateImportUsage]
    try:
        yield
    finally:
        _fsdp_collectives.torch = torch  # pyright: ignore[reportPrivateImportUsage]
        if every is not None:
            _fsdp_param._chunk_with_empty = every  # pyright: ignore[reportPrivateImportUsage]


class _Chunks(NamedTuple):
    """What `torch.chunk` of these arguments would return."""

    of: Tensor
    chunks: int
    dim: int


class _WithoutChunks:
    """torch, where `cat` of what `chunk` returned is one operation, without values."""

    chunk = _Chunks

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def cat(self, tensors: Any, dim: int = 0, *, out: Tensor | None = None) -> Tensor:
        """Return `out` where it is there to be filled, else a tensor of the shape that the chunks have together."""
        if not isinstance(tensors, _Chunks):
            return torch.cat(tensors, dim) if out is None else torch.cat(tensors, dim, out=out)
        if out is not None:
            return out
        shape = list(tensors.of.shape)
        shape[tensors.dim] //= tensors.chunks
        shape[dim] *= tensors.chunks
        return tensors.of.new_empty(shape)


def without_values() -> bool:
    """Whether tensors that are made now are inside `fake_tensors`."""
    return isinstance(torch.empty(0, device="cpu"), fake_tensor_class())


def fake_tensor_class() -> Any:
    """Return torch's class of tensors without values."""
    from torch._subclasses.fake_tensor import FakeTensor

    return FakeTensor


@contextlib.contextmanager
def fake_tensors() -> Iterator[None]:
    """Inside, tensors have shapes and dtypes, and no values."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode(allow_non_fake_inputs=True), torch.random.fork_rng(devices=[]):
        yield
