"""The nearest known families: by the tensors that they explain, and by the fields that they know."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

from te_models.checkpoints import CheckpointError
from te_models.checkpoints.families.base.common import PaddingIdx
from te_models.checkpoints.families.base.family import Family
from te_models.checkpoints.families.base.fields import REQUIRED, Entry, Field, Filled, Fixed, Only, Renamed
from te_models.checkpoints.families.base.rope import Rope, RopePerLayerType
from te_models.checkpoints.families.base.text_part import text_part

from ..config import ConfigError, ModelConfig
from .naming import layer_prefix, split_names
from .pool import Pool, from_paths, read_leniently
from .probe import Built, KnownType
from .solve import Paths, SolverState


@dataclass(frozen=True)
class Near:
    """A known family as a beginning: its entries as the new type's fields have them, and what they say."""

    name: str
    family: Family
    explained: float
    """The part of the tensors that it explains by name and shape as it is."""
    entries: tuple[Entry, ...]
    state: SolverState


def nearest(pool: Pool, built: Built, known: KnownType, most: int = 4) -> list[Near]:
    """Return the families that explain most of a model, the nearest first."""
    found = []
    shapes = {name: tuple(tensor.shape) for name, tensor in built.published.items()}
    for name, family in _beginnings(pool, known, shapes):
        entries = adapted(family, pool, known, built)
        state = begin(family, entries, built.values)
        if state is None:
            continue
        explained, alike = _explained(state, family, shapes)
        fields_alike = len(family.known & set(known.defaults)) / max(len(family.known | set(known.defaults)), 1)
        routed = any(re.search("expert|router|moe", module) for module in shapes) == any(
            path.startswith("moe.") for path in state.paths
        )
        score = explained + 0.5 * alike + fields_alike + routed
        state = replace(state, elements=elements(entries, pool, known, built))
        found.append((score, Near(name, family, explained, entries, state)))
    ordered = [near for _, near in sorted(found, key=lambda pair: -pair[0])]
    return ordered[:most]


def _beginnings(pool: Pool, known: KnownType, shapes: Mapping[str, Any]) -> Iterator[tuple[str, Family]]:
    """Yield the known families; those that name fields of a recurrent mixer that the class has also with that mixer in
    place of their own, by the names that files have for it."""
    fields_of = set(known.defaults)
    whole = {name: family for name, family in pool.families.items() if text_part(family) is None}
    others: dict[str, tuple[str, Family]] = {}
    for name, family in whole.items():
        parts = {part.hf for part in getattr(family.mixers, "parts", ())}
        if parts and parts <= fields_of:
            others.setdefault(repr(family.mixers), (name, family))
    for name, family in whole.items():
        yield name, _placed(family, shapes)
        for other, its in others.values():
            if its.mixers != family.mixers and other != name:
                names = replace(family.names, mixers=its.names.mixers, recurrent_norms=its.names.recurrent_norms)
                yield (
                    f"{name} with the mixers of {other}",
                    _placed(replace(family, mixers=its.mixers, names=names), shapes),
                )


def _placed(family: Family, shapes: Mapping[str, Any]) -> Family:
    """Return a family whose mixers lie where the files have them."""
    found: dict[str, Any] = {}
    inside = {re.sub(r"^.*?\.\d+\.", "", name) for name in shapes}
    for kind, its in family.names.mixers.items():
        at = getattr(its, "at", None)
        if at is None or any(name.startswith(at) for name in inside):
            continue
        marks = re.compile(r"(.*?\.)(A_log|conv1d\.weight|conv\.weight|in_proj\.weight|slope_rate)$")
        place = next((match[1] for match in map(marks.match, sorted(inside)) if match), None)
        if place is not None:
            found[kind] = replace(its, at=place)  # type: ignore[type-var]
    return (
        family if not found else replace(family, names=replace(family.names, mixers={**family.names.mixers, **found}))
    )


def elements(entries: tuple[Entry, ...], pool: Pool, known: KnownType, built: Built) -> tuple[Paths, ...]:
    """Return what other families say of the fields that no entry reads, or more than the entry that does: each field's
    meanings, and all that one family says of several."""
    read = {name for entry in entries for name in entry.names}
    told = {path for entry in entries for path in _said(entry, built.values)}
    by_family: dict[str, Paths] = {}
    found: list[Paths] = []
    for name in known.defaults:
        for family, entry in pool.entries.get(name, ()):
            said = {path: value for path, value in _said(entry, built.values).items() if "dropout" not in path}
            if name in read and set(said) <= told:
                continue
            if said and said not in found:
                found.append(said)
            if name not in read:
                by_family.setdefault(family, {}).update(said)
    return (*found, *(said for said in by_family.values() if said and said not in found))


def _said(entry: Entry, values: Mapping[str, Any]) -> Paths:
    """Return what an entry says of a configuration; nothing where it refuses it."""
    try:
        return entry.read(values)
    except Exception:  # an entry that does not expect what the field holds
        return {}


def adapted(family: Family, pool: Pool, known: KnownType, built: Built) -> tuple[Entry, ...]:
    """Return a family's entries for a class with other fields and other defaults: fields of another name with the same
    meaning are read by that name; what the class has no field for is fixed."""
    aliases = pool.aliases(family, known.defaults)
    entries: list[Entry] = []

    def fitted(entry: Entry) -> Entry:
        return pool.fitted(entry, lambda its: with_defaults(its, known))

    for entry in family.fields:
        names = set(entry.names)
        if isinstance(entry, Renamed):
            entry = entry if names & set(known.defaults) else entry.entry
        if isinstance(entry, PaddingIdx):
            entry = PaddingIdx(known.defaults.get("pad_token_id"))
        others = {name: aliases[name] for name in entry.names if name in aliases}
        usable = not isinstance(entry, Renamed) and others and not names & set(known.defaults)
        if usable:
            entries.append(fitted(Renamed(entry, others)))
        elif isinstance(entry, Only) and not names & set(known.defaults):
            continue
        elif not names or names & set(known.defaults) or isinstance(entry, Fixed):
            entries.append(fitted(entry))
        else:
            try:
                values = entry.read(built.values)
            except (CheckpointError, TypeError):
                continue
            required = isinstance(entry, Field) and entry.default is REQUIRED
            if not required and type(entry).__name__ not in ("HeadDim", "KeyValueHeads"):
                if not any(isinstance(value, list | tuple) for value in values.values()):  # which is by layer
                    entries += [Fixed(path, value) for path, value in values.items() if "dropout" not in path]
            else:
                entries.append(entry)
    if not _rotates(entries, built.values):
        entries = [e for e in entries if "rope_parameters" not in e.names] + list(_rope(known, built))
    return tuple(entries)


def _rotates(entries: list[Entry], values: Mapping[str, Any]) -> bool:
    """Whether an entry reads the rotary embedding of a configuration that has one."""
    if not isinstance(values.get("rope_parameters"), dict):
        return True
    for entry in entries:
        try:
            if "rope.rotary_base" in entry.read(values):
                return True
        except (CheckpointError, TypeError, AttributeError):
            continue
    return False


def _rope(known: KnownType, built: Built) -> Iterator[Entry]:
    """Yield the usual entry of the rotary embedding, with the class's defaults."""
    rope = known.defaults.get("rope_parameters") or built.values["rope_parameters"]
    if "rope_theta" in rope or "rope_type" in rope:
        yield Rope(float(rope.get("rope_theta", 1e4)), partial=rope.get("partial_rotary_factor"))
    elif {"full_attention", "sliding_attention"} <= set(rope):
        thetas = [float(rope[kind].get("rope_theta", 1e4)) for kind in ("full_attention", "sliding_attention")]
        yield RopePerLayerType(thetas[0], thetas[1])


def with_defaults(entry: Entry, known: KnownType) -> Entry:
    """Return an entry that reads a file without its fields as the class does, where a change of its own default does
    so, or where the class's values in place of absent ones do; the entry itself otherwise."""
    if agrees(entry, known):
        return entry
    for other in _with_other_defaults(entry, known.defaults):
        if agrees(other, known, surely=True):
            return other
    wholes = [whole for _, whole in known.left_out(entry.names)]
    values = {name: known.defaults[name] for name in entry.names if name in known.defaults}
    if agrees(Filled(entry, values), known):
        return Filled(entry, values)
    for name, value in values.items():  # which the class works out of other fields
        if any(whole.get(name) != value for whole in wholes):
            values[name] = REQUIRED
    return Filled(entry, values) if agrees(Filled(entry, values), known) else entry


def _with_other_defaults(entry: Any, defaults: Mapping[str, Any]) -> Iterator[Entry]:
    """Yield an entry with another value in place of one of its own defaults."""
    if isinstance(entry, Renamed):
        back = {entry.others.get(name, name): name for name in entry.entry.names}
        seen = {**defaults, **{back[name]: value for name, value in defaults.items() if name in back}}
        yield from (replace(entry, entry=inner) for inner in _with_other_defaults(entry.entry, seen))
        return
    if not is_dataclass(entry) or isinstance(entry, type):
        return
    names: Sequence[str] = getattr(entry, "names", ())
    values: list[Any] = [*(defaults[name] for name in names if name in defaults), None, True, False]
    for name in names:
        inner = defaults.get(name)
        if isinstance(inner, dict):
            values += [v for v in inner.values() if not isinstance(v, dict)]
            values += [v for d in inner.values() if isinstance(d, dict) for v in d.values()]
    values = list({repr(v): v for v in values if not isinstance(v, list | dict)}.values())
    for f in fields(entry):
        its = getattr(entry, f.name)
        several = isinstance(its, tuple | Mapping) or callable(its)
        if several or f.name in ("hf", "path", "kind", "names", "paths", "values", "name", "size"):
            continue
        for value in values:
            try:
                changed: Any = replace(entry, **{f.name: value})
            except Exception:  # an entry checks what it is made with, each in its own way
                continue
            yield changed


def agrees(entry: Entry, known: KnownType, *, surely: bool = False) -> bool:
    """Whether an entry reads files without its fields as the class does: of the class's sizes, and of small ones; the
    former may be no model. surely: of one of them at least."""
    compared = False
    for file, whole in known.left_out(entry.names):
        try:
            expected = entry.read(whole)
        except Exception:  # the class's own defaults may be no model
            continue
        try:
            if _with_heads(entry.read(file), whole) != _with_heads(expected, whole):
                return False
            compared = True
        except CheckpointError as error:
            if "config.json has no " not in str(error):
                return False
        except Exception:
            return False
    return compared or not surely


def _with_heads(said: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return paths without the number of key heads where each query head has its own, as where nothing is said."""
    if "attention.num_query_groups" not in said:
        return dict(said)
    heads = {value for name, value in values.items() if re.fullmatch(r"n_heads?|num_heads|num_attention_heads", name)}
    return {k: v for k, v in said.items() if k != "attention.num_query_groups" or v not in heads}


def begin(family: Family, entries: tuple[Entry, ...], values: Mapping[str, Any]) -> SolverState | None:
    """Return the state that a family's entries give; None where they give no model at all."""
    read, _ = read_leniently(replace(family, fields=entries), values)
    state = SolverState(read, family.names, keeps_dtype=family.keeps_dtype)
    if family.mixers is not None:
        try:
            nested = from_paths_nested(read)
            state = replace(state, extra=family.mixers.read(values, nested))
        except (CheckpointError, TypeError, KeyError, AttributeError, ConfigError):
            return None
    try:
        state.config()
    except ConfigError:
        try:
            plain = {path: value for path, value in read.items() if not path.startswith(("moe.", "layer_types"))}
            from_paths(plain)
        except ConfigError:
            return None
        return replace(state, paths=plain)
    return state


def from_paths_nested(paths: Paths) -> dict[str, Any]:
    """Return paths as nested dictionaries."""
    nested: dict[str, Any] = {}
    for path, value in paths.items():
        *parents, leaf = path.split(".")
        at = nested
        for name in parents:
            at = at.setdefault(name, {})
        at[leaf] = value
    return nested


def _explained(state: SolverState, family: Family, shapes: Mapping[str, tuple[int, ...]]) -> tuple[float, float]:
    """Return the parts of all tensors that a family has by name and shape, and that it has the like of in a layer."""
    try:
        config: ModelConfig = state.config()
        stored = {name: s.shape for name, s in family.namespace(config).stored.items()}
    except (CheckpointError, ConfigError, ValueError):
        return 0.0, 0.0
    same = sum(stored.get(name) == shape for name, shape in shapes.items())
    exact = same / max(len(stored), len(shapes))
    modules = []
    for each in (stored, shapes):
        _, inside = split_names(each, layer_prefix(each))
        modules.append({name.rpartition(".")[2] for name in inside})
    alike = len(modules[0] & modules[1]) / max(len(modules[0] | modules[1]), 1)
    return exact, alike
