"""A linear layer, forward and backward, under FP8 recipes: against bf16 and, where installed, torchao; all compiled."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from te_models import layers

from .case import Case, Run, installed, near
from .shapes import Shapes

RECIPES = {
    "current": layers.Float8CurrentScaling(),
    "block": layers.Float8BlockScaling(),
    "MXFP8": layers.MXFP8BlockScaling(),
}
TORCHAO = ("tensorwise", "rowwise")
# E4M3 has a unit of 2^-4 and E5M2, which HYBRID gives gradients, of 2^-3
LIMIT = 0.12


def cases(device: torch.device, shapes: Shapes) -> Iterator[Callable[[], Case]]:
    """Yield what builds each case."""
    for shape in shapes.linear:
        yield lambda s=shape: _case(device, *s)


def _case(device: torch.device, tokens: int, inner: int, outer: int) -> Case:
    x = torch.randn(tokens, inner, device=device).bfloat16().requires_grad_()
    dy = torch.randn(tokens, outer, device=device).bfloat16()
    plain = nn.Linear(inner, outer, bias=False, dtype=torch.bfloat16, device=device)
    weight = plain.weight.detach()

    def step(module: Callable[[Tensor], Tensor], parameter: Tensor) -> Run:
        return lambda: torch.autograd.grad(module(x), (x, parameter), dy)

    sides = {"bf16": step(plain, plain.weight)}
    for name, recipe in RECIPES.items():
        module = layers.Linear(inner, outer, bias=False, params_dtype=torch.bfloat16, device=device)
        with torch.no_grad():
            module.weight.copy_(weight)
        sides[name] = step(_under(recipe, torch.compile(module, fullgraph=True)), module.weight)
    missing = {}
    for name in TORCHAO:
        if installed("torchao") is None:
            missing[f"torchao {name}"] = "torchao is not installed"
        else:
            module = _torchao(plain, name)
            sides[f"torchao {name}"] = step(torch.compile(module), next(module.parameters()))
    return Case(
        f"linear forward + backward, {tokens} tokens, {inner} to {outer}",
        sides,
        lambda results: near(results, "bf16", dict.fromkeys(results, LIMIT)),
        flops=6.0 * tokens * inner * outer,
        over={name: ("bf16",) for name in sides if name != "bf16"},
        missing=missing,
    )


def _under(recipe: layers.Recipe, module: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    def run(x: Tensor) -> Tensor:
        with layers.autocast(recipe=recipe):
            return module(x)

    return run


def _torchao(plain: nn.Linear, recipe: str) -> nn.Module:
    """Return a copy of a linear layer that torchao trains in FP8."""
    from torchao.float8 import (  # pyright: ignore[reportMissingImports]
        Float8LinearConfig,
        convert_to_float8_training,
    )

    module = nn.Sequential(nn.Linear(plain.in_features, plain.out_features, bias=False).to(plain.weight))
    module.load_state_dict({"0.weight": plain.weight.detach()})
    return convert_to_float8_training(module, config=Float8LinearConfig.from_recipe_name(recipe))
