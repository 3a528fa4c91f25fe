"""What versions of torch do differently, one function each."""

import contextlib
import functools
import importlib
import operator
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from te_models.extras import UnsupportedTorchError

from .compiling import compiling

if torch.__version__ < "2.11":
    raise UnsupportedTorchError(
        f"te_models needs PyTorch 2.11 or later, and {torch.__version__} is installed; see https://pytorch.org"
    )
C = TypeVar("C", bound=Callable)
TORCH_2_11 = torch.__version__ < "2.12"
_TORCH_2_12 = not TORCH_2_11 and torch.__version__ < "2.13"
_E4M3_SATURATES = torch.__version__ >= "2.13"
SPLITS_LOOPS = torch.__version__ < "2.13"
_EVERY_TRACE_EXPORTS = torch.__version__ < "2.13"


def _register_constants() -> Callable[[type], None] | None:
    """Return the function that makes constants of graphs of the objects of a class, None where torch has none: opaque
    value types (2.12 and 2.13), constant custom classes (2.14 and later). 2.11 knows opaque values, but hides their
    attributes and methods from the code that it traces."""
    try:
        opaque = None if TORCH_2_11 else importlib.import_module("torch._library.opaque_object")
    except ModuleNotFoundError:
        opaque = None
    if hasattr(opaque, "register_custom_class"):
        return functools.partial(opaque.register_custom_class, typ="constant")  # type: ignore[union-attr]
    if hasattr(opaque, "register_opaque_type"):
        return functools.partial(opaque.register_opaque_type, typ="value")  # type: ignore[union-attr]
    return None


register_constants = _register_constants()
"""Makes constants of the objects of a class; None: the compiler traces them field by field, and guards on the fields
that a graph read: the graphs are the same."""


def constant_when_traced(function: C) -> C:
    """Do as `torch.compiler.assume_constant_result`, without the import of the compiler at start-up (2.11 to 2.15)."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def own_result(y: Tensor) -> Tensor:
    """Return y, the result of the forward of a `torch.autograd.Function`, as a tensor that no other value in it is.

    Compiled by torch 2.11, every value computed there becomes a result. Where the last step returned its argument, as a
    cast to the dtype that it has, two results are one tensor, and the gradient of the first is silently zero.
    """
    return y.view_as(y) if TORCH_2_11 and compiling() else y


@constant_when_traced
def _equal(a: object, b: object) -> bool:
    return a == b


def equal_values(a: object, b: object) -> bool:
    """Return whether two value objects are equal.

    Traced by torch 2.12, `==` of two of them stops the compiler, and `!=` says of equal ones that they differ.
    """
    return _equal(a, b) if _TORCH_2_12 and compiling() else a == b


def fix_width(x: Tensor) -> None:
    """Let a graph be for one size of the last dimension of x, the input of an autograd function.

    Compiled by torch 2.11, sizes computed in there become results, too, and one that turns out to be a constant, such
    as the hint of a dimension that a weight has as well, stops the compiler.
    """
    if TORCH_2_11 and compiling():
        operator.index(x.shape[-1])


def smaller(a: int, b: int) -> int:
    """Return the smaller of two sizes, without a guard where one is a variable of the graph.

    Traced by torch 2.11, `torch.sym_min` of two constants stops the compiler, and `min` knows variables, too.
    """
    least = min if TORCH_2_11 and compiling() else torch.sym_min
    return least(a, b)  # type: ignore[return-value]  # typed as int or float; of two sizes it is one


def scalars_in_graphs() -> Any:
    """Return a context in which compiled code may read tensors as numbers: each becomes a variable of the graph."""
    if not compiling():
        return contextlib.nullcontext()
    return torch._dynamo.patch_dynamo_config(capture_scalar_outputs=True)  # pyright: ignore[reportPrivateImportUsage]


def splits_loops(device: torch.device) -> bool:
    """Return whether a compiled division of a loop variable is to be avoided on this device.

    Inductor's C++ backend splits a loop by the divisor. The ones of torch 2.11 and 2.12 fail ("unexpected group") where
    two steps that are fused then have different loops, as with blocks along the rows beside blocks along the columns.
    """
    return SPLITS_LOOPS and device.type == "cpu" and compiling()


@constant_when_traced
def exporting() -> bool:
    """Return whether this runs for `torch.export`.

    `torch.compiler.is_exporting` says so of everything that torch 2.11 compiles; its flag is right.
    """
    return torch.compiler._is_exporting_flag if _EVERY_TRACE_EXPORTS else torch.compiler.is_exporting()


def saturating_cast(x: Tensor, fp8_dtype: torch.dtype) -> Tensor:
    """Return x, any floating dtype, as FP8: what is beyond the largest number, infinities too, becomes it; NaN stays.

    On CPU the cast to E4M3 does that itself in torch 2.13, eagerly and compiled (in 2.11 it makes NaN), and the clamp
    before it took 0.6 of 2.1 ms for 8 M elements. The cast to E5M2 makes infinities in every version.
    """
    if fp8_dtype is not torch.float8_e4m3fn or not _E4M3_SATURATES or x.device.type != "cpu":
        limit = torch.finfo(fp8_dtype).max
        x = x.clamp(-limit, limit)
    return x.to(fp8_dtype)


def gather_single(received: Tensor, sent: Tensor, group: Any) -> None:
    """Fill a tensor with those that the ranks of a group sent, by rank. torch 2.13 has another name for it, and warns
    of the old one."""
    from torch import distributed

    gather = getattr(distributed, "all_gather_single", None) or distributed.all_gather_into_tensor
    gather(received, sent, group=group)


def start_to_scatter_single(received: Tensor, sent: Tensor, group: Any) -> Any:
    """Start to fill a tensor with the sums over ranks of this rank's part of what they sent, and return the work. Named
    as `gather_single`'s."""
    from torch import distributed

    scatter = getattr(distributed, "reduce_scatter_single", None) or distributed.reduce_scatter_tensor
    return scatter(received, sent, group=group, async_op=True)
