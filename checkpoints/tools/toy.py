"""A small model out of a large one: some of its layers and experts, byte for byte, for tests of real files.

Tensors keep their names, dtypes, form and the rows that stay, quantized ones their numbers and scales (`toy_parts.py`);
config.json changes only where it counts layers and experts.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Unpack

from te_models.config import ConfigError, ModelConfig

from ..families import FAMILIES, Family
from ..families.base.moe_fields import ExpertGroups
from ..folder.checkpoint import Checkpoint
from ..folder.hf_config import export_config
from ..folder.provenance import main_dtype
from ..formats import SEPARATE, VALUES, with_quantization
from ..io.errors import CheckpointError
from ..io.strict_json import dump_object
from ..mapping.plan import ConversionPlan
from ..mapping.report import moved_report
from .conversion import Conversion, ConversionKeywords, PathLike
from .toy_parts import ToyPart, cut, renumbered


def toy(
    src: PathLike,
    dst: PathLike,
    *,
    layers: int = 2,
    experts: int | None = None,
    **options: Unpack[ConversionKeywords],
) -> ConversionPlan:
    """Write the Hugging Face folder `dst` with the first `layers` layers of `src` and their first `experts` experts.

    If none of the first layers of a mixture has experts, the last of them is replaced by the first layer that has. A
    token uses as many experts as before, or all that are left; groups of experts that become uneven or too small are
    dropped. Quantized weights stay quantized, number for number, and the folder declares their format. Tensors that the
    model does not use stay, too: multi-token prediction layers, with as many experts, and the vision part beside a text
    model. Raises CheckpointError for a folder that cannot be read, and for more layers or experts than it has.
    """
    with Conversion(src, dst, options, storage=VALUES) as conversion:
        conversion.refuse_mtp("cut")
        ckpt = conversion.ckpt
        if ckpt.kind != "hf":
            raise CheckpointError(
                f"{src} is a te_models folder; toy takes a Hugging Face folder: te-models export {src} OUT writes one"
            )
        family = FAMILIES[ckpt.family or ""]
        chosen = choose_layers(ckpt.config, layers)
        config = small_config(ckpt.config, chosen, experts)
        form = ckpt.source.form if ckpt.source is not None else None
        part = ToyPart(ckpt, family, form, config, tuple(chosen))
        plan, quantized = cut(part)
        plan = replace(plan, report=moved_report(plan, ckpt.files.tensors))
        if experts == 1 and any(isinstance(entry, ExpertGroups) for entry in family.fields):
            note = f"transformers does not run {family.model_type} with one expert: it values a group by its two best"
            plan = replace(plan, notes=(*plan.notes, note))
        values, extra = _hf_config(ckpt, family, config), {}
        if ckpt.quantized is not None and quantized:
            declaration = ckpt.quantized.declaration
            if declaration.config is not None:
                values = with_quantization(values, renumbered(declaration.config, part))
            if declaration.separate is not None:
                extra[SEPARATE] = dump_object(renumbered(declaration.separate, part))
        return conversion.write(plan, dump_object(values), store=ckpt.files, extra=extra)


def choose_layers(config: ModelConfig, number: int) -> list[int]:
    """Return the layers of a small model: the first ones, the last of them one with experts if the model has any."""
    if not 1 <= number <= config.num_layers:
        raise CheckpointError(f"layers is {number}; allowed: 1 to {config.num_layers}, what the model has")
    chosen = list(range(number))
    if config.moe is not None and config.moe.layers and config.moe.layers[0] >= number:
        chosen[-1] = config.moe.layers[0]
    return chosen


_UNGROUPED = {"num_groups": None, "topk_groups": None}


def small_config(config: ModelConfig, chosen: Sequence[int], experts: int | None) -> ModelConfig:
    """Return the configuration of a part of a model: some of its layers, and of its experts; None: all."""
    values = config.to_dict()
    values["num_layers"] = len(chosen)
    values["layer_types"] = [config.layer_type(i) for i in chosen]
    values |= config.mixers_of(chosen)
    moe = values["moe"]
    if experts is not None:
        if config.moe is None:
            raise CheckpointError(f"experts is {experts}; allowed: None, because the model has no experts")
        have = config.moe.num_moe_experts
        if not 1 <= experts <= have:
            raise CheckpointError(f"experts is {experts}; allowed: 1 to {have}, what the model has")
        moe["num_moe_experts"] = experts
        moe["moe_router_topk"] = min(experts, moe["moe_router_topk"])
    if moe is not None:
        moe["layers"] = [place for place, i in enumerate(chosen) if config.is_moe_layer(i)]
    if moe is not None and config.moe is not None and config.moe.hash_layers:
        if experts not in (None, have := config.moe.num_moe_experts):
            raise CheckpointError(f"experts is {experts}; allowed: all {have}, as a table names experts by the token")
        moe["hash_layers"] = [place for place, i in enumerate(chosen) if i in config.moe.hash_layers]
    if moe is not None and moe["num_moe_experts"] < 2 * (moe["router"]["num_groups"] or 0):
        # transformers values a group by the sum of its two best experts, and fails if there is only one
        moe["router"] |= _UNGROUPED
    try:
        return ModelConfig.from_dict(values)
    except ConfigError as error:
        if moe is None or moe["router"]["num_groups"] is None:
            raise CheckpointError(f"this part of the model is none: {error}") from None
    moe["router"] |= _UNGROUPED
    return ModelConfig.from_dict(values)


def _hf_config(ckpt: Checkpoint, family: Family, config: ModelConfig) -> dict[str, Any]:
    assert ckpt.source is not None, "a Hugging Face folder has one"
    dtype = main_dtype(ckpt)
    return export_config(config, replace(ckpt.source, dtype=dtype), family, dtype)
