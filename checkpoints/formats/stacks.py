"""Stacks of experts as ModelOpt stores them, seen as they lie in the other formats.

In some models (Llama 4, gpt-oss) the experts are a parameter [E, in, out] of a module. Other formats store such weights
as [E, out, in] with a scale per expert, named after the parameter. ModelOpt leaves them as they lie, packs and scales
along `in` (the second dimension then), names the scales `X_weight_scale`, and has one number for all experts.
"""

from torch import Tensor

from ..io.boxes import Box, Shape, slices
from ..io.store import FilesSeen, FileStore
from ..mapping.tensor_map import Namespace
from .format import MixedFormat, Part, WeightFormat


def stacks(high_precision: Namespace, declared: WeightFormat | MixedFormat) -> dict[str, Shape]:
    """Return the stored weights of a family's namespace that a format stores as ModelOpt does, with their shapes
    [E, in, out]."""
    transposed = (link.stored for link in high_precision.links if len(link.axes) == 3 and link.axes[1:] == (2, 1))
    formats = {n: declared.of(n) for n in dict.fromkeys(transposed) if not n.endswith(".weight")}
    names = (name for name, form in formats.items() if form is not None and form.transposed_stacks)
    return {name: high_precision.stored[name].shape for name in names}


def stacked_name(weight: str, part: Part) -> str:
    """Return what a part of such a weight is called in files."""
    return f"{weight}_weight{part.suffix}" if part.suffix else weight


def seen_upright(files: FileStore, high_precision: Namespace, declared: WeightFormat | MixedFormat) -> FileStore:
    """Return the files with the parts of such weights as [E, out, in], [E], and the names of the other formats."""
    seen: dict[str, tuple[str, str, Shape]] = {}
    for weight, shape in stacks(high_precision, declared).items():
        weight_format = declared.of(weight)
        assert weight_format is not None, "stacks have a format"
        if not any(stacked_name(weight, part) in files.tensors for part in weight_format.scales):
            continue  # as the other formats have it, or not quantized
        for part in weight_format.parts:
            info = files.tensors.get(stacked_name(weight, part))
            if info is None:
                continue  # named when the tensors are matched
            if part.block is not None and len(info.shape) == 3:
                upright = (info.shape[0], info.shape[2], info.shape[1])
                seen[weight + part.suffix] = stacked_name(weight, part), info.dtype, upright
            elif part.block is None and info.shape in ((), (1,)):
                seen[weight + part.suffix] = stacked_name(weight, part), info.dtype, shape[:1]
    return _Seen(files, seen) if seen else files


class _Seen(FilesSeen):
    """Files of which some tensors have another name and shape: [E, out, in] for a stack that lies as [E, in, out], and
    [E] for one number."""

    def compute(self, name: str, box: Box) -> Tensor:
        source, _, shape = self._seen[name]
        if len(shape) == 1:
            return self._files.view(source).reshape(1).expand(shape)[slices(box)]
        experts, rows, columns = box
        return self._files.read(source, (experts, columns, rows)).transpose(-1, -2)
