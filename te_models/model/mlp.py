"""The dense feed-forward sublayer, and the shared experts of a mixture: one MLP with an optional gate.

H hidden, F feed-forward width.
"""

import dataclasses
import statistics
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from te_models.kernels.activation import Activation
from te_models.kernels.gemm import linear
from te_models.kernels.without_autocast import compute_dtype
from te_models.layers import current_recipe
from te_models.layers.gemm.product import quantized_gemms
from te_models.layers.module.linear import Linear

from ..config import MLPConfig, ModelConfig
from .build import Build, init_method, make_input_linear, make_output_linear
from .xielu import XIELU


def activation_of(mlp: MLPConfig) -> Activation:
    """Return the activation between the two projections: gated [..., 2F] -> [..., F], else [..., F] -> [..., F]."""
    if not mlp.gated:
        return Activation(mlp.activation)
    return Activation(mlp.activation, True, clamp=mlp.clamp, alpha=mlp.alpha, up_offset=mlp.up_offset)


def store_inputs_in_fp8(model: nn.Module, enabled: bool) -> None:
    """Set `Activation.fp8_input_store` of every MLP in a model, experts included."""
    for module, activation in _activations(model):
        changed: Any = dataclasses.replace(activation, fp8_input_store=enabled)
        module._activation = changed


def stores_inputs_in_fp8(model: nn.Module) -> bool:
    """Whether `store_inputs_in_fp8` is on in a model."""
    return any(activation.fp8_input_store for _, activation in _activations(model))


def _activations(model: nn.Module) -> Iterator[tuple[nn.Module, Activation]]:
    for module in model.modules():
        activation = getattr(module, "_activation", None)
        if isinstance(activation, Activation):
            yield module, activation


def output_projection(linear_fc2: nn.Module, activation: Activation, hidden: Tensor) -> Tensor:
    """Return `linear_fc2(activation(hidden))`. Under a recipe on an accelerator the projection gets the activation,
    too, whose result is then quantized as it is made; a module in the projection's place, an adapter, gets the
    result."""
    if isinstance(linear_fc2, Linear) and quantized_gemms(hidden.device) and current_recipe() is not None:
        return linear_fc2(hidden, activation=activation)
    return linear_fc2(activation.forward(hidden))


class MLP(nn.Module):
    """`act(x w1^T) w2^T`; `linear_fc1` includes the norm before it when `normed`, its rows are [gate | up] if gated."""

    def __init__(
        self,
        config: ModelConfig,
        ffn_hidden_size: int,
        bias: bool,
        build: Build,
        *,
        normed: bool,
        sparsity: float = 0.0,
    ) -> None:
        super().__init__()
        self.deviations = statistics.NormalDist().inv_cdf(sparsity) if sparsity else None
        rows = (ffn_hidden_size,) * (2 if config.mlp.gated else 1)
        self.linear_fc1 = make_input_linear(config, rows, bias, build, normed=normed)
        self.linear_fc2 = make_output_linear(config, ffn_hidden_size, bias, build)
        self.xielu = XIELU(build) if config.mlp.activation == "xielu" else None
        self._activation = None if self.xielu is not None else activation_of(config.mlp)
        self.gate_multiplier, self.output_multiplier = config.mlp.gate_multiplier, config.mlp.output_multiplier
        self.is_plain = self.gate_multiplier == self.output_multiplier == 1.0 and self.deviations is None
        """Whether it is two products and the activation between them."""

    def forward(self, x: Tensor, adapted: Tensor | None = None) -> Tensor:
        """x: [..., H] -> [..., H]. adapted: what is added to the result of `linear_fc1`."""
        hidden = self.linear_fc1(x)
        hidden = hidden if adapted is None else hidden + adapted
        if self.gate_multiplier != 1.0:
            gate, up = hidden.chunk(2, -1)
            hidden = torch.cat((gate * self.gate_multiplier, up), -1)
        if self.deviations is not None:
            hidden = sparse_gates(hidden, self.deviations)
        if self._activation is None:
            assert self.xielu is not None, "a layer has one of the two"
            y = self.linear_fc2(self.xielu(hidden))
        else:
            y = output_projection(self.linear_fc2, self._activation, hidden)
        return y if self.output_multiplier == 1.0 else y * self.output_multiplier


def sparse_gates(hidden: Tensor, deviations: float) -> Tensor:
    """hidden: [..., 2 F], gates and then the up projection -> the same with each gate reduced by a bound, the mean of
    the token's gates plus a multiple of their standard deviation, and 0 below it. If gates are normally distributed,
    the fraction of zeros is the same for every token. Computed in float32."""
    gate, up = hidden.chunk(2, -1)
    wide = gate.float()
    bound = wide.mean(-1, keepdim=True) + deviations * wide.std(-1, keepdim=True, unbiased=False)
    return torch.cat(((wide - bound).relu().to(up.dtype), up), -1)


class SharedExperts(nn.Module):
    """The experts every token uses, as one MLP, with the biases of a dense one; with `gate_weight` [1, H] times
    `sigmoid(x gate_weight^T)`."""

    draws_first = True
    """Whether a new module draws its own parameters before its projections do."""

    def __init__(self, config: ModelConfig, build: Build) -> None:
        super().__init__()
        assert config.moe is not None
        width = config.moe.shared_expert_intermediate_size
        assert width is not None
        self.init_method = init_method(config)
        self.gate_weight = build.parameter(1, config.hidden_size) if config.moe.shared_expert_gate else None
        self.reset_parameters()
        rows, bias = (width,) * (2 if config.mlp.gated else 1), config.mlp.bias
        self.linear_fc1 = make_input_linear(config, rows, bias, build, normed=False)
        self.linear_fc2 = make_output_linear(config, width, bias, build)
        self._activation = activation_of(config.mlp)

    def reset_parameters(self) -> None:
        """Initialise the gate again; the projections have their own."""
        if self.gate_weight is not None:
            self.init_method(self.gate_weight)

    def forward(self, x: Tensor) -> Tensor:
        """x: [..., H] -> [..., H]."""
        y = output_projection(self.linear_fc2, self._activation, self.linear_fc1(x))
        if self.gate_weight is None:
            return y
        dtype = compute_dtype(x)
        return torch.sigmoid(linear(x.to(dtype), self.gate_weight.to(dtype))) * y
