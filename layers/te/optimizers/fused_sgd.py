"""FusedSGD with Transformer Engine's arguments, state and numbers (`te.optimizers.FusedSGD`)."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import required  # type: ignore[attr-defined]

from ...optimizers.adamw_update import ParameterSlice, Update
from ...optimizers.master_weights import (
    MasterWeightOptimizer,
    check_entries,
    check_hyperparameters,
    drops_gradients,
    loss_of,
    new_master,
    requantize,
    values,
)
from ...optimizers.moments import working_dtype
from ...tensor.fsdp import local_part
from ...tensor.quantized_tensor import QuantizedTensor


class FusedSGD(MasterWeightOptimizer):
    """Stochastic gradient descent with momentum over plain and quantized parameters: torch.optim.SGD's formula.

    wd_after_momentum: add the weight decay to what the momentum has made of the gradient, not to the gradient.
    State of a parameter: "momentum_buffer", where momentum is not zero, in the parameter's dtype; of a quantized one in
    float32, with "master_param", a float32 master that starts from the preserved high-precision value where there is
    one. Gradients are read from `.grad`; `.main_grad` is not read. The arithmetic is float32, in float64 for float64;
    the step of a plain 16-bit parameter is rounded to its dtype before it is added, as in Transformer Engine.

    materialize_master_grads is about masters of NVIDIA's apex: here it changes nothing. set_grad_none: what `zero_grad`
    does unless told otherwise (None: True).

    Raises ValueError for a negative lr, momentum or weight_decay, for nesterov without momentum or with dampening, and
    for a group without lr.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Any = required,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        *,
        wd_after_momentum: bool = False,
        materialize_master_grads: bool = True,
        set_grad_none: bool | None = None,
    ) -> None:
        check_hyperparameters(lr=0.0 if lr is required else lr, momentum=momentum, weight_decay=weight_decay)
        if nesterov and (momentum <= 0 or dampening != 0):
            raise ValueError(f"nesterov needs momentum above 0 and dampening 0; got {momentum} and {dampening}")
        group = {"lr": lr, "momentum": momentum, "dampening": dampening, "weight_decay": weight_decay}
        super().__init__(params, group | {"nesterov": nesterov})
        self.wd_after_momentum = wd_after_momentum
        self.materialize_master_grads = materialize_master_grads
        self.set_grad_none = set_grad_none
        self._requantize = requantize

    def gradient(self, parameter: Tensor) -> Tensor | None:
        """Return `.grad`."""
        return parameter.grad

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Drop the gradients, or zero them. Raises ValueError where set_grad_none says otherwise."""
        super().zero_grad(drops_gradients(self.set_grad_none, set_to_none))

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        loss = loss_of(closure)
        self._update_parameters(None)
        return loss

    def _state_of(self, parameter: Tensor, group: dict[str, Any]) -> dict[str, Tensor]:
        state: dict[str, Tensor] = self.state[parameter]
        if "master_param" not in state and isinstance(local_part(parameter), QuantizedTensor):
            state["master_param"] = new_master(parameter)
        started = "momentum_buffer" in state
        if group["momentum"] != 0 and not started:
            dtype = self._expected(parameter)["momentum_buffer"][1]
            state["momentum_buffer"] = torch.zeros_like(parameter, dtype=dtype, requires_grad=False)
        return state | {"step": torch.tensor(started, device="cpu")}  # nothing but whether this is the first one

    def _expected(self, parameter: Tensor) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Return shape and dtype of each entry that a parameter's state may have."""
        local = local_part(parameter)
        shape = tuple(local.shape)
        if isinstance(local, QuantizedTensor):
            return {"master_param": (shape, torch.float32), "momentum_buffer": (shape, torch.float32)}
        return {"momentum_buffer": (shape, local.dtype)}

    def _check_state(self, parameter: Tensor, entries: dict[str, Any]) -> None:
        expected = self._expected(parameter)
        check_entries(parameter, entries, expected, set(expected))

    def _begin(self, piece: ParameterSlice) -> Update:
        local, state = piece.parameter, piece.state
        dtype = working_dtype(local)
        weight = state["master_param"] if "master_param" in state else values(local, dtype)
        gradient = piece.gradient.to(dtype)
        buffer = state["momentum_buffer"].to(dtype) if "momentum_buffer" in state else gradient
        return Update(piece, weight, gradient, buffer, buffer)

    def _finish(self, work: list[Update], group: dict[str, Any], noop: Tensor | None) -> None:
        momentum, decay = group["momentum"], group["weight_decay"]
        for update in work:
            state, direction = update.piece.state, update.gradient
            if decay != 0 and not self.wd_after_momentum:
                direction = direction.add(update.weight, alpha=decay)
            if momentum != 0:
                if bool(state["step"]):
                    buffer = update.first.mul_(momentum).add_(direction, alpha=1 - group["dampening"])
                else:
                    buffer = update.first.copy_(direction)
                direction = direction.add(buffer, alpha=momentum) if group["nesterov"] else buffer
                if state["momentum_buffer"] is not buffer:
                    state["momentum_buffer"].copy_(buffer)
            if decay != 0 and self.wd_after_momentum:
                direction = direction.add(update.weight, alpha=decay)
            dtype = update.piece.parameter.dtype
            if "master_param" in state or update.weight.dtype == dtype:
                update.weight.add_(direction, alpha=-group["lr"])
            else:  # torch and Transformer Engine's kernel round the step to the weight's 16 bits before they add it
                update.weight.add_(direction.mul(-group["lr"]).to(dtype))
            self._write_weight(update, noop)
