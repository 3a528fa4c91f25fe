"""What a checkpoint takes here: memory by use, seconds and disk of an import. Rules of thumb, from counts alone."""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path

from te_models.checkpoints import expected_tensors
from te_models.checkpoints.io.boxes import count, full
from te_models.checkpoints.plan.param_shapes import is_expert_stack, is_linear_weight

from ..config import ModelConfig

_TRAINED = 2 + 4 + 8 + 4
"""Bytes of a trained parameter: itself in bfloat16, its float32 master, two float32 moments, a float32 gradient."""
_COPIES = {"none": 0.0, "delayed": 2.0, "current": 2.0, "block": 2.0005, "mxfp8": 2.0625, "nvfp4": 1.125}
"""Bytes that a linear weight takes besides under each recipe: its quantized rows and its quantized columns."""
LORA_RANK = 16
KEYS = 1024
"""Positions that the size of a key-value cache is said for."""
_PROBE = 64 << 20


def count_parameters(config: ModelConfig) -> tuple[int, int, int]:
    """Return the parameters of a model, those that one token uses, and those in linear weights."""
    total = idle = linear = 0
    for name, shape in expected_tensors(config).items():
        elements = count(full(shape))
        total += elements
        linear += elements if is_linear_weight(name) else 0
        if is_expert_stack(name) and config.moe is not None:
            idle += elements * (config.moe.num_moe_experts - config.moe.moe_router_topk) // config.moe.num_moe_experts
    return total, total - idle, linear


def memory(config: ModelConfig, stored_bytes: int) -> dict[str, int]:
    """Return bytes by use: serving as stored, LoRA over the stored weights, and training under each recipe. Activations
    and the key-value cache come on top; `te-models plan` counts the former."""
    parameters, _, linear = count_parameters(config)
    found = {"inference": stored_bytes, f"LoRA, rank {LORA_RANK}": stored_bytes + _TRAINED * _adapters(config)}
    for recipe, copies in _COPIES.items():
        found[f"training, {recipe}" if recipe != "none" else "training, bf16"] = round(
            _TRAINED * parameters + copies * linear
        )
    return found


def cache_bytes(config: ModelConfig) -> int:
    """Return the bytes of keys and values of `KEYS` positions of one sequence in bfloat16, windows aside."""
    a = config.attention
    if a.mla is not None:
        width = a.mla.kv_lora_rank + a.mla.qk_pos_emb_head_dim
    else:
        assert a.kv_channels is not None, "filled in by validation"
        width = (a.num_query_groups or a.num_attention_heads) * (a.kv_channels + (a.v_head_dim or a.kv_channels))
    return 2 * KEYS * config.num_layers * width


def copy_speed(folder: Path | None = None) -> float:
    """Return the bytes per second with which this machine copies a file to stable storage in a folder."""
    block = os.urandom(1 << 20)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        source = Path(scratch) / "source"
        with source.open("wb") as file:
            for _ in range(_PROBE >> 20):
                file.write(block)
        start = time.perf_counter()
        with source.open("rb") as read, (Path(scratch) / "copy").open("wb") as written:
            while part := read.read(1 << 22):
                written.write(part)
            written.flush()
            os.fsync(written.fileno())
        return _PROBE / (time.perf_counter() - start)


def _adapters(config: ModelConfig) -> int:
    """Return the parameters of adapters of all linear weights."""
    total = 0
    for name, shape in expected_tensors(config).items():
        if is_linear_weight(name):
            *lead, rows, columns = shape
            total += count(full(lead)) * LORA_RANK * (rows + columns)
    return total
