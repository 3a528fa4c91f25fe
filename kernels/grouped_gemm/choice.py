"""Which backend a grouped GEMM takes.

Triton, one launch that reads the splits on the device; torch's own grouped GEMM; a loop of GEMMs that waits for the
splits to reach the host; the reference or the emulation. On CPU the loop of the reference is the intended way.
"""

import torch
from torch import Tensor

from ..gemm import native
from ..gemm.backends import BackendChoice, DeviceCapability, first_possible, hardware
from ..gemm.choice import against_device, against_formats
from ..gemm.few_rows import IntegerOperand, reason_against_format
from ..gemm.operand import ScaledOperand


def choose_plain(operation: str, a: Tensor, b: Tensor, hw: DeviceCapability) -> BackendChoice:
    """Choose for unquantized operands: Triton, torch's grouped GEMM, else the reference's loop of GEMMs."""
    if hw.type != "cuda":
        reason = f"it needs a CUDA device, this is {hw.type}"
        return BackendChoice(operation, "loop", (("triton", reason), ("native", reason)), fallback=hw.type != "cpu")
    backends = (("triton", against_device(hw, (8, 0))), ("native", _against_native_plain(a, b)))
    return first_possible(operation, backends, last="loop", fallback=True)


def choose_scaled(
    operation: str, left: ScaledOperand, right: ScaledOperand, out_dtype: torch.dtype, hw: DeviceCapability
) -> BackendChoice:
    """Choose for quantized operands: Triton, torch's grouped GEMM, a loop of scaled GEMMs, else the emulation."""
    triton = against_device(hw, (8, 9)) or against_formats(left, right)
    backends = [("triton", triton)]
    if operation == "scaled_grouped_gemm" and right.data.shape[0]:
        backends.append(("native", _against_native_scaled(left, right, out_dtype, hw)))
        backends.append(("loop", native.reason_against(_first_rows(left), right.member(0), out_dtype, hw)))
    empty = left.data.numel() == 0 or right.data.numel() == 0
    return first_possible(operation, tuple(backends), fallback=hw.type != "cpu" and not empty)


def choose_stored_grouped(x: Tensor, weight: ScaledOperand | IntegerOperand) -> BackendChoice:
    """Choose for plain rows by a stored weight, from formats, hardware, and the size of a matrix alone."""
    return first_possible("stored_grouped_gemm", (("few_rows", reason_against_format(x, weight)),), fallback=False)


def explain_grouped_gemm(
    left: Tensor | ScaledOperand, right: Tensor | ScaledOperand, out_dtype: torch.dtype = torch.bfloat16
) -> str:
    """Say in a sentence which backend a grouped GEMM of such operands takes, and why not a faster one.

    left, right: as the op takes them, both plain or both quantized; with a right side of two dimensions it is the
    weight gradient. Plain rows by a quantized weight: where no gradient is wanted, whether a CPU multiplies the stored
    weight or what it dequantizes to. out_dtype: of a product of quantized operands.
    """
    if isinstance(left, Tensor) and isinstance(right, ScaledOperand) and right.data.dim() == 3:
        return str(choose_stored_grouped(left, right))
    wgrad = "_wgrad" if (right if isinstance(right, Tensor) else right.data).dim() == 2 else ""
    if isinstance(left, ScaledOperand) and isinstance(right, ScaledOperand):
        hw = hardware(left.data.device)
        return str(choose_scaled(f"scaled_grouped_gemm{wgrad}", left, right, out_dtype, hw))
    if isinstance(left, Tensor) and isinstance(right, Tensor):
        return str(choose_plain(f"grouped_gemm{wgrad}", left, right, hardware(left.device)))
    raise ValueError("one side is quantized and the other is not; a grouped GEMM takes two of a kind")


def _against_native_plain(a: Tensor, b: Tensor) -> str | None:
    if a.dtype != torch.bfloat16 or b.dtype != torch.bfloat16:
        return f"it multiplies bfloat16, this is {a.dtype}"
    if a.shape[-1] % 8 or b.shape[-1] % 8:
        return f"it needs rows of a multiple of 16 bytes, these have {a.shape[-1]} and {b.shape[-1]} elements"
    return None


def _against_native_scaled(
    left: ScaledOperand, right: ScaledOperand, out_dtype: torch.dtype, hw: DeviceCapability
) -> str | None:
    if hw.type != "cuda" or hw.capability[0] != 9:
        return f"it needs compute capability 9.x, this is {hw}"
    if {left.kind, right.kind} != {"per_tensor"}:
        return f"it does not multiply {left.kind} by {right.kind}"
    if not left.data.dtype == right.data.dtype == torch.float8_e4m3fn or out_dtype != torch.bfloat16:
        return "it multiplies E4M3 into bfloat16 only"
    if left.inner % 16 or right.outer % 16:
        return f"N {right.outer} and K {left.inner} must be multiples of 16"
    return None


def _first_rows(rows: ScaledOperand) -> ScaledOperand:
    """Stand in for a group's rows, to ask whether a GEMM of a multiple of 16 rows would be possible."""
    return rows._replace(data=rows.data[: max(rows.outer // 16 * 16, 16)])
