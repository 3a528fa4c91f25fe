"""Reading `quantization_config`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..families.base.fields import shorten_value
from ..io.errors import CheckpointError


def one_of(config: Mapping[str, Any], name: str, allowed: tuple[Any, ...], default: Any) -> Any:
    """Return a field that must have one of these values; `default` where it is absent or null."""
    value = config.get(name)
    value = default if value is None else value
    if not any(value == choice and type(value) is type(choice) for choice in allowed):
        raise CheckpointError(
            f"the quantization configuration has {name} = {shorten_value(value)}; supported: "
            f"{', '.join(map(str, allowed))}"
        )
    return value


def section(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return an object inside a configuration."""
    value = config.get(name)
    if not isinstance(value, dict):
        raise CheckpointError(f"the quantization configuration has no {name!r} object")
    return value
