"""Send the calls of the GPU benchmarks to the Triton kernels on a machine without a GPU, as a CUDA tensor would."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor

from bench.gpu import norms, permute
from te_models.kernels import launch
from te_models.kernels.norm.op import norm_fwd
from te_models.kernels.permute import op as permute_op
from tests.kernels.triton.as_on_a_gpu import gemms_as_on_a_gpu


def use_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until the end of the test."""
    monkeypatch.setattr(launch, "as_accelerator", True)
    monkeypatch.setattr(norms, "rms_norm", lambda x, w, eps: norm_fwd(x, w, None, eps, False, False, True)[0])
    monkeypatch.setattr(norms, "layer_norm", lambda x, w, b, eps: norm_fwd(x, w, b, eps, True, False, False)[0])
    monkeypatch.setattr(
        permute_op, "_spread", lambda x, slots, rows, padding: permute_op.permute_rows(x, rows, padding)
    )
    monkeypatch.setattr(permute_op, "_sum", permute_op.sum_slots)
    monkeypatch.setattr(permute, "sort_by_expert", _sort_by_expert)
    gemms_as_on_a_gpu(monkeypatch)


def _sort_by_expert(indices: Tensor, experts: int) -> Any:
    *fields, _ = permute_op.sort_by_expert_op(indices, experts, 1)
    return permute_op.Permutation(*fields, None)
