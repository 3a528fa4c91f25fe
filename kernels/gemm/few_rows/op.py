"""`x weight^T + bias` of high-precision rows by a quantized weight, as one operation of eager code and of a graph.

Decoding multiplies one row, or one for each sequence, by every weight: it takes as long as reading the weights. Where
there are more rows than FEW, a matrix multiplication of the dequantized weight is faster, and that is what runs.
"""

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ...backend import has_library
from ...compiling import compiling, unobserved
from ...custom_op import Output, direct, flatten, like, operation, takes
from ...torch_versions import exporting
from ...without_autocast import without_autocast
from ..backends import EMULATION, BackendChoice, first_possible, record_choice
from ..dense import linear as dense
from ..gemv import LEAST, without_instructions
from ..operand import ScaledOperand
from . import library
from .integers import IntegerOperand

FEW = 16
"""The most rows that are multiplied with the weight as it is stored."""


def reason_to_dequantize(x: Tensor, weight: ScaledOperand | IntegerOperand) -> str | None:
    """Return why the weight has to be dequantized for x: [M, K], None where it is multiplied as it is stored."""
    if x.device.type == "cpu" and x.shape[0] > FEW:
        return f"it is for at most {FEW} rows, these are {x.shape[0]}"
    return reason_against_format(x, weight)


def reason_against_format(x: Tensor, weight: ScaledOperand | IntegerOperand) -> str | None:
    """As `reason_to_dequantize`, for any number of rows. weight: [..., N, K]."""
    if x.device.type != "cpu":
        return f"it is for a CPU, this is {x.device.type}"
    if x.dtype not in library.DTYPES:
        return f"the rows are {x.dtype}; allowed: {' or '.join(map(str, library.DTYPES))}"
    if weight.outer * weight.inner < LEAST:
        return f"it is for weights of at least {LEAST} elements, this has {weight.outer * weight.inner}"
    if weight.data.stride(-1) != 1:
        return "the rows of the weight are not contiguous"
    if isinstance(weight, IntegerOperand):
        return weight.reason_against() or without_instructions() or None
    if weight.block is not None and weight.block[1] % 16:
        return f"it is for blocks of whole 16 columns, not of {weight.block}"
    return without_instructions() or None


def uses_few_rows(x: Tensor, weight: Tensor, groups: int = 1) -> bool:
    """Whether a call may go to `stored_weight_linear`, or with more groups than one to `grouped_gemm.few_rows`, and not
    only be computed with what the weight dequantizes to: no gradient is wanted, and of a single matrix eagerly, where
    each call knows its own rows, there are few. weight: [N, K], or `groups` of them in one tensor."""
    if x.device.type != "cpu" or x.dtype not in library.DTYPES or weight.numel() < LEAST * groups:
        return False
    if torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad):
        return False
    if compiling():
        return not exporting()
    # groups of many rows dequantize one matrix after another, so that each stays in a cache: half the time of all at
    # once
    few = groups > 1 or x.numel() <= FEW * x.shape[-1]
    derived = torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0  # no_grad ends neither
    return few and not derived


def choose_stored(x: Tensor, weight: ScaledOperand | IntegerOperand) -> BackendChoice:
    """Choose from shapes, formats and hardware alone; without a compiler the weight is dequantized all the same."""
    reason = reason_to_dequantize(x, weight)
    return (
        STORED_AS_IT_IS if reason is None else first_possible("stored_linear", (("few_rows", reason),), fallback=False)
    )


STORED_AS_IT_IS = BackendChoice("stored_linear", "few_rows")
"""What a token chooses for every weight."""


def as_stored(choice: BackendChoice, x: Tensor, weight: ScaledOperand | IntegerOperand) -> bool:
    """Count a choice, and return whether the weight is multiplied as it is stored: only where a library is there."""
    if choice.backend == "few_rows" and not has_library(library.STORED, library.library_format(weight), x.dtype):
        choice = BackendChoice(choice.operation, EMULATION, (("few_rows", "no library could be compiled"),))
    record_choice(choice, strict=False)
    return choice.backend == "few_rows"


def _result(x: Tensor, weight: ScaledOperand | IntegerOperand) -> Output:
    return like(x, (x.shape[0], weight.outer))


_TAKES = takes(
    "x: T [M, K]; weight.data: any [N, _]; weight.scale_inv: any; weight.amax: float32?; bias: T [N]?;"
    "weight.inner == K; weight.fits()",
    T=(torch.bfloat16, torch.float16, torch.float32),
)


_TAKES_INTEGERS = takes(
    "x: T [M, K]; weight.data: uint8 [N, _]; weight.scale_inv: any [N, _]; weight.zero_point: uint8 [N, _]?;"
    "bias: T [N]?; weight.inner == K; weight.fits()",
    T=(torch.bfloat16, torch.float16, torch.float32),
)


@operation("stored_linear", _result, takes=_TAKES, cpu_only=True)
def _stored_linear(x: Tensor, weight: ScaledOperand, bias: Tensor | None) -> Tensor:
    return _product(x, weight, bias)


@operation("stored_integer_linear", _result, takes=_TAKES_INTEGERS, cpu_only=True)
def _stored_integer_linear(x: Tensor, weight: IntegerOperand, bias: Tensor | None) -> Tensor:
    return _product(x, weight, bias)


def _product(x: Tensor, weight: ScaledOperand | IntegerOperand, bias: Tensor | None) -> Tensor:
    if as_stored(choose_stored(x, weight), x, weight):
        return library.few_rows_linear(x, weight, bias)
    return _definition(x, weight, bias)


def _definition(x: Tensor, weight: ScaledOperand | IntegerOperand, bias: Tensor | None) -> Tensor:
    with without_autocast(x):
        return dense(x, dequantized_weight(weight, x.dtype), bias)


_call, _call_integers = direct(_stored_linear), direct(_stored_integer_linear)


def differentiates(*tensors: Tensor | None) -> bool:
    """Whether a derivative of one of these is wanted."""
    if forward_ad._current_level >= 0:
        return True
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)


def stored_weight_linear(x: Tensor, weight: ScaledOperand | IntegerOperand, bias: Tensor | None = None) -> Tensor:
    """Return `x @ weight^T + bias` in x's dtype, where no gradient is wanted. x: [M, K]; bias: [N] of x's dtype.

    Each value of the weight is what `dequantized_weight` to x's dtype gives, and no copy of more than four of its rows
    is made where `reason_to_dequantize` has none. Sums are float32.
    """
    integers = isinstance(weight, IntegerOperand)
    fields = _TAKES_INTEGERS if integers else _TAKES
    traced = torch.compiler.is_compiling() and compiling()
    if traced:
        other = fields.misfit(x, weight, bias)
    else:
        other = fields.misfit_on_cpu(x, weight, bias) or differentiates(x, weight.data, weight.scale_inv, bias)
    if other:
        return _definition(x, weight, bias)
    if not traced and not torch.is_grad_enabled() and unobserved():
        return _product(x, weight, bias)  # as the operation would, of which nobody sees anything
    return (_call_integers if integers else _call)(x, *flatten(weight), bias)


def dequantized_weight(weight: ScaledOperand | IntegerOperand, dtype: torch.dtype) -> Tensor:
    """Return a weight's values in `dtype`, computed in float32 and rounded once."""
    if isinstance(weight, IntegerOperand):
        return weight.dequantize(dtype)
    found = weight.dequantized(torch.float32)
    return (found.values if found.scale is None else found.values * found.scale).to(dtype)
