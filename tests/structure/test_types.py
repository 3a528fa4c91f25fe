"""The types of the checkout as it lies: a type checker sees the files that Python imports."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from docs.generate import ROOT


@pytest.mark.slow
def test_the_checkout_has_no_type_errors() -> None:
    checker = Path(sysconfig.get_path("scripts")) / "pyright"
    if not checker.exists():
        pytest.skip("pyright is not installed: pip install 'te_models[dev]'")
    ran = subprocess.run([str(checker), "--pythonpath", sys.executable], cwd=ROOT, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout
