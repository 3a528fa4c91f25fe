"""Every tensor that the package makes names its device, and its dtype where it would have torch's default: a user
chooses both defaults, and memory of another device, another size or none at all would reach a C++ function by its
address."""

import ast
import re
from collections.abc import Iterator

import pytest
from torch.utils._device import _device_constructors

from tests.structure.tree import ROOT, modules, tree_of

FACTORIES = {function.__name__.removeprefix("fft_") for function in _device_constructors()}
"""Names of the functions whose results are on the default device where no other is named."""
REAL = {"empty", "empty_strided", "eye", "linspace", "logspace", "ones", "rand", "randn", "zeros"}
"""Those whose results have the default dtype where no other is named."""
LEGACY = {"Tensor", "FloatTensor", "LongTensor", "ByteTensor"}
"""Classes that make tensors when they are called, and take no device."""
MAKING = FACTORIES | LEGACY
MENTIONED = re.compile(rf"\btorch(?:\.fft|\.nested)?\.(?:{'|'.join(sorted(MAKING))})\b|\bfrom torch import\b")
"""A file without any of these need not be parsed."""


def unplaced(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield line and name of each function of torch that may make a tensor on the default device or of the default
    dtype."""
    calls = {id(node.func): node for node in ast.walk(tree) if isinstance(node, ast.Call)}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module == "torch":
            yield from ((node.lineno, alias.name) for alias in node.names if alias.name in FACTORIES)
        if not (isinstance(node, ast.Attribute) and node.attr in MAKING):
            continue
        if ast.unparse(node.value) not in ("torch", "torch.fft", "torch.nested"):
            continue
        call = calls.get(id(node))
        if node.attr in LEGACY and call is not None:
            yield node.lineno, node.attr
        if node.attr not in FACTORIES:
            continue
        # a function that is handed on is called where nobody sees with what
        named = [] if call is None else [k for k in call.keywords if ast.unparse(k.value) != "None"]
        holds = call is None or node.attr != "empty" or ast.unparse(call.args[0]) not in ("()", "0")
        for keyword in ("device", "dtype") if node.attr in REAL and holds else ("device",):
            if not any(k.arg in (keyword, None) for k in named):
                yield node.lineno, node.attr
                break


def test_every_tensor_names_its_device() -> None:
    found = [
        f"{file.relative_to(ROOT)}:{line} {name}"
        for file in modules().values()
        if MENTIONED.search(source := file.read_text(encoding="utf-8"))
        for line, name in unplaced(tree_of(source))
    ]
    assert not found, "without a device or a dtype: " + ", ".join(found)


@pytest.mark.parametrize(
    "code",
    [
        "torch.empty(3)",
        "torch.zeros((), dtype=torch.int32)",
        "torch.randn(3, generator=generator)",
        "torch.full((2,), 1.0, device=None)",
        "torch.zeros(3, device=x.device)",
        "make = torch.ones",
        "torch.Tensor([1.0])",
        "torch.fft.fftfreq(3)",
        "from torch import arange",
    ],
)
def test_tensors_on_the_default_device_are_found(code: str) -> None:
    assert len(list(unplaced(ast.parse(code)))) == 1


@pytest.mark.parametrize(
    "code",
    [
        "torch.empty((), device=x.device)",
        "torch.empty(3, dtype=x.dtype, device=x.device)",
        "torch.ones(3, **new)",
        "x.new_empty(3)",
        "torch.zeros_like(x)",
    ],
)
def test_tensors_with_a_device_are_not_found(code: str) -> None:
    assert not list(unplaced(ast.parse(code)))


ASKING = re.compile(r"\bdevice\.type|is_compiling\(|\beager_on_cpu\b|import library\b|\.library\b")
FLAG = "torch's flag before a call of ours, in what every layer does"
MAY_ASK = {
    "layers/attention/dot_product_attention.py": "masks, windows and dropout that a device's attention has not",
    "layers/distributed/deepep.py": "the library is for one device",
    "layers/gemm/product.py": "the one place that knows what GEMMs of a device take",
    "layers/module/autocast.py": FLAG,
    "layers/module/base.py": FLAG,
    "layers/module/recipe_state.py": "the meta device has no values",
    "layers/module/weight_cache.py": "the meta device has no values",
    "layers/te/ops/fuser.py": "torch's autocast is of a device type",
    "layers/optimizers/master_weights.py": "memory: pieces of a large tensor",
    "layers/optimizers/norm.py": "memory: pieces of a large tensor",
    "layers/recipe/context.py": FLAG,
    "layers/recipe/recipe_use.py": FLAG,
    "layers/tensor/grouped_tensor.py": "splits that the host may read without waiting",
}
TRACED = re.compile(r"\bcompiling\b")
STATE = "live state, caches and checks of eager code are not part of a graph"
"""Of recipes, modules and optimizers, which keep something from one call to the next."""
NO_NEW = "a graph cannot make a new quantizer"
NO_SECOND = "a graph has no second derivatives"
OPERANDS = "operands of a graph are its own operations"
MAY_DIFFER = {
    "layers/dynamo/quantizer_string.py": "the string is a constant of a graph",
    "layers/gemm/double_backward.py": NO_SECOND,
    "layers/gemm/prologue.py": NO_NEW,
    "layers/gemm/plain.py": STATE,
    "layers/gemm/product.py": OPERANDS,
    "layers/gemm/weight_format.py": "what a graph compares of a weight's format",
    "layers/te/ops/fuser.py": NO_SECOND,
    "layers/optimizers/adamw_update.py": "torch's fused kernel cannot be in a graph",
    "layers/quantizer/base.py": NO_NEW,
    "layers/quantizer/group_offsets.py": "splits whose check is part of a graph",
} | dict.fromkeys(
    (
        "layers/gemm/wgrad.py",
        "layers/module/autocast.py",
        "layers/module/base.py",
        "layers/module/delayed_scaling.py",
        "layers/module/parameters_split.py",
        "layers/module/recipe_state.py",
        "layers/module/weight_cache.py",
        "layers/recipe/activation_checkpoint.py",
        "layers/recipe/context.py",
        "layers/recipe/recipe_use.py",
        "layers/tensor/grouped_tensor.py",
        "layers/tensor/quantized_tensor.py",
    ),
    STATE,
)


@pytest.mark.parametrize(("words", "allowed"), [(ASKING, MAY_ASK), (TRACED, MAY_DIFFER)], ids=["what runs", "traced"])
def test_layers_do_not_ask_what_runs(words: re.Pattern[str], allowed: dict[str, str]) -> None:
    """Kernels do, once, in `kernels/backend.py`: the exceptions ask for another reason, and their number only falls."""
    asking = {
        path
        for path, file in ((str(file.relative_to(ROOT)), file) for file in modules().values())
        if path.startswith("layers/") and words.search(re.sub(r"#.*", "", file.read_text()))
    }
    assert asking == set(allowed), (sorted(asking - set(allowed)), sorted(set(allowed) - asking))
