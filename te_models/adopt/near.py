"""The nearest known families: by the tensors that they explain, and by the fields that they know."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

from te_models.checkpoints import CheckpointError
from te_models.checkpoints.families.base.family import Family
from te_models.checkpoints.families.base.fields import REQUIRED, Entry, Field, Fixed, Only, Renamed
from te_models.checkpoints.families.base.rope import Rope, RopePerLayerType
from te_models.checkpoints.families.base.text_part import text_part

from ..config import ConfigError, ModelConfig
from .naming import layer_prefix, split_names
from .pool import Pool, from_paths, read_leniently
from .probe import Built, KnownType, small_size
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
    for name, family in pool.families.items():
        if text_part(family) is not None:
            continue
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
        found.append((score, Near(name, family, explained, entries, state)))
    ordered = [near for _, near in sorted(found, key=lambda pair: -pair[0])]
    return ordered[:most]


def adapted(family: Family, pool: Pool, known: KnownType, built: Built) -> tuple[Entry, ...]:
    """Return a family's entries for a class with other fields and other defaults: fields of another name with the same
    meaning are read by that name; what the class has no field for is fixed."""
    aliases = pool.aliases(family, known.defaults)
    entries: list[Entry] = []
    for entry in family.fields:
        names = set(entry.names)
        if isinstance(entry, Renamed):
            entry = entry if names & set(known.defaults) else entry.entry
        others = {name: aliases[name] for name in entry.names if name in aliases}
        usable = not isinstance(entry, Renamed) and others and not names & set(known.defaults)
        if usable:
            entries.append(with_defaults(Renamed(entry, others), known.defaults))
        elif isinstance(entry, Only) and not names & set(known.defaults):
            continue
        elif not names or names & set(known.defaults) or isinstance(entry, Fixed):
            entries.append(with_defaults(entry, known.defaults))
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


def with_defaults(entry: Entry, defaults: Mapping[str, Any]) -> Entry:
    """Return an entry that reads a file without its fields as one that has the class's defaults, where changing the
    entry's default does so; the entry itself otherwise."""
    if isinstance(entry, Renamed):
        back = {entry.others.get(name, name): name for name in entry.entry.names}
        seen = {**defaults, **{back[name]: value for name, value in defaults.items() if name in back}}
        inner = with_defaults(entry.entry, seen)
        return entry if inner is entry.entry else replace(entry, entry=inner)
    if agrees(entry, defaults) or not is_dataclass(entry):
        return entry
    values: list[Any] = [None, True, False, *(defaults[name] for name in entry.names if name in defaults)]
    for name in entry.names:
        inner = defaults.get(name)
        if isinstance(inner, dict):
            values += [v for v in inner.values() if not isinstance(v, dict)]
            values += [v for d in inner.values() if isinstance(d, dict) for v in d.values()]
    tried: list[Any] = [entry]
    for f in fields(entry):
        if f.name in ("hf", "path", "kind", "names", "paths", "values", "name", "size"):
            continue
        for before in list(tried):
            for value in values:
                if isinstance(value, list | dict):
                    continue
                try:
                    other = replace(before, **{f.name: value})  # type: ignore[type-var]
                    if agrees(other, defaults):
                        return other
                except Exception:  # an entry checks what it is made with, each in its own way
                    continue
                if len(tried) < 12:
                    tried.append(other)
    return entry


def agrees(entry: Entry, defaults: Mapping[str, Any]) -> bool:
    """Whether an entry reads a file without its fields as one that has the class's defaults."""
    sizes = {name: small_size(name) for name, value in defaults.items() if isinstance(value, int) and value is not True}
    small = {name: size for name, size in sizes.items() if size and name not in entry.names}
    return all(_alike(entry, values) for values in (defaults, {**defaults, **small}))


def _alike(entry: Entry, values: Mapping[str, Any]) -> bool:
    absent = {name: value for name, value in values.items() if name not in entry.names}
    try:
        with_all = entry.read(values)
    except Exception:  # the class's own defaults may be no model
        return True
    try:
        return entry.read(absent) == with_all
    except CheckpointError as error:
        return "config.json has no " in str(error)
    except Exception:
        return False


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
