"""A step of AdamW in one C++ pass over weight, gradient and moments, on CPU, where some of them are in few bits.

The other way writes what is not float32 to working copies, runs torch's kernel on them and rounds them: three passes
over several times the bytes. Both have the same bits; the first step of a process checks that.
"""

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from te_models.kernels.quantize import hash_key
from te_models.kernels.quantize.cpu import moments as cpu_moments

from .adamw_update import ParameterSlice, Update, update_
from .moments import BLOCK

VECTOR = 16
"""Elements that torch's kernel updates at once, or a multiple of that. Those that are left over, it computes one by
one, and adds in another order."""
_DTYPES = (torch.float32, torch.bfloat16)


def run_one_pass(
    piece: ParameterSlice, weight: Tensor, moments: Sequence[Tensor], group: dict[str, Any], seed: int
) -> Iterator[ParameterSlice]:
    """Update a weight and its moments in the step that the step count says; yield the parts that are as they were, for
    a NaN in their moments, each as a piece of the weight."""
    key, step = hash_key(seed, piece.index), piece.state["step"].to(torch.int32)
    beta1, beta2 = group["betas"]
    scalars = (float(group["lr"]), beta1, beta2, group["eps"], group["weight_decay"])
    hyperparameters = cpu_moments.Hyperparameters(*scalars, t=piece.state["step"].item())
    left = cpu_moments.adamw_step(weight, piece.gradient, moments, key, step, hyperparameters)
    for written in (weight, *moments):
        torch.autograd.graph.increment_version(written)  # as torch's own kernels do
    if left is None:
        return
    names = [name for name in piece.state if name not in ("step", "master")]
    values, counts = torch.unique_consecutive(left, return_counts=True)
    end = 0
    for is_left, count in zip(values.tolist(), counts.tolist(), strict=True):
        begin, end = end, end + count
        if is_left:
            numbers = slice(begin * BLOCK, min(end * BLOCK, weight.numel()))
            state = {"step": piece.state["step"]}
            for name in names:
                stored = piece.state[name]
                state[name] = stored[begin:end] if len(moments) == 4 else stored.view(-1)[numbers]
            yield ParameterSlice(
                weight.view(-1)[numbers], piece.gradient.view(-1)[numbers], state, piece.index, begin * BLOCK
            )


@functools.cache
def has_the_bits() -> bool:
    """Whether one pass leaves the bits of torch's kernel between decoding and encoding, on this processor and with this
    torch: its compiler decides where it multiplies and adds in one instruction."""
    return cpu_moments.available() and all(_agree(beta1, x) for beta1 in (0.9, 0.4) for x in _DTYPES)


def _agree(beta1: float, dtype: torch.dtype) -> bool:
    n, generator = 1008, torch.Generator().manual_seed(0)
    new: dict[str, Any] = {"generator": generator, "dtype": torch.float32, "device": "cpu"}
    weight, gradient = (torch.randn(n, **new).to(dtype) for _ in range(2))
    first, second = torch.randn(n, **new), torch.rand(n, **new)
    key, (step, begin) = hash_key(1, 2), torch.tensor([7, 0], dtype=torch.int32, device="cpu")
    stored = cpu_moments.encode_moments(first, second, key, begin, begin) or ()
    group = {"lr": 1e-3, "betas": (beta1, 0.99), "eps": 1e-8, "weight_decay": 0.1}
    copy = weight.float()
    read = cpu_moments.decode_moments(*stored, shape=(n,))
    assert read is not None, "these are as they were encoded"
    state = {"step": torch.tensor(7.0, dtype=torch.float32, device="cpu")}
    update_([Update(ParameterSlice(weight, gradient, state, 2), copy, gradient.float(), *read)], group, None)
    expected = copy.to(dtype), *(cpu_moments.encode_moments(*read, key, step, begin) or ())
    values = cpu_moments.Hyperparameters(1e-3, beta1, 0.99, 1e-8, 0.1, 7.0)
    cpu_moments.adamw_step(weight, gradient, stored, key, step, values)
    found = weight, *stored
    return all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(found, expected, strict=True))
