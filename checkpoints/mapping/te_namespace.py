"""Our own two layouts as namespaces: grouped stacks, or one tensor per GEMM; quantized parameters as their fields."""

from collections.abc import Mapping

from te_models.config import ModelConfig

from ..io.boxes import Shape
from ..io.errors import CheckpointError, shorten
from .param_shapes import EXPERT_BIAS, ExpertLayout, expected_tensors, is_expert_stack, is_table
from .quantized_format import SUFFIXES, Description, field_specs, merge_descriptions
from .tensor_map import TABLE, Namespace, TensorSpec, identity_namespace, split_stacks

Formats = Mapping[str, Description]
"""Parameter name -> description of its quantized format; parameters in high precision are absent."""


def te_namespace(config: ModelConfig, layout: ExpertLayout, formats: Formats | None = None) -> Namespace:
    """Return how our files in `layout` store the model; canonical tensors are grouped parameters, or their fields.

    formats: grouped-layout names of the quantized parameters.
    """
    canonical: dict[str, Shape] = {}
    stored: dict[str, TensorSpec] = {}
    stacks: dict[str, int] = {}
    formats = formats or {}
    for name, shape in expected_tensors(config).items():
        fields = field_specs(name, shape, formats[name]) if name in formats else {"": _plain(name, shape)}
        for suffix, spec in fields.items():
            canonical[name + suffix] = spec.shape
            stored[name + suffix] = spec
            if is_expert_stack(name):
                stacks[name + suffix] = len(suffix)
    namespace = identity_namespace(canonical, stored)
    if layout == "grouped":
        return namespace
    split = split_stacks(namespace, stacks)
    return Namespace(canonical, {name: split.stored[name] for name in _order(config, split)}, split.links)


def _plain(name: str, shape: Shape) -> TensorSpec:
    """A router's selection bias compares scores that differ by less than bfloat16 resolves: it keeps its dtype."""
    if is_table(name):
        return TABLE(shape)
    return TensorSpec(shape, convertible=not name.endswith(EXPERT_BIAS))


def _order(config: ModelConfig, namespace: Namespace) -> list[str]:
    """Order per-GEMM entries by parameter: all fields of one GEMM follow each other."""
    names = (name + suffix for name in expected_tensors(config, "per-gemm") for suffix in SUFFIXES.values())
    return [name for name in names if name in namespace.stored]


def grouped_formats(config: ModelConfig, layout: ExpertLayout, formats: Formats) -> dict[str, Description]:
    """Translate descriptions named in `layout` to grouped names; members of a stack that differ are an error."""
    result: dict[str, Description] = {}
    known: set[str] = set()
    for name, members in parameter_names(config, layout).items():
        known.update(members)
        meta = merge_descriptions(name, [formats.get(member) for member in members])
        if meta is not None:
            result[name] = meta
    strangers = [name for name in formats if name not in known]
    if strangers:
        raise CheckpointError(f"the metadata describes parameters that this model does not have: {shorten(strangers)}")
    return result


def formats_in_layout(config: ModelConfig, layout: ExpertLayout, formats: Formats) -> dict[str, Description]:
    """Translate descriptions from grouped names to the names of `layout`."""
    members = parameter_names(config, layout)
    return {member: meta for name, meta in formats.items() for member in members[name]}


def parameter_names(config: ModelConfig, layout: ExpertLayout) -> dict[str, list[str]]:
    """Return grouped name -> its names in `layout`, for every parameter."""
    return {
        name: [f"{name}{g}" for g in range(shape[0])] if layout == "per-gemm" and is_expert_stack(name) else [name]
        for name, shape in expected_tensors(config).items()
    }
