"""Send the calls of the GPU benchmarks to the Triton kernels on a machine without a GPU, as a CUDA tensor would."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from bench.gpu import norms, permute
from te_models.kernels import quantize as q
from te_models.kernels.norm.op import norm_fwd
from te_models.kernels.permute import op as permute_op
from te_models.kernels.quantize import op_nvfp4, registered
from tests.kernels.triton.as_on_a_gpu import gemms_as_on_a_gpu


def use_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until the end of the test."""
    _quantize(monkeypatch)
    monkeypatch.setattr(op_nvfp4, "on_accelerator", lambda x: True)
    monkeypatch.setattr(norms, "rms_norm", lambda x, w, eps: norm_fwd(x, w, None, eps, False, False, True)[0])
    monkeypatch.setattr(norms, "layer_norm", lambda x, w, b, eps: norm_fwd(x, w, b, eps, True, False, False)[0])
    monkeypatch.setattr(
        permute_op, "_spread", lambda x, slots, rows, padding: permute_op.permute_rows(x, rows, padding)
    )
    monkeypatch.setattr(permute_op, "_sum", permute_op.sum_slots)
    monkeypatch.setattr(permute, "sort_by_expert", _sort_by_expert)
    gemms_as_on_a_gpu(monkeypatch)


def _quantize(monkeypatch: pytest.MonkeyPatch) -> None:
    def blockwise(x: Tensor, block: tuple[int, int], fp8: torch.dtype, kind: str, epsilon: float = 0.0) -> Any:
        return registered.quantize_blockwise(x, list(block), fp8, kind, epsilon)

    def both(x: Tensor, block: tuple[int, int], fp8: torch.dtype, kind: str, epsilon: float = 0.0) -> Any:
        return registered.quantize_blockwise_both(x, list(block), fp8, kind, epsilon)

    def by_groups(x: Tensor, splits: Tensor, block: tuple[int, int], fp8: torch.dtype, kind: str, **usage: bool) -> Any:
        wanted = usage.get("rowwise", True), usage.get("columnwise", True)
        return registered.quantize_grouped_blockwise(x, splits, list(block), fp8, kind, 0.0, *wanted)

    def back(data: Tensor, stored: Tensor, block: tuple[int, int], dtype: torch.dtype) -> Tensor:
        return registered.dequantize_blockwise(data, stored, list(block), dtype)

    functions = {
        "amax": registered.amax,
        "quantize_per_tensor": registered.quantize_per_tensor,
        "quantize_per_tensor_both": registered.quantize_per_tensor_both,
        "quantize_blockwise": blockwise,
        "quantize_blockwise_both": both,
        "quantize_grouped_blockwise": by_groups,
        "dequantize_blockwise": back,
    }
    for name, function in functions.items():
        monkeypatch.setattr(q, name, function)


def _sort_by_expert(indices: Tensor, experts: int) -> Any:
    *fields, _ = permute_op.sort_by_expert_op(indices, experts, 1)
    return permute_op.Permutation(*fields, None)
