"""One training step of a pipeline rank's stages, of few layers each, on ranks that do not exist, recorded.

Two micro-batches run through each stage; the schedule of all of them is then run with what they cost, see `stage_cost`.
As in `micro_batch`, layers of a kind are alike: two of each and one more say what any number takes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from torch.utils._python_dispatch import _disable_current_modes

from te_models.checkpoints.mapping.param_shapes import is_linear_weight
from te_models.layers.tensor.fsdp import local_part

from ..config import ModelConfig
from ..model import GPTModel
from ..model.build import without_draws
from ..parallel.stage_layout import StageLayout
from ..training.build import build_optimizer, random_model
from ..training.config import TrainConfig
from ..training.lora import Adapters
from ..training.ranks.layout import RankLayout
from ..training.ranks.reduction import reduce_gradients
from ..training.setup import set_loss_options, with_loss_chunk
from ..training.step import make_pipeline
from ..training.trained import with_layers_alone
from .micro_batch import Recorded, as_few_operations, by_kind, divided, of_layers, offload, recorder_of, suppose_balance
from .result import added_traffic
from .simulation import without_values
from .stage_cost import Known, StageCost, measure, replay, stage_kind
from .stretches import StretchRecipes

_FEW = 2
"""Layers of a kind, of a stage, from which the others are told: what FSDP2 gathers is a stage at a time."""


@dataclass(frozen=True)
class FewLayers(StageLayout):
    """Stages of the given layers each."""

    spans: tuple[range, ...] = ()

    def layers(self, num_layers: int) -> list[range]:
        """Return `spans`."""
        return list(self.spans)


@dataclass
class _Measured:
    """rank: what stays, the peak and the traffic of the step's end. stages: the cost of each of the rank's stages."""

    rank: Recorded
    stages: list[StageCost]

    def plus(self, other: _Measured, factor: float) -> _Measured:
        """Return this and `factor` times another."""
        stages = [cost.plus(its, factor) for cost, its in zip(self.stages, other.stages, strict=True)]
        return _Measured(self.rank.plus(other.rank, factor), stages)

    def of_stage(self, place: int, instead_of: int) -> _Measured:
        """Return what was measured of one stage as if of another one that is alike. Both are places of stages."""
        stages = list(self.stages)
        stages[place], stages[instead_of] = stages[instead_of], stages[place]
        return _Measured(self.rank, stages)


def record_stages(
    config: TrainConfig,
    model: ModelConfig,
    layout: RankLayout,
    recipes: StretchRecipes | None = None,
    known: Known | None = None,
) -> Recorded:
    """Return what this rank takes for a step of the model: all micro-batches are in `once`. recipes: see `record_step`.
    known: what stages cost in this and other plans; what this one finds is added.

    Called inside `fake_ranks`. Raises ConfigError for a number of micro-batches that the schedule does not have.
    """
    stages = layout.stages
    assert stages is not None and layout.mesh is not None and layout.mesh.stages is not None
    recipes = recipes or StretchRecipes.at(config, model, 0)
    spans = stages.layers(model.num_layers)
    few: dict[int, list[int]] = {}
    rest: list[tuple[int, list[int]]] = []  # of a stage and kind: the layers that are not among the few
    for stage in stages.of_rank(layout.mesh.stages.rank()):
        places = by_kind(config, model, spans[stage], recipes)
        few[stage] = sorted(layer for layers in places for layer in layers[:_FEW])
        rest += [(stage, layers[_FEW:]) for layers in places if len(layers) > _FEW]

    ends = {0: [0], stages.stages - 1: [model.num_layers - 1]}  # of other stages no layer is needed

    def with_layers(chosen: dict[int, list[int]]) -> tuple[GPTModel, TrainConfig, RankLayout]:
        own = ends | chosen
        return stages_of_layers(config, model, layout, [own.get(stage, []) for stage in range(stages.stages)])

    gpt, run, its = with_layers(few)
    known = {} if known is None else known
    total = base = _measure(gpt, run, its, known)
    numbers, every = list(few), by_kind(config, model, range(model.num_layers), recipes)
    kinds = {layer: kind for kind, layers in enumerate(every) for layer in layers}
    measured: dict[Any, tuple[int, _Measured]] = {}  # by the kinds of a stage and of its layers
    for stage, layers in rest:
        place = numbers.index(stage)
        key = stage_kind(gpt.pipeline_stages[place]), *(kinds[layer] for layer in (layers[0], *few[stage]))
        if key not in measured:
            more = _measure(*with_layers(few | {stage: sorted([*few[stage], layers[0]])}), known)
            measured[key] = place, more.plus(base, -1.0)
        at, each = measured[key]
        total = total.plus(each.of_stage(place, at), len(layers))
    return _of_schedule(run, its, gpt, total)


def _of_schedule(config: TrainConfig, layout: RankLayout, gpt: GPTModel, measured: _Measured) -> Recorded:
    """Return what a rank takes for all micro-batches of a step, in the schedule of `layout`. gpt: with its stages.

    With three for each rank a pipeline is full: each further round, one for each rank, holds and sends the same more.
    """
    assert layout.stages is not None
    count, ranks, found = config.data.gradient_accumulation, layout.stages.ranks, []
    few = 3 * ranks + count % ranks
    for each in (count,) if count <= 4 * ranks else (few, few + ranks):
        pipeline = make_pipeline(gpt, _with_micro_batches(config, each), "cpu", layout)
        recorder = recorder_of(layout)
        recorder.live = measured.rank.parameters + measured.rank.optimizer
        with recorder, unrecorded_vote():
            replay(pipeline, measured.stages, (config.data.micro_batch_size, config.data.sequence_length), recorder)
        peak, once = max(measured.rank.peak, recorder.peak), added_traffic(recorder.traffic, measured.rank.once)
        found.append(dataclasses.replace(measured.rank, peak=peak, once=once))
    base = found[0]
    return base.plus(found[1].plus(base, -1.0), (count - few) / ranks) if len(found) > 1 else base


def _with_micro_batches(config: TrainConfig, count: int) -> TrainConfig:
    return config.replace(data=config.data.replace(gradient_accumulation=count, rampup_batch_size=()))


_OF_SCHEDULE = (
    *("pipeline_model_parallel_size", "pipeline_schedule", "virtual_pipeline_model_parallel_size"),
    *("pipeline_split", "pipeline_balance", "data_parallel_replicate_size", "data_parallel_shard_size"),
)
"""Keys of [parallel] of which a micro-batch in a stage knows nothing, but for what `_of_a_stage` says of them."""


def _of_a_stage(config: TrainConfig, layout: RankLayout) -> str:
    """Return all of a run that the cost of a micro-batch in a stage depends on, beside the stage."""
    values, dims = config.to_dict(), layout.dims
    values["parallel"] = {key: value for key, value in values["parallel"].items() if key not in _OF_SCHEDULE}
    values["data"] = {"shape": (config.data.micro_batch_size, config.data.sequence_length)}
    later = layout.stages is not None and layout.stages.is_later
    shards = (dims.data_parallel_replicate_size, dims.data_parallel_shard_size) if dims.is_sharded else ()
    precision = config.precision
    by_number = precision.overrides or precision.first_layers_bf16 or precision.last_layers_bf16
    numbers = layout.stages.split if by_number and layout.stages is not None else ()
    return json.dumps([values, later, shards, numbers], sort_keys=True)


def _measure(gpt: GPTModel, config: TrainConfig, layout: RankLayout, known: Known) -> _Measured:
    """Return what a rank holds, what a micro-batch costs in each of its stages, and the end of a step."""
    recorder = recorder_of(layout)
    recorder.hold([list(gpt.parameters()), list(gpt.buffers())])
    found = Recorded(parameters=recorder.live)
    with as_few_operations(), recorder:
        optimizer = build_optimizer(config, gpt, layout)
        found.optimizer = recorder.live - found.parameters
        if config.precision.qat != "none":  # the weights that rounding puts aside until the micro-batches are done
            aside = sum(local_part(p).nbytes for name, p in gpt.named_parameters() if is_linear_weight(name))
            found.optimizer, recorder.live = found.optimizer + aside, recorder.live + aside
        pipeline = make_pipeline(gpt.train(), config, "cpu", layout)
        shape = config.data.micro_batch_size, config.data.sequence_length
        adds = any(hasattr(parameter, "main_grad") for parameter in gpt.parameters())
        costs = measure(pipeline.stages, shape, recorder, (_of_a_stage(config, layout), adds), known)
        before = recorder.live
        with recorder.apart() as end:
            optimizer.accumulate_gradients()
            reduce_gradients(optimizer, layout.gradients)
            optimizer.gather_parameters()
            pipeline.sum_embedding_gradients()
        found.once, found.peak = end.traffic, before + end.peak
    if config.parallel.cpu_offload:
        offload(found, gpt)
    return _Measured(found, costs)


def stages_of_layers(
    config: TrainConfig, model: ModelConfig, layout: RankLayout, chosen: list[list[int]]
) -> tuple[GPTModel, TrainConfig, RankLayout]:
    """Return a model of these layers in each stage, cut into this rank's stages, its run and its layout."""
    stages = layout.stages
    assert stages is not None
    edges = [sum(map(len, chosen[:i])) for i in range(len(chosen) + 1)]
    spans = tuple(range(begin, end) for begin, end in pairwise(edges))
    few_layers = FewLayers(stages.ranks, stages.schedule, stages.stages_per_rank, spans=spans)
    layout = dataclasses.replace(layout, stages=few_layers)
    config = with_loss_chunk(config, None, model.vocab_size).replace(compile=False)
    config = _with_micro_batches(config, config.data.gradient_accumulation)
    layers = [layer for layers in chosen for layer in layers]
    few, config = of_layers(model, layers), with_layers_alone(config, model, layers)
    with without_draws():
        gpt = divided(random_model(config, few, "cpu", layout), config, layout)
    set_loss_options(gpt, config.model)
    if config.lora.rank:
        Adapters(config, gpt)
    suppose_balance(gpt)
    return gpt, config, layout


@contextlib.contextmanager
def unrecorded_vote() -> Iterator[None]:
    """Inside, marks for a profiler are not set, and what torch's stages ask each other before their first step, whether
    all of them know the shapes of what they send, is not recorded: neither belongs to a step. Stages without values
    know."""
    from torch.distributed.pipelining import schedules, stage

    schedule: Any = schedules._PipelineSchedule
    noted = [(module, module.record_function) for module in (schedules, stage) if hasattr(module, "record_function")]
    for module, _ in noted:  # marks for a profiler, a quarter of what a schedule calls
        vars(module)["record_function"] = lambda name, args=None: contextlib.nullcontext()
    vote = getattr(schedule, "_warmup_p2p", None)  # another torch may ask elsewhere
    supposed = without_values()

    def asked(self: Any, stages: list[Any], *arguments: Any) -> None:
        if supposed:
            for stage in stages:
                mode = schedules.InferenceMode.STATIC  # pyright: ignore[reportPrivateImportUsage]
                stage._inference_mode = mode
        elif vote is not None:
            with _disable_current_modes():
                vote(self, stages, *arguments)

    if vote is not None:
        schedule._warmup_p2p = asked
    try:
        yield
    finally:
        for module, function in noted:
            vars(module)["record_function"] = function
        if vote is not None:
            schedule._warmup_p2p = vote
