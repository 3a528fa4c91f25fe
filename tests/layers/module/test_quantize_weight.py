"""On an accelerator a weight is quantized once per pass, for fprop and for dgrad: with the bits of doing it twice."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from te_models.kernels import quantize as q
from te_models.layers import GroupedLinear, LayerNormMLP, Linear, autocast, ops, recipe
from te_models.layers.gemm import product as gemm_operand
from te_models.layers.gemm import three_gemms
from tests.layers.te.ops.steps import NAMES, assert_equal, step

SPLITS = [5, 0, 30]
MODULES: dict[str, Any] = {
    "linear": lambda: Linear(96, 64),
    "mlp": lambda: LayerNormMLP(96, 64),
    "grouped": lambda: GroupedLinear(3, 96, 64, bias=True),
    "per_gemm": lambda: GroupedLinear(3, 96, 64, bias=False, single_grouped_weight=False),
    "operations": lambda: ops.Sequential(ops.Linear(96, 64), ops.GELU(), ops.Linear(64, 32)),
    "grouped_operations": lambda: ops.Sequential(
        ops.GroupedLinear(3, 96, 64, bias=False), ops.GELU(), ops.GroupedLinear(3, 64, 32, bias=False)
    ),
}
QUANTIZING = [n for n in dir(q) if n.startswith("quantize_") and "dequantize" not in n] + ["round_blockwise"]


def run_of(kind: str, module: nn.Module) -> Any:
    if kind == "grouped_operations":
        return lambda x: module(x, torch.tensor(SPLITS), torch.tensor(SPLITS))
    return lambda x: module(x, torch.tensor(SPLITS)) if isinstance(module, GroupedLinear) else module(x)


@pytest.fixture
def shapes(monkeypatch: pytest.MonkeyPatch, definitions: None) -> list[tuple[int, ...]]:
    """As on an accelerator; the shapes of everything that is quantized."""
    monkeypatch.setattr(gemm_operand, "_DEQUANTIZING_DEVICES", ())
    seen: list[tuple[int, ...]] = []

    def recording(function: Any) -> Any:
        return lambda x, *rest, **options: (seen.append(tuple(x.shape)), function(x, *rest, **options))[1]

    for name in QUANTIZING:
        monkeypatch.setattr(q, name, recording(getattr(q, name)))
    return seen


@pytest.mark.filterwarnings("ignore:.* runs as emulation:RuntimeWarning")  # NVFP4, which nothing multiplies here
@pytest.mark.parametrize("name", NAMES[1:])
@pytest.mark.parametrize("kind", MODULES)
def test_no_bit_changes(kind: str, name: str, shapes: list, monkeypatch: pytest.MonkeyPatch) -> None:
    module, x = MODULES[kind](), torch.randn(35, 96)
    weights = {"grouped": [(3, 64, 96)], "per_gemm": [(3, 64, 96)], "grouped_operations": [(3, 64, 96), (3, 32, 64)]}
    weight_shapes = weights.get(kind) or [tuple(p.shape) for p in module.parameters() if p.dim() == 2]
    got = step(module, name, [x], run=run_of(kind, module))
    if name != "nvfp4":  # which makes the two copies by two calls
        assert [shapes.count(shape) for shape in weight_shapes] == [1] * len(weight_shapes)
    shapes.clear()

    def twice(weight: Tensor, scaling: Any, dtype: torch.dtype, *rest: Any) -> Any:
        quantizer = scaling.for_weight(records=True)
        operand = gemm_operand.quantized_operand(quantizer, weight, "rowwise", dtype)
        return three_gemms.EncodedTensor(operand, three_gemms.NOTHING, ())

    monkeypatch.setattr(three_gemms, "encode_weight", twice)
    assert_equal(step(module, name, [x], run=run_of(kind, module)), got)
    if name != "nvfp4":
        assert [shapes.count(shape) for shape in weight_shapes] == [2] * len(weight_shapes)


@pytest.mark.parametrize("kind", ["linear", "grouped"])
def test_no_weight_is_saved_without_need(kind: str, shapes: list, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not under no_grad, for an input without a gradient, for a backward pass in high precision, or on CPU."""
    needed = []
    original = three_gemms.encode_weight

    def spy(*arguments: Any) -> Any:
        found = original(*arguments)
        needed.append(bool(found.tensors))
        return found

    monkeypatch.setattr(three_gemms, "encode_weight", spy)
    module, x = MODULES[kind](), torch.randn(35, 96)
    run = run_of(kind, module)
    with autocast(recipe=recipe("mxfp8")):
        run(x)
        with torch.no_grad():
            run(x.requires_grad_())
        assert needed == [False, False]
        run(x)
        assert needed == [False, False, True]
    with autocast(recipe=recipe("mxfp8", backward_override="high_precision")):
        run(x)
    monkeypatch.setattr(gemm_operand, "_DEQUANTIZING_DEVICES", ("cpu",))
    with autocast(recipe=recipe("mxfp8")):
        run(x)
    assert needed == [False, False, True, False, False]
