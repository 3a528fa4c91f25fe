"""A family as the text of one file: what a person would have written, from the values of the declaration."""

import inspect
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from typing import Any

from te_models.checkpoints import FAMILIES
from te_models.checkpoints.families.base import common
from te_models.checkpoints.families.base.common import ACTIVATIONS, decoder_fields
from te_models.checkpoints.families.base.family import Family
from te_models.checkpoints.families.base.fields import REQUIRED, Choice, Entry, Field, Fixed, Renamed
from te_models.checkpoints.families.base.names import Names
from te_models.checkpoints.families.base.text_part import TextPart, text_part

from ..extras import require

WIDTH = 120
_DEFAULTS = {
    "norm.layernorm_epsilon": "norm_eps",
    "max_position_embeddings": "max_positions",
    "embedding.share_embeddings_and_output_weights": "tied",
    "init_method_std": "init_std",
    "attention.attention_dropout": "dropout",
}
"""Path of a field -> the argument of `decoder_fields` that says its default."""


class Writer:
    """Source of values, and the imports that they need."""

    def __init__(self) -> None:
        self.imports: dict[str, set[str]] = {}

    def use(self, name: str, module: str) -> str:
        """Return a name, imported from a module."""
        self.imports.setdefault(module, set()).add(name)
        return name

    def call(self, name: str, arguments: list[str], indent: int, *, star: bool = False) -> str:
        """Return a call, over several lines where one is too long."""
        lead = "*" if star else ""
        line = f"{lead}{name}({', '.join(arguments)})"
        if indent + len(line) + 1 <= WIDTH and "\n" not in line:
            return line
        inner = " " * (indent + 4)
        joined = "".join(f"{inner}{argument},\n" for argument in arguments)
        return f"{lead}{name}(\n{joined}{' ' * indent})"

    def value(self, value: Any, indent: int = 0) -> str:
        """Return the source of a value."""
        if value is REQUIRED:
            return self.use("REQUIRED", common.__name__.replace(".common", ".fields"))
        if value == ACTIVATIONS and isinstance(value, dict):
            return self.use("ACTIVATIONS", common.__name__)
        if isinstance(value, type):
            return value.__name__
        if is_dataclass(value):
            return self.instance(value, indent)
        if isinstance(value, tuple):
            items = [self.value(item, indent + 4) for item in value]
            return f"({', '.join(items)}{',' if len(items) == 1 else ''})"
        if isinstance(value, list):
            return f"[{', '.join(self.value(item, indent + 4) for item in value)}]"
        if isinstance(value, Mapping):
            items = [f"{self.value(k)}: {self.value(v, indent + 4)}" for k, v in value.items()]
            return f"{{{', '.join(items)}}}"
        if isinstance(value, str):
            return '"' + repr(value)[1:-1].replace('"', '\\"') + '"'
        if callable(value):
            if value.__name__ == "<lambda>" or "<locals>" in value.__qualname__:
                raise LookupError("a function without a name")
            return self.use(value.__name__, value.__module__)
        return repr(value)

    def instance(self, value: Any, indent: int) -> str:
        """Return the source of an entry, or of names: arguments that are not the default."""
        if type(value) is type(common.ATTENTION_BIAS) and value == common.ATTENTION_BIAS:
            return self.use("ATTENTION_BIAS", common.__name__)
        arguments, positional = [], not isinstance(value, Names | Family)
        for f in fields(value):
            current = getattr(value, f.name)
            default = f.default if f.default is not MISSING else None
            if f.default_factory is not MISSING:
                default = f.default_factory()
            required = f.default is MISSING and f.default_factory is MISSING
            if not required and current == default and type(current) is type(default):
                positional = False
                continue
            text = self.value(current, indent + 4)
            arguments.append(text if positional else f"{f.name}={text}")
        return self.call(self.use(type(value).__name__, type(value).__module__), arguments, indent)

    def entry(self, entry: Entry, indent: int) -> str:
        """Return the source of an entry; one that holds a function without a name is that of the family that has it."""
        try:
            return self.value(entry, indent)
        except LookupError:
            inner = entry
            for name, family in FAMILIES.items():
                if inner in family.fields and inner.names:
                    module = inspect.getmodule(type(family)).__name__.rpartition(".base.")[0]  # type: ignore[union-attr]
                    constant = self.use(name.upper(), f"{module}.{FAMILIES.file_of(name)}")
                    return f'next(entry for entry in {constant}.fields if "{inner.names[0]}" in entry.names)'
            raise


def usual_decoder(entries: tuple[Entry, ...]) -> tuple[dict[str, Any], dict[str, str], list[Entry]]:
    """Return the arguments of `decoder_fields`, the fields that have other names, and which entries it then is."""
    others: dict[str, str] = {}
    plain: dict[int, Any] = {}
    for i, entry in enumerate(entries):
        inner: Any = entry.entry if isinstance(entry, Renamed) else entry
        plain[i] = inner
    arguments: dict[str, Any] = {"max_positions": 2048}
    for entry in plain.values():
        if isinstance(entry, Field) and entry.path in _DEFAULTS and entry.default is not REQUIRED:
            arguments[_DEFAULTS[entry.path]] = entry.default
        if isinstance(entry, Field) and entry.path == "norm.layernorm_epsilon":
            arguments["norm_name"] = entry.hf
        if isinstance(entry, Choice) and entry.path == "mlp.activation":
            arguments |= {"activation": entry.default, "activation_name": entry.hf, "activations": entry.values}
        if type(entry).__name__ == "KeyValueHeads":
            arguments["kv_heads"] = entry.default
        if type(entry).__name__ == "HeadDim":
            arguments["head_dim"] = entry.default
        if type(entry).__name__ == "PaddingIdx":
            arguments["pad"] = entry.default
    usual = decoder_fields(**arguments)
    found = [e for e in plain.values() if e in usual]
    without = tuple(e.names[0] if e.names else "pad_token_id" for e in usual if e not in found)
    for entry in entries:
        if isinstance(entry, Renamed) and entry.entry in usual:
            others |= dict(entry.others)
    signature = inspect.signature(decoder_fields).parameters
    arguments = {k: v for k, v in arguments.items() if k == "max_positions" or v != signature[k].default}
    if without:
        arguments["without"] = without
    return arguments, others, [e for e, inner in zip(entries, plain.values()) if inner in usual]


def family_source(family: Family, near: str, note: str) -> str:
    """Return the text of a family's file."""
    part = text_part(family)
    if part is not None:
        return _source_around(family, part, near, note)
    writer = Writer()
    base = common.__name__.rpartition(".")[0]
    writer.use("Family", f"{base}.family")
    lines: list[str] = []
    arguments, others, decoder = usual_decoder(family.fields)
    rest = list(family.fields)
    if len(decoder) >= 6:
        rest = [e for e in rest if e not in decoder]
        writer.use("decoder_fields", common.__name__)
        text = [f"{name}={writer.value(v, 12)}" for name, v in arguments.items()]
        call = writer.call("decoder_fields", text, 8, star=not others)
        if others:
            writer.use("renamed", f"{base}.fields")
            call = writer.call("renamed", [call, writer.value(others, 12)], 8, star=True)
        lines.append(call)
    lines += [writer.entry(entry, 8) for entry in sorted(rest, key=lambda e: isinstance(e, Fixed))]
    body = [
        f'    model_type="{family.model_type}",',
        f'    architecture="{family.architecture}",',
        "    fields=(",
        *(f"        {line}," for line in lines),
        "    ),",
    ]
    for f in fields(family):
        if f.name in ("model_type", "architecture", "fields"):
            continue
        current = getattr(family, f.name)
        if current == f.default:
            continue
        if f.name == "other_names":
            forms = [_form(writer, names, family.names) for names in current]
            body.append(f"    other_names=({' '.join(form + ',' for form in forms)}),")
        else:
            body.append(f"    {f.name}={writer.value(current, 4)},")
    constant = family.model_type.upper().replace("-", "_")
    forms_first = []
    if any("_NAMES" in line for line in body):
        forms_first = [f"_NAMES = {writer.value(family.names, 0)}", ""]
        body = ["    names=_NAMES," if line.startswith("    names=") else line for line in body]
    imports = [
        f"from {module} import {', '.join(sorted(names))}"
        for module, names in sorted(writer.imports.items())
        if module != "builtins"
    ]
    head = f'"""{family.model_type}: {note}"""'
    text_lines = [
        *_wrapped(head),
        "",
        *imports,
        "",
        *forms_first,
        f"{constant} = Family(",
        *body,
        ")",
    ]
    return formatted("\n".join(text_lines) + "\n")


def _source_around(family: Family, part: TextPart, near: str, note: str) -> str:
    """Return the text of the file of models around a text model."""
    writer, (text, *_) = Writer(), part.families
    base = common.__name__.rpartition(".")[0]
    writer.use("Family", f"{base}.family")
    writer.use("TextPart", f"{base}.text_part")
    inner = text.model_type.upper().replace("-", "_")
    before = ""
    if FAMILIES.get(text.model_type) is text:
        writer.use(inner, f"{base.rpartition('.')[0]}.{FAMILIES.file_of(text.model_type)}")
    else:
        before = family_source(text, near, note).partition('"""\n\n')[2]
    arguments = [f"({inner},)", writer.value(dict(part.defaults), 8), f"tied_outside={part.tied_outside}"]
    arguments += [] if part.kind is None else [f"kind={writer.value(part.kind)}"]
    body = [f'    model_type="{family.model_type}",', f'    architecture="{family.architecture}",']
    body.append(f"    fields=({writer.call('TextPart', arguments, 8)},),")
    for name in ("names", "other_names", "unused", "keeps_dtype"):
        body.append(f"    {name}={writer.value(getattr(family, name), 4)},")
    imports = [f"from {module} import {', '.join(sorted(names))}" for module, names in sorted(writer.imports.items())]
    head = [*_wrapped(f'"""{family.model_type}: {note}"""'), ""]
    constant = family.model_type.upper().replace("-", "_")
    return formatted("\n".join([*head, *imports, before, f"{constant} = Family(", *body, ")"]) + "\n")


def _form(writer: Writer, names: Names, first: Names) -> str:
    writer.use("replace", "dataclasses")
    changed = [f for f in fields(names) if getattr(names, f.name) != getattr(first, f.name)]
    return f"replace(_NAMES, {', '.join(f'{f.name}={writer.value(getattr(names, f.name), 8)}' for f in changed)})"


def _wrapped(text: str) -> list[str]:
    lines, line = [], ""
    for word in text.split(" "):
        if len(line) + len(word) + 1 > WIDTH:
            lines.append(line)
            line = word
        else:
            line = f"{line} {word}" if line else word
    return [*lines, line]


def formatted(text: str) -> str:
    """Return a file's text with the lines of its longest calls broken, as `ast` reads it the same."""
    lines = []
    for line in text.split("\n"):
        lines += _broken(line) if len(line) > WIDTH and line.rstrip().endswith(("),", "}),", "),)")) else [line]
    compile("\n".join(lines), "<family>", "exec")
    return "\n".join(lines)


def _broken(line: str) -> list[str]:
    """Return a call that is too long for one line with each argument on a separate line."""
    indent = len(line) - len(line.lstrip())
    opened = line.find("(")
    depth, quoted, parts, part = 0, False, [], ""
    end = line.rstrip().rfind(")")
    for character in line[opened + 1 : end]:
        quoted ^= character == '"'
        if not quoted:
            depth += (character in "([{") - (character in ")]}")
        if character == "," and depth == 0 and not quoted:
            parts.append(part.strip())
            part = ""
        else:
            part += character
    parts.append(part.strip())
    inner = " " * (indent + 4)
    lines = [line[: opened + 1], *(f"{inner}{p}," for p in parts if p), " " * indent + line[end:].rstrip()]
    return [b for one in lines for b in (_broken(one) if len(one) > WIDTH and one.rstrip().endswith("),") else [one])]


def test_source(family: Family, sizes: Mapping[str, Any], cases: Mapping[str, Mapping[str, Any]], file: str) -> str:
    """Return the text of a family's test: small models with each field moved, against transformers."""
    transformers = require("transformers", "hf", feature="adopt")
    writer = Writer()
    rows = [f"    {writer.value(name)}: {writer.value(dict(values))}," for name, values in cases.items()]
    constant = family.model_type.upper().replace("-", "_")
    return formatted(
        _TEST.format(
            type=family.model_type,
            version=transformers.__version__,
            rows="\n".join(rows),
            sizes="\n".join(f"    {writer.value(name)}: {writer.value(value)}," for name, value in sizes.items()),
            file=file.removesuffix(".py"),
            constant=constant,
        )
    )


_TEST = '''"""{type} against transformers {version}: logits with each field moved, and the configuration written."""

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from te_models.adopt import known_type, outcome

SIZES: dict[str, Any] = {{
{sizes}
}}
"""What a small model is made with; sizes that shapes tell apart."""
CASES: dict[str, dict[str, Any]] = {{
{rows}
}}
"""The fields that are moved."""


def family() -> Any:
    """The declaration in the file beside this one."""
    spec = importlib.util.spec_from_file_location("{file}", Path(__file__).with_name("{file}.py"))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.{constant}


@pytest.mark.parametrize("seed", [0, 7])
@pytest.mark.parametrize("case", CASES)
def test_logits(case: str, seed: int) -> None:
    """1e-5 of the largest logit in float32, of rows of 1, 4 and 23 tokens."""
    built = known_type("{type}").build({{**SIZES, **CASES[case]}}, seed=seed)
    assert outcome(family(), built, seed=seed)[0] == "same", outcome(family(), built, seed=seed)


@pytest.mark.parametrize("case", CASES)
def test_the_configuration_written_again_is_the_same_model(case: str) -> None:
    declared, values = family(), known_type("{type}").file_of({{**SIZES, **CASES[case]}})
    config = declared.read_config(values)
    assert declared.read_config(declared.write_config(config)) == config
'''
