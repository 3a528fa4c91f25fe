"""Runs that another training system began, or goes on with: weights and AdamW's moments between its distributed
checkpoints and ours, as a stream.

Both sides hold the same numbers by parameter: the weight in float32, `exp_avg`, `exp_avg_sq` and the number of steps.
"""

import json
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from te_models.checkpoints import CheckpointError, expected_tensors
from te_models.checkpoints.foreign.common import counted_steps
from te_models.checkpoints.foreign.dcp import DCPStore
from te_models.checkpoints.foreign.known import SYSTEMS
from te_models.checkpoints.foreign.legacy import newest_of
from te_models.checkpoints.foreign.system import MOMENTS
from te_models.checkpoints.foreign.views import RenamedStore
from te_models.checkpoints.foreign.write_dcp import write_dcp
from te_models.checkpoints.foreign.written import Written
from te_models.checkpoints.io.atomic import new_folder
from te_models.checkpoints.io.boxes import Box, extents
from te_models.checkpoints.io.dtypes import dtype_name
from te_models.checkpoints.io.header import TensorInfo, byte_count
from te_models.checkpoints.io.manifest import MANIFEST, manifest_bytes
from te_models.checkpoints.io.store import ComputedStore, FileStore, JoinedStore, Store
from te_models.checkpoints.io.weight_files import open_weights, plain_file
from te_models.checkpoints.mapping.plan import OutputTensor, make_plan
from te_models.checkpoints.mapping.stream import read_rows
from te_models.checkpoints.mapping.tensor_map import identity_namespace
from te_models.checkpoints.tools.foreign import open_states, read_any_config
from te_models.checkpoints.write.shards import Shard
from te_models.checkpoints.write.writer import write_small_file, write_weights

from ..config import ConfigError, ModelConfig
from ..parallel.parts import LocalPart
from .checkpoints.checkpoint import load_state
from .checkpoints.checks import MODEL, PARTS, SHARDED_VERSION, TENSORS, VALUES
from .checkpoints.files import checkpoint_dir, digests_of
from .checkpoints.sharded.index import INDEX, CheckpointIndex, file_of, read_parts_index
from .checkpoints.sharded.index_file import write_file
from .checkpoints.sharded.join import box_name, describe_parts, join
from .checkpoints.sharded.storage import PartReader
from .config import TrainConfig
from .run_data import open_data
from .seeding import random_state


def check_travels(config: TrainConfig) -> None:
    """Raise ConfigError for a run whose state other systems' checkpoints do not hold."""
    optimizer, precision = config.optimizer, config.precision
    for name, value, allowed in (
        ("optimizer.kind", optimizer.kind, "adamw"),
        ("optimizer.moment_dtype", optimizer.moment_dtype, "float32"),
        ("precision.dtype", precision.dtype, "fp32"),
        ("optimizer.ema_decay", optimizer.ema_decay, None),
        ("lora.rank", config.lora.rank, 0),
        ("model.expert_layout", config.model.expert_layout, "grouped"),
    ):
        if value != allowed:
            raise ConfigError(
                f"{name} is {value!r}, of which other systems' checkpoints hold nothing; allowed: {allowed!r}; "
                "te-models export without --to writes the model alone"
            )


def import_run(
    src: Path, config: TrainConfig, *, model: Path, system: str | None = None, step: int | None = None
) -> Path:
    """Write a training checkpoint of ours from a distributed checkpoint, in the run's `output_dir`, where `train` goes
    on from it. Returns its folder.

    Arguments:
        config: the run that goes on; its windows of a step are the windows of one process.
        model: the model's config.json, or the folder that has one.
        system: as for `import_checkpoint`.
        step: how many steps are done; None: as many as the optimizer counted.

    Raises ConfigError for a run whose state does not travel, CheckpointError for a checkpoint that lacks it.
    """
    check_travels(config)
    shapes_of, _ = read_any_config(model)
    canonical = expected_tensors(shapes_of)
    with DCPStore(newest_of(src)) as store:
        owners: dict[str, Any] = {}
        outputs: list[OutputTensor] = []
        parts: dict[str, LocalPart] = {}
        chosen, states, weights = open_states(store, shapes_of, system)
        for state, tensors, namespace in states:
            plan = make_plan(
                tensors.tensors, namespace, identity_namespace(canonical), where=str(src), dtype=torch.float32
            )
            at = "" if state is None else f"{state}:"
            view = RenamedStore(tensors, {f"{at}{n}": n for n in tensors.tensors}, _named(tensors.tensors, at))
            owners |= dict.fromkeys(view.tensors, view)
            for output in plan.outputs:
                pieces = tuple(replace(piece, source=f"{at}{piece.source}") for piece in output.pieces)
                output = replace(output, pieces=pieces)
                name = f"model.{output.name}" if state is None else f"optimizer.{output.name}.{state}"
                outputs.append(replace(output, name=box_name(name, (0,) * len(output.shape))))
                parts[name] = LocalPart.undivided(torch.empty(output.shape, dtype=torch.float32, device="meta"))
        step = _steps(store, weights, chosen.moment, step)
        small = {f"optimizer.{name}.step": torch.tensor(float(step), device="cpu") for name in canonical}
        small |= {f"rng.0.{name}": value for name, value in random_state().items()}
        for name, value in small.items():
            parts[name] = LocalPart.undivided(value)
            compute = partial(lambda its: [its], value)
            entry = box_name(name, (0,) * value.dim())
            outputs.append(OutputTensor(entry, dtype_name(value.dtype), tuple(value.shape), compute=compute))
        target = checkpoint_dir(Path(config.output_dir), step)
        data = config.data
        values: dict[str, Any] = {"version": SHARDED_VERSION, "step": step, "world_size": 1, "data_ranks": 1}
        values["position"] = step * data.micro_batch_size * data.gradient_accumulation
        values["data_digest"] = open_data(config, vocab_size=shapes_of.vocab_size, may_build=True).checked_digest()
        values |= {"config": config.to_dict(), "model_config": shapes_of.to_dict()}
        with new_folder(target, overwrite=False) as folder:
            (folder / PARTS).mkdir()
            shard = Shard(file_of(0), tuple(outputs), {})
            records = write_weights(folder / PARTS, [shard], JoinedStore(owners))
            listed = digests_of(file_of(0))
            found = {f"{PARTS}/{listed}": write_small_file(folder / PARTS / listed, manifest_bytes(records))}
            index, _ = join([describe_parts(parts)])
            found[f"{PARTS}/{INDEX}"] = write_file(folder / PARTS, index)
            read_parts_index(folder / PARTS).check_same(index)
            text = json.dumps(values, indent=2, allow_nan=False) + "\n"
            found[VALUES] = write_small_file(folder / VALUES, text.encode())
            (folder / MANIFEST).write_bytes(manifest_bytes(found))
    return target


def _steps(store: DCPStore, names: list[str], moment: Any, step: int | None) -> int:
    """Return how many steps the optimizer counted, the same for all parameters."""
    if step is not None:
        return step
    if (counted := counted_steps(store.folder)) is not None:
        return counted
    found = {
        float(store.read(key, ()))
        for key in (moment(name, "step") for name in names)
        if store.tensors.get(key, _NONE).shape == ()
    }
    if len(found) != 1 or (count := found.pop()) != int(count) or count < 1:
        raise CheckpointError(f"{store.folder} does not say one number of steps for all parameters; --step says it")
    return int(count)


def _named(tensors: Mapping[str, TensorInfo], at: str) -> dict[str, TensorInfo]:
    return {f"{at}{name}": info for name, info in tensors.items()}


_NONE = TensorInfo("", (1,), 0, 0)


class PartsStore(ComputedStore):
    """The tensors of a sharded checkpoint as a store."""

    def __init__(self, reader: PartReader, index: CheckpointIndex) -> None:
        self.reader, self.index = reader, index
        self.tensors = {
            name: TensorInfo(dtype_name(s.dtype), s.shape, 0, byte_count(dtype_name(s.dtype), s.shape))
            for name, s in index.tensors.items()
        }

    def read(self, name: str, box: Box) -> Tensor:
        stored = self.index.tensors[name]
        around = {d: ((r.start, max(r.stop - r.step + 1, r.start)),) for d, r in enumerate(box)}
        size = tuple(ranges[0][1] - ranges[0][0] for ranges in around.values())
        found = torch.empty(size, dtype=stored.dtype, device="cpu")
        self.reader.fill({name: LocalPart(found, stored.shape, around)})
        found = found[tuple(slice(None, None, r.step) for r in box)]
        assert tuple(found.shape) == extents(box)
        return found


def export_run(checkpoint: Path, out: Path, *, to: str, overwrite: bool = False) -> None:
    """Write a training checkpoint of ours, model and moments, as a distributed checkpoint that another system goes on
    with. to: a key of SYSTEMS. Errors as for `import_run`."""
    if to not in SYSTEMS:
        raise CheckpointError(f"the system is {to!r}; allowed: {', '.join(SYSTEMS)}")
    start = load_state(checkpoint)
    config, system = TrainConfig.from_dict(start.config), SYSTEMS[to]
    check_travels(config)
    with ExitStack() as opened:
        store: Store
        if start.parts is not None and start.model_config is not None:
            model, at = ModelConfig.from_dict(start.model_config), "model."
            index = read_parts_index(start.parts / PARTS)
            store = PartsStore(opened.enter_context(PartReader(start.parts / PARTS, index)), index)
        else:
            (model, _), at = read_any_config(checkpoint / MODEL), ""
            weights = opened.enter_context(open_weights(checkpoint / MODEL))
            states = opened.enter_context(FileStore({TENSORS: plain_file(checkpoint, TENSORS)}))
            owners: dict[str, Store] = dict.fromkeys(weights.tensors, weights)
            store = JoinedStore(owners | dict.fromkeys(states.tensors, states))
        canonical = expected_tensors(model)
        outputs: list[Written] = []
        for state in (None, *MOMENTS):
            names = {n: f"{at}{n}" if state is None else f"optimizer.{n}.{state}" for n in canonical}
            view = RenamedStore(store, names, {name: store.tensors[stored] for name, stored in names.items()})
            target = system.namespace(model, None, state)
            plan = make_plan(view.tensors, identity_namespace(canonical), target, where=str(checkpoint))
            outputs += [Written(o.name, o.dtype, o.shape, partial(read_rows, view, o)) for o in plan.outputs]
        for name in system.namespace(model).stored:
            outputs.append(Written(system.moment(name, "step"), "F32", (), partial(_count, start.step)))
        with new_folder(out, overwrite=overwrite) as folder:
            write_dcp(folder, outputs, megatron=to == "torch_dist", prefix=system.prefix)


def _count(step: int, begin: int, end: int) -> Tensor:
    return torch.tensor(float(step), device="cpu")
