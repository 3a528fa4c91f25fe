"""Tokens on the way to their experts, as FP8: on CPU the permutation and then the quantization; else one registered op.

Not differentiable, FP8 having no gradients: the gradient in x is `unpermute(grad, permutation, None)`.
"""

from torch import Tensor

from ..backend import definitions_only
from ..custom_op import FLOATS, flatten, like, operation, takes
from ..quantize.output import QuantizedOutput
from . import reference
from .reference import Permutation

_TAKES = takes(f"x: {FLOATS} [S, H]; slot_of_row: int64 [R]; scale: float32?; scale is None or scale.numel() == 1")


@operation(
    "permute_quantized",
    lambda x, slot_of_row, output: output.results(like(x, (slot_of_row.shape[0], x.shape[1]))),
    takes=_TAKES,
)
def permute_quantized_op(
    x: Tensor,
    slot_of_row: Tensor,
    topk: int,
    scale: Tensor | None,
    output: QuantizedOutput,
) -> list[Tensor]:
    """Return what `QuantizedOutput.define` says of the rows [R, H] that the tokens x [T, H] are copied to."""
    from . import triton_quantized

    return triton_quantized.permute_quantized(x, slot_of_row, topk, scale, output)


def permute_quantized(
    x: Tensor, permutation: Permutation, output: QuantizedOutput, scale: Tensor | None = None
) -> list[Tensor]:
    """Return `permute(x, permutation)` as FP8: what `output.define` returns of the rows [R, H], padding rows zero.

    x: [T, H]; scale: float32 scalar, where the output has one for all. For columnwise blocks the permutation must be
    made with `align` a multiple of the block, else they span two experts. Raises ValueError where it was made without,
    or the scale does not fit.
    """
    output.check_scale(scale)
    if output.block and output.columnwise and permutation.padding_rows is None:
        raise ValueError(
            f"columnwise blocks of {output.block} rows would span two experts; "
            f"allowed: a permutation by sort_by_expert(..., align={output.block})"
        )
    topk = permutation.row_of_slot.shape[1]
    if x.device.type == "cuda" and not definitions_only() and not _TAKES.misfit(x, permutation.slot_of_row, scale):
        return permute_quantized_op(x, permutation.slot_of_row, topk, scale, *flatten(output))
    rows = reference.gather_rows(x, permutation.slot_of_row, topk, permutation.padding_rows is not None)
    return output.define(rows, scale)
