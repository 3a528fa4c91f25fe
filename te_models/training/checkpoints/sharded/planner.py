"""What torch.distributed.checkpoint (DCP) writes and reads of the parts that a rank has: one item for each box.

DCP's own planners know DTensors. A rank of a split layer has several ranges of a tensor (its part of q, of k and of v),
which no DTensor describes, so the items are made from `LocalPart`; which rank writes what several have, and which saved
boxes a wanted one meets, remains DCP's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from ....parallel.parts import Box, LocalPart
from ..checks import TrainingCheckpointError


class PartSavePlanner(DefaultSavePlanner):
    """Plans the boxes of parts: a state dict of name -> LocalPart."""

    def set_up_planner(
        self, state_dict: Mapping[str, LocalPart], storage_meta: Any = None, is_coordinator: bool = False
    ) -> None:
        self.parts, self.is_coordinator = state_dict, is_coordinator
        self.flatten_state_dict = False
        self._boxes = _boxes_of(state_dict)

    def create_local_plan(self) -> SavePlan:
        items = []
        for index, (part, box) in self._boxes.items():
            chunk = ChunkStorageMetadata(torch.Size(box.begin), torch.Size(box.shape))
            properties = TensorProperties(dtype=part.tensor.dtype)
            data = TensorWriteData(chunk, properties, torch.Size(part.shape))
            items.append(WriteItem(index, WriteItemType.SHARD, tensor_data=data))
        self.plan = SavePlan(items)
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> torch.Tensor:
        part, box = self._boxes[index]
        return part.view(box).detach()


class PartLoadPlanner(DefaultLoadPlanner):
    """Plans what has to be read to fill parts: a state dict of name -> LocalPart, all of which must be there."""

    def set_up_planner(
        self, state_dict: Mapping[str, LocalPart], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        self.parts, self.metadata, self.is_coordinator = state_dict, metadata, is_coordinator
        self.flatten_state_dict = False
        self._boxes = _boxes_of(state_dict)

    def create_local_plan(self) -> LoadPlan:
        assert self.metadata is not None, "DCP reads it first"
        items: list[ReadItem] = []
        for name, part in self.parts.items():
            saved = self.metadata.state_dict_metadata[name]
            assert isinstance(saved, TensorStorageMetadata), "this storage holds nothing else"
            wanted = [ChunkStorageMetadata(torch.Size(b.begin), torch.Size(b.shape)) for b in part.boxes()]
            found = create_read_items_for_chunk_list(name, saved, wanted)
            if sum(item.lengths.numel() for item in found) != sum(chunk.sizes.numel() for chunk in wanted):
                raise TrainingCheckpointError(f"the parts of {name!r} do not cover the whole tensor")
            items += found
        return LoadPlan(items)

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        part, box = self._boxes[index]
        return part.view(box).detach()


def _boxes_of(parts: Mapping[str, LocalPart]) -> dict[MetadataIndex, tuple[LocalPart, Box]]:
    return {MetadataIndex(name, box.begin): (part, box) for name, part in parts.items() for box in part.boxes()}
