"""What prose names in backticks exists: files, folders and modules in documents, docstrings and comments."""

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.structure.test_docs import PAGES
from tests.structure.tree import FOLDERS, ROOT, modules, parsed

TOP = (*FOLDERS, "tests", "docs", "bench", "examples")
"""Folders that a path in prose may begin with."""
PATH = re.compile(rf"(?:(?:{'|'.join(TOP)})/[\w./-]*|(?:[\w-]+/)*[\w-]+\.(?:py|cpp|h))$")
DOTTED = re.compile(r"te_models(?:\.\w+)+$")
PLACEHOLDER = re.compile(r"[A-Z]{3,}|\bx\b|\by\b|<|\*")
"""`checkpoints/families/NAME.py`, `kernels/x.py`: any of them."""
OF_OTHERS = {"torch.py", "numpy.py", "train.py"}
"""Names of files that users have."""


@functools.cache
def files() -> frozenset[str]:
    """Every path in the folders of the repository and, for each, its last parts: a/b/c.py, b/c.py and c.py."""
    paths = [path for folder in TOP for path in (ROOT / folder).rglob("*") if "__pycache__" not in path.parts]
    parts = [path.relative_to(ROOT).parts for path in paths]
    return frozenset("/".join(names[i:]) for names in parts for i in range(len(names))) | {*TOP}


def quoted(text: str) -> Iterator[str]:
    """Yield what a text has in single backticks, blocks of code left out."""
    yield from re.findall(
        r"(?<!`)`([^`\n]+)`(?!`)", re.sub(r"^ *```.*?^ *```", "", text, flags=re.DOTALL | re.MULTILINE)
    )


def prose(file: Path) -> str:
    """The docstrings and comments of a Python file."""
    source = file.read_text(encoding="utf-8")
    docs = [
        node.value.value
        for node in ast.walk(parsed(file))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
    ]
    return "\n".join([*docs, *re.findall(r"(?:^|\s)# (.*)$", source, re.MULTILINE)])


@functools.cache
def names_of(module: str) -> frozenset[str]:
    """Identifiers of a module and names that it imports or lists."""
    return frozenset(re.findall(r"\w+", modules()[module].read_text(encoding="utf-8")))


def exists(name: str) -> bool:
    """Whether a dotted name is a module, or a name in one, or an attribute of such a name."""
    known = modules()
    while name not in known and f"{name}.__init__" not in known:
        name, _, last = name.rpartition(".")
        module = name if name in known else f"{name}.__init__"
        if module in known:
            return last in names_of(module)
        if not name:
            return False
    return True


def is_there(path: str) -> bool:
    """Whether a path, or the end of one, is a file or folder; a module may come without its .py."""
    path = path.removesuffix("/")
    return path in files() or f"{path}.py" in files()


def stale(text: str) -> list[str]:
    """The paths and modules that a text names in backticks and that do not exist."""
    found = []
    for name in quoted(text):
        name = name.partition("#")[0].removesuffix("()")
        if PLACEHOLDER.search(name) or name in OF_OTHERS:
            continue
        if (PATH.match(name) and not is_there(name)) or (DOTTED.match(name) and not exists(name)):
            found.append(name)
    return found


def test_documents_name_what_exists() -> None:
    assert {page.name: names for page in PAGES if (names := stale(page.read_text(encoding="utf-8")))} == {}


def test_docstrings_and_comments_name_what_exists() -> None:
    found = {name: stale(prose(file)) for name, file in modules().items()}
    assert {name: names for name, names in found.items() if names} == {}


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("see `kernels/gemm/choice.py` and `te_models.kernels.gemm.choice.choose_gemm`", []),
        ("`kernels/gemm/chosen.py`", ["kernels/gemm/chosen.py"]),
        ("`te_models.kernels.gemm.chosen`", ["te_models.kernels.gemm.chosen"]),
        ("`te_models.kernels.gemm.choice.chooses`", ["te_models.kernels.gemm.choice.chooses"]),
        ("`checkpoints/plan/`", ["checkpoints/plan/"]),
        ("`checkpoints/families/NAME.py`", []),
        ("```sh\npython `gone.py`\n```", []),
    ],
)
def test_a_stale_name_is_found(text: str, names: list[str]) -> None:
    assert stale(text) == names
