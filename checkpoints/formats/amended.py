"""A declaration of which fewer modules are true: some weights of a calibrated folder are values now.

All that it says of the other modules stays, for their scales of activations are in the files as before.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

from .format import Declaration
from .separate import IN_CONFIG, TEXT

_LISTS = ("ignore", "exclude_modules", "modules_to_not_convert", "ignored_layers")
"""Fields that name modules which are not quantized, by kinds of declarations."""
_OF_METHOD = {"compressed-tensors": "ignore", "modelopt": "ignore"}


def with_unquantized(
    original: Declaration, unquantized: Sequence[str]
) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
    """Return (the fields of config.json, hf_quant_config.json) that name these modules as not quantized."""
    said, separate = copy.deepcopy(original.config), copy.deepcopy(original.separate)
    found = None if said is None else dict(said)
    if found is not None:
        config = found.get(TEXT, found)[IN_CONFIG]
        nested = config.get("quantization")
        _amend(nested if isinstance(nested, dict) else config, unquantized)
    beside = None if separate is None else dict(separate)
    if beside is not None:
        _amend(beside["quantization"], unquantized)
    return found, beside


def _amend(declared: dict[str, Any], unquantized: Sequence[str]) -> None:
    name = next((name for name in _LISTS if name in declared), None)
    method = declared.get("quant_method")
    name = name or ("exclude_modules" if method is None else _OF_METHOD.get(method, "modules_to_not_convert"))
    known = list(declared.get(name) or ())
    declared[name] = [*known, *(module for module in unquantized if module not in known)]
    layers = declared.get("quantized_layers")
    if isinstance(layers, dict):
        declared["quantized_layers"] = {module: its for module, its in layers.items() if module not in unquantized}
    groups = declared.get("config_groups")
    for group in groups.values() if isinstance(groups, dict) and isinstance(layers, dict) else ():
        if isinstance(group.get("targets"), list):
            group["targets"] = [target for target in group["targets"] if target not in unquantized]
