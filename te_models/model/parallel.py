"""A model split over the ranks of groups: what can be split, and putting the parts together again."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from te_models.layers import QuantizedTensor

from ..config import ConfigError, ModelConfig
from .build import Build

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from te_models.checkpoints.boxes import Shape
    from te_models.checkpoints.parts import Cuts, Part, Place

    from .gpt import GPTModel


def check_split(config: ModelConfig, build: Build) -> None:
    """Raise ConfigError naming the first field because of which the model cannot be built so."""
    if build.ep_group is not None:
        check_distribution(config, build.expert_model_parallel_size, build.expert_layout)
    check_layers(config, build.tp_size)


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


def resolve_group(name: str) -> dist.ProcessGroup:
    """Return the process group of a name. Models keep names, so that they can be copied."""
    from torch.distributed import distributed_c10d

    return distributed_c10d._resolve_process_group(name)  # type: ignore[arg-type]


def groups_of(mesh: DeviceMesh | None) -> dict[str, dist.ProcessGroup]:
    """Return the groups of a mesh as arguments of a model: of its dimensions "tp" and "ep"; its only one, if it has
    neither name, splits layers."""
    if mesh is None:
        return {}
    names = mesh.mesh_dim_names or ()
    found = {f"{name}_group": mesh.get_group(name) for name in ("tp", "ep") if name in names}
    if not found and mesh.ndim != 1:
        raise ValueError(
            f"device_mesh has the dimensions {names or mesh.ndim}; allowed: one, or one that is called 'tp' or 'ep'"
        )
    return found or {"tp_group": mesh.get_group()}


def place_of(model: GPTModel) -> Place:
    """Return this rank's place among those that share the model."""
    from te_models.checkpoints.parts import Place

    tp, ep = model.tp_group, model.ep_group
    place = {} if tp is None else {"tp_rank": tp.rank(), "tp_size": tp.size()}
    return Place(**place) if ep is None else Place(**place, ep_rank=ep.rank(), ep_size=ep.size())


def whole_tensors(model: GPTModel) -> dict[str, Tensor]:
    """Return what a checkpoint holds of a model: of a split one the parts of all ranks put together, in the first one's
    main memory; nothing on the others. They meet one tensor at a time.

    Quantized weights are put together as they are. Raises CheckpointError where a matrix is split whose format has one
    number per matrix, and the ranks have different ones.
    """
    from te_models.checkpoints import expected_tensors
    from te_models.checkpoints.parts import Place, parts

    tensors = dict(model.stored_tensors())
    if model.tp_group is None and model.ep_group is None:
        return tensors
    shapes = expected_tensors(model.config, model.expert_layout)
    tp, ep = model.tp_size, model.expert_model_parallel_size
    by_group = (
        (model.tp_group, [Place(tp_rank=rank, tp_size=tp) for rank in range(tp)]),
        (model.ep_group, [Place(ep_rank=rank, ep_size=ep) for rank in range(ep)]),
    )
    owned = [
        (group, [parts(model.config, shapes, place) for place in places])
        for group, places in by_group
        if group is not None
    ]
    whole: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        for group, owners in owned:
            if owners[0][name].cuts():
                tensor = _joined(name, tensor, [own[name] for own in owners], shapes[name], group)
        if is_first(model):
            whole[name] = tensor.cpu()
    return whole


def is_first(model: GPTModel) -> bool:
    """Whether this rank is the first of those that share the model: the one that writes."""
    place = place_of(model)
    return place.tp_rank == place.ep_rank == 0


def _joined(name: str, tensor: Tensor, owned: list[Part], shape: Shape, group: dist.ProcessGroup) -> Tensor:
    """Put the parts of a tensor that the ranks of one group own together; `tensor` is this rank's."""
    if not isinstance(tensor, QuantizedTensor):
        return _join(name, _gathered(tensor.detach(), group), [part.cuts() for part in owned])
    cuts = [part.field_cuts(name, shape, tensor.quantizer) for part in owned]
    fields = {
        key: _join(name, _gathered(field, group), [its[key] for its in cuts]) for key, field in tensor.fields.items()
    }
    whole = [shape[d] if d in owned[0].cuts() else n for d, n in enumerate(tensor.shape)]
    return tensor.wrap(fields, shape=torch.Size(whole))


def _gathered(tensor: Tensor, group: dist.ProcessGroup) -> list[Tensor]:
    """Return every rank's tensor, of one shape, sent as bytes."""
    sent = tensor.contiguous().flatten().view(torch.uint8)
    received = [torch.empty_like(sent) for _ in range(group.size())]
    dist.all_gather(received, sent, group=group)
    return [part.view(tensor.dtype).view(tensor.shape) for part in received]


def _join(name: str, gathered: list[Tensor], cuts: list[Cuts]) -> Tensor:
    """Put tensors together that are the ranges of one; without ranges they have to be equal."""
    from te_models.checkpoints import CheckpointError

    first = gathered[0]
    if not cuts[0]:
        if not all(torch.equal(first, other) for other in gathered):
            raise CheckpointError(f"{name} is split over ranks that quantized it with scales of their own")
        return first
    ((dim, _),) = cuts[0].items()
    shape = list(first.shape)
    shape[dim] = max(end for its in cuts for _, end in its[dim])
    whole = torch.empty(shape, dtype=first.dtype, device=first.device)
    for part, its in zip(gathered, cuts, strict=True):
        offset = 0
        for begin, end in its[dim]:
            whole.narrow(dim, begin, end - begin).copy_(part.narrow(dim, offset, end - begin))
            offset += end - begin
    return whole
