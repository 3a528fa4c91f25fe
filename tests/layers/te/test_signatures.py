"""Every difference between our signatures and Transformer Engine's is listed with its reason, and none that is no more:
docs/te_deviations.json, which docs/porting.md shows.

    python -m tests.layers.te.test_signatures

lists what is found now. docs/te_signatures.py reads theirs from a wheel.
"""

import ast
import importlib
import inspect
import json
from collections.abc import Iterator
from typing import Any, Unpack, get_args, get_origin

import pytest

import te_models.layers as te
from docs.generate import DEVIATIONS
from docs.te_signatures import SIGNATURES

MODULES = {"ops.": "ops", "optimizers.": "optimizers", "recipe.": "recipe", "": ""}
PASSED_ON = {"ops.Linear": "ops.BasicLinear"}
"""Classes that hand their `**options` to another."""
_MISSING = object()
ANY = object()
"""The default of a key that may be absent."""


def theirs() -> dict[str, dict[str, list[list[Any]]]]:
    """Name -> method, "" for a function -> [name, kind, default] of each parameter."""
    found = json.loads(SIGNATURES.read_text(encoding="utf-8"))
    del found["version"]
    return found


def ours(name: str) -> Any:
    """What a script finds under a name of Transformer Engine's."""
    prefix, _, own = name.rpartition(".")
    module = importlib.import_module(".".join(["te_models.layers", *([prefix] if prefix else [])]))
    return getattr(module, own, _MISSING)


def deviations() -> Iterator[str]:
    """Yield every difference."""
    for name, methods in theirs().items():
        try:
            own = ours(name)
        except ModuleNotFoundError:
            own = _MISSING
        if own is _MISSING:
            yield f"{name}: no such name"
            continue
        for method, parameters in methods.items():
            function = own if not method else getattr(own, method, None)
            where = f"{name}.{method}" if method not in ("", "__init__") else name
            if function is None:
                yield f"{where}: no such method"
                continue
            found = _parameters(function)
            if name in PASSED_ON and method == "__init__":
                found = {k: p for k, p in found.items() if p.kind is not p.VAR_KEYWORD}
                passed_on = ours(PASSED_ON[name]).__init__
                found |= {k: p for k, p in _parameters(passed_on).items() if k not in found}
                function = passed_on
            taken = getattr(inspect.unwrap(function, stop=lambda f: hasattr(f, "also_taken")), "also_taken", {})
            for parameter, what in _compared(parameters, found, taken):
                yield f"{where}({parameter}): {what}"


def _parameters(function: Any) -> dict[str, inspect.Parameter]:
    """Return what a call may pass, the keys of an `Unpack`ed TypedDict among it."""
    found = dict(inspect.signature(function).parameters)
    if next(iter(found), "") == "self":
        del found["self"]
    for name, parameter in list(found.items()):
        if get_origin(parameter.annotation) is Unpack:
            del found[name]
            for key in get_args(parameter.annotation)[0].__annotations__:
                found[key] = inspect.Parameter(key, inspect.Parameter.KEYWORD_ONLY, default=ANY)
    return found


def _compared(
    parameters: list[list[Any]], found: dict[str, inspect.Parameter], taken: dict[str, str]
) -> Iterator[tuple[str, str]]:
    by_position = [p.name for p in found.values() if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    variadic = {p.kind for p in found.values()} & {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}
    names = [name for name, _, _ in parameters]
    for position, (name, kind, default) in enumerate(parameters):
        own = found.get(name)
        if kind == "*" and inspect.Parameter.VAR_POSITIONAL not in variadic:
            yield f"*{name}", "missing"
        if kind in ("*", "**"):
            continue
        here = by_position[position] if kind == "positional" and position < len(by_position) else None
        if own is None and default is None and here is not None and here not in names:
            yield name, f"name, {here} here"
        elif own is None:
            if name in taken:
                if taken[name] != "as there" and (kind == "positional" or taken[name] != "keyword only"):
                    yield name, taken[name]
            elif inspect.Parameter.VAR_KEYWORD not in variadic:
                yield name, "missing"
        if own is None:
            continue
        if kind == "positional" and (name not in by_position or by_position.index(name) != position):
            yield name, "keyword only" if own.kind is own.KEYWORD_ONLY else "position"
        if default is not None and own.default is own.empty:
            yield name, "required"
        elif default is not None and own.default is not ANY and _value(default) != _text(own.default):
            yield name, f"default, {_text(own.default)} instead of {_value(default)}"
    taken_by_position = {
        by_position[i] for i, p in enumerate(parameters) if p[1] == "positional" and i < len(by_position)
    }
    for name, own in found.items():
        required = own.default is own.empty and own.kind not in (own.VAR_POSITIONAL, own.VAR_KEYWORD)
        if required and name not in names and name not in taken_by_position:
            yield name, "required here alone"


def _value(source: str) -> str:
    """Return a default's source as `_text` writes values."""
    try:
        return repr(ast.literal_eval(source))
    except ValueError:
        return source


def _text(value: Any) -> str:
    if str(value) == "<required parameter>":  # of torch.optim
        return "required"
    return str(value) if "." in str(value) and not isinstance(value, (str, float, tuple)) else repr(value)


def listed() -> dict[str, list[str]]:
    """Reason -> the differences that it justifies."""
    return json.loads(DEVIATIONS.read_text(encoding="utf-8"))


def update() -> None:
    """Make the list of differences what is found."""
    found, before = list(deviations()), listed()
    known = {line for lines in before.values() for line in lines}
    now = {why: [line for line in lines if line in found] for why, lines in before.items()}
    now[""] = now.get("", []) + [line for line in found if line not in known]
    text = json.dumps({why: lines for why, lines in now.items() if lines}, indent=1)
    DEVIATIONS.write_text(f"{text}\n", encoding="utf-8")


def test_every_difference_is_listed_and_every_listed_one_exists() -> None:
    """Where this fails: python -m tests.layers.te.test_signatures, a reason for what is new, make docs."""
    found, known = list(deviations()), [line for lines in listed().values() for line in lines]
    assert len(set(known)) == len(known), "one reason each"
    missing, gone = sorted(set(found) - set(known)), sorted(set(known) - set(found))
    assert (missing, gone) == ([], [])


def test_every_reason_is_a_sentence() -> None:
    assert [why for why in listed() if not (why[:1].isupper() or why[:1] in "`t") or not why.endswith(".")] == []


def test_the_list_of_theirs_is_not_empty_by_accident() -> None:
    """Names, order and defaults as they are in the wheel that the list was read from."""
    signatures = theirs()
    assert len(signatures) > 120
    linear = [name for name, _, _ in signatures["Linear"]["__init__"]]
    assert linear[:4] == ["in_features", "out_features", "sequence_parallel", "fuse_wgrad_accumulation"]
    assert ["amax_history_len", "positional", "1024"] in signatures["recipe.DelayedScaling"]["__init__"]
    assert signatures["checkpoint"][""][1:] == [["args", "*", None], ["kwargs", "**", None]]
    assert {"ops.Sequential", "optimizers.FusedAdam", "router.fused_moe_aux_loss"} <= signatures.keys()


def test_names_that_are_not_here_say_what_is() -> None:
    names = [line.partition(":")[0] for lines in listed().values() for line in lines if line.endswith("no such name")]
    silent = []
    for name in names:
        prefix, _, own = name.rpartition(".")
        if prefix == "router":
            assert hasattr(te, own), "they are names of te_models.layers"
            continue
        with pytest.raises(AttributeError) as error:
            getattr(te.ops if prefix == "ops" else te, own)
        if f"{own!r}: " not in str(error.value):
            silent.append(name)
    assert silent == []


if __name__ == "__main__":
    update()
