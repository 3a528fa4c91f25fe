"""A `GPTModel` from a transformers model in memory, and back; `GPTModel.from_hf` and `to_hf`.

transformers holds some families in another form than it writes (experts fused into one tensor, other names): the names
of the state dict tell the form.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from ...extras import require
from .keep_in_fp32 import keep_dtypes

if TYPE_CHECKING:
    import transformers

    from ..gpt import GPTModel


def converter_of(model: transformers.PreTrainedModel) -> Any:
    """Return the `AutoConverter` of a transformers model."""
    from te_models.checkpoints import AutoConverter

    return AutoConverter.from_config(json.loads(model.config.to_json_string()))


@torch.no_grad()
def fill_from_hf(gpt: GPTModel, model: transformers.PreTrainedModel, device: torch.device) -> None:
    """Copy a transformers model's weights into a `GPTModel` of the same configuration, made without data."""
    converter = converter_of(model)
    converted = converter.from_hf(model.state_dict(), layout=gpt.expert_layout)
    keep_dtypes(gpt, converter.family.model_type, lambda name: converted[name].dtype)
    gpt.to_empty(device=device)
    for name, tensor in gpt.stored_tensors():
        tensor.copy_(converted[name])


def to_hf(gpt: GPTModel, family: str | None, *, dequantize: bool) -> transformers.PreTrainedModel:
    """Return a transformers model with a `GPTModel`'s weights, in its dtype and on its device."""
    from te_models.checkpoints import AutoConverter, CheckpointError
    from te_models.checkpoints.families.base.text_part import text_family
    from te_models.checkpoints.folder.hf_config import choose_family

    transformers = require("transformers", "hf", feature="to_hf")
    chosen = text_family(choose_family(gpt.config, gpt.origin, family), gpt.config)
    chosen.write_config(gpt.config)  # raises if the family cannot express the model
    converter = AutoConverter(gpt.config, chosen, gpt.origin)
    tensors = dict(gpt.stored_tensors())
    check_class(gpt, chosen.model_type)
    config = transformers_config(converter.hf_config(tensors))
    dtype = _main_dtype(tensors)  # config.json names a dtype as well, but its files may contradict it
    # transformers' other attention leaves the soft-capping of scores out
    attention = {} if gpt.config.attention.softcap is None else {"attn_implementation": "eager"}
    with torch.device(next(iter(tensors.values())).device):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype, **attention)
    form, _ = chosen.best_form(gpt.config, model.state_dict())
    converted = converter.to_hf(tensors, form=form, dequantize=dequantize)
    for name, stored in chosen.namespace(gpt.config, form).stored.items():
        if not stored.convertible and name in converted:  # such a tensor has another precision
            tensor = model.get_parameter(name) if name in dict(model.named_parameters()) else model.get_buffer(name)
            tensor.data = tensor.data.to(torch.promote_types(tensor.dtype, converted[name].dtype))
    names, buffers = model.state_dict(), dict(model.named_buffers())
    result = model.load_state_dict(converted, strict=False)
    loaded = {t.data_ptr() for name, t in names.items() if name not in result.missing_keys}
    missing = [name for name in result.missing_keys if names[name].data_ptr() not in loaded]  # not only a tied copy
    # tables that transformers has computed from the configuration
    missing = [name for name in missing if name not in buffers or not chosen.unused.holds(name, config.to_dict())]
    if missing or result.unexpected_keys:
        raise CheckpointError(
            f"transformers' {type(model).__name__} has other tensors than the family {chosen.model_type!r}: "
            f"{', '.join((*missing, *result.unexpected_keys))}"
        )
    return model.eval()


def transformers_config(values: Mapping[str, Any]) -> transformers.PreTrainedConfig:
    """Return transformers' configuration of the values of a config.json."""
    import transformers

    return transformers.AutoConfig.for_model(**_with_numbers(dict(values)))


def _with_numbers(value: Any) -> Any:
    """Return a value of config.json with the numbers that JSON cannot spell, which transformers writes as objects:
    {"__float__": "Infinity"}."""
    if isinstance(value, dict):
        if value.keys() == {"__float__"}:
            return float(value["__float__"])
        return {name: _with_numbers(inner) for name, inner in value.items()}
    return [_with_numbers(inner) for inner in value] if isinstance(value, list) else value


def _main_dtype(tensors: Mapping[str, torch.Tensor]) -> torch.dtype:
    """Return the dtype that most numbers have."""
    numbers: Counter[torch.dtype] = Counter()
    for tensor in tensors.values():
        numbers[tensor.dtype] += tensor.numel()
    return numbers.most_common(1)[0][0]


def _has_class(model_type: str) -> bool:
    """Say whether transformers builds a decoder of this type, and import the configuration of no other type."""
    import transformers

    configs = transformers.CONFIG_MAPPING
    return model_type in configs and configs[model_type] in transformers.MODEL_FOR_CAUSAL_LM_MAPPING


def check_class(gpt: GPTModel, family: str) -> None:
    """Raise CheckpointError where transformers has no class for a family, with those for which it has one."""
    from te_models.checkpoints import FAMILIES, CheckpointError

    if _has_class(family):
        return
    others = []
    for name, other in FAMILIES.items():
        try:
            other.write_config(gpt.config)
        except CheckpointError:
            continue
        others += [name] if _has_class(name) else []
    allowed = f"; allowed: {', '.join(others)}" if others else ""
    raise CheckpointError(f"this transformers has no class for the family {family!r}{allowed}")
