"""Adapters in folders of peft: `adapter_config.json` and `adapter_model.safetensors`.

`save_adapter` writes the names of our layers: `load_adapter` and `TEModelForCausalLM.from_pretrained` read them.
`export_adapter` writes the names of transformers' model of the family, which peft puts over that model. A weight of
ours that is several there, such as q, k and v, shares A, and its rows of B are divided as the rows of the weight are;
experts that are one parameter there become `target_parameters`.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from te_models.checkpoints import AutoConverter, CheckpointError, expected_tensors
from te_models.checkpoints.families.base.text_part import text_family
from te_models.checkpoints.folder.hf_config import choose_family
from te_models.checkpoints.io.atomic import new_folder
from te_models.checkpoints.io.store import read_tensors
from te_models.checkpoints.io.strict_json import read_object
from te_models.checkpoints.plan.rank_shards import part_of, parts
from te_models.checkpoints.write.writer import write_tensors

from ..extras import require
from ..model import GPTModel
from ..model.parallel import place_of
from .adapter import Adapter, magnitude_name
from .layers import FIRST
from .model import adapters_of, add_lora, lora_state_dict
from .parts import adapter_parameters, adapter_parts

if TYPE_CHECKING:
    from te_models.checkpoints.plan.tensor_map import Link

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."
_EXPERT_PROJECTIONS = ("gate_proj", "up_proj", "down_proj", "w1", "w2", "w3")
"""Names that experts had in earlier releases of transformers: peft 0.21 takes these targets for fused experts."""


def save_adapter(model: GPTModel, folder: str | Path, *, base_model: str = "") -> None:
    """Write the adapters of a model with the names of our layers, in place of what is there. base_model: the folder of
    the model without adapters, for the file. Raises ValueError for a model without adapters, and for one of which this
    rank has a part."""
    tensors = {f"{_PREFIX}{name}": t for name, t in lora_state_dict(model).items()}
    targets = [name for name, _ in adapters_of(model)]
    _write(Path(folder), tensors, _config(model, base_model) | {"target_modules": targets})


def load_adapter(model: GPTModel, folder: str | Path) -> None:
    """Put the adapters that `save_adapter` wrote over the layers of a model; of a model that ranks share, each rank
    takes its part. Raises CheckpointError for a folder that holds other adapters, ValueError for a model that cannot
    have them."""
    folder = Path(folder)
    config = read_object(folder / CONFIG)
    try:
        options = {
            "rank": config["r"],
            "alpha": config["lora_alpha"],
            "targets": config["target_modules"],
            "dropout": config.get("lora_dropout", 0.0),
            "use_dora": config.get("use_dora", False),
        }
    except KeyError as error:
        raise CheckpointError(
            f"{folder / CONFIG} has no {error.args[0]!r}; allowed: a folder of save_adapter"
        ) from None
    listed = options["targets"] if isinstance(options["targets"], list) else []
    theirs = next((name for name in listed if str(name).startswith("model.")), None)
    if theirs is not None:
        raise CheckpointError(
            f"{folder} has the layers of transformers' model ({theirs}), for peft; allowed: an adapter with te_models' "
            "names, which training writes as adapter/ beside adapter-hf/"
        )
    add_lora(model, **options)
    shapes = expected_tensors(model.config, model.expert_layout)
    wholes = adapter_parameters(model.whole or model, shapes)
    owned = adapter_parts(wholes, shapes, parts(model.config, shapes, place_of(model)))
    found, _ = read_tensors(folder / WEIGHTS)
    saved = {name.removeprefix(_PREFIX): tensor for name, tensor in found.items()}
    wrong = {n for n in {*wholes, *saved} if n not in wholes or n not in saved or wholes[n].shape != saved[n].shape}
    if wrong:
        name = f"{_PREFIX}{min(wrong)}"
        raise CheckpointError(f"{folder / WEIGHTS} does not hold adapters of this model: {name} is not of it")
    for name, tensor in lora_state_dict(model).items():
        tensor.copy_(part_of(saved[name], owned[name].cuts()))


@torch.no_grad()
def export_adapter(model: GPTModel, folder: str | Path, *, base_model: str = "", family: str | None = None) -> None:
    """Write the adapters of a model for transformers' model of its family, as `peft.PeftModel` reads them.

    base_model: the Hugging Face folder or hub id of that model, for the file. family: None means the one that the model
    came from, or the first that can express it. Needs the extra `hf`. Raises ValueError for a model without adapters,
    for one of which this rank has a part, and for adapters that peft cannot put over that model: DoRA of experts that
    are one parameter there.
    """
    transformers: Any = require("transformers", "hf", feature="export_adapter")
    chosen = text_family(choose_family(model.config, model.origin, family), model.config)
    values = AutoConverter(model.config, chosen, model.origin).hf_config(dict(model.stored_tensors()))
    with torch.device("meta"):
        theirs = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**values))
    _, namespace = chosen.best_form(model.config, theirs.state_dict())
    adapters = {f"{name}.weight": adapter for name, adapter in adapters_of(model)}
    links: dict[str, list[Link]] = defaultdict(list)
    for link in namespace.links:
        if link.name in adapters:
            links[link.stored].append(link)
    config, tensors = _config(model, base_model), {}
    modules = dict(theirs.named_modules())
    names: dict[str, list[str]] = {"target_modules": [], "target_parameters": []}
    for stored, own in links.items():
        module, _, parameter = stored.rpartition(".")
        if module not in modules:
            continue  # a layer that transformers' model leaves out
        if len({link.name for link in own}) > 1:
            raise ValueError(f"{stored} has parts of several layers of te_models; allowed: adapters of none of them")
        adapter, shape = adapters[own[0].name], namespace.stored[stored].shape
        a, b, magnitude, transposed = _factors(adapter, own, shape)
        if len(shape) == 2:
            names["target_modules"].append(module)
            config["fan_in_fan_out"] = config["fan_in_fan_out"] or transposed
            parts = {"lora_A.weight": a, "lora_B.weight": b} | (
                {} if magnitude is None else {"lora_magnitude_vector": magnitude}
            )
        else:
            if magnitude is not None:
                raise ValueError(
                    f"{stored} is one parameter of all experts, for which peft has no DoRA; allowed: targets without "
                    "experts, or LoRA"
                )
            names["target_parameters"].append(stored)
            config["lora_dropout"] = 0.0  # peft drops nothing of the input of a parameter
            # peft wraps the targets of a module in the order of its parameters, the first one innermost
            wrapped = [n for n, _ in modules[module].named_parameters(recurse=False) if f"{module}.{n}" in links]
            inner = "base_layer." * (len(wrapped) - 1 - wrapped.index(parameter))
            parts = {
                f"{inner}lora_A.weight": a.flatten(0, 1),
                f"{inner}lora_B.weight": b.permute(1, 2, 0).flatten(1, 2),
            }
        tensors |= {f"{_PREFIX}{module}.{name}": tensor for name, tensor in parts.items()}
    fused = any(p.dim() == 3 for name, p in theirs.named_parameters() if ".experts." in name)
    mistaken = [name for name in names["target_modules"] if name.rpartition(".")[2] in _EXPERT_PROJECTIONS]
    if fused and mistaken:
        raise ValueError(
            f"{mistaken[0]} has a name which peft reads as a part of the experts, which are one parameter here; "
            "allowed: targets without the MLPs and shared experts of a mixture"
        )
    _write(Path(folder), tensors, config | {key: value for key, value in names.items() if value})


def _factors(adapter: Adapter, links: list[Link], shape: tuple[int, ...]) -> tuple[Tensor, Tensor, Tensor | None, bool]:
    """Return A [..., r, in], B [..., out, r], the lengths [out] of DoRA, and whether it is stored [in, out], for a
    stored tensor of this shape: rows that no link has are zero."""
    a, b = (getattr(adapter, name).weight for name in FIRST)
    magnitude = getattr(adapter, magnitude_name(FIRST)) if adapter.use_dora else None
    rows = a.dim() - 2  # the canonical dimension of output features
    out = links[0].axes.index(rows)
    transposed = out == len(shape) - 1
    lead = tuple(shape[:-2])
    found_a = a.new_zeros((*lead, *a.shape[-2:]))
    found_b = b.new_zeros((*lead, shape[out], b.shape[-1]))
    found_m = None if magnitude is None else magnitude.new_zeros((*lead, shape[out]))
    for link in links:
        own = [slice(r.start, r.stop, r.step) for r in link.box]
        theirs = [slice(r.start, r.stop, r.step) for r in link.stored_box]
        if own[-1] != slice(0, a.shape[-1], 1):
            raise ValueError(f"{link.stored} has some input features of a layer; allowed: weights with all of them")
        expert, target = tuple(own[:rows]), tuple(theirs[: len(lead)])
        here = (*target, theirs[out])
        found_a[target] = a[expert].reshape(found_a[target].shape)
        found_b[here] = b[(*expert, own[rows])].reshape(found_b[here].shape)
        if found_m is not None and magnitude is not None:
            found_m[here] = magnitude[(*expert, own[rows])].reshape(found_m[here].shape)
    if found_m is not None and not bool((found_m != 0).all()):
        raise ValueError(f"{links[0].stored} has rows without adapter; allowed with DoRA: adapters of all its rows")
    return found_a, found_b, found_m, transposed


def _config(model: GPTModel, base_model: str) -> dict[str, Any]:
    """Return adapter_config.json but for the targets. Raises ValueError for a model without adapters."""
    adapter = next((adapter for _, adapter in adapters_of(model)), None)
    if adapter is None:
        raise ValueError("the model has no adapters; allowed: a model after add_lora or load_adapter")
    if model.shares_parameters or model.whole is not None:
        raise ValueError(
            "this rank has a part of the model, and a folder holds all adapters; allowed: a whole model, which "
            "load_adapter gives the adapters that a run has written"
        )
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model,
        "r": adapter.rank,
        "lora_alpha": adapter.alpha,
        "lora_dropout": getattr(adapter.dropout, "p", 0.0),
        "use_dora": adapter.use_dora,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }


def _write(folder: Path, tensors: Mapping[str, Tensor], config: dict[str, Any]) -> None:
    with new_folder(folder, overwrite=True) as part:
        write_tensors(part / WEIGHTS, tensors, {"format": "pt"})
        (part / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
