"""Writing: the fields of our storage as the numbers of a format."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from te_models.kernels.quantize import global_decode

from ..io.dtypes import torch_dtype
from ..io.errors import CheckpointError
from . import integers, numbers
from .format import Part


def encoder(
    part: Part, element: str, field: str, dtype: str, name: str, imported: Mapping[str, float] | None
) -> Callable[[Tensor], Tensor] | None:
    """Return what turns a field (of dtype `field`) into a part that is stored in `dtype`; None: they are the same.

    name: the tensor's, for the error about a number that it cannot hold. imported: see `written_number`.
    """
    if part.meaning in ("factor", "divisor"):
        return lambda amax: written_number(part, amax, name, imported)
    if part.meaning == "zero" and dtype == "I32":
        return lambda zeros: integers.zeros_to_words(zeros, part.block[0] if part.block else 1)
    if part.meaning == "elements" and dtype == "I32":
        return integers.to_words
    if part.meaning == "elements":
        packs = element == "e2m1" and field == "F8_E4M3"
        signed = torch_dtype(dtype)
        return (lambda data: numbers.e4m3_to_packed(data, name).view(signed)) if packs else None
    if field == dtype or part.meaning == "zero":
        return None
    if field == "U8" and dtype == "F8_E8M0":
        return lambda scales: scales.view(torch.float8_e8m0fnu)

    def cast(scales: Tensor) -> Tensor:
        scales = numbers.scale_to_float(scales)
        if dtype == "F8_E8M0":
            holds, narrow = numbers.is_power_of_two(scales).all(), numbers.power_of_two_to_e8m0(scales)
            narrow = narrow.view(torch.float8_e8m0fnu)
        else:
            narrow = scales.to(torch_dtype(dtype))
            holds = (narrow.float() == scales).all()
        if not holds:
            raise CheckpointError(f"{name} was stored in {dtype}, which does not hold its scales any more")
        return narrow

    return cast


def number_amax(part: Part, number: Tensor) -> Tensor:
    """Return the amax that stands for the number of a matrix, a factor or a divisor."""
    return numbers.amax_of_divisor(number) if part.meaning == "divisor" else numbers.amax_of_factor(number)


def written_number(part: Part, amax: Tensor, name: str = "", imported: Mapping[str, float] | None = None) -> Tensor:
    """Return the number of a matrix that stands for an amax.

    imported: not None where the amax comes from a file of the same format: then it is the number which that file had,
    computed, or looked up by the tensor's name where that does not give it. None: the one that our decoding uses.
    """
    if part.meaning == "divisor":
        number = numbers.divisor_of_amax(amax)
    else:
        number = numbers.factor_of_amax(amax) if imported is not None else global_decode(amax)
    if imported is not None and name in imported:
        known = torch.full_like(number, imported[name])
        return torch.where(number_amax(part, known) == amax, known, number)
    return number


def number_error(part: Part, amax: Tensor, number: Tensor) -> float:
    """Return the largest relative difference between the factors that our decoding uses and the factors of files."""
    factor = (1 / number if part.meaning == "divisor" else number).double()
    return float(((global_decode(amax).double() - factor).abs() / factor).max())
