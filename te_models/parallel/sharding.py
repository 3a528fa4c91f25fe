"""A model sharded over the ranks of a mesh: FSDP2 for each layer, experts over their own mesh, one compiled block.

The parts of a model become real one after the other: each is created on the device, filled, quantized where weights are
stored so, and cut into shards before the next one. No rank ever has more than one layer whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

from te_models.layers import QuantizedTensor, Recipe, quantized_model_init
from te_models.layers.module.model_state import quantized_modules
from te_models.layers.module.primary_weights import store_weights_as_asked
from te_models.layers.tensor.fsdp import shards_of_blocks

from ..config import ConfigError
from ..layouts import Facts, check_layout_rules
from ..model import GPTModel
from ..model.build import real_device
from ..model.moe import Router
from ..model.parallel import reset_parameters
from ..model.stage import with_layers
from .mesh import ParallelMesh
from .pipeline import Stage
from .stage_layout import StageLayout

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Shard

    from te_models.layers.distributed.context_parallel import CpCommType

ReshardAfterForward = int | Literal["default", "always", "never"]


def parallelize(
    model: GPTModel,
    mesh: ParallelMesh | None,
    *,
    device: torch.device | str | None = None,
    fill: Callable[[nn.Module], object] | None = None,
    weights: Recipe | None = None,
    reshard_after_forward: ReshardAfterForward = "default",
    reduce_dtype: torch.dtype = torch.float32,
    cpu_offload: bool = False,
    stages: StageLayout | None = None,
    cp_comm_type: CpCommType = "all_gather",
) -> GPTModel:
    """Shard `model` in place as the layout of `mesh` says, and return it. Called by all ranks.

    With pipeline stages the result is a model of this rank's layers alone, whose `pipeline_stages` a `Pipeline` runs.

    mesh: None where there is one rank. model: built over `mesh.model`, with or without data; on the meta device its
    parts are created on `device` one by one. fill: called with each part that was created, embedding, layers and output
    layer in the order of a GPTModel; None: its `reset_parameters`, with the draws of the whole model from the same
    seed. weights: the recipe in whose format the linear layers then store their weights. reshard_after_forward: free
    gathered parameters between the passes, "default" of the layers, "always" of all; a number: keep shards over this
    many ranks, a divisor of the ranks that share the parameters (not of quantized weights). reduce_dtype: in which
    gradients of the ranks are added up; the result has the parameter's dtype. cpu_offload: keep sharded parameters and
    their gradients in main memory, so that an optimizer works there; the passes copy what they need to `device`.
    stages: the pipeline stages, where `mesh` has any; None: one a rank.

    Parameters of another dtype than most of their part (routers in float32) are not sharded: average their gradients,
    and divide sharded experts' gradients, with `te_models.training.ranks.data_parallel.average_gradients`. Compile
    the result with `compile_model(model, "block")`.

    Ranks that share sequences are told to the model. cp_comm_type: how attention reaches their keys, see
    `GPTModel.set_context_parallel_group`.

    Raises ConfigError where experts are distributed and torch cannot shard them over a separate mesh, TypeError for
    another kind of mesh, ValueError for a model that was built over other ranks, for `cpu_offload` without shards, and
    for stored weights whose blocks the ranks cannot share equally where torch shards no other way.
    """
    _check_mesh(model, mesh)
    if mesh is not None:
        model.set_context_parallel_group(mesh.cp_group, cp_comm_type)
    over = mesh if mesh is not None and mesh.dims.is_sharded else None
    if cpu_offload and over is None:
        raise ValueError("cpu_offload is True, and no parameter is sharded; allowed: with data_parallel_shard_size > 1")
    shard = None
    if over is not None:
        reshard = _reshard_of(reshard_after_forward)
        shard = partial(_shard, mesh=over, reduce_dtype=reduce_dtype, reshard=reshard, cpu_offload=cpu_offload)
    tied = model.config.embedding.share_embeddings_and_output_weights
    decoder = model.decoder
    with_the_rest = [
        decoder.final_layernorm,
        decoder.final_hyper_connection,
        decoder.lane_projections,
        decoder.per_layer_layernorm,
        *(decoder.shared_blocks or ()),
        *([model.embedding, model.output_layer] if tied else ()),
    ]
    target = real_device(device)
    model.check_dispatch_device(target)
    whole, roots = model, (model,)
    if mesh is not None and mesh.stages is not None:
        stages = stages or StageLayout(mesh.dims.pipeline_model_parallel_size)
        model = _own_stages(model, mesh, stages)
        roots = model.pipeline_stages
    own = {id(part) for part in sharded_parts(model)} | {id(p) for p in model.parameters()}
    for part in sharded_parts(whole):
        if id(part) not in own and not any(id(p) in own for p in part.parameters()):
            if any(p.is_meta for p in part.parameters()) and (fill is None or weights is not None):
                part.to_empty(device=target)
                if fill is None:  # the next part draws what it draws of the whole model
                    reset_parameters(part)
                if weights is not None:  # who writes the whole model knows what other stages store
                    _store_quantized(part, weights)
                part.to_empty(device="meta")
            continue
        if any(parameter.is_meta for parameter in part.parameters()):
            part.to_empty(device=target)
            reset_parameters(part) if fill is None else fill(part)
            if weights is not None:
                _store_quantized(part, weights)
        if shard is not None and not any(part is other for other in with_the_rest):
            shard(part)
    for rest in (*model.decoder.rotary_embeddings, model.router_loss_weights):
        if rest is not None and any(buffer.is_meta for buffer in rest.buffers()):
            rest.to_empty(device=target)
    if shard is not None:
        for root in roots:
            shard(root)
    return model


def _check_mesh(model: GPTModel, mesh: ParallelMesh | None) -> None:
    """Raise unless a mesh is a ParallelMesh, whose dimensions say what they share, or the model was built over
    another."""
    if mesh is None:
        return
    if not isinstance(mesh, ParallelMesh):
        names = getattr(mesh, "mesh_dim_names", None)
        what = type(mesh).__name__ + (f" with the dimensions {names}" if names else "")
        raise TypeError(
            f"mesh is a {what}; allowed: a ParallelMesh, as ParallelDims(ranks=...).build_mesh(...) returns"
        )
    names = ("tensor_model_parallel_size", "expert_model_parallel_size", "expert_tensor_parallel_size")
    sizes = model.tp_size, model.expert_model_parallel_size, model.expert_tensor_parallel_size
    check_layout_rules(Facts(dims=mesh.dims, built=dict(zip(names, sizes, strict=True))))


def _own_stages(model: GPTModel, mesh: ParallelMesh, stages: StageLayout) -> GPTModel:
    """Return the layers of this rank's stages as one model, cut into `pipeline_stages`.

    Raises ConfigError where the stages cannot have this model."""
    assert mesh.stages is not None
    check_layout_rules(Facts(model=model.config, dims=mesh.dims, stages=stages))
    spans, numbers = stages.layers(model.config.num_layers), stages.of_rank(mesh.stages.rank())
    own = with_layers(model, [layer for number in numbers for layer in spans[number]])
    own.pipeline_stages = tuple(Stage(with_layers(own, spans[number]), number) for number in numbers)
    assert mesh.same_layers is not None, "there are stages"
    for router in own.modules():
        if isinstance(router, Router):
            router.layer_group = mesh.same_layers.group_name
    return own


def _reshard_of(asked: ReshardAfterForward) -> bool | int | None:
    return {"default": None, "always": True, "never": False}[asked] if isinstance(asked, str) else asked


def sharded_parts(model: GPTModel) -> Iterator[nn.Module]:
    """Yield the parts of a model that are sharded one by one, in the order in which they are created."""
    decoder = model.decoder
    ends = decoder.final_layernorm, decoder.final_hyper_connection, decoder.lane_projections
    last = *ends, decoder.per_layer_layernorm, model.output_layer
    parts = (model.embedding, *decoder.layers, *(decoder.shared_blocks or ()), *last)
    further = () if model.mtp is None else model.mtp.layers
    yield from (part for part in (*parts, *further) if part is not None)


def _store_quantized(part: nn.Module, recipe: Recipe) -> None:
    with torch.no_grad(), quantized_model_init(recipe=recipe):
        for _, module in quantized_modules(part):
            store_weights_as_asked(module)


def _shard(
    part: nn.Module,
    *,
    mesh: ParallelMesh,
    reduce_dtype: torch.dtype,
    reshard: bool | int | None,
    cpu_offload: bool,
) -> None:
    """Call `fully_shard`, with the experts over their own mesh, if they have one."""
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    options: dict[str, Any] = {}
    if cpu_offload:  # copies from pinned memory overlap with compute; without an accelerator there is none to pin
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=torch.accelerator.is_available())
    experts = {id(p) for p in _experts_of(part)}
    if experts:
        over = mesh.expert_fsdp
        place = (lambda shard: shard) if mesh.experts is None else _own_mesh(over)
        shards = over.size(over.ndim - 1)
        options["shard_placement_fn"] = lambda p: place(_placement(p, shards)) if id(p) in experts else None
    with shards_of_blocks(part):
        fully_shard(
            part,
            mesh=mesh.fsdp,
            reshard_after_forward=reshard,
            mp_policy=MixedPrecisionPolicy(reduce_dtype=reduce_dtype),
            ignored_params=_unlike(part),
            **options,
        )


def _experts_of(part: nn.Module) -> Iterator[nn.Parameter]:
    from ..model.moe import Experts

    for module in part.modules():
        if isinstance(module, Experts):
            yield from module.parameters()


def shards_experts_apart() -> bool:
    """Whether `fully_shard` of this torch can shard some parameters of a layer over a separate mesh."""
    from torch.distributed.fsdp._fully_shard import _fsdp_common, _fsdp_init

    return hasattr(_fsdp_common, "ShardPlacementResult") and hasattr(_fsdp_init, "_get_mesh_info")


def _own_mesh(mesh: DeviceMesh) -> Callable[[Shard], Any]:
    """Return what makes of a placement one that tells `fully_shard` over which ranks it shards, too."""
    if not shards_experts_apart():
        raise ConfigError(
            f"torch {torch.__version__} shards all parameters of a layer over one mesh; allowed with "
            "expert_model_parallel_size: data_parallel_shard_size = 1, or torch 2.13"
        )
    from torch.distributed.fsdp._fully_shard._fsdp_common import ShardPlacementResult
    from torch.distributed.fsdp._fully_shard._fsdp_init import _get_mesh_info

    info: Any = _get_mesh_info(mesh, None)
    return lambda shard: ShardPlacementResult(shard, info)


def _placement(parameter: nn.Parameter, shards: int) -> Shard:
    """Return the dimension along which the experts' parameter is sharded: the first one that the ranks can share
    equally. FSDP2 pads the first dimension; for few experts on many ranks that is most of what it holds and sends."""
    from torch.distributed.tensor import Shard

    dims = range(1 if isinstance(parameter, QuantizedTensor) else parameter.dim())
    return Shard(next((dim for dim in dims if parameter.shape[dim] % shards == 0), 0))


def _unlike(part: nn.Module) -> set[nn.Parameter]:
    """Return the parameters of another dtype than most of a part has: FSDP2 cannot reduce these together with it."""
    from torch.distributed.tensor import DTensor

    unsharded = [p for p in part.parameters() if not isinstance(p, DTensor)]
    sizes: dict[torch.dtype, int] = {}
    for parameter in unsharded:
        sizes[parameter.dtype] = sizes.get(parameter.dtype, 0) + parameter.numel()
    most = max(sizes, key=lambda dtype: sizes[dtype], default=None)
    inner = {id(p) for m in _sharded_inside(part) for p in m.parameters()}
    return {p for p in unsharded if p.dtype != most or id(p) in inner}


def _sharded_inside(part: nn.Module) -> Iterator[nn.Module]:
    from torch.distributed.fsdp import FSDPModule

    yield from (module for module in part.modules() if module is not part and isinstance(module, FSDPModule))
