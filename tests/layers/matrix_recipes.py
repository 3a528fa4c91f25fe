"""What the compile matrices share: the six recipes, a new but equal object of each, devices, counting and training."""

from collections.abc import Callable
from types import SimpleNamespace

import pytest
from torch import Tensor, nn
from torch._dynamo.utils import counters

from bench.recipes import CUSTOM
from bench.recipes import NAMES as RECIPES
from te_models.kernels.cross_entropy import op as cross_entropy_op
from te_models.kernels.cross_entropy.reference import IGNORE_INDEX
from te_models.kernels.flash_attention import op as flash_attention_op
from te_models.layers import FusedAdamW, Recipe, quantized_model_init, recipe

NAMES = [None, *RECIPES]
"""None: no recipe, bfloat16."""

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def label(name: str | None, stored: bool, train: bool) -> str:
    """The part of a cell's name that both matrices share."""
    return f"{name or 'bf16'}-{'stored' if stored else 'plain'}-{'train' if train else 'forward'}"


def graphs() -> int:
    """How many graphs were compiled so far; none may have a break."""
    assert not counters["graph_break"], dict(counters["graph_break"])
    return counters["stats"]["unique_graphs"]


def compute_the_loss_as_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compute the loss alike: eagerly it is summed a few rows at a time; all else is the same bits eager and traced."""

    def total(logits: Tensor, labels: Tensor) -> Tensor:
        return nn.functional.cross_entropy(logits.float(), labels, ignore_index=IGNORE_INDEX, reduction="sum")

    monkeypatch.setattr(cross_entropy_op, "_WholeLoss", SimpleNamespace(apply=total))


def attend_as_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eagerly on CPU torch attends from few queries, and our kernel from many; a graph for any number has ours."""
    monkeypatch.setattr(flash_attention_op, "FEWEST", dict.fromkeys(flash_attention_op.FEWEST, 1))


class Training:
    """An optimizer whose learning rate is another in every step. It moves the weights between calls, in place."""

    def __init__(self, module: nn.Module) -> None:
        self.optimizer = FusedAdamW(module.parameters(), lr=0.0)

    def step(self, index: int) -> None:
        """Apply the gradients there are."""
        self.optimizer.param_groups[0]["lr"] = 0.02 / (index + 1)
        self.optimizer.step()


def fresh(name: str | None) -> Recipe | None:
    """Return a new object that equals every other of this name; for "custom", whose value is its identity, the one."""
    if name is None or name == "custom":
        return CUSTOM if name else None
    return Recipe.from_json(recipe(name).to_json())


def build_stored(build: Callable[[], nn.Module], name: str) -> nn.Module:
    """Return a module whose weights are stored in the recipe's format."""
    with quantized_model_init(recipe=fresh(name)):
        return build()
