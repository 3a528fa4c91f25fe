"""Processes are started by te_models/child_process.py alone, which lets none run what lies in the current directory."""

import ast
import re
from collections.abc import Iterator

import pytest

from tests.structure.tree import modules

HELPER = "te_models.child_process"
MODULES = {
    *("subprocess", "multiprocessing", "torch.multiprocessing", "concurrent.futures.process", "pty", "popen2"),
    *("webbrowser", "ctypes.util", "ensurepip", "pip", "venv", "torch.distributed.run", "torch.utils.cpp_extension"),
}
"""Modules whose functions start programs: `ctypes.util.find_library` asks the compiler and ldconfig."""
NAMES = {
    *("ProcessPoolExecutor", "create_subprocess_exec", "create_subprocess_shell", "subprocess_exec"),
    *("find_library", "get_context", "start_processes", "load_inline", "DataLoader", "resource_tracker"),
}
OF_OS = ("system", "popen", "exec", "spawn", "posix_spawn", "fork", "startfile")
"""Functions of os that begin so."""
MENTIONED = re.compile(
    rf"\b(?:from|import) +(?:os|sys|platform)[. ]|\bos\.(?:{'|'.join(OF_OS)})|\bexecutable\b|\bprocessor\b"
    rf"|\b(?:{'|'.join(sorted({name.rpartition('.')[2] for name in MODULES} | NAMES))})\b"
)
"""A file without any of these words need not be parsed."""
HARMLESS = {"te_models.plan.process": ("multiprocessing.connection",)}
"""Who uses what of these modules that starts nothing: pipes to the helper's forks."""


def starts(source: str) -> Iterator[str]:
    """What of a file could start a process, or hand one a path."""
    tree = ast.parse(source)
    guarded = [
        node for node in ast.walk(tree) if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
    ]
    types_only = {child.lineno for node in guarded for child in node.body}
    for node in ast.walk(tree):
        if getattr(node, "lineno", 0) in types_only:
            continue
        if isinstance(node, ast.Import):
            names = {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names = {node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)}
            names |= {alias.name for alias in node.names} & NAMES
        elif isinstance(node, ast.Attribute):
            of_os = isinstance(node.value, ast.Name) and node.value.id == "os" and node.attr.startswith(OF_OS)
            names = {f"os.{node.attr}"} if of_os else {node.attr} & NAMES
            if node.attr in ("executable", "processor"):
                names |= {ast.unparse(node)} & {"sys.executable", "platform.processor"}
        else:
            continue
        for name in names:
            inside = any(name == module or name.startswith(f"{module}.") for module in MODULES)
            if inside or name in NAMES or name.startswith(("os.", "sys.", "platform.")):
                yield f"{node.lineno}: {name}"


def test_one_module_starts_processes() -> None:
    found = {}
    for name, file in modules().items():
        source = file.read_text(encoding="utf-8")
        allowed = HARMLESS.get(name, ())
        found_here = starts(source) if MENTIONED.search(source) else ()
        lines = [line for line in found_here if not line.partition(": ")[2].startswith(allowed)]
        if lines and name != HELPER:
            found[name] = lines
    assert found == {}


def test_the_helper_starts_interpreters_isolated() -> None:
    """Every command that begins with the interpreter has the option, which leaves the current directory alone."""
    source = modules()[HELPER].read_text(encoding="utf-8")
    commands = [
        [ast.unparse(element) for element in node.elts[:2]]
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.List) and node.elts and ast.unparse(node.elts[0]) == "sys.executable"
    ]
    assert commands == [["sys.executable", "'-I'"]] * 2


@pytest.mark.parametrize(
    "source",
    [
        "import subprocess",
        "def f():\n    from subprocess import run",
        "import torch.multiprocessing as mp",
        "from multiprocessing import Pool",
        "from concurrent.futures import ProcessPoolExecutor",
        "import concurrent.futures\nconcurrent.futures.ProcessPoolExecutor()",
        "import os\nos.execv('/bin/sh', [])",
        "import os\nos.posix_spawn",
        "import os\nos.fork()",
        "import sys\ncommand = [sys.executable]",
        "from ctypes.util import find_library",
        "import ctypes.util",
        "from torch.utils.data import DataLoader",
        "import platform\nplatform.processor()",
    ],
)
def test_a_start_is_found(source: str) -> None:
    assert list(starts(source))


def test_what_starts_nothing_passes() -> None:
    source = (
        "import os, sys, ctypes, platform\nfrom concurrent.futures import ThreadPoolExecutor\nos.fsync(1); sys.argv"
    )
    assert list(starts(source)) == []
