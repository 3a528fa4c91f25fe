"""Does what `te-models rehearse` recommends lose what it predicts, over seeds that it has not seen, and is it better?

    python -m bench.rehearsal                   both cases: rehearses, runs what is missing, writes the result
    python -m bench.rehearsal --case moe        one of them: prints, writes nothing

SmolLM2-135M (fine-tuning its real weights) and a mixture of experts (from random weights) are rehearsed. Then, over
fresh seeds, bf16, the recommended recipe and two recipes of the field are run: all MXFP8, and all NVFP4 with the first
and last two layers in bf16; and for each of these the assignment that the rehearsal predicts to lose least at no more
than its cost. A gap is the held-out loss over bf16's of the same seed, with Student's interval. A call that was ended
goes on where it was.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import sysconfig
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bench.common import versions, write_result
from te_models.config import AttentionConfig, MLPConfig, ModelConfig, MoEConfig
from te_models.quickstart.smollm import smollm_folder
from te_models.rehearse import Rehearsal, RehearsalOptions, rehearse
from te_models.rehearse.effect import Interval, train_briefly
from te_models.rehearse.notebook import FILE, Notebook
from te_models.rehearse.predict import equal_cost
from te_models.rehearse.setting import Setting
from te_models.rehearse.table import precision_of
from te_models.training import PrecisionConfig, TrainConfig

SCRATCH = Path(tempfile.gettempdir()) / "te_models_rehearsal"
FRESH, SEEDS = 100, 3
"""The first seed that no rehearsal used, by its distance from the run's, and how many are run."""


@dataclass(frozen=True)
class Case:
    """A run that is rehearsed. model: its keys; tokenizer: None is that of the model's folder."""

    model: dict[str, Any]
    options: RehearsalOptions
    sequence: int
    lr: float
    tokenizer: str | None = None

    def config(self, folder: Path) -> TrainConfig:
        """Return the run. Its text is the standard library of this Python."""
        tokenizer = self.tokenizer or self.model["path"]
        text = [str(Path(sysconfig.get_paths()["stdlib"]) / "*.py")]
        values = {
            "output_dir": str(folder / "run"),
            "steps": 1000,
            "device": "cpu",
            "model": self.model,
            "data": {
                "path": str(folder / "tokens"),
                "text": text,
                "tokenizer": tokenizer,
                "sequence_length": self.sequence,
            },
            "optimizer": {"lr": self.lr},
        }
        return TrainConfig.from_dict(values)


def cases() -> dict[str, Case]:
    """Return the cases by name."""
    mixture = ModelConfig(
        vocab_size=257,
        hidden_size=128,
        num_layers=8,
        max_position_embeddings=128,
        attention=AttentionConfig(num_attention_heads=4),
        mlp=MLPConfig(ffn_hidden_size=512),
        moe=MoEConfig(num_moe_experts=4, moe_router_topk=2, moe_ffn_hidden_size=256, aux_loss_coeff=0.01),
    )
    return {
        "moe": Case(
            {"config": mixture.to_dict()},
            RehearsalOptions(budget=0.3, formats=("mxfp8", "nvfp4"), steps=40, tokens=256, variants=False),
            sequence=128,
            lr=1e-3,
            tokenizer="bytes",
        ),
        "smollm2": Case(
            {"path": str(smollm_folder())},
            RehearsalOptions(formats=("mxfp8", "nvfp4"), layers=6, steps=4, tokens=256, variants=False),
            sequence=256,
            lr=1e-4,
        ),
    }


class Fresh:
    """Runs of fresh seeds of one case, each a line in a file."""

    def __init__(self, case: Case, folder: Path) -> None:
        self.setting = Setting(case.config(folder), case.options)
        fresh = folder / "fresh"
        fresh.mkdir(parents=True, exist_ok=True)
        self.notebook = Notebook(fresh, self.setting.depends_on())

    def losses(self, precision: PrecisionConfig) -> list[float]:
        """Return the held-out loss of each fresh seed."""
        return [self._loss(precision, FRESH + seed) for seed in range(SEEDS)]

    def _loss(self, precision: PrecisionConfig, seed: int) -> float:
        setting, digest = self.setting, hashlib.sha256(json.dumps(precision.to_dict()).encode()).hexdigest()[:12]

        def measure() -> float:
            begun = time.process_time()
            found = train_briefly(
                setting.of_seed(seed), precision, setting.batches(seed), setting.held_out, setting.device
            )
            print(f"{precision.recipe} {digest} seed {seed}: {time.process_time() - begun:.0f} s", flush=True)
            assert found is not None, "no run of these cases diverges"
            return float(found["loss"])

        return self.notebook.part(f"{digest} {seed}", measure)


def compared(found: Rehearsal, fresh: Fresh) -> dict[str, Any]:
    """Return the gaps of the recommended recipe and of those of the field over fresh seeds."""
    units, layers = found.units, fresh.setting.model_config.num_layers
    base = fresh.setting.original.precision
    high = fresh.losses(fresh.setting.config.precision)

    def measured(formats: tuple[str, ...]) -> dict[str, Any]:
        losses = fresh.losses(precision_of(units, formats, base, layers))
        gaps = [100 * (a / b - 1) for a, b in zip(losses, high, strict=True)]
        predicted, interval = found.prediction.interval(formats), Interval.of(gaps)
        return {
            "cost": round(found.prediction.cost(formats), 4),
            "predicted": predicted.to_dict(),
            "measured": interval.to_dict(),
            "per_seed": gaps,
            "within_prediction": predicted.holds(interval.mean),
        }

    ends = {f"decoder.layers.{i}" for i in (0, 1, layers - 2, layers - 1)}
    rivals = {
        "all nvfp4, first and last 2 in bf16": tuple("bf16" if u.group in ends else "nvfp4" for u in units),
        "all mxfp8": ("mxfp8",) * len(units),
    }
    result: dict[str, Any] = {"bf16_loss": high, "recommended": measured(found.chosen.formats), "rivals": {}}
    result["recommended"]["precision"] = found.precision.to_dict()
    for name, formats in rivals.items():
        ours = equal_cost(found.prediction, list(found.prediction.parts), found.prediction.cost(formats))
        assert ours is not None, "bf16 and formats are there"
        pair = {"rival": measured(formats), "ours": measured(ours.formats)}
        difference = [a - b for a, b in zip(pair["rival"]["per_seed"], pair["ours"]["per_seed"], strict=True)]
        pair["rival_minus_ours"] = Interval.of(difference).to_dict() | {"per_seed": difference}
        result["rivals"][name] = pair
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=("moe", "smollm2"), help="one case only (both)")
    parser.add_argument("--scratch", type=Path, default=SCRATCH, help=f"folder of finished runs ({SCRATCH})")
    options = parser.parse_args()
    torch.set_num_threads(1)
    results = {}
    for name, case in cases().items():
        if options.case not in (None, name):
            continue
        folder = options.scratch / name
        folder.mkdir(parents=True, exist_ok=True)
        found = rehearse(case.config(folder), case.options, folder / "rehearsal")
        parts = map(json.loads, (folder / "rehearsal" / FILE).read_text().splitlines())
        seconds = sum(part.get("processor_s", 0.0) for part in parts)
        for sentence in found.evidence():
            print(f"{name}: {sentence}")
        results[name] = compared(found, Fresh(case, folder))
        results[name]["rehearsal"] = {
            "options": {"budget": case.options.budget, "steps": case.options.steps, "tokens": case.options.tokens},
            "tried": [one.to_dict() for one in found.tried],
            "interaction": {format: part.together for format, part in found.prediction.parts.items()},
            "cpu_seconds": round(seconds),
        }
        print(json.dumps(results[name], indent=1))
    if options.case is None:
        print(f"written to {write_result('rehearsal', {'versions': versions('torch'), 'seeds': SEEDS} | results)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
