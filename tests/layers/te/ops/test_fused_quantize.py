"""Quantized data between operations: done where it can be, and without changing a bit."""

from collections.abc import Callable

import pytest
import torch

import te_models.layers as te
from te_models.kernels.quantize import QuantizedOutput
from te_models.layers.quantizer.delayed import DelayedScalingQuantizer
from te_models.layers.te.ops.call import Computed, OperationCall
from tests.layers.te.ops.steps import NAMES, assert_equal, fresh, step

FUSED = {"delayed", "block", "mxfp8"}
"""Recipes whose activations an operation can quantize while it makes them."""


KINDS: dict[str, Callable[[], list[te.ops.FusibleOperation]]] = {
    "rms_norm": lambda: [te.ops.RMSNorm(96)],
    "layer_norm": lambda: [te.ops.LayerNorm(96)],
    "gelu": lambda: [te.ops.GELU()],
    "linear_gelu": lambda: [te.ops.Linear(96, 96), te.ops.GELU()],
    "swiglu": lambda: [te.ops.SwiGLU()],
    "clamped_swiglu": lambda: [te.ops.ClampedSwiGLU()],
    "linear_geglu": lambda: [te.ops.Linear(96, 192), te.ops.GEGLU()],
    "scaled_swiglu": lambda: [te.ops.ScaledSwiGLU()],
}


def model_of(kind: str) -> te.ops.Sequential:
    torch.manual_seed(0)
    return te.ops.Sequential(*KINDS[kind](), te.ops.Linear(96, 64))


def inputs_of(kind: str) -> list[torch.Tensor]:
    gated = kind in ("swiglu", "clamped_swiglu", "scaled_swiglu")
    x = torch.randn(3, 11, 192 if gated else 96)
    return [x, torch.rand(3, 11)] if kind == "scaled_swiglu" else [x]


@pytest.fixture
def handovers(monkeypatch) -> list[tuple[int, bool]]:
    """(block, whether a columnwise copy was made) of every output that an operation quantized."""
    seen = []
    define = QuantizedOutput.define

    def spy(self: QuantizedOutput, y: torch.Tensor, scale: torch.Tensor | None) -> list[torch.Tensor]:
        seen.append((self.block, self.columnwise))
        return define(self, y, scale)

    monkeypatch.setattr(QuantizedOutput, "define", spy)
    return seen


@pytest.mark.parametrize("name", NAMES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_a_handover_changes_no_bit(kind: str, name: str | None, handovers: list, monkeypatch) -> None:
    model, inputs = model_of(kind), inputs_of(kind)
    got = step(model, name, inputs)
    assert len(handovers) == (1 if name in FUSED else 0)
    monkeypatch.setattr(te.ops.BasicLinear, "input_quantizer", lambda self, call: None)
    assert_equal(step(model, name, inputs), got)
    assert len(handovers) == (1 if name in FUSED else 0)


@pytest.mark.parametrize("name", NAMES, ids=str)
def test_experts_get_plain_rows(name: str | None, handovers: list, monkeypatch) -> None:
    """A grouped GEMM's rows are quantized group by group, in padded rows of their own: see `handover`."""
    took: list[type] = []
    compute = te.ops.GroupedLinear.op_forward_compute

    def spy(self: te.ops.GroupedLinear, x: torch.Tensor, call: OperationCall) -> Computed:
        took.append(type(x))
        return compute(self, x, call)

    monkeypatch.setattr(te.ops.GroupedLinear, "op_forward_compute", spy)
    model = te.ops.Sequential(te.ops.ScaledSwiGLU(), te.ops.GroupedLinear(3, 96, 64, bias=False))
    step(model, name, [torch.randn(33, 192), torch.rand(33), torch.tensor([20, 0, 13])])
    assert took == [torch.Tensor] and not handovers


def test_what_a_quantizer_can_have_made_for_it() -> None:
    """One scale of the whole result, or its second level, is known only when the last element is."""
    made = {name: te.recipe(name).quantizers("Linear", "").input.output() is not None for name in NAMES[1:]}
    assert made == {"delayed": False, "current": False, "block": True, "mxfp8": True, "nvfp4": False}
    live = DelayedScalingQuantizer().with_state(torch.ones(()), None)
    assert live.output() == QuantizedOutput(columnwise=False)  # its scale is known before


@pytest.mark.parametrize("name", sorted(FUSED))
def test_only_the_copies_that_are_used_are_made(name: str, handovers: list) -> None:
    model, x = model_of("rms_norm"), torch.randn(8, 96)
    with te.autocast(recipe=te.recipe(name)):
        model(x)
        with torch.no_grad():
            model(x)
    block = {"delayed": 0, "block": 128, "mxfp8": 32}[name]
    assert handovers == [(block, block > 0), (block, False)]


@pytest.mark.parametrize(
    "chosen, expected",
    [
        (te.MXFP8BlockScaling(backward_override="high_precision"), 0),
        (te.MXFP8BlockScaling(backward_override="dequantized"), 1),
        (te.Float8BlockScaling(use_f32_scales=True), 1),
    ],
)
def test_backward_overrides_decide(chosen: te.Recipe, expected: int, handovers: list, monkeypatch) -> None:
    model, x = model_of("rms_norm"), torch.randn(40, 96)
    results = []
    for _ in range(2):
        model.zero_grad()
        leaf = x.clone().requires_grad_()
        with te.autocast(recipe=chosen):
            y = model(leaf)
        y.sum().backward()
        results.append([y.detach(), leaf.grad, *(p.grad for p in model.parameters())])
        monkeypatch.setattr(te.ops.BasicLinear, "input_quantizer", lambda self, call: None)
    assert len(handovers) == expected
    assert_equal(results[1], results[0])


def test_statistics_see_the_values_before_quantization(handovers: list) -> None:
    model, x = model_of("rms_norm"), torch.randn(8, 96)
    with te.collect_statistics(), te.autocast(recipe=te.recipe("mxfp8")):
        model(x)
    assert not handovers
    amax = te.ops.Sequential(model[0])(x).abs().max()
    torch.testing.assert_close(model[1].linear.fp8_statistics[0, 0, 0], amax.detach())


def test_torch_autocast_rounds_before_quantization(handovers: list) -> None:
    """The norm's float32 result is rounded to bfloat16 before it is quantized, which no kernel does."""
    model, x = model_of("layer_norm"), torch.randn(8, 96)
    with torch.amp.autocast("cpu", dtype=torch.bfloat16), te.autocast(recipe=te.recipe("mxfp8")):
        y = model(x)
    assert not handovers and y.dtype == torch.bfloat16
    y.float().sum().backward()
    assert model[1].linear.weight.grad.dtype == torch.float32


@pytest.mark.parametrize("name", NAMES[1:])
def test_quantized_inputs_and_outputs(name: str) -> None:
    front = te.ops.Sequential(te.ops.SiLU(), te.ops.Quantize())
    back = te.ops.Sequential(te.ops.Identity(), te.ops.Linear(96, 48))
    whole = te.ops.Sequential(te.ops.SiLU(), te.ops.Linear(96, 48))
    whole[1].load_state_dict(back[1].state_dict())
    x = torch.randn(40, 96)
    with te.autocast(recipe=fresh(name)):
        assert isinstance(front(x), te.QuantizedTensor)
    parameters = [back[1].linear.weight, back[1].bias]
    both = torch.nn.ModuleList([front, back])
    got = step(both, name, [x], run=lambda x: back(front(x)), parameters=parameters)
    assert_equal(step(whole, name, [x]), got)


def test_quantize_does_nothing_without_a_recipe_and_refuses_what_is_no_matrix() -> None:
    x = torch.randn(2, 3, 32)
    assert torch.equal(te.ops.Quantize()(x), x)
    with pytest.raises(ValueError, match="is no matrix"), te.autocast(recipe=te.recipe("mxfp8")):
        te.ops.Quantize()(x)


def test_another_format_is_dequantized_first() -> None:
    model, x = te.ops.Linear(96, 32), torch.randn(8, 96)
    with te.autocast(recipe=te.recipe("block")):
        q = te.ops.Quantize()(x)
    with te.autocast(recipe=te.recipe("mxfp8")):
        assert torch.equal(model(q), model(q.dequantize()))
    assert torch.equal(model(q), model(q.dequantize()))
    assert torch.equal(te.ops.GELU()(q), te.ops.GELU()(q.dequantize()))


@pytest.mark.gpu
@pytest.mark.parametrize("name", NAMES, ids=str)
@pytest.mark.parametrize("kind", ["rms_norm", "layer_norm", "linear_gelu"])
def test_fused_kernels_quantize_to_the_same_bits(kind: str, name: str | None, monkeypatch) -> None:
    model = model_of(kind).to("cuda", torch.bfloat16)
    x = torch.randn(256, 96, device="cuda", dtype=torch.bfloat16)
    got = step(model, name, [x])
    monkeypatch.setattr(te.ops.BasicLinear, "input_quantizer", lambda self, call: None)
    assert_equal(step(model, name, [x]), got)
