"""The layout of a run: its ranks as a mesh, the ranks that read different data, the ranks whose gradients are
averaged."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ...config import ModelConfig
from ...model.flops import flops_by_layer
from ...model.parallel import process_groups
from ...parallel.dims import ParallelDims
from ...parallel.stage_layout import StageLayout, balanced_split, stages_of
from ..config import ParallelConfig, TrainConfig
from .data_parallel import Ranks

if TYPE_CHECKING:
    from te_models.layers.distributed.context_parallel import CpCommType

    from ...model import GPTModel
    from ...parallel.mesh import ParallelMesh


@dataclass(frozen=True, eq=False)
class RankLayout:
    """mesh: None where every rank has the whole model, and only data differ. data: this rank's place among those whose
    windows differ; ranks that split layers or share sequences with it read the same ones. gradients: its place among
    those over which gradients and losses are averaged: ranks with other windows or other parts of them.
    sequence_parallel: whether ranks that split layers have a part of the tokens between these. stages: the pipeline
    stages; None where each rank has all layers. cp_comm_type: how attention reaches the keys of ranks that share
    sequences."""

    dims: ParallelDims
    mesh: ParallelMesh | None
    data: Ranks
    gradients: Ranks
    sequence_parallel: bool = False
    stages: StageLayout | None = None
    cp_comm_type: CpCommType = "all_gather"

    @property
    def model_mesh(self) -> ParallelMesh | None:
        """The mesh over which the model is built; None where each rank builds all of it."""
        return self.mesh if self.mesh is not None and self.mesh.model_groups else None

    @property
    def model_options(self) -> dict[str, Any]:
        """How a model is divided, as arguments of `GPTModel`."""
        return {**process_groups(self.model_mesh), "sequence_parallel": self.sequence_parallel}

    def share_sequences(self, model: GPTModel) -> GPTModel:
        """Tell a model which ranks share its sequences, and return it."""
        if self.mesh is not None:
            model.set_context_parallel_group(self.mesh.cp_group, self.cp_comm_type)
        return model


ONE_RANK = RankLayout(ParallelDims(ranks=1), None, Ranks(), Ranks())


def balanced(layout: RankLayout, config: TrainConfig, model: ModelConfig) -> RankLayout:
    """Return the layout with stages that take equally long, where the run asks for it."""
    return dataclasses.replace(layout, stages=stages_of_model(config, model))


def stages_of_model(config: TrainConfig, model: ModelConfig) -> StageLayout | None:
    """Return the pipeline stages of a run, which take equally long where it asks for that."""
    stages = stages_of(config.parallel)
    if stages is None or not config.parallel.pipeline_balance:
        return stages
    stages.layers(model.num_layers)  # refuses more stages than layers
    layers, last = flops_by_layer(model, config.data.sequence_length)
    return dataclasses.replace(stages, split=balanced_split(layers, stages.stages, last))


def rank_layout(config: ParallelConfig, ranks: Ranks, device: str) -> RankLayout:
    """Return the layout that a configuration describes for so many ranks; called by all of them.

    Raises ConfigError, naming the size, where the ranks cannot be divided so.
    """
    dims = ParallelDims.of(config.to_dict(), ranks.world_size)
    if dims.is_whole and dims.expert_model_parallel_size == dims.context_parallel_size == 1:
        return RankLayout(dims, None, ranks, ranks)
    mesh = dims.build_mesh(device)
    group, share = mesh.data_group, dims.context_parallel_size
    gradients = dataclasses.replace(ranks, rank=group.rank(), world_size=group.size(), group=group, owns_group=False)
    data = gradients
    if share > 1:  # no collective is over these ranks alone
        data = Ranks(group.rank() // share, group.size() // share)
    return RankLayout(dims, mesh, data, gradients, config.sequence_parallel, stages_of(config), config.cp_comm_type)
