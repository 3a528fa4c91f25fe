"""A trace of some steps by torch.profiler: a file of each rank for chrome://tracing or Perfetto."""

from pathlib import Path
from typing import Any, Self

import torch

from te_models.checkpoints.io.atomic import replaced_file

from ...terminal import say
from ..config import ProfileConfig
from ..ranks.data_parallel import Ranks


class StepProfiler:
    """Traces the steps of [profile], to be used in a `with` around the steps of a run; `begin` and `end` each one.

    A run that ends, or fails, among these steps writes the trace of those that it did.
    """

    def __init__(self, config: ProfileConfig, output_dir: Path, device: str, ranks: Ranks) -> None:
        self.config, self._device, self._ranks = config, device, ranks
        self.folder = output_dir / "profile" if config.folder is None else Path(config.folder)
        self._profile: Any = None
        self._step: Any = None
        self._first = self._last = 0

    def begin(self, step: int) -> None:
        """Begin a step, counted from 1 as in the metrics."""
        first = self.config.start_step
        if self._profile is None and first <= step < first + self.config.num_steps:
            activities = [torch.profiler.ProfilerActivity.CPU]
            activities += [torch.profiler.ProfilerActivity.CUDA] if self._device == "cuda" else []
            self._profile = torch.profiler.profile(activities=activities, acc_events=True)
            self._profile.start()
            self._first = step
        if self._profile is not None:
            self._step = torch.profiler.record_function(f"step {step}")
            self._step.__enter__()
            self._last = step

    def end(self, step: int) -> None:
        """End a step; after the last one, write the trace."""
        if self._profile is None:
            return
        self._step.__exit__(None, None, None)
        self._step = None
        if step >= self.config.start_step + self.config.num_steps - 1:
            self._write()

    def _write(self) -> None:
        profile, self._profile = self._profile, None
        if self._step is not None:  # which failed
            self._step.__exit__(None, None, None)
        if self._device == "cuda":
            torch.cuda.synchronize()
        profile.stop()
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / f"rank{self._ranks.rank}.steps-{self._first}-{self._last}.json"
        with replaced_file(path) as temporary:
            profile.export_chrome_trace(str(temporary))
        if self._ranks.is_main:
            say(f"the trace of steps {self._first} to {self._last} is in {self.folder}")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._profile is not None:
            self._write()
