"""A small model like a published one: its first layers with few channels and random weights, as a Hugging Face folder.

All widths and numbers of heads are divided by one number, the largest with which the model's own family can still say
it; channels of a head stay, and with them the rotary embedding. Nothing is downloaded.
"""

import contextlib
import math
import os
import tempfile
from typing import Any

import torch

from te_models.checkpoints import CheckpointError, ConversionPlan, export_hf
from te_models.checkpoints.families import Family
from te_models.checkpoints.families.base.text_part import text_family
from te_models.checkpoints.tools.toy import choose_layers, small_config

from ..config import ConfigError, MixerConfig, ModelConfig
from ..model import GPTModel
from .entries import entry

_WORDS = 1024
_CHANNELS = 256
"""Channels of the residual stream, at least."""
_DIVIDED = {
    *("hidden_size", "ffn_hidden_size", "moe_ffn_hidden_size", "moe_latent_size", "shared_expert_intermediate_size"),
    *("num_attention_heads", "num_query_groups", "q_lora_rank", "kv_lora_rank"),
    *("num_heads", "num_groups", "num_key_heads", "num_value_heads", "n_heads", "channels"),
}
_OF_EXPERTS = {"moe_ffn_hidden_size", "moe_latent_size"}
"""Widths of experts: multiples of 8, in whose rows grouped products begin at whole 16 bytes."""
_ROUTER = "router"
"""Its groups of experts are as many as before."""


def random_toy(
    name: str, dst: str | os.PathLike[str], *, layers: int | None = None, experts: int | None = None, **options: Any
) -> ConversionPlan:
    """Write the Hugging Face folder `dst` with a small model like one of the catalogue, of random weights in bfloat16.

    layers, experts: as `te_models.checkpoints.toy` takes them; None: as many layers as the family can say, from 2 on.
    options: further arguments of `export_hf`. A model that also sees images becomes its text model. Raises
    CatalogueError for an unknown name, CheckpointError for more layers or experts than there are.
    """
    config, family = toy_config(name, layers=layers, experts=experts)
    torch.manual_seed(0)
    model = GPTModel(config, dtype=torch.bfloat16, device="cpu")
    with tempfile.TemporaryDirectory(prefix="te-models-toy-") as scratch:
        model.save_pretrained(scratch)
        return export_hf(scratch, dst, family=family.model_type, **options)


def toy_config(name: str, *, layers: int | None = None, experts: int | None = None) -> tuple[ModelConfig, Family]:
    """Return the configuration of a small model like one of the catalogue, and the family that its files are of."""
    found = entry(name)
    whole = found.read_config()
    few, family = _few_layers(found.family, whole, layers, experts)
    for divisor in range(few.hidden_size // _CHANNELS, 1, -1):
        if few.hidden_size % divisor == 0 and (narrow := _narrow(few, family, divisor)) is not None:
            return narrow, family
    return _narrow(few, family, 1) or few, family


def _few_layers(
    family: Family, whole: ModelConfig, layers: int | None, experts: int | None
) -> tuple[ModelConfig, Family]:
    """Return a part of a model, and the family of its text model: some say layers by a pattern that few layers do not
    fill."""
    for number in range(min(2, whole.num_layers), whole.num_layers + 1) if layers is None else [layers]:
        few = small_config(whole, choose_layers(whole, number), experts)
        with contextlib.suppress(CheckpointError):
            text = text_family(family, few)
            text.write_config(few)
            return few, text
    if layers is None:
        return few, text_family(family, few)
    enough, _ = _few_layers(family, whole, None, experts)
    raise CheckpointError(
        f"layers is {layers}: the first layers of this model do not fill the pattern by which {family.model_type} says "
        f"layers; allowed: {enough.num_layers}, or as many as fill it"
    )


def _narrow(config: ModelConfig, family: Family, divisor: int) -> ModelConfig | None:
    """Return a model with widths divided, and few words; None if no such model exists, or the family cannot say it."""
    values = _divided(config.to_dict(), divisor)
    values["vocab_size"] = min(_WORDS, config.vocab_size)
    embedding = values["embedding"] = values["embedding"] | {"padding_idx": None}
    if embedding["multiplier"] == math.sqrt(config.hidden_size):
        embedding["multiplier"] = math.sqrt(values["hidden_size"])
    if config.mixers is not None and config.layer_mixers is not None:
        names = {name: _named(name, mixer, divisor) for name, mixer in config.mixers.items()}
        values["mixers"] = {names[name]: mixer for name, mixer in values["mixers"].items()}
        values["layer_mixers"] = [names.get(name, name) for name in config.layer_mixers]
    try:
        narrow = ModelConfig.from_dict(values)
        family.write_config(narrow)
    except (ConfigError, CheckpointError):
        return None
    return narrow


def _named(name: str, mixer: MixerConfig, divisor: int) -> str:
    """Return the name of a mixer with its heads divided: some families call it by their number."""
    heads = getattr(mixer, "num_attention_heads", 0)
    return f"{name.removesuffix(str(heads))}{heads // divisor}" if name.endswith(f"_{heads}") else name


def _divided(values: dict[str, Any], divisor: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, dict):
            found[key] = value if key == _ROUTER else _divided(value, divisor)
        elif key in _DIVIDED and value is not None:
            multiple = 8 if key in _OF_EXPERTS else 1
            found[key] = max(multiple, value // divisor // multiple * multiple)
        else:
            found[key] = value
    return found
