"""A norm under no_grad computes in every environment: by a library where one can be had, else by its definition,
counted and said once. Each environment is a process of its own.

The compilers are scripts, and the one that works copies a library that is there."""

import json
import os
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from te_models.kernels import cpp_cache, cpp_library
from te_models.kernels.cpu_rows import rows
from tests.fork_server import run_python

ANEW = "import tempfile\ntempfile.tempdir = None\n"  # the fork server has looked for one
NORM = """
import json, warnings
import torch
from te_models.kernels.backend import has_library
from te_models.kernels.cpu_rows import rows
from te_models.kernels.norm import op, reference
from te_models.kernels.quantize.cpu import rounding as shared
x = torch.randn(64, 1024)
with warnings.catch_warnings(record=True) as said, torch.no_grad():
    warnings.simplefilter("always")
    for _ in range(3):
        assert torch.equal(op.rms_norm(x, None, 1e-5), reference.rms_norm(x, None, 1e-5))
said, counted = [str(warning.message) for warning in said], dict(shared.fallbacks)
print(json.dumps({"loaded": has_library(rows.ROWS, x.dtype), "said": said, "fallbacks": counted}))
"""
IN_OWN_MOUNTS = """
import ctypes, sys
libc = ctypes.CDLL(None, use_errno=True)
def mount(kind, at, flags, data):
    return libc.mount(b"none", at.encode(), kind, flags, data)
# a name space of its own, whose mounts end with the process
if libc.unshare(0x20000) and libc.unshare(0x10020000) or mount(None, "/", 0x44000, None):
    print("null")
    sys.exit()
"""
READ_ONLY, NO_EXECUTION = 1, 8


def on_mount(folder: str, flags: int = 0, data: str = "") -> str:
    code = f"import os\nos.makedirs({folder!r}, exist_ok=True)\n"
    return code + IN_OWN_MOUNTS + f'assert not mount(b"tmpfs", {folder!r}, {flags}, {data.encode()!r})\n'


@dataclass
class Environment:
    """before: code that runs first; compiler: a script in place of the compiler's. loaded: whether the library is used
    in the end; says: what is said, once, if anything. HERE in all of them is the test's folder."""

    loaded: bool
    says: str = ""
    variables: dict[str, str] = field(default_factory=dict)
    before: str = ""
    compiler: str = 'for last; do :; done; /bin/cp HERE/library "$last"'


OWN = "compiled C++ functions are kept for this process alone: "
NONE = "a C++ function is missing, and what runs in its place takes longer: "
FAILS = f"{NONE}the C++ compiler HERE/compiler cannot compile a library: "
NOWHERE = "import tempfile\ntempfile._candidate_tempdir_list = list\n"
ABSENT = NONE + "there is no C++ compiler"
GARBLED = f"{NONE}what the C++ compiler HERE/compiler made cannot be loaded"
OPEN = "import os\nos.makedirs('HERE/cache/cpp')\nos.chmod('HERE/cache/cpp', 0o777)"
ALL, LAST = {"TE_MODELS_CACHE": "HERE/all/cache", "TMPDIR": "HERE/all"}, "for last; do :; done; "
CASES = {
    "all is well": Environment(True),
    "no execution from the cache": Environment(True, OWN, before=on_mount("HERE/cache", NO_EXECUTION)),
    "no execution from anywhere": Environment(False, NONE, ALL, on_mount("HERE/all", NO_EXECUTION)),
    "a full cache": Environment(True, OWN, before=on_mount("HERE/cache", data="size=16k")),
    "a cache without room for names": Environment(True, OWN, before=on_mount("HERE/cache", data="nr_inodes=2")),
    "all is full": Environment(False, NONE, ALL, on_mount("HERE/all", data="size=16k")),
    "a cache that cannot be written": Environment(True, OWN, before=on_mount("HERE/cache", READ_ONLY)),
    "a cache that is a file": Environment(True, OWN, {"TE_MODELS_CACHE": "HERE/library"}),
    "a cache in a file": Environment(True, OWN, {"TE_MODELS_CACHE": "HERE/library/cache"}),
    "a cache that all may write to": Environment(True, OWN + "others may write to", before=OPEN),
    "a cache by a relative path": Environment(
        True,
        OWN + "TE_MODELS_CACHE is 'cache'; allowed: an absolute path",
        {"TE_MODELS_CACHE": "cache"},
        "import os\nfrom te_models.kernels import machine\nos.mkdir('other')\nos.chdir('other')",
    ),
    "a current directory that was removed": Environment(
        True, before="import os\nos.mkdir('HERE/gone')\nos.chdir('HERE/gone')\nos.rmdir('HERE/gone')"
    ),
    "no home": Environment(
        True,
        OWN + "there is no home directory",
        {"TE_MODELS_CACHE": "", "HOME": ""},
        "import os, pwd\ndel os.environ['HOME']\ndef getpwuid(uid): raise KeyError(uid)\npwd.getpwuid = getpwuid",
    ),
    "a relative home": Environment(True, OWN + "there is no home directory", {"TE_MODELS_CACHE": "", "HOME": "home"}),
    "a home that cannot be made": Environment(True, OWN, {"TE_MODELS_CACHE": "", "HOME": "/proc/none"}),
    "a home that is no folder": Environment(True, OWN, {"TE_MODELS_CACHE": "", "HOME": "/dev/null"}),
    "no folder for temporary files": Environment(True, "", {"TMPDIR": "/proc/none"}, NOWHERE),
    "no folder for anything": Environment(
        False, f"{NONE}No usable temporary directory", {"TE_MODELS_CACHE": "/proc/none"}, NOWHERE
    ),
    "an open quote in CXX": Environment(
        False, NONE + "CXX is '\"g++', which is no command: No closing quotation", {"CXX": '"g++'}
    ),
    "a compiler that is not there": Environment(False, ABSENT, {"CXX": "no-such"}),
    "a compiler that is a folder": Environment(False, ABSENT, {"CXX": "/"}),
    "no PATH": Environment(False, ABSENT, {"CXX": ""}, "import os, shutil\nos.environ['PATH'] = '/proc/none'"),
    "a compiler that is no program": Environment(
        False, f"{NONE}the C++ compiler HERE/text did not run", {"CXX": "HERE/text"}
    ),
    "a compiler that writes garbage": Environment(False, GARBLED, compiler=LAST + 'echo garbage > "$last"'),
    "a compiler that writes half": Environment(
        False, GARBLED, compiler=LAST + '/usr/bin/head -c 100 HERE/library > "$last"'
    ),
    "a compiler that makes a folder": Environment(False, FAILS + "exit status 0", compiler=LAST + '/bin/mkdir "$last"'),
    "a compiler that does nothing": Environment(False, FAILS + "exit status 0", compiler="exit 0"),
    "a compiler that is killed": Environment(False, FAILS + "exit status -9", compiler="kill -9 $$"),
    "a compiler that fails in no encoding": Environment(
        False, FAILS + "\ufffd\ufffd is wrong", compiler="printf 'error: \\377\\376 is wrong' >&2; exit 1"
    ),
    "a compiler that warns in no encoding": Environment(
        True, compiler="printf '\\377\\376' >&2; " + Environment(True).compiler
    ),
    "a compiler that hangs": Environment(
        False,
        f"{NONE}the C++ compiler HERE/compiler was killed: it was not done after 0.3 seconds",
        before="from te_models.kernels import cpp_library\ncpp_library._SECONDS = 0.3",
        compiler="/bin/sleep 60 & wait",
    ),
    "no large file may be written": Environment(
        False, NONE, before="import resource\nresource.setrlimit(resource.RLIMIT_FSIZE, (8000, 8000))"
    ),
    "no more files may be open": Environment(
        False,
        NONE,
        before="import torch, resource\nfrom te_models.kernels.norm import op\n"
        "from te_models.kernels.cpu_rows import rows\nresource.setrlimit(resource.RLIMIT_NOFILE, (3, 3))",
    ),
    "a folder in the library's place": Environment(
        True,
        OWN,
        before="from te_models.kernels.cpp_library import _name, _source\n"
        "import os\n"
        "os.umask(0o77)\nos.makedirs('HERE/cache/cpp/' + _name(_source('rows.cpp', {'INPUT': 'Float32'})))",
    ),
}


@pytest.fixture(scope="module")
def library() -> Path:
    """The library of a norm of float32."""
    source = cpp_library._source("rows.cpp", {"INPUT": "Float32"})
    rows._function("te_rms_norm", torch.float32)
    return cpp_cache.shared_folder() / cpp_library._name(source)


@pytest.mark.parametrize("name", CASES)
def test_a_norm_in_a_broken_environment(name: str, library: Path, tmp_path: Path) -> None:
    case = CASES[name]

    def here(text: str) -> str:
        return text.replace("HERE", str(tmp_path))

    (tmp_path / "library").write_bytes(library.read_bytes())
    for file, text in (("compiler", "#!/bin/sh\n" + here(case.compiler)), ("text", "no program")):
        (tmp_path / file).write_text(text)
        (tmp_path / file).chmod(0o700)
    variables = {"TE_MODELS_CACHE": "HERE/cache", "CXX": "HERE/compiler", "PYTHONPATH": os.pathsep.join(sys.path)}
    variables = {key: here(value) for key, value in (variables | case.variables).items()}
    run = run_python(["-c", ANEW + here(case.before) + NORM], env=os.environ | variables, cwd=tmp_path, timeout=120)
    assert run.returncode == 0, run.stderr
    found: dict[str, Any] | None = json.loads(run.stdout)
    if found is None:
        pytest.skip("needs a name space for mounts")
    assert found["loaded"] == case.loaded
    assert [said.startswith(here(case.says)) for said in found["said"]] == [True] * bool(case.says), found["said"]
    assert found["fallbacks"] == ({} if case.loaded else {found["said"][0].removeprefix(NONE): 3})
    assert name == "no more files may be open" or not list(tmp_path.rglob("*.partial"))
