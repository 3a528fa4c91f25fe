"""The first run after a clone: pytest rewrites the assertions of each test file, in seconds, and keeps the bytecode.
All workers import every file at once, and each would rewrite all of them. Here each begins with a share, and finds what
the others kept."""

import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parent


def rewrite_share(config: pytest.Config) -> None:
    """On a worker that runs all tests, keep the bytecode of its share of the files that have none. The functions are
    pytest's own: a version without them does as it would."""
    worker = getattr(config, "workerinput", None)
    if worker is None or sys.dont_write_bytecode or [Path(name).resolve() for name in config.args] != [TESTS]:
        return
    try:
        from _pytest.assertion.rewrite import PYC_TAIL, _rewrite_test, _write_pyc, assertstate_key, get_cache_dir
    except ImportError:
        return
    share = sorted(TESTS.rglob("test_*.py"))[int(worker["workerid"].removeprefix("gw")) :: worker["workercount"]]
    for file in share:
        target = get_cache_dir(file) / f"{file.stem}{PYC_TAIL}"
        if not target.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            found, code = _rewrite_test(file, config)
            _write_pyc(config.stash[assertstate_key], code, found, target)
