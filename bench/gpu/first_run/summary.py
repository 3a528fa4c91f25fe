"""What the first run found, in words: first what is wrong with which input, then what was not asked."""

from __future__ import annotations

from typing import Any

_MOST = 40
"""Wrong cases of a part that are shown; the JSON has all."""


def is_wrong(part: dict[str, Any]) -> bool:
    """Whether a part found something wrong, or could not ask."""
    return bool(part.get("wrong") or part.get("failed"))


def in_words(parts: list[dict[str, Any]]) -> str:
    """Return the summary."""
    wrong = [part for part in parts if is_wrong(part)]
    lines = [line for part in wrong for line in _what_is_wrong(part)]
    lines += [line for part in parts for line in _what_was_found(part)]
    count = sum(part.get("wrong", 0) + len(part.get("failed", ())) for part in parts)
    head = "nothing is wrong" if not count else f"{count} wrong, in {', '.join(part['part'] for part in wrong)}"
    asked = sum(part.get("ran", 0) for part in parts)
    return "\n".join([f"{head}; {asked} cases ran", *lines])


def _what_is_wrong(part: dict[str, Any]) -> list[str]:
    lines = [f"WRONG {part['part']}: {why}" for why in part.get("failed", ())]
    found = [case for case in part.get("cases", ()) if "wrong" in case]
    lines += [f"WRONG {part['part']}: {case['case']}: {case['wrong']}" for case in found[:_MOST]]
    if len(found) > _MOST:
        lines.append(f"WRONG {part['part']}: {len(found) - _MOST} more cases, in {part['part']}.json")
    return lines


def _what_was_found(part: dict[str, Any]) -> list[str]:
    if "skipped" in part:
        return [f"not run: {part['part']} ({part['question']}): {part['skipped']}"]
    name, seconds = part["part"], f"{part['seconds']:.0f} of {part['limit_s']:.0f} s"
    lines = [f"{name}: {part['ran']} cases in {seconds}: {part['question']}"]
    if "cut_off" in part:
        running = ", ".join(part["cut_off"]) or "between two cases"
        lines.append(f"not all run: {name}: its time was up; running: {running}")
    for case in part.get("cases", ()):
        found = case.get("found", {})
        missing = found.get("missing", {}).items()
        lines += [f"not run: {name}: {case['case']}: {side}: {why}" for side, why in missing]
        if "says" in found:
            lines.append(f"  {case['case']}: {found['says']}")
    return lines
