"""From a model type that only transformers knows to a family: the whole chain."""

import json
import os
import random
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from te_models.checkpoints import FAMILIES
from te_models.checkpoints.families.base.family import Family
from te_models.checkpoints.families.base.names import Fused, Names
from te_models.checkpoints.families.base.text_part import TIED
from te_models.checkpoints.io.atomic import new_folder
from te_models.checkpoints.io.hub import local_folder
from te_models.checkpoints.io.strict_json import read_object

from ..extras import require
from .declare import family_source, test_source
from .fields import SAME, WRONG, FamilyDraft, declare, outcome, reads_alike, with_required, without_fields
from .moves import LAYERS, Move, changed_model, moves
from .naming import solve, unexplained
from .near import Near, nearest
from .pool import Pool, pool_of
from .probe import AdoptError, Built, KnownType, Values
from .report import AdoptReport, markdown, meanings_of, sort_moves
from .solve import TOLERANCE, SolverState, search, structure
from .wrapped import WrappedType, known_texts, known_type, wrapped_family


@dataclass
class Adopted:
    """What was found, and the family; None where no declaration has transformers' logits. sizes: what the small models
    are made with; cases: the fields that are moved, by what is said of them."""

    report: AdoptReport
    family: Family | None = None
    sizes: Values = field(default_factory=dict)
    cases: dict[str, Values] = field(default_factory=dict)


def model_type_of(source: str | os.PathLike[str]) -> tuple[str, Values]:
    """Return the model type that `source` means, with the fields of its config.json: a folder, a hub id of which
    config.json alone is read, or a model type of transformers."""
    name = os.fspath(source)
    folder = Path(name)
    if not folder.exists() and "/" not in name and not name.endswith((".json", ".")):
        return name, {}
    if not folder.is_dir():
        folder = local_folder(name, allow_patterns=["config.json"])
    if not (folder / "config.json").is_file():
        raise AdoptError(f"{name} has no config.json; allowed: a folder with one, a hub id, or a model type")
    values = read_object(folder / "config.json")
    model_type = values.get("model_type")
    if not isinstance(model_type, str):
        raise AdoptError(f"config.json of {name} has model_type = {model_type!r}, which is no word")
    return model_type, values


def adopt(source: str | os.PathLike[str], *, hidden: Collection[str] = ()) -> Adopted:
    """Return a family for a model type that transformers knows and te_models does not.

    Arguments:
        source: a folder with a config.json, a hub id, or a model type.
        hidden: families that count as unknown; the type itself always does.

    Raises AdoptError where transformers does not know the type, or makes no small model of it.
    """
    model_type, values = model_type_of(source)
    known = known_type(model_type)
    wrapped = known if isinstance(known, WrappedType) else None
    pool = pool_of({model_type, *hidden})
    values = values.get("text_config", values) if wrapped else values
    arguments, base = known.working({k: v for k, v in values.items() if k in known.defaults})
    report = AdoptReport(model_type, known.architecture, require("transformers", "hf", feature="adopt").__version__)
    found = moves(known, arguments, base)
    sort_moves(report, found)
    for name, declared in _declarations(known, pool, base, found, report):
        if "" in declared.lacking:
            report.missing[name] = [declared.lacking[""]]
            continue
        family = with_required(_with_forms(declared.family, base, pool), known, arguments, found)
        report.proofs, culprit = proofs(family, declared, known, arguments, base, found)
        moved_alike = {m.label[:80]: m for m in found if m.name != "sizes" and _is_same(family, m)}
        if not culprit and wrapped:
            built = [m.built for m in moved_alike.values() if m.built is not None]
            whole, culprit = wrapped_family(family, wrapped, arguments, base, built)
            family = whole or family
        if culprit:
            report.missing[name] = [culprit]
            continue
        report.lacking = dict(declared.lacking)
        report.verdict, report.begun_with = "declared", name
        report.meanings = meanings_of(family, known.defaults)
        return Adopted(report, family, arguments, {"as it is": {}, **{k: m.values for k, m in moved_alike.items()}})
    report.lacking.setdefault("", "no element and no names that were tried give its tensors and logits")
    return Adopted(report)


def _declarations(
    known: KnownType, pool: Pool, base: Built, found: list[Move], report: AdoptReport
) -> Iterator[tuple[str, FamilyDraft]]:
    """Yield what may be a declaration, the nearest first, with the name of the family that it begins with."""
    if isinstance(known, WrappedType):
        for family in known_texts(known, base, pool):
            report.near = [(family.model_type, 1.0)]
            yield family.model_type, FamilyDraft(family)
    beginnings = nearest(pool, base, known, 4)
    report.near = [(near.name, near.explained) for near in beginnings]
    for near in beginnings:
        state = _solved(near, known, pool, base, found, report)
        if state is not None:
            yield near.name, declare(near, state, known, pool, base, found)


def _is_same(family: Family, move: Move) -> bool:
    return move.built is not None and outcome(family, move.built)[0] == SAME


def _solved(
    near: Near, known: KnownType, pool: Pool, base: Built, found_moves: list[Move], report: AdoptReport
) -> SolverState | None:
    """Return the model that has transformers' tensors and logits, from a near family; None where there is none."""
    shapes = {name: tuple(tensor.shape) for name, tensor in base.published.items()}
    values = {name: value for name, value in base.values.items() if name in known.defaults}
    begun = structure(near.state, shapes, pool, near.state.names, values)
    if begun is None:
        report.missing[near.name] = ["it makes no model of this configuration"]
        return None
    state, found = begun
    if found.cost:
        missing, left = unexplained(found.names, state.config(), shapes)
        report.missing[near.name] = [*(f"no {name}" for name in missing[:4]), *left[:8]]
        return None
    budget = 120 if report.missing else 240  # further beginnings are seldom the better ones
    state, error = search(with_output(state, base, found_moves), base, pool, values, budget=budget)
    if error > TOLERANCE:
        report.missing[near.name] = [f"logits differ by {error:.1e} of the largest"]
        report.lacking[""] = (
            f"its tensors are those of a model like {near.name}, and the logits differ by {error:.1e} of the largest, "
            "so an element is missing that has no tensor of its own"
        )
        return None
    return state


def with_output(state: SolverState, base: Built, found: list[Move]) -> SolverState:
    """Return the state with the name of an output layer that repeats the embedding, and that files leave out: what
    files have beside the others where it repeats none, or what transformers calls it in memory."""
    if f"{state.names.output}.weight" in base.published:
        return state
    untied = next((m.built for m in found if m.name == TIED and m.built is not None), None)
    more = [] if untied is None else [name for name in untied.published if name not in base.published]
    embedding = base.published.get(f"{state.names.embedding}.weight")
    for name, tensor in base.memory.items():
        if name not in base.published and embedding is not None and torch.equal(tensor, embedding):
            more.append(name)
    outputs = [
        name for name in more if name.endswith(".weight") and not name.endswith(f"{state.names.embedding}.weight")
    ]
    return replace(state, names=replace(state.names, output=outputs[0].removesuffix(".weight"))) if outputs else state


def _with_forms(family: Family, base: Built, pool: Pool) -> Family:
    """Return the family with the form in which transformers holds the model in memory, where it is another one."""
    tied = {name for name in base.memory if name not in base.published}
    if set(base.memory) == set(base.published) or not any(name not in base.memory for name in base.published):
        return family
    config = family.read_config(base.values)
    shapes = {name: tuple(tensor.shape) for name, tensor in base.memory.items()}
    drop = {
        n for n in tied if config.embedding.share_embeddings_and_output_weights and n == f"{family.names.output}.weight"
    }
    shapes = {name: shape for name, shape in shapes.items() if name not in drop}
    for names, _ in solve(config, shapes, pool, family.names)[:4]:
        if names.cost:
            break
        like: dict[str, Any] = {"form": "fused", "transposed": family.names.transposed}
        like |= {key: getattr(family.names, key) for key in ("heads_in_turn", "halves_swapped", "qkv_blocks")}
        forms: list[Names] = [replace(names.names, **like)]
        if isinstance(names.names.experts, Fused):
            forms.append(replace(forms[0], experts=replace(names.names.experts, interleaved=True)))
        for form in forms:
            other = replace(family, other_names=(form,))
            if outcome(other, base, memory=True)[0] == SAME:
                return other
    return family


def proofs(
    family: Family, declared: FamilyDraft, known: KnownType, arguments: Values, base: Built, found: list[Move]
) -> tuple[list[tuple[str, str, str]], str]:
    """Return what a family makes of all moves, of other weights and of fields moved together; and what it gets wrong,
    "" for nothing. Only a refusal by name is allowed beside the same logits."""
    tried = [(move, move.built, *outcome(family, move.built)) for move in found if move.built is not None]
    rows: list[tuple[str, str, str]] = [("as it is", *outcome(family, base))]
    rows += [(move.label, got, why) for move, _, got, why in tried]
    draw = random.Random(0)
    usable = [m for m in found if m.built is not None and not m.inert and m.name != "sizes" and m.name not in _SIZES]
    for number in range(6):
        chosen = draw.sample(usable, min(len(usable), 2 + number % 3)) if usable else []
        changed: Values = {}
        for move in chosen:
            changed |= move.values
        together = changed_model(known, arguments, changed or {"use_cache": True}, base, seed=number + 1)
        if together.built is not None:
            rows.append((f"seed {number + 1}: {together.label}", *outcome(family, together.built, seed=number + 1)))
    for move, built, got, _ in tried:
        if got == SAME and not reads_alike(family, built, known):
            rows.append((f"{move.label}, without what has the class's default", WRONG, "another model is read"))
    rows += without_fields(family, known, arguments)
    wrong = [f"{label}: {why}" for label, got, why in rows if got == WRONG]
    if rows[0][1] != SAME:
        wrong.append("the base model itself is refused")
    for move, _, got, why in tried:
        if move.name in ("sizes", *LAYERS) and got != SAME:
            wrong.append(f"{move.label}: {why}")
    return rows, wrong[0] if wrong else ""


_SIZES = (*LAYERS, "hidden_size", "num_attention_heads")


def write_adopted(adopted: Adopted, folder: Path, *, overwrite: bool = False) -> list[str]:
    """Write the report, and the family with its test where there is one; return the files' names. Nothing is there
    until all of it is."""
    report, family = adopted.report, adopted.family
    stem = report.model_type.replace("-", "_")
    texts = {"report.json": json.dumps(report.to_dict(), indent=2) + "\n", "report.md": markdown(report)}
    if family is not None:
        note = f"adopted from transformers {report.transformers}, near {report.begun_with}."
        texts[f"{stem}.py"] = family_source(family, report.begun_with or "", note)
        texts[f"test_{stem}.py"] = test_source(family, adopted.sizes, adopted.cases, f"{stem}.py")
    with new_folder(folder, overwrite=overwrite) as content:
        for name, text in texts.items():
            (content / name).write_text(text, encoding="utf-8")
    return sorted(texts)


def is_known(model_type: str) -> bool:
    """Whether te_models has a family of this type already."""
    return model_type in FAMILIES
