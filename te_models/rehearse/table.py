"""An assignment of formats to layers as a [precision] table: a default recipe, and rules by glob.

What is written is read again: every layer resolves to its format, or it is an error of ours.
"""

from collections import Counter
from collections.abc import Mapping, Sequence

from te_models.layers.recipe.per_module import matches_pattern

from ..config.keys import toml_words
from ..training.config import PrecisionConfig
from ..training.precision import build_recipe
from .formats import FORMATS, HIGH, plain
from .observe import Unit

_LAYERS = "decoder.layers."


def precision_of(
    units: Sequence[Unit], formats: Sequence[str], base: PrecisionConfig, num_layers: int
) -> PrecisionConfig:
    """Return the [precision] keys that give each unit its format. formats: one for each unit; base: has the dtypes.

    The recipe is the most frequent format, or the one with options; ValueError for two different ones with options,
    because the table cannot have these.
    """
    counts = Counter(name for name in formats if name != HIGH)
    if not counts:
        return plain(base)
    special = [name for name in counts if FORMATS[name].options]
    if len(special) > 1:
        raise ValueError(f"formats with options are {', '.join(special)}; allowed: one of them")
    default = special[0] if special else max(counts, key=lambda name: counts[name])
    found = FORMATS[default].precision(base)
    assigned = {unit.name: name for unit, name in zip(units, formats, strict=True)}
    for first, last in (_ends(units, assigned, num_layers), (0, 0)):
        ends = {f"{_LAYERS}{i}" for i in (*range(first), *range(num_layers - last, num_layers))}
        rest = [unit for unit in units if unit.group not in ends]
        rules = _rules(units, rest, assigned, default)
        one = found.replace(first_layers_bf16=first, last_layers_bf16=last, overrides=tuple(rules))
        if resolved(units, one, num_layers) == list(formats):
            return one
    raise AssertionError("rules by name give each layer its format")


def resolved(units: Sequence[Unit], precision: PrecisionConfig, num_layers: int) -> list[str]:
    """Return the format that a [precision] table gives each unit, by the names of FORMATS; "?" for another one."""
    recipe = build_recipe(precision, num_layers)
    values = {name: f.value() for name, f in FORMATS.items()}
    found = []
    for unit in units:
        own = None if recipe is None else recipe.for_module(unit.name)
        found.append(HIGH if own is None else next((name for name, value in values.items() if value == own), "?"))
    return found


def _ends(units: Sequence[Unit], assigned: Mapping[str, str], num_layers: int) -> tuple[int, int]:
    """Return how many layers at the beginning and at the end are wholly in bf16; less than all."""
    whole = [
        all(assigned[u.name] == HIGH for u in units if u.group == f"{_LAYERS}{i}")
        and any(u.group == f"{_LAYERS}{i}" for u in units)
        for i in range(num_layers)
    ]
    first = next((i for i, high in enumerate(whole) if not high), num_layers)
    last = next((i for i, high in enumerate(reversed(whole)) if not high), num_layers)
    return (0, 0) if first == num_layers else (first, last)


def _rules(all_units: Sequence[Unit], units: Sequence[Unit], assigned: Mapping[str, str], default: str) -> list[str]:
    """Return "pattern=format" for the units whose format is not the default."""
    rules = []
    for name in dict.fromkeys(assigned[unit.name] for unit in units):
        if name == default:
            continue
        rest = [unit for unit in units if assigned[unit.name] == name]
        word = HIGH if name == HIGH else FORMATS[name].recipe
        for kind in dict.fromkeys(unit.kind for unit in rest):  # everywhere, also where the first and last rules say so
            alike = [unit for unit in all_units if unit.kind == kind]
            if len(alike) > 1 and all(assigned[unit.name] == name for unit in alike):
                pattern = f"*.{kind}"
                if all(unit.kind == kind for unit in all_units if matches_pattern(pattern, unit.name)):
                    rules.append(f"{pattern}={word}")
                    rest = [unit for unit in rest if unit.kind != kind]
        whole = [
            group
            for group in dict.fromkeys(unit.group for unit in rest)
            if group.startswith(_LAYERS) and all(assigned[u.name] == name for u in all_units if u.group == group)
        ]
        rules += [f"{_LAYERS}{number}.*={word}" for number in numbers(whole)]
        rest = [unit for unit in rest if unit.group not in whole]
        for kind in dict.fromkeys(unit.kind for unit in rest if unit.group.startswith(_LAYERS)):
            own = [unit.group for unit in rest if unit.kind == kind and unit.group.startswith(_LAYERS)]
            rules += [f"{_LAYERS}{number}.{kind}={word}" for number in numbers(own)]
        rules += [f"{unit.name}={word}" for unit in rest if not unit.group.startswith(_LAYERS)]
    return rules


def numbers(groups: Sequence[str]) -> list[str]:
    """Return globs of the numbers of decoder layers: "3", "[0-2]", "1[05-7]"."""
    tens: dict[str, list[int]] = {}
    for group in groups:
        number = group.removeprefix(_LAYERS)
        tens.setdefault(number[:-1], []).append(int(number[-1]))
    found = []
    for lead, digits in tens.items():
        digits.sort()
        runs: list[list[int]] = []
        for digit in digits:
            if runs and digit == runs[-1][-1] + 1:
                runs[-1].append(digit)
            else:
                runs.append([digit])
        words = (f"{r[0]}-{r[-1]}" if len(r) > 2 else "".join(map(str, r)) for r in runs)
        found.append(f"{lead}{digits[0]}" if len(digits) == 1 else f"{lead}[{''.join(words)}]")
    return found


def toml_of(precision: PrecisionConfig, evidence: Sequence[str]) -> str:
    """Return a [precision] table as TOML: the keys that differ from their defaults, and sentences as comments."""
    lines = [f"# {sentence}".rstrip() for sentence in evidence]
    lines.append("[precision]")
    defaults = PrecisionConfig().to_dict()
    for key, value in precision.to_dict().items():
        if value != defaults[key] or key in ("dtype", "recipe"):
            lines.append(f"{key} = {toml_words(value)}")
    return "\n".join(lines) + "\n"
