"""The search for fast layouts: all are estimated, in a millisecond each, and the most promising ones planned.

A layout is planned with the choices that are fastest by estimate among those that fit. What activations take beside
their estimate, plans say, of those that keep alike; the order of the others follows.
"""

import contextlib
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from statistics import median

from ..config import ConfigError, ModelConfig
from ..training.config import TrainConfig
from .estimate import options_of
from .guess import Guess, Guesser, Saves
from .layouts import (
    CHOICES,
    Change,
    Estimated,
    Layout,
    Refused,
    changed,
    layouts_of,
    recomputations_of,
    run_of,
    sizes_of,
    updates_of,
)
from .process import model_of
from .result import Hardware, Plan

Planner = Callable[[Sequence[TrainConfig]], list[Plan | ConfigError]]
"""Returns the plan of each run, or why it is refused."""
_USUAL, _PART, _LATER = 12.0, 0.6, 4.0
"""How many times their hidden states layers keep before a plan has said it; which part of that where modules are
computed again; and how many times that where weight gradients are computed later."""
_AGAIN, _BEST = 3, 4
"""Plans of a layout until one fits, and layouts of which more choices are planned at the end."""


@dataclass(eq=False)
class _Choice:
    """A layout with choices. planned: whether its plan was asked for."""

    run: TrainConfig
    guess: Guess
    planned: bool = False


@dataclass(eq=False)
class _Candidate:
    """A layout, and it with the choices that were tried, by what is written of them."""

    its: Layout
    choices: dict[str, _Choice] = field(default_factory=dict)
    plans: list[Plan] = field(default_factory=list)


class Search:
    """Layouts of a run, estimated and planned. at_once: how many plans are made at a time."""

    def __init__(self, config: TrainConfig, ranks: int, hardware: Hardware, plan: Planner, at_once: int) -> None:
        self.config, self.ranks, self.hardware, self.plan, self.at_once = config, ranks, hardware, plan, at_once
        self.model: ModelConfig = model_of(config)
        self.guesser = Guesser(config, self.model, ranks, hardware)
        self.refused: list[Refused] = []
        self.seen: dict[Saves, list[float]] = {}

    def run(self, enough: int, most: int) -> list[Plan | Refused | Estimated]:
        """Return what `plan_layouts` does. enough, most: how many plans that fit, and how many plans, end it."""
        candidates = self._candidates()
        left = list(candidates)

        def ends() -> bool:
            plans = [plan for each in candidates for plan in each.plans]
            return not left or len(plans) >= most or sum(plan.fits for plan in plans) >= enough

        while not ends():
            left.sort(key=lambda each: self._order(self._best(each)))
            some = [(each, self._refined(each)) for each in left[: self.at_once]]
            again = self._plan([(each, choice) for each, choice in some if not choice.planned])
            left = [*again, *left[self.at_once :]]
        if enough:
            self._plan_around_the_best(candidates)
        plans = sorted((plan for each in candidates for plan in each.plans), key=_rank)
        estimated = sorted((self._estimate(each) for each in left if not each.plans), key=lambda each: -each.mfu)
        return [*plans, *estimated, *self.refused]

    def _candidates(self) -> list[_Candidate]:
        """Return all layouts, as ranks share an update first of all, with each way to recompute."""
        data, found = self.config.data, []
        micro_batches, batch = data.gradient_accumulation, data.global_batch_size
        micro_batches = micro_batches if batch is None else batch // data.micro_batch_size
        shape = {"sequence_length": data.sequence_length, "tokens": data.micro_batch_size * data.sequence_length}
        for its in layouts_of(self.model, self.ranks, self.hardware.node_ranks, micro_batches, **shape):
            candidate = _Candidate(its)
            try:
                run = run_of(self.config, self.ranks, its)
                self._try(candidate, run)
            except ConfigError as error:
                self.refused.append(Refused.of(its, error))
                continue
            for each in changed(run, islice(updates_of(run, self.model), 2)):
                self._try_all(candidate, each, recomputations_of(run, self.model))
            found.append(candidate)
        return found

    def _try(self, candidate: _Candidate, run: TrainConfig) -> None:
        key = json.dumps([run.parallel.to_dict(), run.model.to_dict()], sort_keys=True)
        if key not in candidate.choices:
            candidate.choices[key] = _Choice(run, self.guesser.guess(run))

    def _try_all(self, candidate: _Candidate, run: TrainConfig, changes: Iterable[Change]) -> None:
        for each in changed(run, changes):
            with contextlib.suppress(ConfigError):  # stages that the layers do not fill
                self._try(candidate, each)

    def _refined(self, candidate: _Candidate) -> _Choice:
        """Return the layout with the best choices by estimate, found one after the other."""
        for choices in (*CHOICES, *CHOICES[:-1]):
            run = self._best(candidate).run
            self._try_all(candidate, run, choices(run, self.model))
        return self._best(candidate)

    def _plan(self, some: Sequence[tuple[_Candidate, _Choice]]) -> list[_Candidate]:
        """Plan layouts with these choices, and return the layouts of which another choice may fit."""
        plans, again = self.plan([choice.run for _, choice in some]), []
        for (candidate, choice), plan in zip(some, plans, strict=True):
            choice.planned = True
            if isinstance(plan, Plan):
                candidate.plans.append(plan)
                beside = max(0.0, choice.guess.activations(plan.memory))
                self.seen.setdefault(choice.guess.saves, []).append(beside)
                again += [candidate] if not plan.fits and len(candidate.plans) < _AGAIN else []
            else:
                self.refused.append(Refused.of(candidate.its, plan))
        return again

    def _plan_around_the_best(self, candidates: Sequence[_Candidate]) -> None:
        """Plan the layouts whose plans are best with the choices that are best by what is known now."""
        best = sorted((each for each in candidates if each.plans), key=lambda each: min(map(_rank, each.plans)))[:_BEST]
        some = [(each, self._refined(each)) for each in best if any(plan.fits for plan in each.plans)]
        self._plan([(each, choice) for each, choice in some if not self._order(choice)[0] and not choice.planned])

    def _best(self, candidate: _Candidate) -> _Choice:
        """Return the best choices that are not planned, by estimate."""
        return min(candidate.choices.values(), key=lambda choice: (choice.planned, self._order(choice)))

    def _order(self, choice: _Choice) -> tuple[bool, float]:
        """Return what sorts layouts by estimate: those that fit first, by utilization, then by memory."""
        memory, limit = choice.guess.memory(self._activations(choice)), self.hardware.memory_gib * 2**30
        return memory > limit, memory if memory > limit else -choice.guess.mfu

    def _activations(self, choice: _Choice) -> float:
        saves = choice.guess.saves
        if saves in self.seen:
            return median(self.seen[saves])
        others = [median(seen) / _usual(each) for each, seen in self.seen.items()]
        return _usual(saves) * (median(others) if others else 1.0)

    def _estimate(self, candidate: _Candidate) -> Estimated:
        best = self._best(candidate)
        return Estimated(sizes_of(candidate.its), options_of(best.run), best.guess.step_s, best.guess.mfu)


def _usual(saves: Saves) -> float:
    return _USUAL * (_PART if saves[1] else 1.0) * (_LATER if saves[2] else 1.0)


def _rank(found: Plan) -> tuple[int, float]:
    return (0, -found.mfu) if found.fits else (1, found.memory)
