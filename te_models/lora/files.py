"""Adapters in folders of peft: `adapter_config.json` and `adapter_model.safetensors`.

`save_adapter` writes the names of our layers: `load_adapter` and `TEModelForCausalLM.from_pretrained` read them.
`load_adapter` also reads what peft wrote for transformers' model of the family (`reading.py`), several of whose modules
may be one layer here. `export_adapter` (`export.py`) writes these names again.
"""

import json
import warnings
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from te_models.checkpoints import CheckpointError, expected_tensors
from te_models.checkpoints.io.atomic import new_folder
from te_models.checkpoints.mapping.rank_shards import cut_part, parts
from te_models.checkpoints.write.writer import write_tensors
from te_models.layers import QuantizedTensor

from ..model import GPTModel
from ..model.parallel import shard_place
from .adapter import magnitude_name
from .factors import Factors
from .layers import FIRST
from .model import adaptable, adapters_of, base_state_dict, check_without_adapters, lora_state_dict, put_adapters
from .parts import adapter_parameters, adapter_parts
from .peft_folders import CONFIG, PREFIX, WEIGHTS, PeftFolder, rank_fields
from .plain_weights import PLAIN_ADAPTERS
from .reading import in_names_of_transformers

MUCH = 0.1
"""Part of an adapter's changes whose loss is told."""
_LENGTHS = magnitude_name(FIRST)


def save_adapter(model: GPTModel, folder: str | Path, *, base_model: str = "") -> None:
    """Write the adapters of a model with the names of our layers, in place of what is there. base_model: the folder of
    the model without adapters, for the file. Raises ValueError for a model without adapters, and for one of which this
    rank has a part."""
    config = adapter_config(model, base_model)
    base = base_state_dict(model)
    tensors = {**lora_state_dict(model), **{name: base[name] for name in sorted(model.replaced_parameters)}}
    ranks = {name: (adapter.rank, adapter.alpha) for name, adapter in adapters_of(model)}
    config |= rank_fields(ranks) | {"target_modules": list(ranks)}
    if model.replaced_parameters:
        config["modules_to_save"] = sorted({name.rpartition(".")[0] for name in model.replaced_parameters})
    write_adapter(Path(folder), tensors, config)


@torch.no_grad()
def load_adapter(model: GPTModel, folder: str | Path) -> None:
    """Put the adapters of a folder over the layers of a model, and the whole weights that it may have in place of the
    model's; of a model that ranks share, each rank takes its part.

    The folder has the names of our layers (`save_adapter`), or the names of transformers' model of the family, as peft
    writes them: adapters of modules that are one layer here become one, whose rank is the sum of theirs. Raises
    CheckpointError for a folder of another model's adapters, or with what no layer here can do, ValueError for a model
    that cannot have adapters.
    """
    check_without_adapters(model)
    found, layers = PeftFolder.read(Path(folder)), adaptable(model)
    if any(name in layers for name, _ in found.modules):
        factors, values = {name: found.own_factors(name) for name, _ in found.modules}, found.values
    else:
        factors, values = in_names_of_transformers(model, found)
    shapes = expected_tensors(model.config, model.expert_layout)
    place = parts(model.config, shapes, shard_place(model))
    alone = {name: factors.pop(name) for name in list(factors) if name not in layers and name in shapes}
    _check_fits(found.path / WEIGHTS, factors, layers, values, shapes)
    split = next((n for n in factors if isinstance(layers[n], tuple(PLAIN_ADAPTERS)) and model.tp_size > 1), None)
    if split is not None:
        raise ValueError(f"{split} is split over ranks, and its adapter is not; allowed: a model that is whole")
    ranks = {name: (factors[name].rank, factors[name].alpha) for name in layers if name in factors}
    lengths = any(its.lengths is not None for its in factors.values())
    put_adapters(model, ranks, float(found.config.get("lora_dropout") or 0.0), lengths)
    wholes = adapter_parameters(model.whole or model, shapes)
    owned = adapter_parts(wholes, shapes, place)
    saved = {f"{layer}.{name}": tensor for layer, its in factors.items() for name, tensor in _parts(its).items()}
    for name, tensor in lora_state_dict(model).items():
        if saved[name].shape != wholes[name].shape:
            raise CheckpointError(
                f"{found.path / WEIGHTS} does not hold adapters of this model: {name} is {list(saved[name].shape)} and "
                f"not {list(wholes[name].shape)}"
            )
        own = cut_part(saved[name], owned[name].cuts())
        # rows without adapter keep the length that they have
        tensor.copy_(torch.where(own.isnan(), tensor, own) if name.endswith(_LENGTHS) else own)
    _replace_values(model, {name: cut_part(value, place[name].cuts()) for name, value in values.items()})
    _add_to_values(model, {name: cut_part(its.product(), place[name].cuts()) for name, its in alone.items()})


def _parts(factors: Factors) -> dict[str, Tensor]:
    found = {f"{FIRST[0]}.weight": factors.a, f"{FIRST[1]}.weight": factors.b}
    return found if factors.lengths is None else found | {_LENGTHS: factors.lengths}


def _check_fits(
    path: Path,
    factors: Mapping[str, Factors],
    layers: Collection[str],
    values: Mapping[str, Tensor],
    shapes: Mapping[str, tuple[int, ...]],
) -> None:
    for name in factors:
        if name not in layers:
            raise CheckpointError(
                f"{path} does not hold adapters of this model: {name} is no layer of it that adapters exist for; "
                "allowed: GEMM layers, embeddings, the output layer and routers"
            )
    for name, value in values.items():
        if shapes.get(name) != tuple(value.shape):
            has = f"is {list(shapes[name])} in the model" if name in shapes else "is no tensor of the model"
            raise CheckpointError(
                f"{path} has the whole weight {name} of shape {list(value.shape)}, which {has}; allowed: the model's "
                "shapes, of a larger vocabulary after resize_token_embeddings"
            )


def _replace_values(model: GPTModel, values: Mapping[str, Tensor]) -> None:
    """Give parameters other values, and note which have changed."""
    base = base_state_dict(model)
    for name, value in values.items():
        if name not in base:
            continue  # another pipeline stage's
        own = _plain(name, base[name])
        new = value.to(own.device, own.dtype)
        if not torch.equal(own, new):
            own.data.copy_(new)
            model.replaced_parameters |= {name}


def _plain(name: str, tensor: Tensor) -> Tensor:
    if isinstance(tensor, QuantizedTensor):
        raise CheckpointError(
            f"the adapter changes values of {name}, which is stored quantized; allowed: a model loaded with dequantize"
        )
    return tensor


def _add_to_values(model: GPTModel, changes: Mapping[str, Tensor]) -> None:
    """Add the products of adapters to parameters that no adapter exists for, in float32 with one rounding. Warns where
    that loses much of them."""
    base = base_state_dict(model)
    for name, change in changes.items():
        if name not in base:
            continue  # another pipeline stage's
        own = _plain(name, base[name])
        change = change.to(own.device)
        exact = own.to(change.dtype) + change
        lost = (exact.to(own.dtype).to(change.dtype) - exact).norm() / change.norm()
        if lost > MUCH:
            kind = str(own.dtype).removeprefix("torch.")
            warnings.warn(
                f"the adapter of {name} is added to its {kind} values, and rounding loses {float(lost):.0%} of it; a "
                "model loaded with dtype float32 keeps all",
                stacklevel=3,
            )
        _replace_values(model, {name: exact})


def adapter_config(model: GPTModel, base_model: str) -> dict[str, Any]:
    """Return adapter_config.json but for targets and numbers. Raises ValueError for a model without adapters."""
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
        "lora_dropout": getattr(adapter.dropout, "p", 0.0),
        "use_dora": adapter.use_dora,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }


def write_adapter(folder: Path, tensors: Mapping[str, Tensor], config: dict[str, Any]) -> None:
    """Write a folder with tensors by name, in place of what is there."""
    with new_folder(folder, overwrite=True) as part:
        write_tensors(part / WEIGHTS, {f"{PREFIX}{name}": t for name, t in tensors.items()}, {"format": "pt"})
        (part / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
