"""The bits of every format are the recorded ones: neither a change of ours nor another torch moves them unnoticed."""

import pytest
import torch

from tests.kernels.quantize import golden

pytestmark = pytest.mark.usefixtures("each_backend")


def test_bits_are_the_recorded_ones() -> None:
    recorded, found = golden.recorded(), dict(golden.cases())
    assert found.keys() == recorded.keys()
    moved = []
    for name, run in found.items():
        digests = {n: golden.digest(t) for n, t in run(torch.device("cpu")).items()}
        moved += [
            f"{name}: {n}" for n in digests.keys() | recorded[name].keys() if digests.get(n) != recorded[name].get(n)
        ]
    assert moved == [] and sum(map(len, recorded.values())) >= 440


def test_inputs_have_what_decides_between_roundings() -> None:
    x = golden.values((33, 272), torch.float32, 0)
    assert x[x == 0].signbit().any() and not x[x == 0].signbit().all()
    assert 2.0**-11 <= x[x != 0].abs().min() < 2.0**-10 and 2.0**3 < x.abs().max() < 2.0**5
    assert len(x.unique()) > 1000
