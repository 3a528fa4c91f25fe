"""The weight map of unknown files: which tensor is which part, told by shapes and by what families call it."""

import difflib
import itertools
import math
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from te_models.checkpoints import CheckpointError
from te_models.checkpoints.families.base.family import Family
from te_models.checkpoints.families.base.names import Fused, Names, PerExpert

from ..config import ModelConfig
from .pool import GLOBAL, SINGLE, Pool

Shapes = Mapping[str, tuple[int, ...]]
Module = dict[tuple[int, str], tuple[int, ...]]
"""(number of the layer, weight or bias or nothing) -> shape, of all that has one name."""
_MARK = "@"
_KIND = re.compile(r"^(.*?)(?:[.](weight|bias)|(_bias))$")


@dataclass(frozen=True)
class Found:
    """A weight map, and what it leaves over: `missing` parts of the model, and `left` tensors of the files."""

    names: Names
    missing: int
    left: int

    @property
    def cost(self) -> int:
        return self.missing + self.left


def layer_prefix(shapes: Iterable[str]) -> str:
    """Return what the names of layers begin with, with `{i}`; "" where nothing is numbered."""
    count: dict[str, set[str]] = defaultdict(set)
    size: dict[str, int] = defaultdict(int)
    for name in shapes:
        match = re.match(r"^(.*?)\.(\d+)\.", name)
        if match:
            count[match[1]].add(match[2])
            size[match[1]] += 1
    best = max(size, key=lambda prefix: size[prefix], default="")
    return f"{best}.{{i}}" if best else ""


def split_names(shapes: Shapes, layer: str) -> tuple[dict[str, Module], dict[str, Module]]:
    """Return the modules outside of layers, and those of layers, by name; numbers in a name are `{n}`."""
    outside: dict[str, Module] = defaultdict(dict)
    inside: dict[str, Module] = defaultdict(dict)
    pattern = re.compile(re.escape(layer).replace(r"\{i\}", r"(\d+)") + r"\.(.*)")
    for name, shape in shapes.items():
        match = pattern.fullmatch(name) if layer else None
        number, rest = (int(match[1]), match[2]) if match else (0, name)
        found = _KIND.match(rest)
        if found and found[3] and name.removesuffix("_bias") not in shapes:
            found = None  # a tensor of its own, as the bias that selects experts
        module, kind = (found[1], found[2] or found[3]) if found else (rest, "")
        module = re.sub(r"(?<=\.)\d+(?=\.|$)", "{n}", module)
        (inside if match else outside)[module][number, kind] = tuple(shape)
    return dict(outside), dict(inside)


Key = tuple[Any, ...]


def variants(names: Names, config: ModelConfig, shapes: Shapes) -> Iterator[tuple[Key, Names]]:
    """Yield the ways in which files may join projections and experts, with a mark in place of each name."""
    layer = layer_prefix(shapes)
    latent = config.attention.mla is not None
    module = next((m[1] for m in (re.search(r"\.\d+\.(.*?)\.kv_a_proj_with_mqa", n) for n in shapes) if m), "self_attn")
    at = f"{module}." if latent else ""
    marked = {part: f"{_MARK}{part}" for part in (*GLOBAL, *SINGLE) if getattr(names, part) is not None}
    marked["selection_bias"] = f"{_MARK}selection_bias"
    if latent:
        marked["proj"], marked["gate"] = at + marked["proj"], at + marked["gate"]
    patterns = {"pre": "n-n-", "post": "-n-n", "sandwich": "nnnn", "parallel": "n-n-", "parallel_shared_norm": "n---"}
    pattern = patterns[config.block]
    norms = tuple(f"{_MARK}norms_{pattern}_{slot}" if c == "n" else None for slot, c in enumerate(pattern))
    experts: tuple[Any, ...] = (PerExpert(*(f"{_MARK}experts_{x}.{{e}}" for x in ("gate", "up", "down"))),)
    if config.moe is not None:
        fused = (f"{_MARK}experts_fc1", f"{_MARK}experts_fc2")
        experts = (*experts, Fused(*fused), Fused(*fused, transposed=True))
    gated = 2 if config.mlp.gated else 1
    unsqueezed = config.moe is not None and (1, config.moe.num_moe_experts) in map(tuple, shapes.values())
    for qkv, fc1, shared, kind, in_out in itertools.product(
        (3, 1), {gated, 1}, {gated, 1} if config.moe else {1}, experts, (False, True)
    ):
        key = (
            qkv == 1,
            fc1 == gated,
            shared == gated or config.moe is None,
            type(kind),
            getattr(kind, "transposed", None),
            in_out,
        )
        yield (
            key,
            replace(
                names,
                **marked,
                layer=f"{_MARK}layer.{{i}}" if layer else names.layer,
                norms=norms,
                parallel_norms=None,
                qkv=tuple(f"{_MARK}qkv_{qkv}_{k}" for k in range(qkv)),
                qk_norms=tuple(
                    f"{_MARK}qk_norms_2_{k}" + (".{h}" if config.attention.qk_layernorm == "each_head" else "")
                    for k in range(2)
                ),
                fc1=tuple(f"{_MARK}fc1_{fc1}_{k}" for k in range(fc1)),
                shared_fc1=tuple(f"{_MARK}shared_fc1_{shared}_{k}" for k in range(shared)),
                experts=kind,
                transposed=in_out,
                selection_bias_unsqueezed=unsqueezed,
                mtp=None,
                **({} if qkv == 1 else {"heads_in_turn": False, "qkv_blocks": None}),
            ),
        )


def fit(marked: Names, config: ModelConfig, shapes: Shapes, pool: Pool, near: Names | None) -> Found | None:
    """Return the weight map that a variant is of these files: each mark by the name that fits best; None where the
    configuration and the variant exclude each other."""
    try:
        stored = Family("marked", "", (), names=marked).namespace(config).stored
    except (CheckpointError, ValueError, IndexError):
        return None
    layer = layer_prefix(shapes)
    ours = split_names({name: s.shape for name, s in stored.items()}, f"{_MARK}layer.{{i}}")
    theirs = split_names(shapes, layer)
    chosen: dict[str, str] = {}
    missing = left = 0
    for mine, present in zip(ours, theirs):
        pairs = _match(mine, present, pool, near)
        for mark, name in pairs.items():
            if _kinds(mine[mark]) == {""} and _kinds(present[name]) == {"weight"}:  # experts as one module's weight
                present[name] = {(number, ""): shape for (number, _), shape in present[name].items()}
                chosen[mark] = f"{name}.weight"
            else:
                chosen[mark] = name
        for mark, module in mine.items():
            other = present.get(pairs.get(mark, ""), {})
            missing += sum(other.get(key) != shape for key, shape in module.items())
        back = {module: mark for mark, module in pairs.items()}
        for name, module in present.items():
            other = mine.get(back.get(name, ""), {})
            left += sum(other.get(key) != shape for key, shape in module.items())
    return Found(_named(marked, chosen, layer), missing, left)


def _kinds(module: Module) -> set[str]:
    return {kind for _, kind in module}


def _match(mine: dict[str, Module], theirs: dict[str, Module], pool: Pool, near: Names | None) -> dict[str, str]:
    """Return mark -> name: those of one shape in each layer are matched so that names are the most usual ones."""
    pairs = {name: name for name in mine if _MARK not in name and name in theirs}
    groups: dict[Any, tuple[list[str], list[str]]] = defaultdict(lambda: ([], []))
    for slot, modules in enumerate((mine, theirs)):
        for name, module in modules.items():
            if name not in pairs:
                groups[_signature(module)][slot].append(name)
    for marks, names in groups.values():
        pairs |= _best(marks, names, pool, near)
    return pairs


def _signature(module: Module) -> Any:
    """What tells modules that may be the same one: shapes, without biases beside weights."""
    weighty = {key: shape for key, shape in module.items() if key[1] not in ("bias", "_bias")} or module
    return frozenset((number, "" if kind == "weight" else kind, shape) for (number, kind), shape in weighty.items())


def _best(marks: list[str], names: list[str], pool: Pool, near: Names | None) -> dict[str, str]:
    score = {(m, n): _score(m, n, pool) for m in marks for n in names}
    if len(marks) > 6 or len(names) > 6:
        pairs: dict[str, str] = {}
        for m, n in sorted(score, key=lambda pair: -score[pair]):
            if m not in pairs and n not in pairs.values():
                pairs[m] = n
        return pairs
    few, many = (marks, names) if len(marks) <= len(names) else (names, marks)
    turn = few is not marks
    orders = itertools.permutations(many, len(few))
    best = max(orders, key=lambda order: sum(score[(b, a) if turn else (a, b)] for a, b in zip(few, order)))
    return {(b if turn else a): (a if turn else b) for a, b in zip(few, best)}


def _score(mark: str, name: str, pool: Pool) -> float:
    """How usual it is to call a part so."""
    if (mark, name) not in pool.usual:
        pool.usual[mark, name] = _usual(mark, name, pool)
    return pool.usual[mark, name]


def _usual(mark: str, name: str, pool: Pool) -> float:
    part = mark.rpartition(_MARK)[2].replace(".{n}", "")
    plain = re.sub(r"\.\{n\}", "", name)
    called = {re.sub(r"\.\{[eh]\}", "", known): count for known, count in pool.parts.get(part, {}).items()}
    if plain in called:
        return 3.0 + math.log(1 + called[plain])
    last = {known.rpartition(".")[2] for known in called}
    score = 2.0 if plain.rpartition(".")[2] in last else 0.0
    return score + max((difflib.SequenceMatcher(None, plain, known).ratio() for known in called), default=0.0)


def key_of(names: Names, config: ModelConfig) -> Key:
    """Return which of the variants a weight map is."""
    gated = 2 if config.mlp.gated else 1
    in_out = getattr(names.experts, "transposed", None)
    joined = len(names.qkv) == 1, len(names.fc1) == gated, len(names.shared_fc1) == gated or config.moe is None
    return (*joined, type(names.experts), in_out, names.transposed)


def _named(marked: Names, chosen: Mapping[str, str], layer: str) -> Names:
    """Return the marked names with what was chosen for each mark; without, the usual name stays."""
    usual = Names()

    def name(mark: str | None, default: Any, number: str = "{e}") -> Any:
        if mark is None:
            return None
        found = chosen.get(mark.replace("{e}", "{n}").replace("{h}", "{n}"))
        return default if found is None else found.replace("{n}", number)

    values: dict[str, Any] = {part: name(getattr(marked, part), getattr(usual, part)) for part in (*GLOBAL, *SINGLE)}
    values["norms"] = tuple(name(mark, mark and "input_layernorm") for mark in marked.norms)
    values["qk_norms"] = tuple(name(m, d, "{h}") for m, d in zip(marked.qk_norms, usual.qk_norms))
    joined = {"qkv": "self_attn.qkv_proj", "fc1": "mlp.up_proj", "shared_fc1": "mlp.shared_experts.up_proj"}
    for part, one in joined.items():
        marks, plain = getattr(marked, part), getattr(usual, part)
        plain = plain if len(plain) == len(marks) else (one,)
        found = tuple(map(name, marks, plain))
        values[part] = getattr(usual, part) if part == "shared_fc1" and found == plain else found
    kind = marked.experts
    if isinstance(kind, PerExpert):
        d = PerExpert()
        values["experts"] = PerExpert(*(name(getattr(kind, x), getattr(d, x)) for x in ("gate", "up", "down")))
    elif isinstance(kind, Fused):
        d2 = Fused()
        values["experts"] = replace(kind, fc1=name(kind.fc1, d2.fc1), fc2=name(kind.fc2, d2.fc2))
    if layer:
        values["layer"] = layer
    return replace(marked, **values)


def solve(
    config: ModelConfig, shapes: Shapes, pool: Pool, near: Names, keys: Collection[Key] | None = None
) -> list[tuple[Found, Key]]:
    """Return the weight maps for a configuration, those that leave the fewest tensors over first. keys: of the variants
    that are tried."""
    found = []
    for key, variant in variants(near, config, shapes):
        if keys is None or key in keys:
            fitted = fit(variant, config, shapes, pool, near)
            if fitted is not None:
                found.append((fitted, key))
    return sorted(found, key=lambda pair: pair[0].cost)


def unexplained(names: Names, config: ModelConfig, shapes: Shapes) -> tuple[list[str], list[str]]:
    """Return what a model needs and the files do not have with that shape, and what they have beside it."""
    try:
        stored = {n: s.shape for n, s in Family("candidate", "", (), names=names).namespace(config).stored.items()}
    except (CheckpointError, ValueError, IndexError) as error:
        return [str(error)], sorted(shapes)
    missing = [name for name, shape in stored.items() if shapes.get(name) != shape]
    return missing, [name for name, shape in shapes.items() if stored.get(name) != shape]
