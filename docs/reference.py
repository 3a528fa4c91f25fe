"""The reference of the documentation site: every public name, grouped by what it is for, a page for each class.

A package's public names are those of its `__all__`, read from the source; the room that a name is imported from is its
group. The classes of a group have a page each, its functions and constants share one.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from .examples_of import examples

PACKAGES = (
    "te_models",
    "te_models.layers",
    "te_models.layers.ops",
    "te_models.layers.optimizers",
    "te_models.checkpoints",
    "te_models.parallel",
    "te_models.plan",
    "te_models.training",
    "te_models.hf",
    "te_models.lora",
    "te_models.config",
    "te_models.kernels.gemm",
    "te_models.kernels.grouped_gemm",
    "te_models.kernels.quantize",
    "te_models.kernels.custom_op",
)
_LEAST = 25
"""Public names from which a package is cut into groups."""


class Name(NamedTuple):
    """A public name. group: the room it comes from, "" in a package that is not cut; summary: its first sentence."""

    name: str
    group: str
    is_class: bool
    summary: str


def public_names(root: Path, package: str) -> list[str]:
    """Return `__all__` of a package, read from its `__init__.py`. root: the folder that holds the package te_models."""
    for node in _parsed(root / package.replace(".", "/") / "__init__.py").body:
        if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == "__all__" for t in node.targets):
            return list(ast.literal_eval(node.value))
    raise ValueError(f"{package} has no __all__ that can be read")


def names(root: Path, package: str) -> Iterator[Name]:
    """Yield the public names of a package with what the reference needs to know of them."""
    init = root / package.replace(".", "/") / "__init__.py"
    public = public_names(root, package)
    homes = _imports(init)
    for name in public:
        room = homes.get(name, "").partition(".")[0] if len(public) >= _LEAST else ""
        node = _definition(init, name)
        docstring = ast.get_docstring(node) if isinstance(node, (ast.ClassDef, ast.FunctionDef)) else ""
        summary = " ".join((docstring or "").split("\n\n")[0].split())
        yield Name(name, room.replace("_", " "), isinstance(node, ast.ClassDef), summary)


@functools.cache
def _parsed(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))


def _imports(file: Path) -> dict[str, str]:
    """Return name -> the module, relative to the file's package or its place in layers/te, that it is imported from."""
    found = {}
    for node in ast.walk(_parsed(file)):
        if isinstance(node, ast.ImportFrom) and node.level and node.module:
            home = node.module.removeprefix("te.").removeprefix(f"{file.parent.name}.")
            found |= {alias.asname or alias.name: home for alias in node.names}
    return found


def _definition(file: Path, name: str) -> ast.AST | None:
    """Return the class, function or assignment that a module's name means, through relative imports."""
    for node in _parsed(file).body:
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)) and node.name == name:
            return node
    for node in ast.walk(_parsed(file)):
        if isinstance(node, ast.ImportFrom) and node.level:
            for alias in node.names:
                if (alias.asname or alias.name) == name:
                    base = file.parents[node.level - 1].joinpath(*(node.module or "").split("."))
                    target = base / "__init__.py" if base.is_dir() else base.with_suffix(".py")
                    return _definition(target, alias.name) if target.exists() else None
    return None


def _entry(package: str, name: str, shown: dict[str, str]) -> str:
    example = f"\n**Example**\n\n```python\n{shown[name]}```\n" if name in shown else ""
    return f"::: {package}.{name}\n{example}"


def page_of(package: str, name: Name) -> str:
    """Return the path of the page, below docs/, that documents a public name."""
    group = f"{name.group or 'names'}".replace(" ", "-")
    return f"reference/{package}/{name.name if name.is_class else group}.md"


def write(root: Path, pages: Path) -> str:
    """Write the reference's pages below `pages`, and return their lines of the navigation. root: holds te_models."""
    lines = []
    for package in PACKAGES:
        shown = {name: example.code for example in examples(package) for name in example.names}
        found = list(names(root, package))
        lines.append(f"      - {package}:")
        (pages / "reference" / package).mkdir(parents=True)
        for group in dict.fromkeys(name.group for name in found):
            members = [name for name in found if name.group == group]
            overview = page_of(package, members[0]._replace(is_class=False))
            indent = " " * (12 if group else 10)
            if group:
                lines.append(f"          - {group}:")
            lines.append(f"{indent}- {overview}")
            (pages / overview).write_text(_overview(package, group, members, shown), encoding="utf-8")
            for name in (name for name in members if name.is_class):
                lines.append(f"{indent}- {name.name}: {page_of(package, name)}")
                text = f"---\nsearch:\n  boost: 2\n---\n\n{_entry(package, name.name, shown)}"
                (pages / page_of(package, name)).write_text(text, encoding="utf-8")
    return "".join(line + "\n" for line in lines)


def _overview(package: str, group: str, members: list[Name], shown: dict[str, str]) -> str:
    """Return the page of a group: a table of its names, then its functions and constants."""
    parts = [f"# {package}{': ' + group if group else ''}\n", "| name | what it is |", "|---|---|"]
    for name in members:
        link = f"[`{name.name}`]({name.name}.md)" if name.is_class else f"[`{name.name}`][{package}.{name.name}]"
        parts.append(f"| {link} | {name.summary.replace('|', '&#124;')} |")
    parts.append("")
    parts += [_entry(package, name.name, shown) for name in members if not name.is_class]
    return "\n".join(parts)
