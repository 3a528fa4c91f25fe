"""Integers as compressed-tensors, GPTQ and AWQ store them: made and decoded plainly, a bit at a time, no te_models."""

import json
from collections.abc import Callable, Sequence
from typing import Any

import torch

Tensors = dict[str, torch.Tensor]
Encoder = Callable[[str, torch.Tensor, torch.Generator], tuple[Tensors, torch.Tensor]]


def words_of(codes: torch.Tensor, bits: int, order: Sequence[int] | None = None) -> torch.Tensor:
    """Return codes [R, C] as words [R, ceil(C * bits / 32)] of which place i has code order[i], or the i-th."""
    per_word = 32 // bits
    rows, columns = codes.shape
    words = torch.zeros(rows, -(-columns // per_word), dtype=torch.int64)
    for place in range(per_word):
        mine = codes[:, (place if order is None else order[place]) :: per_word].long()
        words[:, : mine.shape[1]] += mine << (bits * place)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


def values_of(codes: torch.Tensor, zeros: torch.Tensor, scales: torch.Tensor, group: torch.Tensor) -> torch.Tensor:
    """Return values [R, C] in float64 of codes [R, C], zeros and scales [R, G]; group: of each column."""
    return (codes.double() - zeros.double()[:, group]) * scales.double()[:, group]


def numbers(
    shape: Sequence[int], bits: int, groups: int, dtype: torch.dtype, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return random codes [R, C], zeros and scales [R, groups]; a scale is negative now and then."""
    codes = torch.randint(0, 2**bits, tuple(shape), generator=generator)
    zeros = torch.randint(1, 2**bits, (shape[0], groups), generator=generator)
    scales = (torch.rand((shape[0], groups), generator=generator) * 0.01 + 0.002) / 2 ** (bits - 4)
    scales[::7, 0] *= -1
    return codes, zeros, scales.to(dtype)


def packed(
    bits: int,
    group: int | None,
    *,
    zero_points: bool = False,
    dtype: torch.dtype = torch.bfloat16,
    shape: torch.dtype = torch.int64,
    shuffled: bool = False,
) -> Encoder:
    """compressed-tensors `pack-quantized`. group: None for whole rows; shuffled: with `weight_g_idx`."""

    def encode(name: str, weight: torch.Tensor, generator: torch.Generator) -> tuple[Tensors, torch.Tensor]:
        rows, columns = weight.shape
        size = group or columns
        codes, zeros, scales = numbers(weight.shape, bits, columns // size, dtype, generator)
        index = torch.arange(columns) // size
        if shuffled:
            index = index[torch.randperm(columns, generator=generator)]
        tensors = {
            f"{name}_packed": words_of(codes, bits),
            f"{name}_scale": scales,
            f"{name}_shape": torch.tensor([rows, columns]).to(shape),
        }
        if zero_points:
            tensors[f"{name}_zero_point"] = words_of(zeros.mT, bits).mT
        else:
            zeros = torch.full_like(zeros, 2 ** (bits - 1))
        if shuffled:
            tensors[f"{name}_g_idx"] = index.int()
        return tensors, values_of(codes, zeros, scales, index)

    return encode


def gptq(bits: int, group: int, *, less: int = 1, ordered: bool = True) -> Encoder:
    """GPTQ. less: what zero points are stored less of; ordered: groups are runs of columns."""

    def encode(name: str, weight: torch.Tensor, generator: torch.Generator) -> tuple[Tensors, torch.Tensor]:
        columns, module = weight.shape[1], name.removesuffix(".weight")
        codes, zeros, scales = numbers(weight.shape, bits, columns // group, torch.float16, generator)
        index = torch.arange(columns) // group
        if not ordered:
            index = index[torch.randperm(columns, generator=generator)]
        tensors = {
            f"{module}.qweight": words_of(codes, bits).mT,
            f"{module}.qzeros": words_of((zeros - less).mT, bits),
            f"{module}.scales": scales.mT,
            f"{module}.g_idx": index.int(),
        }
        return tensors, values_of(codes, zeros, scales, index)

    return encode


def awq(group: int) -> Encoder:
    """AWQ, packed for its GEMM."""
    order = (0, 2, 4, 6, 1, 3, 5, 7)

    def encode(name: str, weight: torch.Tensor, generator: torch.Generator) -> tuple[Tensors, torch.Tensor]:
        columns, module = weight.shape[1], name.removesuffix(".weight")
        codes, zeros, scales = numbers(weight.shape, 4, columns // group, torch.float16, generator)
        tensors = {
            f"{module}.qweight": words_of(codes.mT, 4, order),
            f"{module}.qzeros": words_of(zeros.mT, 4, order),
            f"{module}.scales": scales.mT,
        }
        return tensors, values_of(codes, zeros, scales, torch.arange(columns) // group)

    return encode


def by_name(*rules: tuple[str, Encoder]) -> Encoder:
    """Return what encodes a weight as the first rule whose part of a name it has."""

    def encode(name: str, weight: torch.Tensor, generator: torch.Generator) -> tuple[Tensors, torch.Tensor]:
        return next(encoder for part, encoder in rules if part in name)(name, weight, generator)

    return encode


def group_of(bits: int, group: int | None, *, zero_points: bool = False, **more: Any) -> dict[str, Any]:
    """Return the declaration of a group's weights."""
    strategy: dict[str, Any] = {"strategy": "channel"} if group is None else {"strategy": "group", "group_size": group}
    return {"num_bits": bits, "type": "int", "symmetric": not zero_points} | strategy | more


def mixed(groups: dict[str, tuple[list[str], str, dict[str, Any]]], form: str = "mixed-precision") -> dict[str, Any]:
    """Return what compressed-tensors writes to config.json for groups of modules: targets, format, weights."""
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {
            name: {"targets": targets, "format": own, "weights": weights, "input_activations": None}
            for name, (targets, own, weights) in groups.items()
        },
        "ignore": ["lm_head"],
    }


GPTQ_CONFIG: dict[str, Any] = {
    "quant_method": "gptq",
    "bits": 4,
    "group_size": 64,
    "desc_act": False,
    "sym": False,
    "damp_percent": 0.01,
}
AWQ_CONFIG: dict[str, Any] = {
    "quant_method": "awq",
    "bits": 4,
    "group_size": 64,
    "version": "gemm",
    "zero_point": True,
    "modules_to_not_convert": None,
}


NF4 = (-1.0, -0.6961928, -0.52507305, -0.39491749, -0.28444138, -0.18477343, -0.09105004, 0.0, 0.0795803, 0.1609302)
NF4 += (0.24611230, 0.33791524, 0.44070983, 0.562617, 0.72295684, 1.0)


def nf4(nested: bool) -> Encoder:
    """bitsandbytes: a factor per 64 values that follow one another, itself in eight bits if nested."""

    def encode(name: str, weight: torch.Tensor, generator: torch.Generator) -> tuple[Tensors, torch.Tensor]:
        count = weight.numel()
        codes = torch.randint(0, 16, (count,), generator=generator)
        state: dict[str, Any] = {"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": list(weight.shape)}
        tensors = {
            name: (codes[0::2] << 4 | codes[1::2]).to(torch.uint8)[:, None],
            f"{name}.quant_map": torch.tensor(NF4),
        }
        factors = torch.rand(count // 64, generator=generator) * 0.1 + 0.01
        if nested:
            eight = torch.randint(0, 256, (count // 64,), generator=generator)
            table = torch.linspace(-1, 1, 256)
            of_groups = torch.rand(-(-count // 64 // 256), generator=generator) * 0.05
            tensors |= {f"{name}.nested_quant_map": table, f"{name}.nested_absmax": of_groups}
            state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": 0.0625}
            factors = table[eight] * of_groups.repeat_interleave(256)[: count // 64] + 0.0625
            tensors[f"{name}.absmax"] = eight.to(torch.uint8)
        else:
            tensors[f"{name}.absmax"] = factors
        said = torch.frombuffer(bytearray(json.dumps(state).encode()), dtype=torch.uint8)
        tensors[f"{name}.quant_state.bitsandbytes__nf4"] = said
        values = torch.tensor(NF4)[codes] * factors.repeat_interleave(64)
        return tensors, values.double().view(weight.shape)

    return encode


NF4_CONFIG: dict[str, Any] = {
    "quant_method": "bitsandbytes",
    "load_in_4bit": True,
    "load_in_8bit": False,
    "bnb_4bit_quant_type": "nf4",
    "bnb_4bit_use_double_quant": True,
    "bnb_4bit_compute_dtype": "bfloat16",
}
