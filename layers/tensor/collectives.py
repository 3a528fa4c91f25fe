"""Collectives over quantized tensors: what hands whole tensors on moves their fields, bit for bit; sums are refused.

torch's in-place collectives do not declare what they write, so nothing about them follows from their schemas: each one
is listed here, and one that is not is an error. A tensor travels as one buffer of bytes that starts with a digest of
its class, quantizer and shape, and what arrives is checked against it before anything is written. Every rank waits for
its transfer before it goes on, whatever `async_op` says.
"""

import hashlib
import inspect
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from .fsdp import pack_fields, unpack_fields
from .quantized_tensor import QuantizedTensor

_NAMESPACES = {"c10d", "c10d_functional", "_c10d_functional", "_c10d_functional_autograd", "symm_mem", "_dtensor"}

# The argument that each of these writes, or None. A list of whole tensors may be quantized there, and its fields move.
_WRITES: dict[str, str | None] = {
    "c10d::broadcast_": "tensors",
    "c10d::gather_": "output_tensors",
    "c10d::scatter_": "output_tensors",
    "c10d::allgather_": "output_tensors",
    "c10d::allgather_coalesced_": "output_lists",
    "c10d::_allgather_base_": "output_tensor",
    "c10d::allgather_into_tensor_coalesced_": "outputs",
    "c10d::alltoall_": "output_tensors",
    "c10d::alltoall_base_": "output",
    "c10d::send": None,
    "c10d::barrier": None,
    "c10d::monitored_barrier_": None,
}
_MOVES_FIELDS = {
    "c10d::broadcast_",
    "c10d::gather_",
    "c10d::scatter_",
    "c10d::allgather_",
    "c10d::allgather_coalesced_",
}

# Those that return new, plain tensors, by their names in the namespaces of functional collectives.
_RETURNS_VALUES = {
    "all_gather_into_tensor",
    "all_gather_into_tensor_coalesced",
    "all_to_all_single",
    "broadcast",
    "shard_dim_alltoall",
}
_HEADER = 16  # bytes; `pack_fields` aligns fields to as many


def is_collective(func: Any) -> bool:
    """Whether an operation is one of torch's between processes."""
    return func.namespace in _NAMESPACES


def run_collective(func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Run a collective that has a quantized tensor among its arguments.

    Plain outputs receive the values of quantized inputs. ValueError for a reduction, for an operation that is not
    known, and for tensors that are not alike: one class, quantizer and shape.
    """
    full, name = func._schema.name, func._schema.name.rpartition("::")[2]
    found = next(x for x in tree_leaves((args, kwargs)) if isinstance(x, QuantizedTensor))
    if name == "wait_tensor":
        return found.detach()  # whatever wrote it has waited
    if "reduce" in name:
        raise ValueError(
            f"{name} cannot reduce a {type(found).__name__}, because the sum of quantized values has another scale; "
            "reduce dequantize() of it, and copy_ the result, or reduce gradients and masters, which are plain"
        )
    if full not in _WRITES and name not in _RETURNS_VALUES:
        raise ValueError(
            f"{name} does not know a {type(found).__name__}; allowed: broadcast, gather, scatter and all_gather, which "
            "move its fields, or dequantize() for its values"
        )
    for x in tree_leaves((args, kwargs)):
        if isinstance(x, QuantizedTensor):
            x.require_equal_shards(f"{name}, of full_tensor or redistribute,")
    arguments = {a.name: args[i] if i < len(args) else kwargs.get(a.name) for i, a in enumerate(func._schema.arguments)}
    outputs = arguments.get(_WRITES.get(full) or "")
    written = [x for x in tree_leaves(outputs) if isinstance(x, Tensor)]
    quantized = any(isinstance(x, QuantizedTensor) for x in written)
    if full == "c10d::broadcast_" and _others_are_plain():
        raise ValueError(
            f"broadcast_from_rank0 receives into plain tensors on the other ranks, and rank 0 has a "
            f"{type(found).__name__}; pass a state dict of dequantize()d values, which are quantized anew where they "
            "are loaded, or load the state dict on every rank"
        )
    if full in _MOVES_FIELDS and (quantized or name == "gather_"):  # a rank that sends knows its own tensor only
        return _move_fields(func, args, kwargs, outputs, written)
    if quantized:
        raise ValueError(
            f"{name} cannot write into a {type(found).__name__}, whose parts are not parts of its fields; use "
            "all_gather, gather or scatter with lists of whole tensors, or a plain tensor for the values"
        )
    args, kwargs = tree_map(plain_value, (args, kwargs))
    return func(*args, **kwargs)


def _move_fields(func: Any, args: tuple, kwargs: dict[str, Any], outputs: Any, written: list[Tensor]) -> Any:
    """Run an operation over the bytes of its tensors in place of them, and fill what it writes from what arrived."""
    tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
    first = next(x for x in tensors if isinstance(x, QuantizedTensor))
    for x in tensors:
        if not isinstance(x, QuantizedTensor) or _form(x) != _form(first):
            raise ValueError(
                f"{func._schema.name.rpartition('::')[2]} moves the fields of quantized tensors, which have to be of "
                f"one class, quantizer and shape; got {first!r} and {_described(x)}"
            )
    filled = [x for x in written if isinstance(x, QuantizedTensor)]
    for x in filled:
        x.require_own_scale("received into")
    header = _header(first)
    buffers: dict[int, Tensor] = {}

    def as_bytes(x: Any) -> Any:
        if not isinstance(x, QuantizedTensor):
            return x
        if id(x) not in buffers:
            buffers[id(x)] = torch.cat([header, pack_fields(x.inner_tensors())])
        return buffers[id(x)]

    sent, options = tree_map(as_bytes, (args, kwargs))
    result = func(*sent, **options)
    work = result[-1] if isinstance(result, tuple) else result
    work.wait()
    if not all(torch.equal(buffers[id(x)][:_HEADER], header) for x in filled):
        raise ValueError(
            f"{func._schema.name.rpartition('::')[2]} received something else than the fields of {first!r}; every rank "
            "has to pass tensors of one class, quantizer and shape"
        )
    for x in filled:
        x.overwrite(unpack_fields(x.inner_tensors(), buffers[id(x)][_HEADER:]))
    return (outputs, work) if isinstance(result, tuple) else work


def _form(x: QuantizedTensor) -> tuple[Any, ...]:
    layout = [(name, tuple(t.shape), t.dtype) for name, t in x.inner_tensors().items()]
    return type(x).__name__, repr(x.quantizer), tuple(x.matrix_shape), layout


def _header(x: QuantizedTensor) -> Tensor:
    """Return [16] uint8 that tells tensors of another class, quantizer or shape apart."""
    digest = hashlib.sha256(repr(_form(x)).encode()).digest()[:_HEADER]
    return torch.tensor(list(digest), dtype=torch.uint8, device=x.device)


def _described(x: Tensor) -> str:
    return repr(x) if isinstance(x, QuantizedTensor) else f"a plain tensor of shape {tuple(x.shape)}"


def plain_value(x: Any) -> Any:
    """Return the values of a quantized tensor, anything else as it is."""
    return x.dequantize() if isinstance(x, QuantizedTensor) else x


def _others_are_plain() -> bool:
    """Whether torch broadcasts a distributed state dict, for which other ranks allocate plain tensors."""
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_globals.get("__name__") == "torch.distributed._state_dict_utils":
            return True
        frame = frame.f_back
    return False


# --- what torch composes of collectives out of sight ------------------------------------------------------------------


def _broadcast_coalesced(process_group: Any, tensors: list[Tensor], buffer_size: int, src: int = 0) -> None:
    """Do as torch's function of this name, by which DistributedDataParallel starts, but move quantized tensors' fields.

    torch's flattens tensors into one of plain values before any operation on a quantized one could see the broadcast.
    """
    unquantized = [x for x in tensors if not isinstance(x, QuantizedTensor)]
    if unquantized or not tensors:
        _torch_broadcast_coalesced(process_group, unquantized, buffer_size, src)
    options = dist.BroadcastOptions()
    options.rootRank = src
    for x in tensors:
        if isinstance(x, QuantizedTensor):
            process_group.broadcast([x], options).wait()


if dist.is_available():
    _torch_broadcast_coalesced = dist._broadcast_coalesced  # type: ignore[attr-defined]
    dist._broadcast_coalesced = _broadcast_coalesced  # type: ignore[assignment]
