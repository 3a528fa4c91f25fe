"""Assemble the documentation site's sources in build/site: `make site` builds it from there with MkDocs, strictly.

The pages are docs/, README.md as the front page, and a reference page for each public package: every name of
its `__all__`, read from the docstrings. mkdocstrings reads a copy of the package
without importing anything.
"""

from __future__ import annotations

import ast
import re
import shutil
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a script, this finds its own folder there
from docs.examples_of import examples

ROOT = Path(__file__).resolve().parents[1]
OUT = ROOT / "build" / "site"
PACKAGES = (
    "te_models",
    "te_models.layers",
    "te_models.layers.ops",
    "te_models.layers.optimizers",
    "te_models.checkpoints",
    "te_models.parallel",
    "te_models.plan",
    "te_models.training",
    "te_models.hf",
    "te_models.lora",
    "te_models.config",
    "te_models.kernels.gemm",
    "te_models.kernels.grouped_gemm",
    "te_models.kernels.quantize",
    "te_models.kernels.custom_op",
)


def public_names(package: str) -> list[str]:
    """Return `__all__` of a package, read from its `__init__.py`."""
    file = OUT / "package" / package.replace(".", "/") / "__init__.py"
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == "__all__" for t in node.targets):
            return list(ast.literal_eval(node.value))
    raise ValueError(f"{package} has no __all__ that can be read")


def reference_page(package: str) -> str:
    """Return the page of a package: each public name with its signature, docstring and example."""
    shown = {name: example.code for example in examples(package) for name in example.names}
    parts = [f"# {package}\n"]
    for name in public_names(package):
        parts.append(f"::: {package}.{name}\n")
        if name in shown:
            parts.append(f"**Example**\n\n```python\n{shown[name]}```\n")
    return "\n".join(parts)


def relinked(text: str, page: Path) -> str:
    """Return a page's text with links that lead where the pages lie on the site."""
    text = re.sub(r"\]\((?:\.\./)*docs/", "](", text) if page.parent == ROOT else text
    for name in ("CHANGELOG", "CONTRIBUTING", "SECURITY"):
        text = re.sub(rf"\]\((?:\.\./)*{name}\.md", f"]({name.lower()}.md", text)
    text = re.sub(r"\]\((?:\.\./)*README\.md", "](index.md", text)
    text = text.replace("](../examples/", "](examples/").replace("](../docs/", "](../")
    return re.sub(r"\]\((?:\.\./)*(bench/results/[\w.]+)\)", r"](\1)", text)


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
        page.write_text(relinked(page.read_text(encoding="utf-8"), source), encoding="utf-8")
    (pages / "reference").mkdir()
    for package in PACKAGES:
        (pages / "reference" / f"{package}.md").write_text(reference_page(package), encoding="utf-8")


if __name__ == "__main__":
    main()
