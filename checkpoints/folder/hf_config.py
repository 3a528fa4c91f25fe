"""The config.json of an export: the original one, changed only where the model has changed."""

import functools
from collections.abc import Collection
from typing import Any

from te_models.config import ConfigError, ModelConfig

from ..families import FAMILIES, Family, family_of
from ..families.base.family import first_that_expresses
from ..families.base.moe_fields import joint_coefficient
from ..families.base.text_part import text_part
from ..formats import without_quantization
from ..io.dtypes import torch_dtype_name, with_most_bytes
from ..io.errors import CheckpointError
from ..mapping.plan import ConversionPlan
from .te_folder import HFSource

# Fields that do not belong to an architecture, kept when a model is exported as another family than it came from.
_NEUTRAL_FIELDS = (
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
    "use_cache",
    "dtype",
    "torch_dtype",
    "transformers_version",
)


def choose_family(config: ModelConfig, source: HFSource | None, wanted: str | None) -> Family:
    """Return the family to export as: the wanted one, else the recorded one, else the first that fits the model."""
    if wanted is not None:
        family = family_of(wanted)
        part = text_part(family)
        if part is not None and (source is None or source.family != wanted):
            texts = " or ".join(repr(text.model_type) for text in part.families)
            raise CheckpointError(
                f"models of the family {wanted!r} also see images, which this one does not; see {texts}"
            )
        return family
    if source is not None and source.family is not None:
        return family_of(source.family)
    return find_family(config)


def find_family(config: ModelConfig) -> Family:
    """Return the first family that can express the model, or raise CheckpointError with the nearest ones' reasons."""
    found = _first_family(config)
    if isinstance(found, str):
        raise CheckpointError(f"no family can store this model; of the nearest, {found}")
    return found


@functools.lru_cache(64)
def _first_family(config: ModelConfig) -> Family | str:
    """Return the first family that can express the model, or the reasons of the nearest ones. A run asks with every
    checkpoint, and asking them all takes a tenth of a second."""
    try:
        return first_that_expresses((family for family in FAMILIES.values() if text_part(family) is None), config)
    except CheckpointError as error:
        return str(error)


def export_config(config: ModelConfig, source: HFSource | None, family: Family, stored_dtype: str) -> dict[str, Any]:
    """Return config.json for a model exported as `family`; stored_dtype: the dtype of most of its weights."""
    original: dict[str, Any] = {}
    same_family = False
    if source is not None:
        same_family = source.config.get("model_type") == family.model_type
        found = without_quantization(source.config)  # what is said of it is true of the original's files only
        original = {k: v for k, v in found.items() if same_family or k in _NEUTRAL_FIELDS}
    if not original:
        original = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    values = original
    if "model_type" not in original or not _says(family, original, config):
        part = text_part(family)
        ours = family.write_config(config)  # which refuses what the family cannot express
        ours = ours if part is None else part.rewritten(original, config)
        replaced = family.known
        values = {k: v for k, v in original.items() if k not in replaced} | ours
        values |= {"model_type": family.model_type, "architectures": [family.architecture]}
        if part is None and same_family:
            values = _respelled(family, original, values, config)
    if source is None or source.dtype != stored_dtype or not {"dtype", "torch_dtype"} & set(values):
        key = "torch_dtype" if "torch_dtype" in values and "dtype" not in values else "dtype"
        values = values | {key: torch_dtype_name(stored_dtype)}
    return values


def _respelled(family: Family, original: dict[str, Any], values: dict[str, Any], config: ModelConfig) -> dict[str, Any]:
    """Return a changed config.json in the fields that the original had: what readers of older files know.

    Fields of the original that say the same still are kept, and the rotary embedding is in `rope_theta` and
    `rope_scaling` where it was; always so that the whole is read as the model.
    """
    old = _older_rope(original, values.get("rope_parameters"))
    for name in (name for name in original if name in family.known and name not in values):
        for value in (original[name], *([old[name]] if name in old else ())):
            if _still_says(family, {**values, name: value}, config):
                values = {**values, name: value}
                break
    older = {name: value for name, value in old.items() if name in original}
    without = {name: value for name, value in {**values, **older}.items() if name != "rope_parameters"}
    if older and "rope_parameters" not in original and _still_says(family, without, config):
        return without
    return values


def _older_rope(original: dict[str, Any], rope: Any) -> dict[str, Any]:
    """Return what transformers 4 would have in place of `rope_parameters`."""
    if not isinstance(rope, dict):
        return {}
    found: dict[str, Any] = {}
    if "sliding_attention" in rope and "full_attention" in rope:
        found["rope_local_base_freq"] = rope["sliding_attention"].get("rope_theta")
        rope = rope["full_attention"]
    outside = ("rope_theta", "partial_rotary_factor")
    found |= {name: rope[name] for name in outside if name in rope}
    scaling = {name: value for name, value in rope.items() if name not in outside}
    before = original.get("rope_scaling")
    if isinstance(before, dict) and "type" in before and "rope_type" in scaling:
        kind = scaling.pop("rope_type") if "rope_type" not in before else scaling["rope_type"]
        scaling = {"type": kind, **scaling}
    default = {scaling.get("rope_type"), scaling.get("type")} <= {"default", None}
    return found | {"rope_scaling": None if default else scaling}


def _still_says(family: Family, hf: dict[str, Any], config: ModelConfig) -> bool:
    """As `_says`, of fields that may contradict each other."""
    try:
        return _says(family, hf, config)
    except (CheckpointError, ConfigError):
        return False


def _says(family: Family, hf: dict[str, Any], config: ModelConfig) -> bool:
    """Whether config.json is of this model already. It does not say the factor of one training loss, nor what balances
    the experts of each layer by itself, and a folder of before there was `padding_idx` has none."""
    read = family.read_config(hf, mtp=config.mtp_num_layers > 0)
    unsaid: dict[str, Any] = {"mtp_loss_scaling_factor": config.mtp_loss_scaling_factor}
    if read.moe is not None and config.moe is not None and not read.moe.aux_loss_coeff:
        its = config.moe
        kind, coefficient = its.moe_router_load_balancing_type, 0.0 if joint_coefficient(config) else its.aux_loss_coeff
        unsaid["moe"] = read.moe.replace(moe_router_load_balancing_type=kind, aux_loss_coeff=coefficient)
    if config.embedding.padding_idx is None:
        unsaid["embedding"] = read.embedding.replace(padding_idx=None)
    return read.replace(**unsaid) == config


def weight_dtype(plan: ConversionPlan, copies: Collection[str]) -> str:
    """Return the dtype that most bytes of a model's weights have in a plan, outputs named in `copies` aside."""
    weights = (output for output in plan.outputs if output.name not in plan.passthrough and output.name not in copies)
    return with_most_bytes(((output.dtype, output.nbytes) for output in weights), "F32")
