"""What the library of moments takes: its own memory for what it writes, and the dtypes and sizes that it reads."""

import pytest
import torch
from torch import Tensor

from te_models.kernels.quantize import hash_key
from te_models.kernels.quantize.cpu import moments as cpu_moments

E4M3 = torch.float8_e4m3fn
N = 256
WORD = torch.zeros((), dtype=torch.int32)


@pytest.fixture(autouse=True)
def _has_one() -> None:
    if not cpu_moments.available():
        pytest.skip("no library could be compiled")


def both() -> tuple[Tensor, Tensor]:
    return torch.linspace(-1, 1, N), torch.linspace(0, 1, N)


def test_a_step_reads_and_writes_memory_of_its_own() -> None:
    first, second = both()
    moments = cpu_moments.encode_moments(first, second, hash_key(1, 2), WORD, WORD)
    assert moments is not None
    weight, gradient = torch.zeros(N), torch.ones(N)
    assert cpu_moments.updates(weight, gradient, moments)
    assert cpu_moments.updates(weight, gradient, [m.bfloat16() for m in both()])
    memory = torch.zeros(2 * N)
    assert not cpu_moments.updates(memory[:N], memory[1 : N + 1], moments), "the gradient is in the weight's memory"
    assert not cpu_moments.updates(weight, gradient, [first, first]), "two moments are one tensor"
    assert not cpu_moments.updates(memory[::2], gradient, moments)
    assert not cpu_moments.updates(weight, first[:1], moments)
    assert not cpu_moments.updates(weight, gradient.to("meta"), moments)
    assert not cpu_moments.updates(weight, gradient, [first, second.bfloat16()])
    assert not cpu_moments.updates(weight, gradient, [m.view(torch.uint8) if m.dtype == E4M3 else m for m in moments])
    assert not cpu_moments.updates(weight.double(), gradient, moments)


def test_what_does_not_fit_is_left_to_the_definition() -> None:
    first, second = both()
    key = hash_key(1, 2)
    assert cpu_moments.encode_moments(first, second[:-1], key, WORD, WORD) is None
    assert cpu_moments.encode_moments(first, second.double(), key, WORD, WORD) is None
    moments = cpu_moments.encode_moments(first, second, key, WORD, WORD)
    wrong = moments[0], moments[1].double(), moments[2], moments[3]
    assert cpu_moments.encode_moments(first, second, key, WORD, WORD, out=wrong) is None
    assert cpu_moments.decode_moments(*wrong, shape=(N,)) is None
    assert cpu_moments.decode_moments(*moments, shape=(N + 1,)) is None
    assert cpu_moments.decode_moments(*moments, shape=(N,)) is not None
    out = torch.zeros(N, dtype=torch.bfloat16)
    assert not cpu_moments.round_moments(first, second, key, WORD, WORD, out=(out, out))
    assert cpu_moments.round_moments(first, second, key, WORD, WORD, out=(out, out.clone()))
