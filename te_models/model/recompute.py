"""Activation checkpointing of some modules, with the results of some operations saved.

A module that is recomputed keeps its inputs for the backward pass, and computes the rest again there, under the recipe
and the scales of its first run: gradients are those without, bit for bit.
"""

from collections.abc import Callable, Iterator, Sequence
from fnmatch import fnmatchcase
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor, nn

from te_models.layers.recipe.activation_checkpoint import checkpointed

from ..suggestions import did_you_mean

GROUPS = {
    "gemm": ("aten.mm", "aten.addmm", "aten.bmm"),
    "attention": (
        "aten._scaled_dot_product_flash_attention",
        "aten._scaled_dot_product_flash_attention_for_cpu",
        "aten._scaled_dot_product_efficient_attention",
        "aten._scaled_dot_product_cudnn_attention",
    ),
    "all_to_all": ("_c10d_functional.all_to_all_single",),
}
"""Names of several operations, one of which is what runs on a device."""


def operations(names: Sequence[str]) -> list[Any]:
    """Return torch's operations by names: "NAMESPACE.OPERATION", with or without an overload, or the groups in
    `GROUPS`.

    Raises ValueError for a name that torch does not know."""
    found: list[Any] = []
    for name in (each for asked in names for each in GROUPS.get(asked, (asked,))):
        namespace, _, rest = name.partition(".")
        operation, _, overload = rest.partition(".")
        packet = getattr(getattr(torch.ops, namespace), operation, None) if operation else None
        if packet is None or (overload and overload not in packet.overloads()):
            groups = ", ".join(GROUPS)
            raise ValueError(
                f"model.recompute_save_ops has {name!r}, which is no operation of torch; allowed: {groups}, or "
                f"NAMESPACE.OPERATION, such as aten.mm{did_you_mean(name, GROUPS)}"
            )
        found += [getattr(packet, each) for each in ([overload] if overload else packet.overloads())]
    return found


def matching_modules(model: nn.Module, patterns: Sequence[str], whole: nn.Module | None = None) -> list[str]:
    """Return the outermost modules of a model whose names, "decoder.layers.0.mlp", match a pattern.

    Raises ValueError for a pattern that no module matches, of the whole model where this is a part of it."""
    names = [name for name, _ in model.named_modules() if name]
    everywhere = names if whole is None else [name for name, _ in whole.named_modules()]
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in everywhere):
            raise ValueError(f"model.recompute_modules has {pattern!r}, which no module of the model matches")
    found: list[str] = []
    for name in names:
        inside = any(name.startswith(f"{outer}.") for outer in found)
        if not inside and any(fnmatchcase(name, pattern) for pattern in patterns):
            found.append(name)
    return found


def recompute_modules(model: nn.Module, names: Sequence[str], save_ops: Sequence[str] = ()) -> None:
    """Have modules be recomputed in backward passes. names: of `matching_modules`; save_ops: operations whose results
    are saved, see `operations`."""
    save = operations(save_ops) or None
    for name in names:
        module = model.get_submodule(name)
        module.forward = _recomputed(module, module.forward, save)


def save_results(model: nn.Module, save_ops: Sequence[str]) -> None:
    """Have layers that `activation_checkpointing` recomputes save the results of operations."""
    save = operations(save_ops) or None
    for module in _layers(model):
        module.recompute_save = save


OFFLOADED, LEAST = ("cuda",), 2**20
"""Devices whose tensors have another memory to wait in, and bytes from which on they do."""


def offloading() -> Any:
    """Return a context in which large tensors that are saved for a backward pass wait in pinned main memory, except
    parameters: these stay where they are anyway."""

    def pack(tensor: Tensor) -> Any:
        stays = isinstance(tensor, nn.Parameter) or isinstance(tensor._base, nn.Parameter) or type(tensor) is not Tensor
        if stays or tensor.device.type not in OFFLOADED or tensor.numel() * tensor.element_size() < LEAST:
            return tensor
        there = torch.empty_like(tensor, device="cpu", pin_memory=torch.accelerator.is_available())
        return tensor.device, there.copy_(tensor, non_blocking=True)

    def unpack(packed: Any) -> Tensor:
        return packed if isinstance(packed, Tensor) else packed[1].to(packed[0], non_blocking=True)

    return torch.autograd.graph.saved_tensors_hooks(pack, unpack)


def _layers(model: nn.Module) -> Iterator[Any]:
    from .layer import DecoderLayer

    yield from (module for module in model.modules() if isinstance(module, DecoderLayer))


def _recomputed(module: nn.Module, forward: Callable[..., Any], save: list[Any] | None) -> Callable[..., Any]:
    @wraps(forward)
    def run(*arguments: Any, **named: Any) -> Any:
        if not (module.training and torch.is_grad_enabled()):
            return forward(*arguments, **named)
        return checkpointed(partial(forward, **named), *arguments, save=save)

    return run
