"""A norm followed by a dense layer, as one module: the pair that a fused kernel can serve."""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from te_models.suggestions import shown

from ..distributed.tensor_parallel import InitMethod
from ..gemm.autograd import linear
from ..te_arguments import takes_at_default, takes_parallel_options
from .norm import PrecedingNorm
from .parameters_split import ParametersSplit, SplitParameters
from .primary_weights import default_init_method, materialising, store_weights_as_asked


class LayerNormLinear(PrecedingNorm, SplitParameters):
    """`y = norm(x) w^T + b`. Transformer Engine: `te.pytorch.LayerNormLinear`.

    Parameters: layer_norm_weight [in] (unless norm_weight is False), layer_norm_bias [in] (with norm_bias, by default
    for LayerNorm), weight [out, in], bias [out]. cast_order None: each norm's own default. parallel_mode "column" and
    its companions: as for `Linear`; under sequence parallelism each rank normalises its own rows. return_bias,
    parameters_split: as for `Linear`; return_layernorm_output: also return norm(x), after y and a returned bias. The
    other options: see `GemmModule`. Raises ValueError for parallel_mode "row": a norm needs whole rows.
    """

    @takes_parallel_options
    @takes_at_default(return_layernorm_output_gathered=False)
    def __init__(
        self,
        in_features: int,
        out_features: int,
        eps: float = 1e-5,
        bias: bool = True,
        *,
        normalization: str = "LayerNorm",
        norm_weight: bool = True,
        norm_bias: bool | None = None,
        zero_centered_gamma: bool = False,
        cast_order: str | None = None,
        sequence_parallel: bool = False,
        fuse_wgrad_accumulation: bool = False,
        tp_group: dist.ProcessGroup | None = None,
        tp_size: int = 1,
        init_method: InitMethod | None = None,
        return_bias: bool = False,
        return_layernorm_output: bool = False,
        params_dtype: torch.dtype | None = None,
        parallel_mode: Literal["column"] | None = None,
        parameters_split: ParametersSplit | None = None,
        device: torch.device | str | None = None,
        delay_wgrad_compute: bool = False,
        name: str = "",
    ) -> None:
        super().__init__(1, name, fuse_wgrad_accumulation, delay_wgrad_compute, False)
        if parallel_mode not in (None, "column"):
            raise ValueError(
                f"parallel_mode is {shown(parallel_mode)}; allowed: None, 'column' (a norm needs whole rows)"
            )
        ranks: dict[str, Any] = {"tp_group": tp_group, "tp_size": tp_size, "sequence_parallel": sequence_parallel}
        sizes = self.split_features(parallel_mode, in_features, out_features, **ranks)
        self.in_features, self.out_features = sizes
        self.return_bias = return_bias
        self.return_layernorm_output = return_layernorm_output
        new: dict[str, Any] = {"params_dtype": params_dtype, "device": device}
        self.add_norm(in_features, normalization, eps, zero_centered_gamma, cast_order, norm_weight, norm_bias, **new)
        init_method = init_method or default_init_method
        self.add_parameters(parameters_split, in_features, out_features, bias, init_method, **new)
        self.reset_parameters()
        self.complete_state()
        store_weights_as_asked(self)
        self.mark_parameters()

    @materialising
    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Initialise the parameters anew."""
        self.reset_norm()
        super().reset_parameters()

    def forward(
        self, x: Tensor, is_first_microbatch: bool | None = None, fp8_output: bool = False, fp8_grad: bool = False
    ) -> Tensor | tuple[Tensor | None, ...]:
        """x: [..., in_features] -> [..., out_features], in the compute dtype. The arguments: as for `Linear`."""
        found = self.forward_with_norm(x, is_first_microbatch, self.return_layernorm_output, fp8_grad)[0]
        if not fp8_output:
            return found
        y, *others = found if isinstance(found, tuple) else (found,)
        assert y is not None, "only a bias or a norm is left out"
        y = self.output(y)
        return (y, *others) if others else y

    def forward_with_norm(
        self, x: Tensor, is_first_microbatch: bool | None = None, wanted: bool = True, fp8_grad: bool = False
    ) -> tuple[Tensor | tuple[Tensor | None, ...], Tensor | None]:
        """Return (what `forward` returns, norm(x) [..., in_features], or None where it is not `wanted` and the norm may
        be fused with the quantization)."""
        weight, own = self.joined("weight"), self.joined("bias")
        call = self.gemm_call((weight,), is_first_microbatch, 0)
        bias, normed = None if self.return_bias else own, None
        if fp8_grad:
            x = self.with_quantized_gradient(x, call)
        if self.parallel_mode is None and not wanted:
            y = linear(x, weight, bias, call, self.prologue())
        else:
            normed = self.normed(x, None if self.parallel_mode is None else self.for_own_rows)
            y = linear(normed if self.parallel_mode is None else self.whole_rows(normed), weight, bias, call)
        return self.results(y, own, normed), normed  # this rank's part of the bias, beside whole rows

    def extra_repr(self) -> str:
        return f"{self.normalization}, {self.in_features}, {self.out_features}, bias={self.joined('bias') is not None}"
