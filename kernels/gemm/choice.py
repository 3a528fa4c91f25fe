"""Which backend a scaled GEMM takes: the vendor's library, Triton, or the emulation."""

import torch

from ..backend import definitions_only
from . import native
from .backends import BackendChoice, DeviceCapability, first_possible
from .operand import ScaledOperand

_BLOCK_LENGTH = {"e8m0": 32, "float32": 128, "pow2": 128}


def choose_gemm(
    left: ScaledOperand, right: ScaledOperand, out_dtype: torch.dtype, hw: DeviceCapability
) -> BackendChoice:
    """Choose from shapes, formats and hardware alone."""
    backends = (
        ("native", native.reason_against(left, right, out_dtype, hw)),
        ("triton", against_device(hw, (8, 9)) or against_formats(left, right)),
    )
    empty = left.outer == 0 or right.outer == 0 or left.inner == 0
    return first_possible("scaled_gemm", backends, fallback=hw.type != "cpu" and not empty)


def against_device(hw: DeviceCapability, capability: tuple[int, int]) -> str | None:
    """Return why Triton kernels that need this compute capability cannot run, None where they can."""
    if hw.type != "cuda":
        return f"it needs a CUDA device, this is {hw.type}"
    if definitions_only():
        return "the backend is 'definition'"
    if not hw.triton:
        return "triton is not installed"
    if hw.capability < capability:
        return f"it needs compute capability {capability[0]}.{capability[1]}, this is {hw}"
    return None


def against_formats(left: ScaledOperand, right: ScaledOperand) -> str | None:
    """Return why there is no Triton kernel for two formats, None where there is one."""
    kinds = {left.kind, right.kind}
    if "nvfp4" in kinds or not (kinds <= {"float32", "pow2"} or len(kinds) == 1):
        return f"there is no kernel for {left.kind} by {right.kind}"
    if left.outer == 0 or right.outer == 0 or left.inner == 0:
        return "the product is empty"
    for operand in (left, right):
        length = _BLOCK_LENGTH.get(operand.kind)
        if operand.block is not None and (operand.block[1] != length or operand.block[0] not in (1, length)):
            return f"there is no kernel for {operand.kind} blocks of {operand.block}"
    return None
