"""A model split over the ranks of groups: what can be split, and a rank's place among those that share it."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from te_models.layers.collectives import check_member
from te_models.layers.tensor.fsdp import unsharded

from ..config import ConfigError, ModelConfig
from .build import Build

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from te_models.checkpoints.plan.rank_shards import Place

    from .gpt import GPTModel


def check_split(config: ModelConfig, build: Build) -> None:
    """Raise ConfigError naming the first field because of which the model cannot be built so, ValueError for a group
    that does not contain this rank."""
    for name, group in {"tp_group": build.tp_group, "ep_group": build.ep_group}.items():
        if group is not None:
            check_member(name, group)
    if build.ep_group is not None:
        check_distribution(config, build.expert_model_parallel_size, build.expert_layout)
    check_layers(config, build.tp_size)
    if build.sequence_shard is not None:
        check_sequence(config)


def check_sequence(config: ModelConfig) -> None:
    """Raise ConfigError naming the field because of which the tokens between split layers cannot be shared."""
    if config.hidden_dropout > 0:
        raise ConfigError(
            f"hidden_dropout is {config.hidden_dropout}; allowed with sequence_parallel: 0, because ranks that split "
            "layers draw the same numbers"
        )


def check_tokens_shared(asked: Mapping[str, object]) -> None:
    """Raise ValueError for options of a call that a model whose ranks share tokens does not take."""
    for name, value in asked.items():
        if value is not None and value is not False:
            raise ValueError(
                f"{name} is given to a model whose ranks share tokens; allowed: a model without sequence_parallel and "
                "without a context-parallel group"
            )


def check_tokens(tokens: int, ranks: int) -> None:
    """Raise ValueError for a number of tokens that ranks with sequence_parallel cannot share."""
    if tokens % ranks:
        raise ValueError(f"there are {tokens} tokens, which {ranks} ranks with sequence_parallel cannot share equally")


def check_distribution(config: ModelConfig, ranks: int, expert_layout: str) -> None:
    """Raise ConfigError where the experts cannot be distributed over so many ranks."""
    if config.moe is None:
        raise ConfigError("moe is None: a model without experts has none to distribute over ep_group")
    experts = config.moe.num_moe_experts
    if experts % ranks:
        raise ConfigError(f"moe.num_moe_experts is {experts}, which {ranks} ranks cannot share equally")
    if expert_layout != "grouped" and ranks > 1:
        raise ConfigError(f"expert_layout is {expert_layout!r}; allowed where experts are distributed: 'grouped'")


def check_layers(config: ModelConfig, ranks: int) -> None:
    """Raise ConfigError naming the first field because of which layers cannot be split over so many ranks."""
    if ranks == 1:
        return
    if config.vocab_size < ranks:
        raise ConfigError(f"vocab_size is {config.vocab_size}; allowed: a word or more for each of {ranks} ranks")
    a, moe = config.attention, config.moe
    moe_layers = (moe.layers or ()) if moe is not None else ()
    refused = {
        "attention.qk_layernorm": (
            a.qk_layernorm == "full" and config.norm.normalization != "RMSNorm",
            "a LayerNorm over all heads",
        ),
    }
    for name, (asked, what) in refused.items():
        if asked:
            raise ConfigError(f"{name}: a model with {what} cannot be split over {ranks} ranks")
    sizes = {
        "attention.num_attention_heads": a.num_attention_heads,
        "attention.num_query_groups": a.num_query_groups or a.num_attention_heads,
        "mlp.ffn_hidden_size": 0 if len(moe_layers) == config.num_layers else config.mlp.ffn_hidden_size,
        "moe.moe_ffn_hidden_size": moe.moe_ffn_hidden_size if moe is not None else 0,
        "moe.shared_expert_intermediate_size": (moe.shared_expert_intermediate_size or 0) if moe is not None else 0,
    }
    for name, size in sizes.items():
        if size % ranks:
            raise ConfigError(f"{name} is {size}, which {ranks} ranks cannot share equally")


def groups_of(mesh: DeviceMesh | None) -> dict[str, dist.ProcessGroup]:
    """Return the groups of a mesh as arguments of a model: of its dimensions "tp" and "ep".

    A dimension's name is all that says what its ranks share, so none is guessed: ValueError for every other name, whose
    ranks would each compute with weights, or tokens, that the others do not have.
    """
    if mesh is None:
        return {}
    names = mesh.mesh_dim_names or ()
    if not names:
        raise ValueError(f"device_mesh has {mesh.ndim} dimensions without names; allowed: dimensions {_NAMES}")
    for name in names:
        if name not in _MEANINGS:
            own = [name for name in names if name in _MEANINGS]
            part = f"; pass the part of the mesh that this call splits over, device_mesh{own}" if own else ""
            what = f" ({_ELSEWHERE[name]})" if name in _ELSEWHERE else ""
            raise ValueError(
                f"device_mesh has the dimension {name!r}{what}, over which loading a model splits nothing; "
                f"allowed: {_NAMES}{part}"
            )
    if mesh.get_coordinate() is None:
        raise ValueError(f"device_mesh does not contain this rank, {dist.get_rank()}; allowed: a mesh that does")
    return {f"{name}_group": mesh.get_group(name) for name in names}


_MEANINGS = ("tp", "ep")
_NAMES = "'tp' (split layers) and 'ep' (distributed experts)"
_ELSEWHERE = {
    "pp": "pipeline stages",
    "dp": "data parallelism",
    "dp_replicate": "copies of the model",
    "dp_shard": "FSDP2: call te_models.parallel.parallelize",
    "fsdp": "FSDP2: call te_models.parallel.parallelize",
    "cp": "context parallelism: call set_context_parallel_group",
    "etp": "tensor parallelism of experts alone",
}
"""Names that are usual for what does not happen here, or not yet."""


def place_of(model: GPTModel) -> Place:
    """Return this rank's place among those that share the model."""
    from te_models.checkpoints.plan.rank_shards import Place

    tp, ep = model.tp_group, model.ep_group
    place = {} if tp is None else {"tp_rank": tp.rank(), "tp_size": tp.size()}
    return Place(**place) if ep is None else Place(**place, ep_rank=ep.rank(), ep_size=ep.size())


def reset_model(model: GPTModel) -> None:
    """Do as `GPTModel.reset_parameters` says. Other pipeline stages stay as they are."""
    reshard(model)
    own = set(model.modules())
    for part in (model.whole or model).children():
        reset_parameters(part, own)


def reset_parameters(part: nn.Module, own: Collection[nn.Module] | None = None) -> None:
    """Initialise a part of a model anew, in the order of construction: draws what the part of a new model draws. A
    shard gets its part of what the whole parameter would get, one module after the other.

    own: the modules that this rank has, None for all; for others random numbers are drawn and forgotten.
    """
    for module in part.modules():
        reset = getattr(module, "reset_parameters", None)
        if reset is not None:
            with unsharded(module) if own is None or module in own else _elsewhere(module):
                reset()


@contextlib.contextmanager
def _elsewhere(module: nn.Module) -> Iterator[None]:
    """Inside, a module has parameters and buffers that are forgotten at the end."""
    held = module._parameters, module._buffers

    def empty(tensors: dict[str, Any]) -> dict[str, Any]:
        return {name: t if t is None else torch.empty(t.shape, dtype=t.dtype) for name, t in tensors.items()}

    module._parameters, module._buffers = map(empty, held)
    try:
        yield
    finally:
        module._parameters, module._buffers = held


def reshard(model: GPTModel) -> None:
    """Free the gathered parameters that FSDP2 keeps after a forward pass, so that a model's parameters are its shards
    again."""
    if not dist.is_available():
        return
    from torch.distributed.fsdp import FSDPModule

    for root in model.pipeline_stages or (model,):
        for module in root.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
