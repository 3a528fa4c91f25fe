"""Quantizers are values: equality, hash, repr, JSON, copies, constants of a graph; and what they refuse, in words."""

import copy
import dataclasses
import json
import math
import pickle
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist

from te_models.kernels.quantize import quantize_nvfp4, random_hadamard
from te_models.layers.quantizer import (
    QUANTIZERS,
    Float8BlockQuantizer,
    Float8CurrentScalingQuantizer,
    HybridQuantizer,
    IdentityQuantizer,
    Int4Quantizer,
    Int8Quantizer,
    MXFP8Quantizer,
    NVFP4Quantizer,
    Quantizer,
)
from te_models.layers.quantizer.delayed import Float8Quantizer
from te_models.layers.quantizer.value import ValueObject, value_class
from tests.layers.quantizer.examples import DELAYED, EXAMPLES, STOCHASTIC

ALL = EXAMPLES | {"stochastic": STOCHASTIC, "delayed": DELAYED}


def evaluated(value: ValueObject) -> object:
    """What the compiler makes of the value in the code it generates."""
    expression, names = value.__fx_repr__()
    return eval(expression, dict(names))


@pytest.mark.parametrize("name", ALL)
def test_equal_after_every_round_trip(name: str) -> None:
    quantizer = ALL[name]
    copies = [
        copy.deepcopy(quantizer),
        pickle.loads(pickle.dumps(quantizer)),
        dataclasses.replace(quantizer),
        evaluated(quantizer),
        eval(repr(quantizer), {"torch": torch, **{type(q).__name__: type(q) for q in ALL.values()}}),
    ]
    if name != "delayed":  # its values are stored in the format of current scaling
        copies.append(Quantizer.from_dict(json.loads(json.dumps(quantizer.to_dict()))))
    for again in copies:
        assert type(again) is type(quantizer) and again == quantizer
        assert hash(again) == hash(quantizer) and repr(again) == repr(quantizer)
    assert quantizer.to_dict()["format"] == quantizer.FORMAT


def test_no_two_examples_are_equal() -> None:
    assert len(set(ALL.values())) == len(ALL)
    assert len({q.__fx_repr__()[0] for q in ALL.values()}) == len(ALL)
    assert {type(q).FORMAT for q in EXAMPLES.values()} == set(QUANTIZERS)


OTHER = {
    "rowwise": False,
    "columnwise": False,
    "fp8_dtype": torch.float8_e5m2,
    "force_pow_2_scales": None,
    "amax_epsilon": 0.5,
    "block_scaling_dim": 1,
    "two_dimensional": True,
    "with_rht": True,
    "stochastic_rounding": True,
    "with_2d_quantization": True,
    "nvfp4_e4m3_max": 256,
    "nvfp4_4over6_err_mode": "MSE",
    "rowwise_quantizer": MXFP8Quantizer(),
    "columnwise_quantizer": MXFP8Quantizer(),
    "group_size": 64,
    "scale_dtype": torch.float16,
}


@pytest.mark.parametrize("cls", QUANTIZERS.values(), ids=lambda c: c.FORMAT)
def test_every_field_is_part_of_the_value(cls: type[Quantizer]) -> None:
    for field in dataclasses.fields(cls):
        default = cls(nvfp4_use_4over6=True) if field.name == "nvfp4_e4m3_max" else cls()
        old = getattr(default, field.name)
        changed = dataclasses.replace(default, **{field.name: not old if isinstance(old, bool) else OTHER[field.name]})
        assert changed != default and evaluated(changed) == changed
        assert Quantizer.from_dict(changed.to_dict()) == changed
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(default, field.name, old)


def test_with_usage_is_a_new_value() -> None:
    quantizer = MXFP8Quantizer()
    changed = quantizer.with_usage(rowwise=False, columnwise=True)
    assert (quantizer.rowwise, quantizer.columnwise) == (True, True)
    assert changed.field_names() == ("columnwise_data", "columnwise_scale_inv")
    assert changed.with_usage(rowwise=True, columnwise=True) == quantizer


X = torch.ones(16, 16)


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: IdentityQuantizer(rowwise=False, columnwise=False), "at least one usage: rowwise or columnwise"),
        (lambda: MXFP8Quantizer(fp8_dtype=torch.int8), "fp8_dtype is torch.int8; allowed: torch.float8_e4m3fn, torch"),
        (lambda: Float8BlockQuantizer(block_scaling_dim=3), "block_scaling_dim is 3; allowed: 1, 2"),
        (lambda: Float8BlockQuantizer(amax_epsilon=-1.0), "amax_epsilon is -1.0; allowed: a finite number from 0"),
        (lambda: Float8CurrentScalingQuantizer(amax_epsilon=math.nan), "amax_epsilon is nan; allowed: a finite number"),
        (lambda: NVFP4Quantizer(with_rht=True, with_2d_quantization=True), "both True; allowed: one of the two"),
        (lambda: HybridQuantizer(rowwise_quantizer=HybridQuantizer()), "allowed: a quantizer of one format"),
        (lambda: HybridQuantizer(columnwise_quantizer=None), "columnwise_quantizer is None; allowed: a quantizer"),
        (lambda: Quantizer.from_dict({"format": "int5"}), "quantized format is 'int5'; allowed: 'float8', 'float8_bl"),
        (lambda: Int4Quantizer(group_size=24), "group_size is 24; allowed: 0 for whole rows, and powers of two from 8"),
        (lambda: Int8Quantizer(scale_dtype=torch.int8), "scale_dtype is torch.int8; allowed: torch.bfloat16, torch.f"),
        (lambda: Quantizer.from_dict({"format": "int4", "scale_dtype": 3}), "scale_dtype is 3; allowed: 'bfloat16', "),
        (lambda: Quantizer.from_dict({}), "quantized format is None; allowed"),
        (lambda: Quantizer.from_dict({"format": "mxfp8", "speed": 1}), "MXFP8Quantizer has no field 'speed'; its fie"),
        (lambda: Quantizer.from_dict({"format": "mxfp8", "fp8_dtype": "int8"}), "fp8_dtype is 'int8'; allowed: 'flo"),
        (lambda: STOCHASTIC.quantize_fields(X), "stochastic rounding draws from a key; pass key, an int64 tensor"),
        (lambda: STOCHASTIC.rounded(X, "rowwise", torch.float32), "stochastic rounding draws from a key"),
        (lambda: STOCHASTIC.statistics(X), "stochastic rounding draws from a key"),
        (lambda: random_hadamard(X), "the random Hadamard transform takes bfloat16; got torch.float32"),
        (lambda: quantize_nvfp4(X, block_rows=4), "block_rows is 4; allowed: 1, 16"),
        (
            lambda: NVFP4Quantizer().dequantize_fields(NVFP4Quantizer().quantize_fields(X), torch.float32),
            "packed NVFP4 fields do not tell their matrix's shape; pass shape",
        ),
        (
            lambda: MXFP8Quantizer(columnwise=False).operand_of_fields({}, "columnwise", torch.float32),
            "this mxfp8 tensor has no columnwise copy, which the GEMM needs; quantize it with columnwise=True",
        ),
        (
            lambda: HybridQuantizer(rowwise=False).operand_of_fields({}, "rowwise", torch.float32),
            "this hybrid tensor has no rowwise copy",
        ),
    ],
)
def test_what_is_refused(make, message: str) -> None:
    with pytest.raises(ValueError) as error:
        make()
    assert message in str(error.value)


@dataclass(frozen=True, kw_only=True)
class WithGroup(IdentityQuantizer):
    group: dist.ProcessGroup | None = None


def test_a_value_class_holds_values_only() -> None:
    with pytest.raises(TypeError, match=r"WithGroup\.group is annotated .*ProcessGroup"):
        value_class(WithGroup)

    @dataclass(frozen=True, kw_only=True)
    class WithTensor(IdentityQuantizer):
        scale: torch.Tensor

    with pytest.raises(TypeError, match=r"WithTensor\.scale is annotated .*Tensor"):
        value_class(WithTensor)

    class NoDataclassOfItsOwn(IdentityQuantizer):
        pass

    with pytest.raises(TypeError, match="NoDataclassOfItsOwn is not a frozen dataclass"):
        value_class(NoDataclassOfItsOwn)


def test_floats_that_repr_cannot_write_are_written() -> None:
    quantizer = Float8CurrentScalingQuantizer()
    object.__setattr__(quantizer, "amax_epsilon", math.inf)
    assert evaluated(quantizer) == quantizer


def test_a_live_quantizer_is_itself_only() -> None:
    scale = torch.ones(())
    a, b = (Float8Quantizer(scale, None, torch.float8_e4m3fn) for _ in range(2))
    assert a != b and a == a
