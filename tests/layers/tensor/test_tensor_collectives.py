"""Collectives over quantized tensors, on two ranks: every operation that torch's dispatcher lists, in every format."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.distributed._symmetric_memory
import torch.distributed.tensor
from torch import Tensor, nn
from torch.distributed._state_dict_utils import _broadcast_state_dict
from torch.nn.parallel import DistributedDataParallel

import te_models.layers as te
from tests.build import weight_quantizers
from tests.compare import raw, refused, same_bits
from tests.ranks import everyones, on_ranks

RANKS = 2
NAMESPACES = ("c10d", "c10d_functional", "_c10d_functional", "_c10d_functional_autograd", "symm_mem", "_dtensor")
FORMATS = weight_quantizers() | {"nvfp4_rht": te.NVFP4Quantizer(with_rht=True)}


def operations() -> list[str]:
    """Every operation between processes that this torch has and that takes a tensor, by its full name."""
    names = [n for n in torch._C._dispatch_get_all_op_names() if n.partition("::")[0] in NAMESPACES]
    return sorted(n for n in names if any("Tensor" in str(a.type) for a in operation(n)._schema.arguments))


def operation(name: str) -> Any:
    namespace, _, rest = name.partition("::")
    base, _, overload = rest.partition(".")
    return getattr(getattr(getattr(torch.ops, namespace), base), overload or "default")


def make(kind: str, seed: int, rows: int = 128) -> te.QuantizedTensor:
    """A new tensor of a format; "rows of mxfp8" and "3 of mxfp8" are grouped."""
    return made(kind, seed, rows).clone()


@functools.cache
def made(kind: str, seed: int, rows: int) -> te.QuantizedTensor:
    generator = torch.Generator().manual_seed(seed)
    count, _, name = kind.rpartition(" of ")
    if count == "rows":
        x, splits = torch.randn(rows, 128, generator=generator), torch.tensor([seed % rows, rows - seed % rows])
        return te.GroupedRows.quantize_rows(x, splits, FORMATS[name])
    if count:
        return FORMATS[name].quantize_grouped(torch.randn(int(count), rows, 128, generator=generator))
    return FORMATS[name].quantize(torch.randn(rows, 128, generator=generator))


ROWS_OF = tuple(f"rows of {name}" for name in ("float8", "mxfp8", "nvfp4_1d"))
KINDS = [*FORMATS, *(f"3 of {name}" for name in FORMATS), *ROWS_OF]


def stored(x: te.QuantizedTensor) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in x.inner_tensors().items()}


def equal(x: te.QuantizedTensor, other: dict[str, Tensor]) -> bool:
    mine = x.inner_tensors()
    return mine.keys() == other.keys() and all(torch.equal(raw(t), raw(other[n])) for n, t in mine.items())


def group() -> Any:
    return dist.group.WORLD.boxed()


def me() -> int:
    return dist.get_rank()


# --- operations that move fields, each with what every tensor must be afterwards --------------------------------------


def broadcast_(kind: str, op: Any) -> None:
    for root in range(RANKS):
        x = make(kind, me())
        fields = [field.data_ptr() for field in x.fields.values()]
        (found,), work = op([x], group(), root, 0)
        work.wait()
        assert found is x and same_bits(x, make(kind, root)) and equal(x, stored(make(kind, root)))
        assert [field.data_ptr() for field in x.fields.values()] == fields


def gather_(kind: str, op: Any) -> None:
    into = [[make(kind, 7), make(kind, 8)]] if me() == 1 else []
    op(into, [make(kind, me())], group(), 1).wait()
    for rank, x in enumerate(into[0] if into else []):
        assert equal(x, stored(make(kind, rank)))


def scatter_(kind: str, op: Any) -> None:
    x = make(kind, 7)
    op([x], [[make(kind, 2), make(kind, 3)]] if me() == 1 else [], group(), 1)[1].wait()
    assert equal(x, stored(make(kind, 2 + me())))


def allgather_(kind: str, op: Any) -> None:
    into = [make(kind, 7), make(kind, 8)]
    op([into], [make(kind, me())], group())[1].wait()
    assert all(equal(x, stored(make(kind, rank))) for rank, x in enumerate(into))
    plain = [torch.zeros(into[0].shape) for _ in range(RANKS)]
    op([plain], [make(kind, me())], group())[1].wait()
    assert all(torch.equal(x, make(kind, rank).dequantize()) for rank, x in enumerate(plain))
    before = stored(into[0])
    refused(lambda: op([[into[0], plain[1]]], [make(kind, me())], group()), "one class, quantizer and shape")
    assert equal(into[0], before)


def allgather_coalesced_(kind: str, op: Any) -> None:
    into = [[make(kind, 7), make(kind, 8)] for _ in range(RANKS)]
    op(into, [make(kind, me()), make(kind, me() + 2)], group()).wait()
    for rank, (first, second) in enumerate(into):
        assert equal(first, stored(make(kind, rank))) and equal(second, stored(make(kind, rank + 2)))


# --- operations that read values and write plain tensors --------------------------------------------------------------


def gathered(kind: str) -> Tensor:
    return torch.cat([make(kind, rank).dequantize() for rank in range(RANKS)])


def _allgather_base_(kind: str, op: Any) -> None:
    into = torch.zeros(gathered(kind).shape)
    op(into, make(kind, me()), group())[1].wait()
    assert torch.equal(into, gathered(kind))
    both_refused(op, make(kind, 7), lambda x: (x, make(kind, me()), group()))


def allgather_into_tensor_coalesced_(kind: str, op: Any) -> None:
    into = torch.zeros(gathered(kind).shape)
    op([into], [make(kind, me())], group()).wait()
    assert torch.equal(into, gathered(kind))
    both_refused(op, make(kind, 7), lambda x: ([x], [make(kind, me())], group()))


def alltoall_(kind: str, op: Any) -> None:  # gloo has none of plain lists
    both_refused(op, make(kind, 7), lambda x: ([x, x], [make(kind, 0), make(kind, 1)], group()))


def alltoall_base_(kind: str, op: Any) -> None:
    x, into = make(kind, me()), torch.zeros(make(kind, 0).shape)
    if x.shape[0] % RANKS == 0:
        op(into, x, group(), [], []).wait()
        assert torch.equal(into, torch.cat([make(kind, r).dequantize().chunk(RANKS)[me()] for r in range(RANKS)]))
    both_refused(op, make(kind, 7), lambda x: (x, x, group(), [], []))


def send(kind: str, op: Any) -> None:
    x = make(kind, 0)
    if me() == 0:
        op([x], group(), 1, 0).wait()
    else:
        plain = torch.zeros(x.shape)
        torch.ops.c10d.recv_([plain], group(), 0, 0).wait()
        assert torch.equal(plain, x.dequantize())


def barrier(kind: str, op: Any) -> None:
    op(make(kind, 0), group(), []).wait()


def monitored_barrier_(kind: str, op: Any) -> None:
    op(make(kind, 0), group(), [], 60_000, False)


def functional(*more: Any, coalesced: bool = False) -> Callable[[str, Any], None]:
    def case(kind: str, op: Any) -> None:
        x, name = make(kind, me()), dist.group.WORLD.group_name
        last = ("", [0, 1], RANKS) if op.namespace == "c10d_functional" else (*more, name)
        if op.namespace == "c10d_functional" and more and more[0] != RANKS:
            last = (*more, *last)
        result = op([x] if coalesced else x, *last)
        value = funcol.wait_tensor(result[0] if coalesced else result)
        base = op._schema.name.partition("::")[2]
        if base.startswith("all_gather"):
            assert torch.equal(value, gathered(kind))
        elif base == "broadcast":
            assert torch.equal(value, make(kind, 0).dequantize())
        else:
            parts = [make(kind, r).dequantize().chunk(RANKS)[me()] for r in range(RANKS)]
            assert torch.equal(value, torch.cat(parts))
        assert type(value) is Tensor and equal(x, stored(make(kind, me())))

    return case


def all_to_all_single(kind: str, op: Any) -> None:
    rows = make(kind, 0).shape[0]
    if rows % RANKS == 0:
        functional([rows // RANKS] * RANKS, [rows // RANKS] * RANKS)(kind, op)


def wait_tensor(kind: str, op: Any) -> None:
    x = make(kind, me())
    assert same_bits(op(x), x)


def shard_dim_alltoall(kind: str, op: Any) -> None:
    x = make(kind, me()).dequantize()
    if x.dim() == 2:
        name = dist.group.WORLD.group_name
        assert torch.equal(op(make(kind, me()), 0, 1, name), op(x, 0, 1, name))


KNOWN: dict[str, Callable[[str, Any], None]] = {
    "c10d::broadcast_": broadcast_,
    "c10d::gather_": gather_,
    "c10d::scatter_": scatter_,
    "c10d::allgather_": allgather_,
    "c10d::allgather_coalesced_": allgather_coalesced_,
    "c10d::_allgather_base_": _allgather_base_,
    "c10d::allgather_into_tensor_coalesced_": allgather_into_tensor_coalesced_,
    "c10d::alltoall_": alltoall_,
    "c10d::alltoall_base_": alltoall_base_,
    "c10d::send": send,
    "c10d::barrier": barrier,
    "c10d::monitored_barrier_": monitored_barrier_,
    "_dtensor::shard_dim_alltoall": shard_dim_alltoall,
}
for namespace in ("c10d_functional", "_c10d_functional", "_c10d_functional_autograd"):
    KNOWN |= {
        f"{namespace}::wait_tensor": wait_tensor,
        f"{namespace}::all_gather_into_tensor": functional(RANKS),
        f"{namespace}::all_gather_into_tensor_coalesced": functional(RANKS, coalesced=True),
        f"{namespace}::broadcast": functional(0),
        f"{namespace}::all_to_all_single": all_to_all_single,
    }


def both_refused(op: Any, x: te.QuantizedTensor, arguments: Callable[[te.QuantizedTensor], tuple]) -> None:
    before = stored(x)
    refused(lambda: op(*arguments(x)), "cannot write into a", "a plain tensor for the values")
    assert equal(x, before)


def argument_of(argument: Any, x: te.QuantizedTensor) -> Any:
    """Something that a schema's argument takes, quantized where it is a tensor."""
    kind, named = str(argument.type), {"ranks": [0, 1], "group_size": RANKS}
    if argument.name in named:
        return named[argument.name]
    values: dict[str, Any] = {
        "Tensor": x,
        "List[Tensor]": [x],
        "List[List[Tensor]]": [[x, x]],
        "List[Optional[Tensor]]": [None],
        "List[str]": ["isend"],
        "List[int]": [0],
        "str": "" if argument.name == "tag" else "sum",
        "int": 0,
        "SymInt": 0,
        "bool": False,
        "Any": dist.group.WORLD.group_name,
        "__torch__.torch.classes.c10d.ProcessGroup": group(),
        "__torch__.torch.classes.c10d.ReduceOp": torch.classes.c10d.ReduceOp(),
    }
    if kind.startswith("Optional["):
        return None
    return values.get(kind, [])


def unknown(kind: str, op: Any) -> None:
    x = make(kind, me())
    before, reduction = stored(x), "reduce" in op._schema.name.partition("::")[2]
    if any("SymmetricMemory" in str(a.type) for a in op._schema.arguments):
        return  # no such object without a device
    arguments = [argument_of(a, x) for a in op._schema.arguments]
    positional = [v for v, a in zip(arguments, op._schema.arguments, strict=True) if not a.kwarg_only]
    named = {a.name: v for v, a in zip(arguments, op._schema.arguments, strict=True) if a.kwarg_only}
    refused(
        lambda: op(*positional, **named), "dequantize()", *(("cannot reduce",) if reduction else ("does not know",))
    )
    assert equal(x, before)


@on_ranks(2)
@pytest.mark.sentinels(
    *("c10d::allreduce_", "c10d::broadcast_", "c10d::_allgather_base_", "c10d::scatter_", "c10d::recv_"),
    *("_c10d_functional::all_gather_into_tensor", "_c10d_functional::all_reduce", "_c10d_functional::wait_tensor"),
    *("_c10d_functional_autograd::reduce_scatter_tensor", "symm_mem::one_shot_all_reduce"),
)  # one of each namespace and of each way that data goes
@pytest.mark.parametrize("name", operations())
def test_an_operation_moves_fields_reads_values_or_is_refused(name: str) -> None:
    op = operation(name)
    case = KNOWN.get(op._schema.name, unknown)
    for kind in KINDS:
        try:
            case(kind, op)
        except Exception as error:
            raise AssertionError(f"{name} of {kind}: {type(error).__name__}: {error}") from error


# --- what is built of them --------------------------------------------------------------------------------------------


@on_ranks(2)
def test_coalesced_broadcasts_move_fields() -> None:
    for kind in KINDS:
        x, y, plain = make(kind, me()), make(kind, 2 + me()), torch.full((3,), float(me()))
        dist._broadcast_coalesced(dist.group.WORLD, [x, plain, y], 1 << 20, 1)
        assert equal(x, stored(make(kind, 1))) and equal(y, stored(make(kind, 3))) and plain.tolist() == [1, 1, 1]
    dist._broadcast_coalesced(dist.group.WORLD, [plain], 1 << 20, 0)


@on_ranks(2)
def test_lists_of_lists_that_torch_does_not_look_into_are_values_or_refused() -> None:
    """The dispatcher does not search these for subclasses, so that gloo gets them as they are."""
    alone = [dist.new_group([rank]) for rank in range(RANKS)][me()].boxed()
    names = [n for n in operations() if any("List[List[" in str(a.type) for a in operation(n)._schema.arguments)]
    assert len(names) == 5
    for kind in KINDS:
        x = make(kind, me())
        before = stored(x)
        for name in names:
            plain = torch.ones(x.shape)
            values = {"List[Tensor]": [plain], "List[List[Tensor]]": [[x]]}
            asked = [a for a in operation(name)._schema.arguments if not a.has_default_value()]
            values |= {str(a.type): alone for a in asked if "ProcessGroup" in str(a.type)}
            arguments = [values.get(str(a.type), argument_of(a, x)) for a in asked]
            try:
                result = operation(name)(*arguments)
                (result[-1] if isinstance(result, tuple) else result).wait()
            except (RuntimeError, ValueError) as error:
                assert "data pointer" in str(error) or "quantized" in str(error), error
                assert equal(x, before) and plain.eq(1).all()
                continue
            if name == "c10d::reduce_scatter_":  # gloo copies what it sums into a buffer of its own: the values
                assert torch.equal(plain, x.dequantize()) and equal(x, before)
            else:  # and what it has gathered out of one, which quantizes
                assert "gather_" in name, f"{name} of {kind} is not refused"
                assert equal(x, stored(make(kind, me()).copy_(plain)))
                x.copy_(make(kind, me()))


@on_ranks(2)
def test_views_are_broadcast_as_their_fields() -> None:
    for kind in ("float8", "float8_block", "mxfp8"):
        x = make(kind, me(), rows=256)
        for view, other in ((x.mT, make(kind, 0, 256).mT), (x.view(-1), make(kind, 0, 256).view(-1))):
            dist.broadcast(view, 0)
            assert same_bits(view, other)
        assert same_bits(x, make(kind, 0, 256))
    x, before = make("mxfp8", me(), 256), make("mxfp8", me(), 256)
    dist.broadcast(x[:, 32:64], 0)  # not contiguous
    assert torch.equal(x[:, 32:64].dequantize(), make("mxfp8", 0, 256)[:, 32:64].dequantize())
    assert torch.equal(x[:, 64:].dequantize(), before[:, 64:].dequantize())
    refused(lambda: dist.broadcast(make("float8", me())[:16], 0), "shares the one scale", "received into")


@on_ranks(2)
def test_a_tensor_of_another_format_is_not_received() -> None:
    x = te.Float8BlockQuantizer(amax_epsilon=0.5 * me()).quantize(torch.randn(64, 64))
    before = stored(x)
    if me() == 0:
        dist.broadcast(x, 0)
    else:
        refused(lambda: dist.broadcast(x, 0), "received something else than the fields of Float8BlockwiseTensor")
    assert equal(x, before)


@on_ranks(2)
def test_values_for_plain_tensors_of_rank_0_are_asked_for() -> None:
    alone = dist.new_group([0])
    if me() == 0:
        state = {"weight": make("mxfp8", 0)}
        local = {"weight": torch.zeros(128, 128)}
        refused(
            lambda: _broadcast_state_dict(state, local, torch.device("cpu"), alone), "rank 0 has a MXFP8Tensor; pass"
        )
        _broadcast_state_dict({"weight": state["weight"].dequantize()}, local, torch.device("cpu"), alone)
        assert torch.equal(local["weight"], state["weight"].dequantize())


@on_ranks(2)
@pytest.mark.sentinels("current-False", "mxfp8-True")
@pytest.mark.parametrize(("name", "buckets"), [("current", False), ("block", True), ("mxfp8", True), ("nvfp4", False)])
def test_ddp_with_sharded_optimizer_keeps_ranks_equal(name: str, buckets: bool) -> None:
    """Every rank starts from weights of its own, and steps the parameters that are its own."""
    from torch.distributed.optim import ZeroRedundancyOptimizer  # its import warns of torch's own use of torch.jit

    torch.manual_seed(me())
    with te.quantized_model_init(recipe=te.recipe(name)):
        model = nn.ModuleList([te.Linear(64, 64) for _ in range(2)] + [te.GroupedLinear(2, 64, 64)])
        model[0].requires_grad_(False)

    class Run(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = model

        def forward(self, x: Tensor) -> Tensor:
            return model[2](model[1](model[0](x)), torch.tensor([len(x) // 2, len(x) // 2]))

    ddp = DistributedDataParallel(Run(), gradient_as_bucket_view=buckets)
    assert agree(model), "not equal after DistributedDataParallel has broadcast"
    before = stored(model[1].weight)
    optimizer = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.AdamW, lr=0.05)
    for _ in range(3):
        with te.autocast(recipe=te.recipe(name)):
            y = ddp(torch.randn(64, 64))
        y.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        assert agree(model)
    assert not equal(model[1].weight, before)
    refused(
        lambda: ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.AdamW, parameters_as_bucket_view=True),
        "cannot become a view of other memory",
    )


def agree(model: nn.Module) -> bool:
    tensors = [
        raw(t)
        for p in model.parameters()
        for t in (p.inner_tensors().values() if isinstance(p, te.QuantizedTensor) else (p,))
    ]
    return all(torch.equal(a, b) for a, b in zip(*everyones(tensors), strict=True))


def test_torch_has_the_operations_that_are_known() -> None:
    names = operations()
    assert {name for name in KNOWN if name.startswith("c10d::")} <= {*names} and len(names) > 60 and len(KINDS) > 20


def test_what_works_in_place_without_declaring_it_is_refused() -> None:
    """No dispatch can know what such an operation writes, so that it would write to a copy."""
    names = []
    for name in torch._C._dispatch_get_all_op_names():
        base = name.partition("::")[2].partition(".")[0]
        if not base.endswith("_") or base.endswith("__"):
            continue
        try:
            schema = operation(name)._schema
        except AttributeError:  # of a namespace that Python cannot spell
            continue
        if not schema.is_mutable and schema.name.partition("::")[0] not in ("c10d", "symm_mem"):
            names.append(name)
    assert "inductor::accumulate_grad_" in names
    for kind in ("mxfp8", "3 of float8"):
        x = make(kind, 0)
        for name in names:
            others = [torch.zeros(x.shape) if "Tensor" in str(a.type) else 0 for a in operation(name)._schema.arguments]
            refused(functools.partial(operation(name), x, *others[1:]), "does not declare what it writes")


def test_what_exchanges_memory_is_refused() -> None:
    x = make("mxfp8", 0)
    for exchange in (lambda: x.set_(torch.zeros(128, 128)), lambda: x.resize_(3), lambda: x.resize_as_(torch.ones(3))):
        refused(exchange, "exchanges the memory of a tensor, and a MXFP8Tensor has none")
    parameter, bucket = torch.nn.Parameter(x), torch.ones(x.numel())
    with pytest.raises(ValueError, match="cannot become a view of other memory"):
        parameter.data = bucket[: x.numel()].view_as(x)
    parameter.data = bucket.view_as(x).clone()
    assert parameter.dequantize().eq(1).all()
