"""The rooms inside the folders: how many files each holds, in which order they import each other, and their names.

docs/layout.md says what lives where. A room may import the rooms before it, lazy and type-only imports included."""

import ast
import importlib
import re
from collections import Counter
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from statistics import median

import pytest

from tests.structure.test_imports import imports_of
from tests.structure.tree import FOLDERS, ROOT, modules, parsed

ROOMS = {
    "te_models.checkpoints": "io mapping families formats folder write quantized foreign tools",
    "te_models.layers": "collectives quantizer tensor recipe dynamo gemm distributed module "
    "attention optimizers te ops utils",
    "te_models.kernels": "launch derivative torch_versions without_autocast asserted custom_op quantize",
}
"""The rooms of a folder in the order in which they may import each other."""
PORCH = "te_models.layers.te"
"""What exists because Transformer Engine has it: nothing of the core imports it."""
DOORS = {f"te_models.layers.{name}__init__" for name in ("", "ops.", "optimizers.", "recipe.", "utils.")}
"""Where users import its names: the module paths of Transformer Engine."""
MOST_FILES = 20
BANNED = {
    "te_models": {
        *("rung", "rungs", "handover", "handed_over", "preceded_linear", "given_rows", "raise_", "stored_form"),
        *("given", "taken", "made", "turned", "kept", "Side", "sides", "anew", "lying"),
        *("serves", "worthwhile", "ready", "stores", "reads"),  # a predicate is a question: is_, has_, uses_
    },
    "te_models.layers": {
        *("Kept", "kept", "keep", "keep_weight", "kept_weight", "Side", "side", "sides", "turned", "How", "how"),
        *("LiveState", "RowGroups", "noted", "note_statistics", "given", "taken", "made", "handed_out"),
    },
    "te_models.checkpoints": {
        *("carried", "fitting", "origin", "meter", "anew", "lying", "made", "taken", "given", "kept")
    },
}
"""Package -> identifiers that say less than the field's own words (CONTRIBUTING.md)."""


CPP = re.compile(r"^ *#include [<\"]|extern \"C\"|__global__|^[^\n:#]+;$\n^ *\}$|^#pragma ", re.MULTILINE)
LIKE_CPP = re.compile(r"#include|\bextern\b|__global__|#pragma|;(?:\\n|\n) *\}")
"""A file without any of this need not be parsed."""
OF_ONE_OPERATION = "reference|triton|chunked|library"
"""Files of an operation in kernels/ that nothing but the operation imports."""
TEXT_OR_COMMENT = re.compile(
    r'''(\b[fF][rR]?|\b[rR][fF])?(?:"""[\s\S]*?"""|"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*')|#.*'''
)


def identifiers(source: str) -> set[str]:
    """The words outside of comments and texts, but for those with fields: without a banned one, a file need not be
    parsed."""
    return set(re.findall(r"\w+", TEXT_OR_COMMENT.sub(lambda found: found[0] if found[1] else "", source)))


def room_of(module: str, package: str) -> str:
    return module.removeprefix(f"{package}.").partition(".")[0]


def test_a_room_imports_only_the_rooms_before_it() -> None:
    found = []
    for package, rooms in ROOMS.items():
        order = {room: i for i, room in enumerate(rooms.split())}
        for module, file in modules().items():
            own = order.get(room_of(module, package)) if module.startswith(f"{package}.") else None
            if own is None:
                continue
            for item in imports_of(file.read_text(encoding="utf-8"), module):
                other = room_of(item.target, package) if item.target.startswith(f"{package}.") else ""
                if order.get(other, own) > own and not (module in DOORS and other == room_of(PORCH, package)):
                    found.append(f"{module}:{item.line} imports {item.target}")
    assert found == []


@cache
def offered_by_the_porch() -> set[str]:
    """Import names of what the doors have from the porch."""
    found = set()
    for door in DOORS:
        for item in imports_of(modules()[door].read_text(encoding="utf-8"), door):
            if item.target.startswith(f"{PORCH}."):
                found.add(f"{door.removesuffix('.__init__')}.{item.target.rpartition('.')[2]}")
    return found


def imports_of_the_porch(module: str, source: str) -> list[str]:
    """What a file imports of the porch, by its place or by a name that a door offers."""
    rooms = (PORCH, "te_models.layers.ops", "te_models.layers.utils")
    return [
        f"{module}:{item.line} imports {item.target}"
        for item in imports_of(source, module)
        if f"{item.target}.".startswith(tuple(f"{room}." for room in rooms)) or item.target in offered_by_the_porch()
    ]


def test_the_core_and_the_models_do_not_import_the_porch() -> None:
    for source in ("from ..te import names", "from .. import TransformerLayer", "from ..optimizers import FusedAdam"):
        assert imports_of_the_porch("te_models.layers.module.linear", source)
    core = [
        name
        for name in modules()
        if name.startswith(("te_models.kernels.", "te_models.layers.", "te_models.model."))
        and not name.startswith(f"{PORCH}.")
        and name not in DOORS
    ]
    found = [imports_of_the_porch(name, modules()[name].read_text(encoding="utf-8")) for name in core]
    assert [problem for problems in found for problem in problems] == []


def test_every_room_of_checkpoints_and_layers_is_ordered() -> None:
    for folder in ("checkpoints", "layers"):
        rooms = {path.name for path in (ROOT / folder).iterdir() if (path / "__init__.py").exists()}
        assert rooms <= set(ROOMS[f"te_models.{folder}"].split()), folder


def test_a_room_holds_at_most_twenty_files() -> None:
    counts = Counter(file.parent.relative_to(ROOT).as_posix() for file in modules().values())
    assert {room: n for room, n in counts.items() if n > MOST_FILES and room != "checkpoints/families"} == {}
    assert counts["layers"] <= 3 and counts["checkpoints"] <= 3


def test_a_room_of_tests_holds_at_most_twenty_files() -> None:
    """As in the package, whose rooms the tests' rooms mirror."""
    counts = Counter(file.parent for file in (ROOT / "tests").rglob("*.py"))
    assert {str(room): n for room, n in counts.items() if n > MOST_FILES} == {}


def test_every_file_of_tests_begins_with_a_docstring() -> None:
    """Tests read as a specification: every file says first what it claims, or what it is for."""
    files = sorted((ROOT / "tests").rglob("*.py"))
    assert len(files) > 300
    assert [str(file) for file in files if not re.match(r'"""\s*[^\s"]', file.read_text(encoding="utf-8"))] == []


def test_no_file_is_longer_than_five_hundred_lines() -> None:
    lengths = {name: len(file.read_text(encoding="utf-8").splitlines()) for name, file in modules().items()}
    assert {name: n for name, n in lengths.items() if n > 500} == {}


MOST_OF_ANOTHER_LANGUAGE = 100, 20
"""Lines of C++ or CUDA in the strings of all Python files together, and of one string."""


def test_cpp_is_in_cpp_files() -> None:
    """... where compilers name its lines, and formatters and editors know it."""
    lines = {}
    for module, file in modules().items():
        for node in ast.walk(parsed(file)) if LIKE_CPP.search(file.read_text(encoding="utf-8")) else ():
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and CPP.search(node.value):
                lines[f"{module}:{node.lineno}"] = node.value.count("\n") + 1
    assert {place: n for place, n in lines.items() if n > MOST_OF_ANOTHER_LANGUAGE[1]} == {}
    assert sum(lines.values()) <= MOST_OF_ANOTHER_LANGUAGE[0]
    assert CPP.search("#include <cmath>\n") and CPP.search("inline int f(int x) {\n  return x + 1;\n}\n")


def test_files_are_neither_crumbs_nor_used_by_one_other_file_alone() -> None:
    """Families are small by design. What a package's __init__ or the command line offers is used by users; the
    definition of an operation and its Triton kernels are files of their own."""
    own = {
        name: file
        for name, file in modules().items()
        if not name.endswith((".__init__", ".__main__")) and file.parent.name != "families"
    }
    assert 120 <= median(len(file.read_text(encoding="utf-8").splitlines()) for file in own.values()) <= 200
    importers: dict[str, set[str]] = {name: set() for name in modules()}
    for module, file in modules().items():
        for target in {item.target for item in imports_of(file.read_text(encoding="utf-8"), module)}:
            while target and target not in importers and f"{target}.__init__" not in importers:
                target = target.rpartition(".")[0]
            importers.get(target, set()).add(module)
    offered = (".__init__", "te_models.cli.main")
    alone = [
        name
        for name in own
        if [*importers[name]][1:] == []
        and not any(importer.endswith(offered) for importer in importers[name])
        and not (name.startswith("te_models.kernels.") and re.match(OF_ONE_OPERATION, name.rpartition(".")[2]))
    ]
    assert len(alone) < 0.11 * len(own), alone


def test_identifiers_are_the_words_of_the_field() -> None:
    found = []
    for module, file in modules().items():
        banned = set().union(*(words for package, words in BANNED.items() if f"{module}.".startswith(f"{package}.")))
        banned &= identifiers(file.read_text(encoding="utf-8"))
        for node in ast.walk(parsed(file)) if banned else ():
            names = {getattr(node, kind, None) for kind in ("id", "name", "arg", "attr")}
            for name in banned & names:
                found.append(f"{module}:{getattr(node, 'lineno', '?')} {name}")
    assert found == []


def test_a_quantizer_is_asked_and_not_told_apart() -> None:
    """A format is one quantizer, its reference and its kernel: what depends on it is a method or an attribute of its
    quantizer, so that nothing else changes where a format is added."""
    found = []
    for module, file in modules().items():
        if module.startswith(("te_models.layers.quantizer", "te_models.checkpoints.formats")):
            continue
        source = file.read_text(encoding="utf-8")
        for node in ast.walk(parsed(file)) if re.search(r"\wQuantizer\b", source) else ():
            classes: ast.AST | None = None
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "isinstance":
                classes = node.args[1]
            elif isinstance(node, ast.MatchClass):
                classes = node.cls
            names = [n.id for n in ast.walk(classes) if isinstance(n, ast.Name)] if classes else []
            if any(name.endswith("Quantizer") and name != "Quantizer" for name in names):
                found.append(f"{module}:{getattr(node, 'lineno', '?')}")
    assert found == []


def test_the_folders_are_the_four() -> None:
    assert {path.name for path in ROOT.iterdir() if (path / "__init__.py").exists()} <= {*FOLDERS, "tests", "bench"}


NAMED_TWICE = {
    # fusible operations have the names of Transformer Engine's `te.ops`, modules of the core those of its modules
    **dict.fromkeys(("Linear", "LayerNormLinear", "GroupedLinear", "RMSNorm", "LayerNorm"), "te_models.layers."),
    "DotProductAttention": "te_models.layers.",
    # what every format of quantized folders offers, and every verb of the command line
    **dict.fromkeys(("read", "write"), "te_models.checkpoints.formats."),
    **dict.fromkeys(("add", "run"), "te_models.cli."),
    # what a process of its own begins with
    "main": "te_models.",
}
"""Public names that several modules define, and where."""
IMPLEMENTS_OTHERS = "te_models.kernels.cpu_rows.rows"
"""C++ for operations of several folders, under their names."""


def one_operation(places: list[str]) -> bool:
    """Whether modules are of one folder of kernels/: the definition, the public function and the launches of an
    operation share its name."""
    folders = {".".join(place.split(".")[:3]) for place in places if place != IMPLEMENTS_OTHERS}
    return len(folders) == 1 and next(iter(folders)).startswith("te_models.kernels.")


def test_a_public_name_is_defined_once() -> None:
    defined: dict[str, list[str]] = {}
    for module, file in modules().items():
        for node in parsed(file).body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
                defined.setdefault(node.name, []).append(module)
    defined = {name: sorted(set(places)) for name, places in defined.items()}  # overloads
    found = {name: places for name, places in defined.items() if len(places) > 1 and not one_operation(places)}
    assert {
        name: places
        for name, places in found.items()
        if not all(place.startswith(NAMED_TWICE.get(name, "!")) for place in places)
    } == {}
    assert NAMED_TWICE.keys() <= found.keys()
    assert not one_operation(["te_models.kernels.gemm.op", "te_models.kernels.norm.op"])


@pytest.mark.parametrize(("package", "old"), [("te_models", "TransformerLayer"), ("te_models.checkpoints", "Plan")])
def test_a_public_name_of_an_earlier_release_still_works(package: str, old: str) -> None:
    new = {"TransformerLayer": "DecoderLayer", "Plan": "ConversionPlan"}[old]
    imported = importlib.import_module(package)
    with pytest.warns(DeprecationWarning, match=f"{package}.{old} is {package}.{new} now"):
        assert getattr(imported, old) is getattr(imported, new)
    assert old not in imported.__all__


def test_exporting_is_not_asked_of_torch() -> None:
    """`torch.compiler.is_exporting` is true in all that torch 2.11 compiles: experts were not counted there. What
    versions of torch do differently is known to kernels/torch_versions.py, and asked there."""
    allowed = {"te_models.kernels.torch_versions", "te_models.kernels.compiling"}
    others = {name: file for name, file in modules().items() if name not in allowed}
    assert [name for name, file in others.items() if "is_exporting" in identifiers(file.read_text("utf-8"))] == []


MOST_OF_HELPERS = 0.10
"""Of the lines of tests, those in files that hold no test."""
MOST_OF_TESTS = 0.75
"""Lines of tests for each line of the product, Python and C++."""


def lines(files: Iterable[Path]) -> int:
    return sum(len(file.read_text(encoding="utf-8").splitlines()) for file in files)


def test_what_a_test_needs_stands_in_it_and_tests_are_shorter_than_the_product() -> None:
    """A helper of one test stands in its file; what tests compare is in tests/compare.py, tiny models in
    tests/build.py."""
    tests = sorted((ROOT / "tests").rglob("*.py"))
    helpers = lines(file for file in tests if not file.name.startswith("test_"))
    product = lines([*modules().values(), *(ROOT / "kernels/cpp").iterdir()])
    assert helpers <= MOST_OF_HELPERS * lines(tests), f"{helpers} of {lines(tests)} lines"
    assert lines(tests) <= MOST_OF_TESTS * product, f"{lines(tests)} for {product} lines"
