"""How a model's modules are created: dtype, device, expert layout, initial values. One value handed down the tree."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn

from te_models.layers import DotProductAttention, LayerNorm, LayerNormLinear, Linear, RMSNorm

from ..config import ConfigError, ModelConfig, NormConfig

ExpertLayout = Literal["grouped", "per-gemm"]


@dataclass(frozen=True)
class Normal:
    """Fills a weight with N(0, std^2). Stacks of experts are filled member by member, so that both layouts of the
    experts start from the same numbers."""

    std: float

    def __call__(self, weight: Tensor) -> Tensor:
        for member in weight.unbind(0) if weight.dim() == 3 else (weight,):
            nn.init.normal_(member, mean=0.0, std=self.std)
        return weight


@dataclass(frozen=True)
class LocalExperts:
    """Fills a stack of experts `first` and following with what `start` gives them in the stack of all `experts`."""

    start: Normal
    first: int
    experts: int

    def __call__(self, weight: Tensor) -> Tensor:
        others = torch.empty_like(weight[0])
        for expert in range(self.experts):
            mine = self.first <= expert < self.first + weight.shape[0]
            self.start(weight[expert - self.first] if mine else others)
        return weight


@dataclass(frozen=True)
class RankMajor:
    """Fills a weight of several blocks of rows (q, k and v; gate and up) that is about to be cut into equal parts for
    `ranks` ranks: each part then has its share of every block, so that a split layer starts from the numbers of the
    whole one. blocks: rows of each, of the whole weight."""

    start: Callable[[Tensor], Tensor]
    blocks: tuple[int, ...]
    ranks: int

    def __call__(self, weight: Tensor) -> Tensor:
        blocks = self.start(weight).split(self.blocks, dim=-2)
        shares = [block.chunk(self.ranks, dim=-2) for block in blocks]
        return weight.copy_(torch.cat([share for rank in zip(*shares, strict=True) for share in rank], dim=-2))


@dataclass(frozen=True, kw_only=True)
class Build:
    """params_dtype None is torch's default dtype, device None its default device. tp_group: the ranks over which the
    layers are split, ep_group: those over which experts are distributed; None: each rank has all."""

    params_dtype: torch.dtype | None = None
    device: torch.device | str | None = None
    expert_layout: ExpertLayout = "grouped"
    tp_group: dist.ProcessGroup | None = None
    ep_group: dist.ProcessGroup | None = None

    def __post_init__(self) -> None:
        if self.expert_layout not in get_args(ExpertLayout):
            allowed = ", ".join(map(repr, get_args(ExpertLayout)))
            raise ConfigError(f"expert_layout is {self.expert_layout!r}; allowed: {allowed}")

    @property
    def new(self) -> dict[str, Any]:
        """Keyword arguments of every module with parameters."""
        return {"params_dtype": self.params_dtype, "device": self.device}

    @property
    def tp_size(self) -> int:
        """How many ranks share each split layer."""
        return 1 if self.tp_group is None else self.tp_group.size()

    @property
    def expert_model_parallel_size(self) -> int:
        """Over how many ranks the experts are distributed."""
        return 1 if self.ep_group is None else self.ep_group.size()

    @property
    def whole(self) -> Build:
        """The same for a layer that every rank has whole."""
        return replace(self, tp_group=None)

    def split(self, parallel_mode: str) -> dict[str, Any]:
        """Keyword arguments of a module that is split in this way, or whole."""
        return {} if self.tp_size == 1 else {"parallel_mode": parallel_mode, "tp_group": self.tp_group}

    def starting(self, start: Callable[[Tensor], Tensor], blocks: tuple[int, ...]) -> Callable[[Tensor], Tensor]:
        """Return what fills a weight whose rows are these blocks, of which each rank has a share."""
        return start if self.tp_size == 1 or len(blocks) == 1 else RankMajor(start, blocks, self.tp_size)

    def parameter(self, *shape: int) -> nn.Parameter:
        """Return an uninitialised parameter."""
        return nn.Parameter(
            torch.empty(*shape, dtype=self.params_dtype or torch.get_default_dtype(), device=self.device)
        )


def init_method(config: ModelConfig) -> Normal:
    """Initial values of every weight but those that write to the residual stream."""
    return Normal(config.init_method_std)


def output_init_method(config: ModelConfig) -> Normal:
    """Initial values of the weights that write to the residual stream, narrower by sqrt(2 * layers): its variance then
    does not grow with depth (GPT-2)."""
    return Normal(config.init_method_std / math.sqrt(2 * config.num_layers))


def make_norm(norm: NormConfig, size: int, build: Build) -> RMSNorm | LayerNorm:
    """Return the configured norm over `size` channels."""
    shared: dict[str, Any] = {
        "zero_centered_gamma": norm.layernorm_zero_centered_gamma,
        "cast_order": norm.cast_order,
        "has_weight": norm.has_weight,
        **build.new,
    }
    if norm.normalization == "RMSNorm":
        return RMSNorm(size, norm.layernorm_epsilon, **shared)
    return LayerNorm(size, norm.layernorm_epsilon, bias=norm.bias, **shared)


def make_core_attention(
    config: ModelConfig, layer: int, heads: int, channels: int, groups: int, build: Build
) -> DotProductAttention:
    """Return softmax attention of this layer, of a rank's own heads and key/value heads; the last query sees all keys,
    as with a cache. channels: of a head of q and k."""
    a = config.attention
    attention = DotProductAttention(
        heads,
        channels,
        groups,
        a.attention_dropout,
        qkv_format="bshd",
        attn_mask_type="causal_bottom_right",
        window_size=config.window_size(layer),
        softmax_scale=a.softmax_scale,
        softcap=a.softcap,
        softmax_type="learnable" if a.sinks else "vanilla",
        **build.new,
    )
    if a.softmax_scale_by_layer:
        attention.softmax_scale /= layer + 1  # assigned, it is data: layers share a graph
    return attention


def make_output_linear(config: ModelConfig, in_features: int, bias: bool, build: Build) -> Linear:
    """Return the last projection of a sublayer, which writes to the residual stream."""
    start = output_init_method(config)
    return Linear(in_features, config.hidden_size, bias, init_method=start, **build.new, **build.split("row"))


def make_input_linear(
    config: ModelConfig, blocks: tuple[int, ...], bias: bool, build: Build, *, normed: bool
) -> nn.Module:
    """Return the first projection of a sublayer, with the norm before it as one module when `normed`. blocks: the rows
    of what it joins, each of which is shared by the ranks that split it."""
    start, out_features = build.starting(init_method(config), blocks), sum(blocks)
    if not normed:
        return Linear(config.hidden_size, out_features, bias, init_method=start, **build.new, **build.split("column"))
    norm = config.norm
    return LayerNormLinear(
        config.hidden_size,
        out_features,
        norm.layernorm_epsilon,
        bias,
        normalization=norm.normalization,
        norm_weight=norm.has_weight,
        norm_bias=norm.bias,
        zero_centered_gamma=norm.layernorm_zero_centered_gamma,
        cast_order=norm.cast_order,
        init_method=start,
        **build.new,
        **build.split("column"),
    )
