"""Compilers have nothing to warn of in any library, and each file of C++ belongs to one that is compiled here."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from te_models.kernels import cpp_library

# -Wno-*: GCC 12 warns of variables in its own headers of intrinsics
WARNINGS = ("-Wall", "-Wextra", "-Wshadow", "-Werror", "-Wno-uninitialized", "-Wno-maybe-uninitialized")
BF16, F32, NARROW = {"INPUT": "BFloat16"}, {"INPUT": "Float32"}, {"NARROW": ""}
ROWS = [BF16, F32]
VECTORS = [*ROWS, BF16 | NARROW, F32 | NARROW]
PAIRS = [{"INPUT": x, "RESULT": y} for x in ("BFloat16", "Float32") for y in ("BFloat16", "Float32")]
BYTES = [x | {"FORMAT": name, "OF_BYTES": ""} for x in VECTORS for name in ("E4M3", "E5M2")]
INTEGERS = [x | {"FORMAT": name, "OF_INTEGERS": ""} for x in VECTORS for name in ("INT4", "INT8")]
LIBRARIES = {
    "adamw.cpp": PAIRS,
    "attention_backward.cpp": [*VECTORS, BF16 | {"FLOATS": ""}],
    "attention_forward.cpp": [*VECTORS, BF16 | {"FLOATS": ""}],
    "decode_attention.cpp": VECTORS,
    "few_rows.cpp": [*BYTES, BYTES[0] | {"DECODED": ""}, *(x | {"FORMAT": "E2M1"} for x in VECTORS), *INTEGERS],
    "fields.cpp": PAIRS[::3],
    "gemv.cpp": VECTORS,
    "moments.cpp": PAIRS[3:],
    "recurrent.cpp": VECTORS[1::2],
    "recurrent_step.cpp": VECTORS[1::2],
    "round_fp8.cpp": PAIRS,
    "round_nvfp4.cpp": PAIRS,
    "rows.cpp": ROWS,
    "sha256.cpp": [{}],
}
"""File -> the macros it is compiled with."""
CASES = [(file, macros) for file, several in LIBRARIES.items() for macros in several]

pytestmark = pytest.mark.skipif(
    not any(map(shutil.which, ("g++", "clang++", "c++"))), reason="the libraries are C++, and there is no compiler"
)


@pytest.fixture
def warnings_are_errors(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(cpp_library, "_FLAGS", (*cpp_library._FLAGS, *WARNINGS))
    cpp_library._command.cache_clear()
    yield
    cpp_library._command.cache_clear()


def compiles(file: str | Path, macros: dict[str, str], folder: Path) -> None:
    try:
        cpp_library._compile(cpp_library._source(file, macros), folder)
    except cpp_library.CompilationError as error:
        if "#error" not in str(error):
            raise
        pytest.skip(str(error))


def test_every_file_is_of_a_library() -> None:
    used = set()
    for file in LIBRARIES:
        used |= {path.name for path in cpp_library._files(cpp_library.FOLDER / file)}
    assert used == {path.name for path in cpp_library.FOLDER.iterdir()}
    assert {*LIBRARIES} == {path.name for path in cpp_library.FOLDER.glob("*.cpp")}


def test_the_smallest_library_has_no_warning(tmp_path: Path, warnings_are_errors: None) -> None:
    compiles("moments.cpp", PAIRS[3], tmp_path)
    wrong = tmp_path / "wrong.cpp"
    wrong.write_text("// A parameter without a use.\nint f(int x) { return 1; }\n")
    with pytest.raises(cpp_library.CompilationError, match=r"wrong\.cpp:2: unused parameter"):
        compiles(wrong, {}, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(("file", "macros"), CASES, ids=[f"{file}-{'-'.join(m.values())}" for file, m in CASES])
def test_no_library_has_a_warning(file: str, macros: dict[str, str], tmp_path: Path, warnings_are_errors: None) -> None:
    compiles(file, macros, tmp_path)
