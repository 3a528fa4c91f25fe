"""`te-models plan`: what a training run would take of each rank, without the machines."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...sizes import format_size, plural
from ...terminal import TextTable, say_while_waiting
from ..parser import Verbs, emit, positive, positive_count, verb

if TYPE_CHECKING:
    from ...plan import Estimated, Hardware, Plan, Refused
    from ...training.config import TrainConfig

DESCRIPTION = """\
Plan a training run on any number of ranks, without them: memory, FLOPs, bytes of every
collective and a model of step time. One micro-batch, of a pipeline its whole schedule, runs on
tensors without values, as a rank of the layout in CONFIG.toml would run it on CPU. --layouts
tries layouts of tensor, sequence, pipeline, context and expert parallelism that ranks,
micro-batches and sequences allow, first those that a rough estimate says are fastest, until a
dozen fit; the best of them with other pipeline schedules, virtual stages, reductions,
dispatchers and overlaps, too, and says which ones fit. Exit code 1: nothing fits."""

_SHORT = {
    "data_parallel_replicate_size": "dp_replicate",
    "data_parallel_shard_size": "dp_shard",
    "tensor_model_parallel_size": "tp",
    "pipeline_model_parallel_size": "pp",
    "context_parallel_size": "cp",
    "expert_model_parallel_size": "ep",
    "expert_tensor_parallel_size": "etp",
    "sequence_parallel": "sp",
}


def add(verbs: Verbs) -> None:
    """Add the verb."""
    parser = verb(
        verbs,
        "plan",
        run,
        "memory, FLOPs and traffic of a run on any number of ranks",
        DESCRIPTION,
        "te-models plan --model qwen3-30b-a3b --ranks 64 --layouts",
    )
    parser.add_argument("config", metavar="CONFIG.toml", nargs="?", help="the training configuration")
    parser.add_argument(
        "--model",
        metavar="MODEL",
        help="in place of CONFIG.toml: train a model of the catalogue, a folder or a hub id in bfloat16, 8 windows "
        "of up to 4,096 tokens a step",
    )
    parser.add_argument("--ranks", type=positive_count, required=True, metavar="N", help="how many ranks the run has")
    parser.add_argument("--layouts", action="store_true", help="plan every layout that the ranks allow")
    for option, what in _HARDWARE.items():
        kind = positive_count if option == "node_ranks" else positive
        parser.add_argument(f"--{option.replace('_', '-')}", type=kind, metavar="N", help=what)


_HARDWARE = {
    "memory_gib": "memory of a device, in GiB (default: 80)",
    "tflops": "dense bfloat16 peak of a device, in TFLOP/s (default: 989)",
    "fp8_tflops": "dense FP8 peak of a device, which layers under a recipe have (default: 1979)",
    "efficiency": "part of the peak that GEMMs reach (default: 0.45)",
    "node_ranks": "ranks that fast links connect (default: 8)",
    "node_gbps": "GB/s that a rank sends over the fast links (default: 450)",
    "network_gbps": "GB/s that a rank sends over the network (default: 50)",
    "host_gbps": "GB/s that a rank copies from or to main memory (default: 55)",
}


def run(args: argparse.Namespace) -> int:
    """Print the plan, or the plans of all layouts; 1 if nothing fits."""
    from te_models.checkpoints.io.model_folder import check_model_folder

    from ...training.config.file import read_config

    if (args.config is None) == (args.model is None):
        raise ValueError("plan needs CONFIG.toml, or --model NAME in place of it")
    if args.model is None:
        config = read_config(Path(args.config), [])
        if config.model.path is not None and Path(config.model.path).exists():
            check_model_folder(Path(config.model.path))  # before a process starts
    else:
        config = usual_run(*_model(args.model))
    say_while_waiting("running a micro-batch on tensors without values")
    from ...plan import Hardware, Plan, plan_layouts, plan_run

    asked = {name: getattr(args, name) for name in _HARDWARE if getattr(args, name) is not None}
    hardware = Hardware(**asked)
    if not args.layouts:
        plan = plan_run(config, args.ranks, hardware)
        emit(args, plan.to_dict(), *_tables(plan, hardware))
        return 0 if plan.fits else 1
    plans = plan_layouts(config, args.ranks, hardware, told=say_how_many)
    fitting = [plan for plan in plans if isinstance(plan, Plan) and plan.fits]
    emit(args, {"layouts": [plan.to_dict() for plan in plans]}, layouts_table(plans, args.ranks, hardware))
    return 0 if fitting else 1


def say_how_many(done: int, of: int) -> None:
    """Tell a person at a terminal how many plans are made."""
    say_while_waiting(f"{done} of {plural(of, 'plan')} that are asked for by now")


def _model(name: str) -> tuple[dict[str, Any], int]:
    """Return the keys of a model, of the catalogue or a folder or a hub id, whose configuration alone is read, and its
    longest sequence."""
    from ... import catalogue
    from ...config import ModelConfig

    if "/" in name or Path(name).exists():
        from ...init.base import Base

        config = Base.read(name).config
        return {"config": config.to_dict()}, config.max_position_embeddings
    catalogue.entry(name)
    return {"name": name}, ModelConfig.from_catalogue(name).max_position_embeddings


def usual_run(model: dict[str, Any], positions: int) -> TrainConfig:
    """Return the configuration of a run that a model is planned for where nobody says one.

    model: the keys that say which model; positions: of its longest sequence.
    """
    from ...training.config import TrainConfig

    data = {"path": "data", "sequence_length": min(4096, positions), "micro_batch_size": 1, "gradient_accumulation": 8}
    values: dict[str, Any] = {"output_dir": "planned", "steps": 1, "compile": False, "model": model, "data": data}
    values |= {"optimizer": {"lr": 1e-4, "master_weights": True}, "precision": {"dtype": "bf16"}}
    return TrainConfig.from_dict(values)


def _tables(plan: Plan, hardware: Hardware) -> list[TextTable]:
    sizes = ", ".join(f"{_SHORT[name]} {_size(size)}" for name, size in plan.sizes.items() if name in _SHORT)
    sizes += f", by {plan.options['cp_comm_type']}" if plan.sizes["context_parallel_size"] != 1 else ""
    verdict = "fits" if plan.fits else "does not fit"
    memory = TextTable(
        [
            ("parameters", format_size(plan.parameters)),
            ("optimizer and main gradients", format_size(plan.optimizer)),
            ("activations, gradients and gathered parameters", format_size(plan.activations)),
            ("together, at the highest point", format_size(plan.memory)),
            *([("in main memory", format_size(plan.host))] if plan.host else []),
            ("of a device", f"{hardware.memory_gib:g} GiB: {verdict}"),
        ],
        f"memory of one of {plural(plan.ranks, 'rank')} ({sizes})",
    )
    rows = [("collective", "over", "calls", "payload", "sent by a rank")]
    for (kind, over), traffic in plan.traffic.items():
        rows.append((kind, over, str(traffic.calls), format_size(traffic.payload), format_size(traffic.sent)))
    step = TextTable(
        [
            ("tokens of all ranks", f"{plan.tokens:,}"),
            ("model FLOPs of a rank", f"{plan.flops / 1e12:,.4g} TFLOP"),
            *((name, f"{seconds:.3g} s") for name, seconds in plan.waits.items()),
            ("together: a step", f"{plan.step_s:.3g} s"),
            ("tokens per second of a rank", f"{plan.tokens_per_second:,.4g}"),
            ("model FLOPs utilization", f"{100 * plan.mfu:.3g} %"),
        ],
        "a step at best",
    )
    stretches = [("recipe", "from step", "steps", "memory", "a step", "all steps")]
    stretches += [
        (s.recipe, str(s.first_step), str(s.steps), *_sizes_of(s.memory, s.step_s, s.steps)) for s in plan.stretches
    ]
    by_recipe = TextTable(stretches, "stretches of the run; the rest is of the one with most memory", heading=True)
    return [memory, TextTable(rows, "collectives of a step", heading=True), step, *[by_recipe] * bool(plan.stretches)]


def _sizes_of(memory: int, step_s: float, steps: int) -> tuple[str, str, str]:
    return format_size(memory), f"{step_s:.3g} s", f"{step_s * steps:.3g} s"


def _size(size: int | bool | str | None) -> str:
    return ("yes" if size else "no") if isinstance(size, bool) else str(size)


def _differs(name: str, plans: Sequence[Plan | Refused | Estimated]) -> bool:
    """Whether a column says something: that layers are split, staged or their experts distributed is always told."""
    if name in ("tensor_model_parallel_size", "pipeline_model_parallel_size", "expert_model_parallel_size"):
        return True
    if name == "expert_tensor_parallel_size":
        return any(plan.sizes[name] != plan.sizes["tensor_model_parallel_size"] for plan in plans)
    return any(plan.sizes[name] != (False if name == "sequence_parallel" else 1) for plan in plans)


_OPTIONS = {
    "cp_comm_type": "by",
    "pipeline_schedule": "schedule",
    "virtual_pipeline_model_parallel_size": "vp",
    "use_distributed_optimizer": "zero1",
    "reduce_gradients": "reduced",
    "expert_dispatch": "dispatch",
    "activation_checkpointing": "recomputed",
}


def _option(plan: Plan | Refused | Estimated, name: str) -> str:
    value = plan.options.get(name)
    if name == "activation_checkpointing" and plan.options.get("recompute_modules"):
        return ", ".join(plan.options["recompute_modules"])
    return "" if value is None else _size(value)


def layouts_table(plans: Sequence[Plan | Refused | Estimated], ranks: int, hardware: Hardware) -> TextTable:
    """Return the plans of several layouts, one in a row."""
    from ...plan import Estimated, Refused

    names = [name for name in _SHORT if not name.startswith("data_") and _differs(name, plans)]
    options = [name for name in _OPTIONS if len({_option(plan, name) for plan in plans}) > 1]
    heads = (*(_SHORT[name] for name in names), *(_OPTIONS[name] for name in options))
    rows: list[tuple[str, ...]] = [(*heads, "memory", "fits", "step", "MFU", "tokens/s")]
    for plan in plans:
        sizes = [*(_size(plan.sizes[name]) for name in names), *(_option(plan, name) for name in options)]
        if isinstance(plan, Refused):
            rows.append((*sizes, "refused", "", "", "", plan.reason))
        elif isinstance(plan, Estimated):
            rows.append((*sizes, "not planned", "", f"about {plan.step_s:.2g} s", f"{100 * plan.mfu:.2g} %", ""))
        else:
            mfu = f"{100 * plan.mfu:.3g} %"
            fits = "yes" if plan.fits else "no"
            rows.append(
                (*sizes, format_size(plan.memory), fits, f"{plan.step_s:.3g} s", mfu, f"{plan.tokens_per_second:,.4g}")
            )
    return TextTable(rows, f"layouts of {plural(ranks, 'rank')} of {hardware.memory_gib:g} GiB", heading=True)
