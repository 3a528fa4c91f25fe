"""Where the cases run: on the GPU, or on a CPU that stands in for it while the run is rehearsed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Setting:
    """device: of the kernels. rehearse: on a CPU, in Triton's interpreter, with small samples."""

    device: torch.device
    rehearse: bool

    @classmethod
    def make(cls, *, rehearse: bool) -> Setting:
        """Prepare this process, which keeps its preparations to its end."""
        torch.manual_seed(0)
        if rehearse:
            torch.set_num_threads(1)
            with contextlib.suppress(ImportError):  # where there is no triton, every case says so
                from tests.kernels.triton import interpreter
                from tests.patches import Patches

                interpreter.correct(Patches())
        return cls(torch.device("cpu" if rehearse else "cuda"), rehearse)

    @property
    def backend(self) -> str:
        """Of torch.compile; a rehearsal traces graphs and their gradients, and generates no code."""
        return "aot_eager" if self.rehearse else "inductor"

    @contextlib.contextmanager
    def on_device(self) -> Iterator[None]:
        """Inside, operations take the way that they take on a GPU."""
        from tests.kernels.triton.quantize.quantizer_samples import as_on_a_gpu

        with as_on_a_gpu(self.device):
            yield

    def usable(self) -> bool:
        """Whether the device still answers: after an access to foreign memory nothing does."""
        if self.device.type == "cpu":
            return True
        try:
            torch.cuda.synchronize()
            return bool(torch.ones(2, device=self.device).sum().item() == 2)
        except Exception:
            return False

    def synchronize(self) -> None:
        """Wait for the device, so that what goes wrong there goes wrong in the case that started it."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()


def untimed_tiles(*, in_turn: bool) -> None:
    """Until the process ends, no autotuned kernel times its tiles. in_turn: each launch takes another one, so that all
    are tried; else each takes the first, as a graph must that is captured."""
    from triton.runtime.autotuner import Autotuner

    turn = 0

    def run(tuner: Any, *arguments: Any, **named: Any) -> Any:
        nonlocal turn
        tuner.nargs = dict(zip(tuner.arg_names, arguments, strict=False))
        configs = tuner.prune_configs(named)
        turn += in_turn
        return tuner.fn.run(*arguments, **named, **configs[turn % len(configs)].all_kwargs())

    Autotuner.run = run  # type: ignore[method-assign]
