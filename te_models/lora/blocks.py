"""Adapters of some of the matrices that a weight joins: of q and v, say, where one weight has q, k and v."""

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import nn

from te_models.checkpoints import expected_tensors
from te_models.checkpoints.mapping.blocks import joined_blocks
from te_models.checkpoints.mapping.param_shapes import ExpertLayout
from te_models.checkpoints.mapping.rank_shards import cut_part, parts

from ..config import ModelConfig
from ..model.parallel import shard_place
from .adapter import adapters_of
from .layers import FIRST
from .parts import adapter_parameters, adapter_parts


def blocks_of_layers(config: ModelConfig, layout: ExpertLayout) -> dict[str, dict[str, int]]:
    """Return the rows of each matrix that a layer's weight joins, by its name and theirs, of layers that join several:
    the declaration that Muon and tensor parallelism go by, too."""
    found = {}
    for name, shape in expected_tensors(config, layout).items():
        layer, _, last = name.rpartition(".")
        if last == "weight" and (blocks := joined_blocks(config, name, shape)):
            found[layer] = blocks
    return found


def adapt_rows_alone(
    model: nn.Module, chosen: Mapping[str, Collection[str]], blocks: Mapping[str, Mapping[str, int]]
) -> None:
    """Have the adapters of layers change some blocks of their rows alone, of a rank its part of them. chosen: the names
    of the blocks, by the name of the layer."""
    owner: Any = model
    whole: Any = getattr(model, "whole", None) or model
    shapes = expected_tensors(whole.config, whole.expert_layout)
    place = parts(whole.config, shapes, shard_place(owner))
    wholes = adapter_parameters(whole, shapes)
    owned = adapter_parts(wholes, shapes, place)
    for layer, adapter in adapters_of(whole):
        if layer in chosen:
            b = f"{layer}.{FIRST[1]}.weight"
            its = [block in chosen[layer] for block, size in blocks[layer].items() for _ in range(size)]
            rows = torch.tensor(its, dtype=torch.bool, device="cpu")[:, None].expand(wholes[b].shape)
            own = getattr(adapter, FIRST[1]).weight
            adapter.rows = cut_part(rows, owned[b].cuts())[..., :1].to(own.device)
