"""The layer of experts: one GEMM per group of rows."""

from typing import Any

import torch
from torch import Tensor, nn

from te_models.kernels.permute import Permutation

from ..distributed.tensor_parallel import WHOLE, TensorParallelModule, TensorParallelSplit
from ..gemm.grouped import add_bias_rows, gradient_into, grouped_linear, written_into
from ..gemm.product import quantized_gemms
from ..gemm.quantized_rows import row_align_of
from ..quantizer.group_offsets import check_row_counts
from ..tensor.grouped_tensor import GroupedTensor
from ..tensor.quantized_tensor import QuantizedTensor
from .base import GemmModule
from .options import DEFAULT_PARAMETERS, IN_BACKWARD, ParameterOptions, WeightGradients
from .primary_weights import default_init_method, empty_parameter, materialising, store_weights_as_asked


class GroupedLinear(TensorParallelModule, GemmModule):
    """`y[g] = x[g] w[g]^T + b[g]` for `num_gemms` groups of rows: `te_models.layers.GroupedLinear`, options as values.

    split: as for `Linear`, for every member alike; the layer does not itself communicate: gather before a column layer,
    sum after a row layer, once for all groups. return_bias may be set later.
    """

    weight: nn.Parameter  # in the grouped layout

    def __init__(
        self,
        num_gemms: int,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        single_grouped_weight: bool = True,
        single_grouped_bias: bool | None = None,
        parameters: ParameterOptions = DEFAULT_PARAMETERS,
        split: TensorParallelSplit = WHOLE,
        gradients: WeightGradients = IN_BACKWARD,
        name: str = "",
    ) -> None:
        if num_gemms < 1:
            raise ValueError(f"num_gemms is {num_gemms}; allowed: a positive integer")
        super().__init__(num_gemms, name, gradients)
        in_features, out_features = self.split_features(split, in_features, out_features)
        self.num_gemms = num_gemms
        self.in_features = in_features
        self.out_features = out_features
        self.use_bias = bias
        self.single_grouped_weight = single_grouped_weight
        self.single_grouped_bias = single_grouped_weight if single_grouped_bias is None else single_grouped_bias
        self.init_method = parameters.init_method or default_init_method
        new = {"params_dtype": parameters.dtype, "device": parameters.device}
        shapes = {"weight": (out_features, in_features)} | ({"bias": (out_features,)} if bias else {})
        for g in range(num_gemms):
            for kind, shape in shapes.items():
                if not self._is_grouped(kind):
                    self.register_parameter(f"{kind}{g}", empty_parameter(*shape, **new))
                elif g == 0:
                    self.register_parameter(kind, empty_parameter(num_gemms, *shape, **new))
        if not bias and self.single_grouped_bias:
            self.bias = None
        self.reset_parameters()
        self.complete_state()
        store_weights_as_asked(self)
        for name, parameter in self.named_parameters():
            self.mark_part(parameter, self._member_dim(name))
        self.register_load_state_dict_pre_hook(_accept_either_layout)

    def weight_names(self) -> tuple[str, ...]:
        """Return the names of the weight parameters: ("weight",), or one per GEMM."""
        return self._names("weight")

    def gemm_weights(self) -> dict[int | None, tuple[Any, ...]]:
        return {None: tuple(getattr(self, name) for name in self.weight_names())}

    def _is_grouped(self, kind: str) -> bool:
        return self.single_grouped_bias if kind == "bias" else self.single_grouped_weight

    def _names(self, kind: str) -> tuple[str, ...]:
        return (kind,) if self._is_grouped(kind) else tuple(f"{kind}{g}" for g in range(self.num_gemms))

    @materialising
    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Initialise every member again."""
        for name, parameter in self.named_parameters():
            if name.startswith("bias"):
                parameter.zero_()
            else:
                self.fill_part(parameter, self.init_method, self._member_dim(name))

    def _member_dim(self, name: str) -> int | None:
        """Return `split_dim` of the named parameter: where members are stacked, one more than of a member."""
        bias = name.startswith("bias")
        dim = self.split_dim(bias=bias)
        return None if dim is None else dim + self._is_grouped("bias" if bias else "weight")

    def row_align(self, device: torch.device) -> int:
        """Return the `align` for `sort_by_expert` with which `forward` quantizes tokens as it permutes them, under the
        recipe in force: more than 1 on an accelerator, for formats with blocks of one row, without a bias. 1 where no
        gradients are wanted, too: then no GEMM contracts rows, and few tokens are not filled up to many."""
        fits = quantized_gemms(device) and torch.is_grad_enabled() and self.tp_size == 1
        fits = fits and not self.use_bias and not self.save_original_input
        return row_align_of(self.gemm_quantizers(), device) if fits else 1

    def forward(
        self,
        x: Tensor,
        m_splits: Tensor | list[int],
        is_first_microbatch: bool | None = None,
        out: Tensor | None = None,
        dgrad_out: Tensor | None = None,
        *,
        permutation: Permutation | None = None,
        row_align: int = 1,
    ) -> Tensor | tuple[Tensor, list[Tensor] | None]:
        """x: [T, in_features], rows sorted by group, or [..., in_features], the leading dimensions T in all; m_splits:
        [num_gemms] rows per group, a device tensor (never read on the host) or a list. Returns [T, out_features] or
        [..., out_features]; rows past the last group are zero. is_first_microbatch: as for `Linear`.
        out: [T, out_features] in the compute dtype, where the result is written, and whose memory it then has;
        dgrad_out: [T, in_features] in x's dtype, where backward writes the gradient of x. Both contiguous and without a
        `.grad`; of either, rows past the last group stay as they are. ValueError for others.
        permutation: x are tokens instead, and T the rows that `permute` makes of them; where this is made with the
        `align` that `row_align` returns, permutation, padding and quantization are one pass. row_align: a number that
        all splits are known to be multiples of, filled up with rows of zeros: such rows are not padded again."""
        if not isinstance(m_splits, Tensor):
            m_splits = torch.tensor(m_splits, device="cpu")
        shape = x.shape
        if len(shape) != 2:
            x = x.reshape(-1, shape[-1])
        self.check_splits(m_splits, x.shape[0] if permutation is None else permutation.slot_of_row.shape[0])
        if m_splits.device != x.device:
            m_splits = m_splits.to(x.device)
        if dgrad_out is not None:
            x = gradient_into(x, dgrad_out, m_splits if permutation is None else None)
        weights = (self.weight,) if self.single_grouped_weight else self._members("weight")
        own = self.use_bias and not (self.parallel_mode == "row" or self.return_bias)
        bias = self._stacked_bias() if own else None
        call = self.gemm_call(is_first_microbatch)
        y = grouped_linear(x, weights, bias, m_splits, call, permutation=permutation, row_align=row_align)
        if out is not None:
            y = written_into(y, out, m_splits)
        if len(shape) != 2 and permutation is None:
            y = y.view(*shape[:-1], y.shape[-1])
        return (y, self._returned_bias(y.dtype)) if self.return_bias else y

    def _returned_bias(self, dtype: torch.dtype) -> list[Tensor] | None:
        if not self.use_bias:
            return None
        biases = self._members("bias")
        return [bias.to(dtype) for bias in (biases[0].unbind(0) if self.single_grouped_bias else biases)]

    def with_bias(self, y: Tensor, m_splits: Tensor, *, partial: bool = False) -> Tensor:
        """Return y: [T, out_features] plus each row's bias, if the layer has one: what `forward` does itself but for a
        row layer. partial: y is this rank's part of a sum that is still to be taken over the ranks, so that one of them
        adds the bias."""
        bias = self._stacked_bias()
        if bias is None:
            return y
        return add_bias_rows(y, self.on_first_rank(bias) if partial else bias, m_splits)

    def _stacked_bias(self) -> Tensor | None:
        """Return the biases, [num_gemms, out_features]."""
        if not self.use_bias:
            return None
        biases = self._members("bias")
        return biases[0] if self.single_grouped_bias else torch.stack(biases)

    def members(self) -> tuple[tuple[nn.Parameter, ...], tuple[nn.Parameter, ...]]:
        """Return the weights and the biases: one each in the grouped layout, else one per GEMM; no biases if unused."""
        return self._members("weight"), self._members("bias") if self.use_bias else ()

    def _members(self, kind: str) -> tuple[nn.Parameter, ...]:
        if self._is_grouped(kind):
            return (getattr(self, kind),)
        return tuple([getattr(self, f"{kind}{g}") for g in range(self.num_gemms)])

    def check_splits(self, m_splits: Tensor, rows: int) -> None:
        """Raise ValueError unless there is one number of rows per GEMM; their values: see `check_row_counts`."""
        if m_splits.shape != (self.num_gemms,):
            raise ValueError(f"m_splits has shape {tuple(m_splits.shape)}; allowed: ({self.num_gemms},), one per GEMM")
        if m_splits.is_floating_point() or m_splits.dtype is torch.bool:
            raise ValueError(f"m_splits has dtype {m_splits.dtype}; allowed: an integer dtype")
        check_row_counts(m_splits, rows)

    def extra_repr(self) -> str:
        layout, bias = ("grouped" if self._is_grouped(kind) else "per-GEMM" for kind in ("weight", "bias"))
        bias = f"bias={self.use_bias}" + (f" ({bias})" if self.use_bias and bias != layout else "")
        return f"{self.num_gemms} x ({self.in_features}, {self.out_features}), {bias}, {layout}"


def _accept_either_layout(module: GroupedLinear, state: dict, prefix: str, *_: object) -> None:
    """Rewrite the other layout's keys of `state` into this module's; a partial set of members is an error, and so are
    keys of both layouts, of which one would be forgotten."""
    for kind in ("weight", "bias") if module.use_bias else ("weight",):
        members = [f"{prefix}{kind}{g}" for g in range(module.num_gemms)]
        grouped = f"{prefix}{kind}"
        present = [key for key in members if key in state]
        if present and grouped in state:
            shown = ", ".join(present if len(present) < 4 else (present[0], "...", present[-1]))
            raise RuntimeError(f"the state dict has {grouped} and {shown}; allowed: one of the two layouts")
        if module._is_grouped(kind):
            if present and len(present) < len(members):
                missing = sorted(set(members) - set(present))
                raise RuntimeError(f"the state dict has {present[0]} but lacks {', '.join(missing)}")
            if present:
                state[grouped] = _stack(members, state)
        elif grouped in state:
            found = _unstack(state.pop(grouped))
            if len(found) != len(members):
                raise RuntimeError(f"the state dict's {grouped} has {len(found)} members; expected {len(members)}")
            state.update(zip(members, found, strict=True))


def _stack(keys: list[str], state: dict) -> Tensor:
    tensors = [state.pop(key) for key in keys]
    quantized = [isinstance(tensor, QuantizedTensor) for tensor in tensors]
    if all(quantized):
        return GroupedTensor.from_members(tensors)
    if any(quantized):
        high, low = keys[quantized.index(False)], keys[quantized.index(True)]
        raise RuntimeError(f"the state dict has {high} in high precision and {low} quantized")
    return torch.stack(tensors)


def _unstack(tensor: Tensor) -> list[Tensor]:
    return list(tensor.members() if isinstance(tensor, GroupedTensor) else tensor.unbind(0))
