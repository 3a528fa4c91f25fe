"""Adapters for transformers' model of a family, as peft reads them."""

from collections.abc import Iterable
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from te_models.checkpoints import AutoConverter
from te_models.checkpoints.families import Family
from te_models.checkpoints.families.base.text_part import text_family
from te_models.checkpoints.folder.hf_config import choose_family
from te_models.checkpoints.folder.tied_weights import shared_copies
from te_models.checkpoints.mapping.tensor_map import Namespace, compose, identity_namespace
from te_models.layers import QuantizedTensor

from ..config import ModelConfig
from ..extras import require
from ..model import GPTModel
from ..model.pretrained.in_memory import check_class, transformers_config
from .adapter import Adapter, magnitude_name
from .factors import (
    Factors,
    WeightRows,
    filled_columns,
    filled_tensors,
    is_transposed,
    links_by_stored,
    moved_adapter,
    rows_of_link,
)
from .files import adapter_config, write_adapter
from .layers import FIRST
from .model import adapters_of, base_state_dict
from .peft_folders import rank_fields

_EXPERT_PROJECTIONS = ("gate_proj", "up_proj", "down_proj", "w1", "w2", "w3")
"""Names that experts had in earlier releases of transformers: peft 0.21 takes these targets for fused experts."""

_WITHOUT_ADAPTERS = {
    **dict.fromkeys(("falcon_h1", "falcon_mamba", "mamba", "mamba2", "nemotron_h"), "*.out_proj"),
    "laguna": "*.shared_expert*.*",
    "dbrx": "*.experts.mlp",
}
"""Modules of a model type that peft 0.21 adapts in no form that we write: the first ones' fast kernels read the weight
past an adapter, so that peft refuses them; laguna's it does not find again; dbrx's hold all experts as one matrix."""


@torch.no_grad()
def export_adapter(model: GPTModel, folder: str | Path, *, base_model: str = "", family: str | None = None) -> None:
    """Write the adapters of a model for transformers' model of its family, as `peft.PeftModel` reads them.

    A weight of ours that is several there, such as q, k and v, shares A, and its rows of B are divided as the rows of
    the weight are; experts that are one parameter there become `target_parameters`. What `load_adapter` read of peft
    comes back as it was: each module has its own rank.

    base_model: the Hugging Face folder or hub id of that model, for the file. family: None means the one that the model
    came from, or the first that can express it. Needs the extra `hf`. Raises ValueError for a model without adapters,
    for one of which this rank has a part, and for adapters that peft cannot put over that model: DoRA of experts that
    are one parameter there, and `out_proj` of Mamba's layers in the families whose kernels read its weight.
    """
    transformers: Any = require("transformers", "hf", feature="export_adapter")
    config = adapter_config(model, base_model)
    chosen = text_family(choose_family(model.config, model.origin, family), model.config)
    check_class(model, chosen.model_type)
    check_over_peft((name for name, _ in adapters_of(model)), model.config, chosen)
    values = AutoConverter(model.config, chosen, model.origin).hf_config(dict(model.stored_tensors()))
    with torch.device("meta"):
        theirs = transformers.AutoModelForCausalLM.from_config(transformers_config(values))
    _, namespace = chosen.best_form(model.config, theirs.state_dict())
    modules = dict(theirs.named_modules())
    sources = {f"{name}.weight": _factors_of(adapter) for name, adapter in adapters_of(model)}
    shared = filled_columns(sources)
    found: dict[str, Factors] = {}
    for stored, links in links_by_stored(namespace).items():
        own = [link for link in links if link.name in sources]
        if own and stored.rpartition(".")[0] in modules:  # transformers' model may leave out a layer
            moves: list[WeightRows] = [rows_of_link(link, namespace, to_stored=True) for link in own]
            shape = namespace.stored[stored].shape
            if is_transposed(own[0]):
                shape = (*shape[:-2], shape[-1], shape[-2])
            factors = moved_adapter(moves, sources, shape, shared)
            if factors is not None:
                said = bool(getattr(modules[stored.rpartition(".")[0]], "is_transposed", False))
                other = len(shape) == 3 and is_transposed(own[0]) != said  # peft reads stacks as the module says
                found[stored] = factors.transposed() if other else factors
                config["fan_in_fan_out"] |= is_transposed(own[0]) and len(shape) == 2
    copies = shared_copies(model.config, chosen)
    found |= {copy: found[original] for copy, original in copies.items() if original in found}
    fused = any(p.dim() == 3 for name, p in theirs.named_parameters() if ".experts." in name)
    tensors, targets = _of_peft(found, modules, config, fused=fused)
    if model.replaced_parameters:
        whole = _replaced(model, namespace, [*targets["target_modules"]])
        whole |= {copy: whole[original].clone() for copy, original in copies.items() if original in whole}
        tensors |= whole
        targets["modules_to_save"] = sorted({name.rpartition(".")[0] for name in whole})
    write_adapter(Path(folder), tensors, config | {key: value for key, value in targets.items() if value})


def check_over_peft(layers: Iterable[str], config: ModelConfig, family: Family) -> None:
    """Raise ValueError for layers with adapters over which peft puts none in transformers' model of the family.
    layers: names in the whole model."""
    without = _WITHOUT_ADAPTERS.get(family.model_type)
    if without is None:
        return
    adapted = {f"{name}.weight" for name in layers}
    for link in family.namespace(config).links:
        module = link.stored.rpartition(".")[0]
        if link.name in adapted and fnmatchcase(module, without):
            own = link.name.rpartition(".")[0]
            raise ValueError(
                f"{own} is {module} in transformers' model, and peft has no adapters of {without} in models of the "
                f"type {family.model_type!r}; allowed: targets without *.{own.split('.', 3)[-1]}, or the merged model"
            )


def _factors_of(adapter: Adapter) -> Factors:
    a, b = (getattr(adapter, name).weight.detach() for name in FIRST)
    lengths = getattr(adapter, magnitude_name(FIRST)).detach() if adapter.use_dora else None
    return Factors(a, b, adapter.scaling, lengths)


def _of_peft(
    found: dict[str, Factors], modules: dict[str, Any], config: dict[str, Any], *, fused: bool
) -> tuple[dict[str, Tensor], dict[str, list[str]]]:
    """Return the tensors of a folder and its targets; complete the configuration's numbers. fused: whether experts are
    one parameter; then peft takes a module by the name of a part of them for that part, and adapts its weight as a
    parameter. So are those adapted that multiply in groups."""

    def is_module(name: str) -> bool:
        module = modules[name]
        if isinstance(module, nn.Linear):
            grouped = hasattr(module, "n_groups")
            return not grouped and not (fused and name.rpartition(".")[2] in _EXPERT_PROJECTIONS)
        return isinstance(module, nn.Embedding) or type(module).__name__ == "Conv1D"

    tensors: dict[str, Tensor] = {}
    targets: dict[str, list[str]] = {"target_modules": [], "target_parameters": []}
    for stored, its in found.items():
        module, _, parameter = stored.rpartition(".")
        if is_module(module):
            targets["target_modules"].append(module)
            parts = {"lora_A.weight": its.a, "lora_B.weight": its.b}
            if isinstance(modules[module], nn.Embedding):
                parts = {"lora_embedding_A": its.b.T, "lora_embedding_B": its.a.T}
            if its.lengths is not None:
                if bool(its.lengths.isnan().any()):
                    raise ValueError(f"{stored} has rows without adapter; allowed with DoRA: adapters of all its rows")
                parts["lora_magnitude_vector"] = its.lengths
        else:
            if its.lengths is not None:
                kind = (
                    "one parameter of all experts" if its.a.dim() == 3 else "what peft takes for a part of the experts"
                )
                raise ValueError(
                    f"{stored} is {kind}, for which peft has no DoRA; allowed: targets without experts and MLPs beside "
                    "them, or LoRA"
                )
            targets["target_parameters"].append(stored)
            config["lora_dropout"] = 0.0  # peft drops nothing of the input of a parameter
            # peft wraps the targets of a module in the order of its parameters, the first one innermost
            wrapped = [n for n, _ in modules[module].named_parameters(recurse=False) if f"{module}.{n}" in found]
            inner = "base_layer." * (len(wrapped) - 1 - wrapped.index(parameter))
            a, b = (its.a.flatten(0, 1), its.b.permute(1, 2, 0).flatten(1, 2)) if its.a.dim() == 3 else (its.a, its.b)
            parts = {f"{inner}lora_A.weight": a, f"{inner}lora_B.weight": b}
        tensors |= {f"{module}.{name}": tensor.contiguous() for name, tensor in parts.items()}
    ranks = {}
    for stored, its in found.items():
        module = stored.rpartition(".")[0]
        ranks[module if is_module(module) else stored] = its.rank, its.alpha
    config |= rank_fields(ranks)
    return tensors, targets


def _replaced(model: GPTModel, namespace: Namespace, adapted: list[str]) -> dict[str, Tensor]:
    """Return all tensors of the modules that hold parameters with other values. Raises ValueError for one that has
    an adapter, too, and one with a part of a layer that stores quantized weights."""
    base, links = base_state_dict(model), links_by_stored(namespace)
    saved = {
        stored.rpartition(".")[0]
        for stored, own in links.items()
        if any(link.name in model.replaced_parameters for link in own)
    }
    both = sorted(saved & set(adapted))
    if both:
        raise ValueError(f"{both[0]} has an adapter and other weights, and peft has one of the two; merge_lora first")
    whole = {stored: own for stored, own in links.items() if stored.rpartition(".")[0] in saved}
    values = {link.name: base[link.name] for own in whole.values() for link in own}
    plain = {name: v.dequantize() if isinstance(v, QuantizedTensor) else v for name, v in values.items()}
    pieces = compose(identity_namespace(namespace.canonical), namespace)
    shapes = {stored: namespace.stored[stored].shape for stored in whole}
    return filled_tensors(plain, {stored: pieces[stored] for stored in whole}, shapes)
