"""The table of docs/models.md: the catalogue's models, a line each."""

from __future__ import annotations


def table() -> str:
    """The catalogue as a Markdown table."""
    from te_models.catalogue import entry, names

    rows = ["| name | hub id | family | parameters | context |", "|---|---|---|---|---|"]
    for found in map(entry, names()):
        published = found.parameters if isinstance(found.parameters, str) else f"{found.parameters:,}"
        active = f", {found.active_parameters} active" if found.active_parameters is not None else ""
        context = "" if found.context is None else f"{found.context:,}"
        rows.append(
            f"| `{found.name}` | {found.hub_id} | `{found.hf['model_type']}` | {published}{active} | {context} |"
        )
    return "\n".join(rows)
