"""The layouts of q, k and v.

B batch, S length, T tokens of all sequences, N heads, D head channels.
"""

from typing import Literal, get_args

from torch import Tensor

from te_models.suggestions import check_choice

QkvFormat = Literal["sbhd", "bshd", "thd"]
"""[S, B, N, D], [B, S, N, D], or the sequences of a batch one after the other, [T, N, D]."""
_SHAPES = {
    "sbhd": "[length, batch, {}, channels]",
    "bshd": "[batch, length, {}, channels]",
    "thd": "[tokens, {}, channels]",
}


def check_qkv_format(qkv_format: str) -> None:
    """Raise ValueError for a layout that does not exist."""
    check_choice("qkv_format", qkv_format, get_args(QkvFormat))


def batch_first(name: str, x: Tensor, heads: int, qkv_format: str) -> Tensor:
    """Return q, k or v as [B, S, heads, D], packed ones as a batch of one. ValueError for another shape."""
    rank = 3 if qkv_format == "thd" else 4
    if x.dim() != rank or x.shape[-2] != heads:
        raise ValueError(f"{name} has shape {tuple(x.shape)}; allowed: {_SHAPES[qkv_format].format(heads)}")
    return moved_batch_first(x, qkv_format)


def moved_batch_first(x: Tensor, qkv_format: str) -> Tensor:
    """Return what is laid out so as [B, S, ...], packed sequences as a batch of one."""
    if qkv_format == "thd":
        return x[None]
    return x.transpose(0, 1) if qkv_format == "sbhd" else x


def from_batch_first(out: Tensor, qkv_format: str) -> Tensor:
    """Undo `moved_batch_first` for a result [B, S, ...]."""
    if qkv_format == "thd":
        return out[0]
    return out.transpose(0, 1) if qkv_format == "sbhd" else out
