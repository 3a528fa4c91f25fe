"""Write a distributed checkpoint that torch, torchtitan and Megatron-Core load, as a stream: a tensor's rows at a time.

torch's writer does the writing, metadata included; what it asks for is read when its turn comes.
"""

import json
import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict_saver import save

from ..io.dtypes import torch_dtype
from .system import is_optimizer
from .written import Written


class _Planner(DefaultSavePlanner):
    """Plans chunks of rows, and reads each when it is written."""

    def __init__(self, outputs: Sequence[Written]) -> None:
        super().__init__(flatten_state_dict=False)
        self.outputs = outputs
        self._rows: dict[MetadataIndex, tuple[Written, int, int]] = {}

    def set_up_planner(self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False) -> None:
        self.state_dict, self.is_coordinator = {}, is_coordinator

    def create_local_plan(self) -> SavePlan:
        items = []
        for output in self.outputs:
            for begin, end in output.spans():
                offset = (begin, *(0,) * (len(output.shape) - 1)) if output.shape else ()
                size = (end - begin, *output.shape[1:]) if output.shape else ()
                index = MetadataIndex(output.name, offset)
                chunk = ChunkStorageMetadata(torch.Size(offset), torch.Size(size))
                data = TensorWriteData(chunk, TensorProperties(torch_dtype(output.dtype)), torch.Size(output.shape))
                items.append(WriteItem(index, WriteItemType.SHARD, tensor_data=data))
                self._rows[index] = output, begin, end
        self.plan = SavePlan(items)
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        output, begin, end = self._rows[write_item.index]
        return output.rows(begin, end).contiguous()


def write_dcp(folder: Path, outputs: Sequence[Written], *, megatron: bool = False, prefix: str = "") -> None:
    """Write a checkpoint to an existing folder. megatron: with the two files by which Megatron-Core knows its own.
    prefix: before the names of weights."""
    outputs = [replace(o, name=o.name if is_optimizer(o.name) else prefix + o.name) for o in outputs]
    writer = FileSystemWriter(folder, single_file_per_rank=True, thread_count=1, sync_files=True)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)  # as it is meant
        save({}, storage_writer=writer, planner=_Planner(outputs), no_dist=True)
    if megatron:
        backend = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
        backend |= {"common_backend": "torch", "common_backend_version": 1}
        (folder / "metadata.json").write_text(json.dumps(backend), encoding="utf-8")
        torch.save({}, folder / "common.pt")
