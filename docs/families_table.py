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


def config_of(family: Any) -> Any:
    """Return the configuration of a small model of a family."""
    from te_models.checkpoints import CheckpointError
    from te_models.checkpoints.families.base.text_part import text_part

    if (part := text_part(family)) is not None:
        return config_of(part.families[0])
    reasons = []
    more: list[dict[str, Any]] = [{}, {"num_experts": 8}, {"n_routed_experts": 8}, {"num_heads": 8, "head_dim": 16}]
    more += [{"num_kv_shared_layers": 2}, {"num_attention_heads": 8, "num_key_value_heads": 1}]
    more += [{"layers_block_type": ["mamba"] * 6 + ["hybrid"] * 6}, {"attention_types": [[["global", "local"], 6]]}]
    more.append({"rotary_dim": 16})
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

    rows = ["| model type | mixers | MLPs | forms of files | ORG/NAME |", "|---|---|---|---|---|"]
    examples = examples_of_families()
    for name, family in sorted(FAMILIES.items()):
        config = config_of(family)
        mixers = ", ".join(mixer_words(config))
        dense, moe = config.has_dense_layers, config.moe is not None and config.moe.layers
        mlps = "dense and experts" if dense and moe else "experts" if moe else "dense"
        forms = ", ".join(family.forms)
        rows.append(f"| `{name}` | {mixers} | {mlps} | {forms} | {examples.get(name, '')} |")
    rows += ["", "| model type | refused |", "|---|---|"]
    all_refused = {name: refused(family) for name, family in sorted(FAMILIES.items())}
    for name, fields in all_refused.items():
        rows += [f"| `{name}` | {', '.join(fields[i : i + 6])} |" for i in range(0, len(fields), 6)]  # short lines
    rows += ["", "| model types that are not supported | what their layers need |", "|---|---|"]
    rows += [
        f"| {', '.join(f'`{kind}`' for kind in kinds.split())} | {element} |" for element, kinds in MISSING.items()
    ]
    return "\n".join(rows)
