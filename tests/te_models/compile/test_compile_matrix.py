"""Blocks and models in bfloat16 and under every recipe, with weights stored plain and quantized: one graph, whatever
changes between calls but the recipe's value.

The layers' part of this matrix is tests/layers/module/test_compile_layers.py."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from te_models import DecoderLayer, GPTModel, ModelConfig, MoELayer
from te_models.layers import DotProductAttention, autocast, set_rounding_seed
from te_models.layers.module.model_state import quantized_modules
from te_models.model.build import Build
from tests.build import one_layer, tiny, tiny_moe, token_ids
from tests.layers.matrix_recipes import (
    DEVICES,
    NAMES,
    Training,
    attend_as_compiled,
    build_stored,
    compute_the_loss_as_compiled,
    fresh,
    graphs,
    label,
)

BF16 = torch.bfloat16

KINDS = ("attention", "transformer_layer", "moe_layer", "gpt_dense", "gpt_moe")
MATRIX = [
    pytest.param(*case, id=f"{kind}-{label(name, stored, train)}")
    for kind in KINDS
    for name in NAMES
    for stored in (False, True)
    for train in (False, True)
    for case in [(kind, name, stored, train)]
    if not (stored and (kind == "attention" or name is None))
]


@pytest.fixture(autouse=True)
def as_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    compute_the_loss_as_compiled(monkeypatch)
    attend_as_compiled(monkeypatch)


class Attention(nn.Module):
    """The attention layer on queries, keys and values that are parts of its input."""

    def __init__(self) -> None:
        super().__init__()
        self.core = DotProductAttention(4, 16, 2, qkv_format="bshd")

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = x.split([64, 32, 32], dim=-1)
        return self.core(*(t.unflatten(-1, (-1, 16)) for t in (q, k, v)))


def config(moe: bool) -> ModelConfig:
    return one_layer(tiny_moe(aux_loss_coeff=0.01, z_loss_coeff=0.001) if moe else tiny(), hidden_size=64)


def build(kind: str) -> nn.Module:
    torch.manual_seed(0)
    options = Build(params_dtype=BF16)
    return {
        "attention": Attention,
        "transformer_layer": lambda: DecoderLayer(config(False), build=options),
        "moe_layer": lambda: MoELayer(config(True), build=options),
        "gpt_dense": lambda: GPTModel(config(False), params_dtype=BF16),
        "gpt_moe": lambda: GPTModel(config(True), params_dtype=BF16),
    }[kind]()


def call(kind: str, run: Callable, tokens: int, seed: int, device: str) -> tuple[Tensor, Tensor | None]:
    """Return the output, and the input where it has a gradient."""
    if kind.startswith("gpt"):
        ids = token_ids(2, tokens, seed=seed).to(device)
        return run(ids, labels=ids, return_logits=False).loss, None
    x = torch.randn(2, tokens, 128 if kind == "attention" else 64, generator=torch.Generator().manual_seed(seed))
    x = x.to(device, BF16).requires_grad_(torch.is_grad_enabled())
    y = run(x)
    return (y if kind == "attention" else y[0]), x


def step(
    kind: str, module: nn.Module, run: Callable, name: str | None, tokens: int, train: bool, device: str
) -> list[Tensor]:
    """Return output and gradients of a call under a new but equal recipe, from equal live state."""
    module.zero_grad()
    set_rounding_seed(module, 1)
    for _, layer in quantized_modules(module):
        layer.fp8_scale = torch.full_like(layer.fp8_scale, 4.0)
        layer.fp8_grad_amax.zero_()
    with torch.set_grad_enabled(train), autocast(enabled=name is not None, recipe=fresh(name)):
        y, x = call(kind, run, tokens, tokens, device)
    if not train:
        return [y]
    slope = torch.linspace(-1, 1, y.numel(), device=y.device).view(y.shape).to(y.dtype) if y.dim() else None
    y.backward(slope)
    return [y.detach(), *([] if x is None else [x.grad]), *(p.grad for p in module.parameters())]


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("kind", "name", "stored", "train"), MATRIX)
def test_one_graph_whatever_changes(kind: str, name: str | None, stored: bool, train: bool, device: str) -> None:
    """Lengths, data, routing, weights, learning rate, weights of the router losses, recipe objects; and, with one graph
    more, training and evaluation in turns. The traced program computes the same bits: what is compared here is the
    graph; what Inductor makes of it is compared in test_compile_models."""
    module = (build_stored(lambda: build(kind), name) if stored else build(kind)).to(device)
    compiled = torch.compile(module, fullgraph=True, dynamic=True, backend="aot_eager")
    training = Training(module) if kind != "attention" else None  # which has no parameters

    def compare(tokens: int, train: bool) -> int:
        eager, got = (step(kind, module, run, name, tokens, train, device) for run in (module, compiled))
        torch.testing.assert_close(got, eager, rtol=0, atol=0)
        return graphs()

    module.train(train)
    seen = []
    for index, tokens in enumerate((20, 17, 31)):
        if kind == "gpt_moe":
            module.set_aux_loss_coeff(0.01 * (index + 1))
            module.set_z_loss_coeff(0.001 * (index + 1))
            with torch.no_grad():  # other experts for the same tokens
                module.decoder.layers[0].mlp.router.weight.mul_(-1)
        seen.append(compare(tokens, train))
        if train and training is not None:
            training.step(index)
    for mode in (False, True, False) if train else ():
        module.train(mode)
        seen.append(compare(23, mode))
    assert seen == ([1, 1, 1, 2, 2, 2] if train else [1, 1, 1])
