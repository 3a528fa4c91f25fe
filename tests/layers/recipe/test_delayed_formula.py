"""Delayed scaling's scales, history and live quantizer against the formula, step by step in numpy."""

import numpy as np
import pytest
import torch

from te_models.layers.quantizer.delayed import Float8Quantizer, next_history, next_scale
from tests.layers import emulation as em
from tests.layers.quantizer.inputs import DTYPES, matrices

INF, NAN = float("inf"), float("nan")
AMAXES = [3.0, 0.0, 7.5, INF, 1e-3, 0.0, NAN, 2.0**-149, 1.0, 1e38, 5.0, 448.0, 0.3, 0.3, 1e-45, 9.0, 8.0, 7.0, 6.0]


def emulated(
    scale: np.float32, history: list[float], last: float, length: int, fp8_max: float, margin: int, algorithm: str
) -> tuple[np.float32, list[float]]:
    """One step. history: the earlier amaxes, newest first, at most length - 1 of them."""
    if last == 0:
        return scale, history
    seen = [last, *history]
    amax = np.float32(last if algorithm == "most_recent" else max(a for a in [*seen, 0.0] if a == a))
    with np.errstate(over="ignore", divide="ignore"):
        found = np.float32(fp8_max * 2.0**-margin) / amax
    if amax > 0 and np.isfinite(amax):
        scale = np.float32(em.F32_MAX) if np.isinf(found) else found if found > 0 else scale
    return scale, seen[: length - 1]


@pytest.mark.parametrize("algorithm", ["max", "most_recent"])
@pytest.mark.parametrize("length, margin", [(1, 0), (2, 3), (5, 0), (1024, -2)])
@pytest.mark.parametrize("fmt", [em.E4M3, em.E5M2], ids=["E4M3", "E5M2"])
def test_scale_and_history_follow_the_formula(fmt: em.Format, length: int, margin: int, algorithm: str) -> None:
    """Zero leaves all as it is; infinity and NaN leave the scale; a scale that overflows is the largest float32."""
    rng = np.random.default_rng(0)
    orders = [AMAXES, *(list(rng.permutation(AMAXES)) for _ in range(3))]
    # [steps, columns], each column an independent history
    steps = torch.tensor(np.array(orders).T, dtype=torch.float32)
    scale, history = torch.ones(len(orders)), torch.zeros(length - 1, len(orders))
    expected: list[tuple[np.float32, list[float]]] = [(np.float32(1), [])] * len(orders)
    changes = 0
    for last in steps:
        amaxes = torch.cat((last[None], history))
        scale = next_scale(scale, amaxes, last, torch.tensor(fmt.max), margin, algorithm)
        history = next_history(history, last)
        before = expected
        options = (length, fmt.max, margin, algorithm)
        expected = [emulated(*one, float(amax), *options) for one, amax in zip(expected, last.numpy(), strict=True)]
        changes += sum(a[0] != b[0] for a, b in zip(before, expected, strict=True))
        np.testing.assert_array_equal(scale.numpy(), [s for s, _ in expected])
        for column, (_, seen) in zip(history.T, expected, strict=True):
            np.testing.assert_array_equal(column.numpy(), np.pad(seen, (0, length - 1 - len(seen))).astype(np.float32))
    assert changes > 4


@pytest.mark.matrix
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("fmt", [em.E4M3, em.E5M2], ids=["E4M3", "E5M2"])
def test_the_live_quantizer_multiplies_by_its_scale_and_records_amax(fmt: em.Format, dtype: torch.dtype) -> None:
    for factor in (1.0, 300.0, 1e-3, em.F32_MAX):
        for what, x, values in matrices(dtype, ["normal", "NaN", "infinities", "ties E4M3", "denormals"]):
            scale, amax = torch.tensor(factor), torch.tensor(0.5)
            fields = Float8Quantizer(scale, amax, fmt.dtype).quantize_fields(x)
            expected = em.cast(values, np.float32(factor), fmt)
            got, nan = fields["rowwise_data"].view(torch.uint8).numpy(), np.isnan(fmt.decode(expected))
            assert np.array_equal(np.isnan(fmt.decode(got)), nan), what
            assert np.array_equal(got[~nan], expected[~nan]), what
            assert fields["rowwise_scale_inv"].item() == np.float32(1) / np.float32(factor)
            # NaN is ignored by the maximum
            assert amax.item() == (0.5 if np.isnan(values).any() else max(0.5, np.abs(values).max())), what
