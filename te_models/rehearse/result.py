"""What a rehearsal found, and its files: precision.toml, rehearsal.json, rehearsal.html."""

import json
import tomllib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from te_models.checkpoints.io.atomic import replace_text

from ..config import ConfigError
from ..training.config import PrecisionConfig
from .effect import Interval
from .formats import HIGH
from .observe import Unit
from .predict import Prediction
from .search import Point
from .setting import RehearsalOptions
from .table import resolved, toml_of

TABLE, DATA, PAGE = "precision.toml", "rehearsal.json", "rehearsal.html"


@dataclass(frozen=True)
class MeasuredAssignment:
    """An assignment that was run. formats: of each unit; predicted, measured: the loss gap in percent; gaps: of each
    seed."""

    name: str
    cost: float
    formats: tuple[str, ...]
    predicted: Interval
    measured: Interval
    gaps: list[float]

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return {
            "name": self.name,
            "cost": self.cost,
            "predicted_gap": self.predicted.to_dict(),
            "measured_gap": self.measured.to_dict(),
            "measured_gaps": self.gaps,
            "within_prediction": self.predicted.holds(self.measured.mean),
        }


@dataclass(frozen=True, kw_only=True)
class Rehearsal:
    """What a rehearsal found. loss: held out, of bf16, in nats per token. errors: by format and unit; divergence: by
    format; front: assignments that none beats in predicted gap and cost; tried: those that were run; chosen: the
    recommended one, and precision its [precision] table; diverged: formats under which a loss was not finite."""

    options: RehearsalOptions
    model: str
    units: list[Unit]
    loss: float
    errors: dict[str, dict[str, dict[str, Any]]]
    divergence: dict[str, dict[str, Any]]
    prediction: Prediction
    front: list[Point]
    tried: list[MeasuredAssignment]
    chosen: MeasuredAssignment
    precision: PrecisionConfig
    measured_groups: list[str]
    diverged: list[str]

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return {
            "model": self.model,
            "options": asdict(self.options),
            "precision": self.precision.to_dict(),
            "chosen": self.chosen.to_dict(),
            "formats": {unit.name: name for unit, name in zip(self.units, self.chosen.formats, strict=True)},
            "tried": [one.to_dict() for one in self.tried],
            "front": [{"cost": p.cost, "predicted_gap": p.gap} for p in self.front],
            "bf16_loss": self.loss,
            "kl": self.divergence,
            "interaction": {name: part.together for name, part in self.prediction.parts.items()},
            "corrections": {name: 1 + excess for name, excess in self.prediction.corrections.excess.items()},
            "errors": self.errors,
        }

    def evidence(self) -> list[str]:
        """Return what was measured, as sentences."""
        one, o = self.chosen, self.options
        counts = {name: one.formats.count(name) for name in dict.fromkeys(one.formats)}
        found = [
            f"Written by te-models rehearse: the cheapest formats of {self.model} "
            f"with a loss gap of at most {o.budget:g} %.",
            f"Relative time of its GEMMs, bf16 = 1: {one.cost:.3f}. Layers: "
            + ", ".join(f"{count} of {len(one.formats)} in {name}" for name, count in counts.items())
            + ".",
        ]
        if {*one.formats} != {HIGH}:
            found += [
                f"Predicted loss gap to bf16: {gap_text(one.predicted)} (95 % interval of {o.seeds} seeds).",
                f"Measured: {gap_text(one.measured)}, held-out loss after {o.steps} steps of {o.tokens} tokens, "
                f"{o.seeds} paired seeds; bf16 ends at {self.loss:.4f}.",
            ]
            if one.measured.high > o.budget:
                found.append(
                    "The upper end of the measured interval is above the budget: more seeds or steps say more."
                )
        found += [f"A short run under {name} had a loss that is not finite." for name in self.diverged]
        found += [
            f"Measured of other assignments: {other.name} {gap_text(other.measured)} at {other.cost:.3f}."
            for other in self.tried
            if other.formats != one.formats
        ]
        return found


def gap_text(interval: Interval) -> str:
    """Return a gap in percent with its interval: "+0.12 % (-0.02 to +0.26)"."""
    return f"{interval.mean:+.3f} % ({interval.low:+.3f} to {interval.high:+.3f})"


def write_results(found: Rehearsal, out: Path) -> None:
    """Write the files of a rehearsal, each in one step, and check that the table says what was found."""
    from .page import rehearsal_page

    text = toml_of(found.precision, found.evidence())
    check_table(text, found.units, found.chosen.formats, found.precision)
    replace_text(out / TABLE, text)
    replace_text(out / DATA, json.dumps(found.to_dict(), indent=1, allow_nan=False) + "\n")
    replace_text(out / PAGE, rehearsal_page(found))


def check_table(text: str, units: Sequence[Unit], formats: Sequence[str], precision: PrecisionConfig) -> None:
    """Raise ConfigError unless a TOML text has this [precision] table, and it gives each unit its format."""
    read = PrecisionConfig.from_dict(tomllib.loads(text)["precision"])
    numbers = [int(unit.group.rpartition(".")[2]) for unit in units if unit.group.startswith("decoder.layers.")]
    if read != precision or resolved(units, read, max(numbers, default=0) + 1) != list(formats):
        raise ConfigError("the [precision] table that was written does not give each layer the format that was chosen")
