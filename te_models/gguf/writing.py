"""A folder of ours as a GGUF file, a tensor at a time.

What is written is read back before the first tensor is: the configuration that llama.cpp's keys give must be the
model's, and a difference is an error that names the field.
"""

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from te_models.checkpoints.families import FAMILIES
from te_models.checkpoints.folder.checkpoint import Checkpoint, open_checkpoint
from te_models.checkpoints.folder.hf_config import choose_family, export_config
from te_models.checkpoints.io.atomic import replaced_file
from te_models.checkpoints.io.errors import CheckpointError
from te_models.checkpoints.io.store import Store
from te_models.checkpoints.io.threads import Progress
from te_models.checkpoints.mapping.plan import OutputTensor, make_plan
from te_models.checkpoints.mapping.stream import read_bands
from te_models.checkpoints.mapping.te_namespace import te_namespace
from te_models.checkpoints.tools.conversion import PathLike

from ..extras import require
from ..suggestions import did_you_mean
from .architectures import ARCHITECTURES, TensorPlace, gguf_hf_config, key_values, places
from .reading import llama3_factors
from .tokenizer import tokenizer_values

TYPES = ("f32", "f16", "bf16", "q8_0")
_BAND = 1 << 22
_TRAINING_ONLY = {
    "init_method_std",
    "padding_idx",
    "moe_aux_loss_coeff",
    "output_layer_init_method_std",
    "embedding_init_method_std",
}


def export_gguf(
    src: PathLike,
    dst: PathLike,
    *,
    type: str = "f16",
    family: str | None = None,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> list[str]:
    """Write a te_models folder as one GGUF file, and return notes for the user. Quantized weights are dequantized.

    Arguments:
        type: of the matrices, one of TYPES; norms and other vectors are float32. Of "q8_0", matrices whose rows are no
            multiple of 32 values are float16.
        family: the family that the file is written as; None means the one that the model came from, or the first that
            fits it.
        overwrite: replace an existing file.

    Raises MissingExtraError without the package `gguf`, and CheckpointError, before anything is written, for a family
    that is not in ARCHITECTURES and a model that llama.cpp would compute otherwise.
    """
    gguf = require("gguf", "gguf", feature="writing GGUF")
    if type not in TYPES:
        raise CheckpointError(f"the type is {type!r}; allowed: {', '.join(TYPES)}{did_you_mean(type, TYPES)}")
    path = Path(dst)
    if path.is_dir() or (path.exists() and not overwrite):
        raise CheckpointError(
            f"{path} exists already; choose another file{'' if path.is_dir() else ', or --overwrite'}"
        )
    with open_checkpoint(src) as ckpt:
        if ckpt.kind != "te_models":
            raise CheckpointError(f"{src} is a Hugging Face folder; te-models import {src} DIR, then export DIR")
        target = choose_family(ckpt.config, ckpt.source, family)
        if target.model_type not in ARCHITECTURES:
            raise CheckpointError(f"{target.model_type} is not written to GGUF; allowed: {', '.join(ARCHITECTURES)}")
        ckpt.check_values()
        config = export_config(ckpt.config, ckpt.source, target, "F32")
        store, outputs = _outputs(
            ckpt, target.namespace(ckpt.config, "published" if "published" in target.forms else None)
        )
        found = places((o.name for o in outputs), ARCHITECTURES[target.model_type], config, gguf)
        tensors = _by_tensor(outputs, found)
        rope, factors = config.get("rope_parameters") or {}, None
        if rope.get("rope_type") == "llama3":
            head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
            factors = llama3_factors(rope, int(head_dim))
            config = config | {"rope_parameters": {"rope_type": "default", "rope_theta": rope["rope_theta"]}}
        values = key_values(config, target.model_type)
        _check(ckpt, values | {"general.architecture": ARCHITECTURES[target.model_type]}, tensors, rope)
        tokens, notes = tokenizer_values(ckpt.path, config, ARCHITECTURES[target.model_type])
        with replaced_file(path) as scratch:
            writer = _Writer(gguf, scratch, ARCHITECTURES[target.model_type], type)
            writer.header(values, tokens, tensors, factors)
            writer.data(store, tensors, progress)
    return notes


def _outputs(ckpt: Checkpoint, namespace: Any) -> tuple[Store, list[OutputTensor]]:
    """Return the tensors of a family's files in float32, and what they are read from."""
    store: Store = ckpt.store
    if ckpt.formats:
        from te_models.checkpoints.quantized.dequantized_store import as_values

        store = as_values(ckpt, ckpt.formats, torch.float32)
    plan = make_plan(
        store.tensors,
        te_namespace(ckpt.config, ckpt.layout or "grouped"),
        namespace,
        where=str(ckpt.path),
        dtype=torch.float32,
        unused=ckpt.unused,
    )
    return store, list(plan.outputs)


Tensors = Mapping[str, list[tuple[OutputTensor, TensorPlace]]]
"""A file's tensor -> the tensors of the family's files that it consists of, experts in order."""


def _by_tensor(
    outputs: list[OutputTensor], found: Mapping[str, TensorPlace]
) -> dict[str, list[tuple[OutputTensor, TensorPlace]]]:
    tensors: dict[str, list[tuple[OutputTensor, TensorPlace]]] = {}
    for output in sorted(outputs, key=lambda o: found[o.name].expert or 0):
        tensors.setdefault(found[output.name].name, []).append((output, found[output.name]))
    return tensors


def _check(ckpt: Checkpoint, values: Mapping[str, Any], tensors: Tensors, rope: Mapping[str, Any]) -> None:
    """Raise CheckpointError where the keys do not give the model's configuration."""
    again = gguf_hf_config(values, dict.fromkeys(tensors, True), "the GGUF file")
    if rope.get("rope_type") == "llama3":
        again["rope_parameters"] = dict(rope)
    read = FAMILIES[again["model_type"]].read_config(again)
    for name, ours, theirs in _differences(ckpt.config.to_dict(), read.to_dict()):
        if name.rpartition(".")[2] not in _TRAINING_ONLY and "loss" not in name and "dropout" not in name:
            raise CheckpointError(
                f"llama.cpp computes {values['general.architecture']} models with {name} = {theirs!r}, and this model "
                f"has {ours!r}, which GGUF does not say"
            )


def _differences(ours: Any, theirs: Any, name: str = "") -> Iterator[tuple[str, Any, Any]]:
    if isinstance(ours, dict) and isinstance(theirs, dict):
        for key in sorted({*ours, *theirs}):
            yield from _differences(ours.get(key), theirs.get(key), f"{name}.{key}".lstrip("."))
    elif isinstance(ours, float) and isinstance(theirs, int | float):
        if not math.isclose(ours, theirs, rel_tol=1e-6):
            yield name, ours, theirs
    elif ours != theirs:
        yield name, ours, theirs


class _Writer:
    """A GGUF file: its header by the package, then the data of one tensor after the other."""

    def __init__(self, gguf: Any, path: Path, arch: str, type: str) -> None:
        self._gguf, self._path = gguf, path
        self._writer = gguf.GGUFWriter(str(path), arch)
        self._type = type

    def _kind(self, shape: tuple[int, ...]) -> Any:
        kinds = self._gguf.GGMLQuantizationType
        if len(shape) < 2 or shape[-1] == 1:
            return kinds.F32
        if self._type == "q8_0":
            return kinds.Q8_0 if shape[-1] % 32 == 0 else kinds.F16
        return {"f32": kinds.F32, "f16": kinds.F16, "bf16": kinds.BF16}[self._type]

    def header(
        self, values: Mapping[str, Any], tokens: Mapping[str, Any], tensors: Tensors, factors: torch.Tensor | None
    ) -> None:
        """Write what precedes the data."""
        import numpy

        for key, value in {**values, **tokens}.items():
            self._add(key, value)
        files = self._gguf.LlamaFileType
        kinds = {"f32": files.ALL_F32, "f16": files.MOSTLY_F16, "bf16": files.MOSTLY_BF16, "q8_0": files.MOSTLY_Q8_0}
        self._writer.add_file_type(kinds[self._type])
        self._factors = factors
        if factors is not None:
            self._writer.add_tensor_info("rope_freqs.weight", factors.shape, numpy.dtype("float32"), factors.nbytes)
        for name, parts in tensors.items():
            shape = self.shape(parts)
            kind = self._kind(shape)
            self._writer.add_tensor_info(name, shape, numpy.dtype("float32"), self._size(shape), raw_dtype=kind)
        self._writer.write_header_to_file()
        self._writer.write_kv_data_to_file()
        self._writer.write_ti_data_to_file()
        self._writer.close()

    def shape(self, parts: list[tuple[OutputTensor, TensorPlace]]) -> tuple[int, ...]:
        """Return the shape of a file's tensor: a stack, a matrix, or a vector, which a family may store as a row."""
        shape = parts[0][0].shape
        if parts[0][1].expert is not None:
            return (len(parts), *shape)
        return shape[1:] if len(shape) == 2 and shape[0] == 1 else shape

    def _size(self, shape: tuple[int, ...]) -> int:
        block, width = self._gguf.GGML_QUANT_SIZES[self._kind(shape)]
        return math.prod(shape) // block * width

    def _add(self, key: str, value: Any) -> None:
        w, kinds = self._writer, self._gguf.GGUFValueType
        if isinstance(value, bool):
            w.add_bool(key, value)
        elif isinstance(value, int):
            w.add_uint32(key, value)
        elif isinstance(value, float):
            w.add_float32(key, value)
        elif isinstance(value, list):
            w.add_array(key, value)
        else:
            w.add_key_value(key, value, kinds.STRING)

    def data(self, store: Store, tensors: Tensors, progress: Progress | None) -> None:
        """Write the tensors, each at its offset."""
        align = self._writer.data_alignment
        total = sum(self._size(self.shape(parts)) for parts in tensors.values())
        done = 0
        with self._path.open("ab") as file:
            file.write(bytes(-file.tell() % align))
            if self._factors is not None:
                file.write(self._factors.numpy().tobytes())
                file.write(bytes(-file.tell() % align))
            for parts in tensors.values():
                kind = self._kind(self.shape(parts))
                for output, place in parts:
                    for band in _bands(store, output, place):
                        done += file.write(self._encoded(band, kind))
                        if progress is not None:
                            progress(done, total)
                file.write(bytes(-file.tell() % align))

    def _encoded(self, band: torch.Tensor, kind: Any) -> bytes:
        if kind.name == "F16":
            half = band.half()
            if torch.isinf(half).any():
                raise CheckpointError("a weight is beyond float16; choose bf16 or f32")
            return half.numpy().tobytes()
        if kind.name == "BF16":
            return band.bfloat16().view(torch.int16).numpy().tobytes()
        if kind.name == "F32":
            return band.float().numpy().tobytes()
        return self._gguf.quantize(band.float().numpy(), kind).tobytes()


def _bands(store: Store, output: OutputTensor, place: TensorPlace) -> Iterator[torch.Tensor]:
    """Yield a tensor of a family's files as the file has it, a band of rows at a time, of whole heads."""
    rows = output.shape[0] // place.heads if place.heads else 1
    for _, band in read_bands(store, output, _BAND, multiple=rows):
        if place.heads:
            flat = band.view(-1, 2, rows // 2, band.shape[-1] if band.dim() > 1 else 1)
            band = flat.transpose(1, 2).reshape(band.shape)
        yield (band + 1 if place.plus_one else band).contiguous()
