"""FusedAdam with Transformer Engine's arguments, state and numbers (`te.optimizers.FusedAdam`)."""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from te_models.suggestions import shown

from ...optimizers.adamw_update import ParameterSlice, Update, update_
from ...optimizers.master_weights import (
    GradScaler,
    MasterWeightOptimizer,
    check_entries,
    check_hyperparameters,
    drops_gradients,
    loss_of,
    new_master,
    requantize,
    values,
)
from ...tensor.fsdp import local_part
from ...tensor.quantized_tensor import QuantizedTensor
from .stored_state import LARGEST, STORED_AS, decode, encode, split_master, whole_master

_MOMENTS: tuple[str, ...] = ("exp_avg", "exp_avg_sq")
_MASTER_DTYPES = (torch.float32, torch.float16)


class _Scaling(NamedTuple):
    """What a GradScaler says of one step, scalar tensors. inverse: of the factor; found_inf: nonzero skips the step."""

    inverse: Tensor
    found_inf: Tensor


class FusedAdam(MasterWeightOptimizer):
    """Adam (arXiv 1412.6980), or AdamW (arXiv 1711.05101), over plain and quantized parameters.

    adam_w_mode: True decays the weight (AdamW), False adds the decay to the gradient; bias_correction: divide the
    moments by 1 - beta^step. Gradients are read from `.grad`, or with use_decoupled_grad from `.decoupled_grad` of any
    dtype; `.main_grad` is not read. The arithmetic is float32.

    State of a parameter: "exp_avg" and "exp_avg_sq", zeros at first, in exp_avg_dtype and exp_avg_sq_dtype: float32,
    float16, bfloat16, or uint8 for FP8 (E4M3); float16 and FP8 with a scale per tensor, see `stored_state`.
    "master_param" with master_weights, for parameters of fewer than 32 bits, in master_weight_dtype: float32, or
    float16 with a scale. A quantized parameter always has a master. It starts from the preserved high-precision value
    if there is one. store_param_remainders: of a bfloat16 parameter store only what the parameter lacks of its float32
    master, in int16; together they are the master bit for bit. The step count is `param_groups[i]["step"]`. A state
    dict holds float32 (and int16 remainders), whatever is stored.

    capturable: lr and the step count are tensors on the parameters' device, so that no step waits for the host; `step`
    then takes a grad_scaler. set_grad_none: what `zero_grad` does unless told otherwise (None: True). Numbers do not
    depend on these two.

    Raises ValueError for amsgrad, for a dtype that is not listed, and for capturable beside entries that are not stored
    in float32; in `step` for parameters of another dtype and for sparse gradients.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        *,
        bias_correction: bool = True,
        adam_w_mode: bool = True,
        capturable: bool = False,
        master_weights: bool = False,
        master_weight_dtype: torch.dtype = torch.float32,
        exp_avg_dtype: torch.dtype = torch.float32,
        exp_avg_sq_dtype: torch.dtype = torch.float32,
        use_decoupled_grad: bool = False,
        store_param_remainders: bool = False,
        set_grad_none: bool | None = None,
    ) -> None:
        check_hyperparameters(betas, lr=lr, eps=eps, weight_decay=weight_decay)
        if amsgrad:
            raise ValueError("amsgrad is True; allowed: False")
        stored = {"exp_avg_dtype": exp_avg_dtype, "exp_avg_sq_dtype": exp_avg_sq_dtype}
        if master_weights:
            stored["master_weight_dtype"] = master_weight_dtype
        for name, dtype in stored.items():
            allowed = _MASTER_DTYPES if name == "master_weight_dtype" else tuple(STORED_AS)
            if capturable:
                allowed = (torch.float32,)
            if dtype not in allowed:
                suffix = " with capturable=True" if capturable else ""
                raise ValueError(f"{name} is {shown(dtype)}; allowed{suffix}: {', '.join(map(str, allowed))}")
        if capturable and store_param_remainders:
            raise ValueError("store_param_remainders is True; allowed with capturable=True: False")
        group = {"lr": lr, "bias_correction": bias_correction, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, group)
        self.adam_w_mode = adam_w_mode
        self.capturable = capturable
        self.master_weights = master_weights
        self.use_decoupled_grad = use_decoupled_grad
        self.store_param_remainders = store_param_remainders and master_weights and master_weight_dtype is torch.float32
        self.set_grad_none = set_grad_none
        self.gradient_attribute = "decoupled_grad" if use_decoupled_grad else "grad"
        self._requantize = requantize
        self._dtypes: dict[str, torch.dtype] = dict(
            zip((*_MOMENTS, "master_param"), (exp_avg_dtype, exp_avg_sq_dtype, master_weight_dtype), strict=True)
        )
        self._scales: dict[Tensor, dict[str, Tensor]] = {}
        self._scaling: _Scaling | None = None
        if capturable:
            for options in self.param_groups:
                options["lr"] = torch.as_tensor(options["lr"], dtype=torch.float32, device=_device_of(options))

    def gradient(self, parameter: Tensor) -> Tensor | None:
        """Return `.grad`, with use_decoupled_grad `.decoupled_grad`."""
        return getattr(parameter, self.gradient_attribute, None)

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Drop the gradients that a step reads, or zero them. Raises ValueError where set_grad_none says otherwise."""
        drop = drops_gradients(self.set_grad_none, set_to_none)
        if not self.use_decoupled_grad:
            super().zero_grad(drop)
            return
        for group in self.param_groups:
            for parameter in group["params"]:
                gradient = self.gradient(parameter)
                if drop:
                    parameter.decoupled_grad = None
                elif gradient is not None:
                    gradient.zero_()

    # --- state -----------------------------------------------------------------------------------------------------

    def initialize_state(self, param: Tensor, store_param_remainders: bool | None = None) -> None:
        """Create the state of a parameter: moments of zero, a master of its present values. store_param_remainders:
        whether that is a remainder, as this optimizer has it. ValueError for anything else, and for a parameter of
        another dtype than allowed."""
        local = local_part(param)
        quantized = isinstance(local, QuantizedTensor)
        if not quantized and local.dtype not in (torch.float32, torch.float16, torch.bfloat16):
            raise ValueError(
                f"FusedAdam was given a parameter of {local.dtype}; allowed: float32, float16, bfloat16, quantized"
            )
        remainder = self._has_remainder(local)
        if store_param_remainders not in (None, remainder):
            raise ValueError(f"store_param_remainders is {store_param_remainders}; allowed: {remainder}")
        state: dict[str, Tensor] = self.state[param]
        for name in _MOMENTS:
            state[name] = torch.zeros_like(param, dtype=STORED_AS[self._dtypes[name]], requires_grad=False)
            if state[name].dtype in LARGEST:
                self._scales.setdefault(param, {})[name] = torch.ones(1, dtype=torch.float32, device=local.device)
        if remainder:
            state["master_param"] = torch.zeros_like(param, dtype=torch.int16, requires_grad=False)
        elif quantized or (self.master_weights and local.dtype is not torch.float32):
            self._store(param, "master_param", new_master(param))

    def _has_remainder(self, local: Tensor) -> bool:
        return self.store_param_remainders and local.dtype is torch.bfloat16 and not isinstance(local, QuantizedTensor)

    def get_unscaled_state(self, param: Tensor, state_name: str) -> Tensor:
        """Return an entry of a parameter's state in float32; a remainder as it is, int16."""
        stored = self.state[param][state_name]
        return stored if stored.dtype is torch.int16 else decode(stored, self._scales.get(param, {}).get(state_name))

    @torch.no_grad()
    def set_scaled_state(self, param: Tensor, state_name: str, unscaled_state: Tensor) -> None:
        """Store an entry of a parameter's state. unscaled_state: float32, for a remainder int16. Raises ValueError for
        another dtype or shape, and for a name that the state of this parameter does not have."""
        if not self.state[param]:
            self.initialize_state(param)
        expected = self._expected(param)
        if state_name not in expected:
            raise ValueError(f"state_name is {shown(state_name)}; allowed for this parameter: {', '.join(expected)}")
        check_entries(param, {state_name: unscaled_state}, {state_name: expected[state_name]}, set())
        self._store(param, state_name, unscaled_state)

    def _store(self, param: Tensor, name: str, unscaled: Tensor) -> None:
        dtype = torch.int16 if unscaled.dtype is torch.int16 else STORED_AS[self._dtypes[name]]
        if name not in self.state[param]:
            self.state[param][name] = torch.zeros_like(param, dtype=dtype, requires_grad=False)
        encoded, scale = encode(local_part(unscaled), dtype)
        local_part(self.state[param][name]).copy_(encoded)
        if scale is not None:
            self._scales.setdefault(param, {})[name] = scale.to(local_part(param).device)

    def _expected(self, parameter: Tensor) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Return shape and dtype of each entry of a parameter's state as a state dict holds it."""
        local = local_part(parameter)
        shape, remainder = tuple(local.shape), self._has_remainder(local)
        found: dict[str, tuple[tuple[int, ...], torch.dtype]] = dict.fromkeys(_MOMENTS, (shape, torch.float32))
        quantized = isinstance(local, QuantizedTensor)
        if quantized or remainder or (self.master_weights and local.dtype is not torch.float32):
            found["master_param"] = (shape, torch.int16 if remainder else torch.float32)
        return found

    def state_dict(self) -> dict[str, Any]:
        """Return torch's state dict with every entry in float32, remainders in int16."""
        found = super().state_dict()
        parameters = [p for group in self.param_groups for p in group["params"]]
        numbers = [i for group in found["param_groups"] for i in group["params"]]
        for i, parameter in zip(numbers, parameters, strict=True):
            if i in found["state"]:
                names = found["state"][i]
                found["state"][i] = {name: self.get_unscaled_state(parameter, name) for name in names}
        return found

    def _check_state(self, parameter: Tensor, entries: dict[str, Any]) -> None:
        check_entries(parameter, entries, self._expected(parameter), {"master_param"})

    @torch.no_grad()
    def _restore(self, parameter: Tensor, entries: dict[str, Tensor]) -> None:
        self.state[parameter] = {}
        for name, value in entries.items():
            self._store(parameter, name, value)

    # --- the step --------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(  # type: ignore[override]
        self, closure: Callable[[], Any] | None = None, grad_scaler: torch.amp.GradScaler | None = None
    ) -> Any:
        """Update every parameter that has a gradient. grad_scaler: the gradients are still scaled; the step divides
        them, and changes nothing where one is infinite or NaN, decided on the device. ValueError for a grad_scaler
        without capturable, and for sparse gradients."""
        if grad_scaler is not None and not self.capturable:
            raise ValueError("grad_scaler is given, and capturable is False; allowed: capturable=True, or None")
        loss = loss_of(closure)
        self._scaling = None if grad_scaler is None else self._read_scaling(grad_scaler)
        noop = None if self._scaling is None else self._scaling.found_inf
        for group in self.param_groups:
            if self.capturable:
                device = _device_of(group)
                one = torch.ones(1, dtype=torch.int32, device=device)
                counted = one if noop is None else (noop.reshape(1).to(device) == 0).int()
                group["step"] = group["step"].add_(counted) if "step" in group else counted
            else:
                group["step"] = group.get("step", 0) + 1
        try:
            self._update_parameters(noop)
        finally:
            self._scaling = None
        return loss

    def _read_scaling(self, grad_scaler: torch.amp.GradScaler) -> _Scaling:
        if not isinstance(grad_scaler, GradScaler):
            self.require_read_by_torch()
        found = list(grad_scaler._check_inf_per_device(self).values())  # type: ignore[attr-defined]
        scale: Tensor = grad_scaler._get_scale_async()  # type: ignore[attr-defined]
        flags = torch.stack([flag.to(scale.device) for flag in found]) if found else scale.new_zeros(1)
        return _Scaling(scale.double().reciprocal().float(), flags.amax())

    def _state_of(self, parameter: Tensor, group: dict[str, Any]) -> dict[str, Tensor]:
        """Return a parameter's state and, for this step, its scales and its step count, as tensors."""
        state: dict[str, Tensor] = self.state[parameter]
        if not state:
            self.initialize_state(parameter)
        elif "master_param" in self._expected(parameter) and "master_param" not in state:  # loaded without
            remainder = self._has_remainder(local_part(parameter))
            new = torch.zeros_like(parameter, dtype=torch.int16) if remainder else new_master(parameter)
            self._store(parameter, "master_param", new)
        scales = {f"{name} scale": scale for name, scale in self._scales.get(parameter, {}).items()}
        # after infinitely many steps a bias has nothing left to correct
        count = group.get("step", 0) if group["bias_correction"] else float("inf")
        step = torch.as_tensor(count, dtype=torch.float32, device=local_part(parameter).device).reshape(())
        return state | scales | {"step": step}

    def _begin(self, piece: ParameterSlice) -> Update:
        if piece.gradient.is_sparse:
            raise ValueError("the gradient of a parameter is sparse; allowed: dense gradients")
        local, state = piece.parameter, piece.state
        entries = {name: decode(state[name], state.get(f"{name} scale")) for name in _MOMENTS}
        master = state.get("master_param")
        if master is None:
            weight = values(local, torch.float32)
        elif master.dtype is torch.int16:
            weight = whole_master(local, master)
        else:
            weight = decode(master, state.get("master_param scale"))
        gradient = piece.gradient.to(torch.float32)
        if self._scaling is not None:
            gradient = gradient * self._scaling.inverse.to(gradient.device)
        return Update(piece, weight, gradient, entries["exp_avg"], entries["exp_avg_sq"])

    def _finish(self, work: list[Update], group: dict[str, Any], noop: Tensor | None) -> None:
        update_(work, group, noop, decoupled_weight_decay=self.adam_w_mode)
        for update in work:
            state = update.piece.state
            entries = {"exp_avg": update.first, "exp_avg_sq": update.second}
            master = state.get("master_param")
            if master is not None and master.dtype is torch.int16:
                update.weight, remainder = split_master(update.weight)
                master.copy_(remainder)
            elif master is not None:
                entries["master_param"] = update.weight
            for name, value in entries.items():
                if value is not state[name]:
                    encoded, scale = encode(value, state[name].dtype)
                    state[name].copy_(encoded)
                    if scale is not None:
                        state[f"{name} scale"].copy_(scale)
            self._write_weight(update, noop)


def _device_of(group: dict[str, Any]) -> torch.device:
    return group["params"][0].device if group["params"] else torch.device("cpu")
