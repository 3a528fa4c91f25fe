"""GEMMs on a CPU tensor as they would run on an H100, the Triton kernels under the interpreter."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from te_models.kernels import quantize as q
from te_models.kernels.gemm import op as dense
from te_models.kernels.gemm.rungs import Hardware
from te_models.kernels.grouped_gemm import accumulate, op, scaled
from te_models.kernels.permute import Permutation
from te_models.kernels.permute.quantized import permute_quantized_op
from te_models.kernels.quantize import op_nvfp4, registered
from te_models.kernels.registry import flatten
from te_models.layers import aligned_rows, sides

# torch with an older CUDA: 128-blocks then are for Triton, too
H100 = Hardware("cuda", (9, 0), True, (12, 8))


def gemms_as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until the end of the test. Per-tensor GEMMs whose N and K are multiples of 16 still go to torch, on the CPU."""
    for module in (dense, accumulate, op, scaled):
        monkeypatch.setattr(module, "hardware", lambda device: H100)
    for module in (dense, scaled):
        monkeypatch.setattr(module, "in_plain_torch", lambda device: False)
    monkeypatch.setattr(sides, "_DEQUANTIZING_DEVICES", ())


def rows_as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until the end of the test, the Triton kernels quantize rows of groups, gradients of aligned ones, and tokens on
    the way to their experts."""

    def per_tensor(
        x: Tensor, splits: Tensor, scale: Tensor, fp8: torch.dtype, *, align: int = 16, columnwise: bool = True
    ) -> list[Tensor]:
        return registered.quantize_grouped_per_tensor(x, splits, scale, fp8, align, columnwise)

    def blockwise(
        x: Tensor, splits: Tensor, block: tuple[int, int], fp8: torch.dtype, kind: str, **options: Any
    ) -> list[Tensor]:
        usages = options.get("rowwise", True), options.get("columnwise", True)
        return registered.quantize_grouped_blockwise(x, splits, list(block), fp8, kind, options["epsilon"], *usages)

    def both(x: Tensor, block: tuple[int, int], fp8: torch.dtype, kind: str, *, epsilon: float) -> tuple[Tensor, ...]:
        return registered.quantize_blockwise_both(x, list(block), fp8, kind, epsilon)

    def permuted(x: Tensor, permutation: Permutation, output: q.QuantizedOutput) -> list[Tensor]:
        topk = permutation.row_of_slot.shape[1]
        return permute_quantized_op(x, permutation.slot_of_row, topk, None, *flatten(output))

    monkeypatch.setattr(q, "grouped_amax", registered.grouped_amax)
    monkeypatch.setattr(q, "quantize_grouped_per_tensor", per_tensor)
    monkeypatch.setattr(q, "quantize_grouped_blockwise", blockwise)
    monkeypatch.setattr(q, "quantize_blockwise_both", both)
    monkeypatch.setattr(op_nvfp4, "on_accelerator", lambda x: True)
    monkeypatch.setattr(aligned_rows, "permute_quantized", permuted)
