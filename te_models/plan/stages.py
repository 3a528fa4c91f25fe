"""One training step of a pipeline rank's stages, of few layers each, on ranks that do not exist, recorded.

The schedule itself runs, all micro-batches of it, so that what is in flight at its highest point, and what is sent from
stage to stage, is what the schedule makes it. As in `micro_batch`, layers of a kind are alike: two of each and one more
say what any number takes.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from ..config import ModelConfig
from ..parallel.pipeline import StageLayout
from ..training.build import build_optimizer, random_model
from ..training.config import TrainConfig
from ..training.lora import Adapters
from ..training.ranks.layout import Layout
from ..training.setup import set_loss_options, with_loss_chunk
from ..training.step import make_pipeline, reduce_gradients
from ..training.trained import with_layers_alone
from .micro_batch import Recorded, as_few_operations, by_kind, divided, of_layers, recorder_of, suppose_balance
from .simulation import without_values

_FEW = 2
"""Layers of a kind, of a stage, from which the others are told: what FSDP2 gathers is a stage at a time."""


@dataclass(frozen=True)
class FewLayers(StageLayout):
    """Stages of the given layers each."""

    spans: tuple[range, ...] = ()

    def layers(self, num_layers: int) -> list[range]:
        """Return `spans`."""
        return list(self.spans)


def record_stages(config: TrainConfig, model: ModelConfig, layout: Layout) -> Recorded:
    """Return what this rank takes for a step of the model: all micro-batches are in `once`.

    Called inside `fake_ranks`. Raises ConfigError for a number of micro-batches that the schedule does not have.
    """
    stages = layout.stages
    assert stages is not None and layout.mesh is not None and layout.mesh.stages is not None
    micro_batches, full = config.data.gradient_accumulation, 3 * stages.ranks
    if micro_batches <= full + stages.ranks:
        return _record_layers(config, model, layout, stages, micro_batches)
    # with as many the pipeline is full: each further round of it holds and sends the same more
    few = full + micro_batches % stages.ranks
    base, more = (_record_layers(config, model, layout, stages, n) for n in (few, few + stages.ranks))
    return base.plus(more.plus(base, -1.0), (micro_batches - few) / stages.ranks)


def _record_layers(
    config: TrainConfig, model: ModelConfig, layout: Layout, stages: StageLayout, micro_batches: int
) -> Recorded:
    assert layout.mesh is not None and layout.mesh.stages is not None
    own = stages.of_rank(layout.mesh.stages.rank())
    spans = stages.layers(model.num_layers)
    few: dict[int, list[int]] = {}
    rest: list[tuple[int, list[int]]] = []  # of a stage and kind: the layers that are not among the few
    for stage in own:
        places = by_kind(config, model, spans[stage])
        few[stage] = sorted(layer for layers in places for layer in layers[:_FEW])
        rest += [(stage, layers[_FEW:]) for layers in places if len(layers) > _FEW]

    def recorded(chosen: dict[int, list[int]]) -> Recorded:
        return record_stages_of_layers(
            config, model, layout, [chosen.get(i, [s[0]]) for i, s in enumerate(spans)], micro_batches
        )

    base = total = recorded(few)
    for stage, layers in rest:
        more = recorded(few | {stage: sorted([*few[stage], layers[0]])})
        total = total.plus(more.plus(base, -1.0), len(layers))
    return total


def record_stages_of_layers(
    config: TrainConfig, model: ModelConfig, layout: Layout, chosen: list[list[int]], micro_batches: int
) -> Recorded:
    """Run a step with these layers of the model in each stage, and return what was recorded on this rank."""
    stages = layout.stages
    assert stages is not None
    edges = [sum(map(len, chosen[:i])) for i in range(len(chosen) + 1)]
    spans = tuple(range(begin, end) for begin, end in pairwise(edges))
    layout = dataclasses.replace(layout, stages=FewLayers(stages.ranks, stages.schedule, stages.stages_per_rank, spans))
    config = with_loss_chunk(config, None, model.vocab_size).replace(
        compile=False, data=config.data.replace(gradient_accumulation=micro_batches, rampup_batch_size=())
    )
    recorder = recorder_of(layout)
    layers = [layer for layers in chosen for layer in layers]
    few, config = of_layers(model, layers), with_layers_alone(config, model, layers)
    gpt = divided(random_model(config, few, "cpu", layout), config, layout)
    set_loss_options(gpt, config.model)
    if config.lora.rank:
        Adapters(config, gpt)
    suppose_balance(gpt)
    recorder.hold([list(gpt.parameters()), list(gpt.buffers())])
    found = Recorded(parameters=recorder.live)
    with as_few_operations(), recorder:
        optimizer = build_optimizer(config, gpt, layout)
        found.optimizer = recorder.live - found.parameters
        pipeline = make_pipeline(gpt.train(), config, "cpu", layout)
        shape = config.data.micro_batch_size, config.data.sequence_length
        input_ids = torch.zeros(shape, dtype=torch.int64, device="cpu")
        with _unrecorded_vote():
            pipeline.forward_backward([{"input_ids": input_ids}] * micro_batches)
        optimizer.accumulate_gradients()
        reduce_gradients(optimizer, layout.gradients)
        pipeline.sum_embedding_gradients()
        found.once, found.peak = recorder.traffic, recorder.peak
    return found


@contextlib.contextmanager
def _unrecorded_vote() -> Iterator[None]:
    """Inside, what torch's stages ask each other before their first step, whether all of them know the shapes of what
    they send, is not recorded: it belongs to no step. Stages without values know."""
    from torch.distributed.pipelining import schedules

    schedule: Any = schedules._PipelineSchedule
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
        if vote is not None:
            schedule._warmup_p2p = vote
