"""What the known families say, as material for another one: entries by field, field names by meaning, names by part."""

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from te_models.checkpoints import FAMILIES, CheckpointError
from te_models.checkpoints.families.base.family import Family
from te_models.checkpoints.families.base.fields import Entry, Renamed, Values
from te_models.checkpoints.families.base.names import Fused, Names, PerExpert
from te_models.checkpoints.families.base.text_part import text_part

from ..config import ConfigError, ModelConfig

GLOBAL = ("embedding", "positions", "embedding_norm", "final_norm", "output")
SINGLE = ("sinks", "gate", "proj", "fc2", "router", "selection_bias", "shared_fc2", "shared_gate")
SEVERAL = ("norms", "qkv", "qk_norms", "fc1", "shared_fc1")


@dataclass(frozen=True)
class Pool:
    """What `families` say: all families but the hidden ones."""

    families: Mapping[str, Family]
    entries: dict[str, list[tuple[str, Entry]]] = field(default_factory=lambda: defaultdict(list))
    """Field of config.json -> (family, entry that reads it)."""
    synonyms: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    """Path of ModelConfig -> names of fields that mean it."""
    parts: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    """Part of the weight map -> what families call it."""
    usual: dict[tuple[str, str], float] = field(default_factory=dict)
    """(part, name) -> how usual it is to call it so, remembered."""
    remembered: dict[str, Entry] = field(default_factory=dict)
    """Text of an entry -> the same with the defaults of the class in question."""

    def fitted(self, entry: Entry, fit: Callable[[Entry], Entry]) -> Entry:
        """Return `fit` of an entry, done once for all families that have it."""
        text = repr(entry)
        if text not in self.remembered:
            self.remembered[text] = fit(entry)
        return self.remembered[text]

    def meanings(self, name: str) -> set[str]:
        """Return the paths of ModelConfig that a field of this name means in some family."""
        return {path for path, names in self.synonyms.items() if name in names}

    def aliases(self, family: Family, known: Collection[str]) -> dict[str, str]:
        """Return fields of a family that `known` lacks -> those in `known` that mean the same."""
        found: dict[str, str] = {}
        for name in sorted(family.known - set(known)):
            for path in sorted(self.meanings(name)):
                other = sorted((self.synonyms[path] & set(known)) - family.known)
                if other:
                    found[name] = other[0]
                    break
        return found


def pool_of(hidden: Collection[str] = ()) -> Pool:
    """Collect what all families but the hidden ones say."""
    pool = Pool({name: FAMILIES[name] for name in FAMILIES if name not in hidden})
    for model_type, family in pool.families.items():
        if text_part(family) is not None:
            continue
        for entry in family.fields:
            inner = entry.entry if isinstance(entry, Renamed) else entry
            for name in entry.names:
                pool.entries[name].append((model_type, entry))
            for path in _paths(inner):
                pool.synonyms[path].update(entry.names)
        for names in (family.names, *family.other_names):
            if names.form != "without-prefix":
                for part, name in weight_map_parts(names):
                    pool.parts[part][name] += 1
    return pool


def _paths(entry: Any) -> tuple[str, ...]:
    """Return the paths that an entry of one meaning sets."""
    path = getattr(entry, "path", None)
    if isinstance(path, str):
        return (path,)
    shared = {"KeyValueHeads": "attention.num_query_groups", "HeadDim": "attention.kv_channels"}
    shared |= {"InnerSize": "mlp.ffn_hidden_size", "TimesHidden": "mlp.ffn_hidden_size"}
    shared |= {"ExpertSize": "moe.moe_ffn_hidden_size"}
    path = shared.get(type(entry).__name__)
    return () if path is None else (path,)


def weight_map_parts(names: Names) -> Iterator[tuple[str, str]]:
    """Yield each part of a weight map with what it is called; norms with the pattern of those that there are."""
    for part in (*GLOBAL, *SINGLE):
        if getattr(names, part) is not None:
            yield part, getattr(names, part)
    for norms in filter(None, (names.norms, names.parallel_norms)):
        pattern = "".join("n" if norm else "-" for norm in norms)
        for slot, norm in enumerate(norms):
            if norm:
                yield f"norms_{pattern}_{slot}", norm
    for part in SEVERAL[1:]:
        several = getattr(names, part)
        for slot, name in enumerate(several):
            yield f"{part}_{len(several)}_{slot}", name
    if isinstance(names.experts, PerExpert):
        for part in ("gate", "up", "down"):
            yield f"experts_{part}", getattr(names.experts, part)
    elif isinstance(names.experts, Fused):
        for part in ("fc1", "fc2"):
            yield f"experts_{part}", getattr(names.experts, part)


def read_leniently(family: Family, values: Mapping[str, Any]) -> tuple[Values, list[str]]:
    """Return what a family's entries say of config.json as paths, without the entries that refuse it, and why."""
    found: Values = {}
    refused: list[str] = []
    for entry in family.fields:
        try:
            found.update(entry.read(values))
        except (CheckpointError, TypeError, AttributeError) as error:
            refused.append(str(error))
    return found, refused


def from_paths(paths: Mapping[str, Any]) -> ModelConfig:
    """Return the configuration of these paths; ConfigError where there is none."""
    nested: dict[str, Any] = {}
    for path, value in paths.items():
        *parents, leaf = path.split(".")
        at = nested
        for name in parents:
            if not isinstance(at.get(name), dict):
                at[name] = {}
            at = at[name]
        at[leaf] = value
    try:
        return ModelConfig.from_dict(nested)
    except (TypeError, KeyError, AttributeError) as error:
        raise ConfigError(str(error)) from None
