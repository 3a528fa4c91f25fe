"""Arguments to call every registered operation with: each usage, option and dtype that changes what it returns.

What recipes ask for is derived from them (quantizer_samples); test_registered_ops says what else must occur. Made of
the inputs of each operation's own tests. Sizes are distinct, ragged and above 1, so that a result with two sizes
swapped, or a size taken for a constant, shows."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from te_models.kernels.backend import has_library
from te_models.kernels.custom_op import flatten, registered
from te_models.kernels.flash_attention import ATTENTION, BACKWARD
from te_models.kernels.gemm import ScaledOperand
from te_models.kernels.permute import reference as permutation_of
from te_models.kernels.quantize import quantize_nvfp4
from te_models.layers.quantizer import Int4Quantizer
from tests.kernels.gemm import scaled_cases
from tests.kernels.triton import op_inputs
from tests.kernels.triton.quantize.quantize_cases import E4M3, E5M2, ordinary
from tests.kernels.triton.quantize.quantizer_samples import by_recipe, outputs

Arguments = tuple[Any, ...]
Family = Callable[[torch.device], Iterator[tuple[str, Arguments]]]
F32, BF16 = torch.float32, torch.bfloat16
EPS = 1e-5


def together(*choices: Sequence[Any]) -> Iterator[tuple[Any, ...]]:
    """Yield choices side by side until each has come, shorter ones again from the start: sums and not products."""
    for i in range(max(map(len, choices))):
        yield tuple(ones[i % len(ones)] for ones in choices)


def norms(device: torch.device) -> Iterator[tuple[str, Arguments]]:
    for option, dtype in together(op_inputs.NORM_OPTIONS, [F32, BF16, BF16]):
        x, weight, bias = op_inputs.norm_inputs(6, 20, dtype, F32, option[3], option[4], device)
        flags = option[:3]
        # a batch of rows that does not lie contiguously
        x = x.view(2, 3, 20).transpose(0, 1)
        yield "norm_fwd", (x, weight, bias, EPS, *flags)
        mean = torch.rand(3, 2, device=device) if option[0] else torch.empty(0, device=device)
        for weight_grad, bias_grad in ((None, None), (F32, BF16), (BF16, F32)):
            statistics = (mean, torch.rand(3, 2, device=device))
            yield "norm_bwd", (x, x, weight, *statistics, *flags, weight_grad, bias_grad)


def quantized_outputs(device: torch.device) -> Iterator[tuple[str, Arguments]]:
    """Every output that a quantizer of a recipe asks for, and every option of what it is the output of."""
    x = ordinary((2, 33, 40), BF16).to(device)
    weight, bias = torch.ones(2, 40, device=device)
    slots = torch.tensor([3, -1, 0, 5, 1, 4, 2, -1], device=device)
    wanted = [*outputs(), *op_inputs.OUTPUTS[:3]]  # these have one scale
    for output, option in together(wanted, op_inputs.NORM_OPTIONS):
        tail = (op_inputs.scale_for(output, device), *flatten(output))
        centered, zero_centered, weight_last, has_weight, has_bias = option
        parameters = weight if has_weight else None, bias if has_bias else None
        yield "norm_quantized", (x, *parameters, EPS, centered, zero_centered, weight_last, *tail)
        yield "permute_quantized", (x[0], slots, 2, *tail)
    options = list(itertools.product(op_inputs.ACTIVATION_OPTIONS, (None, torch.rand(2, 33, device=device))))
    for output, (option, p) in together(wanted, options):
        tail = (op_inputs.scale_for(output, device), *flatten(output))
        yield "activation_quantized", (x, p, *option, *tail)


def activations(device: torch.device) -> Iterator[tuple[str, Arguments]]:
    weighted_ones = itertools.product((False, True), (F32, BF16))
    for option, (weighted, dtype) in together(op_inputs.ACTIVATION_OPTIONS, list(weighted_ones)):
        x, dy, p = op_inputs.activation_inputs(6, 10, option[1], weighted, dtype, device)
        x, dy, p = x.view(2, 3, -1), dy.view(2, 3, -1), None if p is None else p.view(2, 3)
        yield "activation_fwd", (x, p, *option)
        for wanted in {False, weighted}:
            yield "activation_bwd", (dy, x, p, *option, wanted)


def ropes(device: torch.device) -> Iterator[tuple[str, Arguments]]:
    x, _, cos, sin = op_inputs.rope_inputs((2, 3, 2, 10, 8, 1), F32, device)
    for interleaved, inverse, dtype in itertools.product((False, True), (False, True), (F32, BF16)):
        yield "rope", (x.to(dtype), cos, sin, interleaved, inverse)
    yield "rope", (x.transpose(1, 2), cos[:, :2], sin[:, :2], False, True)


def routers(device: torch.device) -> Iterator[tuple[str, Arguments]]:
    counts = op_inputs.ROUTER_COUNTS[2:5:2]
    for scores, of, dtype in together(op_inputs.ROUTER_SCORES, counts, [F32, BF16, BF16, F32]):
        logits, bias = op_inputs.router_inputs(5, of, scores, dtype, device)
        flags = (*scores[:2], *scores[3:])
        yield "router_topk", (logits, bias, of[1], *flags, *of[2:4], of[4] == "top2_sum")
        indices = torch.arange(of[1], device=device).repeat(5, 1)
        yield "router_topk_bwd", (torch.rand(5, of[1], device=device), logits, indices, *flags)


def permutations(device: torch.device) -> Iterator[tuple[str, Arguments]]:
    for align, dtype in itertools.product((1, 4), (F32, BF16)):
        indices = op_inputs.routed(5, 2, 4, device)
        yield "sort_by_expert", (indices.int() if dtype == BF16 else indices, 4, align)
        p = permutation_of.sort_by_expert(indices, 4, align)
        x, weights = torch.randn(5, 6, device=device).to(dtype), torch.rand(5, 2, device=device)
        yield "permute_rows", (x, p.row_of_slot, p.padding_rows)
        rows = torch.randn(p.slot_of_row.shape[0], 6, device=device).to(dtype)
        for optional in (None, weights):
            for out in (None, F32, BF16):
                yield "sum_slots", (rows, p.row_of_slot, optional, out)
        for wanted in (False, True):
            yield "unpermute_bwd", (x, rows, weights, p.row_of_slot, p.padding_rows, wanted)


def losses(device: torch.device) -> Iterator[tuple[str, Arguments]]:
    for dtype in (F32, BF16):
        logits, labels = op_inputs.cross_entropy_inputs((3, 7), dtype, device)
        yield "cross_entropy_fwd", (logits, labels)
        yield "cross_entropy_bwd", (logits, labels, torch.rand(3, device=device), torch.ones(3, device=device))
        hidden, weight, bias, labels = (t.to(device) for t in op_inputs.linear_cross_entropy_inputs(5, 6, 7, dtype))
        factor = torch.tensor(0.5, device=device)
        yield "scaled", (hidden, factor)
        for own, option, wanted in itertools.product((bias, None), (factor, None), range(8)):
            flags = [bool(wanted & 1), bool(wanted & 2), bool(wanted & 4) and own is not None]
            yield "linear_cross_entropy", (hidden, weight, labels, own, option, option, 2, flags, option is None)
            yield from _of_blocks(hidden, weight, labels, own, option, flags)


def _of_blocks(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    bias: torch.Tensor | None,
    option: torch.Tensor | None,
    flags: list[bool],
) -> Iterator[tuple[str, Arguments]]:
    """Losses whose logits exist by blocks of tokens and words."""
    wide = hidden.float()
    normalizer, grad = wide.sum(-1).abs() + 2, torch.ones_like(wide[:, 0])
    yield "label_statistics", (hidden, weight, bias, labels, option, option, 0, 2)
    yield "label_log_prob_gradients", (hidden, weight, bias, labels, normalizer, grad, option, option, 0, 2, flags)
    factors = torch.tensor([1.0, 0.5, 2.0], device=hidden.device)
    own = hidden, weight, bias, hidden.flip(0), weight.flip(0), bias, factors, option, option, 2
    yield "linear_kl", own
    yield "linear_kl_bwd", (*own, flags, torch.stack([normalizer, normalizer + 1]), grad)


def fp8(device: torch.device) -> Iterator[tuple[str, Arguments]]:
    """What no quantizer asks for: rows padded for one scale per group, other inputs."""
    m_splits = torch.tensor([7, 0, 26], device=device)
    matrices = ordinary((40, 48), BF16).to(device), ordinary((2, 33, 20), F32).to(device)
    for x in matrices:
        yield "grouped_amax", (x.view(-1, x.shape[-1]), m_splits)
    for align, dtype in ((1, E4M3), (16, E5M2)):
        scale = torch.rand(3, device=device)
        yield "quantize_grouped_per_tensor", (matrices[0], m_splits, scale, dtype, align, align > 1)
    yield "dequantize_grouped", (matrices[0].to(E4M3), torch.rand(3, device=device), m_splits, 40, [], F32)


def nvfp4(device: torch.device) -> Iterator[tuple[str, Arguments]]:
    """What no quantizer asks for: the transform alone, packed values without their amax."""
    for x, dim in itertools.product((ordinary((40, 52), BF16), ordinary((2, 33, 20), BF16)), (-1, -2)):
        yield "random_hadamard", (x.to(device), dim)
    x = ordinary((40, 48), BF16).to(device)
    packed, scales, _ = quantize_nvfp4(x.cpu(), amax=torch.ones(()))
    packed, scales = packed.to(device), scales.to(device)
    yield "dequantize_nvfp4", (packed, scales, None, 48, BF16)


def cpu_graph(device: torch.device) -> Iterator[tuple[str, Arguments]]:
    """What quantizes in the graph of a CPU, wherever the other operations run."""
    kinds = ("float32", "pow2", "e8m0")
    for x, kind, fp8_dtype, dtype in together(
        [ordinary((40, 48), BF16), ordinary((2, 33, 20), F32)], kinds, (E4M3, E5M2), (BF16, F32)
    ):
        yield "round_blockwise", (x, [1, 32], fp8_dtype, kind, dtype, 0.0)
    key = torch.tensor([3, 5])
    for x, random, fp8_dtype, dtype in together(
        [ordinary((40, 48), BF16), ordinary((2, 33, 20), F32)], (key, None), (E4M3, E5M2), (BF16, F32)
    ):
        amax = x.abs().amax((-2, -1)).float()
        yield "matrix_amax", (x,)
        yield "round_nvfp4", (x, dtype, [1, 16], amax, random, 1)
        yield "round_current_nvfp4", (x, dtype, [1, 16], random, 1)
        yield "round_current", (x, fp8_dtype, dtype, fp8_dtype == E4M3, 0.1)
        yield "round_per_tensor", (x, torch.tensor(0.7), fp8_dtype, dtype)
        yield "raised_amax", (x, amax / 2)
        yield "random_hadamard_rows", (x.to(BF16),)
    for x, kind, block in together([ordinary((40, 48), BF16), ordinary((33, 20), F32)], kinds, ([1, 32], [32, 1])):
        quantized = registered()["store_blocks"].op(x, block, kind, 0.0)
        yield "store_blocks", (x, block, kind, 0.0)
        yield "read_blocks", (*quantized, block, F32 if kind == "float32" else BF16)
        for dtype in (BF16, F32):
            yield "store_current", (x, kind == "pow2", 0.0, dtype)
            yield "store_scaled", (x, torch.tensor(0.7), dtype)
            yield "read_numbers", (quantized[0], dtype)
    for x, dtype in together([ordinary((40, 48), BF16), ordinary((33, 32), F32)], (BF16, F32)):
        packed, scales, _ = registered()["store_nvfp4"].op(x)
        yield "store_nvfp4", (x,)
        yield "read_nvfp4", (packed, scales, dtype)


def gemms(device: torch.device) -> Iterator[tuple[str, Arguments]]:
    normal = scaled_cases.normal
    for formats, dtype in together(list(scaled_cases.SIDES.values()), [F32, BF16]):
        left = scaled_cases.quantized(normal(6, 64, seed=1, device=device), *formats[0])
        right = scaled_cases.quantized(normal(5, 64, seed=2, device=device), *formats[1])
        bias, first = normal(5, seed=6, device=device), left.kind == "per_tensor"
        yield "scaled_gemm", (*flatten(left), *flatten(right), dtype, bias, first, first)
    of_weights = [*(weight for _, weight in scaled_cases.SIDES.values()), ("nvfp4", None)]
    for of_weight, dtype, with_bias in together(of_weights, [F32, BF16], [True, False]):
        weight = scaled_cases.quantized(normal(5, 64, seed=2), *of_weight)
        bias = normal(5, seed=6, dtype=dtype) if with_bias else None
        x = normal(3, 64, seed=1, dtype=dtype)
        yield "stored_linear", (x, *flatten(weight), bias)
        grouped = scaled_cases.quantized(normal(2, 5, 64, seed=2), *of_weight)
        yield "stored_grouped_gemm", (x, *flatten(grouped), torch.tensor([2, 0]))
    for zeros, dtype in itertools.product((False, True), (F32, BF16)):
        x, form = normal(3, 64, seed=1, dtype=dtype), Int4Quantizer(zero_points=zeros)
        one, several = (form.quantize(normal(*shape, 64, seed=2)) for shape in ((5,), (2, 5)))
        fields = [flatten(form.integer_operand(w.fields, w.shape)) for w in (one, several)]
        yield "stored_integer_linear", (x, *fields[0], normal(5, seed=6, dtype=dtype) if zeros else None)
        yield "stored_integer_grouped_gemm", (x, *fields[1], torch.tensor([2, 0]))
    for dtype, with_bias in itertools.product((F32, BF16), (True, False)):
        x, w = (normal(n, 24, seed=n, dtype=dtype) for n in (3, 5))
        yield "gemv", (x, w, normal(5, seed=6, dtype=dtype) if with_bias else None)
    for dtype, with_bias in itertools.product((F32, BF16), (True, False)):
        x, w = (normal(6, n, seed=n, dtype=BF16, device=device) for n in (8, 5))
        bias = normal(5, seed=6, dtype=BF16, device=device) if with_bias else None
        yield "gemm_float32", (x.t(), w, bias, dtype)
    for grad, accumulate, scale in itertools.product((F32, BF16), (True, False), (None, torch.tensor(2.0))):
        dy, x = normal(6, 4, seed=1, device=device), normal(6, 5, seed=2, device=device)
        scale = None if scale is None else scale.to(device)
        yield "gemm_wgrad_accumulate_", (torch.zeros(4, 5, dtype=grad, device=device), dy, x, accumulate, scale)
        groups = None if scale is None else scale.repeat(3)
        splits, grads = torch.tensor([2, 0, 4], device=device), torch.zeros(3, 4, 5, dtype=grad, device=device)
        yield "grouped_gemm_wgrad_accumulate_", (grads, dy, x, splits, accumulate, groups)


def grouped_gemms(device: torch.device) -> Iterator[tuple[str, Arguments]]:
    normal = scaled_cases.normal
    splits = torch.tensor([4, 1], device=device)
    for dtype in (F32, BF16):
        a, dy = normal(6, 8, seed=6, dtype=dtype, device=device), normal(6, 4, seed=8, dtype=dtype, device=device)
        b = normal(2, 4, 8, seed=7, dtype=dtype, device=device)
        yield "grouped_gemm", (a, b, splits)
        yield "grouped_gemm", (dy, b, splits, False)
        yield "grouped_gemm_wgrad", (dy, a, splits)
    for (rows, weights), dtype in itertools.product(op_inputs.GROUPED_FORMATS.values(), (F32, BF16)):
        left = _moved(op_inputs.quantized_rows(normal(5, 150, seed=1), [4, 1], *rows, dim=1), device)
        right = _moved(scaled_cases.quantized(normal(2, 21, 150, seed=2), *weights), device)
        yield "scaled_grouped_gemm", (*flatten(left), *flatten(right), splits, dtype, dtype == F32, dtype == BF16)
        side = _moved(op_inputs.quantized_rows(normal(256, 6, seed=1), [128, 128], *rows, dim=0), device)
        grads, whole = torch.zeros(2, 6, 6, dtype=dtype, device=device), torch.tensor([128, 128], device=device)
        operands = (grads, *flatten(side), *flatten(side), whole)
        yield "scaled_grouped_gemm_wgrad_accumulate_", (*operands, True, dtype == BF16)


def embeddings(device: torch.device) -> Iterator[tuple[str, Arguments]]:
    ids = torch.tensor([0, 2, 2, 1, 0, 4], device=device)
    for dtype in (F32, BF16):
        gradient = torch.randn(6, 4, device=device).to(dtype)
        yield "embedding_backward", (gradient, ids, 5)
        yield "embedding_accumulate_", (torch.zeros(5, 4, device=device), gradient, ids)


def packed_attentions(device: torch.device) -> Iterator[tuple[str, Arguments]]:
    """On a CPU, wherever the other operations run."""
    documents = torch.tensor([[0, 0, 0, 1, 1, -1], [4, 5, 5, 5, 5, 5], [-1] * 6])
    for dtype, causal in ((F32, True), (BF16, False)):
        q, k, v = (torch.randn(3, heads, 6, width).to(dtype) for heads, width in ((4, 8), (2, 8), (2, 5)))
        yield "packed_attention_fwd", (q, k, v, documents, 0.3, causal, None)
        yield "packed_attention_fwd", (q, k, v, documents, 0.3, causal, torch.randn(4))
        yield "packed_attention_fwd", (q, k, v, documents, 0.3, causal, torch.randn(4), 1.5)
        out, logsumexp = torch.randn(3, 4, 6, 5).to(dtype), torch.rand(3, 4, 6)
        yield "packed_attention_bwd", (out, q, k, v, out, logsumexp, documents, 0.3, causal)
        yield "packed_attention_bwd", (out, q, k, v, out, logsumexp, documents, 0.3, causal, 1.5)
    q, out, logsumexp = (x[:, :, -2:] for x in (q, out, logsumexp))  # of the last positions alone
    yield "packed_attention_fwd", (q, k, v, documents, 0.3, True, None)
    yield "packed_attention_bwd", (out, q, k, v, out, logsumexp, documents, 0.3, True)
    if has_library(ATTENTION, F32, BACKWARD):  # windows are of our kernel alone
        q, k, v, out = (torch.randn(3, heads, 6, 16) for heads in (4, 2, 2, 4))
        logsumexp = torch.rand(3, 4, 6)
        yield "packed_attention_fwd", (q, k, v, documents, 0.3, True, None, 0.0, 2)
        yield "packed_attention_bwd", (out, q, k, v, out, logsumexp, documents, 0.3, True, 0.0, 2)


def flash_attentions(device: torch.device) -> Iterator[tuple[str, Arguments]]:
    """On a CPU; of one projection's heads, and of the last of the keys."""
    for dtype, causal in ((F32, True), (BF16, False)):
        sizes = ((4, 32), (2, 32), (2, 16))
        q, k, v = (torch.randn(2, 2, heads, width + 6).to(dtype)[..., :width] for heads, width in sizes)
        k, v = (x.repeat(1, 3, 1, 1) for x in (k, v))
        yield "flash_attention_fwd", (q, k, v, 0.3, causal)
        out, logsumexp = torch.randn(2, 2, 4, 16).to(dtype), torch.rand(2, 2, 4)
        yield "flash_attention_bwd", (out, q, k, v, out, logsumexp, 0.3, causal)
        visible = torch.arange(6).view(1, 1, 1, 6) < torch.tensor([4, 6]).view(2, 1, 1, 1)
        query, key, value = (x.transpose(1, 2) for x in (q[:, :1], k, v))
        yield "decode_attention", (query, key, value, visible if causal else None, 0.3)


def packed_intervals(device: torch.device) -> Iterator[tuple[str, Arguments]]:
    documents = torch.tensor([[0, 0, 0, 1, 1, -1], [4, 5, 5, 5, 5, 5]], device=device)
    for queries, causal, window in ((6, True, -1), (4, False, -1), (6, True, 1)):
        yield "packed_attention_intervals", (documents, queries, causal, window)


def _moved(operand: ScaledOperand, device: torch.device) -> ScaledOperand:
    return ScaledOperand(*(t.to(device) if isinstance(t, Tensor) else t for t in operand))


def recurrences(device: torch.device) -> Iterator[tuple[str, Arguments]]:
    """From chunk to chunk: chunks, heads of all rows, tokens, channels of keys and of values."""
    for decays in (1, 5):
        w, k = (torch.randn(3, 2, 4, 5, device=device) / 4 for _ in "wk")
        u, decay = torch.randn(3, 2, 4, 7, device=device), torch.rand(3, 2, decays, device=device)
        initial, states = torch.randn(2, 5, 7, device=device), torch.randn(3, 2, 5, 7, device=device)
        yield "delta_states", (w, u, k, decay, initial)
        yield "delta_states_bwd", (states, u, w, k, decay, initial, states, u)
        yield "decayed_states", (states, decay[..., None], initial)


FAMILIES: list[Family] = [
    *(norms, quantized_outputs, activations, ropes, routers, permutations, losses, by_recipe, fp8, nvfp4, cpu_graph),
    *(gemms, grouped_gemms, embeddings, recurrences, packed_attentions, flash_attentions, packed_intervals),
]
ON_A_CPU = (cpu_graph, packed_attentions, flash_attentions)
"""Families of operations without a kernel for a GPU."""
