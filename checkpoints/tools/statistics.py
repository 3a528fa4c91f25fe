"""Where a model's weights are and how they are scaled: counts from shapes alone, statistics from the scales only."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from te_models.lazy import later

from ..families import FAMILIES
from ..folder.checkpoint import Checkpoint, open_checkpoint
from ..io.boxes import Shape
from ..io.header import byte_count
from ..mapping.param_shapes import expected_tensors, is_expert_stack
from ..mapping.parameters import StoredParameters
from ..mapping.quantized_format import SUFFIXES, field_specs
from .conversion import PathLike

if TYPE_CHECKING:
    import torch

    from te_models.config import ModelConfig

    from ..formats import numbers
    from ..formats.files import QuantizedFiles
else:
    torch, numbers = later("torch"), later("te_models.checkpoints.formats.numbers")

_SCALES = SUFFIXES["rowwise_scale_inv"]


@dataclass(frozen=True)
class FormatSummary:
    """The parameters of one quantized format, or the tensors of a Hugging Face folder that it stands for: how many,
    their weights, the bytes of their numbers and of their scales (all copies), and the bits that one weight takes."""

    parameters: int
    weights: int
    data_bytes: int
    scale_bytes: int

    @property
    def bits_per_weight(self) -> float:
        """Bits of numbers and scales together, divided by the weights."""
        return 8 * (self.data_bytes + self.scale_bytes) / self.weights


@dataclass(frozen=True)
class ScaleStatistics:
    """Scales (what stored numbers are multiplied by) of one format: how many, the extremes and the median."""

    count: int
    smallest: float
    median: float
    largest: float


def count_parameters(config: ModelConfig) -> tuple[int, int]:
    """Return the weights of a model, and those that one token uses."""
    shapes = expected_tensors(config)
    total = sum(map(math.prod, shapes.values()))
    if config.moe is None:
        return total, total
    in_experts = sum(math.prod(shape) for name, shape in shapes.items() if is_expert_stack(name))
    experts = config.moe.num_moe_experts
    return total, total - in_experts * (experts - config.moe.moe_router_topk) // experts


def count_parts(shapes: Mapping[str, Shape]) -> dict[str, int]:
    """Return part of the model -> its weights, for grouped parameters."""
    counts: Counter[str] = Counter()
    for name, shape in shapes.items():
        counts[_part(name)] += math.prod(shape)
    return dict(counts)


def _part(name: str) -> str:
    if name.startswith(("embedding.", "output_layer.")):
        return name.partition(".")[0].removesuffix("_layer")
    if "norm" in name:
        return "norms"
    if is_expert_stack(name):
        return "experts"
    named = {".shared_experts.": "shared experts", ".router.": "router", ".mlp.": "mlp", ".mixer.": "mixers"}
    for marker, part in named.items():
        if marker in name:
            return part
    return "attention"


def summarize_formats(ckpt: Checkpoint) -> dict[str, FormatSummary]:
    """Return format -> summary, of a Hugging Face folder the format that it declares; nothing is read."""
    if ckpt.quantized is not None:
        return _of_files(ckpt, ckpt.quantized)
    shapes = expected_tensors(ckpt.config)
    sums: dict[str, list[int]] = {}
    for name, meta in ckpt.formats.items():
        total = sums.setdefault(str(meta["format"]), [0, 0, 0, 0])
        total[0] += 1
        total[1] += math.prod(shapes[name])
        for suffix, spec in field_specs(name, shapes[name], meta).items():
            (dtype,) = spec.dtypes
            total[3 if suffix.endswith(("_scale_inv", "_zero_point", "_amax")) else 2] += byte_count(dtype, spec.shape)
    return {name: FormatSummary(*total) for name, total in sums.items()}


def _of_files(ckpt: Checkpoint, quantized: QuantizedFiles) -> dict[str, FormatSummary]:
    """Return format -> the summary of what the files hold; an import may store another form."""
    high_precision = FAMILIES[ckpt.family or ""].namespace(ckpt.config, ckpt.source and ckpt.source.form)
    tensors, sums = quantized.files.tensors, dict[str, list[int]]()
    for name, form in quantized.formats.items():
        total = sums.setdefault(form.name, [0, 0, 0, 0])
        total[0] += 1
        total[1] += math.prod(high_precision.stored[name].shape)
        for part in form.parts:
            total[2 if part == form.data else 3] += tensors[name + part.suffix].nbytes
    return {name: FormatSummary(*total) for name, total in sums.items()}


def scale_statistics(path: PathLike, *, verify: bool = True) -> dict[str, ScaleStatistics]:
    """Return format -> statistics of the rowwise scales of all its parameters, or of the scales of a Hugging Face
    folder's blocks; reads the scales, no weights. One that is no number is a CheckpointError that names its tensor."""
    found: dict[str, list[tuple[torch.Tensor, torch.Tensor]]] = {}
    with open_checkpoint(path, verify=verify) as ckpt:
        ckpt.check_scales()
        for name, stored in _scales(ckpt) if ckpt.quantized is None else _scales_of_files(ckpt.quantized):
            found.setdefault(name, []).append(_counted(stored))
        ckpt.files.finish_checks()
    return {name: _statistics(*map(torch.cat, zip(*parts))) for name, parts in found.items()}


def _counted(stored: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the values that scales have, and how many have each: of eight bits there are 256, however many scales."""
    if stored.dtype.itemsize > 1:
        return torch.unique(numbers.scale_to_float(stored), return_counts=True)
    counts = torch.bincount(stored.contiguous().view(torch.uint8).flatten(), minlength=256)
    codes = counts.nonzero().flatten()
    return numbers.scale_to_float(codes.to(torch.uint8).view(stored.dtype)), counts[codes]


def _statistics(values: torch.Tensor, counts: torch.Tensor) -> ScaleStatistics:
    values, order = values.sort()
    up_to = counts[order].cumsum(0)
    middle = values[torch.searchsorted(up_to, (up_to[-1] - 1) // 2, right=True)]
    return ScaleStatistics(int(up_to[-1]), values[0].item(), middle.item(), values[-1].item())


def _scales(ckpt: Checkpoint) -> Iterator[tuple[str, torch.Tensor]]:
    parameters = StoredParameters(ckpt.store, ckpt.namespace, ckpt.config, ckpt.formats, "grouped")
    for name, meta in ckpt.formats.items():
        yield str(meta["format"]), parameters.entry(name + _SCALES)


def _scales_of_files(quantized: QuantizedFiles) -> Iterator[tuple[str, torch.Tensor]]:
    for weight, form in quantized.formats.items():
        for part in form.scales:
            if part.meaning == "scale":
                yield form.name, quantized.files.view(weight + part.suffix)
