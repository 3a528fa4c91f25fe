"""Plans in separate processes: `main` reads what to plan from standard input, and prints it, as JSON.

torch keeps the meshes of a plan, so that each needs a new process. It is forked from one that has imported torch: a new
interpreter spends seconds on that.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from importlib import import_module
from multiprocessing.connection import Connection, wait
from typing import Any

from ..child_process import forks, run_module, tell
from ..config import ConfigError, ModelConfig
from ..training.config import TrainConfig
from .result import Hardware, Plan, Stretch

Task = dict[str, Any]
_USED = (
    "torch._dynamo",
    "torch._subclasses.fake_tensor",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "torch.testing._internal.distributed.fake_pg",
)
"""What a plan imports on its way."""


def plan_run(config: TrainConfig, ranks: int, hardware: Hardware | None = None) -> Plan:
    """Return the plan of a training run on this many ranks: what each holds, computes and sends.

    hardware: the defaults of `Hardware` where it is None. Raises ConfigError for what `te-models train` refuses in this
    layout, RuntimeError where the process fails.

    Example:
        plan = plan_run(config, ranks=64)
        print(plan.memory / 2**30, plan.fits)
    """
    (found,) = plan_each([config], ranks, hardware or Hardware())
    if isinstance(found, ConfigError):
        raise found
    return found


def plan_each(
    configs: Sequence[TrainConfig], ranks: int, hardware: Hardware, told: Callable[[int, int], object] | None = None
) -> list[Plan | ConfigError]:
    """Return the plan of each run, or why it is refused, as many at a time as the machine has cores. told: is told how
    many of how many processes have answered.

    Raises RuntimeError where a process fails or is killed.
    """
    shared = {"ranks": ranks, "hardware": asdict(hardware)}
    asked = [
        {"config": config.to_dict(), "pipeline_rank": rank, "stretch": stretch, **shared}
        for config in configs
        for stretch in range(len(config.precision.recipe_names))
        for rank in pipeline_ranks(config)
    ]
    if not asked:
        return []
    said = {} if told is None else {"told": lambda line: told(int(line), len(asked))}
    run = run_module(__name__, json.dumps(asked), **said)
    if run.returncode:
        raise _failure((run.stderr.strip().splitlines() or [f"exit code {run.returncode}"])[-1], run.stderr)
    answers = iter(json.loads(run.stdout))
    return [_of_run(config, answers) for config in configs]


def _of_run(config: TrainConfig, answers: Iterator[Task]) -> Plan | ConfigError:
    """Return the plan of the rank that takes the most memory, in the stretch in which it takes the most, or why the run
    is refused."""
    precision, found = config.precision, []
    for _ in precision.recipe_names:
        of_ranks = [_read(next(answers)) for _ in pipeline_ranks(config)]
        refused = next((answer for answer in of_ranks if isinstance(answer, ConfigError)), None)
        found.append(refused or max((p for p in of_ranks if isinstance(p, Plan)), key=lambda plan: plan.memory))
    plans = [plan for plan in found if isinstance(plan, Plan)]
    if len(plans) < len(found):
        return next(error for error in found if isinstance(error, ConfigError))
    most = max(plans, key=lambda plan: plan.memory)
    if len(plans) == 1:
        return most
    ends = [*(phase.begin(config.steps) for phase in precision.schedule), config.steps]
    names = [precision.recipe, *(phase.in_words() for phase in precision.schedule)]
    stretches = tuple(
        Stretch(name, begin + 1, end - begin, plan.memory, plan.step_s, plan.fits)
        for name, begin, end, plan in zip(names, [0, *ends], ends, plans, strict=False)
    )
    return replace(most, stretches=stretches)


def _read(answer: Task) -> Plan | ConfigError:
    if "unread" in answer:
        from te_models.checkpoints import CheckpointError

        raise CheckpointError(answer["unread"])
    if "failed" in answer:
        raise _failure(answer["failed"], answer["where"])
    return ConfigError(answer["refused"]) if "refused" in answer else Plan.from_dict(answer)


def _failure(why: str, where: str) -> RuntimeError:
    error = RuntimeError(f"the plan failed: {why}")
    error.add_note(where)  # `--debug` shows it
    return error


def model_of(config: TrainConfig) -> ModelConfig:
    """Return the configuration of the model that a run trains; of a folder nothing else is read."""
    if config.model.config is not None:
        return config.model.config
    if config.model.path is None:
        from ..training.build import read_model_config

        return read_model_config(config)
    from te_models.checkpoints import open_checkpoint

    with open_checkpoint(config.model.path, verify=False) as source:
        return source.config


def pipeline_ranks(config: TrainConfig) -> tuple[int, ...]:
    """Return the ranks of a pipeline of which one takes the most: the first, which has the most micro-batches in
    flight, and the last, which has the output layer."""
    ranks = config.parallel.pipeline_model_parallel_size
    return (0,) if ranks == 1 else (0, ranks - 1)


def in_forks(
    tasks: Sequence[Task], work: Callable[[Task], Task], at_once: int, done: Callable[[int], object] | None = None
) -> list[Task]:
    """Return what `work` makes of each task in a fork of this process, JSON values both; of a fork that fails or is
    killed {"failed": a sentence, "where": its traceback}. done: is called with how many have ended."""
    context = forks()
    found: list[Task] = [{} for _ in tasks]
    left, running = deque(enumerate(tasks)), {}
    while left or running:
        while left and len(running) < at_once:
            number, task = left.popleft()
            receiving, sending = context.Pipe(duplex=False)
            process = context.Process(target=_send, args=(work, task, sending), daemon=True)
            process.start()
            sending.close()  # so that the end of the fork is the end of the pipe
            running[receiving] = number, process
        for receiving in wait(list(running)):
            assert isinstance(receiving, Connection)
            number, process = running.pop(receiving)
            try:
                found[number] = json.loads(receiving.recv_bytes())
            except EOFError:
                process.join()
                code = process.exitcode or 0
                how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
                found[number] = {"failed": f"its process {how} before it had an answer", "where": ""}
            process.join()
            receiving.close()
            if done is not None:
                done(len(tasks) - len(left) - len(running))
    return found


def _send(work: Callable[[Task], Task], task: Task, to: Connection) -> None:
    try:
        found = work(task)
    except Exception as error:  # the process that asked says it
        found = {"failed": f"{type(error).__name__}: {error}", "where": traceback.format_exc()}
    to.send_bytes(json.dumps(found).encode())


def _plan(asked: Task) -> Task:
    import torch

    from te_models.checkpoints import CheckpointError

    from .estimate import plan_here

    # A fork makes torch's pool of threads anew where it is first asked for. If the threads of a backward pass ask at
    # once, which they do with CUDA's devices, one may find none, and torch ends the process.
    torch.set_num_threads(1)
    try:
        config, hardware = TrainConfig.from_dict(asked["config"]), Hardware(**asked["hardware"])
        return plan_here(config, asked["ranks"], hardware, asked["pipeline_rank"], asked["stretch"]).to_dict()
    except ConfigError as error:
        return {"refused": str(error)}
    except CheckpointError as error:  # the folder that the run begins with
        return {"unread": str(error)}


def main() -> None:
    """Plan what standard input describes."""
    import torch

    torch.set_num_threads(1)
    for name in _USED:
        import_module(name)
    import_module("te_models.plan.estimate")
    print(json.dumps(in_forks(json.load(sys.stdin), _plan, os.cpu_count() or 1, tell)))
