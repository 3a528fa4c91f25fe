"""The registry: schemas derived from annotations, arguments flat and back, gradients, and what is refused."""

import dataclasses
import enum
import importlib
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from te_models.kernels import launch
from te_models.kernels.custom_op import (
    Alias,
    Encoded,
    Kind,
    Output,
    absent,
    add_kind,
    caller,
    differentiable,
    flatten,
    like,
    operation,
    register_gradient,
    registered,
    registration,
)
from te_models.kernels.custom_op import schema as kinds
from te_models.kernels.grouped_gemm import grouped_gemm
from te_models.layers import MXFP8Quantizer
from tests.compare import Operations, refused

_OURS = registered()


@pytest.fixture(autouse=True)
def own_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the operations and types of these tests out of the list of ours."""
    monkeypatch.setattr(registration, "_REGISTERED", {})
    monkeypatch.setattr(kinds, "_FINDERS", list(kinds._FINDERS))


class Mode(enum.Enum):
    ADD = 1
    MULTIPLY = 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    factor: float = 1.0
    mode: Mode = Mode.ADD
    kind: Literal["up", "down"] = "up"


class Pair(NamedTuple):
    """Tensors between constants, and an object in an object."""

    block: tuple[int, int] | None
    data: Tensor
    options: Options
    scale: Tensor | None = None


def schema_of(op) -> str:
    return str(op._opoverload._schema)


def test_objects_become_their_fields_and_objects_again() -> None:
    seen: list[tuple[Pair, Pair, Options]] = []

    @operation("test_objects", lambda left, right: like(left.data, (left.data.shape[0], right.data.shape[0])))
    def op(left: Pair, right: Pair, options: Options, sizes: tuple[int, ...], flag: bool = True) -> Tensor:
        seen.append((left, right, options))
        return left.data @ right.data.t() * len(sizes) * flag

    pairs = [
        f"Tensor {s}_data, Tensor? {s}_scale, SymInt[] {s}_block, float {s}_options_factor, " for s in ("left", "right")
    ]
    rest = [f"str {s}_options_mode, str {s}_options_kind, " for s in ("left", "right")]
    own = "float factor, str mode, str kind, SymInt[] sizes, bool flag"
    assert schema_of(op) == f"te_models::test_objects({pairs[0]}{rest[0]}{pairs[1]}{rest[1]}{own}=True) -> Tensor"

    left = Pair(None, torch.ones(3, 4), Options(factor=2.0, mode=Mode.MULTIPLY), torch.ones(3))
    right = Pair((1, 32), torch.ones(5, 4), Options(kind="down"))
    y = op(*flatten(left), *flatten(right), *flatten(Options()), [1, 2])
    assert torch.equal(y, torch.full((3, 5), 8.0))
    assert seen[0][0]._replace(data=None, scale=None) == left._replace(data=None, scale=None)
    assert seen[0][1]._replace(data=None) == right._replace(data=None) and seen[0][2] == Options()


def test_a_compiled_function_flattens_objects_without_a_break() -> None:
    @operation("test_compiled", lambda pair: like(pair.data))
    def op(pair: Pair) -> Tensor:
        return pair.data * pair.options.factor

    def function(x: Tensor, options: Options) -> Tensor:
        return op(*flatten(Pair((1, 2), x + 1, options))) * 2

    torch._dynamo.reset()
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager", dynamic=True)
    for rows in (3, 7, 12):
        x = torch.randn(rows, 4)
        assert torch.equal(compiled(x, Options(factor=3.0)), function(x, Options(factor=3.0)))


def test_one_function_is_the_operation_or_elsewhere_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    def reference(x: Tensor, block: tuple[int, int], *, factor: float = 2.0) -> Tensor:
        return x * factor + block[0]

    @operation("test_reference", lambda x: like(x), reference=reference)
    def function(x: Tensor, block: tuple[int, int], *, factor: float = 2.0) -> Tensor:
        assert block == (1, 32)
        return x * factor

    schema = "te_models::test_reference(Tensor x, SymInt[] block, float factor) -> Tensor"
    assert schema_of(registered()["test_reference"].op) == schema
    for device, added in (("cpu", 1), ("cuda", 0)):
        monkeypatch.setattr(launch, "as_accelerator", device == "cuda")
        torch._dynamo.reset()
        for call in (function, torch.compile(function, fullgraph=True, backend="aot_eager")):
            assert torch.equal(call(torch.ones(2), (1, 32)), torch.full((2,), 2.0 + added))
            assert torch.equal(call(torch.ones(2), block=(1, 32), factor=3.0), torch.full((2,), 3.0 + added))
    refused(lambda: function(torch.ones(2)), "test_reference takes x, block, factor; it was given x", error=TypeError)


def test_a_process_group_goes_by_its_name() -> None:
    @operation("test_group", lambda x: like(x))
    def op(x: Tensor, group: dist.ProcessGroup) -> Tensor:
        return x * group.size()

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        group = dist.group.WORLD
        assert torch.equal(op(torch.ones(2), group.group_name), torch.ones(2))
    finally:
        dist.destroy_process_group()


def test_gradients_by_name() -> None:
    kept: list[SimpleNamespace] = []

    @operation("test_gradient", lambda x, weight: (like(x), absent(x), like(x)))
    def op(x: Tensor, weight: Tensor, bias: Tensor | None, power: int = 1) -> tuple[Tensor, Tensor, Tensor]:
        return x * weight, x.new_empty(0), x * 2

    @register_gradient(op, saves=("weight", "bias.dtype", "power"), saves_results=(2,), constant=(1, 2))
    def _(saved: SimpleNamespace, needs: set[str], dy: Tensor) -> dict[str, Tensor]:
        kept.append(saved)
        return {"x": dy * saved.weight} | ({"weight": dy * saved.results[0] / 2} if "weight" in needs else {})

    x, weight = torch.tensor([1.0, 2.0], requires_grad=True), torch.tensor([3.0, 5.0], requires_grad=True)
    y, nothing, twice = op(x, weight, torch.ones(2, dtype=torch.bfloat16))
    assert y.requires_grad and not nothing.requires_grad and not twice.requires_grad
    y.sum().backward()
    assert torch.equal(x.grad, weight.detach()) and torch.equal(weight.grad, x.detach())
    assert (kept[0].bias_dtype, kept[0].power) == (torch.bfloat16, 1)
    y = op(x, weight.detach(), None, 3)[0]
    assert torch.equal(torch.autograd.grad(y.sum(), x)[0], weight.detach())
    assert (kept[1].bias_dtype, kept[1].power) == (None, 3)


def test_descriptions_that_do_not_fit_are_refused() -> None:
    with pytest.raises(TypeError, match="test_unknown has no parameter z to describe its results by"):

        @operation("test_unknown", lambda z: like(z))
        def _(x: Tensor) -> Tensor: ...

    with pytest.raises(TypeError, match="test_unknown has no parameter y"):

        @operation("test_unknown", lambda: None, mutates=("y",))
        def _(x: Tensor) -> None: ...

    with pytest.raises(TypeError, match=r"f\.x is annotated .*dict.*; an operation takes tensors, numbers"):

        @operation("test_unknown", lambda: None)
        def f(x: dict[str, Tensor]) -> None: ...

    with pytest.raises(TypeError, match=r"f\.x: a parameter of an operation has a name, and an annotation"):

        @operation("test_unknown", lambda: None)
        def f(*x: Tensor) -> None: ...

    with pytest.raises(TypeError, match=r"test_other takes \(x, factor\) and its reference \(x\); both have"):

        @operation("test_other", lambda x: like(x), reference=lambda x: x)
        def f(x: Tensor, factor: float) -> Tensor: ...

    with pytest.raises(TypeError, match="two arguments of the schema have one name: options_factor, options_factor,"):

        @operation("test_unknown", lambda: None)
        def f(options_factor: float, options: Options, other: Options) -> None: ...

    with pytest.raises(TypeError, match="test_unknown writes to arguments, and the compiler has a 'mode' of its own"):

        @operation("test_unknown", lambda: None, mutates=("x",))
        def f(x: Tensor, mode: str) -> None: ...

    with pytest.raises(TypeError, match="Changing is a dataclass that may change"):

        @operation("test_unknown", lambda: None)
        def f(x: Changing) -> None: ...

    @operation("test_known", lambda x: like(x))
    def known(x: Tensor) -> Tensor:
        return x.clone()

    with pytest.raises(TypeError, match="test_known has no argument y to save"):
        register_gradient(known, saves=("y",))(lambda saved, needs, dy: {})
    register_gradient(known)(lambda saved, needs, dy: {"y": dy})
    with pytest.raises(TypeError, match="test_known has no argument y"):
        known(torch.ones(2, requires_grad=True)).sum().backward()
    assert registered().keys() == {"test_known"}


class Interval:
    """A class that the registry does not know by itself."""

    def __init__(self, low: Tensor, high: Tensor | None, unit: complex) -> None:
        self.low, self.high, self.unit = low, high, unit


def know_intervals() -> None:
    @add_kind
    def _(hint: Any) -> Kind | Encoded | None:
        if hint is complex:
            return Encoded(str, str, complex)
        if hint is not Interval:
            return None
        parts = {"": Tensor, "high": Tensor | None, "unit": complex}
        return Kind(parts, lambda i: (i.low, i.high, i.unit), lambda p: Interval(*p), mutated=("high",))


def test_a_type_that_is_made_known() -> None:
    with pytest.raises(TypeError, match=r"op\.interval is annotated .*Interval.*; an operation takes tensors, numbers"):

        @operation("test_interval", lambda x: like(x))
        def op(x: Tensor, interval: Interval) -> Tensor: ...

    know_intervals()

    @operation("test_interval", lambda x: like(x))
    def op(x: Tensor, interval: Interval) -> Tensor:
        if interval.high is not None:
            interval.high.add_(1)
        return (x + interval.low) * interval.unit.real

    schema = "(Tensor x, Tensor interval, Tensor(a2!)? interval_high, str interval_unit) -> Tensor"
    assert schema_of(op) == f"te_models::test_interval{schema}"

    def run(x: Tensor, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
        return caller(op)(x, Interval(low, high, 3 + 1j)), caller(op)(x, interval=Interval(low, None, 2j))

    x, low, high = torch.ones(2), torch.ones(2), torch.zeros(2)
    for function, count in ((run, 1), (torch.compile(run, fullgraph=True, backend="aot_eager"), 2)):
        first, second = function(x, low, high)
        assert torch.equal(first, torch.full((2,), 6.0)) and torch.equal(second, torch.zeros(2))
        assert torch.equal(high, torch.full((2,), float(count)))


def test_the_type_added_last_is_asked_first() -> None:
    """A frozen dataclass need not be its fields."""

    @add_kind
    def _(hint: Any) -> Encoded | None:
        return Encoded(str, lambda o: o.kind, lambda kind: Options(kind=kind)) if hint is Options else None

    @operation("test_encoded", lambda x: like(x))
    def op(x: Tensor, options: Options) -> Tensor:
        return x * (2 if options == Options(kind="down") else 3)

    assert schema_of(op) == "te_models::test_encoded(Tensor x, str options) -> Tensor"
    assert caller(op)(torch.ones(()), Options(kind="down")) == 2


def test_a_literal_beside_types_that_a_schema_knows() -> None:
    @operation("test_literal", lambda x: like(x))
    def op(x: Tensor, kind: Literal["up", "down"], other: Literal["up"] | None = None) -> Tensor:
        return x * (2 if kind == "up" else 3)

    assert schema_of(op) == "te_models::test_literal(Tensor x, str kind, str? other=None) -> Tensor"
    assert caller(op)(torch.ones(()), "down") == op(torch.ones(()), "down") == 3


@dataclasses.dataclass(frozen=True, kw_only=True)
class MoreOptions(Options):
    limit: float = 7.0


def test_arguments_that_do_not_fit_are_refused() -> None:
    """Each was dropped, or named by what failed on it."""

    @operation("test_arguments", lambda x: like(x))
    def op(x: Tensor, options: Options, quantizer: MXFP8Quantizer | None = None) -> Tensor:
        return x * options.factor

    call, x = caller(op), torch.ones(2)
    assert torch.equal(call(x, options=Options(factor=2.0)), 2 * x)
    takes = "test_arguments takes x, options, quantizer; it was given "
    for arguments, keywords, message in (
        ((x, Options(), None, 1), {}, takes + "x, options, quantizer, argument 4"),
        ((x,), {"option": Options()}, takes + "x, option"),
        ((x, Options()), {"x": x}, takes + "x, options, x"),
        ((), {}, takes + "nothing"),
        ((x, MoreOptions()), {}, "a MoreOptions was passed where an operation takes a Options"),
        ((x, Options(), 3), {}, "a int was passed where an operation takes a quantizer"),
    ):
        with pytest.raises(TypeError, match=re.escape(message)):
            call(*arguments, **keywords)


class Halves(NamedTuple):
    """Results within results, one of them absent."""

    whole: Tensor
    halves: tuple[Tensor, Tensor | None]
    again: Tensor
    same: Tensor


def test_results_that_no_schema_can_say() -> None:
    def results(x: Tensor, both: bool) -> Halves:
        return Halves(like(x), (like(x), like(x, dtype=torch.float64) if both else None), Alias("x"), Alias(0))

    @operation("test_halves", results)
    def op(x: Tensor, both: bool) -> Halves:
        whole = x + 1
        return Halves(whole, (x / 2, x.double() / 2 if both else None), x, whole)

    assert schema_of(op) == "te_models::test_halves(Tensor x, bool both) -> Tensor[]"
    call = caller(op)
    for function in (call, torch.compile(call, fullgraph=True, backend="aot_eager", dynamic=True)):
        for rows, both in ((3, True), (4, False)):
            x = torch.randn(rows)
            found = function(x, both)
            assert isinstance(found, Halves) and found.again is x and found.same is found.whole
            assert torch.equal(found.whole, x + 1) and torch.equal(found.halves[0], x / 2)
            assert (found.halves[1] is None) is not both
    assert len(op(torch.ones(2), True)) == 3 and len(op(torch.ones(2), False)) == 2


class Product(NamedTuple):
    """y, and what backward needs of x."""

    y: Tensor
    half: Tensor | None


class Factor(NamedTuple):
    value: float


def pair_of_operations() -> tuple[Any, Any]:
    """y = x w, with half of x kept; backward counts its calls."""

    @operation("test_product", lambda x, w, needs: Product(like(x), like(x) if needs[1] else None))
    def forward(x: Tensor, w: Tensor, factor: Factor, needs: list[bool]) -> Product:
        return Product(x * w * factor.value, x / 2 if needs[1] else None)

    def gradients(dy: Tensor, needs: list[bool]) -> tuple[Output | None, ...]:
        return tuple(like(dy) if needed else None for needed in needs)

    @operation("test_product_backward", gradients, mutates=("calls",), places=2)
    def backward(
        dy: Tensor, w: Tensor, half: Tensor | None, factor: Factor, calls: Tensor, twice: bool, needs: list[bool]
    ) -> tuple[Tensor | None, ...]:
        calls += 2 if twice else 1
        dx = dy * w * factor.value if needs[0] else None
        return dx, dy * half * 2 * factor.value if half is not None else None

    return forward, backward


@pytest.mark.parametrize("compiled", [False, True])
def test_two_operations_are_one_differentiable_function(compiled: bool) -> None:
    product = differentiable(*pair_of_operations(), gradients=("x", "w"))

    def function(x: Tensor, w: Tensor, calls: Tensor, factor: float) -> Tensor:
        return product(x=x, w=w, factor=Factor(factor), calls=calls, twice=True)

    run = torch.compile(function, fullgraph=True, backend="aot_eager") if compiled else function
    calls = torch.zeros(())
    for needs_x, needs_w in ((True, True), (True, False), (False, True)):
        x, w = torch.randn(3, requires_grad=needs_x), torch.randn(3, requires_grad=needs_w)
        y = run(x, w, calls, 4.0)
        assert torch.equal(y, x * w * 4)
        # another pass in between has written to what backward writes to: no reason to refuse
        calls.add_(10)
        y.backward(torch.ones(3))
        assert (x.grad is None) is not needs_x and (w.grad is None) is not needs_w
        assert x.grad is None or torch.equal(x.grad, w.detach() * 4)
        assert w.grad is None or torch.equal(w.grad, x.detach() * 4)
    assert calls == 36
    with torch.no_grad():
        assert not run(x, w, calls, 4.0).requires_grad


def test_a_saved_tensor_that_was_changed_is_found() -> None:
    product = differentiable(*pair_of_operations(), gradients=("x", "w"))
    x, w = torch.randn(3, requires_grad=True), torch.randn(3)
    y = product(x=x, w=w, factor=Factor(2.0), calls=torch.zeros(()), twice=False)
    w.add_(1)
    refused(lambda: y.sum().backward(), "modified by an inplace operation", error=RuntimeError)


def test_the_example_of_the_documentation_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = Path(__file__).parents[2] / "docs" / "contributing" / "operation.md"
    blocks = re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    (tmp_path / "documented_operation.py").write_text("\n\n".join(blocks))
    monkeypatch.syspath_prepend(tmp_path)
    example = importlib.import_module("documented_operation")
    schema = "te_models::scaled_product(Tensor values, Tensor scale, bool transposed, Tensor y) -> Tensor"
    assert schema_of(example.scaled_product) == schema
    values, scale, y = torch.randn(4, 3), torch.rand(3), torch.randn(4, 2, requires_grad=True)
    left = example.Scaled(values, scale, True)
    expected = scale[:, None] * (values.t() @ y)
    dy = torch.randn(3, 2)
    for function in (example.apply, torch.compile(example.apply, fullgraph=True, dynamic=True, backend="aot_eager")):
        got = function(left, y)
        torch.testing.assert_close(got, expected)
        wanted = torch.autograd.grad(expected, y, dy, retain_graph=True)
        torch.testing.assert_close(torch.autograd.grad(got, y, dy), wanted)

    quantizer, weight = MXFP8Quantizer(), torch.randn(4, 32)
    stored = quantizer.quantize(weight)
    for store in (example.store, torch.compile(example.store, fullgraph=True, backend="aot_eager")):
        assert store(stored, quantizer) is stored
        assert torch.equal(store(weight, quantizer).dequantize(), stored.dequantize())


@dataclasses.dataclass
class Changing:
    x: int = 0


def test_a_direct_call_goes_past_the_dispatcher_where_nobody_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The results and the errors are the same; modes, autograd and tensor subclasses see the call."""

    from te_models.kernels.custom_op import direct

    monkeypatch.setattr(registration, "_REGISTERED", _OURS)

    call = direct(grouped_gemm)
    a, b, splits = torch.randn(5, 8), torch.randn(2, 3, 8), torch.tensor([2, 3])
    with torch.no_grad():
        with torch.profiler.profile(acc_events=True) as profile:  # or torch 2.11 warns of cycles
            assert torch.equal(call(a, b, splits), grouped_gemm(a, b, splits))
        assert [e.count for e in profile.key_averages() if e.key == "te_models::grouped_gemm"] == [1]
        with Operations() as seen:
            call(a, b, splits)
        assert list(map(str, seen.found)) == ["te_models.grouped_gemm.default"]
        refused(lambda: call(a, b, torch.tensor([3, 3])), "add up to 6")
        assert call(a.to("meta"), b.to("meta"), splits.to("meta")).shape == (5, 3)  # only the CPU's calls are direct
    b.requires_grad_()
    call(a, b, splits).sum().backward()
    assert b.grad is not None
