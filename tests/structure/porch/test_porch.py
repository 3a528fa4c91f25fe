"""Nothing below the porch knows Transformer Engine: neither its name nor methods that only its scripts call.

What the core imports is in tests/structure/test_rooms.py."""

import ast
import re
from collections.abc import Iterator

import torch

from tests.structure.test_rooms import DOORS, PORCH
from tests.structure.tree import modules, parsed

NAMED = re.compile(r"[Tt](?:ransformer|RANSFORMER)[\s_#-]*(?i:engine)(?!-style)|\b(?:TE|te)\b(?!_MODELS)")
INDENTED = re.compile(r"^    def ([a-z]\w*)\(", re.MULTILINE)
WORD = re.compile(r"[a-z]\w+")
CALLED_ELSEWHERE = {
    # torch's FSDP2 calls them
    *("fsdp_pre_all_gather", "fsdp_post_all_gather"),
    # users, and wrappers such as Megatron's, call them of modules, reports, optimizers and tensors
    *("backward_dw", "register_wgrad_accumulation_and_reduce_hooks", "layers_asked", "layers_run"),
    *("reload_model_params", "to_storage"),
    # what fusible operations, which write their backward passes themselves, need of the other half of these two
    *("rows_gradient", "summed_gradient"),
}
"""Methods of the core that neither the core, nor the models, nor torch's own classes call."""


def below() -> list[str]:
    """The modules of kernels/ and layers/ that are below the porch."""
    rooms = ("te_models.kernels.", "te_models.layers.")
    return [name for name in modules() if name.startswith(rooms) and name not in DOORS and not is_porch(name)]


def is_porch(name: str) -> bool:
    return name.startswith(f"{PORCH}.")


def used_names(tree: ast.Module, *, door: bool) -> Iterator[str]:
    """What a file reads, calls, passes or names in a string; a package's `__init__` only passes on what it imports."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.keyword) and node.arg:
            yield node.arg
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.isidentifier():
            yield node.value
        elif isinstance(node, ast.ImportFrom) and not door:
            yield from (alias.name for alias in node.names)


def methods(tree: ast.Module) -> Iterator[str]:
    """The public methods and properties of classes."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            yield from (f.name for f in node.body if isinstance(f, ast.FunctionDef) and not f.name.startswith("_"))


def test_nothing_below_the_porch_names_transformer_engine() -> None:
    for text in ("Transformer Engine's", "transformer_engine", "as in Transformer\n    # Engine", "of TE"):
        assert NAMED.search(text)
    sources = {name: modules()[name].read_text(encoding="utf-8") for name in below()}
    assert {name: NAMED.findall(text) for name, text in sources.items() if NAMED.search(text)} == {}


def test_a_method_below_the_porch_is_called_below_it() -> None:
    """... by the core, by the models, or by torch: a method that exists for scripts of Transformer Engine alone is
    added by the porch. A file is parsed where it has a name of which no use was found so far."""
    sources = {
        name: file.read_text(encoding="utf-8")
        for name, file in modules().items()
        if name not in DOORS and not is_porch(name)
    }
    torch_calls = {*dir(torch.Tensor), *dir(torch.nn.Module), *dir(torch.optim.Optimizer)}
    layers = [name for name in below() if name.startswith("te_models.layers.")]
    unused = {method for name in layers for method in INDENTED.findall(sources[name])} - torch_calls
    for name, source in sources.items():
        if unused.intersection(WORD.findall(source)):
            unused -= {*used_names(parsed(modules()[name]), door=name.endswith(".__init__"))}
    where = {name for name in layers if unused.intersection(INDENTED.findall(sources[name]))}
    found = {method: name for name in where for method in methods(parsed(modules()[name])) if method in unused}
    assert found.keys() - CALLED_ELSEWHERE == set(), found
    assert CALLED_ELSEWHERE - found.keys() == set(), "called now"
