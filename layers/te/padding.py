"""Transformer Engine's padding of rows sorted by expert, so that every expert has a multiple of some number of them.

`GroupedLinear` here takes rows and splits as they are and pads what a format wants itself; scripts that pad get the
same numbers.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ..module.autocast import current_recipe
from .permutation import take_rows

_ALIGN = {"mxfp8": 32, "nvfp4": 128}


class _Padding(nn.Module):
    """What the two directions share: the arguments, and how many rows each group has with padding."""

    def __init__(self, num_gemms: int, align_size: int | None = None) -> None:
        super().__init__()
        if num_gemms < 1 or (align_size is not None and align_size < 1):
            raise ValueError(
                f"num_gemms is {num_gemms} and align_size {align_size}; allowed: positive numbers, for align_size None"
            )
        self.num_gemms = num_gemms
        self.align_size = align_size

    def padded_splits(self, m_splits: Sequence[int]) -> list[int]:
        """Return the splits, each filled up. ValueError unless there is one number from 0 on for each group."""
        if len(m_splits) != self.num_gemms or min(m_splits) < 0:
            raise ValueError(f"m_splits is {list(m_splits)}; allowed: {self.num_gemms} numbers from 0 on, one per GEMM")
        recipe = current_recipe()
        align = self.align_size or _ALIGN.get("" if recipe is None else recipe.NAME, 16)
        return [(rows + align - 1) // align * align for rows in m_splits]

    def extra_repr(self) -> str:
        return f"{self.num_gemms}, align_size={self.align_size}"


class Fp8Padding(_Padding):
    """Fill the rows of each group up with zeros. Transformer Engine: `te.pytorch.Fp8Padding`.

    num_gemms: how many groups of rows there are; align_size: what each is filled up to a multiple of, None: 32 under
    MXFP8BlockScaling, 128 under NVFP4BlockScaling, 16 else, by the recipe in force at a call. ValueError for others.
    """

    def forward(self, inp: Tensor, m_splits: Sequence[int]) -> tuple[Tensor, list[int]]:
        """inp: [..., C], rows sorted by group; m_splits: rows of each, from the host -> ([P, C], the padded splits)."""
        splits, padded = list(m_splits), self.padded_splits(m_splits)
        _check_rows(inp, splits)
        if splits == padded:
            return inp, splits
        source, used, begin = [], [], 0
        for rows, filled in zip(splits, padded, strict=True):
            source += [*range(begin, begin + rows), *[0] * (filled - rows)]
            used += [True] * rows + [False] * (filled - rows)
            begin += rows
        index, mask = torch.tensor(source, device=inp.device), torch.tensor(used, device=inp.device)
        return take_rows(_matrix(inp), index, mask), padded


class Fp8Unpadding(_Padding):
    """Take away what `Fp8Padding` of the same arguments added. Transformer Engine: `te.pytorch.Fp8Unpadding`."""

    def forward(self, inp: Tensor, m_splits: Sequence[int]) -> Tensor:
        """inp: [P, C] as `Fp8Padding` returns it; m_splits: the splits without padding -> [T, C]."""
        splits, padded = list(m_splits), self.padded_splits(m_splits)
        _check_rows(inp, padded)
        if splits == padded:
            return inp
        source, begin = [], 0
        for rows, filled in zip(splits, padded, strict=True):
            source += range(begin, begin + rows)
            begin += filled
        return take_rows(_matrix(inp), torch.tensor(source, dtype=torch.int64, device=inp.device))


def _matrix(inp: Tensor) -> Tensor:
    return inp if inp.dim() == 2 else inp.reshape(-1, inp.shape[-1])


def _check_rows(inp: Tensor, splits: list[int]) -> None:
    rows = inp.shape[:-1].numel()
    if sum(splits) != rows:
        raise ValueError(f"the input has {rows} rows; allowed: {sum(splits)}, which {splits} add up to")
