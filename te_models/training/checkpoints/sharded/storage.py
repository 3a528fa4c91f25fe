"""The files of a sharded checkpoint: safetensors for the parts, JSON for where they are.

    parts/rank-00003.safetensors    what rank 3 wrote: boxes of whole tensors, each under "name@begin"
    parts/index.json                dtype and shape of every whole tensor, and the boxes of it: begin, shape, file

DCP's own storage writes pickles, whose reading runs code of whoever wrote them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
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
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from te_models.checkpoints import CheckpointError
from te_models.checkpoints.io.boxes import Range
from te_models.checkpoints.io.dtypes import dtype_name
from te_models.checkpoints.io.errors import quote
from te_models.checkpoints.io.store import FileStore
from te_models.checkpoints.io.weight_files import plain_file
from te_models.checkpoints.write.writer import write_tensors

from ....parallel.parts import Box, LocalPart
from ..checks import PARTS
from .index import INDEX


def file_of(rank: int) -> str:
    """Return the name of the file that a rank writes."""
    return f"rank-{rank:05d}.safetensors"


class PartWriter(StorageWriter):
    """Writes a rank's boxes to a file of its own, and on the first rank the index. folder: exists."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.file = file_of(dist.get_rank() if dist.is_initialized() else 0)

    def reset(self, checkpoint_id: Any = None) -> None:
        pass

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        pass

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's part of the plan."""
        tensors: dict[str, torch.Tensor] = {}
        results = []
        for item in plan.items:
            tensor = planner.resolve_data(item)
            assert isinstance(tensor, torch.Tensor), "the planner makes no other items"
            tensors[_entry(item.index)] = tensor
            results.append(WriteResult(item.index, tensor.nbytes, self.file))
        write_tensors(self.folder / self.file, tensors)
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write the index; called on the first rank."""
        files = {result.index: result.storage_data for one in results for result in one}
        tensors = {}
        for name, saved in sorted(metadata.state_dict_metadata.items()):
            assert isinstance(saved, TensorStorageMetadata), "the planner makes no other items"
            boxes = [
                {"begin": list(c.offsets), "shape": list(c.sizes), "file": files[MetadataIndex(name, c.offsets)]}
                for c in saved.chunks
            ]
            tensors[name] = {"dtype": dtype_name(saved.properties.dtype), "shape": list(saved.size), "boxes": boxes}
        text = json.dumps({"tensors": tensors}, indent=1)
        (self.folder / INDEX).write_text(text + "\n", encoding="utf-8")

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return True


class PartReader(StorageReader):
    """Reads boxes of tensors. metadata: of `index.read_index`."""

    def __init__(self, folder: Path, metadata: Metadata) -> None:
        self.folder, self.metadata = folder, metadata

    def reset(self, checkpoint_id: Any = None) -> None:
        pass

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self.metadata

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        pass

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Fill what the plan says; of the files only that is read."""
        files = sorted({self.metadata.storage_data[item.storage_index].file for item in plan.items})
        with FileStore({file: plain_file(self.folder, file, f"{PARTS}/{INDEX}") for file in files}) as store:
            for item in plan.items:
                entry, target = _entry(item.storage_index), planner.resolve_tensor(item)
                box = self.metadata.storage_data[item.storage_index]
                if store.file_of.get(entry) != box.file:
                    raise CheckpointError(f"{PARTS}/{box.file} lacks {quote(entry)}")
                if store.tensors[entry].shape != box.shape:
                    found, said = list(store.tensors[entry].shape), list(box.shape)
                    raise CheckpointError(
                        f"{PARTS}/{box.file} holds {quote(entry)} with shape {found}, and {PARTS}/{INDEX} says {said}"
                    )
                if store.tensors[entry].dtype != dtype_name(target.dtype):
                    found, allowed = store.tensors[entry].dtype, dtype_name(target.dtype)
                    name = quote(item.storage_index.fqn)
                    raise CheckpointError(f"the checkpoint holds {name} as {found}; allowed: {allowed}")
                ranges = zip(item.storage_offsets, item.lengths, strict=True)
                target.copy_(store.read(entry, tuple(Range(begin, begin + size) for begin, size in ranges)))
                planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return True


def _entry(index: MetadataIndex) -> str:
    return f"{index.fqn}@{','.join(map(str, index.offset or ()))}"


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
            items += create_read_items_for_chunk_list(name, saved, wanted)  # the boxes cover it, says `read_index`
        return LoadPlan(items)

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        part, box = self._boxes[index]
        return part.view(box).detach()


def _boxes_of(parts: Mapping[str, LocalPart]) -> dict[MetadataIndex, tuple[LocalPart, Box]]:
    return {MetadataIndex(name, box.begin): (part, box) for name, part in parts.items() for box in part.boxes()}
