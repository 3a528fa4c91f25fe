"""The repository as the structure tests see it: folders, import names, modules."""

import ast
import functools
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = {
    "kernels": "te_models.kernels",
    "layers": "te_models.layers",
    "checkpoints": "te_models.checkpoints",
    "te_models": "te_models",
}
"""Folder: import name, in the order in which they may import each other."""
LEAVES = {
    f"te_models.{name}"
    for name in ("child_process", "config", "extras", "file_lock", "lazy", "memory", "sizes", "suggestions")
}
"""Modules and packages that import nothing else of the project and that every folder may import."""


def pyproject() -> dict:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


@functools.cache
def modules() -> dict[str, Path]:
    """Import name (a package's ends in ".__init__"): file, for every Python file of the four folders."""
    found = {}
    for folder, package in FOLDERS.items():
        for file in sorted((ROOT / folder).rglob("*.py")):
            relative = file.relative_to(ROOT / folder).with_suffix("")
            found[".".join([package, *relative.parts])] = file
    return found


def data_files() -> dict[str, Path]:
    """Name in the wheel: file, for all that is packaged beside Python files."""
    cpp = {f"te_models/kernels/cpp/{file.name}": file for file in sorted((ROOT / "kernels/cpp").iterdir())}
    models = {f"te_models/catalogue/data/{file.name}": file for file in (ROOT / "te_models/catalogue/data").iterdir()}
    return {"te_models/py.typed": ROOT / "te_models/py.typed"} | cpp | models


def packages() -> set[str]:
    """Import names of the folders that hold Python files."""
    return {name.rpartition(".")[0] for name in modules()}


def folder_of(module: str) -> str:
    """The folder that owns the module of this import name."""
    second = module.partition(".")[2].partition(".")[0]
    return second if second in FOLDERS and second != "te_models" else "te_models"


@functools.cache
def tree_of(source: str) -> ast.Module:
    """The syntax tree of a text, made once."""
    return ast.parse(source)


def parsed(file: Path) -> ast.Module:
    """The syntax tree of a file."""
    return tree_of(file.read_text(encoding="utf-8"))
