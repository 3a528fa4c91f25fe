"""`Linear(boundary="layer")`, one operation each way: real against fake, the bits of "kernel", what is refused."""

import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._dynamo.testing import CompileCounter
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import te_models.layers as te
from te_models.kernels.custom_op import differentiable, registered
from te_models.layers.gemm.registered import linear_layer_backward, linear_layer_forward
from tests.compare import refused
from tests.kernels.described import Calls, check_description
from tests.layers.module.test_compile_claims import nodes_of, reachable
from tests.layers.quantizer.examples import EXAMPLES
from tests.layers.recipe.test_delayed_scaling import PLAIN

ROWS, IN, OUT = 40, 64, 48
RECIPES: dict[str, te.Recipe | None] = {
    "none": None,
    "delayed": te.DelayedScaling(),
    "current": te.Float8CurrentScaling(),
    "block": te.Float8BlockScaling(),
    "mxfp8": te.MXFP8BlockScaling(),
    "nvfp4": te.NVFP4BlockScaling(),
    "hybrid": te.CustomRecipe(qfactory=lambda role: EXAMPLES["hybrid"]),
    "kept as it is": te.MXFP8BlockScaling(backward_override="high_precision"),
    "dequantized": te.NVFP4BlockScaling(backward_override="dequantized"),
}
WEIGHTS = ("plain", "stored", "cached")
CASES = [(name, weights) for name in RECIPES for weights in WEIGHTS if (name, weights) != ("none", "cached")]
BOTH = ("kernel", "layer")


def layer_of(name: str, weights: str = "plain", boundary: str = "layer", **options: Any) -> te.Linear:
    torch.manual_seed(0)
    options = {"params_dtype": torch.bfloat16, "name": "layer"} | options
    with te.quantized_model_init(enabled=weights == "stored", recipe=RECIPES[name] or te.MXFP8BlockScaling()):
        layer = te.Linear(IN, OUT, boundary=boundary, **options)
    if layer.fuse_wgrad_accumulation:
        layer.weight.main_grad = torch.ones(OUT, IN)
    return layer


def step(layer: te.Linear, name: str, weights: str, x: Tensor, run: Any = None) -> list[Any]:
    """Return y, the gradients and the amaxes of one pass."""
    generator, run = torch.Generator().manual_seed(1), layer if run is None else run
    with te.autocast(RECIPES[name] is not None, recipe=RECIPES[name]):
        if weights == "cached":
            te.cache_weights(layer)
        y = run(x, False) if weights == "cached" else run(x)
        amax = layer.fp8_amax.clone()
    if y.requires_grad:
        y.backward(torch.randn(y.shape, generator=generator).to(y.dtype))
    main_grad = getattr(layer.weight, "main_grad", None)
    found = [y.detach(), x.grad, layer.weight.grad, main_grad, layer.bias.grad, amax, layer.fp8_grad_amax]
    return [None if t is None else t.clone() for t in found]


def inputs(dtype: torch.dtype = torch.bfloat16, rows: int = ROWS) -> Tensor:
    return torch.randn(rows, IN, generator=torch.Generator().manual_seed(2)).to(dtype)


@pytest.mark.sentinels("none-plain", "current-cached", "kept as it is-plain")
@pytest.mark.parametrize(("name", "weights"), CASES)
def test_real_and_fake_agree(name: str, weights: str) -> None:
    """Forward and backward, for every combination of gradients that are wanted."""
    layer = layer_of(name, weights)
    seen = set()
    for needs in itertools.product((True, False), repeat=3):
        x = inputs().requires_grad_(needs[0])
        layer.weight.requires_grad_(needs[1])
        layer.bias.requires_grad_(needs[2])
        with Calls() as calls:
            step(layer, name, weights, x)
        for op, arguments in calls.found:
            seen.add(op)
            check_description(registered()[op], arguments)
    assert seen == {"linear_layer", "linear_layer_backward"}


@pytest.mark.matrix
@pytest.mark.parametrize("option", ["save_original_input", "fuse_wgrad_accumulation", "statistics"])
@pytest.mark.parametrize("name", ["none", "delayed", "mxfp8"])
def test_real_and_fake_agree_with_options(name: str, option: str) -> None:
    options = {} if option == "statistics" else {option: True}
    found = {}
    for boundary in BOTH:
        layer = layer_of(name, boundary=boundary, **options)
        with Calls() as calls, te.collect_statistics(option == "statistics"):
            found[boundary] = step(layer, name, "plain", inputs().requires_grad_())
        for op, arguments in calls.found:
            if op.startswith("linear_layer"):
                check_description(registered()[op], arguments)
    assert_same(found["layer"], found["kernel"])
    assert (found["layer"][3] is not None) is (option == "fuse_wgrad_accumulation")


@pytest.mark.sentinels("none-needs1-stored", "current-needs2-plain")
@pytest.mark.parametrize(
    ("needs", "weights"),
    [((True, True, True), "plain"), ((True, False, False), "stored"), ((False, True, False), "plain")],
)
@pytest.mark.parametrize("name", ["none", "current", "nvfp4", "delayed"])
def test_opcheck(name: str, needs: tuple[bool, ...], weights: str) -> None:
    layer = layer_of(name, weights)
    for parameter, needed in zip((layer.weight, layer.bias), needs[1:], strict=True):
        parameter.requires_grad_(needed)
    with Calls() as calls:
        step(layer, name, weights, inputs().requires_grad_(needs[0]))
    checks = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    ops = {"linear_layer": linear_layer_forward, "linear_layer_backward": linear_layer_backward}
    for op, arguments in calls.found:
        torch.library.opcheck(ops[op], arguments, test_utils=checks)


def assert_same(found: list[Any], expected: list[Any]) -> None:
    for got, want in zip(found, expected, strict=True):
        assert (got is None) is (want is None)
        assert got is None or torch.equal(got, want)


FAST = {("none", "plain"), ("nvfp4", "cached")}
COMPILED = [
    pytest.param(*case, how, marks=() if how == "aot_eager" and case in FAST else pytest.mark.slow)
    for case, how in itertools.product(CASES, ("aot_eager", "inductor"))
]


@pytest.mark.sentinels(
    *("none-plain-aot_eager", "nvfp4-cached-eager", "mxfp8-stored-eager", "hybrid-plain-eager"),
    *("block-cached-eager", "dequantized-stored-eager", "delayed-plain-eager", "delayed-stored-eager"),
    *("current-cached-eager", "kept as it is-plain-eager", "none-stored-eager"),
)
@pytest.mark.parametrize(("name", "weights", "how"), [*((*case, "eager") for case in CASES), *COMPILED])
def test_numbers_are_those_of_the_other_boundary(name: str, weights: str, how: str) -> None:
    """Bit for bit, two steps one after the other: the second one of delayed scaling uses the first one's amaxes."""

    def two_steps(boundary: str) -> list[Any]:
        layer = layer_of(name, weights, boundary)
        run = layer if how == "eager" else torch.compile(layer, fullgraph=True, backend=how)
        return [t for _ in range(2) for t in step(layer, name, weights, inputs().requires_grad_(), run)]

    assert_same(two_steps("layer"), two_steps("kernel"))


@pytest.mark.parametrize("how", ["eager", pytest.param("aot_eager", marks=pytest.mark.slow)])
def test_float32_without_a_recipe_is_torchs_own(how: str) -> None:
    found = []
    for boundary in (*BOTH, None):
        layer: Any = layer_of("none", boundary=boundary or "kernel", params_dtype=torch.float32)
        if boundary is None:
            plain = torch.nn.Linear(IN, OUT)
            plain.weight, plain.bias = layer.weight, layer.bias
            layer = plain
        x = inputs(torch.float32).view(5, 8, IN).requires_grad_()
        y = (layer if how == "eager" else torch.compile(layer, fullgraph=True, backend=how))(x)
        y.square().sum().backward()
        found.append([y.detach(), x.grad, layer.weight.grad, layer.bias.grad])
    assert_same(found[1], found[0])
    assert_same(found[2], found[0])


@pytest.mark.sentinels("delayed-eager")
@pytest.mark.parametrize("how", ["eager", "aot_eager"])
@pytest.mark.parametrize("name", ["delayed", "nvfp4"])
def test_a_checkpoint_records_once_and_repeats_the_numbers(name: str, how: str) -> None:
    found = []
    for boundary in BOTH:
        layer = layer_of(name, boundary=boundary)

        def run(x: Tensor, layer: te.Linear = layer) -> Tensor:
            return te.checkpoint(layer, x, use_reentrant=False)

        run = run if how == "eager" else torch.compile(run, fullgraph=True, backend=how)
        steps = (step(layer, name, "plain", inputs().requires_grad_(), run) for _ in range(2))
        found.append([t for tensors in steps for t in [*tensors, layer.fp8_scale]])
    assert_same(found[1], found[0])


@pytest.mark.slow
def test_a_region_inside_the_graph() -> None:
    """What it writes forward and what it writes backward are different tensors: a plain `aot_autograd` makes it."""
    found = []
    for boundary in BOTH:
        layer = layer_of("delayed", boundary=boundary)

        @torch.compile(fullgraph=True, backend=PLAIN)
        def run(x: Tensor, layer: te.Linear = layer) -> Tensor:
            with te.autocast(recipe=RECIPES["delayed"]):
                return layer(x)

        for _ in range(2):
            x = inputs().requires_grad_()
            run(x).float().square().sum().backward()
        found.append([x.grad, layer.weight.grad, layer.fp8_scale, layer.fp8_history, layer.fp8_grad_amax.clone()])
    assert_same(found[1], found[0])


@pytest.mark.parametrize(("name", "weights"), [("delayed", "plain"), ("nvfp4", "stored")])
def test_fsdp2_gathers_for_one_operation(name: str, weights: str) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        found = []
        for boundary in BOTH:
            layer = layer_of(name, weights, boundary)
            model = torch.nn.Sequential(layer, torch.nn.Tanh())
            fully_shard(model, mesh=init_device_mesh("cpu", (1,)), reshard_after_forward=True)
            x = inputs().requires_grad_()
            with te.autocast(recipe=RECIPES[name]):
                y = model(x)
            y.float().square().sum().backward()
            found.append([y.detach(), x.grad, layer.weight.grad.full_tensor(), layer.bias.grad.full_tensor()])
        assert_same(found[1], found[0])
    finally:
        dist.destroy_process_group()


def test_what_is_saved_of_x_is_quantized() -> None:
    """Only the copy that wgrad reads, not x; and the pass keeps no recipe."""
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        layer, x = layer_of("mxfp8"), inputs().requires_grad_()
        with te.autocast(recipe=RECIPES["mxfp8"]):
            y = layer(x)
    found = [(t.dtype, tuple(t.shape)) for t in saved]
    assert (torch.float8_e4m3fn, (ROWS, IN)) in found and (torch.uint8, (ROWS // 32 + 1, IN)) in found
    assert (x.dtype, (ROWS, IN)) not in found and len(found) == 3  # and the weight
    nodes = [node for node in nodes_of(y) if hasattr(node, "saved_tensors")]
    held = reachable([vars(node) for node in nodes])
    assert len(held) > 3 and not [item for item in held if isinstance(item, te.Recipe)]
    assert not [a for a in linear_layer_backward._opoverload._schema.arguments if "recipe" in a.name]


def test_without_gradients_nothing_is_saved() -> None:
    layer = layer_of("mxfp8")
    with Calls() as calls, torch.no_grad():
        step(layer, "mxfp8", "plain", inputs().requires_grad_())
    ((_, arguments),) = calls.found
    assert arguments[-1] == [False, False, False]


@pytest.mark.sentinels("none")
@pytest.mark.parametrize("name", ["none", "delayed", "mxfp8", "nvfp4"])
def test_a_graph_of_one_operation_for_all_token_counts_and_equal_recipes(name: str) -> None:
    layer, counter, recipe = layer_of(name), CompileCounter(), RECIPES[name]
    run = torch.compile(layer, backend=counter, fullgraph=True, dynamic=True)
    for rows in (40, 17, 33):
        with te.autocast(recipe is not None, recipe=recipe and te.Recipe.from_dict(recipe.to_dict())):
            assert run(inputs(rows=rows).requires_grad_()).shape == (rows, OUT)
    assert counter.frame_count == 1


def test_what_one_operation_cannot_do_is_refused() -> None:
    refused(lambda: layer_of("none", boundary="module"), "boundary is 'module'; allowed: 'kernel', 'layer'")
    with pytest.raises(ValueError, match="boundary='layer' does not work with delay_wgrad_compute=True; allowed:"):
        layer_of("none", delay_wgrad_compute=True)
    layer = layer_of("none", fuse_wgrad_accumulation=True)
    layer.weight.grad_added_to_main_grad = False
    refused(lambda: layer(inputs()), "boundary='layer' does not work with a weight that has grad_added_to_main")
    x = inputs().requires_grad_()
    (dx,) = torch.autograd.grad(layer_of("none")(x).float().square().sum(), x, create_graph=True)
    refused(lambda: dx.sum().backward(), "no autograd formula was registered", error=RuntimeError)


def test_pairs_that_do_not_fit_are_refused() -> None:
    with pytest.raises(TypeError, match="linear_layer has no parameter dy"):
        differentiable(linear_layer_forward, linear_layer_backward, gradients=("dy",))
    with pytest.raises(TypeError, match=r"linear_layer_backward returns .* returns a NamedTuple"):
        differentiable(linear_layer_backward, linear_layer_forward, gradients=("dy",))
