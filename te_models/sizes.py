"""Numbers as messages show them: sizes in binary units, and counts of things."""


def format_size(nbytes: float) -> str:
    """Return a size in words, in powers of 1024: "512 bytes", "1.5 KiB", "24.0 MiB", "1,204.7 GiB"."""
    if nbytes < 1024:
        return f"{nbytes:.0f} byte{'' if round(nbytes) == 1 else 's'}"
    for unit in ("KiB", "MiB"):
        nbytes /= 1024
        if nbytes < 1023.95:  # else it would be shown as 1024.0
            return f"{nbytes:.1f} {unit}"
    return f"{nbytes / 1024:,.1f} GiB"


def plural(count: int, what: str) -> str:
    """Return a number of things in words: "1 step", "2 steps", "3 copies", "1,204 boxes"."""
    if count != 1:
        ending = what[-1:] == "y" and what[-2:-1] not in "aeiou"
        what = f"{what[:-1]}ies" if ending else f"{what}es" if what.endswith(("s", "x", "ch", "sh")) else f"{what}s"
    return f"{count:,} {what}"
