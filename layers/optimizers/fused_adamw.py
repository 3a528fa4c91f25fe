"""AdamW (arXiv 1711.05101) for weights stored in few bits: float32 masters, requantization inside the step.

Moments may be stored in bfloat16 or FP8 (`moments`). `torch.optim.AdamW` works on quantized parameters, too, but rounds
the weight itself in every step.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from te_models.kernels.asserted import host_reads
from te_models.kernels.quantize.cpu import moments as cpu_moments

from ..tensor.fsdp import local_part
from ..tensor.quantized_tensor import QuantizedTensor
from . import one_pass
from .adamw_update import ParameterSlice, Update, advance_steps_, compiled_by_shape, update_
from .master_weights import (
    MasterWeightOptimizer,
    check_hyperparameters,
    copy_unless,
    gradient_of,
    loss_of,
    new_master,
    requantize,
    values,
)
from .moments import MomentDtype, MomentStore, working_dtype


class FusedAdamW(MasterWeightOptimizer):
    """AdamW over plain and quantized parameters, sharded by FSDP2 or not.

    lr: a float, or a scalar tensor whose value may change without anything being compiled again. master_weights: keep a
    float32 master for every parameter of fewer bits; a quantized one always has one, because it cannot absorb a small
    update. It starts from the present weight, or from what that was quantized from: where that was preserved
    (`preserve_high_precision_init_val`) and no other values have been written since; it is then freed. Without a
    master, the update is computed in float32 and rounded. moment_dtype: "float32", "bfloat16" or "float8"; the last two
    round stochastically, driven by (seed, step, parameter, element). compile: compile the encoding of such moments and
    the requantization of weights, with the same bits: on CPU seconds at the first step (once per shape), and 4 to 10
    times less for them from then on. On a CPU a plain weight that is not float32, or has such a gradient or moments,
    is updated in one C++ pass (`one_pass`), with the same bits, also without `compile` where the machine has it.

    `step` can be compiled whole, too (`torch.compile(optimizer.step, fullgraph=True)`, after `init_state`): update,
    rounding and requantization of a weight are then fused, and differ from the eager step by float32 roundings.

    Gradients are read from `.grad`, or from `.main_grad` (see `gradient_of`); they need not have the parameter's dtype.
    A loss may be scaled with `te_models.layers.GradScaler`; torch's own reads no `main_grad` and is refused where there
    is one.

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
        self._definitions = MomentStore(moment_dtype, seed, compile=False)
        check_hyperparameters(betas, lr=lr, eps=eps, weight_decay=weight_decay)
        self._requantize = compiled_by_shape(requantize) if compile else requantize
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, defaults | {"master_weights": master_weights})

    gradient_attribute = "main_grad"

    def gradient(self, parameter: Tensor) -> Tensor | None:
        """Return `gradient_of(parameter)`."""
        return gradient_of(parameter)

    def _state_of(self, parameter: Tensor, group: dict[str, Any]) -> dict[str, Tensor]:
        """Return a parameter's state, with what it lacks: all of it, or a master where one was loaded without."""
        state: dict[str, Tensor] = self.state[parameter]
        local, new = local_part(parameter), not state
        if new:
            state["step"] = torch.zeros((), dtype=torch.float32, device=local.device)
        quantized = isinstance(local, QuantizedTensor)
        if "master" not in state and (quantized or (group["master_weights"] and local.dtype.itemsize < 4)):
            state["master"] = new_master(parameter)
        if new:
            state |= self._moments.zeros(parameter, local)
        return state

    @torch.no_grad()
    def reload_model_params(self) -> None:
        """Start the masters again from the weights as they are now; moments and step counts stay. Megatron's name."""
        for parameter, state in self.state.items():
            if "master" in state:
                local_part(state["master"]).copy_(values(local_part(parameter), torch.float32))

    @torch.no_grad()
    def step(  # type: ignore[override]
        self, closure: Callable[[], Any] | None = None, *, noop: Tensor | None = None
    ) -> Any:
        """Update every parameter that has a gradient, in `.grad` or accumulated in `.main_grad`.

        noop: a scalar tensor, for example whether a gradient is infinite; where it is nonzero nothing changes, neither
        weights nor state, decided on the device without the host waiting for it.
        """
        loss = loss_of(closure)
        self._update_parameters(noop)
        return loss

    def _begin(self, piece: ParameterSlice) -> Update:
        local, state = piece.parameter, piece.state
        weight = state["master"] if "master" in state else values(local, working_dtype(local))
        first, second = self._moments.read(state, weight)
        gradient = piece.gradient.to(weight.dtype)
        # the fused kernel goes through memory from each first element on, whatever the strides are
        if weight.stride() != first.stride() and "master" not in state:
            weight = torch.empty_like(first).copy_(weight)
        if gradient.stride() != first.stride():
            gradient = torch.empty_like(first).copy_(gradient)
        return Update(piece, weight, gradient, first, second)

    def _updated_at_once(self, whole: ParameterSlice, group: dict[str, Any], noop: Tensor | None) -> bool:
        parameter, state = whole.parameter, whole.state
        weight, moments = state.get("master", parameter), self._moments.stored(state)
        if weight.numel() % one_pass.VECTOR or not cpu_moments.updates(weight, whole.gradient, moments):
            return False
        if not one_pass.has_the_bits():
            return False
        if noop is not None:
            if not host_reads(noop):
                return False  # the host does not wait for it
            if noop:
                return True
        update = Update(whole, weight, whole.gradient, *moments[:2])
        advance_steps_([update], None)
        for left in one_pass.run_one_pass(whole, weight, moments, group, self._moments.seed):
            self._update([self._begin(left)], group, None, self._definitions)
        if weight is not parameter:
            self._write_weight(update, None)
        return True

    def _finish(self, work: list[Update], group: dict[str, Any], noop: Tensor | None) -> None:
        advance_steps_(work, noop)
        self._update(work, group, noop, self._moments)

    def _update(self, work: list[Update], group: dict[str, Any], noop: Tensor | None, moments: MomentStore) -> None:
        """Run the update, then write rounded weights and moments to where they are stored."""
        update_(work, group, noop)
        for update in work:
            self._write_weight(update, noop)
            for name, value in moments.rounded(update, in_place=noop is None).items():
                stored = update.piece.state[name]
                if stored.shape != value.shape:  # the blocks of a shard, of which a small one has fewer
                    stored = stored.view(-1)[: value.numel()].view_as(value)
                copy_unless(stored, value, noop)

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
        masters = [group["master_weights"] for group in self.param_groups]
        super().load_state_dict(state_dict)
        for group, wanted in zip(self.param_groups, masters, strict=True):
            group["master_weights"] |= wanted

    def _check_state(self, parameter: Tensor, entries: dict[str, Any]) -> None:
        self._moments.check(parameter, entries)
