"""Stacks of experts as ModelOpt stores them, seen as they lie in the other formats.

In some models (Llama 4, gpt-oss) the experts are a parameter [E, in, out] of a module. Other formats store such weights
as [E, out, in] with a scale per expert, named after the parameter. ModelOpt leaves them as they lie, packs and scales
along `in`, which is the second dimension then, names the scales `X_weight_scale`, and has one number for all experts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor

from ..boxes import Box, Shape, slices
from ..header import TensorInfo, byte_count
from ..links import Namespace
from ..store import FileStore
from .format import Part, WeightFormat


def stacks(plain: Namespace, weight_format: WeightFormat) -> dict[str, Shape]:
    """Return the stored weights of a family's namespace that a format stores as ModelOpt does, with their shapes
    [E, in, out]."""
    if not weight_format.stacks_as_they_lie:
        return {}
    turned = (link.stored for link in plain.links if len(link.axes) == 3 and link.axes[1:] == (2, 1))
    names = (name for name in dict.fromkeys(turned) if not name.endswith(".weight"))
    return {name: plain.stored[name].shape for name in names}


def stacked_name(weight: str, part: Part) -> str:
    """Return what a part of such a weight is called in files."""
    return f"{weight}_weight{part.suffix}" if part.suffix else weight


def seen_upright(files: FileStore, plain: Namespace, weight_format: WeightFormat) -> FileStore:
    """Return the files with the parts of such weights as [E, out, in], [E], and the names of the other formats."""
    seen: dict[str, tuple[str, Shape, Callable[[Tensor], Tensor]]] = {}
    for weight, shape in stacks(plain, weight_format).items():
        if not any(stacked_name(weight, part) in files.tensors for part in weight_format.scales):
            continue  # as the other formats have it, or not quantized
        for part in weight_format.parts:
            info = files.tensors.get(stacked_name(weight, part))
            if info is None:
                continue  # named when the tensors are matched
            if part.block is not None and len(info.shape) == 3:
                upright = (info.shape[0], info.shape[2], info.shape[1])
                seen[weight + part.suffix] = stacked_name(weight, part), upright, lambda t: t.transpose(-1, -2)
            elif part.block is None and info.shape in ((), (1,)):
                seen[weight + part.suffix] = stacked_name(weight, part), shape[:1], _repeated(shape[0])
    return _Seen(files, seen) if seen else files


def _repeated(experts: int) -> Callable[[Tensor], Tensor]:
    return lambda number: number.reshape(1).expand(experts)


class _Seen(FileStore):
    """Files of which some tensors have another name and shape: `seen` gives the file's name, the shape, and how."""

    def __init__(self, files: FileStore, seen: Mapping[str, tuple[str, Shape, Callable[[Tensor], Tensor]]]) -> None:
        self._files, self._seen = files, seen
        self.metadata, self.file_of = files.metadata, dict(files.file_of)
        hidden = {source for source, _, _ in seen.values()}
        self.tensors = {name: info for name, info in files.tensors.items() if name not in hidden}
        for name, (source, shape, _) in seen.items():
            dtype = files.tensors[source].dtype
            self.tensors[name] = TensorInfo(dtype, shape, 0, byte_count(dtype, shape))
            self.file_of[name] = files.file_of[source]

    def close(self) -> None:
        self._files.close()

    def read(self, name: str, box: Box) -> Tensor:
        return self.view(name)[slices(box)]

    def view(self, name: str) -> Tensor:
        if name not in self._seen:
            return self._files.view(name)
        source, _, change = self._seen[name]
        return change(self._files.view(source))

    def can_read_bytes(self, name: str) -> bool:
        return name not in self._seen

    def read_into(self, name: str, begin: int, buffer: memoryview) -> None:
        self._files.read_into(name, begin, buffer)
