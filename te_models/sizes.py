"""Sizes in bytes as messages show them: in binary units."""

from __future__ import annotations


def format_size(nbytes: float) -> str:
    """Return a size in words, in powers of 1024: "512 bytes", "1.5 KiB", "24.0 MiB", "1,204.7 GiB"."""
    if nbytes < 1024:
        return f"{nbytes:.0f} bytes"
    for unit in ("KiB", "MiB"):
        nbytes /= 1024
        if nbytes < 1023.95:  # else it would be shown as 1024.0
            return f"{nbytes:.1f} {unit}"
    return f"{nbytes / 1024:,.1f} GiB"
