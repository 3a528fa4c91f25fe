"""Which tensors the GEMMs of a model multiply in a step: x and dy of each layer that recipes apply to.

T rows, K in, N out, G experts.
"""

import contextlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from te_models.checkpoints.mapping.param_shapes import is_expert_stack
from te_models.kernels.permute import permute
from te_models.layers import QuantizedTensor
from te_models.layers.module.model_state import quantized_modules

from ..model import GPTModel
from ..training.data.windows import Batch
from ..training.objective import Objective

_LAYER = re.compile(r"^(.*\blayers\.\d+)\.(.+)$")


@dataclass(frozen=True)
class Unit:
    """A layer with GEMMs, the smallest thing that has a format. group: the decoder layer that it belongs to, by name,
    or itself; kind: its name within that; flops: multiplications per token of its forward GEMM."""

    name: str
    group: str
    kind: str
    flops: float


def units_of(model: GPTModel) -> list[Unit]:
    """Return the layers of a model that recipes apply to, in order."""
    moe, found = model.config.moe, []
    for name, module in quantized_modules(model):
        flops = float(sum(getattr(module, weight).numel() for weight in module.weight_names()))
        if moe is not None and is_expert_stack(f"{name}.weight"):
            flops *= moe.moe_router_topk / moe.num_moe_experts
        parts = _LAYER.match(name)
        found.append(Unit(name, parts[1] if parts else name, parts[2] if parts else name, flops))
    return found


def unit_groups(units: list[Unit]) -> list[str]:
    """Return the names of the groups, each once, in order."""
    return list(dict.fromkeys(unit.group for unit in units))


def evenly(groups: list[str], count: int) -> list[str]:
    """Return `count` of the groups, the first and the last among them, at even distances; all where there are fewer."""
    if count >= len(groups):
        return groups
    places = [round(i * (len(groups) - 1) / max(count - 1, 1)) for i in range(count)]
    return [groups[i] for i in dict.fromkeys(places)]


@dataclass(frozen=True)
class Product:
    """What a layer multiplied in a step. Of a layer of experts the three lists have a matrix for each expert that had
    rows. x: [T, K] each; weight: [N, K]; dy: [T, N]."""

    x: list[Tensor]
    weight: list[Tensor]
    dy: list[Tensor]

    @cached_property
    def exact(self) -> list[dict[str, Tensor]]:
        """The three products of each matrix in float32: y, dx and dw."""
        found = []
        for x, weight, dy in zip(self.x, self.weight, self.dy, strict=True):
            x, weight, dy = x.float(), weight.float(), dy.float()
            found.append({"y": x @ weight.T, "dx": dy @ weight, "dw": dy.T @ x})
        return found


def observe(model: GPTModel, batch: Batch, names: set[str], dtype: torch.dtype) -> dict[str, Product]:
    """Run a micro-batch forward and backward in high precision and return what each named layer multiplied, in `dtype`.

    Gradients are of the mean loss. A layer that is called several times is seen in its first call.
    """
    inputs: dict[str, tuple[Tensor, Tensor | None]] = {}
    gradients: dict[str, Tensor] = {}
    modules = {name: module for name, module in quantized_modules(model) if name in names}
    with contextlib.ExitStack() as opened:
        opened.enter_context(_gradients_of_inputs(model))
        for name, module in modules.items():
            opened.callback(
                module.register_forward_hook(_hook(name, inputs, gradients, dtype), with_kwargs=True).remove
            )
        loss, _ = Objective().loss(model, batch, None)
        loss.backward()
    model.zero_grad(set_to_none=True)
    return {
        name: _product(modules[name], *inputs[name], gradients[name], dtype) for name in modules if name in gradients
    }


def _hook(
    name: str, inputs: dict[str, tuple[Tensor, Tensor | None]], gradients: dict[str, Tensor], dtype: torch.dtype
) -> Any:
    def called(module: Any, arguments: tuple[Any, ...], options: dict[str, Any], y: Any) -> None:
        if name in inputs or not isinstance(y, Tensor) or not y.requires_grad:
            return
        with torch.no_grad():
            x, splits = arguments[0], None
            if hasattr(module, "num_gemms"):
                splits, permutation = arguments[1], options.get("permutation")
                x = x if permutation is None else permute(x, permutation)
            elif hasattr(module, "normed"):
                x = module.normed(x)
            inputs[name] = x.detach().reshape(-1, x.shape[-1]).to(dtype, copy=True), splits
        y.register_hook(lambda dy: gradients.__setitem__(name, dy.detach().reshape(-1, dy.shape[-1]).to(dtype)))

    return called


def _product(module: nn.Module, x: Tensor, splits: Tensor | None, dy: Tensor, dtype: torch.dtype) -> Product:
    weights = [_plain(getattr(module, name)).to(dtype) for name in module.weight_names()]  # type: ignore[operator]
    if splits is None:
        return Product([x], weights, [dy])
    each = list(weights[0].unbind(0)) if weights[0].dim() == 3 else weights
    rows = [int(count) for count in splits]
    parts = zip(x[: sum(rows)].split(rows), each, dy[: sum(rows)].split(rows), strict=True)
    used = [part for part in parts if part[0].shape[0]]
    return Product([p[0] for p in used], [p[1] for p in used], [p[2] for p in used])


@contextlib.contextmanager
def _gradients_of_inputs(model: GPTModel) -> Iterator[None]:
    """Let the backward pass compute gradients of activations and leave the gradients of the layers' weights out."""
    before = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    recompute, model.decoder.activation_checkpointing = model.decoder.activation_checkpointing, False
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.startswith("embedding."))
    try:
        yield
    finally:
        model.decoder.activation_checkpointing = recompute
        for parameter, required in before:
            parameter.requires_grad_(required)


def _plain(weight: Tensor) -> Tensor:
    return (weight.dequantize() if isinstance(weight, QuantizedTensor) else weight).detach()
