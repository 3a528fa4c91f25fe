"""What quantizers say about a tensor equals what numpy counts."""

from collections.abc import Callable

import numpy as np
import pytest
import torch

from te_models.layers import quantizer as q
from te_models.layers.quantizer.delayed import Float8Quantizer
from tests.layers import emulation as em
from tests.layers import emulation_nvfp4 as em4
from tests.layers.quantizer.inputs import DTYPES, NAMES, matrices

Scales = Callable[[np.ndarray, float], tuple[np.ndarray, tuple[int, int]]]
"""x, overflow -> (float32 factors per block before the cast, the block)."""


def fp8_scales(block: tuple[int, int], **options) -> Scales:
    return lambda x, overflow: (em.scale_of(em.block_amax(x, block), em.E4M3, overflow=overflow, **options), block)


def mx_scales(x: np.ndarray, overflow: float) -> tuple[np.ndarray, tuple[int, int]]:
    byte = em.e8m0_of(em.block_amax(x, (1, 32)), em.E5M2).astype(np.int64)
    return np.where(byte == 255, np.nan, 2.0 ** (127 - byte)), (1, 32)


def tensor_scales(x: np.ndarray, overflow: float) -> tuple[np.ndarray, tuple[int, int]]:
    return em.scale_of(em.block_amax(x, x.shape), em.E4M3), x.shape


def live_scale(x: np.ndarray, overflow: float) -> tuple[np.ndarray, tuple[int, int]]:
    return np.array([[300.0]], np.float32), x.shape


def fp4_scales(x: np.ndarray, overflow: float) -> tuple[np.ndarray, tuple[int, int]]:
    packed = em4.quantize(x)
    decode = np.float32(1) / em4.global_encode(packed.amax)
    with np.errstate(divide="ignore", over="ignore"):
        factor = np.float32(1) / (em.E4M3.decode(packed.scales).astype(np.float32) * decode)
    return np.minimum(factor, np.float32(em.F32_MAX)), (1, 16)


CASES = {
    "tensor": (q.Float8CurrentScalingQuantizer(), tensor_scales, em.E4M3),
    "1x128": (q.Float8BlockQuantizer(block_scaling_dim=1), fp8_scales((1, 128), pow2=True), em.E4M3),
    "128x128": (
        q.Float8BlockQuantizer(force_pow_2_scales=False, amax_epsilon=0.1),
        fp8_scales((128, 128), epsilon=0.1),
        em.E4M3,
    ),
    "1x32": (q.MXFP8Quantizer(fp8_dtype=torch.float8_e5m2), mx_scales, em.E5M2),
    "hybrid": (q.HybridQuantizer(rowwise_quantizer=q.MXFP8Quantizer(fp8_dtype=torch.float8_e5m2)), mx_scales, em.E5M2),
    "1x16": (q.NVFP4Quantizer(), fp4_scales, em4.E2M1),
    "live": (Float8Quantizer(torch.tensor(300.0), None, torch.float8_e4m3fn), live_scale, em.E4M3),
}


def counted(x: np.ndarray, scale: np.ndarray, block: tuple[int, int], fmt: em.Format) -> dict[str, float]:
    used = scale[em.block_amax(x, block) > 0]
    with np.errstate(invalid="ignore", over="ignore"):
        scaled = np.abs(x * em.per_element(scale.astype(np.float32), block, x.shape))
    codes = fmt.codes(np.where(np.isnan(scaled), np.nan, np.minimum(scaled, fmt.max)))
    # in NVFP4 a block's own scale may underflow, too
    zero = em4.quantize(x).values == 0 if fmt is em4.E2M1 else codes == 0
    nonzero = np.abs(x) > 0
    return {
        "amax": float(np.abs(x).max()),
        "scale_min": used.min() if used.size else 1.0,
        "scale_max": used.max() if used.size else 1.0,
        "underflow": (nonzero & zero).sum() / max(nonzero.sum(), 1),
        # a block's own amax times its scale may round to just above the largest value
        "saturation": (scaled > fmt.max * (1 + 2.0**-20)).mean(),
    }


@pytest.mark.sentinels("tensor-torch.float32", "1x32-torch.float32", "live-torch.float32")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_statistics_equal_numpy(name: str, dtype: torch.dtype) -> None:
    quantizer, scales, fmt = CASES[name]
    overflow = em.OVERFLOW[dtype]
    for what, x, values in matrices(dtype, [n for n in NAMES if n != "NaN"]):
        found = quantizer.statistics(x)
        assert list(found) == ["amax", "scale_min", "scale_max", "underflow", "saturation"]
        assert all(value.dtype == torch.float32 and value.shape == () for value in found.values())
        for key, value in counted(values, *scales(values, overflow), fmt).items():
            np.testing.assert_allclose(found[key].item(), value, rtol=1e-6, err_msg=f"{what} {key}")


def test_known_counts() -> None:
    """A live scale of 1: one of four nonzero values becomes 0, two of five are clamped."""
    x = torch.tensor([[1e-4, 1.0, 500.0, -torch.inf, 0.0]])
    found = Float8Quantizer(torch.tensor(1.0), None, torch.float8_e4m3fn).statistics(x)
    assert {k: v.item() for k, v in found.items()} == pytest.approx(
        {"amax": np.inf, "scale_min": 1, "scale_max": 1, "underflow": 0.25, "saturation": 0.4}
    )


@pytest.mark.parametrize("shape", [(0, 16), (16, 0)])
def test_an_empty_tensor(shape: tuple[int, int]) -> None:
    for quantizer in (*(case[0] for case in CASES.values()), q.IdentityQuantizer()):
        found = {k: v.item() for k, v in quantizer.statistics(torch.empty(shape)).items()}
        assert found == {"amax": 0, "scale_min": 1, "scale_max": 1, "underflow": 0, "saturation": 0}


def test_high_precision_loses_nothing() -> None:
    found = q.IdentityQuantizer().statistics(torch.tensor([[1e-40, -3e38]]))
    expected = {"amax": 3e38, "scale_min": 1, "scale_max": 1, "underflow": 0, "saturation": 0}
    assert {k: v.item() for k, v in found.items()} == pytest.approx(expected)


def test_nan_shows_in_amax_and_is_neither_lost_nor_clamped() -> None:
    x = torch.ones(16, 16)
    x[0, 0] = torch.nan
    for quantizer in (q.MXFP8Quantizer(), q.Float8CurrentScalingQuantizer(), q.NVFP4Quantizer()):
        found = quantizer.statistics(x)
        assert found["amax"].isnan() and found["underflow"] == 0
        assert found["saturation"] == 0
