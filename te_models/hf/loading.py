"""Load a folder for `TEModelForCausalLM.from_pretrained`: what transformers' options mean here."""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from te_models.checkpoints import open_checkpoint
from te_models.checkpoints.families.base.fields import shorten_value
from te_models.checkpoints.folder.provenance import main_dtype
from te_models.checkpoints.folder.te_folder import CONFIG
from te_models.checkpoints.io.dtypes import as_torch_dtype, torch_dtype
from te_models.checkpoints.io.hub import local_folder
from te_models.checkpoints.io.strict_json import read_object
from te_models.layers import Recipe

from ..config import ModelConfig
from ..extras import require
from ..model import GPTModel
from .config import TEConfig

if TYPE_CHECKING:
    import transformers
else:
    transformers = require("transformers", "hf", feature="te_models.hf")

_WITHOUT_MEANING = {
    # What transformers' own callers pass along, and its defaults, with the values that ask for nothing. Permission to
    # run code of a folder is not needed.
    "ignore_mismatched_sizes": (None, False),
    "output_loading_info": (None, False),
    "subfolder": (None, ""),
    "trust_remote_code": (None, True, False),
    "use_safetensors": (None, True),
    "weights_only": (None, True),
    "low_cpu_mem_usage": (None, True, False),
    "attn_implementation": (None, "sdpa"),
    "_from_auto": (None, True, False),
    "_from_pipeline": (None, "text-generation"),
}
_FIELDS = ("bos_token_id", "eos_token_id", "output_hidden_states", "pad_token_id", "return_dict", "use_cache")
"""Of the configuration, unless the call gives it, as in transformers."""
_ADAPTER_CONFIG = "adapter_config.json"
_OF_ADAPTERS = ("adapter_kwargs", "adapter_name")
_SHOWN = ("tqdm_class",)
"""What shows the progress of a download: its servers pass it."""
_HUB = ("revision", "cache_dir", "token", "local_files_only", "force_download")


def load(
    name: str | os.PathLike[str],
    *,
    config: TEConfig | None,
    dtype: torch.dtype | str | None,
    device_map: torch.device | str | int | Mapping[str, Any] | None,
    recipe: Recipe | None,
    expert_layout: str | None,
    dequantize: bool,
    verify: bool,
    options: Mapping[str, Any],
) -> tuple[GPTModel, TEConfig, transformers.GenerationConfig | None]:
    """Return the model, its configuration, and the folder's generation_config.json."""
    hub = {option: value for option, value in options.items() if option in _HUB and value is not None}
    # transformers' Auto classes take this option out of the call and put it into the configuration.
    within = getattr(config, "_attn_implementation", None)
    for option, value in ({"attn_implementation": within} | dict(options)).items():
        if option in (*_HUB, *_FIELDS, *_OF_ADAPTERS, *_SHOWN, "_commit_hash"):
            continue
        if value not in _WITHOUT_MEANING.get(option, (None,)):
            raise ValueError(
                f"{option} is {shorten_value(value)}, which TEModelForCausalLM.from_pretrained cannot honour"
            )
    device = _device(device_map)
    folder = local_folder(name, **hub)
    with open_checkpoint(folder, storage="values" if dequantize else None, verify=False) as checkpoint:
        found = TEConfig.of(checkpoint)
        if config is not None:
            found = _config_for(config, found, checkpoint.config, name)
        if dtype is None or dtype == "auto":
            wanted = torch_dtype(main_dtype(checkpoint))
        else:
            wanted = as_torch_dtype(dtype)
    layout: Any = expert_layout or found.expert_layout
    found.expert_layout, found.dtype = layout, wanted
    found.name_or_path = str(name)
    for field in _FIELDS:
        if options.get(field) is not None:
            setattr(found, field, options[field])
    gpt = GPTModel.from_pretrained(
        folder,
        dtype=wanted,
        device=device,
        recipe=recipe,
        expert_layout=layout,
        dequantize=dequantize,
        verify=verify,
    )
    generation = None
    if (folder / "generation_config.json").is_file():
        generation = transformers.GenerationConfig.from_pretrained(folder)
    return gpt, found, generation


def find_adapter(
    name: str | os.PathLike[str], options: Mapping[str, Any]
) -> tuple[str | os.PathLike[str], dict[str, Any] | None]:
    """Return (the folder or hub id of the model, how to call `load_adapter` for the adapter that comes with it, or
    None).

    As in transformers: a folder with an adapter_config.json holds an adapter of peft for the model beside it, else for
    the model that the file names; of a hub id, transformers' Auto classes look and say so in `adapter_kwargs`. Raises
    ValueError for other arguments of adapters, MissingExtraError where there is an adapter, and no peft.
    """
    hub_options = dict(options.get("adapter_kwargs") or {})
    adapter = hub_options.pop("_adapter_model_path", None)
    if unknown := sorted(set(hub_options) - {"revision", "token"}):
        raise ValueError(
            f"adapter_kwargs has {unknown[0]!r}, which TEModelForCausalLM.from_pretrained cannot honour; allowed: "
            "'revision', 'token'"
        )
    if adapter is None and (Path(name) / _ADAPTER_CONFIG).is_file():
        adapter = name
        if not (Path(name) / CONFIG).is_file():
            name = read_object(Path(adapter) / _ADAPTER_CONFIG).get("base_model_name_or_path") or name
    if adapter is None:
        return name, None
    require("peft", "peft", feature=f"the adapter in {adapter}")
    return name, {
        "peft_model_id": str(adapter),
        "adapter_name": options.get("adapter_name"),
        "adapter_kwargs": hub_options,
    }


def _config_for(config: Any, of_folder: TEConfig, model: ModelConfig, name: object) -> TEConfig:
    """Return a copy of the configuration that a user, or transformers' Auto classes, give for the model of a folder: it
    may set what is no part of the model, as output_hidden_states."""
    if not isinstance(config, TEConfig):
        raise ValueError(
            f"config is a {type(config).__name__}; allowed: a TEConfig, or None for the folder's configuration"
        )
    if config.model_config != model:
        raise ValueError(f"config does not describe the model in {name}; change the folder, or leave config out")
    copied = copy.deepcopy(config)
    copied.source = of_folder.source
    return copied


def _device(device_map: torch.device | str | int | Mapping[str, Any] | None) -> torch.device | None:
    """Return the one device that a device_map stands for; a mapping may give one for the whole model, named ""."""
    one = device_map
    if isinstance(device_map, Mapping) and list(device_map) == [""]:
        one = device_map[""]
    try:
        return None if one is None else torch.device(one)  # type: ignore[arg-type]
    except (RuntimeError, TypeError):
        raise ValueError(f"device_map is {device_map!r}; allowed: one device, as 'cuda:0', or None") from None
