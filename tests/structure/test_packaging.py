"""The wheel: exactly the tree's modules, and usable where only torch and safetensors are installed."""

import importlib.metadata
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import te_models
from te_models.extras import EXTRAS
from tests.structure.tree import FOLDERS, ROOT, data_files, modules, packages, pyproject


def test_every_package_has_an_init() -> None:
    names = set(modules())
    assert {p for p in packages() if f"{p}.__init__" not in names} == set()


def test_the_tree_on_disk_is_the_tree_that_is_imported() -> None:
    """A plain checkout imports as the wheel does, and one file has one path whoever reads it."""
    for folder in FOLDERS:
        if folder != "te_models":
            link = ROOT / "te_models" / folder
            assert link.is_symlink() and link.readlink() == Path("..") / folder
    script = "import importlib.util; print(importlib.util.find_spec('te_models.layers').origin)"  # needs no torch
    environment = _plain_environment() | {"PYTHONPATH": str(ROOT)}
    run = subprocess.run(
        [sys.executable, "-P", "-c", script], env=environment, capture_output=True, text=True, check=True
    )
    assert Path(run.stdout.strip()) == ROOT / "te_models/layers/__init__.py"


def test_extras_match_the_table_in_code() -> None:
    extras = pyproject()["project"]["optional-dependencies"]
    for extra, names in EXTRAS.items():
        declared = {Requirement(r).name.replace("-", "_") for r in extras[extra]} - {"te_models"}
        assert declared == set(names), extra


NO_NUMPY = "ignore:Failed to initialize NumPy"
"""torch itself warns where numpy, which it does not require, is absent."""


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `python -m build` makes, the source distribution and the wheel that is built from it; of a copy, so that no
    build folder appears in the checkout. Works offline."""
    source = tmp_path_factory.mktemp("source")
    for folder in FOLDERS:
        shutil.copytree(ROOT / folder, source / folder, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    for file in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / file, source / file)
    out = tmp_path_factory.mktemp("dist")
    run = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(source)]
    subprocess.run(run, check=True, capture_output=True, text=True)
    return out


@pytest.fixture(scope="module")
def wheel(dist: Path) -> Path:
    """The wheel."""
    (built,) = dist.glob("*.whl")
    return built


def test_the_source_distribution_holds_the_tree(dist: Path) -> None:
    """Plain files where the checkout has links, so that it unpacks on every system."""
    (archive,) = dist.glob("*.tar.gz")
    with tarfile.open(archive) as opened:
        members = {member.name.partition("/")[2]: member for member in opened.getmembers()}
    expected = {name.replace(".", "/") + ".py" for name in modules()}
    expected |= {*data_files(), "pyproject.toml", "LICENSE"}
    assert {name: members[name].isfile() for name in expected} == dict.fromkeys(expected, True)


def test_the_version_comes_from_one_place(dist: Path) -> None:
    assert pyproject()["project"]["dynamic"] == ["version"]
    assert {file.name.split("-")[1].removesuffix(".tar.gz") for file in dist.iterdir()} == {te_models.__version__}


@pytest.mark.slow
def test_twine_finds_nothing_to_complain_of(dist: Path) -> None:
    pytest.importorskip("twine", reason="checks distributions (extra dev)")
    run = [sys.executable, "-m", "twine", "check", "--strict", *map(str, dist.iterdir())]
    checked = subprocess.run(run, capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stdout


@pytest.mark.slow
@pytest.mark.parametrize("extra", [*EXTRAS, "test", "dev"])
def test_each_extra_can_be_installed(extra: str, wheel: Path) -> None:
    """The resolver of pip finds versions of all that it names, beside the torch that is here; nothing is installed."""
    torch = f"torch=={importlib.metadata.version('torch').partition('+')[0]}"
    install = [sys.executable, "-m", "pip", "install", "--dry-run", "--quiet"]
    run = [*install, torch, f"te_models[{extra}] @ file://{wheel}"]
    resolved = subprocess.run(run, capture_output=True, text=True, check=False)
    if "No matching distribution found for" in resolved.stderr and "Could not fetch" in resolved.stderr:
        pytest.skip("needs a package index, and none answers")
    assert resolved.returncode == 0, resolved.stderr


def test_the_release_workflow_builds_and_checks_what_is_tested_here() -> None:
    workflow = (ROOT / ".github/workflows/release.yml").read_text(encoding="utf-8")
    for command in ("python -m build", "twine check --strict", "make test"):
        assert command in workflow
    versions = [c.rpartition(" ")[2] for c in pyproject()["project"]["classifiers"] if "Python :: 3." in c]
    assert versions == ["3.11", "3.12", "3.13"] and all(f'"{version}"' in workflow for version in versions)


def test_the_wheel_holds_exactly_the_tree(wheel: Path) -> None:
    expected = {name.replace(".", "/") + ".py" for name in modules()} | {*data_files()}
    with zipfile.ZipFile(wheel) as archive:
        found = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert found == expected


def test_the_wheel_carries_its_licence_and_command(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = {name.partition(".dist-info/")[2]: name for name in archive.namelist()}
        assert archive.read(names["licenses/LICENSE"]) == (ROOT / "LICENSE").read_bytes()
        assert b"te-models = te_models.cli.main:main" in archive.read(names["entry_points.txt"])


def core_distributions() -> set[str]:
    """torch, safetensors and what they require, without extras."""
    found, queue = set(), ["torch", "safetensors"]
    while queue:
        name = queue.pop()
        if name in found:
            continue
        found.add(name)
        for text in importlib.metadata.requires(name) or []:
            requirement = Requirement(text)
            # An accelerator build of torch requires its libraries and triton; the clean environment is a CPU one.
            accelerator = requirement.name.startswith(("nvidia", "cuda", "triton"))
            if not accelerator and (requirement.marker is None or requirement.marker.evaluate({"extra": ""})):
                queue.append(requirement.name)
    return found


@pytest.fixture(scope="module")
def clean_python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of a new virtual environment with torch, safetensors, their requirements, and our wheel.

    The environment is real and sees nothing of the one that runs the tests; the distributions are links to the ones
    installed here. pip installs the wheel alone: where it looks for a requirement that an accelerator build of torch
    has and a clean environment has not, it could find another torch, and write that through the links."""
    home = tmp_path_factory.mktemp("clean")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(home)], check=True)
    (site,) = home.glob("lib/python*/site-packages")
    for name in core_distributions():
        distribution = importlib.metadata.distribution(name)
        tops = {file.parts[0] for file in distribution.files or [] if file.parts[0] not in ("..", "__pycache__")}
        for top in tops:
            (site / top).symlink_to(Path(str(distribution.locate_file(top))).resolve())
    python = home / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--isolated", "--python", str(python), "install", "--no-index", "--no-deps"]
    subprocess.run([*pip, "--quiet", str(wheel)], check=True, capture_output=True, text=True, env=_plain_environment())
    (ours,) = importlib.metadata.Distribution.discover(name="te_models", path=[str(site)])
    for requirement in map(Requirement, ours.requires or []):
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            (there,) = importlib.metadata.Distribution.discover(name=requirement.name, path=[str(site)])
            assert there.version in requirement.specifier, requirement
    return python


def _plain_environment() -> dict[str, str]:
    return {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "PIP_", "COV_", "PYTEST"))}


@pytest.mark.slow
def test_every_module_imports_with_the_core_dependencies_only(clean_python: Path, tmp_path: Path) -> None:
    script = """
import importlib, pkgutil, sys
import te_models, te_models.extras
for absent in ("transformers", "triton", "tokenizers", "tqdm", "rich", "shtab", "matplotlib", "gguf", "pytest"):
    assert importlib.util.find_spec(absent) is None, absent
assert te_models.__file__.startswith(sys.prefix), te_models.__file__
names = ["te_models"] + [m.name for m in pkgutil.walk_packages(te_models.__path__, "te_models.")]
for name in names:
    if name.endswith(".__main__"):
        continue
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        assert error.name == "triton" and name.startswith("te_models.kernels."), f"{name}: {error}"
    except te_models.extras.MissingExtraError as error:
        assert error.name == "transformers" and name == "te_models.hf", f"{name}: {error}"
        assert str(error) == "te_models.hf needs the package 'transformers': pip install 'te_models[hf]'", error
        print("te_models.hf said so", file=sys.stderr)
print(len(names))
"""
    run = subprocess.run(
        [str(clean_python), "-W", "error", "-W", NO_NUMPY, "-c", script],
        cwd=tmp_path, env=_plain_environment(), capture_output=True, text=True,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    assert run.stderr == "te_models.hf said so\n"
    inside_hf = sum(name.startswith("te_models.hf.") and name != "te_models.hf.__init__" for name in modules())
    assert int(run.stdout) == len(modules()) - inside_hf


@pytest.mark.slow
def test_the_command_runs_with_the_core_dependencies_only(clean_python: Path, tmp_path: Path) -> None:
    command = clean_python.parent / "te-models"
    run = subprocess.run([str(command), "info"], cwd=tmp_path, env=_plain_environment(), capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert "torch" in run.stdout


@pytest.mark.slow
def test_the_checkout_has_no_type_errors() -> None:
    checker = Path(sysconfig.get_path("scripts")) / "pyright"
    if not checker.exists():
        pytest.skip("pyright is not installed: pip install 'te_models[dev]'")
    ran = subprocess.run([str(checker), "--pythonpath", sys.executable], cwd=ROOT, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout
