"""A norm followed by a two-layer MLP, as one module."""

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from te_models.kernels.activation import Activation
from te_models.suggestions import check_choice

from ...distributed.tensor_parallel import InitMethod, TensorParallelModule
from ...gemm.autograd import linear_function
from ...gemm.prologue import Prologue
from ...module.base import GemmModule
from ...module.norm import PrecedingNorm
from ...module.options import ParameterOptions, PrecedingNormOptions, WeightGradients
from ...module.primary_weights import default_init_method, empty_parameter, materialising, store_weights_as_asked
from ...recipe.activation_checkpoint import checkpointed
from ..arguments import SHAPES, takes_at_default, takes_parallel_options, takes_without_effect
from ..state import TEState

# Transformer Engine's activation names -> (ours, gated)
MLP_ACTIVATIONS = {
    "gelu": ("gelu_tanh", False),
    "geglu": ("gelu_tanh", True),
    "glu": ("sigmoid", True),
    "qgelu": ("quick_gelu", False),
    "qgeglu": ("quick_gelu", True),
    "relu": ("relu", False),
    "reglu": ("relu", True),
    "silu": ("silu", False),
    "swiglu": ("silu", True),
    "srelu": ("squared_relu", False),
    "sreglu": ("squared_relu", True),
    "clamped_swiglu": ("silu", True),
}
_CLAMPED = {"limit": 7.0, "alpha": 1.702, "glu_linear_offset": 1.0}


class LayerNormMLP(TEState, TensorParallelModule, PrecedingNorm, GemmModule):
    """`y = act(norm(x) w1^T + b1) w2^T + b2`. Transformer Engine: `te.pytorch.LayerNormMLP`.

    activation: a key of MLP_ACTIVATIONS; the *glu ones are gated, fc1 then has 2 * ffn_hidden_size rows [gate | up].
    "clamped_swiglu" is gpt-oss's, with activation_params limit (7.0), alpha (1.702) and glu_linear_offset (1.0).
    output_layer_init_method: of fc2_weight, None: N(0, 0.023^2). checkpoint: save only the input; the backward pass
    computes norm, fc1 and activation again, the same bits. seq_length and micro_batch_size change nothing.
    Parameters: layer_norm_weight, layer_norm_bias, fc1_weight, fc1_bias, fc2_weight, fc2_bias. set_parallel_mode: split
    fc1 by column and fc2 by row over the ranks of tp_group, see `tensor_parallel`; of a gated fc1 each rank has its
    part of the gate rows and of the up rows (partition_stride 2). return_bias: as for `Linear`, of fc2;
    return_layernorm_output: also return norm(x), after y and a returned bias. ValueError for an unknown activation.
    """

    STATISTICS_SLOTS = ("fc1", "fc2")

    @takes_parallel_options
    @takes_at_default(
        return_layernorm_output_gathered=False,
    )
    @takes_without_effect(*SHAPES)
    def __init__(
        self,
        hidden_size: int,
        ffn_hidden_size: int,
        eps: float = 1e-5,
        bias: bool = True,
        *,
        normalization: str = "LayerNorm",
        activation: str = "gelu",
        activation_params: Mapping[str, float] | None = None,
        zero_centered_gamma: bool = False,
        cast_order: str | None = None,
        sequence_parallel: bool = False,
        fuse_wgrad_accumulation: bool = False,
        tp_group: dist.ProcessGroup | None = None,
        tp_size: int = 1,
        init_method: InitMethod | None = None,
        output_layer_init_method: InitMethod | None = None,
        return_bias: bool = False,
        return_layernorm_output: bool = False,
        params_dtype: torch.dtype | None = None,
        set_parallel_mode: bool = False,
        device: torch.device | str | None = None,
        delay_wgrad_compute: bool = False,
        checkpoint: bool = False,
        name: str = "",
    ) -> None:
        super().__init__(2, name, WeightGradients(fuse_wgrad_accumulation, delay_wgrad_compute))
        check_choice("activation", activation, MLP_ACTIVATIONS)
        self.set_parallel(tp_group, tp_size, sequence_parallel)
        self.asked_mode = "column" if set_parallel_mode else None
        self.set_parallel_mode = set_parallel_mode and self.tp_size > 1
        if self.set_parallel_mode:
            ffn_hidden_size = self.part(ffn_hidden_size, "ffn_hidden_size")
        self.hidden_size = hidden_size
        self.ffn_hidden_size = ffn_hidden_size
        self.activation = activation
        self._act = _activation(activation, activation_params)
        self.init_method = init_method or default_init_method
        self.return_bias = return_bias
        self.return_layernorm_output = return_layernorm_output
        self.checkpoint = checkpoint
        self.output_layer_init_method = output_layer_init_method or default_init_method
        new = {"params_dtype": params_dtype, "device": device}
        self._blocks = 2 if MLP_ACTIVATIONS[activation][1] else 1  # of fc1's rows: the gate's and the others, or one
        rows = ffn_hidden_size * self._blocks
        norm = PrecedingNormOptions(normalization, eps, zero_centered_gamma, cast_order)
        self.add_norm(hidden_size, norm, ParameterOptions(params_dtype, device))
        self.fc1_weight = empty_parameter(rows, hidden_size, **new)
        self.fc1_bias = empty_parameter(rows, **new) if bias else None
        self.fc2_weight = empty_parameter(hidden_size, ffn_hidden_size, **new)
        self.fc2_bias = empty_parameter(hidden_size, **new) if bias else None
        self.reset_parameters()
        self.complete_state()
        store_weights_as_asked(self)
        fc1_dim, fc2_dim = self._split_dims()
        self.mark_part(self.fc1_weight, fc1_dim, self._blocks)
        self.mark_part(self.fc1_bias, fc1_dim, self._blocks)
        self.mark_part(self.fc2_weight, fc2_dim)

    @materialising
    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Initialise the parameters again."""
        self.reset_norm()
        fc1_dim, fc2_dim = self._split_dims()
        self.fill_part(self.fc1_weight, self.init_method, fc1_dim, self._blocks)
        self.fill_part(self.fc2_weight, self.output_layer_init_method, fc2_dim)
        for bias in (self.fc1_bias, self.fc2_bias):
            if bias is not None:
                bias.zero_()

    def _split_dims(self) -> tuple[int | None, int | None]:
        return (None, None) if self.asked_mode is None else (0, 1)

    def weight_names(self) -> tuple[str, ...]:
        return ("fc1_weight", "fc2_weight")

    def forward(self, x: Tensor, is_first_microbatch: bool | None = None) -> Tensor | tuple[Tensor | None, ...]:
        """x: [..., hidden_size] -> [..., hidden_size], in the compute dtype. is_first_microbatch: as for `Linear`."""
        if self.checkpoint and torch.is_grad_enabled():
            return checkpointed(self._run, x, is_first_microbatch)
        return self._run(x, is_first_microbatch)

    def _run(self, x: Tensor, is_first_microbatch: bool | None) -> Tensor | tuple[Tensor | None, ...]:
        hidden, normed = self.forward_fc1(x, is_first_microbatch, self.return_layernorm_output)
        return self.forward_fc2(hidden, normed, is_first_microbatch)[0]

    def forward_fc1(
        self, x: Tensor, is_first_microbatch: bool | None = None, wanted: bool = True
    ) -> tuple[Tensor, Tensor | None]:
        """x: [..., hidden_size] -> (what the activation gets [..., rows of fc1], norm(x), or None where it is not
        `wanted` and the norm may be fused with the quantization)."""
        fc1 = self.fc1_weight
        call = self.gemm_call(is_first_microbatch, 0)
        if self.set_parallel_mode or wanted:
            normed = self.normed(x, self.for_own_rows if self.set_parallel_mode else None)
            rows = self.whole_rows(normed) if self.set_parallel_mode else normed
            return linear_function(rows, fc1, self.fc1_bias, call), normed
        return linear_function(x, fc1, self.fc1_bias, call, self.prologue()), None

    def forward_fc2(
        self,
        hidden: Tensor,
        normed: Tensor | None,
        is_first_microbatch: bool | None = None,
        wanted: bool = False,
    ) -> tuple[Tensor | tuple[Tensor | None, ...], Tensor | None]:
        """hidden, normed: as `forward_fc1` returns them -> (what `forward` returns, the activated hidden values
        [..., ffn_hidden_size], or None where they are not `wanted` and may be fused with the quantization)."""
        fc2, split, activated = self.fc2_weight, self.set_parallel_mode, None
        call = self.gemm_call(is_first_microbatch, 1)
        bias = None if self.return_bias else self.fc2_bias
        if wanted:
            activated = self._act.forward(hidden)
            y = linear_function(activated, fc2, None if split else bias, call)
        else:
            y = linear_function(hidden, fc2, None if split else bias, call, Prologue(self._act))
        y = self.summed(y, bias) if split else y
        own = self.fc2_bias
        if self.return_bias and split and own is not None:
            own = self.for_own_rows(own)
        return self.results(y, own, normed), activated

    def extra_repr(self) -> str:
        return f"{self.normalization}, {self.hidden_size}, {self.ffn_hidden_size}, {self.activation}"


def _activation(name: str, params: Mapping[str, float] | None) -> Activation:
    """Return the activation of this name. ValueError for parameters that it does not have."""
    known = _CLAMPED if name == "clamped_swiglu" else {}
    unknown = sorted(set(params or {}) - set(known))
    if unknown:
        raise ValueError(f"activation_params has {unknown[0]!r} with activation {name!r}; allowed: {sorted(known)}")
    values = {**known, **(params or {})}
    names = {"clamp": "limit", "alpha": "alpha", "up_offset": "glu_linear_offset"} if known else {}
    options: dict[str, Any] = {ours: values[theirs] for ours, theirs in names.items()}
    return Activation(*MLP_ACTIVATIONS[name], **options)
