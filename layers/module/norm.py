"""LayerNorm and RMSNorm modules."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from te_models.kernels.norm import Norm, layer_norm, rms_norm
from te_models.suggestions import check_choice

from ..gemm.prologue import Prologue
from .extra_state import leave_extra_state
from .options import ParameterOptions, PrecedingNormOptions
from .primary_weights import empty_parameter, materialising


class _Norm(nn.Module):
    """Parameters of a norm. weight: [*normalized_shape] or None; bias: alike; hidden_size: how many numbers a norm is
    of."""

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float,
        zero_centered_gamma: bool,
        cast_order: str,
        has_weight: bool,
        bias: bool,
        params_dtype: torch.dtype | None,
        device: torch.device | str | None,
    ) -> None:
        super().__init__()
        check_choice("cast_order", cast_order, ("weight_first", "weight_last"))
        shape = (normalized_shape,) if isinstance(normalized_shape, int) else tuple(normalized_shape)
        if not shape:
            raise ValueError("normalized_shape is empty; allowed: a number, or a sequence of numbers")
        self.normalized_shape = shape
        self.hidden_size = math.prod(shape)
        self.register_load_state_dict_pre_hook(leave_extra_state)
        self.eps = eps
        self.zero_centered_gamma = zero_centered_gamma
        self.cast_order = cast_order
        new = {"params_dtype": params_dtype, "device": device}
        self.weight = empty_parameter(*shape, **new) if has_weight else None
        self.bias = empty_parameter(*shape, **new) if bias else None
        self.reset_parameters()

    @materialising
    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Start as the plain normalisation: gamma 1, beta 0."""
        if self.weight is not None:
            self.weight.fill_(0.0 if self.zero_centered_gamma else 1.0)
        if self.bias is not None:
            self.bias.zero_()

    def extra_repr(self) -> str:
        options = f"eps={self.eps}, zero_centered_gamma={self.zero_centered_gamma}, {self.cast_order}"
        return f"{', '.join(map(str, self.normalized_shape))}, {options}"


def flat_input(x: Tensor, normalized_shape: tuple[int, ...]) -> Tensor:
    """Return x: [..., *normalized_shape] with its last dimensions as one: [..., hidden_size]. ValueError for other
    dimensions than these."""
    count = len(normalized_shape)
    if count == 1:
        return x
    if tuple(x.shape[-count:]) != normalized_shape:
        allowed = ", ".join(map(str, normalized_shape))
        raise ValueError(f"the input has shape {tuple(x.shape)}; allowed: [..., {allowed}]")
    return x.flatten(-count)


def flat_parameter(parameter: Tensor | None) -> Tensor | None:
    """Return a parameter of a norm as [hidden_size]."""
    return parameter if parameter is None or parameter.dim() == 1 else parameter.flatten()


class RMSNorm(_Norm):
    """Root mean square norm: `gamma * x / sqrt(mean(x^2) + eps)`; arguments: see `te_models.layers.RMSNorm`."""

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float = 1e-5,
        *,
        zero_centered_gamma: bool = False,
        cast_order: str = "weight_last",
        has_weight: bool = True,
        params_dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__(
            normalized_shape, eps, zero_centered_gamma, cast_order, has_weight, False, params_dtype, device
        )

    def forward(self, x: Tensor) -> Tensor:
        """Normalise x: [..., *normalized_shape]."""
        options: dict[str, Any] = {"zero_centered": self.zero_centered_gamma, "cast_order": self.cast_order}
        rows = flat_input(x, self.normalized_shape)
        return rms_norm(rows, flat_parameter(self.weight), self.eps, **options).view(x.shape)


class LayerNorm(_Norm):
    """Layer norm: `gamma * (x - mean) / sqrt(var + eps) + beta`; arguments as for RMSNorm, plus `bias`."""

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float = 1e-5,
        *,
        zero_centered_gamma: bool = False,
        cast_order: str = "weight_first",
        has_weight: bool = True,
        bias: bool = True,
        params_dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__(normalized_shape, eps, zero_centered_gamma, cast_order, has_weight, bias, params_dtype, device)

    def forward(self, x: Tensor) -> Tensor:
        """Normalise x: [..., *normalized_shape]."""
        options: dict[str, Any] = {"zero_centered": self.zero_centered_gamma, "cast_order": self.cast_order}
        weight, bias = flat_parameter(self.weight), flat_parameter(self.bias)
        rows = flat_input(x, self.normalized_shape)
        return layer_norm(rows, weight, bias, self.eps, **options).view(x.shape)


class PrecedingNorm(nn.Module):
    """Mixin of modules that normalise their input and hold the norm's parameters: layer_norm_weight [size] (absent
    where `weight` is False) and layer_norm_bias [size] (with `bias`, None: for LayerNorm)."""

    normalization: str
    eps: float
    zero_centered_gamma: bool
    cast_order: str

    def add_norm(self, size: int, norm: PrecedingNormOptions, parameters: ParameterOptions) -> None:
        """Create the parameters, of the norm of `size` numbers."""
        vars(self).update(
            normalization=norm.kind,
            eps=norm.eps,
            zero_centered_gamma=norm.zero_centered_gamma,
            cast_order=norm.cast_order or default_cast_order(norm.kind),
        )
        bias = norm.kind == "LayerNorm" if norm.bias is None else norm.bias
        new: dict[str, Any] = {"params_dtype": parameters.dtype, "device": parameters.device}
        self.layer_norm_weight = empty_parameter(size, **new) if norm.weight else None
        self.layer_norm_bias = empty_parameter(size, **new) if bias else None

    @torch.no_grad()
    def reset_norm(self) -> None:
        """Start as the plain normalisation: gamma 1, beta 0."""
        if self.layer_norm_weight is not None:
            self.layer_norm_weight.fill_(0.0 if self.zero_centered_gamma else 1.0)
        if self.layer_norm_bias is not None:
            self.layer_norm_bias.zero_()

    def normed(self, x: Tensor, on_parameters: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        """Normalise x: [..., size]. on_parameters: applied to each parameter before use."""
        weight, bias = self.layer_norm_weight, self.layer_norm_bias
        if on_parameters is not None:
            weight, bias = (p if p is None else on_parameters(p) for p in (weight, bias))
        return Prologue(self.prologue().function, weight, bias).run(x)

    def prologue(self) -> Prologue:
        """Return the norm with its parameters, as the prologue of a GEMM."""
        norm = Norm(self.normalization == "LayerNorm", self.eps, self.zero_centered_gamma, self.cast_order)
        return Prologue(norm, self.layer_norm_weight, self.layer_norm_bias)


def default_cast_order(normalization: str) -> str:
    """Return where the named norm rounds unless told otherwise; an unknown name raises ValueError."""
    orders = {"LayerNorm": "weight_first", "RMSNorm": "weight_last"}
    check_choice("normalization", normalization, orders)
    return orders[normalization]
