"""The rehearsal from top to bottom: short runs in bf16, errors of operands, effects on the loss, search, verification.

Each part is measured once and written (`notebook`), so that a rehearsal that was killed goes on where it was.
"""

import contextlib
import dataclasses
import hashlib
import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from te_models.checkpoints import save_model
from te_models.kernels.backend import using_backend

from ..memory import return_freed_memory
from ..model import GPTModel
from ..training.config import PrecisionConfig, TrainConfig
from ..training.one_run import alone_in
from ..training.precision import cpu_gemm_of_run
from ..training.ranks.data_parallel import Ranks
from ..training.step import TrainingError
from .effect import Interval, Teacher, train_briefly
from .errors import Errors, format_errors
from .formats import FORMATS, HIGH, RehearsedFormat, formats_of
from .notebook import Notebook
from .observe import Product, Unit, evenly, observe, unit_groups, units_of
from .predict import MeasuredRun, Prediction, cheapest_assignment, known_losses
from .result import MeasuredAssignment, Rehearsal, write_results
from .search import Point
from .setting import WEIGHTS, RehearsalOptions, Setting
from .table import precision_of

Report = Callable[[int, int, str], None]
"""Called before each part with (parts that are done, all parts as far as is known, what is measured now)."""
_ROUNDS = 3
"""Assignments that are verified at most: each search knows what the runs before it lost."""
_VARIANTS = 3
"""Layers of which the errors of options of recipes are measured: the first, the middle and the last one."""
_LEAST_CORRECTION, _MOST_CORRECTION = 1.25, 10.0
"""By how much less the next assignment is to lose."""


def rehearse(
    config: TrainConfig, options: RehearsalOptions | None = None, out: Path | None = None, report: Report | None = None
) -> Rehearsal:
    """Measure what formats do to the model of a run and its data, and return the cheapest assignment within the budget.

    out: the folder of results and of what is measured, by default `output_dir` with "-rehearsal" behind it. It receives
    precision.toml, rehearsal.html and rehearsal.json. A rehearsal that ended early goes on there. Raises ConfigError,
    DataError and CheckpointError as `te_models.training.train` does, and ConfigError where `out` is of another one.
    """
    options = options or RehearsalOptions()
    out = Path(f"{config.output_dir}-rehearsal") if out is None else out
    setting = Setting(config, options)
    with contextlib.ExitStack() as opened:
        opened.enter_context(alone_in(out, "--output"))
        if config.backend != "auto":
            opened.enter_context(using_backend(config.backend))
        notebook = Notebook(out, setting.depends_on())
        # what multiplies fastest here is chosen once, so that all parts are computed alike
        backend = notebook.parts.get("cpu gemm", config.precision.cpu_gemm)
        chosen = config.replace(precision=config.precision.replace(cpu_gemm=backend))
        chosen = opened.enter_context(cpu_gemm_of_run(chosen, None, Ranks(), setting.device))
        notebook.part("cpu gemm", lambda: chosen.precision.cpu_gemm)
        found = _Stages(setting, out, notebook, report or (lambda *_: None)).run()
        write_results(found, out)
        return found


@dataclass
class _Stages:
    """The stages of a rehearsal, in the order in which they run."""

    setting: Setting
    out: Path
    notebook: Notebook
    report: Report
    done: int = 0
    total: int = 0

    def run(self) -> Rehearsal:
        options = self.setting.options
        formats = formats_of(options.formats)
        seeds = range(options.seeds)
        groups_known = options.layers or self.setting.model_config.num_layers
        self.total = len(seeds) * (3 + len({f.cost for f in formats})) + len(formats) * (groups_known + 1) + 3
        losses = [self.trained(self.setting.config.precision, seed) for seed in seeds]
        high = [value for value in losses if value is not None]
        if len(high) < len(losses):
            raise TrainingError("a short run in bf16 has a loss that is not finite; lower optimizer.lr?")
        loss = statistics.fmean(high)
        units = self._part("units", "layers", lambda: [dataclasses.asdict(unit) for unit in self._units()])
        units = [Unit(**unit) for unit in units]
        measured = set(evenly(unit_groups(units), options.layers or len(units)))
        errors = self.errors(formats, [unit for unit in units if unit.group in measured])
        divergence = self.divergence(formats, [group for group in unit_groups(units) if group in measured])
        candidates = _candidates(formats, divergence, errors)
        found = {f.name: self.gaps(f.precision(self.setting.original.precision), high, seeds) for f in candidates}
        gaps = {name: values for name, values in found.items() if values is not None}
        parts = {
            f.name: known_losses(
                units,
                divergence[f.name]["layers"],
                divergence[f.name]["all"],
                errors[f.name],
                Interval.of(gaps[f.name]) if f.name in gaps else None,
                loss,
            )
            for f in formats
        }
        runs = tuple(MeasuredRun((name,) * len(units), tuple(values)) for name, values in gaps.items())
        prediction = Prediction(units, {name: parts[name] for name in gaps}, len(seeds), runs)
        tried = [
            self.assigned(prediction, Point(0.0, 0.0, (name,) * len(units)), gaps[name], f"all {name}") for name in gaps
        ]
        chosen, prediction = self.verified(prediction, list(gaps), high, seeds, tried)
        self.report(self.total, self.total, "writing")
        return Rehearsal(
            options=options,
            model=str(self.setting.config.model.path or self.setting.config.model.name or "random weights"),
            units=units,
            loss=loss,
            errors=errors,
            divergence=divergence,
            prediction=prediction,
            front=prediction.points(list(gaps)),
            tried=tried,
            chosen=chosen,
            precision=self.precision(units, chosen.formats),
            diverged=[name for name in found if name not in gaps],
            measured_groups=[group for group in unit_groups(units) if group in measured],
        )

    # --- short runs --------------------------------------------------------------------------------------------------

    def trained(self, precision: PrecisionConfig, seed: int) -> float | None:
        """Return the held-out loss of a short run; None where a loss was not finite."""
        setting = self.setting
        name = "bf16" if precision == setting.config.precision else precision.recipe

        def measure() -> float | None:
            first = setting.is_random and precision == setting.config.precision and seed == 0
            found = train_briefly(
                setting.of_seed(seed),
                precision,
                setting.batches(seed),
                setting.held_out,
                setting.device,
                after=(lambda model: _save(model, self.out / WEIGHTS)) if first else None,
            )
            return None if found is None else float(found["loss"])

        digest = hashlib.sha256(json.dumps(precision.to_dict(), sort_keys=True).encode()).hexdigest()[:12]
        return self._part(f"train {name} {digest} seed {seed}", f"training with {name}, seed {seed}", measure)

    def gaps(self, precision: PrecisionConfig, high: Sequence[float], seeds: Sequence[int]) -> list[float] | None:
        """Return the loss gap of each seed, in percent; None where a loss was not finite."""
        losses = (self.trained(precision, seed) for seed in seeds)
        found = []
        for loss, its in zip(losses, high, strict=True):
            if loss is None:
                return None
            found.append(100 * (loss / its - 1))
        return found

    # --- errors of operands and products -----------------------------------------------------------------------------

    def _units(self) -> list[Unit]:
        model = self.setting.wide_model(self.out)
        return units_of(model)

    def errors(self, formats: Sequence[RehearsedFormat], units: Sequence[Unit]) -> dict[str, dict[str, dict[str, Any]]]:
        """Return `Errors.to_dict` by format and unit, of the formats and of the options of their recipes."""
        recipes = {f.recipe for f in formats}
        variants = FORMATS.values() if self.setting.options.variants else ()
        others = [f for f in variants if f.recipe in recipes and f not in formats]
        ends = set(evenly(unit_groups(list(units)), _VARIANTS))
        missing = [unit for unit in units if f"errors {unit.name}" not in self.notebook.parts]
        seen: tuple[dict[str, Product], dict[str, Product]] = ({}, {})
        if missing:
            self.report(self.done, self.total, "looking at operands")
            model, batches = self.setting.wide_model(self.out), self.setting.batches(0)
            names, dtype, steps = (
                {unit.name for unit in missing},
                self.setting.operand_dtype(),
                self.setting.config.steps,
            )
            first, second = (batches(steps + i).to(self.setting.device) for i in range(2))
            seen = observe(model, first, names, dtype), observe(model, second, names, dtype)
            del model
            return_freed_memory()
        found: dict[str, dict[str, dict[str, Any]]] = {f.name: {} for f in (*formats, *others)}
        for unit in units:
            known = [*formats, *(others if unit.group in ends else ())]

            def measure(name: str = unit.name, known: Sequence[RehearsedFormat] = known) -> dict[str, Any]:
                earlier, now = (part.pop(name, None) for part in seen)
                if now is None or not now.x:
                    return {}
                return {f.name: _errors(now, f, earlier).to_dict() for f in known}

            for name, values in self._part(
                f"errors {unit.name}", f"errors of {unit.name}", measure, counts=False
            ).items():
                found.setdefault(name, {})[unit.name] = values
        self.done += 1
        return found

    # --- the KL to high precision ------------------------------------------------------------------------------------

    def divergence(self, formats: Sequence[RehearsedFormat], groups: Sequence[str]) -> dict[str, dict[str, Any]]:
        """Return by format {"all": (KL, standard error), "layers": the same by group}; of "bf16" "all" alone."""
        teacher: list[Teacher] = []
        warmed: list[str] = []

        def measure(f: RehearsedFormat | None, group: str | None) -> tuple[float, float]:
            if not teacher:
                batch = self.setting.held_out[0].to(self.setting.device)
                teacher.append(Teacher(self.setting.wide_model(self.out), batch))
            if f is not None and f.recipe == "delayed" and f.name not in warmed:
                warmed.append(f.name)
                teacher[0].warm(f.value(), self.setting.batches(0)(self.setting.config.steps).to(self.setting.device))
            return teacher[0].divergence(None if f is None else f.value(), group)

        found: dict[str, dict[str, Any]] = {
            HIGH: {"all": self._part("kl bf16", "KL of bf16", lambda: measure(None, None)), "layers": {}}
        }
        for f in sorted(formats, key=lambda f: f.recipe == "delayed"):  # which leaves a state in the layers
            whole = self._part(f"kl {f.name}", f"KL of {f.name}", lambda f=f: measure(f, None))
            layers = {
                group: self._part(
                    f"kl {f.name} {group}", f"KL of {f.name}, {group}", lambda f=f, g=group: measure(f, g)
                )
                for group in groups
            }
            found[f.name] = {"all": whole, "layers": layers}
        return found

    # --- search and verification -------------------------------------------------------------------------------------

    def precision(self, units: Sequence[Unit], formats: Sequence[str]) -> PrecisionConfig:
        """Return the [precision] table of an assignment."""
        return precision_of(units, formats, self.setting.original.precision, self.setting.model_config.num_layers)

    def assigned(self, prediction: Prediction, point: Point, gaps: Sequence[float], name: str) -> MeasuredAssignment:
        """Return an assignment with what was predicted of it and measured."""
        interval = prediction.interval(point.formats)
        return MeasuredAssignment(
            name, prediction.cost(point.formats), point.formats, interval, Interval.of(gaps), list(gaps)
        )

    def verified(
        self,
        prediction: Prediction,
        names: Sequence[str],
        high: Sequence[float],
        seeds: Sequence[int],
        tried: list[MeasuredAssignment],
    ) -> tuple[MeasuredAssignment, Prediction]:
        """Return the cheapest assignment whose measured gap is within the budget, and the prediction that chose it.
        What is tried is put into `tried`."""
        budget, units = self.setting.options.budget, prediction.units
        aim = budget
        for number in range(_ROUNDS):
            point = cheapest_assignment(prediction, names, aim)
            if {*point.formats} == {HIGH}:
                break
            before = next((one for one in tried if one.formats == point.formats), None)
            if before is None:
                gaps = self.gaps(self.precision(units, point.formats), high, seeds)
                if gaps is None:
                    aim = prediction.gap(point.formats) / _MOST_CORRECTION
                    continue
                before = self.assigned(prediction, point, gaps, f"search {number + 1}")
                tried.append(before)
                prediction = prediction.knowing(MeasuredRun(point.formats, tuple(gaps)))
            if before.measured.mean <= budget:
                break
            # what the corrections take as noise would have the next assignment lose as much
            excess = min(max(before.measured.mean / budget, _LEAST_CORRECTION), _MOST_CORRECTION)
            aim = prediction.gap(point.formats) / excess
        fitting = [one for one in tried if one.measured.mean <= budget]
        none = MeasuredAssignment(
            HIGH, 1.0, (HIGH,) * len(units), Interval(0.0, 0.0), Interval(0.0, 0.0), [0.0] * len(high)
        )
        return min(fitting, key=lambda one: one.cost, default=none), prediction

    def _part(self, key: str, what: str, measure: Callable[[], Any], *, counts: bool = True) -> Any:
        self.total = max(self.total, self.done + counts)
        self.report(self.done, self.total, what)
        value = self.notebook.part(key, measure)
        self.done += counts
        self.report(self.done, self.total, what)
        return value


def _save(model: GPTModel, folder: Path) -> None:
    save_model(dict(model.stored_tensors()), model.config, folder, overwrite=True)


def _errors(product: Product, f: RehearsedFormat, earlier: Product | None) -> Errors:
    return format_errors(product, f.value(), earlier if earlier is not None and earlier.x else product)


def _candidates(
    formats: Sequence[RehearsedFormat], divergence: Mapping[str, Any], errors: Mapping[str, Mapping[str, Any]]
) -> list[RehearsedFormat]:
    """Return of formats of equal cost the one to train with: the smallest KL, and of those within a standard error of
    it the one with the least noise in weight gradients."""
    found = []
    for cost in sorted({f.cost for f in formats}):
        alike = [f for f in formats if f.cost == cost]
        least = min((divergence[f.name]["all"] for f in alike), key=lambda kl: kl[0])
        near = [f for f in alike if divergence[f.name]["all"][0] <= least[0] + least[1]]
        found.append(
            min(near, key=lambda f: statistics.fmean([e["dw.noise"] for e in errors[f.name].values()] or [0.0]))
        )
    return found
