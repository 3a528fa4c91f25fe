"""Read the public signatures of Transformer Engine from a wheel of it: tests/layers/te/te_signatures.json, what our own
are compared with.

    pip download transformer-engine==2.20.2 --no-deps
    python -m docs.te_signatures transformer_engine-2.20.2-py3-none-any.whl

writes names, order, kinds and defaults as facts. Nothing of the package is imported or run: the sources are parsed. A
class without a signature of its own has that of the base that has one; a dataclass has its fields.
"""

import ast
import json
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

SIGNATURES = Path(__file__).parents[1] / "tests/layers/te/te_signatures.json"
PYTORCH = "transformer_engine/pytorch/"
NAMESPACES = {
    "": f"{PYTORCH}__init__.py",
    "ops.": f"{PYTORCH}ops/basic/__init__.py",
    "optimizers.": f"{PYTORCH}optimizers/__init__.py",
}
"""Prefix -> the file whose imports are its public names."""
ALSO = {
    "ops.": ["Linear", "Sequential", "register_backward_fusion", "register_forward_fusion"],
    "recipe.": [
        *("Format", "MMParams", "QParams", "DelayedScaling", "Float8CurrentScaling", "Float8BlockScaling"),
        *("MXFP8BlockScaling", "NVFP4BlockScaling", "CustomRecipe"),
    ],
    "router.": ["fused_topk_with_score_function", "fused_compute_score_for_moe_aux_loss", "fused_moe_aux_loss"],
}
METHODS = (
    *("__init__", "forward", "backward_dw", "set_tensor_parallel_group", "set_context_parallel_group", "step"),
    *("zero_grad", "quantize", "copy", "set_usage", "make_empty", "update_quantized"),
)
"""What is called of an object, where its class or a base of it has that."""
LEFT_OUT = (
    *("load_framework_extension", "multi_tensor", "MultiTensor", "_", "torch", "is_op_fuser", "CusolverMp"),
    *("newton_schulz", "functools"),
)
"""Beginnings of names: kernels of their C++ extension, and what is no part of a layer set."""

Parameters = list[list[str | None]]
"""[name, kind ("positional", "keyword", "*", "**"), the default as source or None] of each. A default that an
environment variable decides is the one without it."""


class Sources:
    """The modules of a wheel, and where each top-level name is defined."""

    def __init__(self, wheel: Path) -> None:
        self.trees: dict[str, ast.Module] = {}
        with zipfile.ZipFile(wheel) as archive:
            for name in archive.namelist():
                if name.endswith(".py") and name.startswith("transformer_engine/") and "/jax/" not in name:
                    self.trees[name] = ast.parse(archive.read(name))

    def definition(self, name: str, near: str) -> tuple[str, ast.stmt] | None:
        """Return the file and the definition of a name: of those with this name, the nearest to a file."""
        found = [
            (file, node)
            for file, tree in self.trees.items()
            for node in tree.body
            if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == name
        ]
        folder = near.rpartition("/")[0]
        return max(
            found, key=lambda item: (item[0] == near, item[0].startswith(f"{folder}/"), -len(item[0])), default=None
        )

    def public(self, prefix: str) -> Iterator[str]:
        """Yield the names of a namespace."""
        if prefix in NAMESPACES:
            for node in ast.walk(self.trees[NAMESPACES[prefix]]):
                if isinstance(node, ast.ImportFrom):
                    yield from (alias.asname or alias.name for alias in node.names)
        yield from ALSO.get(prefix, ())

    def methods(self, file: str, cls: ast.ClassDef) -> dict[str, Parameters]:
        """Return the signatures of a class, those of its bases included."""
        found: dict[str, Parameters] = {}
        for base in cls.bases:
            if isinstance(base, ast.Name | ast.Attribute):
                name = base.id if isinstance(base, ast.Name) else base.attr
                defined = self.definition(name, file)
                if name != cls.name and defined is not None and isinstance(defined[1], ast.ClassDef):
                    found |= self.methods(defined[0], defined[1])
        if any("dataclass" in ast.unparse(decorator) for decorator in cls.decorator_list):
            found["__init__"] = [*found.get("__init__", []), *_fields(cls)]
        for node in cls.body:
            if isinstance(node, ast.FunctionDef) and node.name in METHODS:
                found[node.name] = _of_arguments(node.args)[1:]
        return found


class _Unset:
    """`os` without environment variables."""

    @staticmethod
    def getenv(name: str, default: str | None = None) -> str | None:
        return default


def _source(default: ast.expr | None) -> str | None:
    if default is None:
        return None
    text = ast.unparse(default)
    return repr(eval(text, {"os": _Unset})) if text.startswith("os.getenv(") else text


def _fields(cls: ast.ClassDef) -> Parameters:
    return [
        [node.target.id, "positional", _source(node.value)]
        for node in cls.body
        if isinstance(node, ast.AnnAssign)
        and isinstance(node.target, ast.Name)
        and not node.target.id.startswith("_")
        and "ClassVar" not in ast.unparse(node.annotation)
        and "init=False" not in ast.unparse(node)
    ]


def _of_arguments(args: ast.arguments) -> Parameters:
    positional = [*args.posonlyargs, *args.args]
    defaults = [None] * (len(positional) - len(args.defaults)) + [*args.defaults]
    found: Parameters = [[a.arg, "positional", _source(d)] for a, d in zip(positional, defaults, strict=True)]
    found += [[args.vararg.arg, "*", None]] if args.vararg else []
    found += [[a.arg, "keyword", _source(d)] for a, d in zip(args.kwonlyargs, args.kw_defaults, strict=True)]
    return found + ([[args.kwarg.arg, "**", None]] if args.kwarg else [])


def read(wheel: Path) -> dict[str, dict[str, Parameters]]:
    """Return name -> method (or "" for a function) -> parameters."""
    sources, found = Sources(wheel), {}
    for prefix in ("", "ops.", "optimizers.", "recipe.", "router."):
        near = {"recipe.": "transformer_engine/common/recipe/__init__.py", "ops.": f"{PYTORCH}ops/basic/x.py"}.get(
            prefix
        )
        for name in sorted(set(sources.public(prefix))):
            defined = None if name.startswith(LEFT_OUT) else sources.definition(name, near or f"{PYTORCH}module/x.py")
            if defined is None:
                continue
            file, node = defined
            is_class = isinstance(node, ast.ClassDef)
            found[prefix + name] = sources.methods(file, node) if is_class else {"": _of_arguments(node.args)}
    return found


def write(wheel: Path) -> None:
    """Write te_signatures.json."""
    lines = [f" {json.dumps(name)}: {json.dumps(value)}" for name, value in read(wheel).items()]
    SIGNATURES.write_text('{"version": ' + json.dumps(wheel.name.split("-")[1]) + ",\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    for wheel in sys.argv[1:]:
        write(Path(wheel))
