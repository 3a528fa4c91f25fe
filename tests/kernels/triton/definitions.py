"""What each operation with a kernel for a GPU must return, by plain torch on a CPU, and how near is near enough.

Quantization, permutations and rotations are equal to the last bit. A sum may be taken in another order and a product of
8-bit numbers loses bits in a tensor core: there a result may be off by a part of its own size and of the root mean
square of the whole result (`Definition.within`)."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from te_models.kernels.activation import reference as activation
from te_models.kernels.cross_entropy import IGNORE_INDEX
from te_models.kernels.custom_op import Registered, registered
from te_models.kernels.custom_op.schema import argument_values
from te_models.kernels.launch import as_matrix
from te_models.kernels.norm import reference as norm
from te_models.kernels.permute import reference as permutation
from te_models.kernels.quantize.fp8 import blocks, grouped
from te_models.kernels.quantize.nvfp4 import copies, cpu
from te_models.kernels.quantize.nvfp4.reference import BLOCK
from te_models.kernels.rope import reference as rotation
from te_models.kernels.router import reference as router

Run = Callable[[str, tuple[Any, ...]], list[Tensor]]
"""Runs an operation on the device: its name and its arguments on a CPU -> its results on a CPU."""
UNIT = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
SUMS = 2.0**-17
"""Of float32 sums of up to a few hundred terms in another order, relative to the result and its root mean square."""
IN_TENSOR_CORES = 2.0**-8
"""Of sums of 8-bit products: compute capability 9 keeps about 14 bits of them."""


class Definition(NamedTuple):
    """results: of the values of the parameters, by name; run: only where a result is that of another operation, then
    quantized. within: None for equal bits, else the part of its size that a result may be off by, beside `roundings`
    roundings to its dtype; later: that of the results after the first, where it is another one."""

    results: Callable[..., Any]
    within: float | None = None
    later: float | None = None
    roundings: int = 8
    needs_run: bool = False

    def of(self, at: int) -> Definition:
        """Return the one for the result of this place."""
        return self if at == 0 or self.later is None else self._replace(within=self.later)


def by_reference(entry: Registered) -> Callable[..., Any]:
    """Return the function of whole values that an operation with a reference is called by: on a CPU the reference."""
    function = getattr(sys.modules[entry.op._init_fn.__module__], entry.name)

    def results(**values: Any) -> Any:
        first = next(iter(values))
        return function(values.pop(first), **values)

    return results


def on_cpu(entry: Registered) -> Callable[..., Any]:
    """Return an operation that runs the definition itself on a CPU; what it writes to is its result."""

    def results(**values: Any) -> Any:
        if "strict" in values:
            values["strict"] = False
        flat: list[Any] = []
        for parameter in entry.parameters:
            value = values[parameter.name]
            flat += [value] if parameter.flattener is None else parameter.flattener(value)
        found = entry.op(*flat)
        return [values[name] for name in entry.mutates] if entry.mutates else found

    return results


def norm_fwd(x, weight, bias, eps, centered, zero_centered, weight_last) -> tuple[Tensor, ...]:
    options = {"zero_centered": zero_centered, "cast_order": "weight_last" if weight_last else "weight_first"}
    if centered:
        variance, mean = torch.var_mean(x.float(), -1, correction=0)
        return norm.layer_norm(x, weight, bias, eps, **options), mean, torch.rsqrt(variance + eps)
    rstd = torch.rsqrt(x.float().square().mean(-1) + eps)
    return norm.rms_norm(x, weight, eps, **options), x.new_empty(0, dtype=torch.float32), rstd


def norm_bwd(
    dy, x, weight, mean, rstd, centered, zero_centered, weight_last, weight_grad, bias_grad
) -> tuple[Tensor, ...]:
    dy, exact, rstd = as_matrix(dy).double(), as_matrix(x).double(), rstd.double().view(-1, 1)
    x_hat = (exact - (mean.double().view(-1, 1) if centered else 0.0)) * rstd
    gamma = 1.0 if weight is None else weight.double() + zero_centered
    g = dy * gamma
    dx = g - x_hat * (g * x_hat).mean(-1, keepdim=True) - (g.mean(-1, keepdim=True) if centered else 0.0)
    none = x.new_empty(0)
    multiplied = x_hat.to(x.dtype).double() if weight_last else x_hat
    d_weight = none if weight_grad is None else (dy * multiplied).sum(0).to(weight_grad)
    return (dx * rstd).view(x.shape).to(x.dtype), d_weight, none if bias_grad is None else dy.sum(0).to(bias_grad)


def norm_quantized(run: Run, scale, output, **values) -> list[Tensor]:
    y, *statistics = run("norm_fwd", tuple(values.values()))
    return [*output.define(as_matrix(y), scale), *statistics]


def activation_fwd(x, probabilities, name, gated, clamp, alpha, up_offset) -> Tensor:
    if not gated:
        return activation.activation(x, name, probabilities=probabilities)
    options = {"clamp": clamp, "alpha": alpha, "up_offset": up_offset, "probabilities": probabilities}
    return activation.gated_activation(x, name, **options)


def activation_bwd(dy, x, probabilities, needs_probabilities, **options) -> tuple[Tensor, Tensor]:
    leaf = x.double().requires_grad_()
    factor = None if probabilities is None else probabilities.double()
    y = activation_fwd(leaf, None, **options)
    rounded = activation_fwd(x, None, **options).double()  # what the factor multiplied
    weighted = dy.double() if factor is None else dy.double() * factor[..., None]
    (dx,) = torch.autograd.grad(y, leaf, weighted)
    d_factor = (dy.double() * rounded).sum(-1).float() if needs_probabilities else x.new_empty(0).float()
    return dx.to(x.dtype), d_factor


def activation_quantized(run: Run, x, probabilities, kind, scale, output) -> list[Tensor]:
    (y,) = run("activation_fwd", (x, probabilities, *kind))
    return output.define(as_matrix(y), scale)


def rope(x, cos, sin, interleaved, inverse) -> Tensor:
    return rotation.apply_rope(x, cos, -sin if inverse else sin, "interleaved" if interleaved else "half")


def router_topk(logits, expert_bias, topk, sigmoid, score_after_topk, top2_sum, **options) -> tuple[Tensor, Tensor]:
    names = {"score": "sigmoid" if sigmoid else "softmax", "group_score": "top2_sum" if top2_sum else "max"}
    options |= {"expert_bias": expert_bias, "score_after_topk": score_after_topk}
    return router.router_topk(logits, topk, **names, **options)


def router_topk_bwd(
    grad, logits, indices, sigmoid, score_after_topk, normalize, normalize_eps, scaling_factor
) -> Tensor:
    leaf = logits.double().requires_grad_()
    z = leaf.gather(1, indices) if score_after_topk else leaf
    weights = z.sigmoid() if sigmoid else z.softmax(-1)
    weights = weights if score_after_topk else weights.gather(1, indices)
    if normalize:
        weights = weights / (weights.sum(-1, keepdim=True) + normalize_eps)
    (found,) = torch.autograd.grad(weights * scaling_factor, leaf, grad.double())
    return found.to(logits.dtype)


def sort_by_expert(indices, num_experts, align) -> list[Tensor]:
    *fields, padding = permutation.sort_by_expert(indices, num_experts, align)
    return [*fields, indices.new_empty(0, dtype=torch.int64) if padding is None else padding]


def slots_of(row_of_slot: Tensor, padding_rows: Tensor | None) -> Tensor:
    """Return the slot of each row, -1 of one that only fills up."""
    slots = torch.full((row_of_slot.numel() + (0 if padding_rows is None else padding_rows.shape[0]),), -1)
    slots[row_of_slot.flatten()] = torch.arange(row_of_slot.numel())
    return slots


def permute_rows(x, row_of_slot, padding_rows) -> Tensor:
    slots = slots_of(row_of_slot, padding_rows)
    return permutation.gather_rows(x, slots, row_of_slot.shape[1], padding_rows is not None)


def unpermute_bwd(grad, y, weights, row_of_slot, padding_rows, needs_weights) -> tuple[Tensor, Tensor]:
    slots = slots_of(row_of_slot, padding_rows)
    dy = permutation.spread_slots(grad, slots, weights, padding_rows is not None, y.dtype)
    return dy, permutation.slot_products(grad, y, row_of_slot) if needs_weights else y.new_empty(0).float()


def permute_quantized(x, slot_of_row, topk, scale, output) -> list[Tensor]:
    return output.define(permutation.gather_rows(x, slot_of_row, topk, True), scale)


def cross_entropy_fwd(logits, labels) -> tuple[Tensor, Tensor]:
    z, valid = logits.double(), labels != IGNORE_INDEX
    normalizer = z.logsumexp(-1)
    chosen = z.gather(1, torch.where(valid, labels, 0)[:, None])[:, 0]
    return torch.where(valid, normalizer - chosen, 0.0).float(), normalizer.float()


def cross_entropy_bwd(logits, labels, normalizer, scale) -> Tensor:
    valid = labels != IGNORE_INDEX
    gradient = (logits.double() - normalizer.double()[:, None]).exp()
    gradient = gradient.scatter_add(1, torch.where(valid, labels, 0)[:, None], -torch.ones(len(labels), 1).double())
    return (gradient * (valid * scale.double())[:, None]).to(logits.dtype)


def nvfp4_amaxes(x, m_splits) -> tuple[Tensor, Tensor]:
    if m_splits is None:
        return blocks.amax(x), blocks.amax(copies.transformed(x, True))
    sizes = (m_splits + BLOCK - 1) // BLOCK * BLOCK
    transformed = copies.transformed(grouped.pad_rows(x, m_splits, BLOCK), True)
    return grouped.grouped_amax(x, m_splits), grouped.grouped_amax(transformed, sizes)


def quantize_nvfp4(x, row_amax, col_amax, m_splits, key, row_stream, col_stream, block_rows, with_rht) -> list[Tensor]:
    found: list[Tensor] = []
    if row_amax is not None:
        amax = row_amax if m_splits is None else of_group(row_amax, m_splits, x.shape[0])[:, None]
        found += cpu.quantize_nvfp4(x, block_rows=block_rows, amax=amax, key=key, stream=row_stream)[:2]
    if col_amax is not None:
        amax = col_amax
        if m_splits is not None:
            x = grouped.pad_rows(x, m_splits, BLOCK)
            amax = of_group(col_amax, (m_splits + BLOCK - 1) // BLOCK, x.shape[0] // BLOCK)[None]
        options = {"with_rht": with_rht, "amax": amax, "key": key, "stream": col_stream}
        found += copies.quantize_nvfp4_transposed(x, **options)[:2]
    return found


def of_group(values: Tensor, splits: Tensor, length: int) -> Tensor:
    """Return the value of the group of each of `length` rows, zero past the last group."""
    whole = values.repeat_interleave(splits)
    return torch.cat((whole, whole.new_zeros(length - whole.shape[0])))


def definitions() -> dict[str, Definition]:
    """Return the definition of every operation that has a kernel for a GPU, by name; its module must be imported."""
    entries = registered()
    exact = "amax grouped_amax quantize_per_tensor quantize_grouped_per_tensor random_hadamard"
    exact += " dequantize_per_tensor quantize_blockwise quantize_blockwise_both quantize_grouped_blockwise"
    exact += " dequantize_blockwise dequantize_nvfp4 dequantize_grouped"
    found = {name: Definition(by_reference(entries[name])) for name in exact.split()}
    found |= {name: Definition(on_cpu(entries[name])) for name in ("scaled", "packed_attention_intervals")}
    sums = "gemm_float32 gemm_wgrad_accumulate_ grouped_gemm grouped_gemm_wgrad grouped_gemm_wgrad_accumulate_"
    sums += " embedding_backward embedding_accumulate_ linear_cross_entropy label_statistics"
    sums += " label_log_prob_gradients linear_kl linear_kl_bwd"
    for name in sums.split():
        found[name] = Definition(on_cpu(entries[name]), SUMS)
    for name in ("scaled_gemm", "scaled_grouped_gemm", "scaled_grouped_gemm_wgrad_accumulate_"):
        found[name] = Definition(on_cpu(entries[name]), IN_TENSOR_CORES)
    for function in (rope, sort_by_expert, permute_rows, permute_quantized, nvfp4_amaxes, quantize_nvfp4):
        found[function.__name__] = Definition(function)
    # the gradients of a norm's weight and of an activation's factor multiply what the forward pass rounded to the
    # input's dtype, whose last bit may be another
    for function in (norm_bwd, activation_bwd):
        found[function.__name__] = Definition(function, SUMS, UNIT[torch.bfloat16])
    found["sum_slots"] = Definition(permutation.sum_slots)
    for function in (
        *(norm_fwd, activation_fwd, router_topk, router_topk_bwd),
        *(unpermute_bwd, cross_entropy_fwd, cross_entropy_bwd),
    ):
        found[function.__name__] = Definition(function, SUMS)
    for function in (norm_quantized, activation_quantized):
        found[function.__name__] = Definition(function, needs_run=True)
    return found


CPU_ONLY = {
    *("stored_integer_linear", "stored_integer_grouped_gemm"),
    *("gemv", "stored_linear", "stored_grouped_gemm", "decode_attention", "flash_attention_fwd", "flash_attention_bwd"),
    *("packed_attention_fwd", "packed_attention_bwd", "round_blockwise", "round_current", "round_per_tensor"),
    *("random_hadamard_rows", "matrix_amax", "raised_amax", "round_nvfp4", "round_current_nvfp4", "store_blocks"),
    *("delta_states", "delta_states_bwd", "decayed_states"),  # in plain torch on every device
    *("read_blocks", "read_numbers", "store_nvfp4", "read_nvfp4", "store_current", "store_scaled"),
}
"""Operations without a kernel for a GPU."""


def expected(name: str, arguments: tuple[Any, ...], definition: Definition, run: Run) -> list[Tensor]:
    """Return what an operation must return, or leave in what it writes to. arguments: on a CPU, which may change."""
    values = argument_values(registered()[name].parameters, arguments)
    if definition.needs_run:
        values["run"] = run
    return [t for t in tree_leaves(definition.results(**values)) if isinstance(t, Tensor)]


def difference(found: Tensor, want: Tensor, definition: Definition) -> str | None:
    """Return what is wrong with a result, None where nothing is."""
    if (found.shape, found.dtype) != (want.shape, want.dtype):
        return f"it is {found.dtype} {list(found.shape)} and should be {want.dtype} {list(want.shape)}"
    if not want.numel():
        return None
    if definition.within is None or want.dtype not in UNIT:
        return unequal(found, want)
    got, right = found.double(), want.double()
    finite = right.isfinite()
    wrong_places = ~(got.isfinite() == finite) | (~finite & (got.isnan() != right.isnan()))
    if wrong_places.any():
        return f"{int(wrong_places.sum())} of {want.numel()} values are not finite where they should be, or are"
    got, right = got[finite], right[finite]
    size = right.abs() + right.square().mean().sqrt() if right.numel() else right
    allowed = (definition.within + definition.roundings * UNIT[want.dtype]) * size + 1e-30
    off = (got - right).abs() / allowed
    if not right.numel() or bool((off <= 1).all()):
        return None
    at = int(off.argmax())
    return (
        f"{int((off > 1).sum())} of {want.numel()} values are too far off, one by {float(off[at]):.3g} times what is "
        f"allowed: {float(got[at]):.6g} instead of {float(right[at]):.6g}"
    )


def unequal(found: Tensor, want: Tensor) -> str | None:
    """Return how many bits' patterns differ, None where none does; a NaN may have any payload."""
    differ = found.reshape(-1) != want.reshape(-1)
    if want.dtype.is_floating_point:
        got, right = found.float().reshape(-1), want.float().reshape(-1)
        differ = ((got != right) | (got.signbit() != right.signbit())) & ~(got.isnan() & right.isnan())
    if not differ.any():
        return None
    at = int(differ.int().argmax())
    values = [float(t.float().reshape(-1)[at]) for t in (found, want)]
    count = f"{int(differ.sum())} of {want.numel()} values differ"
    return f"{count}, the first at {at}: {values[0]:.9g} instead of {values[1]:.9g}"
