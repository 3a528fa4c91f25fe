"""A model split over the ranks of groups: what can be split, and a rank's place among those that share it."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from te_models.layers.attention.dot_product_attention import DotProductAttention
from te_models.layers.collectives import check_member, resolve_group
from te_models.layers.distributed.context_parallel import CpCommType, context_shard
from te_models.layers.distributed.expert_parallel import check_same_tokens
from te_models.layers.tensor.fsdp import unsharded

from ..config import ModelConfig
from ..layouts import ExpertDispatch, Facts, check_layout_rules
from .build import Build

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from te_models.checkpoints.mapping.rank_shards import ShardPlace

    from ..parallel.mesh import ParallelMesh
    from .gpt import GPTModel


class SharedModel(nn.Module):
    """Mixin of a model that ranks may share: its groups, kept by name, so that the model can be copied and saved."""

    config: ModelConfig
    tp_size: int
    expert_model_parallel_size: int
    expert_tensor_parallel_size: int
    expert_dispatch: ExpertDispatch

    def set_groups(
        self,
        tp_group: dist.ProcessGroup | None,
        ep_group: dist.ProcessGroup | None,
        etp_group: dist.ProcessGroup | None,
    ) -> None:
        """Take over the arguments of a constructor."""
        groups = tp_group, ep_group, etp_group
        names = (None if group is None else group.group_name for group in groups)
        self._tp_group_name, self._ep_group_name, self._etp_group_name = names

    @property
    def tp_group(self) -> dist.ProcessGroup | None:
        """The ranks over which the model is split; None if it is whole."""
        return None if self._tp_group_name is None else resolve_group(self._tp_group_name)

    @property
    def ep_group(self) -> dist.ProcessGroup | None:
        """The ranks over which the experts are distributed; None if each has all."""
        return None if self._ep_group_name is None else resolve_group(self._ep_group_name)

    @property
    def etp_group(self) -> dist.ProcessGroup | None:
        """The ranks over which each expert is split; None if these are the ranks of `tp_group`."""
        return None if self._etp_group_name is None else resolve_group(self._etp_group_name)

    def set_context_parallel_group(
        self, cp_group: dist.ProcessGroup | None, cp_comm_type: CpCommType = "all_gather"
    ) -> None:
        """Share each sequence among these ranks, for training; None: none. All of them call the model with the same
        tokens, and get the loss of whole sequences.

        cp_comm_type: how attention reaches the keys and values of other ranks: "all_gather" gathers them, by "p2p" they
        go round a ring, by "a2a" each rank gets all positions of a part of the heads. The ranks count as data parallel:
        average their gradients. Such a model takes no cache; logits are gathered. Sequences are multiples of twice as
        many positions as there are ranks. Transformer Engine: the method of this name of its layers. ValueError for a
        group without this rank and another cp_comm_type, ConfigError for a model that cannot have that cp_comm_type.
        """
        shard = context_shard(cp_group, cp_comm_type)
        if shard is not None:
            facts = Facts(model=self.config, tp=self.tp_size, cp=shard.ranks, cp_comm_type=cp_comm_type)
            check_layout_rules(facts)
        for module in self.modules():
            if hasattr(module, "context_shard"):
                module.context_shard = shard  # type: ignore[assignment]
            if isinstance(module, DotProductAttention):
                module.head_shard = shard if cp_comm_type == "a2a" else None

    @property
    def shares_parameters(self) -> bool:
        """Whether ranks have parts of the parameters, other than FSDP2's shards."""
        return any(name is not None for name in (self._tp_group_name, self._ep_group_name, self._etp_group_name))

    def check_dispatch_device(self, device: torch.device) -> None:
        """Raise a sentence where tokens cannot reach experts on this device in the way that was asked for."""
        if self.expert_dispatch == "deepep":
            check_deepep_device(self.expert_model_parallel_size, device)

    def check_same_tokens(self, tokens: int, device: torch.device) -> None:
        """Raise RuntimeError where ranks exchange tokens in shapes that follow from their number, and have different
        ones."""
        moe = self.config.moe
        if moe is None or not (self.expert_dispatch == "all_gather" or moe.moe_pad_expert_input_to_capacity):
            return
        sizes = {self._ep_group_name: self.expert_model_parallel_size}
        sizes[self._etp_group_name] = self.expert_tensor_parallel_size
        for group, size in sizes.items():
            if group is not None and size > 1:
                check_same_tokens(tokens, device, group)


def check_split(config: ModelConfig, build: Build) -> None:
    """Raise ConfigError naming the first field because of which the model cannot be built so, ValueError for a group
    that does not contain this rank."""
    for name, group in {"tp_group": build.tp_group, "ep_group": build.ep_group, "etp_group": build.etp_group}.items():
        if group is not None:
            check_member(name, group)
    check_layout_rules(
        Facts(
            model=config,
            tp=build.tp_size,
            ep=build.expert_model_parallel_size,
            etp=build.expert_tensor_parallel_size,
            distributed=build.ep_group is not None,
            apart=build.etp_group is not None,
            sequence_parallel=build.sequence_parallel,
            expert_layout=build.expert_layout,
            expert_dispatch=build.expert_dispatch,
        )
    )
    if build.expert_dispatch == "deepep":
        check_deepep_device(build.expert_model_parallel_size, build.device)


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


def check_deepep_device(ranks: int, device: torch.device | str | None) -> None:
    """Raise a sentence where deep_ep does not work on this device, or is not installed."""
    if ranks > 1:
        from te_models.layers.distributed.deepep import check_available  # imports the compiler, and start-up need not

        check_available(ranks, torch.empty((), device=device).device)


def process_groups(mesh: DeviceMesh | ParallelMesh | None) -> dict[str, dist.ProcessGroup]:
    """Return the groups of a mesh as arguments of a model: of its dimensions "tp", "ep" and "etp", or all that a
    ParallelMesh has.

    A dimension's name is all that says what its ranks share, so none is guessed: ValueError for every other name, whose
    ranks would each compute with weights, or tokens, that the others do not have.
    """
    if mesh is None:
        return {}
    groups = getattr(mesh, "model_groups", None)  # which is imported from here
    if groups is not None:
        return groups
    device_mesh: Any = mesh
    names = device_mesh.mesh_dim_names or ()
    if not names:
        raise ValueError(f"device_mesh has {device_mesh.ndim} dimensions without names; allowed: dimensions {_NAMES}")
    for name in names:
        if name not in _MEANINGS:
            own = [name for name in names if name in _MEANINGS]
            part = f"; pass the part of the mesh that this call splits over, device_mesh{own}" if own else ""
            what = f" ({_ELSEWHERE[name]})" if name in _ELSEWHERE else ""
            raise ValueError(
                f"device_mesh has the dimension {name!r}{what}, over which loading a model splits nothing; "
                f"allowed: {_NAMES}{part}"
            )
    if device_mesh.get_coordinate() is None:
        raise ValueError(f"device_mesh does not contain this rank, {dist.get_rank()}; allowed: a mesh that does")
    return {f"{name}_group": device_mesh.get_group(name) for name in names}


_MEANINGS = ("tp", "ep", "etp")
_NAMES = "'tp' (split layers), 'ep' (distributed experts) and 'etp' (split experts)"
_ELSEWHERE = {
    "pp": "pipeline stages",
    "dp": "data parallelism",
    "dp_replicate": "copies of the model",
    "dp_shard": "FSDP2: call te_models.parallel.parallelize",
    "fsdp": "FSDP2: call te_models.parallel.parallelize",
    "cp": "context parallelism: call set_context_parallel_group",
}
"""Names that are usual for what does not happen here, or not yet."""


def shard_place(model: GPTModel) -> ShardPlace:
    """Return this rank's place among those that share the model."""
    from te_models.checkpoints.mapping.rank_shards import ShardPlace

    groups = {"tp": model.tp_group, "ep": model.ep_group, "etp": model.etp_group}
    place: dict[str, int] = {}
    for name, group in groups.items():
        if group is not None:
            place |= {f"{name}_rank": group.rank(), f"{name}_size": group.size()}
    return ShardPlace(**place)


def reset_model(model: GPTModel) -> None:
    """Do as `GPTModel.reset_parameters` says. Other pipeline stages stay as they are."""
    free_gathered_parameters(model)
    own, device = set(model.modules()), next(model.parameters()).device
    for part in (model.whole or model).children():
        reset_parameters(part, own, device)


def reset_parameters(
    part: nn.Module, own: Collection[nn.Module] | None = None, device: torch.device | None = None
) -> None:
    """Initialise a part of a model again, in the order of construction, with the draws of a new model. A
    shard gets its part of what the whole parameter would get, one module after the other.

    own: the modules that this rank has, None for all; for others random numbers are drawn on `device` and forgotten.
    """
    for module in _as_built(part, set()):
        reset = getattr(module, "reset_parameters", None)
        if reset is not None:
            with unsharded(module) if own is None or module in own else _elsewhere(module, device):
                reset()


def _as_built(module: nn.Module, seen: set[nn.Module]) -> Iterator[nn.Module]:
    """Yield each module behind those that it has: a constructor draws for its own parameters at its end, or before it
    builds others, which the module says as `draws_first`."""
    if module not in seen:
        seen.add(module)
        first = getattr(module, "draws_first", False)
        if first:
            yield module
        for child in module.children():
            yield from _as_built(child, seen)
        if not first:
            yield module


@contextlib.contextmanager
def _elsewhere(module: nn.Module, device: torch.device | None) -> Iterator[None]:
    """Inside, a module has parameters and buffers on `device` that are forgotten at the end."""
    held = module._parameters, module._buffers

    def empty(tensors: dict[str, Any]) -> dict[str, Any]:
        return {
            name: t if t is None else torch.empty(t.shape, dtype=t.dtype, device=device) for name, t in tensors.items()
        }

    module._parameters, module._buffers = map(empty, held)
    try:
        yield
    finally:
        module._parameters, module._buffers = held


def free_gathered_parameters(model: GPTModel) -> None:
    """Free the gathered parameters that FSDP2 keeps after a forward pass, so that a model's parameters are its shards
    again."""
    if not dist.is_available():
        return
    from torch.distributed.fsdp import FSDPModule

    for root in model.pipeline_stages or (model,):
        for module in root.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
