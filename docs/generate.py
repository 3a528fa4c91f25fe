"""Rewrites the generated parts of the documentation: `make docs`.

A generated part stands between `<!-- begin NAME -->` and `<!-- end NAME -->`; what is around it is written by hand. The
parts are the help of every verb (docs/cli.md), the keys of a training run and of a model (docs/training-keys.md,
docs/model-keys.md), the layouts over ranks (docs/parallel.md), the folders and where things are (docs/layout.md), the
table of tested versions (docs/support.md), how signatures differ from Transformer Engine's (docs/porting.md), the
families (docs/families.md) and the models known by name (docs/models.md). A test fails when one is stale.
"""

from __future__ import annotations

import ast
import json
import os
import re
import sys
import textwrap
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
WIDTH = 120
"""Columns of what is written as prose."""
PHRASE = 110
DEVIATIONS = ROOT / "docs/te_deviations.json"
CPP = "The C++ of all libraries of the CPU: `cpp_library` compiles a `.cpp` file where it is first called."
FOLDERS = ("kernels", "layers", "checkpoints", "te_models")


def fill(text: str, name: str, body: str) -> str:
    """Return `text` with `body` between the markers of `name`."""
    pattern = re.compile(rf"(<!-- begin {name} -->\n).*?(<!-- end {name} -->)", re.DOTALL)
    if len(pattern.findall(text)) != 1:
        raise ValueError(f"expected the markers of {name!r} exactly once")
    return pattern.sub(lambda match: match[1] + body.rstrip("\n") + "\n" + match[2], text)


def cli_help() -> str:
    """The help of each verb as Markdown, 100 columns wide."""
    from te_models.cli.main import build_parser, verbs_of

    os.environ["COLUMNS"] = "102"
    parser = build_parser()
    parts = [f"```text\n{parser.format_help()}```"]
    parts += [f"### {name}\n\n```text\n{sub.format_help()}```" for name, sub in verbs_of(parser).choices.items()]
    return "\n\n".join(parts)


def key_tables(part: Any, skipped: str = "-") -> str:
    """The keys of a configuration as Markdown, a list for each of its tables.

    skipped: the name of a table that has a page of its own, and those inside it.
    """
    from te_models.config.keys import tables_of

    parts = []
    for table in tables_of(part):
        if f"{table.name}.".startswith(f"{skipped}."):
            continue
        items = [
            _item(f"**`{key.name}`** ({_plain(key.type)}; {_plain(key.default_words)})", _plain(key.sentence))
            for key in table.keys
        ]
        heading = f"## `{table.heading}`\n\n{_wrapped(table.sentence)}\n\n" if table.name else "## Outermost table\n\n"
        parts.append(heading + "Each key with its type and its default.\n\n" + "\n".join(items))
    return "\n\n".join(parts)


def _item(name: str, text: str) -> str:
    """An item of a list, in lines of a width that people read."""
    return textwrap.fill(
        f"- {name}{'' if name.endswith('?') else ':'} {text}",
        WIDTH,
        subsequent_indent="  ",
        break_long_words=False,
        break_on_hyphens=False,
    )


def _wrapped(text: str) -> str:
    return textwrap.fill(text, WIDTH, break_long_words=False, break_on_hyphens=False)


def _plain(text: str) -> str:
    return text.replace("*", "\\*")


def training_keys() -> str:
    """The keys of a training run without its model's keys."""
    from te_models.training import TrainConfig

    return key_tables(TrainConfig, skipped="model.config")


def model_keys() -> str:
    """The keys of a model's configuration."""
    from te_models.config import ModelConfig

    return key_tables(ModelConfig)


def first_sentence(module: Path) -> str:
    """The first sentence of a module's docstring, cut at a comma, colon or semicolon where it is long."""
    doc = " ".join((ast.get_docstring(ast.parse(module.read_text(encoding="utf-8"))) or "").split())
    sentence = re.split(r"(?<=\.)\s", doc, maxsplit=1)[0]
    if len(sentence) <= PHRASE:
        return sentence
    cuts = [match.start() for match in re.finditer(r"[,:;]\s", sentence) if match.start() <= PHRASE]
    return sentence[: cuts[-1]] + "." if cuts else sentence


def package_tree() -> str:
    """Each folder of the four packages with the first sentence of its `__init__.py`."""
    lines: list[tuple[str, str]] = []

    def add(folder: Path, depth: int) -> None:
        lines.append((f"{'  ' * depth}{folder.name}/", first_sentence(folder / "__init__.py")))
        for path in sorted(folder.iterdir()):
            if path == ROOT / "kernels/cpp":
                lines.append((f"{'  ' * (depth + 1)}cpp/", CPP))
            elif (path / "__init__.py").exists() and not path.is_symlink():
                add(path, depth + 1)

    for folder in FOLDERS:
        add(ROOT / folder, 0)
    width = max(len(name) for name, _ in lines) + 2
    return "```text\n" + "\n".join(f"{name:<{width}}{text}".rstrip() for name, text in lines) + "\n```"


def te_deviations() -> str:
    """The differences between our signatures and Transformer Engine's, by reason."""
    rows = []
    for why, lines in json.loads(DEVIATIONS.read_text(encoding="utf-8")).items():
        arguments: dict[str, list[str]] = {}
        for line in lines:
            match = re.match(r"([\w.]+)(?:\((\*?\w+)\))?: ", line)
            if match is None:
                raise ValueError(
                    f"{DEVIATIONS.name} has the line {line!r}; allowed: NAME: WHAT or NAME(ARGUMENT): WHAT"
                )
            names = arguments.setdefault(match[1], [])
            names += [match[2]] if match[2] and match[2] not in names else []
        cells = [
            f"`{name}` ({', '.join(f'`{argument}`' for argument in names)})"
            if names and len(lines) < 60
            else f"`{name}`"
            for name, names in arguments.items()
        ]
        rows.append(_item(f"**{why}**", ", ".join(cells)))
    return "\n".join(rows)


WHERE = (
    (
        "Where is the weight quantized in the forward GEMM (fprop)?",
        "layers/gemm/three_gemms.py fprop",
        "layers/gemm/three_gemms.py encode_weight",
    ),
    ("Which quantizer does an operand get, with which live tensors?", "layers/gemm/scaling.py Scaling"),
    ("Where is the input saved for the weight gradient?", "layers/gemm/three_gemms.py encode_input"),
    (
        "Where is a number format defined?",
        "kernels/quantize/fp8/reference.py quantize_blockwise",
        "kernels/quantize/nvfp4/reference.py quantize_nvfp4",
    ),
    (
        "Which GEMM implementation runs, and why?",
        "kernels/gemm/choice.py choose_gemm",
        "kernels/grouped_gemm/choice.py choose_scaled",
    ),
    ("What decides whether C++ or a definition runs?", "kernels/backend.py choose", "kernels/backend.py explain"),
    ("What is the active recipe?", "layers/recipe/context.py RecipeContext", "layers/module/autocast.py autocast"),
    ("What does each recipe say about each operand?", "layers/recipe/recipes.py MXFP8BlockScaling"),
    (
        "Where do Transformer Engine's arguments become ours?",
        "layers/te/module/linear.py Linear",
        "layers/te/arguments.py takes_parallel_options",
    ),
    (
        "What does the router do with groups of experts?",
        "kernels/router/reference.py within_groups",
        "te_models/model/moe/router.py Router",
    ),
    ("Where is a safetensors header parsed?", "checkpoints/io/header.py parse_header"),
    ("Where are a family's names and configuration?", "checkpoints/families/NAME.py"),
    ("Where is a conversion planned?", "checkpoints/mapping/plan.py make_plan"),
    (
        "What decides whether a weight is moved, re-encoded, requantized or dequantized?",
        "checkpoints/quantized/route.py choose_route",
    ),
    ("Where is a quantized Hugging Face format declared?", "checkpoints/formats/NAME.py"),
    (
        "Where is a key of a run or of a model documented?",
        "te_models/training/config/optimizer.py OptimizerConfig",
        "te_models/config/mlp.py MoEConfig",
    ),
    ("Where is an option of a conversion documented?", "checkpoints/tools/options.py ImportOptions"),
    ("Which layouts over ranks are refused, and why?", "te_models/layouts/rule.py check_layout_rules"),
    (
        "Where does a training run resume?",
        "te_models/training/checkpoints/start.py find_start",
        "te_models/training/checkpoints/checkpoint.py load_state",
    ),
)
"""Questions, and what answers each: a file, and the function or class in it."""


def defined_in(file: str, name: str) -> str:
    """Return `file` if it defines the function or class, so that no row outlives a move. Raises ValueError."""
    path = ROOT / file
    if not path.is_file() or not re.search(rf"^(?:def|class) {name}\b", path.read_text(encoding="utf-8"), re.MULTILINE):
        raise ValueError(f"{file} does not define {name}, as WHERE in docs/generate.py says")
    return file


def where_table() -> str:
    """Questions of somebody who looks for a room, with the files that answer them."""
    rows = []
    for question, *answers in WHERE:
        parts = [answer.split() for answer in answers]
        cells = [f"`{defined_in(*part)}` (`{part[1]}`)" if len(part) == 2 else f"`{part[0]}`" for part in parts]
        rows.append(_item(question, ", ".join(cells)))
    return "\n".join(rows)


def support_table() -> str:
    """The environments in which the tests ran."""
    from docs.support import recorded, table

    return table(recorded())


def families_table() -> str:
    """The families and what their layers are made of."""
    from docs.families_table import table

    return table()


def models_table() -> str:
    """The models that the catalogue knows by name."""
    from docs.models_table import table

    return table()


def layout_rules() -> str:
    """What each key allows about layouts over ranks, by what the rule is of."""
    from docs.layout_rules import rows

    parts = [
        "\n".join([f"**{heading}**\n", *(_item(keys, text) for keys, text in pairs)])
        for heading, pairs in rows().items()
    ]
    return "\n\n".join(parts)


def pages() -> dict[Path, str]:
    """Each page with generated parts: its text as it should be."""
    parts = [
        ("docs/cli.md", "cli-help", cli_help),
        ("docs/training-keys.md", "training-keys", training_keys),
        ("docs/model-keys.md", "model-keys", model_keys),
        ("docs/support.md", "support", support_table),
        ("docs/layout.md", "package-tree", package_tree),
        ("docs/layout.md", "where", where_table),
        ("docs/parallel.md", "layout-rules", layout_rules),
        ("docs/porting.md", "te-deviations", te_deviations),
        ("docs/families.md", "families", families_table),
        ("docs/models.md", "models", models_table),
    ]
    found: dict[Path, str] = {}
    for page, name, body in parts:
        text = found.get(ROOT / page) or (ROOT / page).read_text(encoding="utf-8")
        found[ROOT / page] = fill(text, name, body())
    return found


def main() -> None:
    """Rewrite the pages that are stale and name them."""
    sys.path.insert(0, str(ROOT))  # run as a script, this finds its own folder there
    for page, text in pages().items():
        if page.read_text(encoding="utf-8") != text:
            page.write_text(text, encoding="utf-8")
            print(f"rewrote {page.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
