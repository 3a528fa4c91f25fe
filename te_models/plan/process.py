"""Plans in separate processes: `main` reads what to plan from standard input, and prints it, as JSON.

torch keeps the meshes of a plan, so that each needs a new process. It is forked from one that has imported torch: a new
interpreter spends seconds on that.
"""

import json
import os
import sys
import traceback
from collections import Counter, deque
from collections.abc import Callable, Sequence
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


def plan_each(configs: Sequence[TrainConfig], ranks: int, hardware: Hardware) -> list[Plan | ConfigError]:
    """Return the plan of each run, or why it is refused, as many at a time as the machine has cores.

    Raises RuntimeError where a process fails or is killed.
    """
    asked = {"configs": [config.to_dict() for config in configs], "ranks": ranks, "hardware": asdict(hardware)}
    return [read_plan(answer) for answer in ask_planner({"plans": asked})] if configs else []


def ask_planner(what: Task, told: Callable[[int, int], object] | None = None) -> list[Task]:
    """Return what `main` answers to `what` in a new process. told: is told how many of how many plans are made.

    Raises CheckpointError, ConfigError and RuntimeError of that process.
    """
    said = {} if told is None else {"told": lambda line: told(*map(int, line.split()))}
    run = run_module(__name__, json.dumps(what), **said)
    if run.returncode:
        raise _failure((run.stderr.strip().splitlines() or [f"exit code {run.returncode}"])[-1], run.stderr)
    return json.loads(run.stdout)


_FAILED = "the plan failed: "


class _Forks:
    """Plans in forks of this process. It remembers what stages of pipelines cost. at_once: how many at a time."""

    def __init__(self, ranks: int, hardware: Hardware, at_once: int) -> None:
        self.shared, self.at_once = {"ranks": ranks, "hardware": asdict(hardware)}, at_once
        self.known: dict[Any, Any] = {}
        self.done = self.asked = 0

    def plan(self, configs: Sequence[TrainConfig]) -> list[Plan | ConfigError]:
        """Return the plan of each run, or why it is refused."""
        places = [
            (rank, stretch, number)
            for number, config in enumerate(configs)
            for stretch in range(len(config.precision.recipe_names))
            for rank in pipeline_ranks(config)
        ]
        places.sort()  # the last ranks after the first ones, whose stages they mostly have
        tasks = [
            {"config": configs[number].to_dict(), "pipeline_rank": rank, "stretch": stretch, **self.shared}
            for rank, stretch, number in places
        ]
        self.asked += len(configs)
        left = Counter(number for _, _, number in places)

        def done(place: int, answer: Any) -> None:
            self.known |= answer.pop("known", {})
            number = places[place][2]
            left[number] -= 1
            if not left[number]:
                self.done += 1
                tell(f"{self.done} {self.asked}")

        answers = dict(zip(places, in_forks(tasks, self._work, self.at_once, done), strict=True))
        return [
            _of_run(
                config,
                [
                    [read_plan(answers[rank, stretch, number]) for rank in pipeline_ranks(config)]
                    for stretch in range(len(config.precision.recipe_names))
                ],
            )
            for number, config in enumerate(configs)
        ]

    def _work(self, asked: Task) -> Task:
        known = dict(self.known)
        answer = _plan(asked, known)
        return answer | {"known": {key: known[key] for key in known.keys() - self.known.keys()}}


def _of_run(config: TrainConfig, answers: list[list[Plan | ConfigError]]) -> Plan | ConfigError:
    """Return the plan of the stretch that takes the most memory, or why the run is refused. answers: of each stretch,
    and of each rank of a pipeline in it."""
    precision, found = config.precision, []
    for of_ranks in answers:
        refused = next((answer for answer in of_ranks if isinstance(answer, ConfigError)), None)
        found.append(refused or of_pipeline([plan for plan in of_ranks if isinstance(plan, Plan)]))
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


def of_pipeline(plans: Sequence[Plan]) -> Plan:
    """Return the memory of the rank that takes the most, and the traffic and the time of the slowest: the others wait
    for it."""
    most, slowest = max(plans, key=lambda plan: plan.memory), max(plans, key=lambda plan: plan.step_s)
    names = ("parameters", "optimizer", "activations", "host")
    return replace(slowest, **{name: getattr(most, name) for name in names})


def read_plan(answer: Task) -> Plan | ConfigError:
    """Return the plan that an answer says, or why it is refused. Raises CheckpointError and RuntimeError."""
    if "unread" in answer:
        from te_models.checkpoints import CheckpointError

        raise CheckpointError(answer["unread"])
    if "failed" in answer:
        raise _failure(answer["failed"], answer["where"])
    return ConfigError(answer["refused"]) if "refused" in answer else Plan.from_dict(answer)


def _failure(why: str, where: str) -> RuntimeError:
    error = RuntimeError(f"{_FAILED}{why.removeprefix(_FAILED)}")
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
    """Return the ranks of a pipeline of which one takes the most memory, and one the most time: the first, which has
    the most micro-batches in flight, and the last, which has the output layer."""
    ranks = config.parallel.pipeline_model_parallel_size
    return (0,) if ranks == 1 else (0, ranks - 1)


def in_forks(
    tasks: Sequence[Task], work: Callable[[Task], Task], at_once: int, done: Callable[[int, Task], object] | None = None
) -> list[Task]:
    """Return what `work` makes of each task in a fork of this process; of a fork that fails or is killed {"failed": a
    sentence, "where": its traceback}. done: is called with the place of each task, and what was made of it, when it
    was; forks that start later know what it did."""
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
                found[number] = receiving.recv()
            except EOFError:
                process.join()
                code = process.exitcode or 0
                how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
                found[number] = {"failed": f"its process {how} before it had an answer", "where": ""}
            process.join()
            receiving.close()
            if done is not None:
                done(number, found[number])
    return found


def _send(work: Callable[[Task], Task], task: Task, to: Connection) -> None:
    try:
        found = work(task)
    except Exception as error:  # the process that asked says it
        found = {"failed": f"{type(error).__name__}: {error}", "where": traceback.format_exc()}
    to.send(found)


def _plan(asked: Task, known: dict[Any, Any]) -> Task:
    import torch

    from te_models.checkpoints import CheckpointError

    from .estimate import plan_here

    # A fork makes torch's pool of threads anew where it is first asked for. If the threads of a backward pass ask at
    # once, which they do with CUDA's devices, one may find none, and torch ends the process.
    torch.set_num_threads(1)
    try:
        config, hardware = TrainConfig.from_dict(asked["config"]), Hardware(**asked["hardware"])
        place = asked["pipeline_rank"], asked["stretch"]
        return plan_here(config, asked["ranks"], hardware, *place, known).to_dict()
    except ConfigError as error:
        return {"refused": str(error)}
    except CheckpointError as error:  # the folder that the run begins with
        return {"unread": str(error)}


def main() -> None:
    """Answer what standard input asks: the plans of runs, or what the search for layouts finds."""
    import torch

    torch.set_num_threads(1)
    for name in _USED:
        import_module(name)
    import_module("te_models.plan.estimate")
    ((kind, asked),) = json.load(sys.stdin).items()
    at_once, hardware = os.cpu_count() or 1, Hardware(**asked["hardware"])
    forks = _Forks(asked["ranks"], hardware, at_once)
    try:
        if kind == "search":
            from .search import Search

            config = TrainConfig.from_dict(asked["config"])
            answers = Search(config, asked["ranks"], hardware, forks.plan, at_once).run(**asked["limits"])
        else:
            answers = forks.plan([TrainConfig.from_dict(config) for config in asked["configs"]])
        print(json.dumps([{"refused": str(a)} if isinstance(a, ConfigError) else a.to_dict() for a in answers]))
    except Exception as error:
        print(json.dumps([_answer_of(error)]))


def _answer_of(error: Exception) -> Task:
    """Return what `read_plan` raises the error of."""
    from te_models.checkpoints import CheckpointError

    if isinstance(error, ConfigError):
        return {"refused": str(error)}
    if isinstance(error, CheckpointError):  # the folder that the run begins with
        return {"unread": str(error)}
    where = "".join(getattr(error, "__notes__", [])) or traceback.format_exc()
    return {
        "failed": str(error) if isinstance(error, RuntimeError) else f"{type(error).__name__}: {error}",
        "where": where,
    }
