"""What does quantization-aware training give over rounding the weights of a model that was trained in bf16?

    python -m bench.qat

A small model is trained in bf16 and with `precision.qat`, from the same weights on the same batches, three seeds each.
Of the bf16 run the validation loss is also taken with its weights rounded as the export stores them; of a run with qat
every validation loss is of such weights. Runs are in a scratch folder, so that an interrupted bench goes on.
"""

from __future__ import annotations

from typing import Any

from bench.common import versions, write_result
from bench.small_runs import EVERY, SEEDS, STEPS, loss_of_rounded, small_run, summary, validation_curve
from te_models.training import OptimizerConfig, PrecisionConfig

FORMATS = ("mxfp8", "nvfp4", "mxfp4", "int4")
OPTIMIZER = OptimizerConfig(lr=3e-3)


def main() -> None:
    """Train what is missing, print and write the result."""
    plain = [small_run("qat-none", seed, optimizer=OPTIMIZER) for seed in SEEDS]
    curves = {"bf16": [validation_curve(run) for run in plain]}
    cases: list[dict[str, Any]] = []
    for name in FORMATS:
        precision = PrecisionConfig(dtype="bf16-mixed", qat=name)
        curves[name] = [
            validation_curve(small_run(f"qat-{name}", seed, optimizer=OPTIMIZER, precision=precision)) for seed in SEEDS
        ]
        after = [loss_of_rounded(run, name) for run in plain]
        trained = [curve[-1] for curve in curves[name]]
        gains = [a - b for a, b in zip(after, trained, strict=True)]
        case = {"format": name, "bf16_rounded_afterwards": summary(after), "qat": summary(trained)}
        cases.append(case | {"gain": summary(gains)})
        print(f"{name:6} rounded afterwards {case['bf16_rounded_afterwards']['mean']}  qat {case['qat']['mean']}")
    high = summary([curve[-1] for curve in curves["bf16"]])
    payload = {"versions": versions("torch"), "steps": STEPS, "bf16": high, "cases": cases}
    steps = list(range(EVERY, STEPS + 1, EVERY))
    rounded = {name: [[round(x, 4) for x in curve] for curve in its] for name, its in curves.items()}
    print(f"bf16 {high['mean']}; wrote {write_result('qat', payload | {'validation_steps': steps, 'curves': rounded})}")


if __name__ == "__main__":
    main()
