"""A plan in a process of its own: `python -m te_models.plan.process` reads what to plan, and prints it, as JSON."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict

from ..config import ConfigError
from ..training.config import TrainConfig
from .estimate import Hardware, Plan, plan_here


def plan_run(config: TrainConfig, ranks: int, hardware: Hardware | None = None) -> Plan:
    """Return the plan of a training run on so many ranks: what each holds, computes and sends.

    hardware: the defaults of `Hardware` where it is None. Raises ConfigError for what `te-models train` refuses in this
    layout, RuntimeError where the process fails.

    Example:
        plan = plan_run(config, ranks=64)
        print(plan.memory / 2**30, plan.fits)
    """
    asked = {"config": config.to_dict(), "ranks": ranks, "hardware": asdict(hardware or Hardware())}
    child = [sys.executable, "-m", "te_models.plan.process"]
    run = subprocess.run(child, input=json.dumps(asked), capture_output=True, text=True, check=False)
    if run.returncode:
        error = RuntimeError(f"the plan failed: {(run.stderr.strip().splitlines() or ['without a word'])[-1]}")
        error.add_note(run.stderr)  # `--debug` shows where
        raise error
    answer = json.loads(run.stdout)
    if "refused" in answer:
        raise ConfigError(answer["refused"])
    return Plan.from_dict(answer)


def main() -> None:
    """Plan what standard input describes."""
    import torch

    torch.set_num_threads(1)
    asked = json.load(sys.stdin)
    try:
        plan = plan_here(TrainConfig.from_dict(asked["config"]), asked["ranks"], Hardware(**asked["hardware"]))
    except ConfigError as error:
        print(json.dumps({"refused": str(error)}))
    else:
        print(json.dumps(plan.to_dict()))


if __name__ == "__main__":
    main()
