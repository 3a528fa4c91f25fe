"""A norm followed by a dense layer, as one module: the pair that a fused kernel can serve."""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from ..distributed.tensor_parallel import InitMethod, TensorParallelModule
from ..functional.linear import linear
from ..te_arguments import TRACKER, USER_BUFFERS, takes_at_default
from .base import GemmModule
from .norm import PrecedingNorm
from .primary_weights import default_init_method, empty_parameter, materialising, store_weights_as_asked


class LayerNormLinear(TensorParallelModule, PrecedingNorm, GemmModule):
    """`y = norm(x) w^T + b`. Transformer Engine: `te.pytorch.LayerNormLinear`.

    Parameters: layer_norm_weight [in] (unless norm_weight is False), layer_norm_bias [in] (with norm_bias, by default
    for LayerNorm), weight [out, in], bias [out]. cast_order None: each norm's own default. parallel_mode "column" and
    its companions: as for `Linear`; under sequence parallelism each rank normalises its own rows. return_bias: as for
    `Linear`; return_layernorm_output: also return norm(x), after y and a returned bias. The other options: see
    `GemmModule`. Raises ValueError for parallel_mode "row": a norm needs whole rows.
    """

    @takes_at_default(**TRACKER, **USER_BUFFERS, parameters_split=None, return_layernorm_output_gathered=False)
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
        device: torch.device | str | None = None,
        delay_wgrad_compute: bool = False,
        name: str = "",
    ) -> None:
        super().__init__(1, name, fuse_wgrad_accumulation, delay_wgrad_compute, False)
        if parallel_mode not in (None, "column"):
            raise ValueError(f"parallel_mode is {parallel_mode!r}; allowed: None, 'column' (a norm needs whole rows)")
        ranks: dict[str, Any] = {"tp_group": tp_group, "tp_size": tp_size, "sequence_parallel": sequence_parallel}
        in_features, out_features = self.split_features(parallel_mode, in_features, out_features, **ranks)
        self.in_features = in_features
        self.out_features = out_features
        self.init_method = init_method or default_init_method
        self.return_bias = return_bias
        self.return_layernorm_output = return_layernorm_output
        new = {"params_dtype": params_dtype, "device": device}
        self.add_norm(in_features, normalization, eps, zero_centered_gamma, cast_order, norm_weight, norm_bias, **new)
        self.weight = empty_parameter(out_features, in_features, **new)
        self.bias = empty_parameter(out_features, **new) if bias else None
        self.reset_parameters()
        self.complete_state()
        store_weights_as_asked(self)
        self.mark_part(self.weight, self.split_dim())
        self.mark_part(self.bias, self.split_dim(bias=True))

    @materialising
    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Initialise the parameters anew."""
        self.reset_norm()
        self.fill_part(self.weight, self.init_method, self.split_dim())
        if self.bias is not None:
            self.bias.zero_()

    def forward(self, x: Tensor, is_first_microbatch: bool | None = None) -> Tensor | tuple[Tensor | None, ...]:
        """x: [..., in_features] -> [..., out_features], in the compute dtype. is_first_microbatch: as for `Linear`."""
        return self.forward_with_norm(x, is_first_microbatch, self.return_layernorm_output)[0]

    def forward_with_norm(
        self, x: Tensor, is_first_microbatch: bool | None = None, wanted: bool = True
    ) -> tuple[Tensor | tuple[Tensor | None, ...], Tensor | None]:
        """Return (what `forward` returns, norm(x) [..., in_features], or None where it is not `wanted` and the norm may
        be fused with the quantization)."""
        weight = self.weight
        call = self.gemm_call((weight,), is_first_microbatch, 0)
        bias, normed = None if self.return_bias else self.bias, None
        if self.parallel_mode is None and not wanted:
            y = linear(x, weight, bias, call, self.prologue())
        else:
            normed = self.normed(x, None if self.parallel_mode is None else self.for_own_rows)
            y = linear(normed if self.parallel_mode is None else self.whole_rows(normed), weight, bias, call)
        return self.results(y, self.bias, normed), normed  # this rank's part of the bias, beside whole rows

    def extra_repr(self) -> str:
        return f"{self.normalization}, {self.in_features}, {self.out_features}, bias={self.bias is not None}"
