"""How fast this machine multiplies, and how many batches it therefore trains on: a person waits.

Nearly all of a training step is GEMMs, so that one of the model's own, timed for a moment, says beforehand how long the
steps take. Nothing is skipped on a slow machine: every check is made, on fewer batches.
"""

import time
from dataclasses import replace

import torch
import torch.nn.functional as F

from te_models.kernels.gemm.cpu import cpu_gemm

from ..sizes import plural
from .run import QuickstartSizes

_TOKENS, _HIDDEN, _FFN = 256, 576, 1536
_SECONDS = 0.3


@torch.no_grad()
def gemm_gflops(seconds: float = _SECONDS) -> float:
    """Return the GFLOP/s of the GEMM of a training step, in the dtype in which this machine runs it: the best of what
    `seconds` allow, so that a neighbour's moment does not count."""
    dtype = torch.float32 if cpu_gemm() == "float32" else torch.bfloat16
    x = torch.ones(_TOKENS, _HIDDEN, dtype=dtype, device="cpu")
    w = torch.ones(_FFN, _HIDDEN, dtype=dtype, device="cpu")
    best, end = float("inf"), time.perf_counter() + seconds
    while best == float("inf") or time.perf_counter() < end:
        begun = time.perf_counter()
        F.linear(x, w)
        best = min(best, time.perf_counter() - begun)
    return 2e-9 * _TOKENS * _HIDDEN * _FFN / best


def paced(sizes: QuickstartSizes, gflops: float) -> QuickstartSizes:
    """Return the sizes with as many training batches as a machine of this speed reads in time: a multiple of four from
    `fewest_batches` to `train_batches`, of which the same part is compared. Below `full_gflops` training is not
    compiled: a slow machine compiles for minutes, and a few dozen steps do not earn that back."""
    count = 4 * int(sizes.train_batches * gflops / sizes.full_gflops / 4)
    count = min(sizes.train_batches, max(sizes.fewest_batches, count))
    compared = max(4, sizes.compared * count // sizes.train_batches)
    compiled = sizes.compile and gflops >= sizes.full_gflops
    return replace(sizes, train_batches=count, compared=compared, compile=compiled)


def pace_line(sizes: QuickstartSizes, chosen: QuickstartSizes, gflops: float) -> str:
    """Say how fast the machine is, how many batches that makes, and why they are fewer than elsewhere if they are."""
    speed = f"speed: {gflops:.0f} GFLOP/s in GEMMs with {plural(torch.get_num_threads(), 'thread')}"
    if gflops >= sizes.full_gflops:
        return f"{speed}: training on all {sizes.train_batches} batches, compiled"
    return (
        f"{speed}: training on {chosen.train_batches} of {sizes.train_batches} batches, without the compiler, to end "
        f"within minutes (from {sizes.full_gflops:.0f} GFLOP/s on: all, compiled)"
    )
