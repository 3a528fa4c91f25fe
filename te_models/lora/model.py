"""Adapters over the layers of a model: `add_lora`, the state that is trained, `merge_lora`."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from functools import partial
from itertools import chain, groupby
from typing import Any

import torch
from torch import Tensor, nn

from ..model import GPTModel
from ..model.mixers.sparse_attention import Indexer
from ..model.moe import MoELayer
from .adapter import ADAPTERS, adapters_of
from .blocks import adapt_rows_alone, blocks_of_layers
from .layers import LAYERS, check_layer
from .plain_weights import PLAIN_ADAPTERS, AdaptedTable
from .rounding import Rounding, round_stochastically

ALL_LINEAR = "all-linear"
TRANSFORMERS_NAMES = {
    **dict.fromkeys(
        ("q_proj", "k_proj", "v_proj", "g_proj", "qkv_proj", "query_key_value", "c_attn", "Wqkv"), "linear_qkv"
    ),
    **dict.fromkeys(("o_proj", "out_proj"), "linear_proj"),
    **dict.fromkeys(("q_a_proj", "kv_a_proj_with_mqa", "q_b_proj", "kv_b_proj"), "linear_*_*"),
    **dict.fromkeys(("gate_proj", "up_proj", "gate_up_proj", "c_fc", "w1", "w3"), "linear_fc1"),
    **dict.fromkeys(("down_proj", "w2"), "linear_fc2"),
}
"""The last word of a layer's name in transformers' models, as LoRA targets name it -> the last word of our layer's
name."""
TRANSFORMERS_BLOCKS = {
    **{f"{block}_proj": block for block in ("q", "k", "v", "gate", "up")},
    "g_proj": "gate",
    "w1": "gate",
    "w3": "up",
}
"""Those that are a part of the rows of our layer -> the name that `joined_blocks` has for these rows."""
_BASE = ".base_layer."
_ADAPTERS = ADAPTERS | PLAIN_ADAPTERS


def is_targeted(name: str, target: str) -> bool:
    """Whether a target means the layer of this name: a glob of the name or of its last words."""
    return fnmatchcase(name, target) or fnmatchcase(name, f"*.{target}")


def add_lora(
    model: nn.Module,
    rank: int,
    *,
    alpha: float = 16.0,
    targets: Sequence[str] = (ALL_LINEAR,),
    dropout: float = 0.0,
    use_dora: bool = False,
) -> None:
    """Put an adapter over layers of a model, and freeze everything else.

    rank: r of A [r, in] and B [out, r]; alpha: alpha / rank multiplies what adapters add; dropout: the part of their
    input that is dropped in training; use_dora: train the length of each row of a weight, too. targets: globs of layer
    names, or of their last words ("linear_qkv", "decoder.layers.0.*"), or of what a weight joins ("linear_qkv.q"), or
    transformers' words for them ("q_proj" means linear_qkv.q: the other rows stay as they are, and the parts of a layer
    that are adapted share A); "all-linear" means every GEMM layer, experts included, and neither routers, embedding
    nor output layer. A are drawn from torch's generator, B begin as zero.

    Where ranks share the model, each gets its part of the adapters that one rank would have, and calls this with the
    same arguments and the same state of the generator. A target may mean layers of another pipeline stage alone.

    Raises ValueError for a target that means no layer, for a part of one with `use_dora`, for numbers out of range, and
    for a model that has adapters.

    Example:
        add_lora(model, rank=8, targets=["linear_qkv", "experts.*"])
    """
    if rank < 1:
        raise ValueError(f"rank is {rank}; allowed: a positive integer")
    if not alpha > 0 or not 0 <= dropout < 1:
        name, value = ("alpha", alpha) if not alpha > 0 else ("dropout", dropout)
        raise ValueError(f"{name} is {value}; allowed: alpha > 0, 0 <= dropout < 1")
    check_without_adapters(model)
    whole = getattr(model, "whole", None) or model
    # an indexer that no loss trains would have adapters that stay as they are
    still = tuple(f"{n}." for n, m in whole.named_modules() if isinstance(m, Indexer) and not m.config.loss_coeff)
    layers = {n: m for n, m in whole.named_modules() if isinstance(m, LAYERS) and not n.startswith(still)}
    blocks = blocks_of_layers(whole.config, whole.expert_layout) if isinstance(whole, GPTModel) else {}
    chosen = targeted_layers(layers, targets, blocks)
    for name, own in chosen.items():
        check_layer(layers[name], name)
        if own and use_dora:
            raise ValueError(
                f"the targets mean {', '.join(sorted(own))} of {name} alone, and DoRA trains the length of each row; "
                "allowed with use_dora: targets that mean whole layers"
            )
    put_adapters(model, {name: (rank, alpha) for name in layers if name in chosen}, dropout, use_dora)
    some = {name: own for name, own in chosen.items() if own}
    if some:
        adapt_rows_alone(model, some, blocks)


def adaptable(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules that adapters exist for, by name in the whole model: modules of `add_lora`, and modules
    that folders of peft may have."""
    whole = getattr(model, "whole", None) or model
    return {name: module for name, module in whole.named_modules() if type(module) in _ADAPTERS}


def put_adapters(model: nn.Module, ranks: Mapping[str, tuple[int, float]], dropout: float, use_dora: bool) -> None:
    """Put adapters over layers of a model, and freeze everything else. ranks: (rank, alpha) of each layer, by name, in
    the order of the model's modules."""
    whole = getattr(model, "whole", None) or model
    layers = dict(whole.named_modules())
    whole.requires_grad_(False)
    model.requires_grad_(False)
    experts = _experts_of_rank(whole)
    for part, names in groupby(ranks, partial(_sharded_part, whole)):
        if part is not None and use_dora:  # whose rows are measured
            part.unshard()
        for name in names:
            layer = layers[name]
            adapter = _ADAPTERS[type(layer)](layer, *ranks[name], dropout, use_dora, experts.get(id(layer)))
            _replace(whole, name, adapter)
        if part is not None and use_dora:
            part.reshard()


def targeted_layers(
    layers: Iterable[str], targets: Iterable[str], blocks: Mapping[str, Mapping[str, int]]
) -> dict[str, set[str]]:
    """Return the layers that targets mean, of the names of all GEMM layers, each with the names of the blocks of its
    rows that are meant; empty: all. blocks: of layers that join several, see `blocks_of_layers`. Raises ValueError for
    a target that means none."""
    names, whole = list(layers), set()
    some: dict[str, set[str]] = {}
    for target in targets:
        found = {name for name in names if target == ALL_LINEAR or is_targeted(name, target)}
        rows = {(n, b) for n in names for b in blocks.get(n, ()) if not found and is_targeted(f"{n}.{b}", target)}
        if not found and not rows and target in TRANSFORMERS_NAMES:
            found = {name for name in names if is_targeted(name, TRANSFORMERS_NAMES[target])}
            block = TRANSFORMERS_BLOCKS.get(target, "")
            joined = {name for name in found if block and blocks.get(name)}
            rows = {(name, block) for name in joined if block in blocks[name]}
            found -= joined
        whole |= found
        for name, block in rows:
            some.setdefault(name, set()).add(block)
        if not found and not rows:
            last = ", ".join(sorted({name.rpartition(".")[2] for name in names}))
            raise ValueError(
                f"{target!r} is not found among the GEMM layers; allowed: {ALL_LINEAR!r}, or globs of names that end "
                f"with {last}, or transformers' names of them ({', '.join(list(TRANSFORMERS_NAMES)[:3])}, ...)"
            )
    chosen = {name: own for name, own in some.items() if name not in whole and own != {*blocks[name]}}
    return {name: chosen.get(name, set()) for name in names if name in whole or name in some}


def _experts_of_rank(model: nn.Module) -> dict[int, tuple[int, int]]:
    """Return, by the identity of a layer of experts that are distributed, (this rank's first, how many there are)."""
    found = {}
    for module in model.modules():
        if isinstance(module, MoELayer) and module.expert_model_parallel_size > 1:
            place = module.experts.first_expert, module.moe.num_moe_experts
            found |= {id(layer): place for layer in (module.experts.linear_fc1, module.experts.linear_fc2)}
    return found


def _sharded_part(model: nn.Module, name: str) -> Any:
    """Return what FSDP2 shards as one, and the layer of this name is in; None where it is not sharded."""
    found, module = None, model
    for word in name.split("."):
        module = module.get_submodule(word)
        found = module if hasattr(module, "unshard") else found
    return found


def check_without_adapters(model: nn.Module) -> None:
    """Raise ValueError for a model that has adapters."""
    if any(True for _ in adapters_of(model)):
        raise ValueError("the model has adapters already; allowed: merge_lora first")


@contextmanager
def without_adapters(model: nn.Module) -> Iterator[None]:
    """Inside, a model computes as if it had no adapters."""
    adapters = [adapter for _, adapter in adapters_of(model)]
    for adapter in adapters:
        adapter.enabled = False
    try:
        yield
    finally:
        for adapter in adapters:
            adapter.enabled = True


def lora_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """Return what is trained, by name: "decoder.layers.0.self_attention.linear_qkv.lora_A.weight"; not copied. Where
    ranks share the model, it is this rank's part."""
    return {name: p.detach() for name, p in model.named_parameters() if base_name(name) is None}


def base_name(name: str) -> str | None:
    """Return the name that a parameter has in the model without adapters; None for what belongs to an adapter."""
    return None if ".lora_" in name and _BASE not in name else name.replace(_BASE, ".")


def base_state_dict(model: GPTModel) -> dict[str, Tensor]:
    """Return what a folder of the model without adapters holds; not copied."""
    stored = ((base_name(name), tensor) for name, tensor in model.stored_tensors())
    return {name: tensor for name, tensor in stored if name is not None}


def merged_weights(model: nn.Module) -> dict[str, Callable[[Tensor], Tensor]]:
    """Return, by the name that each adapted weight has in the model without adapters, what gives it with its adapter,
    of its value without: whole ones, wherever they are."""
    return {
        f"{layer}.{weight}": partial(adapter.merged_weight, weight)
        for layer, adapter in adapters_of(model)
        for weight in chain.from_iterable(adapter.weights())
    }


@torch.no_grad()
def merge_lora(model: nn.Module, *, rounding: Rounding = "nearest", seed: int = 0) -> float:
    """Add the adapters to the weights, in float32 with one rounding, and remove them; all parameters are trained again.

    Weights that are stored quantized become plain values, for the sum has no exact quantized form. Return which part of
    what the adapters change the rounding lost: the norm of its errors divided by the norm of the changes, over all
    weights. An adapter whose changes are smaller than the spacing of 16-bit weights is lost mostly; `rounding`
    "stochastic" keeps it on average, at the price of noise of that spacing, and float32 weights keep all of it.

    seed: of the stochastic rounding. Raises ValueError for an adapter of an embedding whose weight is the output
    layer's, too, for that would change with it.
    """
    table = next((name for name, adapter in adapters_of(model) if isinstance(adapter, AdaptedTable)), None)
    if table is not None and model.config.embedding.share_embeddings_and_output_weights:  # type: ignore[union-attr]
        raise ValueError(
            f"{table} has an adapter, and its weight is the output layer's, too, which has none; allowed: the model "
            "with the adapter over it (--adapter)"
        )
    generators: dict[torch.device, torch.Generator] = {}

    def rounded(values: Tensor, dtype: torch.dtype) -> Tensor:
        if rounding == "nearest":
            return values.to(dtype)
        if values.device not in generators:
            generators[values.device] = torch.Generator(values.device).manual_seed(seed)
        return round_stochastically(values, dtype, generators[values.device])

    lost = changed = 0.0
    for name, adapter in list(adapters_of(model)):
        merged, errors = adapter.merge(rounded)
        lost, changed = lost + errors.lost, changed + errors.changed
        _replace(model, name, merged)
    model.requires_grad_(True)
    return math.sqrt(lost / changed) if changed else 0.0


def _replace(model: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, last = name.rpartition(".")
    module.train(model.training)
    setattr(model.get_submodule(parent), last, module)
