"""The fields of the FP8 quantizers equal, bit for bit, an emulation that shares no code with them."""

from collections.abc import Callable

import numpy as np
import pytest
import torch

from te_models.layers.quantizer import Float8BlockQuantizer, Float8CurrentScalingQuantizer, MXFP8Quantizer, Quantizer
from tests.layers import emulation as em
from tests.layers.quantizer.inputs import DTYPES, matrices

pytestmark = pytest.mark.usefixtures("each_backend")

Emulation = Callable[[np.ndarray, em.Format, float], em.Quantized]
FORMATS = {f.dtype: f for f in (em.E4M3, em.E5M2)}


def per_tensor(**options) -> dict[str, Emulation]:
    return {"rowwise": lambda x, fmt, overflow: em.per_tensor(x, fmt, **options)}


def blocks(rows: int, columns: int, kind: str, epsilon: float = 0.0, both: bool = False) -> dict[str, Emulation]:
    found: dict[str, Emulation] = {
        "rowwise": lambda x, fmt, overflow: em.quantize(x, (rows, columns), fmt, kind, overflow, epsilon)
    }
    if both:
        found["columnwise"] = lambda x, fmt, overflow: em.quantize(x, (columns, rows), fmt, kind, overflow, epsilon)
    return found


CASES: dict[str, tuple[Quantizer, dict[str, Emulation]]] = {
    "tensor": (Float8CurrentScalingQuantizer(), per_tensor()),
    "tensor E5M2": (Float8CurrentScalingQuantizer(fp8_dtype=torch.float8_e5m2), per_tensor()),
    "tensor pow2": (Float8CurrentScalingQuantizer(force_pow_2_scales=True), per_tensor(pow2=True)),
    "tensor epsilon": (Float8CurrentScalingQuantizer(amax_epsilon=3.0), per_tensor(epsilon=3.0)),
    "1x128": (Float8BlockQuantizer(block_scaling_dim=1), blocks(1, 128, "pow2", both=True)),
    "1x128 float32": (
        Float8BlockQuantizer(block_scaling_dim=1, force_pow_2_scales=False, amax_epsilon=1e-3),
        blocks(1, 128, "float32", 1e-3, both=True),
    ),
    "128x128 E5M2": (Float8BlockQuantizer(fp8_dtype=torch.float8_e5m2), blocks(128, 128, "pow2")),
    "128x128 float32": (Float8BlockQuantizer(force_pow_2_scales=False), blocks(128, 128, "float32")),
    "128x128 epsilon": (Float8BlockQuantizer(amax_epsilon=1e-2), blocks(128, 128, "pow2", 1e-2)),
    "1x32": (MXFP8Quantizer(), blocks(1, 32, "e8m0", both=True)),
    "1x32 E5M2": (MXFP8Quantizer(fp8_dtype=torch.float8_e5m2), blocks(1, 32, "e8m0", both=True)),
    "32x32": (MXFP8Quantizer(two_dimensional=True), blocks(32, 32, "e8m0")),
}


def same_codes(got: np.ndarray, expected: np.ndarray, fmt: em.Format) -> bool:
    """Whether codes are equal; a NaN may have either sign and any payload."""
    nan = np.isnan(fmt.decode(expected))
    return np.array_equal(np.isnan(fmt.decode(got)), nan) and np.array_equal(got[~nan], expected[~nan])


@pytest.mark.sentinels("1x32-torch.float32", "128x128 float32-torch.float32", "tensor E5M2-torch.bfloat16")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_fields_equal_the_emulation(name: str, dtype: torch.dtype) -> None:
    quantizer, emulated = CASES[name]
    fmt = FORMATS[quantizer.fp8_dtype]
    overflow = em.OVERFLOW[dtype]
    for what, x, values in matrices(dtype):
        fields = quantizer.quantize_fields(x)
        assert sorted(fields) == sorted(f"{u}_{part}" for u in emulated for part in ("data", "scale_inv"))
        for usage, emulate in emulated.items():
            expected = emulate(values, fmt, overflow)
            # 128-blocks store the columnwise copy transposed, MXFP8 does not
            transposed = usage == "columnwise" and isinstance(quantizer, Float8BlockQuantizer)
            data, scale_inv = (fields[f"{usage}_{part}"] for part in ("data", "scale_inv"))
            assert data.dtype == quantizer.fp8_dtype
            data, scale_inv = (t.mT if transposed else t for t in (data.view(torch.uint8), scale_inv))
            stored = expected.stored[0, 0] if scale_inv.dim() == 0 else expected.stored
            assert same_codes(data.numpy(), expected.codes, fmt), (what, usage)
            np.testing.assert_array_equal(scale_inv.numpy(), stored, err_msg=f"{what} {usage}", strict=True)


@pytest.mark.sentinels("1x128-torch.float32", "1x32 E5M2-torch.float32", "tensor-torch.float32")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_dequantized_values_equal_the_emulation(name: str, dtype: torch.dtype) -> None:
    """Both orientations, from the stored copy and from the path that keeps none."""
    quantizer, emulated = CASES[name]
    fmt = FORMATS[quantizer.fp8_dtype]
    overflow = em.OVERFLOW[dtype]
    for what, x, values in matrices(dtype, ["normal", "denormals", "NaN"]):
        fields = quantizer.quantize_fields(x)
        rowwise = emulated["rowwise"](values, fmt, overflow).values
        got = quantizer.dequantize_fields(fields, torch.float32, x.shape)
        np.testing.assert_array_equal(got.numpy(), rowwise.astype(np.float32), err_msg=what)
        for usage in ("rowwise", "columnwise"):
            expected = emulated.get(usage, emulated["rowwise"])(values, fmt, overflow).values.astype(np.float32)
            for operand in (
                quantizer.rounded(x, usage, torch.float32),
                quantizer.operand_of_fields(fields, usage, torch.float32, x.shape),
            ):
                scaled = operand.values if operand.scale is None else operand.values * operand.scale
                np.testing.assert_array_equal(scaled.numpy(), expected, err_msg=f"{what} {usage}", strict=True)
