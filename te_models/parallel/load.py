"""Filling a sharded model from a folder: each rank reads its own part of each tensor, and nothing else."""

from __future__ import annotations

from functools import cache

import torch

from te_models.checkpoints import expected_tensors
from te_models.checkpoints.folder.checkpoint import Checkpoint
from te_models.checkpoints.folder.load import layout_of
from te_models.checkpoints.plan.parameters import Parameters
from te_models.checkpoints.plan.rank_shards import cut_shape
from te_models.layers import QuantizedTensor
from te_models.layers.tensor.fsdp import local_part

from ..config import ConfigError
from ..model import GPTModel
from .parts import ModelParts


@torch.no_grad()
def load_own_parts(model: GPTModel, checkpoint: Checkpoint) -> None:
    """Fill this rank's part of every tensor, in the dtype that it has. Weights that are stored quantized in the model
    are quantized from the values of this rank's part.

    Raises CheckpointError for a folder that does not fit the model, ConfigError for one that is quantized itself.
    """
    if checkpoint.quantized is not None or checkpoint.formats:
        raise ConfigError(
            f"{checkpoint.path} holds quantized weights, which sharded models do not load; allowed: plain weights "
            "(te-models dequantize)"
        )
    checkpoint.check_values()
    tensors = dict(model.stored_tensors())
    layout = layout_of(tensors, model.config, "the names of the parameters to load")
    stored = Parameters(checkpoint.store, checkpoint.namespace, model.config, checkpoint.formats, layout)
    per_gemm = cache(
        lambda: Parameters(checkpoint.store, checkpoint.namespace, model.config, checkpoint.formats, "per-gemm")
    )
    shapes, own = expected_tensors(model.config, layout), ModelParts(model)
    for name, tensor in tensors.items():
        local = local_part(tensor).detach()
        cuts = own.like(name, tensor, local).cuts
        if 0 in cut_shape(shapes[name], cuts):
            continue
        if isinstance(local, QuantizedTensor) and local.dim() == 3:
            first = cuts.get(0, ((0, 0),))[0][0]
            rest = {dim - 1: ranges for dim, ranges in cuts.items() if dim}
            for number, member in enumerate(local.members(), first):  # type: ignore[attr-defined]
                member.copy_(per_gemm().entry(f"{name}{number}", rest))
        elif isinstance(local, QuantizedTensor):
            local.copy_(stored.entry(name, cuts))
        else:
            stored.fill_part(name, cuts, local)
    checkpoint.files.finish_checks()
