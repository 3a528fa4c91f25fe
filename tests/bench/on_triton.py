"""Send the calls of the GPU benchmarks to the Triton kernels on a machine without a GPU, as a CUDA tensor would."""

from typing import Any

from torch import Tensor

from bench.gpu import norms, permute
from bench.gpu.shapes import Grouped, Shapes
from te_models.kernels import launch
from te_models.kernels.norm.op import norm_fwd
from te_models.kernels.permute import op as permute_op
from tests.kernels.triton.as_on_a_gpu import gemms_as_on_a_gpu
from tests.patches import Patching

TINY = Shapes(
    quantize=(40, 160),
    groups=3,
    norms=((5, 48),),
    permute=(6, 2, 32, 4),
    grouped=(Grouped("3 experts", 40, 32, 48, 3),),
    linear=((16, 32, 48),),
    copy_megabytes=1,
    matmul=64,
)


def use_triton(monkeypatch: Patching) -> None:
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
