"""Options that are taken at their defaults alone, so that nobody's option is passed over in silence."""

from __future__ import annotations

from te_models.suggestions import shown


def require_default(name: str, value: object, default: object) -> None:
    """Raise ValueError unless the value is the default, or says "no" as the default does."""
    says_no = default in (None, False) and value in (None, False) if isinstance(value, bool | None) else False
    if not says_no and not (type(value) is type(default) and value == default):
        raise ValueError(f"{name} is {shown(value)}, which this library does not have; allowed: {shown(default)}")
