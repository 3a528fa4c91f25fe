"""Imports point one way: kernels <- layers <- checkpoints <- te_models, read from the syntax tree of every file."""

import ast
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from tests.structure.tree import FOLDERS, LEAVES, ROOT, folder_of, modules, tree_of

CORE = {"torch", "safetensors"}


@dataclass(frozen=True)
class Import:
    """One imported name: dotted target, and how it was written."""

    target: str
    line: int
    relative: bool
    at_import_time: bool


@cache
@cache
def imports_of(source: str, module: str) -> list[Import]:
    """Every import in `source`, the text of `module` ("pkg.__init__" for a package); relative ones resolved."""

    def visit(node: ast.AST, at_import_time: bool) -> Iterator[Import]:
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(alias.name, node.lineno, False, at_import_time)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = module.split(".")
                assert node.level < len(parts), f"{module}:{node.lineno} leaves the package"
                base = ".".join([*parts[: len(parts) - node.level], *([base] if base else [])])
            for alias in node.names:
                yield Import(f"{base}.{alias.name}", node.lineno, node.level > 0, at_import_time)
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            for child in node.body:
                yield from visit(child, False)
            for child in node.orelse:
                yield from visit(child, at_import_time)
        else:
            inside = at_import_time and not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
            for child in ast.iter_child_nodes(node):
                if isinstance(child, (ast.stmt, ast.ExceptHandler, ast.match_case)):  # no expression imports
                    yield from visit(child, inside)

    return list(visit(tree_of(source), True))


def problems(module: str, source: str) -> list[str]:
    """What is wrong with the imports of one file."""
    folder, found = folder_of(module), []
    rank = list(FOLDERS).index
    for item in imports_of(source, module):
        top = item.target.split(".")[0]
        where = f"{module}:{item.line} imports {item.target}"
        if top != "te_models":
            if top == "triton" and folder != "kernels":
                found.append(f"{where}, but only kernels/ may import triton")
            elif folder == "kernels" and top not in sys.stdlib_module_names | {"torch", "triton"}:
                found.append(f"{where}, but kernels/ may import only torch and triton")
            elif item.at_import_time and top not in sys.stdlib_module_names | CORE | {"triton"}:
                found.append(f"{where} when it is imported; move it into the function that needs it")
            continue
        leaf = any(_in(item.target, name) for name in LEAVES)
        own_leaf = next((name for name in LEAVES if _in(module, name)), None)
        if own_leaf is not None and not _in(item.target, own_leaf):
            found.append(f"{where}, but it is a leaf")
        elif leaf and folder != "te_models":
            if item.relative:
                found.append(f"{where} relatively, across folders")
        elif _in(item.target, "te_models.hf") and item.at_import_time and not _in(module, "te_models.hf"):
            found.append(f"{where} when it is imported, but it needs transformers")
        elif rank(folder_of(item.target)) > rank(folder):
            found.append(f"{where}, but {folder}/ may not import {folder_of(item.target)}/")
        elif item.relative != (folder_of(item.target) == folder):
            found.append(f"{where}: relative imports inside a folder, absolute ones across folders")
    return found


def _in(module: str, package: str) -> bool:
    return module == package or module.startswith(f"{package}.")


def test_imports() -> None:
    found = {name: problems(name, file.read_text(encoding="utf-8")) for name, file in modules().items()}
    assert [problem for problems in found.values() for problem in problems] == []


@pytest.mark.parametrize(
    ("module", "source", "says"),
    [
        ("te_models.kernels.norm.op", "from te_models.layers import Linear", "may not import layers/"),
        ("te_models.kernels.norm.op", "import te_models.checkpoints.mapping.plan", "may not import checkpoints/"),
        ("te_models.layers.module.norm", "from te_models import checkpoints", "may not import checkpoints/"),
        ("te_models.layers.module.norm", "from te_models.model import GPTModel", "may not import te_models/"),
        ("te_models.layers.module.linear", "def f():\n    from ...model import GPTModel", "may not import te_models/"),
        ("te_models.layers.module.norm", "from ...kernels import norm", "absolute ones across"),
        ("te_models.layers.module.norm", "from te_models.layers.module import x", "relative imports inside"),
        ("te_models.layers.module.linear", "def f():\n    import triton", "only kernels/"),
        ("te_models.kernels.norm.op", "def f():\n    import transformers", "only torch and triton"),
        ("te_models.model", "import transformers", "move it into the function"),
        ("te_models.model", "try:\n    import tqdm\nexcept ImportError:\n    pass", "move it into the function"),
        ("te_models.cli.main", "from ..hf import TEConfig", "it needs transformers"),
        ("te_models.extras", "from . import config", "it is a leaf"),
        ("te_models.config.rope", "from ..extras import require", "it is a leaf"),
        ("te_models.checkpoints.mapping.plan", "from ...config import ModelConfig", "relatively, across folders"),
    ],
)
def test_a_wrong_import_is_found(module: str, source: str, says: str) -> None:
    assert len(problems(module, source)) == 1 and says in problems(module, source)[0]


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("te_models.kernels.norm.op", "import math, torch\nfrom . import reference\nfrom ..gemm.op import gemm"),
        ("te_models.kernels.norm.triton", "import triton.language as tl"),
        ("te_models.layers.module.norm", "from te_models.kernels import norm\nimport te_models.config"),
        ("te_models.model", "from .config import ModelConfig\nfrom te_models.layers import Linear"),
        ("te_models.config.rope", "from .part import check"),
        ("te_models.model", "def f():\n    import transformers"),
        ("te_models.model", "if TYPE_CHECKING:\n    import transformers"),
    ],
)
def test_a_right_import_passes(module: str, source: str) -> None:
    assert problems(module, source) == []


def test_tests_and_benchmarks_use_import_names() -> None:
    """`import kernels` from the repository root would be a second copy of te_models.kernels."""
    bare = set(FOLDERS) - {"te_models"}
    written = re.compile(
        rf"\bfrom\s+({'|'.join(bare)})\b|\bimport\b.*\b({'|'.join(bare)})\b"
    )  # only such files are parsed
    for folder in ("tests", "bench"):
        for file in sorted((ROOT / folder).rglob("*.py")):
            name = ".".join(Path(file.relative_to(ROOT)).with_suffix("").parts)
            source = file.read_text(encoding="utf-8")
            for item in imports_of(source, name) if written.search(source) else ():
                assert item.target.split(".")[0] not in bare, f"{name}:{item.line} imports {item.target}"
