"""MXFP4 numbers as NVFP4, where that is exact.

Both are E2M1 with block scales. NVFP4 has an E4M3 scale per 16 values and a factor per matrix; E4M3 has the powers of
two 2^-9 .. 2^8. So where the scales of a matrix span no more than 2^17, the factor 2^(largest - 8) makes all of them
such powers, and every 32-value block becomes two with the same scale. Blocks of zeros have any scale.
"""

from collections.abc import Callable, Iterator, Mapping

import torch

from te_models.kernels.quantize import e8m0_to_float, global_decode

from ..formats import numbers
from ..io.boxes import Shape
from ..io.store import Store
from ..mapping.plan import OutputTensor
from ..mapping.quantized_format import SUFFIXES
from ..mapping.stream import matrices, read_bands, read_rows

_SPAN, _TOP = 17, 8
"""Binary orders of magnitude between the largest and the smallest power of two of E4M3; the exponent of the largest."""
_BAND = 1 << 20


class SpanError(Exception):
    """Why a weight is not exact in NVFP4."""


def nvfp4_outputs(store: Store, shape: Shape, fields: Mapping[str, OutputTensor], name: str) -> list[OutputTensor]:
    """Return the rowwise NVFP4 fields of a weight [out, in] or [G, out, in]. Reads the scales; SpanError if it is not
    exact.

    fields: the outputs that hold it as rowwise MXFP8, by suffix.
    """
    suffix = SUFFIXES["rowwise_scale_inv"]
    data, scales = matrices(fields[""]), matrices(fields[suffix])
    tops = [_top(store, d, s) for d, s in zip(data, scales)]
    columns = -(-shape[-1] // 16)

    def packed() -> Iterator[torch.Tensor]:
        for matrix in data:
            for _, band in read_bands(store, matrix, _BAND):
                yield _stacked(numbers.e4m3_to_packed(band, name), shape)

    def block_scales() -> Iterator[torch.Tensor]:
        for matrix, top in zip(scales, tops):
            for _, band in read_bands(store, matrix, _BAND):
                exponents = (band.int() - top + _TOP).clamp(_TOP - _SPAN, _TOP)
                yield _stacked(torch.exp2(exponents.float()).to(torch.float8_e4m3fn).view(torch.uint8), shape, columns)

    def amaxes() -> list[torch.Tensor]:
        found = torch.stack([_amax(top) for top in tops])
        return [found if len(shape) == 3 else found[0]]

    makers: dict[str, tuple[str, Shape, Callable]] = {
        "": ("U8", (*shape[:-1], -(-shape[-1] // 2)), packed),
        suffix: ("F8_E4M3", (*shape[:-1], columns), block_scales),
        SUFFIXES["rowwise_amax"]: ("F32", shape[:-2], amaxes),
    }
    return [
        OutputTensor(
            name + s, dtype, size, fields[""].pieces + fields[suffix].pieces, make, "mxfp4 as nvfp4", owner=name
        )
        for s, (dtype, size, make) in makers.items()
    ]


def _stacked(band: torch.Tensor, shape: Shape, columns: int | None = None) -> torch.Tensor:
    """Return a band as the part of the field that it is; with `columns`, every entry twice."""
    if columns is not None:
        band = band.repeat_interleave(2, -1)[:, :columns].contiguous()
    return band[None] if len(shape) == 3 else band


def _top(store: Store, data: OutputTensor, scales: OutputTensor) -> int:
    """Return the largest scale byte of a matrix; SpanError where the others are too far below it."""
    found = torch.cat([band.flatten().unique() for _, band in read_bands(store, scales, _BAND)]).unique()
    if len(found) == 0 or int(found[-1]) - int(found[0]) > _SPAN:
        used = [torch.empty(0, dtype=torch.uint8, device="cpu")]
        for begin, band in read_bands(store, data, _BAND):
            values = torch.nn.functional.pad(band.float(), (0, -band.shape[-1] % 32)).unflatten(-1, (-1, 32))
            used.append(read_rows(store, scales, begin, begin + len(band))[(values != 0).any(-1)].unique())
        found = torch.cat(used).unique()
    if len(found) == 0:
        return 127
    low, top = int(found[0]), int(found[-1])
    if top - low > _SPAN:
        raise SpanError(f"its scales span 2^{top - low}, scales of NVFP4 span 2^{_SPAN}")
    if global_decode(_amax(top)) != e8m0_to_float(torch.tensor(top, dtype=torch.uint8, device="cpu")) * 2.0**-_TOP:
        raise SpanError(f"its largest scale is 2^{top - 127}, beyond the factors of NVFP4")
    return top


def _amax(top: int) -> torch.Tensor:
    """Return the amax for which our decoding multiplies with 2^(top - 127 - 8)."""
    return torch.tensor(numbers.NVFP4_RANGE * 2.0 ** (top - 127 - _TOP), dtype=torch.float64, device="cpu").float()
