"""What the optimizers have in common: float32 masters, bounded working copies, weights requantized in place.

A step updates the float32 master of a quantized weight; the weight then receives the requantized copy in place, in the
very storage that the GEMMs read, and is never dequantized.

torch's GradScaler reads `.grad` alone: what layers added to `.main_grad` would stay scaled and unchecked, by a factor
of 65536 at first. The one here divides and checks what the optimizer will read.
"""

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from ..tensor.fsdp import local_part
from ..tensor.high_precision_init import clear_initial_value, take_initial_value
from ..tensor.quantized_tensor import QuantizedTensor, unless
from .adamw_update import ParameterSlice, Update, parameter_slices, whole_piece

_CHUNK = {"cpu": 1 << 19}  # elements whose working copies exist at one time, or one parameter that cannot be split
_CHUNK_ELSEWHERE = 1 << 24
# On CPU copies of a few megabytes are reused by malloc and stay in cache: 20 M bfloat16 parameters take 18 ms, with
# copies of 64 M elements, whose pages are new in every step, 65 to 120 ms.


class MasterWeightOptimizer(torch.optim.Optimizer):
    """Base of FusedAdamW, FusedAdam and FusedSGD, over plain and quantized parameters, sharded by FSDP2 or not.

    A subclass says in `gradient` what a step reads, in `gradient_attribute` under which name where that is not `.grad`,
    in `_state_of` what a parameter's state is, in `_begin` what a step's working copies are, in `_finish` what becomes
    of them, and in `_check_state` which states it loads.
    """

    gradient_attribute = "grad"
    scaler_reads_gradients = False
    _requantize: Callable[..., None]

    def gradient(self, parameter: Tensor) -> Tensor | None:
        """Return the gradient that a step reads, in the parameter's shape, or None."""
        raise NotImplementedError

    def _state_of(self, parameter: Tensor, group: dict[str, Any]) -> dict[str, Tensor]:
        raise NotImplementedError

    def _begin(self, piece: ParameterSlice) -> Update:
        raise NotImplementedError

    def _finish(self, work: list[Update], group: dict[str, Any], noop: Tensor | None) -> None:
        raise NotImplementedError

    def _check_state(self, parameter: Tensor, entries: dict[str, Any]) -> None:
        raise NotImplementedError

    def _updated_at_once(self, whole: ParameterSlice, group: dict[str, Any], noop: Tensor | None) -> bool:
        """Update a parameter without working copies, if that can be done; whether it is done."""
        return False

    @torch.no_grad()
    def init_state(self) -> None:
        """Create the state of all parameters now and not at their first update."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.requires_grad:
                    self._state_of(parameter, group)

    def _update_parameters(self, noop: Tensor | None) -> None:
        """Update every parameter that has a gradient. noop: a scalar tensor; where it is nonzero nothing changes."""
        index = 0
        for group in self.param_groups:
            work: list[Update] = []
            for parameter in group["params"]:
                index += 1
                gradient = self.gradient(parameter)
                if gradient is None:
                    continue
                state = self._state_of(parameter, group)
                whole = whole_piece(parameter, gradient, state, index)
                if self._updated_at_once(whole, group, noop):
                    continue
                chunk = _CHUNK.get(parameter.device.type, _CHUNK_ELSEWHERE)
                for piece in parameter_slices(whole, chunk):
                    if work and sum(update.weight.numel() for update in work) + piece.parameter.numel() > chunk:
                        self._finish(work, group, noop)
                        work = []
                    work.append(self._begin(piece))
            self._finish(work, group, noop)

    def _write_weight(self, update: Update, noop: Tensor | None) -> None:
        """Write the rounded or requantized weight to where it is stored."""
        parameter = update.piece.parameter
        if isinstance(parameter, QuantizedTensor):
            # the collective that shards of one matrix need stays outside of graphs
            (self._requantize if parameter.amax_group is None else requantize)(parameter, update.weight, noop)
        elif update.weight is not parameter:
            copy_unless(parameter, update.weight, noop)

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """What torch's GradScaler asks before a step: whether the step divides by the scale itself. It does not.

        Raises ValueError as `require_read_by_torch` does, unless the scaler is the one here.
        """
        if not self.scaler_reads_gradients:
            self.require_read_by_torch()
        return False

    def require_read_by_torch(self) -> None:
        """Raise ValueError where gradients have another name than `.grad`: torch's GradScaler does not read them."""
        name = self.gradient_attribute
        parameters = (p for group in self.param_groups for p in group["params"])
        if name != "grad" and any(getattr(parameter, name, None) is not None for parameter in parameters):
            raise ValueError(
                f"torch.amp.GradScaler leaves what is in {name} scaled; allowed: te_models.layers.GradScaler"
            )

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore a state dict, every tensor in the dtype it was saved in (torch's own casts to the parameter's).

        A master that this optimizer has and the state dict lacks, say of a weight that was not quantized then, starts
        from the present weight at the next step. ValueError, before anything is changed, for an entry of another shape
        or dtype than it has here, and for one that is missing or unknown.
        """
        for parameter, entries in self._pairs(state_dict):
            self._check_state(parameter, entries)
        super().load_state_dict(state_dict)
        for parameter, entries in self._pairs(state_dict):
            clear_initial_value(parameter)
            self._restore(parameter, entries)

    def _pairs(self, state_dict: dict[str, Any]) -> Iterator[tuple[Tensor, dict[str, Any]]]:
        """Yield each parameter and its entries of a state dict; other numbers of them are refused by torch."""
        saved = [i for group in state_dict["param_groups"] for i in group["params"]]
        own = [p for group in self.param_groups for p in group["params"]]
        for i, parameter in zip(saved, own, strict=False):
            if i in state_dict["state"]:
                yield parameter, state_dict["state"][i]

    def _restore(self, parameter: Tensor, entries: dict[str, Tensor]) -> None:
        self.state[parameter] = {name: value.to(parameter.device, copy=True) for name, value in entries.items()}


def check_hyperparameters(betas: tuple[float, float] = (0.0, 0.0), **numbers: Any) -> None:
    """Raise ValueError for betas outside of [0, 1), and for a number below zero; tensors are not looked at."""
    for name, value in numbers.items():
        if not isinstance(value, Tensor) and not value >= 0:
            raise ValueError(f"{name} is {value}; allowed: zero or a positive number")
    if not all(0 <= beta < 1 for beta in betas):
        raise ValueError(f"betas are {betas}; allowed: two numbers in [0, 1)")


def loss_of(closure: Callable[[], Any] | None) -> Any:
    """Return what the closure of a step returns, with gradients enabled; None without one."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


def drops_gradients(set_grad_none: bool | None, set_to_none: bool | None) -> bool:
    """Return whether `zero_grad(set_to_none)` of an optimizer made with set_grad_none drops gradients, or zeroes them.
    ValueError where the two differ."""
    if set_grad_none is not None and set_to_none not in (None, set_grad_none):
        raise ValueError(f"set_to_none is {set_to_none}; allowed with set_grad_none={set_grad_none}: {set_grad_none}")
    drops = set_grad_none if set_to_none is None else set_to_none
    return True if drops is None else drops


def check_state_tensors(entries: dict[str, Any]) -> None:
    """Raise ValueError unless the state of a parameter is tensors."""
    for name, value in entries.items():
        if not isinstance(value, Tensor):
            raise ValueError(f"the state dict holds {name!r} as {type(value).__name__}; allowed: tensors")


def check_entries(
    parameter: Tensor, entries: dict[str, Any], expected: dict[str, tuple[Any, torch.dtype]], optional: set[str]
) -> None:
    """Raise ValueError unless the state of a parameter has the `expected` entries, name -> (shape, dtype), in these
    shapes and dtypes: an update reads and writes them element by element, unchecked. optional: names it may lack."""
    check_state_tensors(entries)
    unknown, missing = entries.keys() - expected.keys(), expected.keys() - entries.keys() - optional
    if unknown or missing:
        problem = f"holds {min(unknown, key=str)!r}" if unknown else f"lacks {min(missing)!r}"
        raise ValueError(f"the state dict {problem} for a parameter; its entries are {', '.join(sorted(expected))}")
    for name, value in entries.items():
        (shape, dtype), found = expected[name], tuple(local_part(value).shape)
        if (found, value.dtype) != (tuple(shape), dtype):
            raise ValueError(
                f"the state dict holds {name} of shape {found} and {value.dtype} for a parameter of shape "
                f"{tuple(parameter.shape)}; allowed: {tuple(shape)} and {dtype}"
            )


def new_master(parameter: Tensor) -> Tensor:
    """Return a float32 master of a parameter, sharded alike: the present values, or of a quantized one those that it
    was quantized from, where they were preserved; they are then freed."""
    local = local_part(parameter)
    master = torch.zeros_like(parameter, dtype=torch.float32, requires_grad=False)
    before = take_initial_value(parameter, local) if isinstance(local, QuantizedTensor) else None
    local_part(master).copy_(values(local, torch.float32) if before is None else before)
    return master


def values(local: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the values in `dtype`: the tensor itself where it is plain and of that dtype."""
    return local.dequantize(dtype) if isinstance(local, QuantizedTensor) else local.to(dtype)


def copy_unless(target: Tensor, value: Tensor, noop: Tensor | None) -> None:
    """Copy value to target, unless `noop`, a scalar tensor, is nonzero."""
    target.copy_(value if noop is None else unless(noop, value.to(target.dtype), target))


def requantize(parameter: QuantizedTensor, weight: Tensor, noop: Tensor | None) -> None:
    """Quantize weight into a parameter, unless `noop`, a scalar tensor, is nonzero."""
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


class GradScaler(torch.amp.GradScaler):
    """`torch.amp.GradScaler` over the gradients that an optimizer reads: `gradient` of FusedAdam and FusedSGD, else
    `gradient_of(parameter)`: `.grad`, or `.main_grad` with what arrived in `.grad`.

    Arguments, methods and state dicts are torch's. Where the gradients are all in `.grad` the two are the same.
    """

    def _unscale_grads_(
        self, optimizer: torch.optim.Optimizer, inv_scale: torch.Tensor, found_inf: torch.Tensor, allow_fp16: bool
    ) -> dict[torch.device, torch.Tensor]:
        read = optimizer.gradient if isinstance(optimizer, MasterWeightOptimizer) else gradient_of
        # these stand in for the parameters: torch looks at `.grad`, here of any dtype
        found: list[torch.Tensor] = []
        for group in optimizer.param_groups:
            for gradient in map(read, group["params"]):
                if gradient is not None:
                    found.append(gradient.detach())
                    found[-1].grad = gradient.detach()
        stand_in: Any = SimpleNamespace(param_groups=[{"params": found}])
        return super()._unscale_grads_(stand_in, inv_scale, found_inf, allow_fp16)

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> float | None:
        """Divide the gradients by the scale, if `unscale_` has not, and step unless one is infinite or NaN."""
        if not isinstance(optimizer, MasterWeightOptimizer):
            return super().step(optimizer, *args, **kwargs)
        optimizer.scaler_reads_gradients = True
        try:
            return super().step(optimizer, *args, **kwargs)
        finally:
            optimizer.scaler_reads_gradients = False
