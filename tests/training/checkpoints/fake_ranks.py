"""What many ranks of a large model would have of it under FSDP2, without data, and their files, which are holes."""

from __future__ import annotations

from pathlib import Path

import torch

from te_models.parallel.parts import LocalPart
from te_models.training.checkpoints.sharded.index import CheckpointIndex, file_of

HIDDEN, FFN, KEYS, VOCABULARY = 8192, 28672, 1024, 128256


def shapes(layers: int) -> dict[str, tuple[int, ...]]:
    """Those of a 70B model with 80 layers."""
    found: dict[str, tuple[int, ...]] = {"embedding.word_embeddings.weight": (VOCABULARY, HIDDEN)}
    for layer in range(layers):
        own = {
            "self_attention.linear_qkv.layer_norm_weight": (HIDDEN,),
            "self_attention.linear_qkv.weight": (HIDDEN + 2 * KEYS, HIDDEN),
            "self_attention.linear_proj.weight": (HIDDEN, HIDDEN),
            "mlp.linear_fc1.layer_norm_weight": (HIDDEN,),
            "mlp.linear_fc1.weight": (2 * FFN, HIDDEN),
            "mlp.linear_fc2.weight": (HIDDEN, FFN),
        }
        found |= {f"decoder.layers.{layer}.{name}": shape for name, shape in own.items()}
    return found | {"decoder.final_layernorm.weight": (HIDDEN,), "output_layer.weight": (VOCABULARY, HIDDEN)}


def parts_of(rank: int, ranks: int, layers: int, *, copies: int = 1) -> dict[str, LocalPart]:
    """Of `ranks` ranks, of which groups of `copies` have the same, AdamW with masters."""
    cut: dict[object, LocalPart] = {}

    def part(shape: tuple[int, ...], dtype: torch.dtype) -> LocalPart:
        if (shape, dtype) not in cut:
            each = -(-shape[0] // (ranks // copies))
            begin = min(rank // copies * each, shape[0])
            end = min(begin + each, shape[0])
            tensor = torch.empty((end - begin, *shape[1:]), dtype=dtype, device="meta")
            cut[shape, dtype] = LocalPart(tensor, shape, {0: ((begin, end),) if end > begin else ()})
        return cut[shape, dtype]

    found: dict[str, LocalPart] = {}
    step = LocalPart.undivided(torch.empty((), device="meta"))
    for name, shape in shapes(layers).items():
        found[f"model.{name}"] = part(shape, torch.bfloat16)
        found |= {f"optimizer.{name}.{k}": part(shape, torch.float32) for k in ("exp_avg", "exp_avg_sq", "master")}
        found[f"optimizer.{name}.step"] = step
    for name, size in (("python", 2512), ("torch", 5056)):
        found[f"rng.{rank}.{name}"] = LocalPart.undivided(torch.empty(size, dtype=torch.uint8, device="meta"))
    return found


def bytes_of_files(index: CheckpointIndex) -> list[int]:
    """Return how many bytes of tensors each file has."""
    found = torch.zeros(len(index.files), dtype=torch.float64)
    for stored in index.tensors.values():
        found.index_add_(0, stored.files.long(), stored.cutting.elements * stored.dtype.itemsize)
    return [int(nbytes) for nbytes in found.tolist()]


def write_holes(folder: Path, index: CheckpointIndex) -> None:
    """Write the files of ranks without what is in them."""
    for rank, nbytes in enumerate(bytes_of_files(index)):
        with (folder / file_of(rank)).open("wb") as file:
            file.truncate(nbytes + 1000)
