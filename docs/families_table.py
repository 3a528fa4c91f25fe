"""The table of docs/families.md: what families say of themselves, of a small model of the defaults."""

from __future__ import annotations

from typing import Any

SAMPLE: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 64,
    "n_embd": 64,
    "n_layer": 12,
    "n_head": 4,
    "n_positions": 64,
    "intermediate_size": 64,
    "intermediate_size_mlp": 64,
    "num_hidden_layers": 12,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "num_experts_per_tok": 2,
}
"""What config.json has at least, in the words of every family."""


LARGER = dict.fromkeys(("hidden_size", "n_embd", "intermediate_size", "intermediate_size_mlp"), 512)
LARGER |= {"moe_intermediate_size": 512, "num_hidden_layers": 4, "n_layer": 4}
"""Sizes in whole blocks of 128."""


def config_of(family: Any, sizes: dict[str, Any] | None = None) -> Any:
    """Return the configuration of a small model of a family. sizes: other ones than SAMPLE's."""
    from te_models.checkpoints import CheckpointError
    from te_models.checkpoints.families.base.text_part import text_part

    if (part := text_part(family)) is not None:
        return config_of(part.families[0], sizes)
    reasons = []
    more: list[dict[str, Any]] = [{}, {"num_experts": 8}, {"n_routed_experts": 8}, {"num_heads": 8, "head_dim": 16}]
    more += [{"num_kv_shared_layers": 2}, {"num_attention_heads": 8, "num_key_value_heads": 1}]
    more += [{"layers_block_type": ["mamba"] * 6 + ["hybrid"] * 6}, {"attention_types": [[["global", "local"], 6]]}]
    more += [{"rotary_dim": 16}, {"num_heads": 8, "head_dim": 128}]
    more = more if sizes is None else [{**sizes, **f} for f in more] + [{**sizes, "n_layer": 12, **f} for f in more]
    more = more if sizes is None else more + [{**f, "num_hidden_layers": 12} for f in more]
    for values in ({**SAMPLE, **fields} for fields in more):
        try:
            return family.read_config(values)
        except CheckpointError as error:
            reasons.append(str(error))
    raise ValueError(f"{family.model_type}: {reasons}")


def refused(family: Any) -> list[str]:
    """Return the fields of config.json of which a family supports one value alone."""
    from te_models.checkpoints.families.base.fields import Only
    from te_models.checkpoints.families.base.nested import Within

    entries = [e for entry in family.fields for e in (entry.entries if isinstance(entry, Within) else (entry,))]
    return [f"`{entry.hf}` but {entry.value!r}" for entry in entries if isinstance(entry, Only)]


def quantized_formats(family: Any) -> str:
    """Return which of the formats that an export writes take over a family's numbers exactly, in one of its forms,
    where no size cuts a block."""
    from te_models.checkpoints.formats.declaration import WRITABLE

    config = config_of(family, LARGER)
    if _takes(family, config, WRITABLE["fp8"]):  # whose blocks are the largest
        return f"all {len(WRITABLE)}"
    found = [label for label, formats in WRITABLE.items() if _takes(family, config, formats)]
    lacking = [label for label in WRITABLE if label not in found]
    return f"all but {', '.join(lacking)}" if len(found) > len(lacking) else ", ".join(found)


def _takes(family: Any, config: Any, formats: tuple[Any, ...]) -> bool:
    import torch

    from te_models.checkpoints.formats.namespace import field_namespace, upright
    from te_models.checkpoints.mapping.param_shapes import is_linear_weight

    for form in family.forms:
        plain = family.namespace(config, form)
        links = [link for link in plain.links if is_linear_weight(link.name)]
        weights = {link.stored for link in links}
        namespace = upright(plain, weights)
        for its in formats if all(len(namespace.stored[name].shape) > 1 for name in weights) else ():
            quantizers = {link.name: its.quantizer for link in links}
            of = dict.fromkeys(weights, its)
            if not field_namespace(namespace, of, quantizers, torch.bfloat16, lambda a, b: True).inexact:
                return True
    return False


def exact(family: Any) -> str:
    """Return what comes back exactly: the tensors of every form, and what files hold beside the model, by name."""
    from te_models.checkpoints.families.base.text_part import OTHER_PARTS
    from te_models.checkpoints.families.base.unused import CONSTANTS

    unused = family.unused
    names = [name.removeprefix("model.") for name in (*unused.patterns, *unused.beside)]
    others = dict.fromkeys(name for name in names if name not in (*OTHER_PARTS, *CONSTANTS.patterns))
    beside = ["parts that see images"] if OTHER_PARTS[0] in names else []
    beside += [f"`{name}`" for name in others]
    beside += ["layers that predict further tokens"] if unused.layers_behind else []
    beside += ["shared keys and values"] if unused.shared_keys else []
    return f"{', '.join(family.forms)}; beside: {', '.join(beside)}" if beside else ", ".join(family.forms)


def examples_of_families() -> dict[str, str]:
    """Return the hub id of the first model of each family in the catalogue, with the format of its files where they are
    quantized."""
    from te_models.catalogue.entries import entry, names

    found: dict[str, str] = {}
    for its in map(entry, names()):
        found.setdefault(its.hf["model_type"], f"{its.hub_id} ({its.format})" if its.format else its.hub_id)
    return found


def table() -> str:
    """The families as a Markdown table, those of fields that they refuse, and what is missing."""
    from te_models.checkpoints import FAMILIES
    from te_models.checkpoints.families.missing import MISSING
    from te_models.config import mixer_words

    rows = ["| model type | mixers | MLPs | the command that imports one |", "|---|---|---|---|"]
    examples = examples_of_families()
    for name, family in sorted(FAMILIES.items()):
        config = config_of(family)
        mixers = ", ".join(mixer_words(config))
        dense, moe = config.has_dense_layers, config.moe is not None and config.moe.layers
        mlps = "dense and experts" if dense and moe else "experts" if moe else "dense"
        hub_id, _, quantized = examples.get(name, "").partition(" ")
        command = f"`te-models import {hub_id} ./ours`" if hub_id else ""
        rows.append(f"| `{name}` | {mixers} | {mlps} | {command}{f' {quantized}' if quantized else ''} |")
    rows += ["", "| model type | exact | quantized formats | refused |", "|---|---|---|---|"]
    for name, family in sorted(FAMILIES.items()):
        fields = refused(family)
        first, *others = [", ".join(fields[i : i + 3]) for i in range(0, len(fields), 3)] or [""]
        row = f"| `{name}` | {exact(family)} | {quantized_formats(family)} |"
        if len(row) + len(first) > 160:  # short lines
            first, others = "", [first, *others]
        rows.append(f"{row} {first} |")
        rows += [f"| `{name}` | | | {other} |" for other in others]
    rows += ["", "| model types that are not supported | what their layers need |", "|---|---|"]
    rows += [
        f"| {', '.join(f'`{kind}`' for kind in kinds.split())} | {element} |" for element, kinds in MISSING.items()
    ]
    return "\n".join(rows)
