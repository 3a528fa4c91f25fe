"""Calls of everything that has a fast path on a CPU: arguments that fit, and functions with the library or without.

Every function is a public one that takes what its definition takes; `without_libraries` is the definition.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Generator, Tensor

from te_models.kernels import activation, flash_attention, norm, permute, rope
from te_models.kernels import quantize as q
from te_models.kernels.backend import Backend, using_backend
from te_models.kernels.decode_attention import op as decode
from te_models.kernels.gemm import dense, few_rows, gemv
from te_models.kernels.gemm.few_rows import op as few_rows_op
from te_models.kernels.gemm.operand import ScaledOperand
from te_models.kernels.grouped_gemm import grouped_gemm, stored_grouped_gemm
from te_models.kernels.quantize.cpu_fields import library as fields
from te_models.kernels.quantize.cpu_fields import op as fields_op
from te_models.kernels.quantize.cpu_graph import library as graph
from te_models.kernels.quantize.cpu_graph import op as graph_op
from te_models.kernels.quantize.fp8 import reference as fp8
from te_models.kernels.quantize.nvfp4 import cpu as nvfp4
from te_models.layers.attention.core import attend

E4M3 = torch.float8_e4m3fn
FEWEST = 16
"""Elements from which a call goes to a library here, where each would be a second of compilation, or a weight large."""


class Case(NamedTuple):
    """make: arguments that fit; function: what is called with them; exact: whether results have one value; definition:
    of the same arguments, None: the function itself without libraries."""

    name: str
    make: Callable[[Generator, torch.dtype], tuple[Any, ...]]
    function: Callable[..., Any]
    exact: bool = True
    definition: Callable[..., Any] | None = None


@contextlib.contextmanager
def with_libraries() -> Iterator[None]:
    """Call the libraries from a few elements on."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(using_backend("compiled"))
        for module, name, value in (
            (gemv, "LEAST", FEWEST),
            (few_rows_op, "LEAST", FEWEST),
            (decode, "LEAST", FEWEST),
            (flash_attention.op, "FEWEST", dict.fromkeys(graph.DTYPES, 1)),
        ):
            stack.enter_context(mock.patch.object(module, name, value))
        yield


def without_libraries() -> contextlib.AbstractContextManager[None]:
    """Call none of them."""
    return using_backend("definition")


def drawn(generator: Generator, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=generator).to(dtype)


def number(generator: Generator, least: int, most: int) -> int:
    return int(torch.randint(least, most + 1, (), generator=generator))


def _linear(g: Generator, dtype: torch.dtype) -> tuple[Any, ...]:
    inner, outer = number(g, 1, 70), number(g, 1, 40)
    bias = drawn(g, outer, dtype=dtype) if number(g, 0, 1) else None
    return drawn(g, number(g, 1, 9), inner, dtype=dtype), drawn(g, outer, inner, dtype=dtype), bias


def _operand(g: Generator, *shape: int) -> tuple[Tensor, Tensor, str, Any, Tensor | None]:
    values = drawn(g, *shape)
    kind = ("per_tensor", "float32", "e8m0", "nvfp4")[number(g, 0, 3)]
    if kind == "per_tensor":
        scale = torch.full(shape[:-2], 100.0)
        return q.quantize_per_tensor(values, scale[..., None, None], E4M3), 1 / scale, kind, None, None
    if kind == "nvfp4":
        packed, scales, amax = q.quantize_nvfp4(values)
        return packed, scales, kind, (1, 16), amax
    block = (1, 32) if kind == "e8m0" else (1, 128)
    return *q.quantize_blockwise(values, block, E4M3, kind), kind, block, None


def _stored(g: Generator, dtype: torch.dtype) -> tuple[Any, ...]:
    inner, outer = 16 * number(g, 1, 5), number(g, 1, 40)
    bias = drawn(g, outer, dtype=dtype) if number(g, 0, 1) else None
    return drawn(g, number(g, 1, 17), inner, dtype=dtype), *_operand(g, outer, inner), bias


def _stored_linear(x: Tensor, data: Tensor, scale: Tensor, kind: Any, block: Any, amax: Any, bias: Any) -> Tensor:
    return few_rows.stored_weight_linear(x, ScaledOperand(data, scale, kind, block, amax), bias)


def _stored_groups(g: Generator, dtype: torch.dtype) -> tuple[Any, ...]:
    inner, groups = 16 * number(g, 1, 4), number(g, 1, 3)
    splits = torch.tensor([number(g, 0, 18) for _ in range(groups)])
    return drawn(g, int(splits.sum()) + 1, inner, dtype=dtype), *_operand(g, groups, number(g, 1, 20), inner), splits


def _stored_grouped(x: Tensor, data: Tensor, scale: Tensor, kind: Any, block: Any, amax: Any, splits: Tensor) -> Tensor:
    return stored_grouped_gemm(x, ScaledOperand(data, scale, kind, block, amax), splits)


def _groups(g: Generator, dtype: torch.dtype) -> tuple[Any, ...]:
    inner, groups = number(g, 1, 40), number(g, 1, 3)
    splits = torch.tensor([number(g, 0, 10) for _ in range(groups)])
    return drawn(g, int(splits.sum()) + 1, inner, dtype=dtype), drawn(g, groups, 9, inner, dtype=dtype), splits


def _norm(g: Generator, dtype: torch.dtype) -> tuple[Any, ...]:
    shape = [number(g, 1, 4) for _ in range(number(g, 0, 4))]
    channels = number(g, 1, 70)
    return drawn(g, *shape, channels, dtype=dtype), drawn(g, channels, dtype=dtype) if number(g, 0, 2) else None


def _rope(g: Generator, dtype: torch.dtype) -> tuple[Any, ...]:
    batch, length, half = number(g, 1, 3), number(g, 1, 5), number(g, 0, 9)
    tables = [drawn(g, batch if number(g, 0, 1) else 1, length, half) for _ in range(1)] * 2
    x = drawn(g, batch, length, number(g, 1, 3), 2 * half + number(g, 0, 3), dtype=dtype)
    return x, tables[0], tables[0].cos(), ("half", "interleaved")[number(g, 0, 1)]


def _activation(g: Generator, dtype: torch.dtype) -> tuple[Any, ...]:
    shape = [number(g, 1, 4) for _ in range(number(g, 0, 3))]
    return drawn(g, *shape, 2 * number(g, 1, 20), dtype=dtype), drawn(g, *shape) if number(g, 0, 1) else None


def _slots(g: Generator, dtype: torch.dtype) -> tuple[Any, ...]:
    count, slots, tokens = number(g, 1, 9), number(g, 1, 3), number(g, 1, 6)
    indices = torch.randint(0, count, (tokens, slots), generator=g)
    return drawn(g, count, number(g, 1, 20), dtype=dtype), indices, drawn(g, tokens, slots) if number(g, 0, 1) else None


def _sum_slots(y: Tensor, row_of_slot: Tensor, weights: Tensor | None) -> Tensor:
    empty = row_of_slot.new_empty(0)
    return permute.unpermute(y, permute.Permutation(empty, row_of_slot, empty, empty, None), weights)


def _matrices(g: Generator, dtype: torch.dtype) -> tuple[Any, ...]:
    members = [number(g, 1, 3) for _ in range(number(g, 0, 2))]
    return (drawn(g, *members, number(g, 1, 40), number(g, 1, 40), dtype=dtype),)


def _matrix(g: Generator, dtype: torch.dtype) -> tuple[Any, ...]:
    return (drawn(g, number(g, 1, 40), 16 * number(g, 1, 5), dtype=dtype),)


def _scaled(g: Generator, dtype: torch.dtype) -> tuple[Any, ...]:
    (x,) = _matrices(g, dtype)
    shapes: tuple[tuple[int, ...], ...] = ((), (1, 1), (x.shape[-2], 1), (1,) * x.dim(), (*x.shape[:-1], 1))
    return x, drawn(g, *shapes[number(g, 0, 4)]).abs() + 0.5


def _nvfp4(g: Generator, dtype: torch.dtype) -> tuple[Any, ...]:
    (x,) = _matrices(g, dtype)
    amax = x.abs().float().amax((-2, -1))
    return x, amax, torch.tensor([3, 4]) if number(g, 0, 1) else None


def _amaxes(g: Generator, dtype: torch.dtype) -> tuple[Any, ...]:
    (x,) = _matrices(g, dtype)
    return x, drawn(g, *x.shape[:-2])


def _blocks(g: Generator, dtype: torch.dtype) -> tuple[Any, ...]:
    data, scales = q.quantize_blockwise(drawn(g, number(g, 1, 40), number(g, 1, 80)), (1, 32), E4M3, "e8m0")
    return data.contiguous(), scales.contiguous()


def _packed(g: Generator, dtype: torch.dtype) -> tuple[Any, ...]:
    return q.quantize_nvfp4(drawn(g, number(g, 1, 20), 16 * number(g, 1, 5)))[:2]


def _decode_blocks(data: Tensor, scales: Tensor) -> Tensor:
    decode_them = (
        fields.decode_fp8_blocks if fields.chosen(data, BF16) is Backend.COMPILED else fp8.dequantize_blockwise
    )
    return decode_them(data, scales, (1, 32), BF16)


def _decode_nvfp4(packed: Tensor, scales: Tensor) -> Tensor:
    if fields.chosen(packed, F32) is Backend.COMPILED:
        return fields.decode_nvfp4(packed, scales, F32)
    return nvfp4.decode_blocks(packed, scales, 2 * packed.shape[-1])


def _attention(g: Generator, dtype: torch.dtype, queries: int | None = None) -> tuple[Any, ...]:
    batch, groups, channels = number(g, 1, 2), number(g, 1, 3), 16 * number(g, 1, 3)
    length, many = number(g, 1, 20), number(g, 1, 12) if queries is None else queries
    query = drawn(g, batch, groups * number(g, 1, 3), many, channels, dtype=dtype)
    key = drawn(g, batch, groups, max(length, many), channels, dtype=dtype)
    visible = torch.rand((batch, 1, 1, key.shape[2]), generator=g) < 0.7 if queries == 1 and number(g, 0, 1) else None
    return query, key, drawn(g, *key.shape[:3], 16 * number(g, 1, 3), dtype=dtype), visible


def _attend(query: Tensor, key: Tensor, value: Tensor, visible: Tensor | None) -> Tensor:
    options: dict[str, Any] = {"causal": False, "scale": 0.2, "softcap": None, "dropout": 0.0}
    return attend(query, key, value, visible, None, None, **options)


BF16, F32 = torch.bfloat16, torch.float32
CASES = (
    Case("linear", _linear, dense.linear, exact=False),
    Case("stored_linear", _stored, _stored_linear, exact=False),
    Case("stored_grouped_gemm", _stored_groups, _stored_grouped, exact=False),
    Case("grouped_gemm", _groups, grouped_gemm, exact=False),
    Case("rms_norm", _norm, lambda x, weight: norm.rms_norm(x, weight, 1e-6)),
    Case("rms_norm_first", _norm, lambda x, w: norm.rms_norm(x, w, 1e-6, cast_order="weight_first")),
    Case("rms_norm_centered", _norm, lambda x, w: norm.rms_norm(x, w, 1e-6, zero_centered=True)),
    Case("apply_rope", _rope, rope.apply_rope),
    Case("activation", _activation, lambda x, p: activation.activation(x, "silu", probabilities=p)),
    Case("gated_activation", _activation, lambda x, p: activation.gated_activation(x, "silu", probabilities=p)),
    # torch's gelu has another last bit where a number is not in a whole vector
    Case("gated_gelu", _activation, lambda x, p: activation.gated_activation(x, "gelu", probabilities=p), exact=False),
    Case("sum_slots", _slots, _sum_slots),
    Case("round_blockwise", _matrices, lambda x: q.round_blockwise(x, (1, 16), E4M3, "float32", BF16)),
    Case("round_blockwise_e8m0", _matrices, lambda x: q.round_blockwise(x, (32, 1), torch.float8_e5m2, "e8m0", F32)),
    Case("round_current", _matrices, lambda x: q.round_current(x, E4M3, F32)),
    Case("round_per_tensor", _scaled, lambda x, scale: q.round_per_tensor(x, scale, E4M3, BF16)),
    Case("random_hadamard", _matrices, lambda x: graph_op.random_hadamard(x, -2)),
    Case("raised_amax", _amaxes, graph_op.raised_amax),
    Case("round_nvfp4", _nvfp4, lambda x, amax, key: graph_op.round_nvfp4(x, BF16, amax=amax, key=key)),
    Case("round_current_nvfp4", _matrices, lambda x: graph_op.round_current_nvfp4(x, BF16, block=(16, 1))),
    Case("store_blocks", _matrix, lambda x: fields_op.store_blocks(x, (1, 16), "float32", 0.0)),
    Case("store_current", _matrix, lambda x: fields_op.store_current(x, False, 0.0, BF16)),
    Case(
        "store_scaled",
        lambda g, dtype: (*_matrix(g, dtype), drawn(g).abs() + 0.5),
        lambda x, scale: fields_op.store_scaled(x, scale, BF16),
    ),
    Case("store_nvfp4", _matrix, fields_op.store_nvfp4),
    Case("read_numbers", _blocks, lambda data, scales: fields_op.read_numbers(data, BF16)),
    Case(
        "decode_blocks",
        _blocks,
        _decode_blocks,
        definition=lambda data, scales: fp8.dequantize_blockwise(data, scales, (1, 32), BF16),
    ),
    Case(
        "decode_nvfp4",
        _packed,
        _decode_nvfp4,
        definition=lambda packed, scales: nvfp4.decode_blocks(packed, scales, 2 * packed.shape[-1]),
    ),
    Case("attend_one", lambda g, dtype: _attention(g, dtype, 1), _attend, exact=False),
    Case("flash_attention", _attention, _attend, exact=False),
)
