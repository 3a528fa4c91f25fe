"""AdamW (arXiv 1711.05101) for weights stored in few bits: float32 masters, requantization inside the step.

The fused kernel updates the float32 master; the parameter then receives the rounded or requantized copy in place, in
the very storage that the GEMMs read, and is never dequantized. Moments may be stored in bfloat16 or FP8 (`moments`).
`torch.optim.AdamW` works on quantized parameters, too, but rounds the weight itself in every step.

torch's GradScaler reads `.grad` alone: what layers added to `.main_grad` would stay scaled and unchecked, by a factor
of 65536 at first. The one here divides and checks what the optimizer will read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from ..tensor.fsdp import local_part
from ..tensor.high_precision_init import clear_initial_value, take_initial_value
from ..tensor.quantized_tensor import QuantizedTensor, unless
from .adamw_update import Piece, Update, compiled_by_shape, pieces, update_
from .moments import MomentDtype, MomentStore, working_dtype

_CHUNK = {"cpu": 1 << 19}  # elements whose working copies exist at one time, or one parameter that cannot be split
_CHUNK_ELSEWHERE = 1 << 24
# On CPU copies of a few megabytes are reused by malloc and stay in cache: 20 M bfloat16 parameters take 18 ms, with
# copies of 64 M elements, whose pages are new in every step, 65 to 120 ms.


class FusedAdamW(torch.optim.Optimizer):
    """AdamW over plain and quantized parameters, sharded by FSDP2 or not.

    lr: a float, or a scalar tensor whose value may change without anything being compiled again. master_weights: keep a
    float32 master for every parameter of fewer bits; a quantized one always has one, because it cannot absorb a small
    update. It starts from the present weight, or from what that was quantized from: where that was preserved
    (`preserve_high_precision_init_val`) and no other values have been written since; it is then freed. Without a
    master, the update is computed in float32 and rounded. moment_dtype: "float32", "bfloat16" or "float8"; the last two
    round stochastically, driven by (seed, step, parameter, element). compile: compile the encoding of such moments and
    the requantization of weights, with the same bits: on CPU seconds at the first step (once per shape), and 4 to 10
    times less for them from then on.

    `step` can be compiled whole, too (`torch.compile(optimizer.step, fullgraph=True)`, after `init_state`): update,
    rounding and requantization of a weight are then fused, and differ from the eager step by float32 roundings.

    Gradients are read from `.grad`, or from `.main_grad` (see `gradient_of`), which need not have the parameter's
    dtype. A loss may be scaled with `te_models.layers.GradScaler`; torch's own reads no `main_grad` and is refused
    where there is one.

    State per parameter: "step", "master", "exp_avg", "exp_avg_sq" (for "float8" also "exp_avg_scale_inv" and
    "exp_avg_sq_scale_inv"), plain tensors all of them, in float32 unless said otherwise; a state dict resumes bitwise.
    Weights are written from their masters: after loading other weights into the model, call `reload_model_params`.

    Raises ValueError for hyperparameters out of range, and in `step` after torch's own GradScaler has scaled the loss
    of a parameter that has a `main_grad`.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        master_weights: bool = False,
        moment_dtype: MomentDtype = "float32",
        seed: int = 0,
        compile: bool = False,
    ) -> None:
        self._moments = MomentStore(moment_dtype, seed, compile)
        for name, value in (("lr", lr), ("eps", eps), ("weight_decay", weight_decay)):
            if not isinstance(value, Tensor) and not value >= 0:
                raise ValueError(f"{name} is {value}; allowed: zero or a positive number")
        if not all(0 <= beta < 1 for beta in betas):
            raise ValueError(f"betas are {betas}; allowed: two numbers in [0, 1)")
        self._requantize = compiled_by_shape(_requantize) if compile else _requantize
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, defaults | {"master_weights": master_weights})

    @torch.no_grad()
    def init_state(self) -> None:
        """Create the state of all parameters now and not at their first update."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.requires_grad:
                    self._state_of(parameter, group)

    def _state_of(self, parameter: Tensor, group: dict[str, Any]) -> dict[str, Tensor]:
        """Return a parameter's state, with what it lacks: all of it, or a master where one was loaded without."""
        state: dict[str, Tensor] = self.state[parameter]
        local, new = local_part(parameter), not state
        if new:
            state["step"] = torch.zeros((), dtype=torch.float32, device=local.device)
        quantized = isinstance(local, QuantizedTensor)
        if "master" not in state and (quantized or (group["master_weights"] and local.dtype.itemsize < 4)):
            state["master"] = torch.zeros_like(parameter, dtype=torch.float32, requires_grad=False)
            before = take_initial_value(parameter, local) if quantized else None
            local_part(state["master"]).copy_(_values(local, torch.float32) if before is None else before)
        if new:
            state |= self._moments.zeros(parameter, local)
        return state

    @torch.no_grad()
    def reload_model_params(self) -> None:
        """Start the masters anew from the weights as they are now; moments and step counts stay. Megatron's name."""
        for parameter, state in self.state.items():
            if "master" in state:
                local_part(state["master"]).copy_(_values(local_part(parameter), torch.float32))

    @torch.no_grad()
    def step(  # type: ignore[override]
        self, closure: Callable[[], Any] | None = None, *, noop: Tensor | None = None
    ) -> Any:
        """Update every parameter that has a gradient, in `.grad` or accumulated in `.main_grad`.

        noop: a scalar tensor, for example whether a gradient is infinite; where it is nonzero nothing changes, neither
        weights nor state, decided on the device without the host waiting for it.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        index = 0
        for group in self.param_groups:
            work: list[Update] = []
            for parameter in group["params"]:
                index += 1
                gradient = gradient_of(parameter)
                if gradient is None:
                    continue
                state = self._state_of(parameter, group)
                chunk = _CHUNK.get(parameter.device.type, _CHUNK_ELSEWHERE)
                for piece in pieces(parameter, gradient, state, index, chunk):
                    if work and sum(update.weight.numel() for update in work) + piece.parameter.numel() > chunk:
                        self._finish(work, group, noop)
                        work = []
                    work.append(self._begin(piece))
            self._finish(work, group, noop)
        return loss

    scaler_reads_main_grads = False

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """What torch's GradScaler asks before a step: whether the step divides by the scale itself. It does not.

        Raises ValueError where there are main gradients and the scaler reads none.
        """
        parameters = (p for group in self.param_groups for p in group["params"])
        if not self.scaler_reads_main_grads and any(getattr(p, "main_grad", None) is not None for p in parameters):
            raise ValueError(
                "torch.amp.GradScaler leaves what is in main_grad scaled; allowed: te_models.layers.GradScaler"
            )
        return False

    def _begin(self, piece: Piece) -> Update:
        local, state = piece.parameter, piece.state
        weight = state["master"] if "master" in state else _values(local, working_dtype(local))
        first, second = self._moments.read(state, weight)
        return Update(piece, weight, piece.gradient.to(weight.dtype), first, second)

    def _finish(self, work: list[Update], group: dict[str, Any], noop: Tensor | None) -> None:
        """Run the update, then write rounded weights and moments to where they are stored."""
        update_(work, group, noop)
        for update in work:
            if isinstance(update.piece.parameter, QuantizedTensor):
                # a collective, which shards of one matrix need, stays outside of graphs
                alone = update.piece.parameter.amax_group is None
                (self._requantize if alone else _requantize)(update.piece.parameter, update.weight, noop)
            elif update.weight is not update.piece.parameter:
                _write(update.piece.parameter, update.weight, noop)
            for name, value in self._moments.rounded(update).items():
                stored = update.piece.state[name]
                if stored.shape != value.shape:  # the blocks of a shard, of which a small one has fewer
                    stored = stored.view(-1)[: value.numel()].view_as(value)
                _write(stored, value, noop)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients; a `.main_grad` is a persistent buffer and is zeroed."""
        super().zero_grad(set_to_none)
        for group in self.param_groups:
            for parameter in group["params"]:
                main_grad = getattr(parameter, "main_grad", None)
                if main_grad is not None:
                    main_grad.zero_()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore a state dict, every tensor in the dtype it was saved in (torch's own casts to the parameter's).

        A master that this optimizer keeps and the state dict lacks, say of a weight that was not quantized then, starts
        from the present weight at the next step. ValueError, before anything is taken over, for an entry of another
        shape or dtype than it has here, for one that is missing or unknown, where the moments were saved with another
        moment_dtype, and for FP8 moments of other shards.
        """
        saved = [i for group in state_dict["param_groups"] for i in group["params"]]
        mine = [p for group in self.param_groups for p in group["params"]]
        for i, parameter in zip(saved, mine, strict=False):  # other numbers of them are refused by torch
            if i in state_dict["state"]:
                self._moments.check(parameter, state_dict["state"][i])
        masters = [group["master_weights"] for group in self.param_groups]
        super().load_state_dict(state_dict)
        for group, wanted in zip(self.param_groups, masters, strict=True):
            group["master_weights"] |= wanted
        for i, parameter in zip(saved, mine, strict=True):
            if i in state_dict["state"]:
                clear_initial_value(parameter)
                entries = state_dict["state"][i].items()
                self.state[parameter] = {name: value.to(parameter.device, copy=True) for name, value in entries}


def _write(target: Tensor, value: Tensor, noop: Tensor | None) -> None:
    target.copy_(value if noop is None else unless(noop, value.to(target.dtype), target))


def _requantize(parameter: QuantizedTensor, weight: Tensor, noop: Tensor | None) -> None:
    parameter.quantize_(weight, noop=noop)


def gradient_of(parameter: Tensor) -> Tensor | None:
    """Return the gradient, in the parameter's shape, or None: `.main_grad` of a parameter that has one, after adding
    and dropping what has arrived in `.grad`; else `.grad`."""
    main_grad: Tensor | None = getattr(parameter, "main_grad", None)
    if main_grad is None:
        return parameter.grad
    if parameter.grad is not None:
        main_grad.add_(parameter.grad)
        parameter.grad = None
    return main_grad


def _values(local: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the values in `dtype`: the tensor itself where it is plain and of that dtype."""
    return local.dequantize(dtype) if isinstance(local, QuantizedTensor) else local.to(dtype)


class GradScaler(torch.amp.GradScaler):
    """`torch.amp.GradScaler` over `gradient_of(parameter)`: `.grad`, or `.main_grad` with what arrived in `.grad`.

    Arguments, methods and state dicts are torch's. `FusedAdamW` refuses torch's own where a parameter has a
    `main_grad`; without any the two are the same.
    """

    def _unscale_grads_(
        self, optimizer: torch.optim.Optimizer, inv_scale: torch.Tensor, found_inf: torch.Tensor, allow_fp16: bool
    ) -> dict[torch.device, torch.Tensor]:
        found: list[
            torch.Tensor
        ] = []  # stands in for the parameters: torch looks at `.grad`, which here is of any dtype
        for group in optimizer.param_groups:
            for gradient in map(gradient_of, group["params"]):
                if gradient is not None:
                    found.append(gradient.detach())
                    found[-1].grad = gradient.detach()
        stand_in: Any = SimpleNamespace(param_groups=[{"params": found}])
        return super()._unscale_grads_(stand_in, inv_scale, found_inf, allow_fp16)

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> float | None:
        """Divide the gradients by the scale, if `unscale_` has not, and step unless one is infinite or NaN."""
        if not isinstance(optimizer, FusedAdamW):
            return super().step(optimizer, *args, **kwargs)
        optimizer.scaler_reads_main_grads = True
        try:
            return super().step(optimizer, *args, **kwargs)
        finally:
            optimizer.scaler_reads_main_grads = False
