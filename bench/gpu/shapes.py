"""The sizes that the GPU benchmarks run: those of published H100 tables where there is one."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Grouped:
    """An expert GEMM: rows over all groups, N and K of each weight."""

    name: str
    rows: int
    outer: int
    inner: int
    groups: int


@dataclass(frozen=True)
class Shapes:
    """quantize: rows, columns; groups: of a grouped quantization; norms: rows, H; permute: T, K, H, E; linear: T, K, N.

    copy_megabytes and matmul: what the ceilings are measured on.
    """

    quantize: tuple[int, int]
    groups: int
    norms: tuple[tuple[int, int], ...]
    permute: tuple[int, int, int, int]
    grouped: tuple[Grouped, ...]
    linear: tuple[tuple[int, int, int], ...]
    copy_megabytes: int = 1024
    matmul: int = 8192


H100 = Shapes(
    quantize=(32768, 4096),
    groups=64,
    norms=((32768, 4096), (8192, 16384)),
    permute=(32768, 8, 2048, 128),
    grouped=(
        Grouped("8 experts, 2048 x 7168", 32768, 2048, 7168, 8),
        Grouped("8 experts, 14336 x 4096", 16384, 14336, 4096, 8),
        Grouped("128 experts, 1536 x 2048", 65536, 1536, 2048, 128),
    ),
    linear=((16384, 4096, 4096), (8192, 4096, 14336), (16384, 1024, 4096)),
)
