"""What a class of operations must define, and that both forms of a forward pass run."""

import pytest
import torch

from te_models.layers import ops


def method(*args):
    raise NotImplementedError


@pytest.mark.parametrize("base, prefix", [(ops.BasicOperation, "op"), (ops.FusedOperation, "fuser")])
@pytest.mark.parametrize(
    "names", [["_forward_compute"], ["_forward_save_ctx"], ["_forward", "_forward_compute", "_forward_save_ctx"]]
)
def test_half_defined_split_ops_are_refused_at_class_definition(base: type, prefix: str, names: list[str]) -> None:
    with pytest.raises(TypeError, match=rf"Mine defines {prefix}_forward\w* (without|and) {prefix}_forward"):
        type("Mine", (base,), {prefix + name: method for name in names})


@pytest.mark.parametrize("base, prefix", [(ops.BasicOperation, "op"), (ops.FusedOperation, "fuser")])
def test_an_override_in_one_form_does_not_inherit_the_other(base: type, prefix: str) -> None:
    halves = {f"{prefix}_forward_compute": method, f"{prefix}_forward_save_ctx": method}
    split = type("Split", (base,), halves | {f"{prefix}_backward": method})
    whole = type("Whole", (split,), {f"{prefix}_forward": method})
    again = type("Again", (whole,), halves)
    untouched = type("Untouched", (whole,), {})
    assert [c.SPLIT_FORWARD for c in (split, whole, again, untouched)] == [True, False, True, False]


@pytest.mark.parametrize("base, prefix", [(ops.BasicOperation, "op"), (ops.FusedOperation, "fuser")])
def test_the_first_class_in_resolution_order_decides_the_form(base: type, prefix: str) -> None:
    """Also a plain mixin, which is no operation."""
    whole, backward = {f"{prefix}_forward": method}, {f"{prefix}_backward": method}
    halves = {f"{prefix}_forward_compute": method, f"{prefix}_forward_save_ctx": method}
    split = type("Split", (base,), halves | backward)
    whole_mixin, split_mixin, half = type("WholeMixin", (), whole), type("SplitMixin", (), halves), type("Half", (), {})
    setattr(half, f"{prefix}_forward_save_ctx", method)
    over = type("Over", (whole_mixin, split), {})
    back = type("Back", (split_mixin, over), {})
    assert [c.SPLIT_FORWARD for c in (over, back, type("Behind", (split, whole_mixin), {}))] == [False, True, True]
    with pytest.raises(TypeError, match=rf"Half defines {prefix}_forward_save_ctx without {prefix}_forward_compute"):
        type("Mine", (half, split), {})
    with pytest.raises(TypeError, match=rf"Mine defines {prefix}_forward_compute without"):
        type("Mine", (split,), {f"{prefix}_forward_compute": method})


def test_an_operation_without_a_pass_is_refused_at_class_definition() -> None:
    with pytest.raises(TypeError, match="Mine has no forward pass; define op_forward, or op_forward_compute and"):
        type("Mine", (ops.BasicOperation,), {"op_backward": method})
    with pytest.raises(TypeError, match="Mine has no op_backward"):
        type("Mine", (ops.BasicOperation,), {"op_forward": method})
    with pytest.raises(TypeError, match="Mine fuses nothing; define fuser_forward, or"):
        type("Mine", (ops.FusedOperation,), {"matches": method})
    backward_only = type("Mine", (ops.FusedOperation,), {"fuser_backward": method})
    assert (backward_only.FORWARD, backward_only.BACKWARD) == (False, True)


class Cube(ops.BasicOperation):
    """In the form of one method."""

    def op_forward(self, ctx, x, call):
        ctx.save_for_backward(x)
        return ops.Computed(x**3)

    def op_backward(self, ctx, dy, extra_gradients):
        (x,) = ctx.saved
        return ops.Gradients(3 * x**2 * dy)


class SplitCube(ops.BasicOperation):
    """The same in two."""

    saves = 0

    def op_forward_compute(self, x, call):
        return ops.Computed(x**3, (x,))

    def op_forward_save_ctx(self, ctx, x, computed, call):
        self.saves += 1
        ctx.save_for_backward(*computed.saved)

    def op_backward(self, ctx, dy, extra_gradients):
        (x,) = ctx.saved
        return ops.Gradients(3 * x**2 * dy)


@pytest.mark.sentinels("False-Cube", "False-SplitCube", "True-SplitCube")
@pytest.mark.parametrize("kind", [Cube, SplitCube])
@pytest.mark.parametrize("compiled", [False, True])
def test_both_forms_run_and_differentiate(kind: type, compiled: bool) -> None:
    model = ops.Sequential(kind(), ops.ConstantScale(2.0), kind())
    run = torch.compile(model, fullgraph=True, backend="aot_eager") if compiled else model
    x = torch.randn(5, dtype=torch.float64, requires_grad=True)
    run(x).sum().backward()
    torch.testing.assert_close(x.grad, 72 * x.detach() ** 8)


class Tenfold:
    """A mixin that is no operation."""

    def op_forward(self, ctx, x, call):
        return ops.Computed(10 * x)


class TenfoldCube(Tenfold, SplitCube):
    """Its forward pass is the mixin's, not the pair behind it."""


def test_a_forward_pass_from_a_mixin_runs() -> None:
    x = torch.ones(1)
    assert TenfoldCube()(x) == 10 and torch.compile(TenfoldCube(), fullgraph=True, backend="eager")(x) == 10


def test_nothing_is_saved_where_nothing_goes_backward() -> None:
    cube = SplitCube()
    with torch.no_grad():
        cube(torch.ones(2, requires_grad=True))
    cube(torch.ones(2))
    assert cube.saves == 0
    cube(torch.ones(2, requires_grad=True))
    assert cube.saves == 1


def returning(computed=None, gradients=None, **members) -> ops.BasicOperation:
    """An operation that returns what these functions make of x, or dy."""
    passes = {
        "op_forward": lambda self, ctx, x, call: ops.Computed(x) if computed is None else computed(x),
        "op_backward": lambda self, ctx, dy, extra: ops.Gradients(dy) if gradients is None else gradients(dy),
    }
    return type("Mine", (ops.BasicOperation,), passes | members)()


@pytest.mark.parametrize(
    "mine, error, message",
    [
        (returning(lambda x: 2 * x), TypeError, "forward pass of Mine returned a Tensor; allowed: a Computed"),
        (returning(NUM_EXTRA_OUTPUTS=1), ValueError, "returned 0 extra outputs; Mine declares NUM_EXTRA_OUTPUTS = 1"),
        (returning(lambda x: ops.Computed(x, extra_outputs=(x + 1,))), ValueError, "1 extra outputs; Mine declares"),
        (returning(None, lambda dy: 2 * dy), TypeError, "backward pass of Mine returned a Tensor; allowed: a Grad"),
        (returning(None, lambda dy: ops.Gradients(None)), ValueError, "Mine returned no gradient of its input, which"),
        (returning(None, lambda dy: ops.Gradients(dy, (dy,))), ValueError, "gradients of 1 parameters; Mine has 0"),
        (returning(None, lambda dy: ops.Gradients(dy, extra_inputs=(dy,))), ValueError, "1 extra inputs; Mine has 0"),
    ],
)
def test_what_an_operation_returns_is_what_it_declares(mine, error: type, message: str) -> None:
    """An extra output too many was dropped, or passed for that of the next operation."""
    x = torch.ones(3, requires_grad=True)
    for model in (mine, ops.Sequential(ops.GELU(), mine, ops.MakeExtraOutput())):
        with pytest.raises(error, match=message):
            found = model(x)
            (found[0] if isinstance(found, tuple) else found).sum().backward()


class Short(ops.FusedOperation):
    """Two operations in one step, which returns the result of one."""

    @classmethod
    def matches(cls, operations):
        return 2 if [type(o) for o in operations[:2]] == [ops.Identity, ops.Identity] else 0

    def fuser_forward(self, contexts, x, calls):
        return (ops.Computed(x),)


def test_a_fusion_returns_a_result_of_each_operation(monkeypatch) -> None:
    monkeypatch.setattr("te_models.layers.te.ops.fused.FUSIONS", [Short])
    with pytest.raises(ValueError, match="forward pass of Short returned 1 results; allowed: 2"):
        ops.Sequential(ops.Identity(), ops.Identity())(torch.ones(3))
