"""A certificate as a Markdown card that can be checked again: the digest in it names what was read."""

import re
from pathlib import Path

from te_models.checkpoints import CheckpointError
from te_models.checkpoints.io.atomic import replace_text

from ..sizes import format_size, plural
from .certificate import Certificate, certify
from .estimates import KEYS

_LINE = re.compile(r"^- (source|revision|digest|verdict): `([^`\n]*)`$", re.MULTILINE)


def write_card(certificate: Certificate, path: Path) -> None:
    """Write the card, atomically."""
    replace_text(path, card(certificate))


def check_card(path: Path, *, scales: bool = False) -> tuple[Certificate, list[str]]:
    """Certify again what a card is of; return the new certificate and what differs, one sentence each."""
    said = dict(_LINE.findall(path.read_text(encoding="utf-8")))
    missing = {"source", "digest", "verdict"} - said.keys()
    if missing:
        raise CheckpointError(f"{path} is not a certificate: it has no line '- {min(missing)}: `...`'")
    where = said["source"] + (f"@{said['revision']}" if said.get("revision") else "")
    found = certify(where, scales=scales, seconds=False)
    differs = [] if found.digest == said["digest"] else [f"the digest is {found.digest}, and was {said['digest']}"]
    if found.verdict != said["verdict"]:
        differs.append(f"the verdict is {found.verdict!r}, and was {said['verdict']!r}")
    return found, differs


def card(found: Certificate) -> str:
    """Return the certificate as Markdown."""
    lines = [f"# Conversion certificate: {found.source}", "", *text(found), "", "## What identifies it", ""]
    about = {"source": found.source, "revision": found.revision, "digest": found.digest, "verdict": found.verdict}
    lines += [f"- {name}: `{value}`" for name, value in about.items() if value]
    if found.classes:
        lines += ["", "## Numbers", "", "| tensors | count | source | target | numbers |", "|---|---|---|---|---|"]
        for row in found.classes:
            lines.append(f"| {row['tensors']} | {row['count']} | {row['source']} | {row['target']} | {row['kind']} |")
    if found.inexact:
        lines += ["", "## Parameters that cannot be taken over exactly", ""]
        lines += [f"- `{name}`: {why}" for name, why in found.inexact.items()]
    if found.memory:
        lines += ["", "## Memory, without activations", "", "| use | bytes |", "|---|---|"]
        lines += [f"| {use} | {format_size(nbytes)} |" for use, nbytes in found.memory.items()]
        lines.append(f"| decoding state of {KEYS:,} positions | {format_size(found.cache_bytes)} |")
    if found.notes:
        lines += ["", "## Notes", "", *(f"- {note}" for note in found.notes)]
    return "\n".join(lines) + "\n"


def text(found: Certificate) -> list[str]:
    """Return the lines that a terminal shows first."""
    lines = [f"{found.source}{'@' + found.revision if found.revision else ''}: {found.verdict}"]
    if found.reason:
        lines.append(f"reason: {found.reason}")
    if found.option:
        lines.append(f"with loss by: te-models import {found.source} OUT {found.option}")
    held = f"{plural(found.tensors, 'tensor')} in {plural(found.files, 'file')}, {format_size(found.stored_bytes)}"
    lines.append(f"holds: {held}{', ' + found.format if found.format else ''}")
    if found.parameters:
        lines.append(
            f"model: family {found.family}, {found.parameters:,} parameters ({found.active_parameters:,} active)"
        )
        seconds = f"about {max(found.import_seconds, 0.1):,.1f} s at the speed of this machine's disk"
        lines.append(f"import: {format_size(found.import_bytes)}, {seconds}")
    return lines
