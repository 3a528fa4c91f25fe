"""What each field of an unknown configuration does: the entries of its configuration map, each proven by moves."""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from te_models.checkpoints import CheckpointError
from te_models.checkpoints.families.base.family import Family
from te_models.checkpoints.families.base.fields import (
    REQUIRED,
    Entry,
    Field,
    Filled,
    Fixed,
    Flag,
    Only,
    Renamed,
    SameAs,
    Spread,
)
from te_models.checkpoints.families.base.layer_fields import OnlyInEachLayer
from te_models.checkpoints.families.base.nested import TimesHidden
from te_models.checkpoints.families.base.text_part import text_part

from ..config import ConfigError, ModelConfig
from .moves import LAYERS, OF_TRAINING, Move, outside_of
from .near import Near, agrees, with_defaults
from .pool import Pool
from .probe import Built, KnownType, Values, small_size
from .solve import TOLERANCE, Paths, SolverState, difference, our_logits, search, solved_weights
from .toggles import usual_paths

SAME, REFUSED, WRONG = "same", "refused", "wrong"


@dataclass
class FamilyDraft:
    """A family under way."""

    family: Family
    meanings: dict[str, str] = field(default_factory=dict)
    """Field -> what was found of it, in words."""
    lacking: dict[str, str] = field(default_factory=dict)
    """Field whose other values are refused -> why."""


def outcome(family: Family, built: Built, *, memory: bool = False, seed: int = 0) -> tuple[str, str]:
    """Return whether a family has a model's tensors and logits, refuses it, or neither; and why."""
    values = built.values if text_part(family) is None else built.whole
    try:
        config = family.read_config(values)
    except CheckpointError as error:
        return REFUSED, str(error)
    except Exception as error:  # an entry that does not expect what the field holds
        return WRONG, f"{type(error).__name__}: {error}"
    form = (repr(family.names), family.unused, memory, repr(family.other_names) if memory else "")
    key = (config, *form, seed)
    if key not in built.remembered:
        built.remembered[key] = _compared(family, config, built, values, memory, seed)
    return built.remembered[key]


def _compared(
    family: Family, config: ModelConfig, built: Built, values: Values, memory: bool, seed: int
) -> tuple[str, str]:
    tensors = built.memory if memory else built.published
    names = family.names
    try:
        if memory:
            form, _ = family.best_form(config, tensors)
            names = family.forms[form]
        unused = [name for name in tensors if family.unused.holds(name, values)]
        if memory:  # tied copies may have the names of any form
            pairs = [pair for form in family.forms.values() for pair in form.copies(config)]
            unused += [copy for copy, original in pairs if copy in tensors and original in tensors]
        weights = solved_weights(config, names, tensors, unused)
        error_size = difference(our_logits(config, weights, built.logits, seed), built.logits)
    except (CheckpointError, ConfigError, ValueError, RuntimeError, AssertionError, TypeError, KeyError) as error:
        return WRONG, f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]
    if error_size <= TOLERANCE:
        return SAME, f"{error_size:.1e}"
    return WRONG, f"logits differ by {error_size:.1e} of the largest"


def entries_for(near: Near, state: SolverState, base: Built) -> tuple[Entry, ...]:
    """Return a near family's entries, those that say otherwise than what was found replaced by what was."""
    entries: list[Entry] = []
    settled: dict[str, Any] = {}
    for entry in near.entries:
        try:
            said = entry.read(base.values)
        except Exception:  # the entry does not expect what the field holds
            continue
        if not set(said) <= set(state.paths):
            continue
        if all(state.paths.get(path) == value for path, value in said.items()):
            entries.append(entry)
        else:
            settled |= {path: state.paths[path] for path in said}
    told: Paths = {}
    for entry in entries:
        told |= entry.read(base.values)
    settled |= {path: value for path, value in state.paths.items() if path not in told or told[path] != value}
    usual = usual_paths()
    fixed = [Fixed(p, v) for p, v in settled.items() if told.get(p, usual.get(p, None)) != v or p in told]
    return (*entries, *fixed)


def _only(name: str, base: Built) -> Only:
    """Return an entry that refuses other values of a field; a list of one value per layer may be of any length."""
    value = base.values.get(name)
    layers = base.values.get(next((n for n in LAYERS if n in base.values), ""))
    if isinstance(value, list) and len(value) == layers and all(item == value[0] for item in value):
        return OnlyInEachLayer(name, value[0])
    return Only(name, value)


def neutral(family: Family, base: Built) -> Family:
    """Return the family with `Only` entries for the fields that the base model has and that no entry speaks of."""
    for _ in range(40):
        try:
            family.read_config(base.values)
            return family
        except CheckpointError as error:
            match = re.match(r"config.json has (\w+) = ", str(error))
            if match is None or match[1] in family.known or match[1] not in base.values:
                return family
            family = replace(family, fields=(*family.fields, _only(match[1], base)))
        except Exception:  # an entry that does not expect what the field holds, or lacks what another one said
            return family
    return family


def declare(
    near: Near, state: SolverState, known: KnownType, pool: Pool, base: Built, found: list[Move]
) -> FamilyDraft:
    """Return the family of what was found, with each field's entry proven by the moves of it as far as can be."""
    family = Family(
        model_type=known.model_type,
        architecture=known.architecture,
        fields=entries_for(near, state, base),
        mixers=near.family.mixers if state.extra else None,
        names=state.names,
        unused=near.family.unused,
        keeps_dtype=near.family.keeps_dtype,
    )
    result = FamilyDraft(neutral(family, base))
    if outcome(result.family, base)[0] != SAME:
        result.lacking[""] = outcome(result.family, base)[1]
        return result
    for _ in range(2):
        again = False
        for move in found:
            if move.built is None or move.inert:
                continue
            got, why = outcome(result.family, move.built)
            if got == SAME:
                continue
            better = repair(result.family, move, found, known, pool, near, base, _blamed(move, got, why))
            if better is not None:
                result.family, again = better, True
            elif got == WRONG:
                result.family = refusing(result.family, move.name, base)
                result.lacking[move.name] = why
                again = True
        if not again:
            break
    for move in found:  # an entry that reads one field right may read another one wrong
        got, why = (SAME, "") if move.built is None else outcome(result.family, move.built)
        if got == WRONG and move.inert:
            result.family = _without_effect(result.family, move.name, base)
            got, why = outcome(result.family, move.built or base)
        if got == WRONG:
            result.lacking[move.name] = why
            result.family = refusing(result.family, move.name, base)
    return result


def score(family: Family, found: Iterable[Move], names: Iterable[str]) -> tuple[int, int]:
    """Return how many moves of these fields a family reads wrong, and how many it refuses."""
    wrong = refused = 0
    chosen = set(names)
    for move in found:
        if move.built is not None and move.name in chosen:
            got = outcome(family, move.built)[0]
            wrong, refused = wrong + (got == WRONG), refused + (got == REFUSED)
    return wrong, refused


def _blamed(move: Move, got: str, why: str) -> tuple[str, ...]:
    """Return the fields that a move or its refusal speaks of."""
    match = re.search(r"config.json has (?:a |an |the |\d+ )?(\w+)", why) if got == REFUSED else None
    named = (match[1],) if match and move.built and match[1] in move.built.values and match[1] != move.name else ()
    return (*named, *move.values)


def repair(
    family: Family,
    move: Move,
    found: list[Move],
    known: KnownType,
    pool: Pool,
    near: Near,
    base: Built,
    blamed: tuple[str, ...],
) -> Family | None:
    """Return the family with another entry for a field, one that reads more moves of it right; None without one."""
    concerned = {*blamed, *(n for e in family.fields if set(blamed) & set(e.names) for n in e.names)}
    best, least = None, score(family, found, concerned)
    entries = (e for name in blamed for e in candidates(name, known, pool, near))
    for entry in (*entries, *following(move, known, base, family, blamed), *_new(move, known, pool, base, family)):
        other = neutral(_with(family, entry, base), base)
        if outcome(other, base)[0] != SAME or outcome(other, move.built or base)[0] != SAME:
            continue
        if not agrees(entry, known):
            continue
        its = score(other, found, {*concerned, *entry.names})
        before = score(family, found, {*concerned, *entry.names})
        if its < before and (best is None or its < least):
            best, least = other, its
        if best is not None and least == (0, 0):
            return best
    return best


def candidates(field_name: str, known: KnownType, pool: Pool, near: Near) -> Iterator[Entry]:
    """Yield the entries of other families that may say what a field does."""
    seen: list[Entry] = []
    order = {name: i for i, name in enumerate([near.name])}
    for _, entry in sorted(pool.entries.get(field_name, ()), key=lambda pair: order.get(pair[0], 9)):
        its = pool.fitted(entry, lambda e: with_defaults(e, known))
        if its not in seen and not isinstance(its, Only):
            seen.append(its)
            yield its
    for path in sorted(pool.meanings(field_name)):
        for name in sorted(pool.synonyms[path]):
            for _, entry in pool.entries.get(name, ())[:3]:
                if not isinstance(entry, Renamed) and entry.names == (name,) and name != field_name:
                    alike = Renamed(entry, {name: field_name})
                    its = pool.fitted(alike, lambda e: with_defaults(e, known))
                    if its not in seen:
                        seen.append(its)
                        yield its


def _new(move: Move, known: KnownType, pool: Pool, base: Built, family: Family) -> Iterator[Entry]:
    """Yield entries for a field that no family reads so: what has to change of our model when it is moved."""
    if move.built is None or len(move.values) != 1:
        return
    without = replace(family, fields=tuple(e for e in family.fields if not (isinstance(e, Only) and e.hf == move.name)))
    try:
        before = _paths_of(without, base.values)
        paths = _paths_of(without, move.built.values)
    except CheckpointError:
        return
    values = {k: v for k, v in move.built.values.items() if k in known.defaults}
    state, error = search(SolverState(paths, family.names), move.built, pool, values, budget=160)
    if error > TOLERANCE:
        return
    changed = {p: v for p, v in state.paths.items() if paths.get(p) != v}
    usual = usual_paths()
    old = {p: before.get(p, usual.get(p)) for p in changed}
    default, value = known.defaults.get(move.name), move.values[move.name]
    if not changed:
        return
    if isinstance(default, bool):
        if all(isinstance(v, bool) for v in changed.values()) and set(changed.values()) == {value}:
            if len(changed) == 1:
                yield Field(move.name, next(iter(changed)), bool, default)
            yield Spread(move.name, tuple(changed), default)
        true, false = (changed, old) if value else (old, changed)
        yield Flag(move.name, tuple(true.items()), tuple(false.items()), default)
    elif isinstance(default, float | int) and len(changed) == 1:
        path, number = next(iter(changed.items()))
        if number == value:
            yield Field(move.name, path, float if isinstance(number, float) else int, default)
    elif default is None and len(changed) == 1:
        path, number = next(iter(changed.items()))
        if number == value and isinstance(value, float | int):
            yield Field(move.name, path, bool if isinstance(value, bool) else type(number), None)


def following(move: Move, known: KnownType, base: Built, family: Family, names: Iterable[str]) -> Iterator[Entry]:
    """Yield entries for what follows from the moved size: fields that the class gives its value, and the MLP's width,
    of which there is no field."""
    of, value = move.name, base.values.get(move.name)
    if move.built is None or list(move.values) != [of] or type(value) is not int:
        return
    paths = [path for e in family.fields if of in e.names for path, its in e.read(base.values).items() if its == value]
    refused = {e.hf for e in family.fields if isinstance(e, Only)}
    for name in sorted((set(names) & refused) - {of}):
        if (base.values.get(name), move.built.values.get(name)) == (value, move.values[of]):
            yield from (SameAs(name, of, path, known.defaults[of]) for path in paths)
    width = next((e.value for e in family.fields if isinstance(e, Fixed) and e.path == "mlp.ffn_hidden_size"), None)
    if "hidden_size" in paths and width is not None and width % value == 0:
        yield TimesHidden(None, (of,), width // value, known.defaults[of])


def _paths_of(family: Family, values: Mapping[str, Any]) -> Paths:
    found: Paths = {}
    for entry in family.fields:
        found |= entry.read(values)
    return found


def _with(family: Family, entry: Entry, base: Built) -> Family:
    """Return the family with an entry in place of those that read its fields or say the same."""
    try:
        says = set(entry.read(base.values))
    except Exception:  # the entry does not expect what the field holds
        return family
    entries: list[Entry] = []
    for other in family.fields:
        if set(other.names) & set(entry.names):
            continue
        if isinstance(other, Fixed) and other.path in says:
            continue
        entries.append(other)
    return replace(family, fields=(*entries, entry))


def refusing(family: Family, name: str, base: Built) -> Family:
    """Return the family with other values of a field refused; what its entry said stays."""
    entries: list[Entry] = []
    for entry in family.fields:
        if name in entry.names and not isinstance(entry, Only):
            if len(entry.names) > 1:
                entries.append(entry)
                continue
            try:
                entries += [Fixed(path, value) for path, value in entry.read(base.values).items()]
            except CheckpointError:
                continue
        elif name not in entry.names:
            entries.append(entry)
    return replace(family, fields=(*entries, _only(name, base)))


def _without_effect(family: Family, name: str, base: Built) -> Family:
    """Return the family with a field that changes nothing, whatever it says."""
    entries: list[Entry] = []
    for entry in family.fields:
        if entry.names == (name,):
            entries += [Fixed(path, value, (name,)) for path, value in entry.read(base.values).items()]
        else:
            entries.append(entry)
    return replace(family, fields=tuple(entries))


def without_fields(family: Family, known: KnownType, arguments: Values) -> Iterator[tuple[str, str, str]]:
    """Yield what becomes of files that leave one field out: the model is what transformers' class makes of it."""
    for name in known.defaults:
        try:
            file = known.values({k: v for k, v in arguments.items() if k != name})
            file.pop(name, None)
            whole = known.values({k: v for k, v in file.items() if k in known.defaults})
            expected = family.read_config({**file, **whole})
        except Exception:  # transformers needs the field, or the family refuses its default
            continue
        try:
            got = SAME if family.read_config(file) == expected else WRONG
            yield f"without {name}", got, "the same model" if got == SAME else "another model is read"
        except CheckpointError as error:
            yield f"without {name}", REFUSED, str(error)


def reads_alike(family: Family, built: Built, known: KnownType) -> bool:
    """Whether the family reads a file without the fields that have the class's defaults as the whole one."""
    try:
        return family.read_config(outside_of(built.values, known.defaults)) == family.read_config(built.values)
    except CheckpointError as error:
        return "config.json has no " in str(error)


def with_required(family: Family, known: KnownType, arguments: Values, found: Iterable[Move]) -> Family:
    """Return a family whose files must have the fields without which it reads another model than the class makes."""
    for _ in range(3):
        rows = without_fields(family, known, arguments)
        names = {label.removeprefix("without ") for label, got, _ in rows if got == WRONG}
        for move in found:
            if move.built is not None and outcome(family, move.built)[0] == SAME:
                names |= (
                    set() if reads_alike(family, move.built, known) else _differs_without(family, move.built, known)
                )
        if not names:
            return family
        family = replace(family, fields=tuple(_required(entry, names) for entry in family.fields))
    return family


def _differs_without(family: Family, built: Built, known: KnownType) -> set[str]:
    """Return the fields with the class's default without which a family reads another model."""
    whole, found = family.read_config(built.values), set()
    for name in set(built.values) - set(outside_of(built.values, known.defaults)):
        try:
            if family.read_config({k: v for k, v in built.values.items() if k != name}) != whole:
                found.add(name)
        except CheckpointError:  # a field that a file must have
            continue
    return found


def _required(entry: Entry, names: set[str]) -> Entry:
    """Return an entry that demands those of its fields that are among `names`."""
    its = {name: REQUIRED for name in entry.names if name in names}
    if not its or isinstance(entry, Fixed):
        return entry
    return Filled(entry.entry, {**entry.values, **its}) if isinstance(entry, Filled) else Filled(entry, its)


def config_of(family: Family, built: Built) -> ModelConfig:
    """Return our configuration of a small model."""
    return family.read_config(built.values)


def is_of_training(name: str) -> bool:
    """Whether a field is of training alone, by its name."""
    return any(word in name for word in OF_TRAINING) or (name.endswith("_dropout") and small_size(name) is None)
