"""Learning-rate schedules: pure functions of the step, so that a resumed run needs no scheduler state.

All start with a linear warm-up that reaches the peak at step `warmup_steps - 1`. "constant" stays there. "linear" falls
along a line, "cosine" (arXiv 1608.03983) along half a cosine, to `min_lr_ratio` at the last step. "inverse_sqrt"
(arXiv 1706.03762) falls as sqrt(warmup_steps / (step + 1)). "wsd" (warm-up, stable, decay, arXiv 2404.06395) stays at
the peak and falls over the last `decay_steps`, linearly or as 1 - sqrt of what is done of them (arXiv 2405.18392).
"""

import math

from ..config import ScheduleConfig


def lr_at(step: int, *, peak: float, steps: int, schedule: ScheduleConfig) -> float:
    """Return the learning rate of step number `step` (from 0) in a run of `steps`."""
    warmup, floor = schedule.warmup_steps, schedule.min_lr_ratio
    if step < warmup:
        return peak * (step + 1) / warmup
    if schedule.kind == "constant":
        return peak
    if schedule.kind == "inverse_sqrt":
        return peak * max(floor, math.sqrt(max(warmup, 1) / (step + 1)))
    if schedule.kind in ("linear", "cosine"):
        progress = _fraction(step - warmup, steps - 1 - warmup)
        share = 1 - progress if schedule.kind == "linear" else 0.5 * (1 + math.cos(math.pi * progress))
        return peak * (floor + (1 - floor) * share)
    decay = schedule.decay_steps if schedule.decay_steps is not None else default_decay_steps(steps, warmup)
    progress = _fraction(step - (steps - 1 - decay), decay)
    done = math.sqrt(progress) if schedule.lr_wsd_decay_style == "minus_sqrt" else progress
    return peak * (1 - (1 - floor) * done)


def default_decay_steps(steps: int, warmup: int) -> int:
    """A tenth of the run, at least one step, never overlapping the warm-up."""
    return max(1, min(steps // 10, steps - warmup))


def _fraction(done: int, total: int) -> float:
    return 1.0 if total <= 0 else min(1.0, max(0.0, done / total))
