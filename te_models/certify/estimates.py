"""What a checkpoint takes here: memory by use, seconds and disk of an import. Rules of thumb, from counts alone."""

import os
import tempfile
import time
from pathlib import Path

from te_models.checkpoints import expected_tensors
from te_models.checkpoints.io.boxes import element_count, full
from te_models.checkpoints.mapping.param_shapes import is_linear_weight
from te_models.checkpoints.tools.statistics import count_parameters

from ..config import ModelConfig

_TRAINED = 2 + 4 + 8 + 4
"""Bytes of a trained parameter: itself in bfloat16, its float32 master, two float32 moments, a float32 gradient."""
_COPIES = {"none": 0.0, "delayed": 2.0, "current": 2.0, "block": 2.0005, "mxfp8": 2.0625, "nvfp4": 1.125}
"""Bytes that a linear weight takes besides under each recipe: its quantized rows and its quantized columns."""
LORA_RANK = 16
KEYS = 1024
"""Positions that the size of what decoding carries is said for."""
_PROBE = 64 << 20


def memory(config: ModelConfig, stored_bytes: int) -> dict[str, int]:
    """Return bytes by use: serving as stored, LoRA over the stored weights, and training under each recipe. Activations
    and the key-value cache come on top; `te-models plan` counts the former."""
    shapes = expected_tensors(config)
    parameters, _ = count_parameters(config)
    linear = sum(element_count(full(shape)) for name, shape in shapes.items() if is_linear_weight(name))
    found = {"inference": stored_bytes, f"LoRA, rank {LORA_RANK}": stored_bytes + _TRAINED * _adapters(config)}
    for recipe, copies in _COPIES.items():
        found[f"training, {recipe}" if recipe != "none" else "training, bf16"] = round(
            _TRAINED * parameters + copies * linear
        )
    return found


def serving(config: ModelConfig) -> dict[str, int]:
    """Return the bytes of the weights by format: all in bfloat16, or linear weights as a recipe stores them."""
    parameters, _ = count_parameters(config)
    linear = sum(
        element_count(full(shape)) for name, shape in expected_tensors(config).items() if is_linear_weight(name)
    )
    stored = {recipe: copies / 2 for recipe, copies in _COPIES.items() if copies}  # rows without columns
    return {"bf16": 2 * parameters} | {
        recipe: round(2 * (parameters - linear) + size * linear) for recipe, size in stored.items()
    }


def cache_bytes(config: ModelConfig) -> int:
    """Return the bytes that decoding carries of one sequence of `KEYS` positions: keys and values in bfloat16, windows
    aside, and the states of other mixers (these do not grow)."""
    total = 0
    for layer in range(config.num_layers):
        attention, mixer = config.attention_of(layer), config.mixer_of(layer)
        if attention is not None and config.kv_source(layer) is None:
            groups, channels = attention.cached_sizes()
            total += 2 * KEYS * groups * sum(channels)
        for state in () if mixer is None else mixer.states():
            total += element_count(full(state.shape)) * (4 if state.dtype == "float32" else 2)
    return total


def copy_speed() -> float:
    """Return the bytes per second with which this machine copies a file to stable storage in a temporary folder."""
    block = os.urandom(1 << 20)
    with tempfile.TemporaryDirectory() as scratch:
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
            total += element_count(full(lead)) * LORA_RANK * (rows + columns)
    return total
