"""Folders whose parameters are split and joined at multiples of 64 rows, as those of real models are, without
transformers; and manifest.json as earlier releases wrote it."""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from te_models.checkpoints import FAMILIES
from te_models.checkpoints.io.header import TensorInfo, read_header
from te_models.checkpoints.io.manifest import MANIFEST

SIZES: dict[str, Any] = {
    "vocab_size": 130,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "max_position_embeddings": 128,
}
DENSE = {"model_type": "llama", **SIZES}
MIXTURE = {"model_type": "mixtral", **SIZES, "num_local_experts": 2, "num_experts_per_tok": 1}


def make_folder(folder: Path, config: dict[str, Any], dtype: torch.dtype = torch.bfloat16) -> Path:
    """Write a Hugging Face folder of random weights, without a manifest."""
    family = FAMILIES[config["model_type"]]
    stored = family.namespace(family.read_config(config)).stored
    generator = torch.Generator().manual_seed(3)
    tensors = {name: torch.randn(spec.shape, generator=generator).to(dtype) for name, spec in stored.items()}
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def stored_bytes(folder: Path) -> Iterator[tuple[Path, int, str, TensorInfo]]:
    """Yield (file, where its data begins, name, description) of every tensor of a folder."""
    for file in sorted(folder.glob("*.safetensors")):
        header = read_header(file)
        for name, info in header.tensors.items():
            yield file, header.data_start, name, info


def digest_by_hand(data: bytes, shape: tuple[int, ...]) -> str:
    """SHA-256 of a tensor's data as manifest.json of version 3 lists it, from its documentation."""
    rows = 1
    for n in shape[:-1]:
        rows *= n
    part = 64 * (len(data) // rows) if rows else 0
    if len(shape) < 2 or rows <= 64 or part < 4096:
        return hashlib.sha256(data).hexdigest()
    digests = [hashlib.sha256(data[begin : begin + part]).hexdigest() for begin in range(0, len(data), part)]
    return hashlib.sha256("".join(f"{digest}\n" for digest in digests).encode()).hexdigest()


def make_earlier(folder: Path, version: int) -> Path:
    """Rewrite a folder's manifest as releases wrote it whose digest of a tensor was of all its bytes."""
    manifest = json.loads((folder / MANIFEST).read_text())
    manifest["format_version"] = version
    for name, entry in manifest["files"].items():
        if "tensors" not in entry:
            continue
        data, header = (folder / name).read_bytes(), read_header(folder / name)
        raw = data[header.data_start :]
        entry["tensors"] = {n: hashlib.sha256(raw[i.start : i.stop]).hexdigest() for n, i in header.tensors.items()}
        del entry["rows_per_part"]
        entry.pop("digest", None)
        lines = "".join(f"{digest}\n" for digest in (entry["header"], *entry["tensors"].values()))
        whole = {"sha256": hashlib.sha256(data).hexdigest()}
        entry |= whole if version == 1 else {"digest": hashlib.sha256(lines.encode()).hexdigest()}
    (folder / MANIFEST).write_text(json.dumps(manifest))
    return folder
