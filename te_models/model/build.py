"""How a model's modules are created: dtype, device, expert layout, initial values, one value handed down the tree; and
what a configuration can say and the model does not compute."""

from __future__ import annotations

import contextlib
import math
import weakref
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from te_models.layers.attention.dot_product_attention import DotProductAttention
from te_models.layers.distributed.sequence_parallel import SequenceShard
from te_models.layers.distributed.tensor_parallel import InitMethod, ParallelMode, TensorParallelSplit
from te_models.layers.distributed.vocab_parallel import VocabShard, vocab_range
from te_models.layers.module.layernorm_linear import LayerNormLinear
from te_models.layers.module.linear import Linear
from te_models.layers.module.norm import LayerNorm, RMSNorm
from te_models.layers.module.options import ParameterOptions, PrecedingNormOptions
from te_models.layers.module.recipe_state import real_default_device
from te_models.layers.tensor.quantized_tensor import QuantizedTensor

from ..config import AttentionConfig, ConfigError, ModelConfig, NormConfig
from ..layouts import ExpertDispatch, ExpertLayout, Facts, check_layout_rules
from ..memory import ask_for_large_pages

_draws_nothing: ContextVar[bool] = ContextVar("_draws_nothing", default=False)


@contextlib.contextmanager
def without_draws() -> Iterator[None]:
    """Inside, initial weights are zeros: of a model that is about to be filled from files."""
    token = _draws_nothing.set(True)
    try:
        yield
    finally:
        _draws_nothing.reset(token)


@dataclass(frozen=True)
class Normal:
    """Fills a weight with N(0, std^2). Stacks of experts are filled member by member, so that both layouts of the
    experts start from the same numbers."""

    std: float

    def __call__(self, weight: Tensor) -> Tensor:
        if weight.is_meta:  # without values, and the first draw there would import hundreds of modules
            return weight
        if _draws_nothing.get():
            return nn.init.zeros_(weight)
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
        if _draws_nothing.get():
            return self.start(weight)
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


@dataclass(frozen=True)
class WordsOfRank:
    """Fills the rows of a table that a rank has with what `start` gives them in the table of all words."""

    start: Callable[[Tensor], Tensor]
    shard: VocabShard | None

    def __call__(self, weight: Tensor) -> Tensor:
        if self.shard is None:
            return self.start(weight)
        first, words = self.shard.place(weight.shape[0])
        whole = torch.empty(words, *weight.shape[1:], dtype=weight.dtype, device=weight.device)
        return weight.copy_(self.start(whole).narrow(0, first, weight.shape[0]))


@dataclass(frozen=True, kw_only=True)
class Build:
    """params_dtype None is torch's default dtype, device None its default device. tp_group: the ranks over which the
    layers are split, ep_group: those over which experts are distributed; None: each rank has all. etp_group: those over
    which each expert is split, where the ranks of tp_group share the tokens of the experts; None: tp_group.
    sequence_parallel: between split layers each rank of tp_group has a part of the tokens. expert_dispatch: how tokens
    reach distributed experts."""

    params_dtype: torch.dtype | None = None
    device: torch.device | str | None = None
    expert_layout: ExpertLayout = "grouped"
    tp_group: dist.ProcessGroup | None = None
    ep_group: dist.ProcessGroup | None = None
    etp_group: dist.ProcessGroup | None = None
    sequence_parallel: bool = False
    expert_dispatch: ExpertDispatch = "all_to_all"

    def __post_init__(self) -> None:
        check_layout_rules(Facts(expert_layout=self.expert_layout, expert_dispatch=self.expert_dispatch))

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
    def expert_tensor_parallel_size(self) -> int:
        """How many ranks share each expert."""
        return self.tp_size if self.etp_group is None else self.etp_group.size()

    @property
    def of_experts(self) -> Build:
        """The same for the experts, perhaps split by `etp_group`."""
        return self if self.etp_group is None else replace(self, tp_group=self.etp_group, sequence_parallel=False)

    def vocab_shard(self, words: int) -> VocabShard | None:
        """Return which part of a vocabulary this rank has; None: all of it."""
        if self.tp_group is None or self.tp_size == 1:
            return None
        return VocabShard(self.tp_group.rank(), self.tp_size, self.tp_group.group_name, words)

    @property
    def whole(self) -> Build:
        """The same for a layer that every rank has whole."""
        return replace(self, tp_group=None, sequence_parallel=False)

    @property
    def of_all_tokens(self) -> Build:
        """The same for split layers that every rank calls with all tokens."""
        return replace(self, sequence_parallel=False)

    @property
    def sequence_shard(self) -> SequenceShard | None:
        """Which tokens this rank has between split layers; None: all."""
        if not self.sequence_parallel or self.tp_group is None or self.tp_size == 1:
            return None
        return SequenceShard(self.tp_group.rank(), self.tp_size, self.tp_group.group_name)

    def gemm(self, start: InitMethod | None, parallel_mode: ParallelMode | None = None) -> dict[str, Any]:
        """Keyword arguments of a layer with GEMMs, which is split in this way, or whole. start: fills its weight."""
        split = TensorParallelSplit()
        if parallel_mode is not None and self.tp_size > 1:
            split = TensorParallelSplit(parallel_mode, self.tp_group, sequence_parallel=self.sequence_parallel)
        return {"parameters": ParameterOptions(self.params_dtype, self.device, start), "split": split}

    def starting(self, start: Callable[[Tensor], Tensor], blocks: tuple[int, ...]) -> Callable[[Tensor], Tensor]:
        """Return what fills a weight whose rows are these blocks, of which each rank has a share."""
        return start if self.tp_size == 1 or len(blocks) == 1 else RankMajor(start, blocks, self.tp_size)

    def starting_rows(self, start: Callable[[Tensor], Tensor], rows: int) -> Callable[[Tensor], Tensor]:
        """Return what fills a rank's share of a weight of `rows` rows with the values that `start` gives these rows in
        the whole weight."""
        return start if self.tp_group is None else WordsOfRank(start, self.vocab_shard(rows))

    def own_words(self, words: int) -> int:
        """Return how many words of a vocabulary this rank has."""
        shard = self.vocab_shard(words)
        if shard is None:
            return words
        first, end = vocab_range(words, shard.rank, shard.ranks)
        return end - first

    def parameter(self, *shape: int) -> nn.Parameter:
        """Return an uninitialised parameter."""
        return nn.Parameter(
            torch.empty(*shape, dtype=self.params_dtype or torch.get_default_dtype(), device=self.device)
        )


def real_device(device: torch.device | str | None) -> torch.device:
    """Return the device that is named, with its index; None: torch's default device, or the CPU where that is meta.
    Raises ValueError for the meta device by name: what is read has no memory there."""
    found = torch.empty((), device=real_default_device() if device is None else device).device
    if found.type == "meta":
        raise ValueError("device is 'meta', which holds no values; allowed: a device with memory, such as 'cpu'")
    return found


def give_memory(model: nn.Module, device: torch.device) -> None:
    """Do as `model.to_empty(device=device)`, of a model on the meta device, without what torch does in Python there."""

    def memory(tensor: Tensor) -> Tensor:
        if type(tensor) not in (Tensor, nn.Parameter):
            return torch.empty_like(tensor, device=device)
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)

    model._apply(memory)


def give_large_pages(model: nn.Module) -> None:
    """Have parameters on a CPU that are about to be filled lie in large pages, where the system has them."""
    parts: list[Tensor] = []
    for parameter in model.parameters():
        fields = parameter.fields.values() if isinstance(parameter, QuantizedTensor) else (parameter,)
        parts += [part for part in fields if part.is_cpu]
    ask_for_large_pages((part.data_ptr(), part.nbytes) for part in parts)


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
    config: ModelConfig, a: AttentionConfig, layer: int, heads: int, channels: int, groups: int, build: Build
) -> DotProductAttention:
    """Return softmax attention of this layer, of a rank's own heads and key/value heads; the last query sees all keys,
    as with a cache. channels: of a head of q and k."""
    attention = DotProductAttention(
        heads,
        channels,
        groups,
        a.attention_dropout,
        attn_mask_type="causal_bottom_right",
        window_size=config.window_size(layer),
        softmax_scale=a.softmax_scale,
        softcap=a.softcap,
        softmax_type="learnable" if a.sinks else "vanilla",
        parameters=ParameterOptions(build.params_dtype, build.device),
    )
    if a.softmax_scale_by_layer:
        attention.softmax_scale /= layer + 1  # assigned, it is data: layers share a graph
    return attention


def make_output_linear(config: ModelConfig, in_features: int, bias: bool, build: Build) -> Linear:
    """Return the last projection of a sublayer: it writes to the residual stream."""
    start = output_init_method(config)
    return Linear(in_features, config.hidden_size, bias, **build.gemm(start, "row"))


def make_input_linear(
    config: ModelConfig,
    blocks: tuple[int, ...],
    bias: bool,
    build: Build,
    *,
    normed: bool,
    in_features: int | None = None,
) -> nn.Module:
    """Return the first projection of a sublayer, with the norm before it as one module when `normed`. blocks: the rows
    of what it joins, each of which is shared by the ranks that split it. in_features: hidden_size where it is None."""
    start, out_features = build.starting(init_method(config), blocks), sum(blocks)
    if not normed:
        size = in_features or config.hidden_size
        return Linear(size, out_features, bias, **build.gemm(start, "column"))
    norm = config.norm
    return LayerNormLinear(
        config.hidden_size,
        out_features,
        bias,
        norm=PrecedingNormOptions(
            norm.normalization,
            norm.layernorm_epsilon,
            norm.layernorm_zero_centered_gamma,
            norm.cast_order,
            norm.has_weight,
            norm.bias,
        ),
        **build.gemm(start, "column"),
    )


def unsupported(config: ModelConfig) -> list[tuple[str, object]]:
    """Return the fields (name, value) of `config` that ask for something the model does not implement."""
    m, attentions = config.mlp, [config.attention_of(layer) for layer in range(config.num_layers)]
    latent_chunks = any(a is not None and a.mla and config.chunk_size(i) for i, a in enumerate(attentions))
    temperatures = {a.temperature_tuning for a in attentions if a is not None} - {None}
    bare = not all(config.mixer_names(i) and config.has_mlp(i) for i in range(config.num_layers))
    asked = {
        "attention.indexer": (
            any(
                a is not None and a.indexer and config.layer_type(i) not in ("full", "nope")
                for i, a in enumerate(attentions)
            ),
            "with layer_types that are sliding or chunked",
        ),
        "layer_types": (latent_chunks, config.layer_types),
        "attention.temperature_tuning": (len(temperatures) > 1, temperatures),
        "block": (bare and config.block.startswith("parallel"), f"{config.block} with layers of one sublayer"),
        # Only the clamped activation reads these two; elsewhere they would be ignored silently.
        "mlp.alpha": (m.clamp is None and m.alpha != 1.0, m.alpha),
        "mlp.up_offset": (m.clamp is None and m.up_offset != 0.0, m.up_offset),
        "mlp.clamp": (m.clamp is not None and not m.gated, m.clamp),
    }
    return [(name, value) for name, (is_asked, value) in asked.items() if is_asked]


def check_supported(config: ModelConfig) -> None:
    """Raise ConfigError naming the first field that the model does not implement."""
    if _found_supported[0]() is config:  # every layer of a model asks
        return
    for name, value in unsupported(config):
        raise ConfigError(f"{name} is {value!r}, which GPTModel does not implement")
    _found_supported[0] = weakref.ref(config)


_found_supported: list[Callable[[], ModelConfig | None]] = [lambda: None]
"""The configuration that was asked about last."""
