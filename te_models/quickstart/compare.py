"""Comparisons: logits and perplexity of a transformers model or of ours, and files bit for bit.

Models are loaded one after the other, never side by side, so that the largest one decides the memory.
"""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F

from .. import GPTModel
from ..agreement import load_theirs
from ..memory import return_freed_memory


@torch.no_grad()
def logits(model: torch.nn.Module, windows: torch.Tensor) -> torch.Tensor:
    """Return float32 logits [B, S, V] of `windows` [B, S], one window at a time."""
    return torch.cat([model(window[None]).logits.float() for window in windows])


def theirs(folder: Path, windows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Logits by transformers."""
    values = logits(load_theirs(folder, dtype), windows)
    return_freed_memory()
    return values


def ours(folder: Path, windows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Logits by te_models."""
    values = logits(GPTModel.from_pretrained(folder, dtype=dtype).eval(), windows)
    return_freed_memory()
    return values


def perplexity(logits_BSV: torch.Tensor, windows: torch.Tensor) -> float:
    """exp of the mean negative log likelihood of each next token."""
    return F.cross_entropy(logits_BSV[:, :-1].flatten(0, 1), windows[:, 1:].flatten()).exp().item()


def stored(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor in the safetensors files of a folder, as stored."""
    from safetensors.torch import load_file

    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}


def differing(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> int:
    """How many names have different dtype, shape or bytes, or are in one only."""
    return sum(name not in a or name not in b or not same_bits(a[name], b[name]) for name in a.keys() | b.keys())


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether dtype, shape and every byte agree (unlike ==, NaN equals itself and 0.0 is not -0.0)."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return torch.equal(a.contiguous().view(-1).view(torch.uint8), b.contiguous().view(-1).view(torch.uint8))


def file_bytes(folder: Path) -> int:
    """Bytes in the safetensors files of a folder."""
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))
