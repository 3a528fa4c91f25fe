"""The documentation site builds without a warning, and its reference has every public name with its example."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from docs import reference, site
from docs.examples_of import EXAMPLES, examples
from tests.structure.tree import ROOT


@pytest.fixture(scope="module")
def html(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built as `make site` builds it."""
    pytest.importorskip("material", reason="builds the site (extra test)")
    out = tmp_path_factory.mktemp("site")
    subprocess.run([sys.executable, "docs/site.py"], cwd=ROOT, check=True)
    command = [
        sys.executable,
        "-m",
        "mkdocs",
        "build",
        "--quiet",
        "-f",
        "build/site/mkdocs.yml",
        "--site-dir",
        str(out),
    ]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    built = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    return out


@pytest.mark.slow
def test_the_reference_has_every_public_name(html: Path) -> None:
    for package in reference.PACKAGES:
        found = list(reference.names(ROOT, package))
        assert [name.name for name in found] == reference.public_names(ROOT, package)
        for name in found:
            page = (html / reference.page_of(package, name)).with_suffix(".html").read_text(encoding="utf-8")
            assert f'id="{package}.{name.name}"' in page, name


@pytest.mark.slow
def test_the_reference_shows_the_examples(html: Path) -> None:
    for package in EXAMPLES:
        pages = (html / "reference" / package).glob("*.html")
        shown = {name for example in examples(package) for name in example.names}
        text = "".join(page.read_text(encoding="utf-8") for page in pages)
        assert text.count("<strong>Example</strong>") == len(shown), package


@pytest.mark.slow
def test_nothing_is_fetched_from_elsewhere(html: Path) -> None:
    page = (html / "index.html").read_text(encoding="utf-8")
    assert re.findall(r'<(?:script|link|img)[^>]*(?:src|href)="(https?:[^"]+)"', page) == []


def test_every_page_is_in_the_navigation() -> None:
    listed = set(re.findall(r"[\w/.-]+\.md", (ROOT / "mkdocs.yml").read_text(encoding="utf-8")))
    pages = {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")}
    assert pages <= listed


def test_links_out_of_docs_lead_to_where_those_pages_lie_on_the_site() -> None:
    def links(text: str) -> str:
        return site.relinked(text, ROOT / "docs" / "page.md")

    assert links("[a](../README.md#limits) [b](../CHANGELOG.md)") == "[a](index.md#limits) [b](changelog.md)"
    assert links("[a](../../README.md#limits) [b](../../SECURITY.md)") == "[a](../index.md#limits) [b](../security.md)"
    assert site.relinked("[a](README.md) [b](docs/cli.md)", ROOT / "SECURITY.md") == "[a](index.md) [b](cli.md)"


def test_a_search_finds_guides_first() -> None:
    pages = ("recipes.md", "contributing/tests.md", "design/tests.md", "changelog.md")
    assert [site.search_boost(Path(page)) for page in pages] == [4, 4, 0.5, 0.5]


def test_public_names_are_grouped_by_what_they_are_for() -> None:
    groups = {name.name: (name.group, name.is_class) for name in reference.names(ROOT, "te_models.layers")}
    assert groups["Linear"] == ("module", True) and groups["autocast"] == ("module", True)
    assert groups["MXFP8BlockScaling"] == ("recipe", True) and groups["recipe"] == ("recipe", False)
    assert groups["MXFP8Quantizer"] == ("quantizer", True)


def test_blocks_that_go_on_from_others_say_so() -> None:
    assert site.stands_alone("import torch\nx = torch.ones(3)\nprint([y for y in x])")
    assert not site.stands_alone("print(model)")
    page = "```python\nimport torch\nx = 1\n```\n\n```python\nprint(x)\n```\n\n```python\nimport torch\n```\n"
    assert site.continued(page).count("Continues the blocks above") == 1
