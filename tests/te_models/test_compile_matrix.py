"""Blocks and models under every recipe, with weights stored plain and quantized: one graph, whatever changes between
calls but the recipe's value. The layers' part of this matrix is tests/layers/test_compile_layers.py."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

from te_models import GPTModel, ModelConfig, MoELayer, TransformerLayer
from te_models.layers import DotProductAttention, autocast, set_rounding_seed
from te_models.layers.whole_model import quantized_modules
from tests.layers.matrix_recipes import NAMES, build_stored, fresh
from tests.te_models.configs import one_layer, tiny, tiny_moe, token_ids

KINDS = ("attention", "transformer_layer", "moe_layer", "gpt_dense", "gpt_moe")
FAST = {
    ("transformer_layer", "mxfp8", True, True),
    ("moe_layer", "delayed", False, True),
    ("gpt_moe", "block", True, True),
}
"""(kind, recipe, weights stored quantized, with a backward pass) that run on every change; the rest is slow."""
MATRIX = [
    pytest.param(
        *case,
        marks=() if case in FAST else pytest.mark.slow,
        id=f"{kind}-{name}-{'stored' if stored else 'plain'}-{'train' if train else 'forward'}",
    )
    for kind in KINDS
    for name in NAMES
    for stored in (False, True)
    for train in (False, True)
    for case in [(kind, name, stored, train)]
    if not (stored and (kind == "attention" or name is None))
]


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


class Attention(nn.Module):
    """The attention layer on queries, keys and values that are parts of its input."""

    def __init__(self) -> None:
        super().__init__()
        self.core = DotProductAttention(4, 16, 2)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = x.split([64, 32, 32], dim=-1)
        return self.core(*(t.unflatten(-1, (-1, 16)) for t in (q, k, v)))


def config(moe: bool) -> ModelConfig:
    return one_layer(tiny_moe() if moe else tiny(), hidden_size=64)


def build(kind: str) -> nn.Module:
    torch.manual_seed(0)
    return {
        "attention": Attention,
        "transformer_layer": lambda: TransformerLayer(config(False)),
        "moe_layer": lambda: MoELayer(config(True)),
        "gpt_dense": lambda: GPTModel(config(False)),
        "gpt_moe": lambda: GPTModel(config(True)),
    }[kind]()


def call(kind: str, run: Callable, tokens: int, seed: int) -> tuple[Tensor, Tensor | None]:
    """Return the output, and the input where it has a gradient."""
    if kind.startswith("gpt"):
        ids = token_ids(2, tokens, seed=seed)
        return run(ids, labels=ids, return_logits=False).loss, None
    x = torch.randn(2, tokens, 128 if kind == "attention" else 64, generator=torch.Generator().manual_seed(seed))
    x.requires_grad_(torch.is_grad_enabled())
    y = run(x)
    return (y if kind == "attention" else y[0]), x


def step(kind: str, module: nn.Module, run: Callable, name: str | None, tokens: int, train: bool) -> list[Tensor]:
    """Return output and gradients of a call under a new but equal recipe, from equal live state."""
    module.zero_grad()
    set_rounding_seed(module, 1)
    for _, layer in quantized_modules(module):
        layer.fp8_scale = torch.full_like(layer.fp8_scale, 4.0)
    with torch.set_grad_enabled(train), autocast(enabled=name is not None, recipe=fresh(name)):
        y, x = call(kind, run, tokens, seed=tokens)
    if not train:
        return [y]
    y.backward(torch.linspace(-1, 1, y.numel()).view(y.shape) if y.dim() else None)
    return [y.detach(), *([] if x is None else [x.grad]), *(p.grad for p in module.parameters())]


@pytest.mark.parametrize(("kind", "name", "stored", "train"), MATRIX)
def test_one_graph_whatever_changes(kind: str, name: str | None, stored: bool, train: bool) -> None:
    module = build_stored(lambda: build(kind), name) if stored else build(kind)
    compiled = torch.compile(module, fullgraph=True, dynamic=True, backend="aot_eager")
    for index, tokens in enumerate((20, 17, 31)):
        if kind == "gpt_moe":
            with torch.no_grad():  # other experts for the same tokens
                module.decoder.layers[0].mlp.router.weight.mul_(-1)
        eager, got = (step(kind, module, run, name, tokens, train) for run in (module, compiled))
        for a, b in zip(eager, got, strict=True):
            # sums run in another order, which can move a value to the next number of a short format
            assert (a - b).norm() <= (1e-5 if name is None else 0.05) * a.norm().clamp(min=1e-6), index
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"], dict(counters["graph_break"])
