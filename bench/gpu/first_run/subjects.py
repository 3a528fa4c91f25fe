"""Modules and models of one step each: what parts 4, 5 and 8 run, on any device, with the same weights and inputs."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from bench.recipes import named
from te_models import AttentionConfig, GPTModel, MLPConfig, ModelConfig, MoEConfig, layers
from te_models.layers import ops

from .worker import WrongError

BF16 = torch.bfloat16
RECIPES = ("bf16", "current", "mxfp8", "block", "delayed", "nvfp4", "custom")
Named = dict[str, Tensor]
Run = Callable[..., Any]
ROUNDING = 2.0**-7
"""Two sides that round each result to bfloat16 once, and sum in float32 in different orders."""


class Subject:
    """A module, on a CPU, and the inputs of its step. small: for the interpreter."""

    def __init__(self, kind: str, *, small: bool) -> None:
        torch.manual_seed(0)
        self.kind = kind
        self.module, self.inputs = KINDS[kind](64 if small else 256, 32 if small else 160)
        layers.set_rounding_seed(self.module, 3)  # the same random bits on every device
        layers.name_modules(self.module)

    def on(self, device: torch.device) -> tuple[nn.Module, tuple[Tensor, ...]]:
        """Return a copy of the module and the inputs, on a device."""
        inputs = tuple(t.to(device).requires_grad_(t.is_floating_point()) for t in self.inputs)
        return copy.deepcopy(self.module).to(device), inputs

    def moved(self, results: Callable[[nn.Module], Named], want: Named) -> dict[str, float]:
        """Return how far results move, relatively, with weights that are a rounding off."""
        return {} if self.kind in DIRECT else distances(results(self.nudged()), want)

    def nudged(self) -> nn.Module:
        """Return a copy on the CPU, every parameter of which is off by at most a rounding to bfloat16."""
        module, generator = copy.deepcopy(self.module), torch.Generator().manual_seed(1)
        with torch.no_grad():
            for p in module.parameters():
                p.copy_(p.float() * (1 + 2.0**-7 * (torch.rand(p.shape, generator=generator) - 0.5)))
        return module


def step(module: nn.Module, inputs: tuple[Tensor, ...], recipe: str, run: Run | None = None) -> Named:
    """Return the results of a forward and a backward pass, by name. run: what to call for the module."""
    for t in (*inputs, *module.parameters()):
        t.grad = None
    with layers.autocast(enabled=recipe != "bf16", recipe=named(recipe)):
        found = (module if run is None else run)(*inputs)
    y = found.logits if hasattr(found, "logits") else found
    y = y[0] if isinstance(y, tuple) else y
    dy = torch.linspace(-1, 1, y.numel(), device=y.device).view(y.shape).to(y.dtype)
    y.backward(dy)
    results = {"y": y.detach()} | {f"dx{at}": t.grad for at, t in enumerate(inputs) if t.grad is not None}
    return results | {f"d {name}": p.grad for name, p in module.named_parameters() if p.grad is not None}


def distances(found: Named, want: Named) -> dict[str, float]:
    """Return |found - want| / |want|, Frobenius, of every tensor."""
    if found.keys() != want.keys():
        raise WrongError(f"the tensors are {', '.join(found)} and should be {', '.join(want)}")
    exact = {name: (found[name].cpu().double(), want[name].cpu().double()) for name in want}
    return {name: float((one - other).norm() / (other.norm() + 1e-30)) for name, (one, other) in exact.items()}


def compare(found: Named, want: Named, moved: dict[str, float], times: float = 2.0) -> dict[str, Any]:
    """Raise WrongError where a tensor is further from what is wanted than two orders of sums explain. moved: how far
    the wanted one moves when the weights move by a rounding, which says how roundings grow on their way through: one
    that makes a number the next one in eight bits is as large as all that eight bits lose. Empty: there is no way."""
    off = distances(found, want)
    allowed = {name: ROUNDING + times * moved.get(name, 0.0) for name in off}
    wrong = [name for name in off if not off[name] <= allowed[name]]
    if wrong:
        worst = sorted(wrong, key=lambda name: off[name] / allowed[name], reverse=True)[:5]
        words = (f"{name} is {off[name]:.3g} off, relatively; allowed: {allowed[name]:.3g}" for name in worst)
        raise WrongError(f"{len(wrong)} of {len(off)} tensors: {'; '.join(words)}")
    return {"worst": max(off.values()), "worst_of_allowed": max(off[name] / allowed[name] for name in off)}


def pairs(kinds: tuple[str, ...], small: bool, few: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    """Yield (kind, recipe), all kinds under a recipe before the next one. small: every recipe of the first kind, and
    `few` of the others."""
    for recipe in RECIPES:
        for kind in kinds:
            asked = kind == kinds[0] or recipe in few or not small
            if asked and (kind not in WITHOUT_GEMMS or recipe == "bf16"):
                yield kind, recipe


def _rows(hidden: int, tokens: int) -> tuple[Tensor, ...]:
    return (torch.randn(tokens, hidden).to(BF16),)


def _sequence(hidden: int, tokens: int) -> tuple[Tensor, ...]:
    return (torch.randn(tokens // 2, 2, hidden).to(BF16),)


def _grouped(hidden: int, tokens: int) -> tuple[nn.Module, tuple[Tensor, ...]]:
    splits = torch.tensor([tokens // 2, 0, tokens // 4, tokens // 8])
    return layers.GroupedLinear(4, hidden, 3 * hidden // 4, bias=False, params_dtype=BF16), (
        *_rows(hidden, tokens),
        splits,
    )


def _operations(hidden: int, tokens: int) -> tuple[nn.Module, tuple[Tensor, ...]]:
    made = (ops.RMSNorm(hidden, dtype=BF16), ops.Linear(hidden, 2 * hidden, dtype=BF16), ops.SwiGLU())
    return ops.Sequential(*made, ops.Linear(hidden, hidden, dtype=BF16)), _rows(hidden, tokens)


def _model(moe: bool, hidden: int, tokens: int) -> tuple[nn.Module, tuple[Tensor, ...]]:
    config = ModelConfig(
        vocab_size=512,
        hidden_size=hidden,
        num_layers=1 if hidden < 128 else 2,
        max_position_embeddings=tokens,
        attention=AttentionConfig(num_attention_heads=4, num_query_groups=2),
        mlp=MLPConfig(ffn_hidden_size=2 * hidden),
        moe=MoEConfig(num_moe_experts=4, moe_router_topk=2, moe_ffn_hidden_size=hidden) if moe else None,
        init_method_std=hidden**-0.5,
    )
    return GPTModel(config, params_dtype=BF16), (torch.randint(512, (2, tokens // 2)),)


def _made(make: Run, inputs: Run) -> Run:
    return lambda hidden, tokens: (make(hidden), inputs(hidden, tokens))


_OURS: dict[str, Any] = {"params_dtype": BF16}
KINDS: dict[str, Callable[[int, int], tuple[nn.Module, tuple[Tensor, ...]]]] = {
    "Linear": _made(lambda h: layers.Linear(h, 3 * h // 4, **_OURS), _rows),
    "GPT dense": partial(_model, False),
    "GroupedLinear": _grouped,
    "GPT MoE": partial(_model, True),
    "LayerNormMLP": _made(lambda h: layers.LayerNormMLP(h, 2 * h, activation="swiglu", **_OURS), _rows),
    "LayerNormLinear": _made(lambda h: layers.LayerNormLinear(h, h, normalization="RMSNorm", **_OURS), _rows),
    "TransformerLayer": _made(
        lambda h: layers.TransformerLayer(h, 2 * h, 4, hidden_dropout=0.0, attention_dropout=0.0, **_OURS), _sequence
    ),
    "MultiheadAttention": _made(
        lambda h: layers.MultiheadAttention(h, 4, attention_dropout=0.0, input_layernorm=True, **_OURS), _sequence
    ),
    "ops.Sequential": _operations,
    "RMSNorm": _made(lambda h: layers.RMSNorm(h, **_OURS), _rows),
    "LayerNorm": _made(lambda h: layers.LayerNorm(h, **_OURS), _rows),
}
"""Name -> function of the hidden size and the number of tokens that returns a module and the inputs of a step."""
WITHOUT_GEMMS = ("RMSNorm", "LayerNorm")
DIRECT = ("Linear", "GroupedLinear", *WITHOUT_GEMMS)
"""Kinds that round nothing to bfloat16 before they quantize it."""
