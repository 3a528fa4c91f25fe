"""Make a mixture of experts from a dense model: every expert starts as a copy of the dense MLP (arXiv 2212.05055).

With identical experts and top-k weights that sum to 1, the mixture computes what the MLP did, whatever the router says,
so training starts from the dense model's loss. The router is small and random, so that tokens spread over the experts.
"""

import hashlib
import math
import re
from collections.abc import Callable, Sequence
from typing import Unpack

import torch

from te_models.config import ConfigError, ModelConfig, MoEConfig

from ..folder.hf_config import find_family
from ..folder.provenance import main_dtype, provenance_source
from ..folder.te_folder import HFSource, TEFolder
from ..io.boxes import Box, Range, Shape
from ..io.dtypes import dtype_name, torch_dtype
from ..io.errors import CheckpointError
from ..io.store import Store
from ..mapping.param_shapes import ExpertLayout, check_counts, check_layout, expected_tensors
from ..mapping.plan import ConversionPlan, OutputTensor, make_plan
from ..mapping.stream import fill_tensor
from ..mapping.te_namespace import te_namespace
from ..mapping.tensor_map import Link, Namespace
from .conversion import Conversion, ConversionKeywords, PathLike

_MLP = re.compile(r"decoder\.layers\.(\d+)\.mlp\.(linear_fc[12])\.(.+)")
_ROUTER_STD = 0.02


def upcycle(
    src: PathLike,
    dst: PathLike,
    num_experts: int,
    topk: int,
    *,
    layers: Sequence[int] | None = None,
    noise_std: float = 0.0,
    seed: int = 0,
    layout: ExpertLayout = "grouped",
    **options: Unpack[ConversionKeywords],
) -> ConversionPlan:
    """Write the dense model in `src` (either kind of folder) as a mixture of `num_experts` experts, `topk` per token.

    The fields of `te_models.checkpoints.tools.options.UpcycleOptions` say what the arguments mean.

    Raises CheckpointError for a quantized model, a model that already has experts, and layers that do not exist.
    """
    if not (math.isfinite(noise_std) and noise_std >= 0):
        raise CheckpointError(f"noise_std is {noise_std}; allowed: a finite number that is not negative")
    with Conversion(src, dst, options) as conversion:
        conversion.refuse_quantized("upcycled")
        conversion.refuse_mtp("upcycled")
        ckpt = conversion.ckpt
        config = _moe_config(ckpt.config, num_experts, topk, layers)
        target = te_namespace(config, check_layout(layout))
        routers = {name for name in target.stored if name.endswith(".mlp.router.weight")}
        plan = make_plan(
            ckpt.tensors,
            _with_experts(ckpt.namespace, config),
            _without(target, routers),
            where=str(src),
            unused=ckpt.unused,
        )
        dtype = torch_dtype(main_dtype(ckpt))
        by_name = {output.name: output for output in plan.outputs}
        outputs = []
        for name, shape in expected_tensors(config, layout).items():
            if name in routers:
                compute = _normal(name, shape, dtype, _ROUTER_STD, seed)
                outputs.append(OutputTensor(name, dtype_name(dtype), shape, compute=compute, variant=f"seed {seed}"))
            elif noise_std and ".mlp.experts." in name and ".weight" in name:
                compute = _noisy(ckpt.store, by_name[name], noise_std, seed)
                variant = f"seed {seed}, noise {noise_std}"
                outputs.append(OutputTensor(name, by_name[name].dtype, shape, compute=compute, variant=variant))
            else:
                outputs.append(by_name[name])
        family = _moe_family(config)
        notes = () if family is not None else ("no Hugging Face family stores this mixture, so it cannot be exported",)
        plan = ConversionPlan(tuple(outputs), plan.ignored, notes=notes)
        source = provenance_source(ckpt)
        if source is not None:
            source = HFSource(family, source.config, source.dtype)
        return conversion.write(plan, TEFolder(layout, config, source).to_bytes())


def _moe_config(config: ModelConfig, num_experts: int, topk: int, layers: Sequence[int] | None) -> ModelConfig:
    if config.moe is not None:
        raise CheckpointError("the model already has experts; only a dense model can be upcycled")
    check_counts(config.num_layers, num_experts)
    try:
        moe = MoEConfig(
            num_moe_experts=num_experts,
            moe_router_topk=topk,
            moe_ffn_hidden_size=config.mlp.ffn_hidden_size,
            bias=config.mlp.bias,
            layers=None if layers is None else tuple(sorted(layers)),
        )
        return config.replace(moe=moe)
    except ConfigError as error:
        raise CheckpointError(f"this mixture of experts is not possible: {error}") from None


def _moe_family(config: ModelConfig) -> str | None:
    """Return the family that the mixture exports as; None before the first."""
    try:
        return find_family(config).model_type
    except CheckpointError:
        return None


def _with_experts(dense: Namespace, config: ModelConfig) -> Namespace:
    """Return the dense files seen as the mixture's files: the parts of all experts link to the same MLP tensors."""
    assert config.moe is not None
    experts = config.moe.num_moe_experts
    canonical = {n: shape for n, shape in expected_tensors(config).items() if not n.endswith(".mlp.router.weight")}
    links: list[Link] = []
    copies: dict[str, int] = {}
    for link in dense.links:
        match = _MLP.fullmatch(link.name)
        if match is None or not config.is_moe_layer(int(match[1])):
            links.append(link)
            continue
        layer, linear, leaf = match.groups()
        if leaf.startswith("layer_norm_"):
            name = f"decoder.layers.{layer}.pre_mlp_layernorm.{leaf.removeprefix('layer_norm_')}"
            links.append(Link(name, link.box, link.stored, link.stored_box, link.axes))
            continue
        name = f"decoder.layers.{layer}.mlp.experts.{linear}.{leaf}"
        copies[link.stored] = experts
        axes = tuple(None if axis is None else axis + 1 for axis in link.axes)
        for e in range(experts):
            box: Box = (Range(e, e + 1), *link.box)
            links.append(Link(name, box, link.stored, link.stored_box, axes))
    return Namespace(canonical, dense.stored, tuple(links), copies)


def _without(namespace: Namespace, names: set[str]) -> Namespace:
    return Namespace(
        {n: shape for n, shape in namespace.canonical.items() if n not in names},
        {n: stored for n, stored in namespace.stored.items() if n not in names},
        tuple(link for link in namespace.links if link.name not in names),
    )


def _generator(name: str, seed: int) -> torch.Generator:
    """Return a separate generator for each tensor, so that results do not depend on the order of writing."""
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))


def _drawn(shape: Shape, generator: torch.Generator) -> torch.Tensor:
    return torch.randn(shape, generator=generator, dtype=torch.float32, device=generator.device)


def _normal(name: str, shape: Shape, dtype: torch.dtype, std: float, seed: int) -> Callable[[], list[torch.Tensor]]:
    return lambda: [(_drawn(shape, _generator(name, seed)) * std).to(dtype)]


def _noisy(store: Store, output: OutputTensor, std: float, seed: int) -> Callable[[], list[torch.Tensor]]:
    def compute() -> list[torch.Tensor]:
        out = torch.empty(output.shape, dtype=torch_dtype(output.dtype), device="cpu")
        fill_tensor(store, output.pieces, out)
        matrices = out if out.dim() == 3 else out[None]
        generator = _generator(output.name, seed)
        for matrix in matrices:
            matrix.copy_(matrix.float() + _drawn(matrix.shape, generator) * std)
        return [out]

    return compute
