"""What verbs say of how many things there are: `plural` writes it, so that no message has "1 steps"."""

import ast
import re
from collections.abc import Iterator

import pytest

from tests.structure.tree import ROOT

FOLDERS = [
    *("checkpoints/tools", "checkpoints/write"),
    *(f"te_models/{name}" for name in ("cli", "evaluation", "generation", "init", "quickstart", "training")),
]
THINGS = re.compile(
    r" (?:(?!has |describes )[a-z-]+ )?(tokens|tensors|rows|steps|files|windows|documents|answers|prompts|texts"
    r"|layers|parts|problems|batches|checks|folders|parameters|threads|cores|copies|experts)\b(?!/s)"
)
MANY = re.compile(r"_?[A-Z][A-Z_]*|.*(?:short|ranks).*|.*size|length|self.windows|parameters|len.*files.*")
"""Values that are constants, written out already, or bounds far above one."""
PLAIN = {"{config.moe.num_moe_experts} experts", "{span} steps", "{sizes.experts} experts", "{moved} tensors"}
PLAIN |= {"{sizes.train_batches} batches", "{tokens} tokens", "{run.recipe} experts", "{what} tensors"}


def counted(source: str) -> Iterator[str]:
    """Yield values of f-strings that a plural noun follows, with the noun."""
    for node in ast.walk(ast.parse(source)):
        for value, text in zip(node.values, node.values[1:]) if isinstance(node, ast.JoinedStr) else ():
            if isinstance(value, ast.FormattedValue) and isinstance(text, ast.Constant):
                found, written = THINGS.match(text.value), ast.unparse(value.value)
                if found and not MANY.fullmatch(written):
                    yield f"{{{written}}}{found[0]}"


@pytest.mark.parametrize("folder", FOLDERS)
def test_counts_are_written_by_plural(folder: str) -> None:
    found = [
        f"{path.relative_to(ROOT)}: {text}"
        for path in sorted((ROOT / folder).rglob("*.py"))
        for text in counted(path.read_text(encoding="utf-8"))
        if text not in PLAIN
    ]
    assert not found, "allowed: plural(count, noun) of te_models.sizes"


def test_a_count_without_plural_is_found() -> None:
    assert list(counted('f"in {n} steps"')) == ["{n} steps"]
    assert list(counted("""f"in {plural(n, 'step')}, {done} of {MOST} steps\"""")) == []
