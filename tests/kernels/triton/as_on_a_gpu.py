"""GEMMs on a CPU tensor as they would run on an H100, the Triton kernels under the interpreter."""

from torch import Tensor

from te_models.kernels import launch, libraries
from te_models.kernels import quantize as q
from te_models.kernels.backend import Answer, Backend
from te_models.kernels.custom_op import flatten
from te_models.kernels.gemm import op as dense
from te_models.kernels.gemm.backends import DeviceCapability
from te_models.kernels.grouped_gemm import op, scaled
from te_models.kernels.permute import Permutation
from te_models.kernels.permute.quantized import permute_quantized_op
from te_models.layers.gemm import product as gemm_operand
from te_models.layers.gemm import quantized_rows
from tests.patches import Patching

# torch with an older CUDA: 128-blocks then are for Triton, too
H100 = DeviceCapability("cuda", (9, 0), True, (12, 8))


class NoLibrary:
    """What the backend has kept: no library of the CPU for anything."""

    def get(self, key: object) -> Answer:
        return Answer(Backend.DEFINITION, "it is for a CPU")


def gemms_as_on_a_gpu(monkeypatch: Patching) -> None:
    """Until the end of the test. Per-tensor GEMMs whose N and K are multiples of 16 still go to torch, on the CPU."""
    for module in (dense, op, scaled):
        monkeypatch.setattr(module, "hardware", lambda device: H100)
    for module in (dense, scaled):
        monkeypatch.setattr(module, "in_plain_torch", lambda device: False)
    monkeypatch.setattr(gemm_operand, "_DEQUANTIZING_DEVICES", ())
    monkeypatch.setattr(libraries, "answers", NoLibrary())


def rows_as_on_a_gpu(monkeypatch: Patching) -> None:
    """Until the end of the test, the Triton kernels quantize and dequantize, tokens on the way to their experts too."""

    def permuted(x: Tensor, permutation: Permutation, output: q.QuantizedOutput) -> list[Tensor]:
        topk = permutation.row_of_slot.shape[1]
        return permute_quantized_op(x, permutation.slot_of_row, topk, None, *flatten(output))

    monkeypatch.setattr(launch, "as_accelerator", True)
    monkeypatch.setattr(libraries, "answers", NoLibrary())
    monkeypatch.setattr(quantized_rows, "permute_quantized", permuted)
