"""Delayed scaling: quantizers with a live scale, and the update that follows every step.

Per module three roles (input, weight, grad_output) times G GEMMs. Slot 0 of the amax history, `fp8_amax` [2, G] and
`fp8_grad_amax` [G], collects this step's amaxes; `fp8_history` [length - 1, 3, G] holds the earlier ones, newest
first; `fp8_scale` [3, G] is what the step uses. All three roles are updated at one point, the exit of the outermost
autocast region in which the module ran: the forward roles from the region, the gradient role from the backward passes
since the last update. As a gradient scale is only read in a backward pass, and as it is when that pass runs, this
equals an update after each backward pass whose forward pass has left its region, and it is the same eagerly and
compiled.

A new scale is a new tensor: a pass between forward and backward keeps the scales of its input and weight. What backward
passes use, `fp8_gradient` [3, G] with the amaxes and, once more, the scales of gradients, is one tensor for good, so
that those after the exit of their region read what that exit wrote, and write to what the next update reads.

The backward pass of a graph writes to `fp8_gradient_log` [2, LOG, G] instead, a tensor that no forward pass writes: of
a tensor that both passes of one graph write, some backends make no graph (torch 2.13's `aot_autograd` without further
options), and others save the value of the forward pass and lose what another backward pass recorded since. Each slot of
the log holds an amax and the generation that it is of, a number that every exit counts up; an exit counts the slots
that have changed since the one before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from te_models.kernels import quantize as q
from te_models.kernels.gemm import Operand
from te_models.kernels.quantize.cpu import fields_op

from . import Float8CurrentScalingQuantizer, Quantizer
from .encoding import Fields, Scale, Usage
from .fp8 import OneScale
from .group_offsets import GroupOffsets
from .tensor_types import TENSOR_TYPES
from .value import dtype_of_enum, value_class

ROLES = ("input", "weight", "grad_output")
STATISTICS = ("amax", "scale_min", "scale_max", "underflow", "saturation")


@value_class
@dataclass(frozen=True, kw_only=True)
class DelayedScalingQuantizer(Float8CurrentScalingQuantizer):
    """The value part of delayed scaling: which FP8 dtype. `with_state` adds the live scale and amax.

    Without one it scales by the tensor's own amax: that is how stored weights are requantized.
    """

    NEEDS_STATE: ClassVar[bool] = True

    def same_numbers(self, other: Quantizer) -> bool:
        # the scale is the tensor's own field, whoever chose it
        return isinstance(other, Float8CurrentScalingQuantizer) and other.fp8_dtype == self.fp8_dtype

    def with_state(self, scale: Tensor, amax: Tensor | None) -> Float8Quantizer:
        """Return the live quantizer. scale, amax: float32, [] or one per GEMM [G]; amax is written to, if given."""
        return Float8Quantizer(scale, amax, self.fp8_dtype)


class Float8Quantizer(OneScale):
    """A live per-tensor quantizer: multiplies by `scale` and records the largest magnitude it sees in `amax`.

    scale: float32 [] or [1], or [G] for G groups of rows; amax: float32 of the same shape, or None to record nothing;
    both stay on the device. fp8_dtype: torch.float8_e4m3fn or torch.float8_e5m2, or an enum's name for
    one. One copy serves both usages. Two quantizers are equal only if they are the same object. The quantizer holds
    tensors, so it is never a constant of a compiled graph (TypeError): see `__fx_repr__`. Methods ignore `key`: nothing
    is stochastic. Raises ValueError for a scale that does not fit the groups of rows.
    """

    FORMAT: ClassVar[str] = "float8"
    symmetric: ClassVar[bool] = True
    _usages: ClassVar[tuple[Usage, ...]] = ("rowwise",)
    rowwise = columnwise = True

    def __init__(
        self,
        scale: Tensor,
        amax: Tensor | None,
        fp8_dtype: torch.dtype,
    ) -> None:
        self.scale = scale
        self.amax = amax
        self.fp8_dtype = dtype_of_enum(fp8_dtype)

    @property
    def value(self) -> Float8CurrentScalingQuantizer:
        """The quantizer whose fields this one fills."""
        # the epsilon is said because torch 2.11 makes a float that it finds, as a default is, a variable of the graph
        return Float8CurrentScalingQuantizer(fp8_dtype=self.fp8_dtype, amax_epsilon=0.0)

    def __fx_repr__(self) -> NoReturn:
        raise TypeError("a Float8Quantizer holds live tensors (scale, amax) and cannot be a constant of a graph")

    def record(self, amax: Tensor) -> None:
        """Raise the recorded amax to `amax`. NaN is ignored."""
        if self.amax is not None:
            update_amax_(self.amax, amax)

    def scale_of_matrix(self, x: Tensor, scale: Scale) -> Tensor:
        self.record(q.amax(x))
        return self.scale if self.scale.dim() == x.dim() - 2 else self.scale.reshape(x.shape[:-2])

    def rounded_matrix(self, x: Tensor, dtype: torch.dtype) -> Operand:
        if self.amax is not None:
            self.amax.copy_(q.raised_amax(x, self.amax))
        return self.rounded_by(x, self.scale, self.scale[..., None, None], dtype)

    def stored_by_operation(self, x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor] | None:
        if self.scale.dim():
            return None
        if self.amax is not None:
            self.amax.copy_(q.raised_amax(x, self.amax))
        values, data = fields_op.store_scaled(x, self.scale, dtype)
        return values, data, torch.div(torch.ones_like(self.scale), self.scale)

    def statistics(self, x: Tensor, key: Tensor | None = None, count: Tensor | None = None) -> dict[str, Tensor]:
        """Return what quantizing x with this scale does to it, as `Quantizer.statistics`; records nothing."""
        data = q.quantize_per_tensor(x, self.scale[..., None, None], self.fp8_dtype)
        scale_inv = torch.div(torch.ones_like(self.scale), self.scale)
        values = q.dequantize_per_tensor(data, scale_inv[..., None, None], torch.float32)
        return q.block_statistics(x, values, scale_inv, None, q.FP8_MAX[self.fp8_dtype], count)

    def rows_statistics(self, x: Tensor, rows: GroupOffsets, key: Tensor | None = None) -> dict[str, Tensor]:
        """Return `statistics` of rows sorted by group, [T, C], every group with its own scale; scale is [G]."""
        own = Float8Quantizer(rows.per_row(self.scale), None, self.fp8_dtype)
        return own.statistics(rows.zero_outside(x)[:, None, :], key, rows.count() * x.shape[1])

    def scale_of_groups(self, amax: Tensor) -> Tensor:
        """Record the amaxes of groups, [G], and return the scale of each. ValueError for another number of scales."""
        if self.scale.shape != amax.shape:
            shape, groups = tuple(self.scale.shape), amax.shape[0]
            raise ValueError(f"the quantizer's scale has shape {shape}; allowed: ({groups},), one per group of rows")
        self.record(amax)
        return self.scale

    def member(self, usage: Usage) -> Float8Quantizer:
        """Return the quantizer that makes the copy of a usage: this one."""
        return self

    def emulated_kind(self, usage: Usage) -> str:
        """Return what a GEMM on dequantized values of this usage stands in for."""
        return self.FORMAT

    def output(self) -> q.QuantizedOutput:
        """Return how another operation makes these fields as its last step, with `scale`."""
        return q.QuantizedOutput(fp8_dtype=self.fp8_dtype)

    def fields_of_output(self, copies: Sequence[Tensor]) -> Fields:
        """Return what an operation made, as fields, recording the amax."""
        data, amax = copies
        self.record(amax)
        return {"rowwise_data": data, "rowwise_scale_inv": torch.div(torch.ones_like(self.scale), self.scale)}

    def row_block(self, usage: Usage) -> int:
        """Return how many rows one scale spans, for alignment: any number will do."""
        return 1

    def quantize_grouped(self, x: Tensor, key: Tensor | None = None) -> Any:
        """Return x: [G, R, C] as one `GroupedTensor`, recording amaxes; scale and amax are [G]."""
        return TENSOR_TYPES["grouped"](self.quantize_fields(x.detach()), self.value, x.shape, x.dtype)


def update_amax_(recorded: Tensor, amax: Tensor) -> None:
    """Raise recorded amaxes to `amax` where that is larger, in place. NaN is ignored."""
    recorded.copy_(torch.fmax(recorded, amax.detach().float()))


LOG = 32
"""How many generations of gradients may be recorded, by graphs that end their regions themselves, before an update."""
GENERATIONS = 2**20  # exactly representable, and a multiple of LOG


def log_amax_(log: Tensor, generation: Tensor, amax: Tensor, gemm_index: int | None) -> None:
    """Enter the amaxes of a backward pass under their generation, both [G], or [] of one GEMM. log: [2, LOG, G]."""
    part = log if gemm_index is None else log[:, :, gemm_index : gemm_index + 1]
    slots = torch.arange(LOG, device=log.device, dtype=generation.dtype)[:, None]
    own = slots == torch.remainder(generation, LOG)
    before = torch.where(part[1] == generation, part[0], 0.0)
    entered = torch.where(own, torch.maximum(before, amax), part[0])
    part.copy_(torch.stack((entered, torch.where(own, generation, part[1]))))


def logged_amax(log: Tensor, seen: Tensor) -> Tensor:
    """Return the largest amax [G] of the slots of a log that are not as they were `seen`; 0 if none changed."""
    return torch.where((log != seen).any(0), log[0], 0.0).amax(0)


def next_history(history: Tensor, last: Tensor) -> Tensor:
    """Return the history [L - 1, ...] with `last` [...] entered at the front wherever it is not zero."""
    rolled = torch.cat((last[None], history[:-1])) if history.shape[0] else history
    return torch.where(last != 0, rolled, history)


def next_scale(
    scale: Tensor, amaxes: Tensor, last: Tensor, fp8_max: Tensor, margin: int, algorithm: str | Callable
) -> Tensor:
    """Return the scale after a step. amaxes: [L, ...] newest first, `last` included; all others [...] or broadcast."""
    if callable(algorithm):
        amax = algorithm(amaxes)
    else:
        amax = last if algorithm == "most_recent" else torch.where(amaxes.isnan(), 0.0, amaxes).amax(0)
    updated = torch.div(fp8_max * 2.0**-margin, amax)
    updated = torch.where(updated == float("inf"), torch.finfo(torch.float32).max, updated)
    valid = torch.isfinite(amax) & (amax > 0) & torch.isfinite(updated) & (updated > 0)
    return torch.where((last != 0) & valid, updated, scale)


def reduce_amaxes(amaxes: Sequence[Tensor], group: dist.ProcessGroup | None) -> list[Tensor]:
    """Return the elementwise maxima over the ranks of `group`, in one all-reduce."""
    flat = torch.cat([a.flatten() for a in amaxes])
    dist.all_reduce(flat, op=dist.ReduceOp.MAX, group=group)
    return [part.view_as(a) for part, a in zip(flat.split([a.numel() for a in amaxes]), amaxes, strict=True)]
