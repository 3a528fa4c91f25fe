"""Random calls of `cases`: arguments that fit, or that one thing is wrong with, in every mode in which torch computes.

A call with the libraries is to give what it gives without them: the same bits where nothing is added up, else within
the bound of two orders of a float32 sum, or an exception of the same type.
"""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Generator, Tensor, nn
from torch.autograd import forward_ad
from torch.utils._pytree import tree_leaves

from tests.kernels.fast_paths.cases import BF16, CASES, F32, Case, number, with_libraries, without_libraries


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
    memory = x.new_empty(x.numel() + 1)
    return memory[1:].view(x.shape).copy_(x)


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
    _negative,
    _stepped,
    _beside,
    _within,
    _offset,
    _in_inference,
    _repeated,
    _windows,
    lambda x, g: x.mT.contiguous().mT,
    lambda x, g: x.transpose(0, -1).contiguous().transpose(0, -1),
    lambda x, g: nn.Parameter(x),
    lambda x, g: x.clone().requires_grad_(),
)
WRONG: tuple[Change, ...] = (
    _resized,
    _resized,
    _resized,
    _cast,
    _cast,
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
        with_tangent = [*arguments[:place], forward_ad.make_dual(x, tangent), *arguments[place + 1 :]]
        found = function(*with_tangent)
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
