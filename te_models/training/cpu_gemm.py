"""The dtype in which a run's CPUs multiply 16-bit matrices: one for all ranks, and the same after a resume."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import get_args

import torch

from te_models.kernels.gemm import using_cpu_gemm
from te_models.kernels.gemm.cpu import CpuGemm, automatic_choice

from .checkpoints.checkpoint import TrainingState
from .config import TrainConfig
from .ranks.data_parallel import Ranks, gather_tensors


@contextlib.contextmanager
def cpu_gemm_of_run(
    config: TrainConfig, start: TrainingState | None, ranks: Ranks, device: str
) -> Iterator[TrainConfig]:
    """Set the CPU GEMM of a run and yield its configuration with it, which its checkpoints record.

    "auto" is what the checkpoint has, so that the continued run equals the uninterrupted one, or else what the first
    rank chooses for its machine. On another device nothing is set.
    """
    recorded = (
        "auto" if start is None else start.config["precision"].get("cpu_gemm", "auto")
    )  # absent in earlier releases
    start = None  # the block lasts as long as the run, which has no use for the tensors
    if device != "cpu":
        yield config
        return
    backend = config.precision.cpu_gemm
    backends = get_args(CpuGemm)
    if backend == "auto" and recorded in backends:
        backend = recorded
    if backend == "auto":
        mine = torch.tensor([backends.index(automatic_choice()[0] if ranks.is_main else backends[0])])
        backend = backends[int(gather_tensors({"cpu_gemm": mine}, ranks)["0.cpu_gemm"])]
    with using_cpu_gemm(backend):
        yield config.replace(precision=config.precision.replace(cpu_gemm=backend))
