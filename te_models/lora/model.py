"""Adapters over the layers of a model: `add_lora`, the state that is trained, `merge_lora`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from fnmatch import fnmatchcase
from functools import partial
from itertools import chain

import torch
from torch import Tensor, nn

from ..model import GPTModel
from .adapter import ADAPTERS, Adapter
from .layers import LAYERS, check_layer, check_model

ALL_LINEAR = "all-linear"
_BASE = ".base_layer."


def matches(name: str, target: str) -> bool:
    """Whether a target means the layer of this name: a glob of the name or of its last words."""
    return fnmatchcase(name, target) or fnmatchcase(name, f"*.{target}")


def add_lora(
    model: nn.Module,
    rank: int,
    *,
    alpha: float = 16.0,
    targets: Sequence[str] = (ALL_LINEAR,),
    dropout: float = 0.0,
    use_dora: bool = False,
) -> None:
    """Put an adapter over layers of a model, and freeze everything else.

    rank: r of A [r, in] and B [out, r]; alpha: alpha / rank multiplies what adapters add; dropout: the part of their
    input that is dropped in training; use_dora: train the length of each row of a weight, too. targets: globs of layer
    names, or of their last words ("linear_qkv", "decoder.layers.0.*"); "all-linear" means every GEMM layer, experts
    included, and neither routers, embedding nor output layer. A are drawn from torch's generator, B begin as zero.

    Raises ValueError for a target that means no layer, for numbers out of range, for a model that has adapters, and for
    layers that ranks share.

    Example:
        add_lora(model, rank=8, targets=["linear_qkv", "experts.*"])
    """
    if rank < 1:
        raise ValueError(f"rank is {rank}; allowed: a positive integer")
    if not alpha > 0 or not 0 <= dropout < 1:
        name, value = ("alpha", alpha) if not alpha > 0 else ("dropout", dropout)
        raise ValueError(f"{name} is {value}; allowed: alpha > 0, 0 <= dropout < 1")
    if any(True for _ in adapters_of(model)):
        raise ValueError("the model has adapters already; allowed: merge_lora first")
    check_model(model)
    layers = {name: module for name, module in model.named_modules() if isinstance(module, LAYERS)}
    chosen: set[str] = set()
    for target in targets:
        found = {name for name in layers if target == ALL_LINEAR or matches(name, target)}
        if not found:
            last = ", ".join(sorted({name.rpartition(".")[2] for name in layers}))
            raise ValueError(
                f"{target!r} is not found among the GEMM layers; allowed: {ALL_LINEAR!r}, or globs of names that end "
                f"with {last}"
            )
        chosen |= found
    for name in chosen:
        check_layer(layers[name], name)
    model.requires_grad_(False)
    for name, layer in layers.items():
        if name in chosen:
            _replace(model, name, ADAPTERS[type(layer)](layer, rank, alpha, dropout, use_dora))


def adapters_of(model: nn.Module) -> Iterator[tuple[str, Adapter]]:
    """Yield (name of the layer, adapter) of a model."""
    return ((name, module) for name, module in model.named_modules() if isinstance(module, Adapter))


def lora_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """Return what is trained, by name: "decoder.layers.0.self_attention.linear_qkv.lora_A.weight"; not copied."""
    return {name: p.detach() for name, p in model.named_parameters() if base_name(name) is None}


def base_name(name: str) -> str | None:
    """Return the name that a parameter has in the model without adapters; None for what belongs to an adapter."""
    return None if ".lora_" in name and _BASE not in name else name.replace(_BASE, ".")


def base_state_dict(model: GPTModel) -> dict[str, Tensor]:
    """Return what a folder of the model without adapters holds; not copied."""
    stored = ((base_name(name), tensor) for name, tensor in model.stored_tensors())
    return {name: tensor for name, tensor in stored if name is not None}


def merged_weights(model: nn.Module) -> dict[str, Callable[[Tensor], Tensor]]:
    """Return, by the name that each adapted weight has in the model without adapters, what gives it with its adapter,
    of its value without: whole ones, wherever they are."""
    return {
        f"{layer}.{weight}": partial(adapter.merged_weight, weight)
        for layer, adapter in adapters_of(model)
        for weight in chain.from_iterable(adapter.weights())
    }


@torch.no_grad()
def merge_lora(model: nn.Module) -> None:
    """Add the adapters to the weights, in float32 with one rounding, and remove them; all parameters are trained again.

    Weights that are stored quantized become plain values, for the sum has no exact quantized form.
    """
    for name, adapter in list(adapters_of(model)):
        _replace(model, name, adapter.merge())
    model.requires_grad_(True)


def _replace(model: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, last = name.rpartition(".")
    module.train(model.training)
    setattr(model.get_submodule(parent), last, module)
