"""Norm and linear, activation and linear, as one function on an accelerator: the bits of the two apart."""

import dataclasses

import pytest
import torch

import te_models.layers as te
from te_models.kernels.quantize import QuantizedOutput
from te_models.layers.gemm import autograd as dense
from te_models.layers.gemm import product as gemm_operand
from te_models.layers.quantizer import MXFP8Quantizer
from tests.layers.te.ops.steps import NAMES, assert_equal, step

FUSED = {"delayed", "block", "mxfp8"}
"""Recipes whose activations an operation can quantize as its last step."""
MODULES = {
    "layer_norm": lambda: te.LayerNormLinear(96, 64),
    "rms_norm": lambda: te.LayerNormLinear(96, 64, normalization="RMSNorm", zero_centered_gamma=True, bias=False),
    "no_weight": lambda: te.LayerNormLinear(96, 64, normalization="RMSNorm", norm_weight=False),
    "swiglu": lambda: te.LayerNormMLP(96, 64, normalization="RMSNorm", activation="swiglu"),
    "gelu": lambda: te.LayerNormMLP(96, 64),
    "storing": lambda: _storing_in_fp8(te.LayerNormMLP(96, 64, normalization="RMSNorm", activation="swiglu")),
}
OUTPUTS = {"layer_norm": 1, "rms_norm": 1, "no_weight": 1, "swiglu": 2, "gelu": 2, "storing": 2}


def _storing_in_fp8(module: te.LayerNormMLP) -> te.LayerNormMLP:
    module._act = dataclasses.replace(module._act, fp8_input_store=True)
    return module


@pytest.fixture
def fused(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """As on an accelerator; for every output quantized as a last step, whether it has a columnwise copy."""
    monkeypatch.setattr(gemm_operand, "_DEQUANTIZING_DEVICES", ())
    seen = []
    define = QuantizedOutput.define

    def spy(self: QuantizedOutput, y: torch.Tensor, scale: torch.Tensor | None) -> list[torch.Tensor]:
        seen.append(self.columnwise)
        return define(self, y, scale)

    monkeypatch.setattr(QuantizedOutput, "define", spy)
    return seen


def module_of(kind: str) -> torch.nn.Module:
    torch.manual_seed(0)
    return MODULES[kind]()


@pytest.mark.filterwarnings("ignore:.* runs as emulation:RuntimeWarning")  # NVFP4, which nothing multiplies here
@pytest.mark.parametrize("name", NAMES, ids=str)
@pytest.mark.parametrize("kind", MODULES)
def test_no_bit_changes(kind: str, name: str | None, fused: list, monkeypatch: pytest.MonkeyPatch) -> None:
    module, x = module_of(kind), torch.randn(3, 11, 96)
    got = step(module, name, [x])
    amaxes = [module.fp8_amax.clone(), module.fp8_grad_amax.clone()]
    assert len(fused) == (OUTPUTS[kind] if name in FUSED else 0)
    fused.clear()
    monkeypatch.setattr(dense, "input_quantizer", lambda *arguments: None)
    assert_equal(step(module, name, [x]), got)
    assert_equal([module.fp8_amax, module.fp8_grad_amax], amaxes)
    assert not fused


@pytest.mark.parametrize("kind", MODULES)
def test_only_copies_that_are_used_are_made(kind: str, fused: list) -> None:
    module, x = module_of(kind), torch.randn(5, 96)
    with te.autocast(recipe=te.recipe("mxfp8")):
        with torch.no_grad():
            first = module(x)
        assert fused == [False] * OUTPUTS[kind]
        second = module(x)
        assert fused[OUTPUTS[kind] :] == [True] * OUTPUTS[kind]
    assert torch.equal(first, second)


def test_statistics_and_calibration_see_the_values_before_quantization(fused: list) -> None:
    module, x = module_of("swiglu"), torch.randn(32, 96)
    with te.collect_statistics(), te.autocast(recipe=te.recipe("mxfp8")):
        module(x)
    assert not fused and module.fp8_statistics.any()
    with te.autocast(enabled=False, calibrating=True, recipe=te.recipe("delayed")):
        module(x)
    assert not fused and (module.fp8_scale != 1).any()


def test_on_cpu_norm_and_layer_stay_apart(fused: list, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gemm_operand, "_DEQUANTIZING_DEVICES", ("cpu",))
    step(module_of("gelu"), "mxfp8", [torch.randn(5, 96)])
    assert not fused


@pytest.mark.sentinels("swiglu-current-False")
@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("name", ["delayed", "current", "block", "mxfp8"])
@pytest.mark.parametrize("kind", ["layer_norm", "swiglu", "operations", "linear"])
def test_the_compiler_traces_the_path_of_an_accelerator(kind: str, name: str, grad: bool, fused: list) -> None:
    """In one graph, which makes no quantizers. Traced only: Inductor's C++ backend is not what an accelerator runs."""
    others = {"linear": lambda: te.Linear(96, 64)}
    others |= {"operations": lambda: te.ops.Sequential(te.ops.RMSNorm(96), te.ops.Linear(96, 64))}
    module, x = (MODULES | others)[kind](), torch.randn(32, 96)
    with torch.set_grad_enabled(grad), te.autocast(recipe=te.recipe(name)):
        compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
        expected, found = module(x), compiled(x)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    if grad:
        gradients = []
        for y in (expected, found):
            module.zero_grad()
            y.sum().backward()
            gradients.append([p.grad for p in module.parameters()])
        assert_equal(*gradients)


@pytest.mark.parametrize("frozen", ["weight", "layer_norm"])
def test_frozen_parameters(frozen: str, fused: list, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients of what wants them only."""
    module, x = module_of("layer_norm"), torch.randn(7, 96)
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(not name.startswith(frozen))
    got = step(module, "mxfp8", [x])
    assert fused == [frozen != "weight"]
    assert all((p.grad is None) == name.startswith(frozen) for name, p in module.named_parameters())
    monkeypatch.setattr(dense, "input_quantizer", lambda *arguments: None)
    assert_equal(step(module, "mxfp8", [x]), got)


@pytest.mark.parametrize("kind", ["linear", *MODULES])
def test_without_gradients_no_backward_copy_is_made(kind: str, fused: list, monkeypatch: pytest.MonkeyPatch) -> None:
    """A weight that wants a gradient says so under no_grad, too."""
    asked = []
    quantize_fields = MXFP8Quantizer.quantize_fields

    def spy(self: MXFP8Quantizer, x: torch.Tensor, *arguments: object) -> dict[str, torch.Tensor]:
        asked.append(self)
        return quantize_fields(self, x, *arguments)

    monkeypatch.setattr(MXFP8Quantizer, "quantize_fields", spy)
    module = te.Linear(96, 64) if kind == "linear" else module_of(kind)
    with torch.no_grad(), te.autocast(recipe=te.MXFP8BlockScaling()):
        module(torch.randn(5, 96))
    assert not asked and not any(fused)
