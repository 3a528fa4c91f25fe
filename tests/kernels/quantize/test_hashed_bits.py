"""The hash behind stochastically rounded moments: an emulation in integers, uniform, unlike from step to step."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from te_models.kernels.quantize import hash_key, hashed_bits

N = 1 << 16
WORD = (1 << 32) - 1


def mix(x: int) -> int:
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & WORD
    x = ((x ^ (x >> 15)) * 0x846CA68B) & WORD
    return x ^ (x >> 16)


def emulate(seed: int, stream: int, step: int, index: int) -> int:
    """The definition, in Python's integers."""
    state = 0
    for word in (seed & WORD, (seed >> 32) & WORD, stream):
        state = mix(((state + 0x9E3779B9) & WORD) ^ word)
    k0, k1 = state, mix((state + 0x9E3779B9) & WORD)
    s0, s1 = mix(k0 ^ step), mix(k1 ^ step)
    return mix((mix((index & WORD) ^ s0) + s1) & WORD)


def scalar(value: int) -> torch.Tensor:
    return torch.tensor((value + 2**31) % 2**32 - 2**31, dtype=torch.int32)


def draw(seed: int, stream: int, step: int, size: int = N, begin: int = 0) -> torch.Tensor:
    return hashed_bits(hash_key(seed, stream), scalar(step), scalar(begin), (size,))


@given(
    seed=st.integers(-(2**63), 2**63 - 1),
    stream=st.integers(0, WORD),
    step=st.integers(0, 2**31 - 1),
    begin=st.integers(0, 2**33),
)
@settings(max_examples=50, deadline=None)
def test_bits_are_the_hash_of_the_elements_index(seed: int, stream: int, step: int, begin: int) -> None:
    found = draw(seed, stream, step, 5, begin).numpy().view(np.uint32)
    assert found.tolist() == [emulate(seed, stream, step, begin + i) for i in range(5)]


@pytest.mark.slow
@pytest.mark.parametrize("size", [75, 1, 15, 1000, 4099])
def test_compiled_bits_are_the_same(size: int) -> None:
    """Products that wrap around, also where the compiler's loop has a tail."""
    compiled = torch.compile(hashed_bits, fullgraph=True)
    arguments = (hash_key(-7, 3), scalar(12), scalar(2**31 - 20), (size,))
    assert torch.equal(compiled(*arguments), hashed_bits(*arguments))


@pytest.mark.parametrize("size", [1, 64, 1000, N])
def test_pieces_of_any_size_have_the_bits_of_the_whole(size: int) -> None:
    whole = draw(1, 2, 3)
    count = min(4 * size, N)
    parts = [draw(1, 2, 3, min(size, count - begin), begin) for begin in range(0, count, size)]
    assert torch.equal(torch.cat(parts), whole[:count])


def bit_matrix(words: torch.Tensor) -> np.ndarray:
    """[n, 32] of 0 and 1."""
    return np.unpackbits(words.numpy().view(np.uint8)).reshape(len(words), 32).astype(np.float64)


@pytest.mark.parametrize("seed", [0, 1, 1 << 40])
@pytest.mark.parametrize("step", [0, 1, 1000])
def test_bits_are_uniform(seed: int, step: int) -> None:
    """Half of each bit, and 16-bit halves evenly in 256 bins: chi-square of mean 255, deviation 22.6; within 5.5."""
    words = draw(seed, 1, step)
    assert np.abs(bit_matrix(words).mean(0) - 0.5).max() < 5.5 * 0.5 / N**0.5
    for half in (words & 0xFFFF, (words >> 16) & 0xFFFF):
        for part in (half & 0xFF, half >> 8):
            counts = np.bincount(part.numpy(), minlength=256)
            assert abs(((counts - N / 256) ** 2 / (N / 256)).sum() - 255) < 5.5 * 22.6


@pytest.mark.parametrize("other", ["step", "stream", "seed", "neighbour", "half", "far"])
def test_two_draws_are_unrelated(other: str) -> None:
    """Bits agree half the time (32 x 32 pairs), and products have the mean of independent numbers; 5.5 deviations."""
    ours = draw(5, 1, 7)
    theirs = {
        "step": draw(5, 1, 8),
        "stream": draw(5, 2, 7),
        "seed": draw(6, 1, 7),
        "neighbour": draw(5, 1, 7, N, 1),
        "half": (ours >> 16) & 0xFFFF,
        "far": draw(5, 1, 7, N, 1 << 24),
    }[other]
    ones, others = (2 * bit_matrix(words) - 1 for words in (ours, theirs))
    pairs = np.abs(ones.T @ others) / N
    if other == "half":  # bytes 0 and 1 of one are bytes 2 and 3 of the other
        pairs = pairs[:16, :16]
    assert pairs.max() < 5.5 / N**0.5
    u, v = (((words & 0xFFFF).double() / 65536 - 0.5) for words in (ours, theirs))
    assert abs((u * v).mean()) < 5.5 / 12 / N**0.5


def test_an_element_sees_unrelated_words_from_step_to_step() -> None:
    """What a running average averages over: the low 16 bits of one element along 4096 steps."""
    u = (torch.stack([draw(3, 1, step, 256) for step in range(4096)]) & 0xFFFF).double() / 65536 - 0.5
    # 256 means of 4096 uniform numbers of variance 1 / 12, and 256 correlations of successive ones
    assert u.mean(0).abs().max() < 5.5 * (1 / 12 / 4096) ** 0.5
    assert (u[1:] * u[:-1]).mean(0).abs().max() < 5.5 / 12 / 4096**0.5
