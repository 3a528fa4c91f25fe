"""The documentation site builds without a warning, and its reference has every public name with its example."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from docs import site
from docs.examples_of import EXAMPLES, examples
from tests.structure.tree import ROOT


@pytest.fixture(scope="module")
def html(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built as `make site` builds it."""
    pytest.importorskip("mkdocs", reason="builds the site (extra test)")
    out = tmp_path_factory.mktemp("site")
    subprocess.run([sys.executable, "docs/site.py"], cwd=ROOT, check=True)
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", str(out)]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    return out


@pytest.mark.slow
def test_the_reference_has_every_public_name(html: Path) -> None:
    for package in site.PACKAGES:
        page = (html / "reference" / f"{package}.html").read_text(encoding="utf-8")
        missing = [name for name in site.public_names(package) if f'id="{package}.{name}"' not in page]
        assert missing == [], package


@pytest.mark.slow
def test_the_reference_shows_the_examples(html: Path) -> None:
    for package in EXAMPLES:
        page = (html / "reference" / f"{package}.html").read_text(encoding="utf-8")
        shown = {name for example in examples(package) for name in example.names}
        assert page.count("<strong>Example</strong>") == len(shown), package


def test_every_page_is_in_the_navigation() -> None:
    listed = set(re.findall(r"[\w/.-]+\.md", (ROOT / "mkdocs.yml").read_text(encoding="utf-8")))
    pages = {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")}
    assert pages <= listed
