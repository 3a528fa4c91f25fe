"""One training step of a model of few layers, on ranks that do not exist, recorded.

Layers of a kind are alike, so three of each and one more say what any number takes: what FSDP2 gathers ahead and
reduces behind is whole with three, the last one among them, beside which most is held at the highest point. Experts
are supposed to get equally many rows: what a router chooses is a value.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from te_models.checkpoints import expected_tensors
from te_models.checkpoints.mapping.param_shapes import is_linear_weight
from te_models.kernels import launch, libraries
from te_models.kernels.cross_entropy import chunked, rows
from te_models.kernels.gemm import reference, using_cpu_gemm
from te_models.layers.tensor.fsdp import local_part

from ..config import ModelConfig
from ..model import GPTModel
from ..model.build import without_draws
from ..model.moe import MoELayer
from ..model.recompute import LEAST
from ..parallel.sharding import parallelize
from ..training.build import build_optimizer, random_model
from ..training.config import TrainConfig
from ..training.lora import Adapters
from ..training.ranks.layout import RankLayout
from ..training.ranks.reduction import Reduction
from ..training.setup import rounded_weights, set_recomputation
from ..training.step import make_loss_function
from ..training.trained import trained_by_layer, with_layers_alone
from .result import Moved, added_traffic
from .simulation import Recorder, without_values
from .stretches import StretchRecipes, named_as_in_the_whole


@dataclass
class Recorded:
    """What a rank takes. parameters, optimizer: bytes that stay. peak: bytes at the highest point of a micro-batch,
    those included. each: the traffic of every micro-batch; once: the traffic of the step's end. host: bytes in main
    memory; copied: bytes that a micro-batch copies from and to it."""

    parameters: float = 0.0
    optimizer: float = 0.0
    peak: float = 0.0
    each: Moved = field(default_factory=dict)
    once: Moved = field(default_factory=dict)
    host: float = 0.0
    copied: float = 0.0

    def plus(self, other: Recorded, factor: float) -> Recorded:
        """Return this and `factor` times another."""

        return Recorded(
            self.parameters + factor * other.parameters,
            self.optimizer + factor * other.optimizer,
            self.peak + factor * other.peak,
            added_traffic(self.each, other.each, factor),
            added_traffic(self.once, other.once, factor),
            self.host + factor * other.host,
            self.copied + factor * other.copied,
        )


def record_step(
    config: TrainConfig, model: ModelConfig, layout: RankLayout, recipes: StretchRecipes | None = None
) -> Recorded:
    """Return what rank 0 takes for a step of the model, from steps of models of a few of its layers. recipes: that it
    runs under; None: the first ones of the run.

    Called inside `fake_ranks`.
    """
    recipes = recipes or StretchRecipes.at(config, model, 0)
    places = by_kind(config, model, range(model.num_layers), recipes)
    few = sorted({layer for layers in places for layer in (*layers[:2], layers[-1])})
    base = record_layers(config, model, layout, few, recipes)
    total = base
    for layers in places:
        if len(layers) > 3:
            more = record_layers(config, model, layout, sorted([*few, layers[2]]), recipes)
            total = total.plus(more.plus(base, -1.0), len(layers) - 3)
    return total


def record_layers(
    config: TrainConfig,
    model: ModelConfig,
    layout: RankLayout,
    layers: list[int],
    recipes: StretchRecipes | None = None,
) -> Recorded:
    """Run a micro-batch and the end of a step with these layers of the model alone, and return what was recorded."""
    recorder = recorder_of(layout)
    recipes = recipes or StretchRecipes.at(config, model, 0)
    config = with_layers_alone(config, model, layers)
    with without_draws():
        gpt = random_model(config, of_layers(model, layers), "cpu", layout)
    if layout.dims.is_sharded:
        divided(gpt, config, layout)
    if config.lora.rank:
        Adapters(config, gpt)
    gpt.activation_checkpointing = config.model.activation_checkpointing
    gpt.activation_func_fp8_input_store = config.model.activation_func_fp8_input_store
    gpt.output_layer.loss_chunk_tokens = config.model.loss_chunk(model.vocab_size, config.micro_batch_tokens)
    set_recomputation(gpt, config.model)
    suppose_balance(gpt)
    named_as_in_the_whole(gpt, layers)
    held = [list(gpt.parameters()), list(gpt.buffers())]
    if config.posttraining.method == "dpo" and not config.lora.rank:
        held.append(list(random_model(config, of_layers(model, layers), "cpu", layout).parameters()))  # the reference
    recorder.hold(held)
    found = Recorded(parameters=recorder.live)
    with as_few_operations(), recorder:
        optimizer = build_optimizer(config.replace(compile=False), gpt, layout)
        found.optimizer = recorder.live - found.parameters
        options: dict[str, Any] = {"compiled": False, "recipes": recipes.schedule}
        loss_function = make_loss_function(gpt.train(), config.precision, "cpu", **options)
        shape = config.data.micro_batch_size * config.window_rows, config.data.sequence_length
        once = config.parallel.reduces_once and layout.dims.is_sharded and config.data.gradient_accumulation > 1
        reduction = Reduction(optimizer, layout.gradients, gpt, once=once)
        passes: list[Moved] = []
        alone = layout.mesh is None  # ranks that divide a model gather what they round: this is left out
        if config.precision.qat != "none" and not alone:
            recorder.live += sum(local_part(p).nbytes for n, p in gpt.named_parameters() if is_linear_weight(n))
        with rounded_weights(config, gpt, layout)() if alone else nullcontext():
            for last in (False, True) if once else (True,):
                recorder.traffic = {}
                with waiting_apart(found) if config.model.activation_offloading else nullcontext():
                    loss, _ = loss_function(torch.zeros(shape, dtype=torch.int64, device="cpu"))
                with reduction.backward(last=last):
                    loss.backward()
                del loss
                optimizer.accumulate_gradients()
                passes.append(recorder.traffic)
        found.each, recorder.traffic = passes[0], {}
        reduction.finish()
        optimizer.gather_parameters()
        found.once = added_traffic(recorder.traffic, added_traffic(passes[-1], passes[0], -1.0))
        found.peak = recorder.peak
    if config.parallel.cpu_offload:
        offload(found, gpt)
    return found


def offload(found: Recorded, gpt: GPTModel) -> None:
    """Count what `parallel.cpu_offload` moves as main memory's: sharded parameters, their gradients and moments. A
    micro-batch copies the parameters there and gradients back, and gathers what it copied."""
    sharded = [p for p in gpt.parameters() if local_part(p) is not p]
    own = float(sum(local_part(p).nbytes for p in sharded))
    gradients = float(sum(local_part(p).nbytes for p in sharded if p.requires_grad))
    found.host += own + gradients + found.optimizer
    found.copied += 2 * own + gradients  # both passes gather
    found.peak -= own + gradients + found.optimizer
    found.parameters, found.optimizer = found.parameters - own, 0.0


@contextmanager
def waiting_apart(found: Recorded) -> Iterator[None]:
    """Inside, large tensors that are saved for a backward pass take no memory of the device until it asks for them, as
    with `model.activation_offloading`; what they take of main memory, and copies, is added to `found`."""
    found.host = found.copied = 0.0

    def pack(tensor: torch.Tensor) -> Any:
        size = tensor.numel() * tensor.element_size()
        if isinstance(tensor, nn.Parameter) or isinstance(tensor._base, nn.Parameter) or size < LEAST:
            return tensor
        found.host += size
        found.copied += 2 * size
        return tensor.shape, tensor.stride(), tensor.dtype

    def unpack(packed: Any) -> torch.Tensor:
        if isinstance(packed, torch.Tensor):
            return packed
        shape, stride, dtype = packed
        return torch.empty_strided(shape, stride, dtype=dtype, device="cpu")

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield


def of_layers(model: ModelConfig, layers: list[int]) -> ModelConfig:
    """Return the configuration of a model with these layers of another one alone, in their order."""
    changes: dict = {"num_layers": len(layers)}
    if model.layer_types is not None:
        changes["layer_types"] = tuple(model.layer_types[layer] for layer in layers)
    changes |= model.mixers_of(layers)
    if model.moe is not None:
        with_experts = tuple(i for i, layer in enumerate(layers) if model.is_moe_layer(layer))
        hashed = tuple(i for i, layer in enumerate(layers) if layer in model.moe.hash_layers)
        changes["moe"] = model.moe.replace(layers=with_experts, hash_layers=hashed) if with_experts else None
    return model.replace(**changes)


def suppose_balance(gpt: GPTModel) -> None:
    """Where tensors have no values, have experts get equally many tokens: a router's decisions are read."""
    supposed = without_values()
    for module in gpt.modules():
        if isinstance(module, MoELayer):
            module.dispatcher.supposes_balance = supposed


@contextmanager
def as_few_operations() -> Iterator[None]:
    """Where tensors have no values, have GEMMs run in the operands' dtype, as on an accelerator, whatever this CPU
    would choose, operations of ours be one each, and the loss take more rows at a time than a CPU's cache would like:
    every operation takes time to plan, and these rows are at most 64 MiB."""
    fake, before = without_values(), (chunked._ROWS, rows._STEP_ELEMENTS, reference._CHUNK)
    choice = libraries.supposed, launch.as_accelerator
    if fake:
        chunked._ROWS, rows._STEP_ELEMENTS, reference._CHUNK = 16 * before[0], 16 * before[1], 8 * before[2]
        libraries.supposed = launch.as_accelerator = True
    try:
        with using_cpu_gemm("bf16" if fake else "auto"):
            yield
    finally:
        chunked._ROWS, rows._STEP_ELEMENTS, reference._CHUNK = before
        libraries.supposed, launch.as_accelerator = choice


def recorder_of(layout: RankLayout) -> Recorder:
    """Return what records a step of this layout."""
    return Recorder(_dimensions(layout))


def divided(gpt: GPTModel, config: TrainConfig, layout: RankLayout) -> GPTModel:
    """Return a whole model sharded, or cut into this rank's stages, as a run does it."""
    return parallelize(
        gpt,
        layout.mesh,
        reshard_after_forward=config.parallel.reshard_after_forward,
        reduce_dtype=getattr(torch, config.parallel.reduce_dtype),
        stages=layout.stages,
        cp_comm_type=layout.cp_comm_type,
    )


def by_kind(config: TrainConfig, model: ModelConfig, layers: Iterable[int], recipes: StretchRecipes) -> list[list[int]]:
    """Return layers in lists of those that are alike: with experts or without, attending in the same way, trained in
    the same parts, and under the same recipes."""
    places: dict[tuple[object, ...], list[int]] = {}
    trained = trained_by_layer(config, model)
    modules: dict[str, list[tuple[str, object]]] = {}
    for name in filter(is_linear_weight, expected_tensors(model, config.model.expert_layout)):
        words = name.rpartition(".")[0].split(".")
        if words[:2] == ["decoder", "layers"]:
            own = ".".join(words[3:]), recipes.of_module(".".join(words))
            modules.setdefault(words[2], []).append(own)
    for layer in layers:
        kind = layer_kind(model, layer), trained[layer], tuple(modules.get(str(layer), ()))
        places.setdefault(kind, []).append(layer)
    return list(places.values())


def layer_kind(model: ModelConfig, layer: int) -> tuple[object, ...]:
    """Return what layers that compute alike have in common."""
    return model.mixer_names(layer), model.has_mlp(layer), model.is_moe_layer(layer), model.layer_type(layer)


def _dimensions(layout: RankLayout) -> dict[str, str]:
    """Return the name of the mesh's dimension by the name of its process group."""
    if layout.mesh is None:
        return {"0": "dp"}
    names: dict[str, str] = {}
    meshes = (layout.mesh.layers, layout.mesh.experts, layout.mesh.data, layout.mesh.shards)
    for mesh in (mesh for mesh in meshes if mesh is not None):
        for name in mesh.mesh_dim_names or ():
            names.setdefault(mesh.get_group(name).group_name, name)
    if layout.mesh.stages is not None:
        names.setdefault(layout.mesh.stages.group_name, "pp")
    return names
