"""The weight and the bias of a layer with one GEMM, each one parameter or several that are joined for the GEMM."""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from te_models.kernels.compiling import compiling
from te_models.suggestions import shown

from ..distributed.tensor_parallel import TensorParallelModule
from ..gemm.prologue import quantized_gradient, quantized_output
from ..gemm.scaling import GemmCall
from ..quantizer import Quantizer
from ..quantizer.state import AnyQuantizer
from ..recipe.base import HIGH_PRECISION
from ..recipe.recipe_use import untracked_side_effect
from .base import GemmModule
from .options import ParameterOptions
from .primary_weights import default_init_method, empty_parameter, materialising

ParametersSplit = Mapping[str, int] | Sequence[str]
"""Rows of each parameter by its name, or names of parameters of equally many rows."""


class SplitParameters(TensorParallelModule, GemmModule):
    """Base of layers with one GEMM. Without parameters_split they have `weight` [out, in] and `bias` [out]; with it for
    each name, in order, `NAME_weight` [rows, in] and `NAME_bias` [rows].

    Raises ValueError for names without rows, rows that do not add up to out, or that ranks cannot share, and beside
    fuse_wgrad_accumulation or delay_wgrad_compute: a joined weight has no main gradient.
    """

    parameters_split: tuple[str, ...] | None = None
    weight: nn.Parameter
    bias: nn.Parameter | None

    def add_parameters(
        self,
        parameters_split: ParametersSplit | None,
        in_features: int,
        out_features: int,
        bias: bool,
        parameters: ParameterOptions,
    ) -> None:
        """Create the parameters. in_features: of this rank; out_features: of all ranks."""
        self.init_method = parameters.init_method or default_init_method
        new: dict[str, Any] = {"params_dtype": parameters.dtype, "device": parameters.device}
        rows = {"": out_features} if parameters_split is None else split_rows(parameters_split, out_features)
        if parameters_split is not None:
            self.parameters_split, self.weight_is_joined = tuple(rows), True
            for option, asked in (
                ("fuse_wgrad_accumulation", self.fuse_wgrad_accumulation),
                ("delay_wgrad_compute", self._later is not None),
            ):
                if asked:
                    raise ValueError(f"{option} is True beside parameters_split; allowed: one of the two")
        if self.parallel_mode == "column":
            rows = {prefix: self.part(count, f"the rows of {prefix}weight") for prefix, count in rows.items()}
        for prefix, count in rows.items():
            self.register_parameter(f"{prefix}weight", empty_parameter(count, in_features, **new))
        for prefix, count in rows.items():
            self.register_parameter(f"{prefix}bias", empty_parameter(count, **new) if bias else None)

    def _names(self, kind: str) -> tuple[str, ...]:
        return tuple([f"{prefix}{kind}" for prefix in self.parameters_split or ("",)])

    def weight_names(self) -> tuple[str, ...]:
        return self._names("weight")

    def gemm_weights(self) -> dict[int | None, tuple[Any, ...]]:
        return {0: (self.joined("weight"),)}

    def joined(self, kind: str) -> Any:
        """Return the "weight" [out, in] or the "bias" [out], None without one, of this rank."""
        parts = [getattr(self, name) for name in self._names(kind)]
        return parts[0] if len(parts) == 1 or parts[0] is None else torch.cat(parts)

    def joined_parameters(self) -> tuple[Any, Any]:
        """Return `joined` of both; layers of one weight, which most are, read the two parameters without a call."""
        return self.joined("weight"), self.joined("bias")

    def output(self, y: Tensor) -> Tensor:
        """Return y as the recipe in force quantizes the input of a GEMM, if one is; under delayed scaling with a scale
        of the earlier outputs."""
        quantizers = self.gemm_quantizers()
        if quantizers is None:
            return y
        return quantized_output(y, self._outer(quantizers.input, 0))

    def with_quantized_gradient(self, x: Tensor, call: GemmCall | None) -> Tensor:
        """Return x, whose gradient will be a quantized tensor, as the recipe in force quantizes gradients, if one is:
        with the copies that its quantizer makes. ValueError in a graph. call: of the layer."""
        if call is None or call.config is None or call.config.quantizers is HIGH_PRECISION or not x.requires_grad:
            return x
        quantizer = call.config.quantizers.grad_output
        if compiling():
            raise ValueError(
                "fp8_grad is True in a compiled function, out of whose graph torch lets no quantized gradient; "
                "allowed: the layer outside of compiled code"
            )
        live = functools.partial(self._outer, quantizer, 1) if quantizer.NEEDS_STATE else None
        return quantized_gradient(x, quantizer, call.state.key, live)

    def _outer(self, quantizer: Quantizer, slot: int) -> AnyQuantizer:
        """Return the live quantizer of outputs (0) or input gradients (1) under delayed scaling, else `quantizer`."""
        if not quantizer.NEEDS_STATE:
            return quantizer
        untracked_side_effect(setattr, self, "outer_used", True)
        amax = self.fp8_outer_amax[slot] if self.training else None
        return quantizer.with_state(self.fp8_outer_scale[slot], amax)  # type: ignore[attr-defined]

    @materialising
    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Initialise the parameters again."""
        for name in self._names("weight"):
            self.fill_part(getattr(self, name), self.init_method, self.split_dim())
        for name in self._names("bias"):
            if getattr(self, name) is not None:
                getattr(self, name).zero_()

    def mark_parameters(self) -> None:
        """Note on the parameters how they are split over ranks, once they are what they stay."""
        for kind in ("weight", "bias"):
            for name in self._names(kind):
                self.mark_part(getattr(self, name), self.split_dim(bias=kind == "bias"))


def split_rows(parameters_split: ParametersSplit, out_features: int) -> dict[str, int]:
    """Return the rows of each parameter by its prefix, "query_" for "query"."""
    if isinstance(parameters_split, str) or not parameters_split:
        raise ValueError(f"parameters_split is {shown(parameters_split)}; allowed: names, or rows by name, or None")
    names = list(parameters_split)
    prefixes = [f"{name.rstrip('_')}_" for name in names]
    if len(set(prefixes)) < len(prefixes):
        raise ValueError(f"parameters_split has a name twice: {names}; allowed: names that differ")
    if isinstance(parameters_split, Mapping):
        rows = list(parameters_split.values())
    else:
        if out_features % len(names):
            raise ValueError(f"parameters_split has {len(names)} names; allowed: a divisor of {out_features} rows")
        rows = [out_features // len(names)] * len(names)
    if min(rows) < 1 or sum(rows) != out_features:
        raise ValueError(f"parameters_split has rows {rows}; allowed: positive numbers that add up to {out_features}")
    return dict(zip(prefixes, rows, strict=True))
