"""What a folder holds, from its configuration and headers alone."""

from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any

from te_models.config import mixer_words
from te_models.sizes import format_size, plural

from ..folder.checkpoint import open_checkpoint
from ..mapping.param_shapes import expected_tensors
from .conversion import PathLike
from .statistics import FormatSummary, count_parameters, count_parts, summarize_formats


@dataclass(frozen=True)
class Inspection:
    """A folder's content. `parameters` counts logical weights, `active_parameters` those that one token uses, `parts`
    the bytes of each part of the model; `carried_bytes` counts tensors that the model does not use and conversions
    keep; `formats` counts the parameters in each quantized format, of a Hugging Face folder the tensors in the one that
    it declares, and `quantized` says what they take; `mixers` counts layers by what mixes their tokens."""

    path: str
    kind: str
    family: str | None
    layout: str | None
    files: dict[str, int]
    total_bytes: int
    carried_bytes: int
    parameters: int
    active_parameters: int
    parts: dict[str, int]
    dtypes: dict[str, int]
    formats: dict[str, int]
    quantized: dict[str, FormatSummary]
    mixers: dict[str, int]
    config: dict[str, Any]
    tensors: dict[str, tuple[str, tuple[int, ...]]]

    def to_dict(self, *, tensors: bool = False) -> dict[str, Any]:
        """Return the inspection as JSON values; `tensors` adds dtype and shape of every stored tensor."""
        values = {name: value for name, value in vars(self).items() if name != "tensors"}
        values["quantized"] = {
            name: {**asdict(summary), "bits_per_weight": summary.bits_per_weight}
            for name, summary in self.quantized.items()
        }
        if tensors:
            values["tensors"] = {
                n: {"dtype": dtype, "shape": list(shape)} for n, (dtype, shape) in self.tensors.items()
            }
        return values

    def __str__(self) -> str:
        c, files = self.config, plural(len(self.files), "file")
        model = f"{plural(c['num_layers'], 'layer')}, hidden {c['hidden_size']}, vocabulary {c['vocab_size']}"
        if c["moe"] is not None:
            model += f", {plural(c['moe']['num_moe_experts'], 'expert')}, top {c['moe']['moe_router_topk']}"
        lines = [
            f"{self.path}: {self.kind} folder" + (f" of family {self.family}" if self.family else ""),
            f"  model       {model}",
            f"  mixers      {', '.join(f'{n} x {words}' for words, n in self.mixers.items())}",
            f"  parameters  {self.parameters:,} ({self.active_parameters:,} active)",
            f"  of these    {', '.join(f'{part} {n:,}' for part, n in self.parts.items())}",
            f"  tensors     {len(self.tensors)} in {files}, {format_size(self.total_bytes)}",
            f"  dtypes      {', '.join(f'{name}: {n}' for name, n in self.dtypes.items())}",
        ]
        if self.layout is not None:
            lines.append(f"  experts     {self.layout} layout")
        if self.carried_bytes:
            lines.append(f"  carried     {format_size(self.carried_bytes)} that the model does not use")
        counted = "tensors" if self.kind == "hf" else "parameters"
        for name, f in self.quantized.items():
            share = f.scale_bytes / (f.data_bytes + f.scale_bytes)
            lines.append(
                f"  quantized   {name}: {f.parameters} {counted}, {f.bits_per_weight:.2f} bits per weight, of which "
                f"{share:.1%} scales"
            )
        return "\n".join(lines)


def inspect(path: PathLike, *, verify: bool = True) -> Inspection:
    """Describe a folder of either kind; reads no tensor data, so it is instant for any size. verify: its small files
    and headers are checked against its manifest.json."""
    with open_checkpoint(path, verify=verify) as ckpt:
        shapes = expected_tensors(ckpt.config)
        total, active = count_parameters(ckpt.config)
        sizes: Counter[str] = Counter()
        formats = summarize_formats(ckpt)
        for name, info in ckpt.files.tensors.items():
            sizes[ckpt.files.file_of[name]] += info.nbytes
        return Inspection(
            path=str(path),
            kind=ckpt.kind,
            family=ckpt.family,
            layout=ckpt.layout,
            files=dict(sorted(sizes.items())),
            total_bytes=sum(sizes.values()),
            carried_bytes=sum(ckpt.tensors[name].nbytes for name in ckpt.passthrough),
            parameters=total,
            active_parameters=active,
            parts=count_parts(shapes),
            dtypes=dict(Counter(info.dtype for info in ckpt.files.tensors.values())),
            formats={name: summary.parameters for name, summary in formats.items()},
            quantized=formats,
            mixers=mixer_words(ckpt.config),
            config=ckpt.config.to_dict(),
            tensors={name: (info.dtype, info.shape) for name, info in ckpt.files.tensors.items()},
        )
