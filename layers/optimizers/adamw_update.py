"""The arithmetic of one step of Adam and AdamW (arXiv 1412.6980, 1711.05101) on working copies: torch's fused kernel,
or the formula in torch operations where a compiler is to fuse it with the rounding and requantization of the weight.

A large parameter is updated in pieces, so that its working copies stay small whatever its size.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from te_models.kernels.compiling import compiling

from ..tensor.fsdp import local_part
from ..tensor.quantized_tensor import QuantizedTensor

_SCALES = "_scale_inv"
"""What the name of a moment's entry with a scale per block adds to the moment's."""


@dataclass
class ParameterSlice:
    """A parameter, or a flat view of a part of it, from element `begin`. parameter, gradient, state: this rank's, views
    alike; "step" of the state is shared, and the piece that begins at 0 advances it. index: the parameter's place."""

    parameter: Tensor
    gradient: Tensor
    state: dict[str, Tensor]
    index: int
    begin: int = 0


def whole_piece(parameter: Tensor, gradient: Tensor, state: dict[str, Tensor], index: int) -> ParameterSlice:
    """Return all of this rank's part of a parameter. index: the parameter's place among all, from 1."""
    return ParameterSlice(
        local_part(parameter), local_part(gradient), {k: local_part(v) for k, v in state.items()}, index
    )


def parameter_slices(whole: ParameterSlice, limit: int) -> Iterator[ParameterSlice]:
    """Yield a parameter in pieces of at most `limit` elements, or whole where it cannot be split: quantized weights,
    moments in blocks that do not divide it, what is not contiguous, and inside a graph, where nothing would be gained.
    """
    parts = {k: v for k, v in whole.state.items() if k != "step"}
    size = whole.parameter.numel()
    scales = {k: v for k, v in parts.items() if k.endswith(_SCALES)}
    fewest = min([size, *(v.numel() for v in scales.values())])
    block = max(1, size // max(1, fewest))  # of an empty shard: 1
    tensors = (whole.parameter, whole.gradient, *(v for k, v in parts.items() if k not in scales))
    alike = all(not isinstance(t, QuantizedTensor) and t.is_contiguous() and t.numel() == size for t in tensors)
    alike = alike and limit % block == 0 and all(v.numel() * block == size for v in scales.values())

    def part(name: str, stored: Tensor, begin: int) -> Tensor:
        if name in scales:
            return stored.view(-1)[begin // block : (begin + limit) // block]
        flat = stored.view(-1)[begin : begin + limit]
        return flat.view(-1, block) if name + _SCALES in scales else flat

    if size <= limit or not alike or compiling():
        yield whole
        return
    for begin in range(0, size, limit):
        cut = slice(begin, begin + limit)
        yield ParameterSlice(
            whole.parameter.view(-1)[cut],
            whole.gradient.view(-1)[cut],
            {"step": whole.state["step"]} | {k: part(k, v, begin) for k, v in parts.items()},
            whole.index,
            begin,
        )


@dataclass
class Update:
    """A piece of a parameter within a step: where it is stored, and its working copies (or the stored tensors).

    weight, gradient, first, second: of one dtype and the piece's shape.
    """

    piece: ParameterSlice
    weight: Tensor
    gradient: Tensor
    first: Tensor
    second: Tensor


def _found_inf(noop: Tensor | None, device: torch.device) -> Tensor | None:
    return None if noop is None else (noop.reshape(()) != 0).to(device, torch.float32)


def advance_steps_(work: list[Update], noop: Tensor | None) -> None:
    """Count one step of every parameter that begins in these updates, unless `noop`, a scalar tensor, is nonzero."""
    by_device: dict[torch.device, list[Tensor]] = {}
    for update in work:
        if update.piece.begin == 0:
            by_device.setdefault(update.weight.device, []).append(update.piece.state["step"])
    for device, steps in by_device.items():
        found_inf = _found_inf(noop, device)
        # a tensor by itself would be taken for a number, and the host would wait for it
        more = 1 if found_inf is None else [1 - found_inf] * len(steps)
        torch._foreach_add_(steps, more)  # type: ignore[attr-defined]


def update_(
    work: list[Update], group: dict[str, Any], noop: Tensor | None, *, decoupled_weight_decay: bool = True
) -> None:
    """Update weights and moments in place, in the step that the step counts say, the first being 1.

    group: lr, betas, weight_decay and eps; noop: a scalar tensor; where it is nonzero nothing changes, decided on the
    device. decoupled_weight_decay: whether the decay shrinks the weight (AdamW) or is part of the gradient (Adam,
    arXiv 1412.6980).
    """
    by_kind: dict[tuple[torch.device, torch.dtype], list[Update]] = {}
    for update in work:
        by_kind.setdefault((update.weight.device, update.weight.dtype), []).append(update)
    for (device, _), updates in by_kind.items():
        found_inf = _found_inf(noop, device)
        if compiling():
            # the fused kernel on lists cannot be functionalized (torch 2.13)
            for update in updates:
                _formula_(update, group, found_inf, decoupled_weight_decay)
            continue
        fused = torch._fused_adamw_ if decoupled_weight_decay else torch._fused_adam_  # type: ignore[attr-defined]
        fused(
            [update.weight for update in updates],
            [update.gradient for update in updates],
            [update.first for update in updates],
            [update.second for update in updates],
            [],
            [update.piece.state["step"] for update in updates],
            amsgrad=False,
            lr=group["lr"].to(device) if isinstance(group["lr"], Tensor) else group["lr"],
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
            found_inf=found_inf,
        )


def _formula_(update: Update, group: dict[str, Any], found_inf: Tensor | None, decoupled_weight_decay: bool) -> None:
    """Do what the fused kernel does; the results differ from its by roundings."""
    lr, (beta1, beta2), g = group["lr"], group["betas"], update.gradient
    shrunk = update.weight
    if decoupled_weight_decay:
        shrunk = shrunk * (1 - lr * group["weight_decay"])
    else:
        g = g + group["weight_decay"] * update.weight
    t = update.piece.state["step"].double()
    first_correction = (1 - torch.pow(beta1, t)).to(g.dtype)
    second_correction = (1 - torch.pow(beta2, t)).sqrt().to(g.dtype)
    first = update.first + (1 - beta1) * (g - update.first)
    second = update.second * beta2 + (1 - beta2) * g * g
    step = lr / first_correction * (first / (second.sqrt() / second_correction + group["eps"]))
    weight = shrunk - step
    for old, new in ((update.weight, weight), (update.first, first), (update.second, second)):
        old.copy_(new if found_inf is None else torch.where(found_inf != 0, old, new))


_SHAPES = 64  # more run eagerly


def compiled_by_shape(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return `function` compiled, once per shape: with symbolic shapes quantizations run several times slower on CPU.

    Inside a region that is being compiled, `function` itself is called.
    """
    compiled = torch.compile(function, dynamic=False)

    def run(*args: Any) -> Any:
        if compiling():
            return function(*args)
        # a model has more shapes of weights than the compiler expects of one function
        with torch._dynamo.config.patch(recompile_limit=_SHAPES):
            return compiled(*args)

    return run
