"""Nothing is loaded from where others may write, nor what is not what was written; what is written is on the disk."""

import os
import shutil
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from te_models.kernels import cpp_cache, cpp_library
from te_models.kernels.machine import NoCacheFolderError, cache_folder
from tests.kernels.cpp.test_cpp_library import added, forget, is_cached, libraries, library_of, own_cache

__all__ = ["own_cache"]
ANOTHER_USER = 54321
MADE: dict[cpp_library.CppSource, bytes] = {}
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")


@pytest.fixture(autouse=True)
def compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiler takes a third of a second for each of these libraries."""
    compiled = cpp_library._compile

    def copied(source: cpp_library.CppSource, folder: Path) -> Path:
        if source not in MADE:
            MADE[source] = compiled(source, folder).read_bytes()
        (folder / "library.so").write_bytes(MADE[source])
        return folder / "library.so"

    monkeypatch.setattr(cpp_library, "_compile", copied)


def test_what_is_made_is_for_this_user_alone(own_cache: Path) -> None:
    before = os.umask(0)
    try:
        assert added(7) == 8
    finally:
        os.umask(before)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (own_cache.parent, *own_cache.parent.rglob("*"))}
    library = library_of(7, own_cache)
    files = {library.name: 0o700, library.with_suffix(".sha256").name: 0o600, "lock": 0o600}
    assert modes == {"cache": 0o700, "cpp": 0o700} | files


def test_files_and_then_their_names_are_on_the_disk(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The session's fsync does nothing: this one says of what it was called, and when."""
    done: list[tuple[str, str]] = []
    replace = Path.replace
    monkeypatch.setattr(os, "fsync", lambda fd: done.append(("fsync", Path(f"/proc/self/fd/{fd}").readlink().name)))
    monkeypatch.setattr(Path, "replace", lambda self, to: (done.append(("name", to.name)), replace(self, to))[1])
    assert added(7) == 8
    library = library_of(7, own_cache)
    flushed = [("fsync", "library.so"), ("fsync", "note")]
    assert done == [*flushed, ("name", library.name), ("name", library.with_suffix(".sha256").name), ("fsync", "cpp")]


def _link(library: Path, other: Path) -> None:
    shutil.copy(library, other.with_suffix(".copy"))
    library.unlink()
    library.symlink_to(other.with_suffix(".copy"))


def _rewritten(library: Path, data: bytes) -> None:
    """Under the same name, in another file: this process has the old one in its memory."""
    library.with_suffix(".new").write_bytes(data)
    library.with_suffix(".new").chmod(0o700)
    library.with_suffix(".new").replace(library)


def _flipped(data: bytes) -> bytes:
    return data[:-9] + bytes([data[-9] ^ 1]) + data[-8:]


DAMAGE: dict[str, Callable[[Path, Path], object]] = {
    "cut": lambda library, _: _rewritten(library, library.read_bytes()[: library.stat().st_size // 2]),
    "flipped": lambda library, _: _rewritten(library, _flipped(library.read_bytes())),
    "empty": lambda library, _: _rewritten(library, b""),
    "another": lambda library, other: _rewritten(library, other.read_bytes()),
    "link": _link,
    "writable": lambda library, _: library.chmod(0o722),
    "digest cut": lambda library, _: library.with_suffix(".sha256").write_text("17"),
    "of another user": lambda library, _: os.chown(library, ANOTHER_USER, -1),
}


@pytest.mark.parametrize("kind", [pytest.param(kind, marks=as_root if "user" in kind else ()) for kind in DAMAGE])
def test_damaged_libraries_are_compiled(own_cache: Path, tmp_path: Path, kind: str) -> None:
    """A library that is cut ends the process that loads it, and with it a test that does."""
    assert (added(7), added(100)) == (8, 101)
    library, other = library_of(7, own_cache), shutil.move(library_of(100, own_cache), tmp_path / "other.so")
    library_of(100, own_cache).with_suffix(".sha256").unlink()
    DAMAGE[kind](library, other)
    forget()
    assert not cpp_cache.intact(library)
    with pytest.warns(RuntimeWarning, match=f"^{library} is not what was written there, and is compiled again$"):
        assert added(7) == 8
    assert cpp_cache.intact(library) and not library.is_symlink() and libraries(own_cache) == 1
    forget()
    assert added(7) == 8  # and nothing is said


def test_a_library_without_a_digest_is_compiled_again(own_cache: Path) -> None:
    """Of a process that was killed between the two names, or of a release that wrote none."""
    assert added(7) == 8
    library_of(7, own_cache).with_suffix(".sha256").unlink()
    forget()
    assert added(7) == 8 and cpp_cache.intact(library_of(7, own_cache))


OPEN: dict[str, Callable[[Path], None]] = {
    r"others may write to .*cpp \(mode 777; allowed: 700\)": lambda folder: folder.chmod(0o777),
    r"others may write to .*cpp \(mode 720; allowed: 700\)": lambda folder: folder.chmod(0o720),
    r"others may replace .*cpp: they may write to .*cache": lambda folder: folder.parent.chmod(0o777),
}
OF_ANOTHER_USER: dict[str, Callable[[Path], None]] = {
    r"cpp belongs to another user \(54321, and this is 0\)": lambda folder: os.chown(folder, ANOTHER_USER, -1),
    r"others may replace .*cpp: they may write to .*cache": lambda folder: os.chown(folder.parent, ANOTHER_USER, -1),
}


@pytest.mark.parametrize(
    ("says", "change"), [*OPEN.items(), *(pytest.param(*case, marks=as_root) for case in OF_ANOTHER_USER.items())]
)
@pytest.mark.parametrize("link", [False, True])
def test_a_folder_that_others_may_write_to_is_not_used(
    own_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, says: str, change: Callable, link: bool
) -> None:
    """It holds a library of the right name, size and digest, which adds another number."""
    assert added(100) == 101
    hostile, named = library_of(100, own_cache), library_of(7, own_cache)
    shutil.copy(hostile, named)
    hostile.with_suffix(".sha256").rename(named.with_suffix(".sha256"))
    assert added(7) == 101, "the attack"
    if link:
        (tmp_path / "home").mkdir()
        (tmp_path / "home/cpp").symlink_to(own_cache)
        monkeypatch.setenv("TE_MODELS_CACHE", str(tmp_path / "home"))
    change(own_cache)
    forget()
    before = sorted(own_cache.iterdir())
    assert not is_cached({"ADDED": "7"})
    with pytest.warns(RuntimeWarning, match=f"functions are kept for this process alone: .*{says}") as said:
        assert (added(7), added(8)) == (8, 9)
    assert len(said) == 1 and sorted(own_cache.iterdir()) == before
    assert cpp_cache.private_folder().stat().st_mode & 0o777 == 0o700


def test_a_folder_for_temporary_files_may_be_everybodys(own_cache: Path, tmp_path: Path) -> None:
    """With the sticky bit, as /tmp has it."""
    own_cache.mkdir(parents=True, mode=0o700)
    own_cache.parent.chmod(0o1777)
    assert added(7) == 8 and cpp_cache.intact(library_of(7, own_cache))


@pytest.mark.parametrize(
    ("variables", "says"),
    [
        ({"TE_MODELS_CACHE": "cache"}, "^TE_MODELS_CACHE is 'cache'; allowed: an absolute path$"),
        (
            {"TE_MODELS_CACHE": "~no-user/cache"},
            "^TE_MODELS_CACHE is '~no-user/cache'; allowed: an absolute path$",
        ),
        ({"TE_MODELS_CACHE": "", "HOME": "home"}, "^there is no home directory"),
    ],
)
def test_a_folder_that_depends_on_the_current_directory_is_none(
    variables: dict[str, str], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(NoCacheFolderError, match=says):
        cache_folder()
