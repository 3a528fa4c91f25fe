"""Calls that fit, and calls that do not, give what the definition gives."""

import contextlib
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from torch import Generator, Tensor, nn
from torch.autograd import forward_ad
from torch.utils._pytree import tree_leaves

from te_models.kernels import activation, flash_attention, norm, permute, rope
from te_models.kernels import quantize as q
from te_models.kernels.backend import Backend, using_backend
from te_models.kernels.cpp_library import CompilationError
from te_models.kernels.cpu_rows import rows
from te_models.kernels.decode_attention import op as decode
from te_models.kernels.gemm import dense, few_rows, gemv
from te_models.kernels.gemm.few_rows import op as few_rows_op
from te_models.kernels.gemm.operand import ScaledOperand
from te_models.kernels.grouped_gemm import grouped_gemm, stored_grouped_gemm
from te_models.kernels.quantize.cpu import fields, fields_op
from te_models.kernels.quantize.cpu import rounding as graph
from te_models.kernels.quantize.cpu import rounding_op as graph_op
from te_models.kernels.quantize.fp8 import reference as fp8
from te_models.kernels.quantize.nvfp4 import cpu as nvfp4
from te_models.layers.attention.core import attend

E4M3 = torch.float8_e4m3fn
FEWEST = 16
"""Elements from which a call goes to a library here, where each would be a second of compilation, or a weight large."""


class Case(NamedTuple):
    """make: arguments that fit; function: what is called with them; exact: whether results have one value; definition:
    of the same arguments, None: the function itself without libraries."""

    name: str
    make: Callable[[Generator, torch.dtype], tuple[Any, ...]]
    function: Callable[..., Any]
    exact: bool = True
    definition: Callable[..., Any] | None = None


@contextlib.contextmanager
def with_libraries() -> Iterator[None]:
    """Call the libraries from a few elements on."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(using_backend("compiled"))
        for module in (gemv, few_rows_op, decode):
            stack.enter_context(mock.patch.object(module, "LEAST", FEWEST))
        stack.enter_context(mock.patch.object(flash_attention.op, "FEWEST", dict.fromkeys(graph.DTYPES, 1)))
        yield


def without_libraries() -> contextlib.AbstractContextManager[None]:
    """Call none of them."""
    return using_backend("definition")


def drawn(generator: Generator, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=generator).to(dtype)


def number(generator: Generator, least: int, most: int) -> int:
    return int(torch.randint(least, most + 1, (), generator=generator))


def _linear(g: Generator, dtype: torch.dtype) -> tuple[Any, ...]:
    inner, outer = number(g, 1, 70), number(g, 1, 40)
    bias = drawn(g, outer, dtype=dtype) if number(g, 0, 1) else None
    return drawn(g, number(g, 1, 9), inner, dtype=dtype), drawn(g, outer, inner, dtype=dtype), bias


def _operand(g: Generator, *shape: int) -> tuple[Tensor, Tensor, str, Any, Tensor | None]:
    values = drawn(g, *shape)
    kind = ("per_tensor", "float32", "e8m0", "nvfp4")[number(g, 0, 3)]
    if kind == "per_tensor":
        scale = torch.full(shape[:-2], 100.0)
        return q.quantize_per_tensor(values, scale[..., None, None], E4M3), 1 / scale, kind, None, None
    if kind == "nvfp4":
        packed, scales, amax = q.quantize_nvfp4(values)
        return packed, scales, kind, (1, 16), amax
    block = (1, 32) if kind == "e8m0" else (1, 128)
    return *q.quantize_blockwise(values, block, E4M3, kind), kind, block, None


def _stored(g: Generator, dtype: torch.dtype) -> tuple[Any, ...]:
    inner, outer = 16 * number(g, 1, 5), number(g, 1, 40)
    bias = drawn(g, outer, dtype=dtype) if number(g, 0, 1) else None
    return drawn(g, number(g, 1, 17), inner, dtype=dtype), *_operand(g, outer, inner), bias


def _stored_linear(x: Tensor, data: Tensor, scale: Tensor, kind: Any, block: Any, amax: Any, bias: Any) -> Tensor:
    return few_rows.stored_weight_linear(x, ScaledOperand(data, scale, kind, block, amax), bias)


def _stored_groups(g: Generator, dtype: torch.dtype) -> tuple[Any, ...]:
    inner, groups = 16 * number(g, 1, 4), number(g, 1, 3)
    splits = torch.tensor([number(g, 0, 18) for _ in range(groups)])
    return drawn(g, int(splits.sum()) + 1, inner, dtype=dtype), *_operand(g, groups, number(g, 1, 20), inner), splits


def _stored_grouped(x: Tensor, data: Tensor, scale: Tensor, kind: Any, block: Any, amax: Any, splits: Tensor) -> Tensor:
    return stored_grouped_gemm(x, ScaledOperand(data, scale, kind, block, amax), splits)


def _groups(g: Generator, dtype: torch.dtype) -> tuple[Any, ...]:
    inner, groups = number(g, 1, 40), number(g, 1, 3)
    splits = torch.tensor([number(g, 0, 10) for _ in range(groups)])
    return drawn(g, int(splits.sum()) + 1, inner, dtype=dtype), drawn(g, groups, 9, inner, dtype=dtype), splits


def _norm(g: Generator, dtype: torch.dtype) -> tuple[Any, ...]:
    shape = [number(g, 1, 4) for _ in range(number(g, 0, 4))]
    channels = number(g, 1, 70)
    return drawn(g, *shape, channels, dtype=dtype), drawn(g, channels, dtype=dtype) if number(g, 0, 2) else None


def _rope(g: Generator, dtype: torch.dtype) -> tuple[Any, ...]:
    batch, length, half = number(g, 1, 3), number(g, 1, 5), number(g, 0, 9)
    tables = [drawn(g, batch if number(g, 0, 1) else 1, length, half) for _ in range(1)] * 2
    x = drawn(g, batch, length, number(g, 1, 3), 2 * half + number(g, 0, 3), dtype=dtype)
    return x, tables[0], tables[0].cos(), ("half", "interleaved")[number(g, 0, 1)]


def _activation(g: Generator, dtype: torch.dtype) -> tuple[Any, ...]:
    shape = [number(g, 1, 4) for _ in range(number(g, 0, 3))]
    return drawn(g, *shape, 2 * number(g, 1, 20), dtype=dtype), drawn(g, *shape) if number(g, 0, 1) else None


def _slots(g: Generator, dtype: torch.dtype) -> tuple[Any, ...]:
    count, slots, tokens = number(g, 1, 9), number(g, 1, 3), number(g, 1, 6)
    indices = torch.randint(0, count, (tokens, slots), generator=g)
    return drawn(g, count, number(g, 1, 20), dtype=dtype), indices, drawn(g, tokens, slots) if number(g, 0, 1) else None


def _sum_slots(y: Tensor, row_of_slot: Tensor, weights: Tensor | None) -> Tensor:
    empty = row_of_slot.new_empty(0)
    return permute.unpermute(y, permute.Permutation(empty, row_of_slot, empty, empty, None), weights)


def _matrices(g: Generator, dtype: torch.dtype) -> tuple[Any, ...]:
    members = [number(g, 1, 3) for _ in range(number(g, 0, 2))]
    return (drawn(g, *members, number(g, 1, 40), number(g, 1, 40), dtype=dtype),)


def _matrix(g: Generator, dtype: torch.dtype) -> tuple[Any, ...]:
    return (drawn(g, number(g, 1, 40), 16 * number(g, 1, 5), dtype=dtype),)


def _scaled(g: Generator, dtype: torch.dtype) -> tuple[Any, ...]:
    (x,) = _matrices(g, dtype)
    shapes: tuple[tuple[int, ...], ...] = ((), (1, 1), (x.shape[-2], 1), (1,) * x.dim(), (*x.shape[:-1], 1))
    return x, drawn(g, *shapes[number(g, 0, 4)]).abs() + 0.5


def _nvfp4(g: Generator, dtype: torch.dtype) -> tuple[Any, ...]:
    (x,) = _matrices(g, dtype)
    return x, x.abs().float().amax((-2, -1)), torch.tensor([3, 4]) if number(g, 0, 1) else None


def _amaxes(g: Generator, dtype: torch.dtype) -> tuple[Any, ...]:
    (x,) = _matrices(g, dtype)
    return x, drawn(g, *x.shape[:-2])


def _blocks(g: Generator, dtype: torch.dtype) -> tuple[Any, ...]:
    data, scales = q.quantize_blockwise(drawn(g, number(g, 1, 40), number(g, 1, 80)), (1, 32), E4M3, "e8m0")
    return data.contiguous(), scales.contiguous()


def _packed(g: Generator, dtype: torch.dtype) -> tuple[Any, ...]:
    return q.quantize_nvfp4(drawn(g, number(g, 1, 20), 16 * number(g, 1, 5)))[:2]


def _decode_blocks(data: Tensor, scales: Tensor) -> Tensor:
    decode_them = (
        fields.decode_fp8_blocks if fields.chosen(data, BF16) is Backend.COMPILED else fp8.dequantize_blockwise
    )
    return decode_them(data, scales, (1, 32), BF16)


def _decode_nvfp4(packed: Tensor, scales: Tensor) -> Tensor:
    if fields.chosen(packed, F32) is Backend.COMPILED:
        return fields.decode_nvfp4(packed, scales, F32)
    return nvfp4.decode_blocks(packed, scales, 2 * packed.shape[-1])


def _attention(g: Generator, dtype: torch.dtype, queries: int | None = None) -> tuple[Any, ...]:
    batch, groups, channels = number(g, 1, 2), number(g, 1, 3), 16 * number(g, 1, 3)
    length, many = number(g, 1, 20), number(g, 1, 12) if queries is None else queries
    query = drawn(g, batch, groups * number(g, 1, 3), many, channels, dtype=dtype)
    key = drawn(g, batch, groups, max(length, many), channels, dtype=dtype)
    visible = torch.rand((batch, 1, 1, key.shape[2]), generator=g) < 0.7 if queries == 1 and number(g, 0, 1) else None
    return query, key, drawn(g, *key.shape[:3], 16 * number(g, 1, 3), dtype=dtype), visible


def _attend(query: Tensor, key: Tensor, value: Tensor, visible: Tensor | None) -> Tensor:
    options: dict[str, Any] = {"causal": False, "scale": 0.2, "softcap": None, "dropout": 0.0}
    return attend(query, key, value, visible, None, None, **options)


BF16, F32 = torch.bfloat16, torch.float32
CASES = (
    Case("linear", _linear, dense.linear, exact=False),
    Case("stored_linear", _stored, _stored_linear, exact=False),
    Case("stored_grouped_gemm", _stored_groups, _stored_grouped, exact=False),
    Case("grouped_gemm", _groups, grouped_gemm, exact=False),
    Case("rms_norm", _norm, lambda x, weight: norm.rms_norm(x, weight, 1e-6)),
    Case("rms_norm_first", _norm, lambda x, w: norm.rms_norm(x, w, 1e-6, cast_order="weight_first")),
    Case("rms_norm_centered", _norm, lambda x, w: norm.rms_norm(x, w, 1e-6, zero_centered=True)),
    Case("apply_rope", _rope, rope.apply_rope),
    Case("activation", _activation, lambda x, p: activation.activation(x, "silu", probabilities=p)),
    Case("gated_activation", _activation, lambda x, p: activation.gated_activation(x, "silu", probabilities=p)),
    # torch's gelu has another last bit where a number is not in a whole vector
    Case("gated_gelu", _activation, lambda x, p: activation.gated_activation(x, "gelu", probabilities=p), exact=False),
    Case("sum_slots", _slots, _sum_slots),
    Case("round_blockwise", _matrices, lambda x: q.round_blockwise(x, (1, 16), E4M3, "float32", BF16)),
    Case("round_blockwise_e8m0", _matrices, lambda x: q.round_blockwise(x, (32, 1), torch.float8_e5m2, "e8m0", F32)),
    Case("round_current", _matrices, lambda x: q.round_current(x, E4M3, F32)),
    Case("round_per_tensor", _scaled, lambda x, scale: q.round_per_tensor(x, scale, E4M3, BF16)),
    Case("random_hadamard", _matrices, lambda x: graph_op.random_hadamard(x, -2)),
    Case("raised_amax", _amaxes, graph_op.raised_amax),
    Case("round_nvfp4", _nvfp4, lambda x, amax, key: graph_op.round_nvfp4(x, BF16, amax=amax, key=key)),
    Case("round_current_nvfp4", _matrices, lambda x: graph_op.round_current_nvfp4(x, BF16, block=(16, 1))),
    Case("store_blocks", _matrix, lambda x: fields_op.store_blocks(x, (1, 16), "float32", 0.0)),
    Case("store_current", _matrix, lambda x: fields_op.store_current(x, False, 0.0, BF16)),
    Case(
        "store_scaled",
        lambda g, dtype: (*_matrix(g, dtype), drawn(g).abs() + 0.5),
        lambda x, scale: fields_op.store_scaled(x, scale, BF16),
    ),
    Case("store_nvfp4", _matrix, fields_op.store_nvfp4),
    Case("read_numbers", _blocks, lambda data, scales: fields_op.read_numbers(data, BF16)),
    Case(
        "decode_blocks",
        _blocks,
        _decode_blocks,
        definition=lambda data, scales: fp8.dequantize_blockwise(data, scales, (1, 32), BF16),
    ),
    Case(
        "decode_nvfp4",
        _packed,
        _decode_nvfp4,
        definition=lambda packed, scales: nvfp4.decode_blocks(packed, scales, 2 * packed.shape[-1]),
    ),
    Case("attend_one", lambda g, dtype: _attention(g, dtype, 1), _attend, exact=False),
    Case("flash_attention", _attention, _attend, exact=False),
)


class Own(Tensor):
    """A subclass of a user's."""


def _negative(x: Tensor, g: Generator) -> Tensor:
    """Return x as a view that is to be negated: its memory holds -x."""
    wide = torch.complex(torch.zeros(x.shape), -x.float()).conj()
    return wide.imag if x.dtype == F32 else torch._neg_view(-x)  # pyright: ignore[reportPrivateImportUsage]


def _stepped(x: Tensor, g: Generator) -> Tensor:
    """Return x in every other column of a wider matrix."""
    return torch.stack([x, torch.full_like(x, 77)], -1).flatten(-2)[..., ::2] if x.dim() else x


def _beside(x: Tensor, g: Generator) -> Tensor:
    """Return x as the left part of wider rows."""
    return torch.cat([x, torch.full_like(x, 77)], -1)[..., : x.shape[-1]] if x.dim() else x


def _within(x: Tensor, g: Generator) -> Tensor:
    """Return x as the first part of another dimension."""
    return torch.cat([x, torch.full_like(x, 77)], dim := number(g, 0, x.dim() - 1)).narrow(dim, 0, x.shape[dim])


def _offset(x: Tensor, g: Generator) -> Tensor:
    """Return x one element into its memory."""
    return x.new_empty(x.numel() + 1)[1:].view(x.shape).copy_(x)


def _in_inference(x: Tensor, g: Generator) -> Tensor:
    with torch.inference_mode():
        return x.clone()


def _cast(x: Tensor, g: Generator) -> Tensor:
    dtypes = (BF16, F32, torch.float16, torch.float64, torch.int64, torch.int32, torch.bool, torch.uint8)
    return x.float().to(dtypes[number(g, 0, 7)])


def _resized(x: Tensor, g: Generator) -> Tensor:
    """Return x with one dimension longer or shorter by some, of one, or of none."""
    dim = number(g, 0, x.dim() - 1)
    size = x.shape[dim]
    size = (size + 1, size - 1, 2 * size, 1, 0, size + 16)[number(g, 0, 5)]
    return torch.cat([x, x, x[(slice(None),) * dim + (slice(0, 1),)].repeat_interleave(16, dim)], dim).narrow(
        dim, 0, max(size, 0)
    )


def _repeated(x: Tensor, g: Generator) -> Tensor:
    dim = number(g, 0, x.dim() - 1)
    return x.narrow(dim, 0, 1).expand(x.shape) if x.shape[dim] else x


def _windows(x: Tensor, g: Generator) -> Tensor:
    """Return rows that overlap: each begins one element behind the one before."""
    rows, columns = x.shape[-2:]
    return x.flatten()[: rows + columns].as_strided((rows, columns), (1, 1)) if x.numel() >= rows + columns else x


Change = Callable[[Tensor, Generator], Any]
LAYOUTS: tuple[Change, ...] = (
    *(_negative, _stepped, _beside, _within, _offset, _in_inference, _repeated, _windows),
    *(lambda x, g: x.mT.contiguous().mT, lambda x, g: x.transpose(0, -1).contiguous().transpose(0, -1)),
    *(lambda x, g: nn.Parameter(x), lambda x, g: x.clone().requires_grad_()),
)
WRONG: tuple[Change, ...] = (
    *(_resized, _resized, _resized, _cast, _cast),
    lambda x, g: x.to("meta"),
    lambda x, g: x[None],
    lambda x, g: x[0],
    lambda x, g: x.flatten(),
    lambda x, g: x[..., None],
    lambda x, g: x.mT,
    lambda x, g: None,
    lambda x, g: x.as_subclass(Own),
    lambda x, g: x.to_sparse(),
    lambda x, g: torch._efficientzerotensor(x.shape, dtype=x.dtype),  # pyright: ignore[reportPrivateImportUsage]
    lambda x, g: x.masked_fill(torch.rand(x.shape, generator=g) < 0.2, math.nan),
    lambda x, g: x.masked_fill(torch.rand(x.shape, generator=g) < 0.2, math.inf),
)


def changed(arguments: Sequence[Any], g: Generator) -> list[Any]:
    """Return the arguments, of which up to two are another layout or wrong."""
    found = list(arguments)
    places = [i for i, x in enumerate(found) if isinstance(x, Tensor)]
    for _ in range(number(g, 0, 2)):
        place = places[number(g, 0, len(places) - 1)]
        changes = (LAYOUTS, WRONG)[number(g, 0, 1)]
        with contextlib.suppress(Exception):  # of a tensor that has no such form
            found[place] = changes[number(g, 0, len(changes) - 1)](found[place], g)
    return found


def _dual(function: Callable[..., Any], arguments: Sequence[Any]) -> Any:
    with forward_ad.dual_level():
        place, x = next((i, x) for i, x in enumerate(arguments) if isinstance(x, Tensor) and x.is_floating_point())
        tangent = torch.linspace(-1, 1, x.numel(), dtype=x.dtype, device=x.device).view(x.shape)
        found = function(*[*arguments[:place], forward_ad.make_dual(x, tangent), *arguments[place + 1 :]])
        return [tuple(forward_ad.unpack_dual(y)) for y in (found if isinstance(found, (tuple, list)) else (found,))]


def _mapped(function: Callable[..., Any], arguments: Sequence[Any]) -> Any:
    x, *others = arguments
    return torch.func.vmap(lambda x: function(x, *others))(torch.stack([x, x]))


@contextlib.contextmanager
def _autocast() -> Iterator[None]:
    with torch.no_grad(), torch.autocast("cpu", dtype=BF16):
        yield


def _plain(function: Callable[..., Any], arguments: Sequence[Any]) -> Any:
    return function(*arguments)


MODES: dict[str, tuple[Callable[[], Any], Callable[..., Any]]] = {
    "no_grad": (torch.no_grad, _plain),
    "inference": (torch.inference_mode, _plain),
    "grad": (torch.enable_grad, _plain),
    "autocast": (_autocast, _plain),
    "dual": (torch.no_grad, _dual),
    "vmap": (torch.no_grad, _mapped),
}
WEIGHTS = ("no_grad",) * 6 + ("inference",) * 2 + ("grad",) * 2 + ("autocast", "autocast", "dual", "vmap")


def outcome(function: Callable[..., Any], arguments: Sequence[Any], mode: str) -> list[Tensor] | type[BaseException]:
    """Return the results of a call, or the type of its exception."""
    context, call = MODES[mode]
    try:
        with context():
            found = call(function, arguments)
    except Exception as error:
        return type(error)
    return [x for x in tree_leaves(found) if isinstance(x, Tensor)]


def bound(case: Case, arguments: Sequence[Any], wanted: Tensor) -> Tensor | float:
    """Return how far apart two orders of a float32 sum, each rounded, may be: of K products of numbers up to x and w,
    2 K 2^-24 K x w; of attention that of a score twice, as a part of the largest value, and what weights are rounded
    to in 16 bits."""
    if case.exact:
        return 0.0
    tensors = [x for x in arguments if isinstance(x, Tensor) and x.device.type == "cpu" and x.numel() and x.dim()]
    floats = [x.detach().to_dense().float().nan_to_num(0, 0, 0).abs() for x in tensors if x.is_floating_point()]
    largest, inner = [x.max().item() for x in floats], max([x.shape[-1] for x in tensors], default=1)
    product = math.prod(sorted(largest)[-2:]) + 4 * max(largest, default=1.0)
    total = 2.0**-23 * (inner + 8) * inner * product
    digits = torch.finfo(wanted.dtype).eps if wanted.is_floating_point() else 0.0
    weights = max(largest, default=0.0) * digits * 2 if "att" in case.name else 0.0
    return total + weights + 2 * digits * wanted.abs().double()


def difference(case: Case, arguments: Sequence[Any], found: Any, wanted: Any) -> str:
    """Say how one outcome differs from the other; "" where it does not."""
    if isinstance(found, type) or isinstance(wanted, type):
        return "" if found is wanted else f"{found if isinstance(found, type) else 'a value'}, not {wanted}"[:200]
    if [x.shape for x in found] != [x.shape for x in wanted]:
        return f"shapes {[x.shape for x in found]}, not {[x.shape for x in wanted]}"
    tensors = [x for x in arguments if isinstance(x, Tensor)]
    # with a tensor of no memory torch computes some numbers, or none
    meta = any(x.is_meta for x in tensors)
    if "att" in case.name:  # of whose kernels one reads what has no memory, and makes zeros of scores that are NaN
        meta = meta or any(x._is_zerotensor() or not x.detach().to_dense().isfinite().all() for x in tensors)
    for x, y in zip(found, wanted, strict=True):
        if (x.dtype, x.device, x.requires_grad) != (y.dtype, y.device, y.requires_grad):
            return f"{x.dtype} {x.device} {x.requires_grad}, not {y.dtype} {y.device} {y.requires_grad}"
        if meta or x.is_meta:
            continue
        x, y = (z.detach().to_dense().float().double() for z in (x, y))  # in which each number of a dtype is another
        apart = x != y if case.exact else (x - y).abs() > bound(case, arguments, y.to(wanted[0].dtype))
        ordinary = x.isfinite() & y.isfinite()
        if (apart & ordinary).any():
            return f"{(x - y).abs()[ordinary].max().item():.3g} apart"
        if not x.isnan().equal(y.isnan()) or not x[~ordinary].nan_to_num(0).equal(y[~ordinary].nan_to_num(0)):
            return "other infinities or NaN"
        if case.exact and not torch.signbit(x[ordinary]).equal(torch.signbit(y[ordinary])):
            return "other signs of zeros"
    return ""


class Report(NamedTuple):
    """How many calls were made; of each (case, mode) how many gave values and how many exceptions; what differed."""

    calls: int
    kinds: Counter[tuple[str, str, str]]
    failures: list[str]


def described(arguments: Sequence[Any]) -> str:
    def one(x: Any) -> str:
        if not isinstance(x, Tensor):
            return repr(x)
        stride = x.stride() if x.layout is torch.strided else x.layout
        flags = "".join(
            f" {name}"
            for name in ("neg", "inference", "meta")
            if getattr(x, f"is_{name}") is True or (callable(getattr(x, f"is_{name}")) and getattr(x, f"is_{name}")())
        )
        return f"{type(x).__name__} {x.dtype} {tuple(x.shape)} {stride}{flags}{' grad' if x.requires_grad else ''}"

    return ", ".join(one(x) for x in arguments)


def fuzz(calls: int, seed: int, cases: Sequence[Case] = CASES) -> Report:
    """Make so many calls, each with the libraries and without."""
    g, kinds, failures = Generator().manual_seed(seed), Counter[tuple[str, str, str]](), list[str]()
    for i in range(calls):
        case, dtype, mode = cases[i % len(cases)], (BF16, F32)[number(g, 0, 1)], WEIGHTS[number(g, 0, len(WEIGHTS) - 1)]
        arguments = changed(case.make(g, dtype), g)
        with without_libraries():
            wanted = outcome(case.definition or case.function, arguments, mode)
        with with_libraries():
            found = outcome(case.function, arguments, mode)
        kinds[case.name, mode, "error" if isinstance(wanted, type) else "value"] += 1
        differs = difference(case, arguments, found, wanted)
        if differs:
            failures.append(f"{case.name} {mode} ({described(arguments)}): {differs}")
    return Report(calls, kinds, failures)


EVERYDAY, ALL = 1_000, 24_000
_WARNS = torch._C._functorch._set_vmap_fallback_warning_enabled  # pyright: ignore[reportAttributeAccessIssue]


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    try:
        rows._function("te_rotate", torch.bfloat16)
    except CompilationError as error:
        pytest.skip(f"the definitions alone run here: {error}")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    _WARNS(False)
    yield
    _WARNS(True)
    torch.set_num_threads(threads)


@pytest.mark.filterwarnings("ignore")  # of what torch says about some of the layouts
@pytest.mark.parametrize(
    ("calls", "seed"), [(EVERYDAY, 0), pytest.param(ALL, 1, marks=pytest.mark.slow)], ids=["everyday", "all"]
)
def test_a_fast_path_answers_as_the_definition(calls: int, seed: int) -> None:
    report = fuzz(calls, seed)
    assert not report.failures, "\n".join([f"{len(report.failures)} of {calls} calls", *report.failures[:20]])
    for case in CASES:
        found = {
            kind: sum(n for (name, _, k), n in report.kinds.items() if (name, k) == (case.name, kind))
            for kind in ("value", "error")
        }
        assert 4 * found["value"] > found["error"], f"calls of {case.name} are to fit: {found}"
