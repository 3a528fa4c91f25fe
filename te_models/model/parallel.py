"""A model split over the ranks of a group: what can be split, and putting the parts together again."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from te_models.layers import QuantizedTensor

from ..config import ConfigError, ModelConfig

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from .gpt import GPTModel


def check_split(config: ModelConfig, ranks: int) -> None:
    """Raise ConfigError naming the first field because of which the model cannot be split over so many ranks."""
    if ranks == 1:
        return
    a, moe = config.attention, config.moe
    moe_layers = (moe.layers or ()) if moe is not None else ()
    refused = {
        "attention.mla": (a.mla is not None, "latent attention"),
        "attention.qk_layernorm": (a.qk_layernorm == "full", "norms over all heads"),
        "moe.bias": (moe is not None and moe.bias, "experts with biases"),
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


def group_of(mesh: DeviceMesh | None) -> dist.ProcessGroup | None:
    """Return the group of a mesh's dimension "tp", or of its only one."""
    if mesh is None:
        return None
    names = mesh.mesh_dim_names or ()
    if "tp" in names:
        return mesh.get_group("tp")
    if mesh.ndim != 1:
        raise ValueError(
            f"device_mesh has the dimensions {names or mesh.ndim}; allowed: one, or one that is called 'tp'"
        )
    return mesh.get_group()


def whole_tensors(model: GPTModel) -> dict[str, Tensor]:
    """Return what a checkpoint holds of a model, with the parts of all ranks put together on each of them."""
    from te_models.checkpoints import CheckpointError, expected_tensors
    from te_models.checkpoints.parts import parts

    tensors = dict(model.stored_tensors())
    if model.tp_group is None or model.tp_size == 1:
        return tensors
    shapes = expected_tensors(model.config, model.expert_layout)
    owned = [parts(model.config, shapes, rank, model.tp_size) for rank in range(model.tp_size)]
    for name, tensor in tensors.items():
        dim = owned[0][name].dim
        if dim is None:
            continue
        if isinstance(tensor, QuantizedTensor):
            raise CheckpointError(f"{name} is quantized and split, and its parts cannot be put together")
        gathered = [torch.empty_like(tensor) for _ in owned]
        dist.all_gather(gathered, tensor.contiguous(), group=model.tp_group)
        tensors[name] = torch.empty(shapes[name], dtype=tensor.dtype, device=tensor.device)
        for own, part in zip(owned, gathered, strict=True):
            offset = 0
            for begin, end in own[name].ranges:
                tensors[name].narrow(dim, begin, end - begin).copy_(part.narrow(dim, offset, end - begin))
                offset += end - begin
    return tensors
