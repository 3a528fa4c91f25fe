"""Assemble the documentation site's sources in build/site: `make site` builds it from there with MkDocs, strictly.

The pages are docs/, README.md as the front page, and the reference (docs/reference.py). mkdocstrings reads a copy of
the package without importing anything. build/site/mkdocs.yml is mkdocs.yml with the reference's pages at `REFERENCE`.
"""

from __future__ import annotations

import ast
import builtins
import re
import shutil
import sys
import textwrap
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a script, this finds its own folder there
from docs import reference

ROOT = Path(__file__).resolve().parents[1]
OUT = ROOT / "build" / "site"
STYLE = """\
/* the column with the longest text wraps; names stay whole */
.md-typeset table:not([class]) { display: table; width: 100%; font-size: .7rem; }
.md-typeset table:not([class]) td { overflow-wrap: anywhere; min-width: 4rem; }
.md-typeset table:not([class]) td:first-child code { overflow-wrap: normal; }
"""
_PYTHON = re.compile(r"^```python\n", re.MULTILINE)
_CONTINUES = "<small>Continues the blocks above.</small>"


def relinked(text: str, page: Path) -> str:
    """Return a page's text with links that lead where the pages lie on the site."""
    text = re.sub(r"\]\((?:\.\./)*docs/", "](", text) if page.parent == ROOT else text
    # what lies beside docs/ lies in it here: from a folder in docs/ it is one step less up
    for name, target in (*((n, n.lower()) for n in ("CHANGELOG", "CONTRIBUTING", "SECURITY")), ("README", "index")):
        text = re.sub(rf"\]\((?:\.\./)?((?:\.\./)*){name}\.md", rf"](\1{target}.md", text)
    text = text.replace("](../examples/", "](examples/").replace("](../docs/", "](../")
    return re.sub(r"\]\((?:\.\./)*(bench/results/[\w.]+)\)", r"](\1)", text)


def continued(text: str) -> str:
    """Return a page on which every Python block that goes on from the ones above says so."""
    parts = _PYTHON.split(text)
    for i, part in enumerate(parts[2:], 2):
        if not stands_alone(part.partition("\n```")[0]):
            parts[i] = part.replace(
                "\n```", '\n```\n<small class="te-continues">Continues the blocks above.</small>', 1
            )
    return "```python\n".join(parts)


def stands_alone(code: str) -> bool:
    """Whether a block of Python uses no name that a block above defines."""
    nodes = list(ast.walk(ast.parse(textwrap.dedent(code))))
    bound = {node.arg for node in nodes if isinstance(node, ast.arg)} | set(dir(builtins))
    bound |= {node.id for node in nodes if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load)}
    bound |= {node.name for node in nodes if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
    for node in nodes:
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            bound |= {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
    return {node.id for node in nodes if isinstance(node, ast.Name)} <= bound


def search_boost(page: Path) -> float:
    """Return the weight of a page, a path within the site, in searches: a name leads to the guide that explains it,
    before the reference that lists it (1) and what was decided or changed."""
    return 0.5 if page.name == "changelog.md" or page.parts[0] == "design" else 4


def main() -> None:
    """Write build/site afresh."""
    shutil.rmtree(OUT, ignore_errors=True)
    shutil.copytree(ROOT / "te_models", OUT / "package/te_models", ignore=shutil.ignore_patterns("__pycache__"))
    pages = OUT / "docs"
    shutil.copytree(ROOT / "docs", pages, ignore=shutil.ignore_patterns("*.py", "*.json", "__pycache__"))
    shutil.copytree(ROOT / "examples", pages / "examples", dirs_exist_ok=True)
    shutil.copytree(ROOT / "bench" / "results", pages / "bench" / "results")
    for name, target in (("README", "index"), ("CHANGELOG", "changelog"), ("CONTRIBUTING", "contributing")):
        shutil.copy(ROOT / f"{name}.md", pages / f"{target}.md")
    shutil.copy(ROOT / "SECURITY.md", pages / "security.md")
    roots = {"index.md", "changelog.md", "contributing.md", "security.md"}
    for page in pages.rglob("*.md"):
        source = ROOT / page.name if page.name in roots and page.parent == pages else ROOT / "docs" / page.name
        text = continued(relinked(page.read_text(encoding="utf-8"), source))
        boost = search_boost(page.relative_to(pages))
        page.write_text(f"---\nsearch:\n  boost: {boost}\n---\n\n{text}", encoding="utf-8")
    (pages / "style.css").write_text(STYLE, encoding="utf-8")
    navigation = reference.write(OUT / "package", pages)
    config = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    for folder in ("docs_dir: build/site/", "site_dir: build/site/", "[build/site/"):
        config = config.replace(folder, folder.replace("build/site/", ""))
    (OUT / "mkdocs.yml").write_text(config.replace("      - REFERENCE\n", navigation), encoding="utf-8")


if __name__ == "__main__":
    main()
