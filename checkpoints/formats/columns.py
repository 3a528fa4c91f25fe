"""GPTQ (arXiv 2210.17323) and AWQ (arXiv 2306.00978): `quant_method` "gptq" and "awq", integers packed along columns.

How they lie is in `packed_columns.py`. GPTQ's `desc_act` orders groups by importance: then `X.g_idx` says the group of
each column, and such a weight has values but no fields of ours. What a calibration wrote beside is in the declaration
and comes back with it.
"""

import functools
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from .format import FLOAT_SCALES, CodePacking, Part, WeightFormat, one_of
from .integers import packed_format
from .packed_columns import AWQ, gptq

_GROUPS = (128, 32, 64, 16, 256, 512, 1024, -1)


@functools.cache
def _columns(name: str, bits: int, group: int, packing: CodePacking) -> WeightFormat:
    packed = packed_format(name, bits, group, zero_points=True, shape=False)
    data, scale, zero = packed.parts
    assert zero.block is not None, "zero points have blocks"
    bytes_of_zeros = Part("zero_point", zero.suffix, ("U8",), "zero", (1, zero.block[1]))
    return replace(
        packed,
        parts=(data, replace(scale, dtypes=("F16", *(d for d in FLOAT_SCALES if d != "F16"))), bytes_of_zeros),
        beside=packed.beside if packing.along_rows else (),
        packing=packing,
    )


def read_gptq(config: Mapping[str, Any]) -> WeightFormat:
    """Return the format that `quantization_config` declares."""
    bits = one_of(config, "bits", (4, 8), None)
    group = one_of(config, "group_size", _GROUPS, None)
    version = one_of(config, "checkpoint_format", ("gptq", "gptq_v2"), "gptq")
    one_of(config, "desc_act", (False, True), False)
    return _columns("gptq", bits, max(0, group), gptq(bits, second=version == "gptq_v2"))


def read_awq(config: Mapping[str, Any]) -> WeightFormat:
    """Return the format that `quantization_config` declares."""
    one_of(config, "bits", (4,), None)
    group = one_of(config, "group_size", _GROUPS, None)
    version = config.get("version")
    one_of({"version": version.lower() if isinstance(version, str) else version}, "version", ("gemm",), "gemm")
    one_of(config, "zero_point", (True,), True)
    return _columns("awq", 4, max(0, group), AWQ)
