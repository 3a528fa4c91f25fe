"""Counting sort of slots by expert: three launches, no atomic operation, stable.

N = T*K slots, E experts, chunks of BLOCK_N slots. Counted per chunk, the slots of an expert before a chunk are a
running sum; within a chunk they are a cumulative sum of a one-hot matrix. Every program then knows the rows of its own
slots.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .reference import row_count


@triton.jit
def one_hot_chunk(expert_ptr, chunk, num_slots, BLOCK_N: tl.constexpr, BLOCK_E: tl.constexpr):
    """Slots of a chunk, which of them exist, and their experts as a matrix of 0 and 1: [BLOCK_N, BLOCK_E] int32."""
    slots = chunk * BLOCK_N + tl.arange(0, BLOCK_N)
    expert = tl.load(expert_ptr + slots, mask=slots < num_slots, other=-1)
    return slots, slots < num_slots, (expert[:, None] == tl.arange(0, BLOCK_E)[None, :]).to(tl.int32)


@triton.jit(do_not_specialize=["num_slots"])
def sort_count_kernel(expert_ptr, counts_ptr, num_slots, E: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_E: tl.constexpr):
    chunk = tl.program_id(0)
    _, _, hot = one_hot_chunk(expert_ptr, chunk, num_slots, BLOCK_N, BLOCK_E)
    experts = tl.arange(0, BLOCK_E)
    tl.store(counts_ptr + chunk * E + experts, tl.sum(hot, axis=0), mask=experts < E)


@triton.jit(do_not_specialize=["chunks"])
def sort_scan_kernel(counts_ptr, tokens_ptr, chunks, E: tl.constexpr, B: tl.constexpr):
    """Replace one expert's counts per chunk by the sums before each chunk; store the total."""
    expert = tl.program_id(0)
    before = tl.zeros([], tl.int32)
    for begin in range(0, chunks, B):
        chunk = begin + tl.arange(0, B)
        count = tl.load(counts_ptr + chunk * E + expert, mask=chunk < chunks, other=0)
        tl.store(counts_ptr + chunk * E + expert, before + tl.cumsum(count, 0) - count, mask=chunk < chunks)
        before += tl.sum(count, axis=0)
    tl.store(tokens_ptr + expert, before.to(tl.int64))


@triton.jit(do_not_specialize=["num_slots", "chunks", "padding"])
def sort_place_kernel(
    expert_ptr,
    counts_ptr,
    tokens_ptr,
    filled_ptr,
    row_of_slot_ptr,
    slot_of_row_ptr,
    padding_ptr,
    num_slots,
    chunks,
    padding,
    ALIGN: tl.constexpr,
    E: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    program = tl.program_id(0)
    experts = tl.arange(0, BLOCK_E)
    tokens = tl.load(tokens_ptr + experts, mask=experts < E, other=0).to(tl.int32)
    filled = (tokens + ALIGN - 1) // ALIGN * ALIGN
    if program < chunks:
        slots, exists, hot = one_hot_chunk(expert_ptr, program, num_slots, BLOCK_N, BLOCK_E)
        before = tl.load(counts_ptr + program * E + experts, mask=experts < E, other=0)
        first = before + tl.cumsum(filled, 0) - filled
        rows = tl.sum(hot * (tl.cumsum(hot, 0) - 1 + first[None, :]), axis=1).to(tl.int64)
        tl.store(row_of_slot_ptr + slots, rows, mask=exists)
        tl.store(slot_of_row_ptr + rows, slots.to(tl.int64), mask=exists)
        if program == 0:
            tl.store(filled_ptr + experts, filled.to(tl.int64), mask=experts < E)
    else:
        number = (program - chunks) * BLOCK_N + tl.arange(0, BLOCK_N)
        # Before the n-th padding row stand n padding rows and the tokens of its expert and of all earlier ones: those
        # whose predecessors have no more than n padding rows together.
        missing_before = tl.cumsum(filled - tokens, 0) - (filled - tokens)
        stands_before = (missing_before[None, :] <= number[:, None]).to(tl.int32)
        rows = (number + tl.sum(stands_before * tokens[None, :], axis=1)).to(tl.int64)
        tl.store(padding_ptr + number, rows, mask=number < padding)
        tl.store(slot_of_row_ptr + rows, tl.full([BLOCK_N], -1, tl.int64), mask=number < padding)


def sort_by_expert(indices: Tensor, num_experts: int, align: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the fields of `Permutation` for indices [T, K]; no padding rows is an empty tensor."""
    num_slots = indices.numel()
    num_rows = row_count(num_slots, num_experts, align)
    padding = num_rows - num_slots

    def new(*shape: int) -> Tensor:
        return indices.new_empty(shape, dtype=torch.int64)

    slot_of_row, row_of_slot, padding_rows = new(num_rows), new(*indices.shape), new(padding)
    if num_slots == 0:
        return slot_of_row, row_of_slot, new(num_experts).zero_(), new(num_experts).zero_(), padding_rows
    tokens, filled = new(num_experts), new(num_experts)
    block_e = triton.next_power_of_2(num_experts)
    block_n = max(16, 8192 // block_e)
    chunks = triton.cdiv(num_slots, block_n)
    counts = indices.new_empty(chunks, num_experts, dtype=torch.int32)
    indices = indices.contiguous()
    shape = {"E": num_experts, "BLOCK_N": block_n, "BLOCK_E": block_e}
    sort_count_kernel[(chunks,)](indices, counts, num_slots, **shape, num_warps=8)
    sort_scan_kernel[(num_experts,)](counts, tokens, chunks, E=num_experts, B=1024)
    sort_place_kernel[(chunks + triton.cdiv(padding, block_n),)](
        indices,
        counts,
        tokens,
        filled,
        row_of_slot,
        slot_of_row,
        padding_rows,
        num_slots,
        chunks,
        padding,
        ALIGN=align,
        **shape,
        num_warps=8,
    )
    return slot_of_row, row_of_slot, tokens, filled, padding_rows
