"""What was found of a model type, as JSON and as Markdown."""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from te_models.checkpoints.families.base.family import Family
from te_models.checkpoints.families.base.fields import Fixed, Only

from ..sizes import plural
from .fields import SAME, is_of_training
from .moves import Move


@dataclass
class AdoptReport:
    """What adopt found.

    Arguments:
        verdict: "declared": a family with transformers' logits; "refused": none.
        near: the nearest families, and the part of the tensors that they explain as they are.
        begun_with: the family whose entries the declaration begins with.
        meanings: field -> what it means to the model.
        inert: fields that change neither tensors nor logits.
        of_training: inert fields whose names say that they are of training.
        lacking: field, or "", -> what cannot be expressed: other values of it are refused.
        unmoved: fields that have one value only to transformers, and its reason.
        proofs: models that were compared, and the difference of their logits.
        missing: family -> why no declaration can begin with it: parts that no tensor is, tensors that no part
            is, or a model with other logits.
    """

    model_type: str
    architecture: str
    transformers: str
    verdict: str = "refused"
    near: list[tuple[str, float]] = field(default_factory=list)
    begun_with: str | None = None
    meanings: dict[str, str] = field(default_factory=dict)
    inert: list[str] = field(default_factory=list)
    of_training: list[str] = field(default_factory=list)
    lacking: dict[str, str] = field(default_factory=dict)
    unmoved: dict[str, str] = field(default_factory=dict)
    proofs: list[tuple[str, str, str]] = field(default_factory=list)
    missing: dict[str, list[str]] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return asdict(self)

    @property
    def exit_code(self) -> int:
        """0 for a declaration, 3 for a report alone."""
        return 0 if self.verdict == "declared" else 3


def meanings_of(family: Family, defaults: Mapping[str, Any]) -> dict[str, str]:
    """Return what each field of the class means: the paths of ModelConfig that its entry sets."""
    found: dict[str, str] = {}
    for entry in family.fields:
        if isinstance(entry, Fixed):
            continue
        for name in entry.names:
            if name not in defaults:
                continue
            if isinstance(entry, Only):
                found[name] = f"only {entry.value!r}"
                continue
            try:
                paths = ", ".join(sorted(entry.read(dict(defaults))))
            except Exception:  # the class's own defaults may be no model
                paths = ""
            found[name] = paths or type(entry).__name__
    return found


def sort_moves(report: AdoptReport, found: list[Move]) -> None:
    """Fill in which fields are inert, and which transformers does not let move."""
    by_name: dict[str, list[Move]] = {}
    for move in found:
        for name in move.values or {move.name: None}:
            by_name.setdefault(name, []).append(move)
    for name, its in by_name.items():
        built = [move for move in its if move.built is not None]
        if not built:
            report.unmoved[name] = its[0].refused
        elif all(move.inert for move in built):
            (report.of_training if is_of_training(name) else report.inert).append(name)


def markdown(report: AdoptReport) -> str:
    """Return the report for people."""
    return "\n".join(_lines(report)) + "\n"


def _lines(r: AdoptReport) -> Iterator[str]:
    yield f"# {r.model_type}"
    yield ""
    same = sum(got == SAME for _, got, _ in r.proofs)
    if r.verdict == "declared":
        yield (
            f"te_models expresses `{r.model_type}` (`{r.architecture}` of transformers {r.transformers}). The "
            f"declaration begins with the family `{r.begun_with}`; {plural(same, 'model')} of random weights "
            "have transformers' logits within 1e-5 of the largest."
        )
    else:
        yield (
            f"te_models has no declaration of `{r.model_type}` (`{r.architecture}` of transformers {r.transformers}): "
            f"{r.lacking.get('', 'no model that was tried has its tensors and logits')}."
        )
    yield from ("", "## Nearest families", "", "| family | tensors explained as it is |", "|---|---|")
    for name, part in r.near:
        yield f"| {name} | {part:.0%} |"
    if r.missing:
        yield from ("", "## What did not fit", "")
        for name, names in r.missing.items():
            yield f"- beginning with `{name}`: {', '.join(names)}"
    if r.meanings:
        yield from ("", "## Fields", "", "| field | meaning |", "|---|---|")
        for name, meaning in r.meanings.items():
            yield f"| `{name}` | {meaning} |"
    others = {name: why for name, why in r.lacking.items() if name}
    if others:
        yield from ("", "## What cannot be expressed", "", "Other values of these fields are refused by name.", "")
        for name, why in others.items():
            yield f"- `{name}`: {why}"
    for title, names in (("Proven inert", r.inert), ("Of training alone", r.of_training)):
        if names:
            yield from ("", f"## {title}", "", ", ".join(f"`{n}`" for n in names) + ".")
    if r.unmoved:
        yield from ("", "## Not moved, because transformers refuses it", "")
        for name, why in r.unmoved.items():
            yield f"- `{name}`: {why}"
    if r.proofs:
        yield from ("", "## Proofs", "", "| model | outcome | largest difference, or the reason |", "|---|---|---|")
        for label, got, why in r.proofs:
            yield f"| {label} | {got} | {why} |"
