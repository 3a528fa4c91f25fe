"""Matrices that quantizers are held to the emulation with: every size around a block's edge, every kind of value."""

from collections.abc import Iterator

import numpy as np
import torch

from tests.layers import emulation as em
from tests.layers.emulation_nvfp4 import E2M1

SHAPES = [
    *((1, 1), (1, 1000), (1000, 1), (15, 17), (16, 16), (17, 15), (31, 33), (32, 32), (33, 31), (127, 129)),
    *((128, 128), (129, 127), (16, 1000), (1000, 31)),
]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def _ties(fmt: em.Format, shape: tuple[int, int], whole: float) -> np.ndarray:
    """Numbers halfway between codes; a largest value in every run of 16 makes scales 1 (NVFP4: if one is `whole`)."""
    halves = (fmt.values[1:] + fmt.values[:-1]) / 2
    index = np.arange(shape[0] * shape[1]).reshape(shape)
    x = np.where(index % 2 == 0, 1.0, -1.0) * halves[index * 7 % len(halves)]
    rows, columns = np.indices(shape)
    x[(rows + columns) % 16 == 0] = fmt.max
    x[0, 0] = whole
    return x


def _special(name: str, shape: tuple[int, int], dtype: torch.dtype, rng: np.random.Generator) -> np.ndarray:
    size, limits = shape[0] * shape[1], torch.finfo(dtype)
    normal, sign = rng.standard_normal(shape), rng.choice([-1.0, 1.0], shape)
    flat = rng.permutation(size)[: max(1, size // 40)]
    if name == "zeros":
        return np.where(sign > 0, 0.0, -0.0)
    if name == "denormals":
        return sign * rng.integers(0, 100, shape) * limits.smallest_normal * limits.eps
    if name == "maxima":
        return np.where(rng.random(shape) < 0.7, limits.max, limits.max / 3) * sign
    if name == "every exponent":
        return normal * 2.0 ** rng.integers(-148, 126, shape)
    if name == "equal blocks":
        coarse = rng.standard_normal((shape[0] // 32 + 1, shape[1] // 32 + 1))
        return np.repeat(np.repeat(coarse, 32, 0), 32, 1)[: shape[0], : shape[1]]
    if name.startswith("ties"):
        fmt, whole = {"ties E4M3": (em.E4M3, 448), "ties E5M2": (em.E5M2, 57344), "ties E2M1": (E2M1, 2688)}[name]
        return _ties(fmt, shape, whole)
    values = {"infinities": np.inf, "NaN": np.nan, "outlier": 2.0**100}
    if name in values:
        normal.reshape(-1)[flat[:1] if name == "outlier" else flat] = values[name]
        return normal * (sign if name == "infinities" else 1.0)
    assert name == "normal"
    return normal


NAMES = [
    *("normal", "zeros", "denormals", "maxima", "every exponent", "equal blocks", "ties E4M3", "ties E5M2"),
    *("ties E2M1", "infinities", "NaN", "outlier"),
]


def matrices(dtype: torch.dtype, names: list[str] = NAMES) -> Iterator[tuple[str, torch.Tensor, np.ndarray]]:
    """Yield (what it is, x, x's exact values as float32) for every kind of value and every shape."""
    for name in names:
        for shape in SHAPES:
            rng = np.random.default_rng(list(map(ord, name)) + list(shape))
            values = np.clip(_special(name, shape, dtype, rng), -np.inf, np.inf)
            x = torch.from_numpy(values.astype(np.float32)).to(dtype)
            yield f"{name} {shape}", x, x.float().numpy()
