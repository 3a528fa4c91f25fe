"""Inputs and options that the tests of each operation share with the samples of all of them (op_samples).

Nothing here needs pytest: a GPU's first run makes them, too."""

import itertools

import torch
from torch import Tensor

from te_models.kernels.activation.reference import ACTIVATIONS
from te_models.kernels.cross_entropy import IGNORE_INDEX
from te_models.kernels.gemm import ScaledOperand
from te_models.kernels.quantize.output import QuantizedOutput
from te_models.kernels.rope import reference as rope_reference
from tests.kernels.gemm.scaled_cases import E5M2, quantized

# centered, zero_centered, weight_last, has weight, has bias
NORM_OPTIONS = [
    *((False, False, True, True, False), (False, True, True, True, False), (False, False, False, True, False)),
    *((False, True, False, True, False), (False, False, True, False, False), (True, False, False, True, True)),
    *((True, True, False, True, False), (True, False, True, True, True), (True, False, True, False, True)),
    (True, False, False, False, False),
]
# name, gated, clamp, alpha, up_offset
ACTIVATION_OPTIONS = [
    *((name, gated, None, 1.0, 0.0) for name in ACTIVATIONS for gated in (False, True)),
    ("silu", True, 1.3, 1.702, 1.0),
]
# E, K, groups, best groups, group score
ROUTER_COUNTS = [
    *((1, 1, None, None, "max"), (7, 7, None, None, "max"), (8, 2, None, None, "max"), (129, 6, None, None, "max")),
    *((16, 4, 4, 2, "top2_sum"), (20, 3, 4, 1, "max"), (15, 9, 5, 4, "top2_sum"), (4, 2, 4, 3, "top2_sum")),
]
# sigmoid, after, bias, normalize, eps, scaling
ROUTER_SCORES = [
    (sigmoid, after, bias, normalize, eps, scaling)
    for sigmoid, after, (bias, normalize, eps, scaling) in itertools.product(
        (False, True), (False, True), ((False, True, 1e-20, 1.0), (True, False, 0.0, 2.5), (False, True, 0.5, 1.0))
    )
    if not (after and bias)
]
GROUPED_FORMATS = {
    "per_tensor": (("per_tensor", None), ("per_tensor", None)),
    "pow2": (("pow2", (1, 128)), ("pow2", (128, 128))),
    "float32": (("float32", (1, 128)), ("float32", (128, 128))),
    "mxfp8": (("e8m0", (1, 32)), ("e8m0", (1, 32))),
}
BOTH = {"rowwise": True, "columnwise": True}
COLUMNWISE = {"rowwise": False, "columnwise": True}
OUTPUTS = [
    QuantizedOutput(),
    QuantizedOutput(fp8_dtype=E5M2, **BOTH),
    QuantizedOutput(**COLUMNWISE),
    QuantizedOutput(block=128),
    QuantizedOutput(block=128, **BOTH),
    QuantizedOutput(block=128, scale_kind="float32", epsilon=1e-4, fp8_dtype=E5M2, **BOTH),
    QuantizedOutput(block=32, scale_kind="e8m0"),
    QuantizedOutput(block=32, scale_kind="e8m0", **BOTH),
    QuantizedOutput(block=32, scale_kind="e8m0", **COLUMNWISE),
]


def norm_inputs(tokens, columns, dtype, weight_dtype, has_weight, has_bias, device):
    generator = torch.Generator().manual_seed(tokens * 1000 + columns)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    x = (randn(tokens, columns) * 2 + 0.5).to(dtype).to(device)
    weight = (1 + randn(columns) / 4).to(weight_dtype).to(device) if has_weight else None
    return x, weight, (randn(columns).to(weight_dtype).to(device) if has_bias else None)


def activation_inputs(tokens: int, columns: int, gated: bool, weighted: bool, dtype: torch.dtype, device):
    generator = torch.Generator().manual_seed(tokens + columns)
    x = (2 * torch.randn(tokens, columns * (2 if gated else 1), generator=generator)).to(dtype)
    dy = torch.randn(tokens, columns, generator=generator).to(dtype)
    return x.to(device), dy.to(device), (torch.rand(tokens, generator=generator).to(device) if weighted else None)


def cross_entropy_inputs(shape, dtype, device):
    generator = torch.Generator().manual_seed(sum(shape))
    logits = (4 * torch.randn(shape, generator=generator)).to(dtype).to(device)
    labels = torch.randint(0, shape[1], shape[:1], generator=generator).to(device)
    labels[1::3] = IGNORE_INDEX
    return logits, labels


def linear_cross_entropy_inputs(tokens: int, hidden: int, vocab: int, dtype: torch.dtype, ignored: float = 0.3):
    generator = torch.Generator().manual_seed(tokens)
    x = torch.randn(tokens, hidden, generator=generator).to(dtype)
    weight = (torch.randn(vocab, hidden, generator=generator) / hidden**0.5).to(dtype)
    bias = torch.randn(vocab, generator=generator).to(dtype)
    labels = torch.randint(0, vocab, (tokens,), generator=generator)
    labels[torch.rand(tokens, generator=generator) < ignored] = IGNORE_INDEX
    return x, weight, bias, labels


def routed(tokens: int, topk: int, experts: int, device: torch.device, skewed: bool = False) -> Tensor:
    """Distinct experts per token, [T, K]; skewed: the first experts get most tokens, some get none."""
    scores = torch.rand(tokens, experts, generator=torch.Generator().manual_seed(tokens))
    if skewed:
        scores = scores + 1.0 / torch.arange(1, experts + 1)
    return scores.argsort(dim=-1, descending=True)[:, :topk].to(device)


def rope_inputs(case, dtype, device):
    batch, length, heads, channels, rotated, tables = case
    generator = torch.Generator().manual_seed(length)
    x = torch.randn(batch, length, heads, channels, generator=generator).to(dtype).to(device)
    # The backward gets gradients with other strides than x.
    grad = torch.randn(batch, heads, length, channels, generator=generator).to(dtype).to(device).transpose(1, 2)
    positions = torch.randint(0, 9000, (tables, length), generator=generator).to(device)
    frequencies = (1 / 10000 ** (torch.arange(rotated // 2) / (rotated // 2))).to(device)
    return x, grad, *rope_reference.rope_tables(positions, frequencies, 1.1)


def router_inputs(tokens, counts, scores, dtype, device):
    """Logits that are multiples of 1/4, so that ties are common and exact; the bias is not."""
    experts = counts[0]
    generator = torch.Generator().manual_seed(experts + tokens)
    logits = (torch.randn(tokens, experts, generator=generator) * 8).round() / 4
    bias = torch.randn(experts, generator=generator).to(device) if scores[2] else None
    return logits.to(dtype).to(device), bias


def ranges(splits: list[int]) -> list[tuple[int, int]]:
    return list(itertools.pairwise(torch.tensor([0, *splits]).cumsum(0).tolist()))


def quantized_rows(x: Tensor, splits: list[int], kind: str, block: tuple[int, int] | None, dim: int) -> ScaledOperand:
    """Quantize rows (dim 0 of x) group by group; dim: the one to contract, 1 for fprop and dgrad, 0 for wgrad."""
    padded = [*ranges(splits), (sum(splits), x.shape[0])]
    parts = [quantized(x[a:b] if dim else x[a:b].mT.contiguous(), kind, block, E5M2) for a, b in padded]
    data = torch.cat([p.data.view(torch.uint8) for p in parts], -2 if dim else -1).view(E5M2)
    if kind == "per_tensor":
        return ScaledOperand(data, torch.stack([p.scale_inv for p in parts[:-1]]), "per_tensor")
    return ScaledOperand(data, torch.cat([p.scale_inv for p in parts], -2 if dim else -1), kind, block)


def scale_for(output: QuantizedOutput, device: torch.device) -> torch.Tensor | None:
    return torch.tensor(17.3, device=device) if output.block == 0 else None
