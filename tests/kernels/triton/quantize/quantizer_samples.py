"""What every recipe asks of the registered operations: each of its quantizers, for each usage, and layers.

Nothing here says which operation that is: quantizers and layers are called as on a GPU and the operations are noted.
"""

import itertools
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from te_models import layers
from te_models.kernels.custom_op import registered
from te_models.kernels.quantize import QuantizedOutput
from te_models.layers.quantizer import NVFP4Quantizer, Quantizer
from te_models.layers.recipe.base import Format, GemmQuantizers
from tests.kernels.described import Arguments, Calls, with_tensors
from tests.kernels.triton.as_on_a_gpu import gemms_as_on_a_gpu, rows_as_on_a_gpu
from tests.kernels.triton.quantize.quantize_cases import ordinary
from tests.layers.quantizer.examples import EXAMPLES
from tests.patches import Patches

RECIPES: list[layers.Recipe] = [
    layers.DelayedScaling(),
    layers.Float8CurrentScaling(use_power_2_scales=True, amax_epsilon=0.25),
    layers.Float8BlockScaling(),
    layers.Float8BlockScaling(fp8_format=Format.HYBRID, use_f32_scales=True, amax_epsilon=1e-3),
    layers.MXFP8BlockScaling(),
    layers.MXFP8BlockScaling(fp8_format=Format.HYBRID, enable_2d_quantization=True),
    layers.NVFP4BlockScaling(),
    layers.NVFP4BlockScaling(disable_rht=True, disable_stochastic_rounding=True, disable_2d_quantization=True),
    layers.CustomRecipe(qfactory=lambda role: EXAMPLES["hybrid"]),
]
"""Every recipe, with each of its options that a quantizer sees at two values."""

USAGES = [(True, False), (False, True), (True, True)]
BF16 = torch.bfloat16


def quantizers_of(recipe: layers.Recipe) -> GemmQuantizers:
    return recipe.quantizers("Linear", "a")


def all_quantizers() -> list[Quantizer]:
    """Return every quantizer of a recipe in every usage, each value once."""
    of_recipes = map(quantizers_of, RECIPES)
    roles = [quantizer for of in of_recipes for quantizer in (of.input, of.weight, of.grad_output)]
    pairs = itertools.product(roles, USAGES)
    return list(dict.fromkeys(q.with_usage(rowwise=row, columnwise=col) for q, (row, col) in pairs))


def outputs() -> list[QuantizedOutput]:
    """Return what quantizers ask of an operation that quantizes its result."""
    found = (quantizer.output() for quantizer in all_quantizers())
    return list(dict.fromkeys(output for output in found if output is not None))


def by_recipe(device: torch.device) -> Iterator[tuple[str, Arguments]]:
    """Yield the operations of quantizers and of layers, but for calls that another one equals in all but sizes and
    numbers, which operations take as they come."""

    def kind(value: Any) -> Any:
        return (value.dtype, value.dim(), value.is_contiguous()) if isinstance(value, Tensor) else value

    seen = set()
    with as_on_a_gpu(device), Asked() as calls:
        of_quantizers(device)
        of_layers(device)
    for name, arguments in calls.found:
        signature = name, str(tree_map(kind, arguments))
        if signature not in seen:
            seen.add(signature)
            yield name, arguments


def of_quantizers(device: torch.device) -> None:
    """Quantize one matrix, a batch of them and rows in groups, there and back."""
    key, m_splits = torch.tensor([3, 5], device=device), torch.tensor([7, 0, 26], device=device)
    matrices = ordinary((40, 48), BF16).to(device), ordinary((2, 33, 20), torch.float32).to(device)
    for quantizer in all_quantizers():
        for x in matrices:
            fields = quantizer.quantize_fields(x, key)
            quantizer.dequantize_fields(fields, x.dtype, x.shape)
        if not (isinstance(quantizer, NVFP4Quantizer) and quantizer.with_2d_quantization):  # of weights only
            fields = quantizer.quantize_rows(matrices[0], m_splits, key)
            quantizer.dequantize_rows(fields, m_splits, matrices[0].shape, BF16)


LAYERS: dict[str, Callable[..., torch.nn.Module]] = {
    "Linear": partial(layers.Linear, 48, 32, name="a"),
    "LayerNormMLP": partial(layers.LayerNormMLP, 48, 64, activation="swiglu", name="a"),
    "GroupedLinear": partial(layers.GroupedLinear, 2, 48, 32, bias=False, name="a"),
}


def of_layers(device: torch.device) -> None:
    """A step of each layer, with and without the input's gradient, its weights plain, quantized and frozen."""
    m_splits = torch.tensor([5, 30], device=device)
    weights = ("plain", "stored", "frozen")
    for recipe, kind, stored, needs_input in itertools.product(RECIPES, LAYERS, weights, (True, False)):
        with layers.quantized_model_init(enabled=stored == "stored", recipe=recipe):
            layer = LAYERS[kind](params_dtype=BF16, device=device)
        layer.requires_grad_(stored != "frozen")
        x = torch.randn(35, 48, device=device).bfloat16().requires_grad_(needs_input)
        with layers.autocast(recipe=recipe):
            y = layer(x, *((m_splits,) if kind == "GroupedLinear" else ()))
        if y.requires_grad:
            y.backward(torch.randn_like(y))


class Asked(Calls):
    """`Calls` that computes nothing: results are as described, and ones."""

    def answer(self, func: Any, args: Arguments, kwargs: dict) -> Any:
        if func.namespace != "te_models":
            return func(*args, **kwargs)
        return with_tensors(lambda t: t.fill_(1), registered()[func._schema.name.partition("::")[2]].fake(*args))


@contextmanager
def as_on_a_gpu(device: torch.device) -> Iterator[None]:
    """No GPU multiplies everything: that a GEMM would run as emulation is not the matter here."""
    with Patches() as monkeypatch, warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".* runs as emulation", RuntimeWarning)
        if device.type == "cpu":
            gemms_as_on_a_gpu(monkeypatch)
            rows_as_on_a_gpu(monkeypatch)
        yield
