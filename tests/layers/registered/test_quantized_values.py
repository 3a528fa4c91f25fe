"""Quantized arguments and results of registered operations: real against fake, eager against compiled."""

import copy
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._dynamo.testing import CompileCounter

from te_models.kernels.custom_op import Alias, Result, caller, like, operation, registered, registration
from te_models.layers import (
    Float8CurrentScalingQuantizer,
    Float8Quantizer,
    GroupedRows,
    GroupedTensor,
    GroupedTensorStorage,
    IdentityQuantizer,
    MXFP8Quantizer,
    NVFP4Quantizer,
    QuantizedStorage,
    QuantizedTensor,
    Quantizer,
)
from te_models.layers.dynamo.custom_op import Live, QuantizedResult, quantized_like
from te_models.layers.dynamo.quantizer_string import quantizer_from_text, text_of
from te_models.layers.quantizer.value import value_class
from tests.compare import raw, refused, same_bits
from tests.kernels.described import check_description, tensors
from tests.layers.quantizer.examples import DELAYED, EXAMPLES, STOCHASTIC


class Stored(NamedTuple):
    """A value as `as_tensor` asks, and what it stands for."""

    value: QuantizedTensor | QuantizedStorage
    plain: Tensor


def _stored(x: Tensor, m_splits: Tensor | None, quantizer: Live, as_tensor: bool) -> Stored:
    return Stored(quantized_like(x, quantizer, as_tensor=as_tensor, m_splits=m_splits), like(x))


@operation("test_quantize", _stored)
def quantize_op(x: Tensor, m_splits: Tensor | None, quantizer: Live, key: Tensor | None, as_tensor: bool) -> Stored:
    """x: [R, C], [G, R, C], or with m_splits [T, C]."""
    if m_splits is not None:
        assert isinstance(quantizer, Quantizer)
        value: Any = GroupedRows.quantize_rows(x, m_splits, quantizer, key)
    else:
        fields = quantizer.quantize_fields(x, key)
        cls = GroupedTensorStorage if x.dim() == 3 else QuantizedStorage
        tensors = list(fields.values())
        described = quantized_like(x, quantizer, as_tensor=as_tensor)
        value = described.make(tensors) if as_tensor else cls.unflatten(tensors, (described.value, x.shape, x.dtype))
    if isinstance(value, QuantizedTensor) and not as_tensor:
        value = value.to_storage()
    return Stored(value, value.dequantize().contiguous())


quantize = caller(quantize_op)


def _live(x: Tensor, quantizer: Float8Quantizer) -> QuantizedResult:
    return quantized_like(x, quantizer, as_tensor=True)


@operation("test_quantize_live", _live)
def quantize_live_op(x: Tensor, quantizer: Float8Quantizer) -> QuantizedTensor:
    """x: [R, C]; what a live quantizer sees is recorded."""
    return quantizer.quantize(x)


quantize_live = caller(quantize_live_op)

Weight = Tensor | QuantizedTensor


class Passed(NamedTuple):
    """The weight quantized, the one that was passed where it was so already; the same again; x w^T."""

    stored: QuantizedTensor
    again: QuantizedTensor
    y: Tensor


def _passed(x: Tensor, weight: Weight, quantizer: Quantizer) -> tuple[Result | Alias, ...]:
    made = Alias("weight") if isinstance(weight, QuantizedTensor) else quantized_like(weight, quantizer, as_tensor=True)
    return Passed(made, Alias(0), like(x, (x.shape[0], weight.shape[0])))


@operation("test_pass", _passed)
def pass_op(x: Tensor, weight: Weight, quantizer: Quantizer) -> Passed:
    """x: [T, K]; weight: [N, K] plain, or quantized and then handed back."""
    stored = weight if isinstance(weight, QuantizedTensor) else quantizer.quantize(weight)
    return Passed(stored, stored, x @ stored.dequantize().t())


pass_on = caller(pass_op)


@operation("test_fill_cache", lambda: None, mutates=("cache",))
def fill_cache_op(cache: QuantizedStorage | GroupedTensor, weight: Tensor) -> None:
    """Quantize weight into the fields of a cache, as its quantizer says."""
    for name, field in cache.quantizer.quantize_fields(weight).items():
        cache.fields[name].copy_(field)


fill_cache = caller(fill_cache_op)

ALL = EXAMPLES | {"stochastic": STOCHASTIC, "delayed": DELAYED}
USAGES = [(True, True), *(pytest.param(usage, marks=pytest.mark.slow) for usage in ((True, False), (False, True)))]
FEW = ("tensor", "1x32", "1x16 RHT", "hybrid", "delayed")
MOST = [pytest.param(name, marks=() if name in FEW else pytest.mark.slow) for name in (*EXAMPLES, "delayed")]
KEY = torch.tensor([3, 5])


@pytest.fixture
def own_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registration, "_REGISTERED", dict(registered()))


def flat(op: Any, *values: Any) -> tuple[Any, ...]:
    """Values as the arguments of an operation's schema."""
    entry = registered()[op._name]
    return tuple(item for p, value in zip(entry.parameters, values, strict=True) for item in p.flat(value))


def cases(quantizer: Quantizer) -> Iterator[tuple[Tensor, Tensor | None]]:
    """A matrix, one that lies transposed, a stack, and rows by group where the format has them."""
    torch.manual_seed(0)
    yield torch.randn(33, 48, dtype=torch.bfloat16), None
    yield torch.randn(48, 33).t(), None
    yield torch.randn(3, 33, 20), None
    if not (isinstance(quantizer, NVFP4Quantizer) and quantizer.with_2d_quantization) and quantizer.FORMAT != "hybrid":
        yield torch.randn(40, 48), torch.tensor([7, 0, 26])


@pytest.mark.sentinels(
    "tensor-both", "delayed-both", "1x32-both", "16x16-both", "identity-both", "hybrid symmetric-both"
)
@pytest.mark.parametrize("usage", USAGES, ids=["both", "rowwise", "columnwise"])
@pytest.mark.parametrize("name", ALL)
def test_fields_are_as_described(name: str, usage: tuple[bool, bool]) -> None:
    """Of a matrix, a stack and rows by group; made by an operation, and passed to one."""
    quantizer = ALL[name].with_usage(rowwise=usage[0], columnwise=usage[1])
    for x, m_splits in cases(quantizer):
        for as_tensor in (False, True):
            arguments = flat(quantize_op, x, m_splits, quantizer, KEY, as_tensor)
            check_description(registered()["test_quantize"], arguments)
            value, plain = quantize(x, m_splits, quantizer, KEY, as_tensor)
            assert torch.equal(value.dequantize(), plain)
            assert (value.quantizer, value.shape, value.dtype) == (quantizer, x.shape, x.dtype)
            assert isinstance(value, QuantizedTensor if as_tensor else QuantizedStorage)
            grouped = GroupedTensor if m_splits is None else GroupedRows
            assert isinstance(value, grouped if as_tensor else GroupedTensorStorage) is (
                x.dim() == 3 or m_splits is not None
            )
        if x.dim() == 2 and m_splits is None:
            weight = quantizer.quantize(torch.randn(5, 48)) if not quantizer.needs_key() else torch.randn(5, 48)
            check = (x.float(), weight, IdentityQuantizer())
            check_description(registered()["test_pass"], flat(pass_op, *check))


@pytest.mark.sentinels("tensor")
@pytest.mark.parametrize("name", ["tensor", "1x128", "1x16 RHT", "hybrid"])
def test_opcheck(name: str) -> None:
    x = torch.randn(33, 48)
    checks = ["test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"]
    weight = EXAMPLES[name].quantize(torch.randn(5, 48))
    one_byte = any(field.dtype.itemsize == 1 for field in weight.fields.values())
    torch.library.opcheck(pass_op, flat(pass_op, x, x, IdentityQuantizer()), test_utils=checks)
    checks = checks[1:] if one_byte else checks  # which cannot compare FP8
    torch.library.opcheck(pass_op, flat(pass_op, x, weight, EXAMPLES[name]), test_utils=checks)
    live = Float8Quantizer(torch.tensor(2.0), torch.zeros(()), torch.float8_e4m3fn)
    torch.library.opcheck(quantize_op, flat(quantize_op, x, None, live, None, False), test_utils=checks[-2:])
    cache = weight.to_storage()
    torch.library.opcheck(fill_cache_op, flat(fill_cache_op, cache, weight.dequantize()), test_utils=checks[-2:])


@pytest.mark.sentinels("tensor")
@pytest.mark.parametrize("name", MOST)
def test_results_keep_their_quantizer_through_the_compiled_path(name: str) -> None:
    """And equal ones, made anew, recompile nothing."""
    quantizer, counter = ALL[name], CompileCounter()

    def make(x: Tensor, quantizer: Quantizer) -> tuple[Any, Any]:
        return quantize(x * 2, None, quantizer, None, True).value, quantize(x, None, quantizer, None, False).value

    for compiled in (torch.compile(make, fullgraph=True, backend="aot_eager"), torch.compile(make, backend=counter)):
        for again in (quantizer, copy.deepcopy(quantizer)):
            x = torch.randn(33, 48)
            tensor, storage = compiled(x, again)
            if compiled is not None and counter.frame_count == 0:
                assert same_bits(tensor, make(x, quantizer)[0])
            for made in (tensor, storage):
                assert made.quantizer == quantizer and type(made.quantizer) is type(quantizer)
    assert counter.frame_count == 1


def test_usage_changes_act_on_a_copy() -> None:
    """What a graph hands out shares a quantizer value; giving up a copy of one changes neither it nor the others."""
    quantizer = MXFP8Quantizer()
    make = torch.compile(lambda x: quantize(x, None, quantizer, None, False).value, fullgraph=True, backend="aot_eager")
    first, second = make(torch.randn(32, 64)), make(torch.randn(32, 64))
    first.update_usage(columnwise=False)
    assert not first.quantizer.columnwise and second.quantizer == quantizer == MXFP8Quantizer()

    @torch.compile(fullgraph=True, backend="aot_eager")
    def rowwise_only(x: Tensor) -> QuantizedStorage:
        return quantize(x, None, quantizer.with_usage(rowwise=True, columnwise=False), None, False).value

    assert rowwise_only(torch.randn(32, 64)).quantizer == MXFP8Quantizer(columnwise=False)
    assert quantizer == MXFP8Quantizer()


@pytest.mark.parametrize("compiled", [False, True])
def test_a_live_quantizer_records_through_the_schema(compiled: bool) -> None:
    """Its amax is declared as written to, here a view of a larger tensor; the result is what it makes eagerly."""
    schema = str(quantize_live_op._opoverload._schema)
    assert schema.startswith(
        "te_models::test_quantize_live(Tensor x, Tensor quantizer_scale, Tensor(a2!)? quantizer_amax, "
        "ScalarType quantizer_fp8_dtype) -> (Tensor, "
    )

    def run(x: Tensor, scales: Tensor, amaxes: Tensor) -> QuantizedTensor:
        return quantize_live(x, Float8Quantizer(scales[1], amaxes[1], torch.float8_e5m2))

    x, scales, amaxes = torch.randn(8, 16), torch.tensor([1.0, 4.0]), torch.zeros(2)
    expected = Float8Quantizer(scales[1], None, torch.float8_e5m2).quantize(x)
    function = torch.compile(run, fullgraph=True, backend="aot_eager") if compiled else run
    found = function(x, scales, amaxes)
    assert same_bits(found, expected) and found.quantizer == expected.quantizer
    assert torch.equal(amaxes, torch.tensor([0.0, x.abs().max()]))
    function(x / 2, scales, amaxes)
    assert amaxes[1] == x.abs().max()


def test_an_amax_group_is_the_very_object(own_registry: None) -> None:
    group = object()  # whatever holds it: a description is not asked what it is
    described = quantized_like(torch.randn(4, 32), MXFP8Quantizer(), as_tensor=True, amax_group=group)
    assert described.make(described.allocate()).amax_group is group


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("stored", [False, True])
def test_an_alias_is_the_very_object(stored: bool, compiled: bool) -> None:
    quantizer = MXFP8Quantizer()
    weight = torch.randn(24, 64)
    given = quantizer.quantize(weight) if stored else weight
    function = torch.compile(pass_on, fullgraph=True, backend="aot_eager") if compiled else pass_on
    x = torch.randn(8, 64)
    value, again, y = function(x, given, quantizer)
    assert again is value and (value is given) is stored
    assert same_bits(value, quantizer.quantize(weight)) and torch.equal(y, x @ value.dequantize().t())


@pytest.mark.sentinels("tensor-True", "1x16 RHT-False", "tensor-False", "1x32-False", "hybrid-False", "delayed-False")
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("name", MOST)
def test_a_cache_is_written_into_where_the_schema_says_so(name: str, compiled: bool) -> None:
    quantizer, weight = ALL[name], torch.randn(32, 48)
    assert "Tensor(a0!)[] cache" in str(fill_cache_op._opoverload._schema)
    cache = quantizer.quantize(torch.zeros(32, 48)).to_storage()

    def run(cache: QuantizedStorage, weight: Tensor) -> Tensor:
        fill_cache(cache, weight * 2)
        return cache.dequantize()

    values = (torch.compile(run, fullgraph=True, backend="aot_eager") if compiled else run)(cache, weight)
    expected = quantizer.quantize(weight * 2)
    assert torch.equal(values, expected.dequantize()) and same_bits(expected, cache.fields)


def test_a_view_and_a_value_of_another_class_are_refused() -> None:
    view = MXFP8Quantizer().quantize(torch.randn(32, 64)).view(64, 32)
    with pytest.raises(ValueError, match=r"a view of shape \(64, 32\) .* cannot be an argument of an operation"):
        pass_on(torch.randn(2, 32), view, MXFP8Quantizer())
    storage = MXFP8Quantizer().quantize(torch.randn(32, 64)).to_storage()
    with pytest.raises(TypeError, match="a MXFP8TensorStorage was passed where an operation takes"):
        pass_on(torch.randn(2, 64), storage, MXFP8Quantizer())


# --- texts ---------------------------------------------------------------------------------------------------------


@value_class
@dataclass(frozen=True, kw_only=True)
class Own(MXFP8Quantizer):
    """A user's own format."""

    FORMAT: ClassVar[str] = "mxfp8"
    share: float = float("inf")
    dtype: torch.dtype | None = None


@pytest.mark.parametrize("quantizer", [*ALL.values(), Own(share=0.1, dtype=torch.bfloat16), Own()], ids=repr)
def test_a_text_rebuilds_its_quantizer(quantizer: Quantizer) -> None:
    text = text_of(quantizer)
    assert text == text_of(copy.deepcopy(quantizer))
    again = quantizer_from_text(text)
    assert again == quantizer and type(again) is type(quantizer)
    assert str(id(quantizer)) not in text and " object at " not in text


@pytest.mark.slow
def test_a_text_is_the_same_in_another_process() -> None:
    code = (
        "from te_models.layers.dynamo.quantizer_string import text_of; from te_models.layers import NVFP4Quantizer as Q;"  # noqa: E501
        "print(text_of(Q(with_rht=True)))"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
    assert found == text_of(NVFP4Quantizer(with_rht=True))


def test_texts_that_name_no_known_class_and_live_state_are_refused() -> None:
    unknown = json.dumps({"class": "os.path", "rowwise": True})
    refused(lambda: quantizer_from_text(unknown), "a quantizer of class os.path is named")
    quantizer = MXFP8Quantizer()
    object.__setattr__(quantizer, "two_dimensional", dist.ProcessGroup(dist.HashStore(), 0, 1))
    refused(lambda: text_of(quantizer), "two_dimensional is a ProcessGroup, live state", error=TypeError)


# --- what is refused -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "annotation",
    [Quantizer | Tensor, QuantizedStorage | int, Float8Quantizer | None, list[QuantizedTensor], dict[str, Quantizer]],
    ids=str,
)
def test_unknown_annotations_are_refused_at_registration_by_name(annotation: Any, own_registry: None) -> None:
    def implementation(x: Tensor, held: Any) -> Tensor: ...

    implementation.__annotations__["held"] = annotation
    with pytest.raises(TypeError, match=r"implementation\.held is annotated .*; an operation takes tensors"):
        operation("test_refused", lambda: None)(implementation)
    assert "test_refused" not in registered()


WRONG = {
    "None where a tensor is described": lambda x, q: (None, x + 1),
    "another quantizer": lambda x, q: (Float8CurrentScalingQuantizer().quantize(x), x + 1),
    "a storage": lambda x, q: (q.quantize(x).to_storage(), x + 1),
    "another object": lambda x, q: (q.quantize(x), x.clone()),
    "too few": lambda x, q: (q.quantize(x),),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_an_implementation_that_is_not_as_described_is_found(wrong: str, own_registry: None) -> None:
    @operation(f"test_{wrong.replace(' ', '_')}", lambda x, q: (quantized_like(x, q, as_tensor=True), Alias("x")))
    def op(x: Tensor, q: Quantizer) -> tuple[QuantizedTensor, Tensor]:
        return WRONG[wrong](x, q)

    with pytest.raises(RuntimeError, match=r"an operation returned .* described"):
        caller(op)(torch.randn(4, 32), MXFP8Quantizer())


def test_more_tensors_than_places_are_found(own_registry: None) -> None:
    @operation("test_places", lambda x, q: quantized_like(x, q), places=1)
    def op(x: Tensor, q: Live) -> QuantizedStorage:
        return q.quantize(x).to_storage()

    with pytest.raises(RuntimeError, match="returned 4 tensors; register it with places=4"):
        caller(op)(torch.randn(4, 32), MXFP8Quantizer())


def test_raw_bytes_of_rows_reach_the_operation() -> None:
    """m_splits travels with the fields."""
    rows = GroupedRows.quantize_rows(torch.randn(40, 32), torch.tensor([7, 0, 26]), MXFP8Quantizer())
    parameter = registered()["test_fill_cache"].parameters[0]
    given = parameter.leaves(rows.to_storage())
    again = parameter.of_leaves(given)
    assert isinstance(again, GroupedTensorStorage) and torch.equal(again.m_splits, rows.m_splits)
    assert all(torch.equal(raw(a), raw(b)) for a, b in zip(tensors(again.flatten()[0]), given[0], strict=True))
