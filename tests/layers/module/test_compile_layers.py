"""Layers compile to one graph, forward and backward, and compute the same bits as eager."""

import itertools

import pytest
import torch

import te_models.layers as te
from tests.layers.matrix_recipes import DEVICES, NAMES, Training, build_stored, fresh, graphs, label

BF16 = torch.bfloat16
FAST = {("linear", False, True), ("linear", True, True), ("grouped", False, True)}
"""(kind, weights stored quantized, with a backward pass) that run on every change; the rest of the matrix is slow."""


def step(layer: torch.nn.Module, run, name: str | None, *args, train: bool = True) -> list[torch.Tensor]:
    """Return output and gradients of one call under a fresh recipe object, from equal live state; or the output."""
    layer.zero_grad()
    # the same random bits and delayed scales in every call
    te.set_rounding_seed(layer, 1)
    layer.fp8_scale = torch.full_like(layer.fp8_scale, 8.0)
    layer.fp8_grad_amax.zero_()
    x = args[0].detach().requires_grad_(train)
    with torch.set_grad_enabled(train), te.autocast(enabled=name is not None, recipe=fresh(name)):
        y = run(x, *args[1:])
    if not train:
        return [y]
    y.backward(torch.linspace(-1, 1, y.numel(), device=y.device).view(y.shape).to(y.dtype))
    return [y.detach(), x.grad, *(p.grad for p in layer.parameters())]


def build(kind: str, dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    torch.manual_seed(0)
    options = {"params_dtype": dtype}
    return {
        "linear": lambda: te.Linear(96, 64, **options),
        "layernorm_linear": lambda: te.LayerNormLinear(96, 64, normalization="RMSNorm", **options),
        "layernorm_mlp": lambda: te.LayerNormMLP(96, 64, activation="swiglu", **options),
        "grouped": lambda: te.GroupedLinear(3, 96, 64, bias=True, **options),
        "per_gemm": lambda: te.GroupedLinear(3, 96, 64, bias=True, single_grouped_weight=False, **options),
    }[kind]()


def assert_same(eager: list[torch.Tensor], compiled: list[torch.Tensor]) -> None:
    """Bit for bit, but for biases' gradients: sums of at most 32 numbers up to 1, in the compiler's order."""
    for a, b in zip(eager, compiled, strict=True):
        torch.testing.assert_close(b, a, rtol=0, atol=32 * 32 * 2.0**-24 if a.dim() == 1 else 0)


MATRIX = [
    pytest.param(kind, *case, marks=() if (kind, *case[1:]) in FAST else pytest.mark.slow, id=f"{kind}-{label(*case)}")
    for kind in ("linear", "layernorm_linear", "layernorm_mlp", "grouped", "per_gemm")
    for case in itertools.product(NAMES, (False, True), (False, True))
]


@pytest.mark.sentinels("linear-mxfp8-plain-train-cpu")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind, name, stored, train", MATRIX)
def test_one_graph_for_all_shapes_splits_and_equal_recipes(
    kind: str, name: str | None, stored: bool, train: bool, device: str
) -> None:
    """And for moved weights, another learning rate, and, once each, for training and evaluation in turns."""
    storage = name or "mxfp8"  # without a recipe, stored weights are computed with as they are
    layer = (build_stored(lambda: build(kind, BF16), storage) if stored else build(kind, BF16)).to(device)
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager")
    training = Training(layer)

    def call(rows: int, train: bool) -> int:
        splits = (torch.tensor([rows - 3, 0, 3], device=device),) if kind in ("grouped", "per_gemm") else ()
        x = torch.randn(rows, 96, dtype=BF16, device=device)
        eager, got = (step(layer, run, name, x, *splits, train=train) for run in (layer, compiled))
        torch.testing.assert_close(got, eager, rtol=0, atol=0)
        return graphs()

    layer.train(train)
    seen = []
    for index, rows in enumerate((40, 33, 64)):
        seen.append(call(rows, train))
        if train:
            training.step(index)
    for mode in (False, True, False) if train else ():
        layer.train(mode)
        seen.append(call(48, mode))
    assert seen == ([1, 1, 1, 2, 2, 2] if train else [1, 1, 1])


@pytest.mark.sentinels("mxfp8-linear")
@pytest.mark.parametrize("kind", ["linear", "grouped"])
@pytest.mark.parametrize("name", NAMES)
def test_inductor_computes_the_same_bits(kind: str, name: str | None) -> None:
    layer = build(kind)
    compiled = torch.compile(layer, fullgraph=True)
    for splits in ([20, 0, 12], [0, 32, 0], [10, 11, 11]):
        rest = (torch.tensor(splits),) if kind == "grouped" else ()
        x = torch.randn(32, 96)
        assert_same(step(layer, layer, name, x, *rest), step(layer, compiled, name, x, *rest))
    assert graphs() == 1


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["linear", "grouped"])
def test_inductor_takes_quantized_parameters(kind: str) -> None:
    """Warnings are errors here: the compiler's cache must be able to key on the parameter's class."""
    with te.quantized_model_init(recipe=te.recipe("mxfp8")):
        layer = build(kind)
    rest = (torch.tensor([5, 0, 7]),) if kind == "grouped" else ()
    x, compiled = torch.randn(12, 96), torch.compile(layer, fullgraph=True)
    assert_same(step(layer, layer, "mxfp8", x, *rest), step(layer, compiled, "mxfp8", x, *rest))
    assert graphs() == 1


def test_a_changed_recipe_recompiles_once() -> None:
    layer = build("linear")
    compiled = torch.compile(layer, fullgraph=True, backend="eager")
    x = torch.randn(8, 96)
    for name in ("mxfp8", "block", "mxfp8", "block"):
        step(layer, compiled, name, x)
    assert graphs() == 2


def test_regions_opened_inside_a_compiled_function() -> None:
    layer = build("linear")

    def run(x: torch.Tensor) -> torch.Tensor:
        with te.autocast(recipe=te.recipe("mxfp8")):
            y = layer(x)
            with te.autocast(enabled=False):
                y = y + layer(x)
        return y * layer(x)

    x = torch.randn(8, 96)
    expected = run(x)
    assert torch.equal(torch.compile(run, fullgraph=True, backend="eager")(x), expected)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_one_row_and_none_under_dynamic_shapes(name: str | None) -> None:
    """Sizes 0 and 1 are numbers to the tracer, which knows them but not every stride."""
    layer = build("linear")
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager")
    for rows in (1, 0):
        x = torch.randn(rows, 96)
        assert_same(*(step(layer, run, name, x) for run in (layer, compiled)))


EDGES = {None: 2, "block": 128, "mxfp8": 32}
"""The rows of the recipe's largest block, or 2."""


@pytest.mark.slow
@pytest.mark.parametrize("name", EDGES)
def test_small_inputs_have_the_graphs_that_are_documented(name: str | None) -> None:
    """One for a single row, one for none; where all rows are in a single block there is no other."""
    layer, edge = build("linear"), EDGES[name]
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend="eager")
    seen = []
    for rows in (200, edge + 1, edge, 2, 1, 0):
        step(layer, compiled, name, torch.randn(rows, 96))
        seen.append(graphs())
    assert seen == [1, 1, 1, 1, 2, 3]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["block", "mxfp8"])
def test_a_single_block_of_rows_is_no_graph_of_its_own(name: str, dtype: torch.dtype) -> None:
    """With the backward pass, whose graph keeps scales of blocks of rows."""
    layer = te.Linear(256, 256, params_dtype=dtype)
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager")
    for rows in (320, EDGES[name] + 1, EDGES[name], 24, 2):
        x = torch.randn(rows, 256, dtype=dtype)
        assert_same(*(step(layer, run, name, x) for run in (layer, compiled)))
    assert graphs() == 1
