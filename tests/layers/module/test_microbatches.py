"""Weights quantized once per step, weight gradients accumulated in place or computed later, inputs kept as they are."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

import te_models.layers as te
from te_models.kernels import quantize as q
from tests.compare import refused
from tests.layers.matrix_recipes import NAMES, fresh

RECIPES = [name for name in NAMES if name is not None]
BUILD = {
    "linear": lambda **options: te.Linear(64, 48, bias=False, **options),
    "layernorm_linear": lambda **options: te.LayerNormLinear(64, 48, **options),
    "layernorm_mlp": lambda **options: te.LayerNormMLP(64, 48, activation="swiglu", **options),
    "grouped": lambda **options: te.GroupedLinear(3, 64, 48, bias=False, **options),
    "per_gemm": lambda **options: te.GroupedLinear(3, 64, 48, bias=False, single_grouped_weight=False, **options),
}


def call(layer: nn.Module, x: Tensor, *rest: object, run: Callable[..., Tensor] | None = None) -> Tensor:
    splits = (torch.tensor([7, 0, 9]),) if isinstance(layer, te.GroupedLinear) else ()
    return (layer if run is None else run)(x, *splits, *rest)


def batches() -> list[Tensor]:
    return [torch.randn(16, 64, generator=torch.Generator().manual_seed(i)) for i in range(3)]


def steps(layer: nn.Module, how: str) -> list[Tensor]:
    """Accumulate gradients over three micro-batches."""
    outputs = []
    for i, x in enumerate(batches()):
        first = None if how == "none" else i == 0
        with te.autocast(recipe=layer.chosen), te.microbatch(first if how == "region" else None):
            y = call(layer, x, first) if how == "argument" else call(layer, x)
        y.backward(torch.linspace(-1, 1, y.numel()).view(y.shape))
        outputs.append(y.detach())
    return [*outputs, *(p.grad for p in layer.parameters())]


@pytest.mark.matrix
@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("kind", BUILD)
def test_cached_weights_change_nothing(kind: str, name: str) -> None:
    results = []
    for how in ("none", "argument", "region"):
        torch.manual_seed(0)
        layer = BUILD[kind]()
        # delayed: the scale of one micro-batch is that of the next, as the history is long and nothing changes
        layer.chosen = fresh(name)
        if name == "delayed":
            with te.autocast(recipe=layer.chosen):
                call(layer, batches()[0] * 3)
        results.append(steps(layer, how))
    for other in results[1:]:
        torch.testing.assert_close(other, results[0], rtol=0, atol=0)


def test_later_micro_batches_do_not_quantize_the_weight(monkeypatch: pytest.MonkeyPatch, definitions: None) -> None:
    layer = te.Linear(64, 48, bias=False)
    layer.chosen = te.recipe("current")
    shapes: list[tuple[int, ...]] = []

    def note(function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda x, *rest, **options: (shapes.append(tuple(x.shape)), function(x, *rest, **options))[1]

    for name in ("quantize_per_tensor", "round_per_tensor", "round_current"):
        monkeypatch.setattr(q, name, note(getattr(q, name)))
    counts = []
    for how in ("none", "argument"):
        shapes.clear()
        steps(layer, how)
        counts.append(shapes.count((48, 64)))
    assert counts[1] == 1 and counts[0] > 2, counts


@pytest.mark.slow
@pytest.mark.parametrize("name", ["delayed", "mxfp8"])
@pytest.mark.parametrize("kind", BUILD)
def test_compiled_micro_batches_share_weights_quantized_before(kind: str, name: str) -> None:
    results = []
    for compiled in (False, True):
        torch._dynamo.reset()
        torch.manual_seed(0)
        layer = BUILD[kind]()
        run = torch.compile(layer, fullgraph=True, backend="aot_eager") if compiled else layer
        outputs = []
        for _ in range(2):
            with te.autocast(recipe=fresh(name)):
                te.cache_weights(layer)
            for x in batches():
                with te.autocast(recipe=fresh(name)), te.microbatch(first=False):
                    y = call(layer, x, run=run)
                y.square().sum().backward()
                outputs.append(y.detach())
            with torch.no_grad():
                for parameter in layer.parameters():
                    parameter.mul_(1.5)
        results.append([*outputs, *(p.grad for p in layer.parameters())])
        assert not torch.equal(outputs[0], outputs[3]), "the second step has not quantized the new weights"
    torch.testing.assert_close(results[1], results[0], rtol=0, atol=0)


@pytest.mark.parametrize("first", [True, False])
def test_a_compiled_graph_cannot_keep_a_weight(first: bool) -> None:
    layer = torch.compile(te.Linear(64, 48), fullgraph=True, backend="aot_eager")
    with te.autocast(recipe=te.recipe("mxfp8")), pytest.raises(Exception, match=r"call cache_weights\(model\)"):
        layer(torch.randn(4, 64), is_first_microbatch=first)


@pytest.mark.parametrize("kind", BUILD)
def test_a_later_micro_batch_without_a_first_quantizes_and_caches(kind: str) -> None:
    """As under Transformer Engine. A graph cannot: it names what can."""
    layer = BUILD[kind]()
    with te.autocast(recipe=te.recipe("mxfp8")):
        y = call(layer, batches()[0])
        assert torch.equal(call(layer, batches()[0], False), y)
        with torch.no_grad():
            for weight in layer.parameters():
                weight.mul_(2.0)
        layer_norm = [p for n, p in layer.named_parameters() if "layer_norm" in n or "bias" in n]
        with torch.no_grad():
            for parameter in layer_norm:
                parameter.mul_(0.5)
        assert torch.equal(call(layer, batches()[0], False), y), "the weights were not cached"
        assert not torch.equal(call(layer, batches()[0]), y)


ORDER = "F0 F1 B0 F2 B1 F3 B2 B3"  # one stage of a pipeline, one forward and one backward pass in turn


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("kind", ["linear", "layernorm_mlp", "grouped", "per_gemm"])
def test_micro_batches_as_megatron_orders_them(kind: str, checkpointed: bool) -> None:
    """Its layers hold the flag: set at the start of a step, cleared by every forward pass, a recomputation's too."""

    class Stage(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.layer = BUILD[kind](fuse_wgrad_accumulation=True)
            self.is_first_microbatch: bool | None = True

        def forward(self, x: Tensor) -> Tensor:
            y = call(self.layer, x, self.is_first_microbatch)
            if self.is_first_microbatch is not None:
                self.is_first_microbatch = False
            return y

    inputs = [torch.randn(16, 64, generator=torch.Generator().manual_seed(i)) for i in range(4)]
    results = []
    for flagged in (True, False):
        stage = Stage()
        weights = [w for n, w in stage.layer.named_parameters() if "weight" in n and "layer_norm" not in n]
        for weight in weights:
            weight.main_grad = torch.zeros(weight.shape)
        for _ in range(2):
            for weight in weights:
                weight.main_grad.zero_()
            stage.is_first_microbatch = True if flagged else None
            outputs: dict[str, Tensor] = {}
            for what in ORDER.split():
                if what[0] == "B":
                    outputs.pop(what[1]).square().sum().backward()
                    continue
                with te.autocast(recipe=te.recipe("mxfp8")):
                    run = (lambda x: te.checkpoint(stage, x)) if checkpointed else stage  # noqa: B023
                    outputs[what[1]] = run(inputs[int(what[1])].clone().requires_grad_())
            with torch.no_grad():
                for weight in weights:
                    weight.sub_(0.01 * weight.main_grad)
        results.append([weight.main_grad for weight in weights])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True)) and results[0][0].any()


@pytest.mark.parametrize("grouped", [False, True])
def test_a_cache_of_another_value_of_the_recipe_or_another_one_is_refused(grouped: bool) -> None:
    """The same format in other numbers: the cached weight would be used as if nothing had changed."""
    layer, x = BUILD["grouped" if grouped else "linear"](), torch.randn(16, 64)
    for first, second in (
        (te.recipe("block"), te.recipe("block", use_f32_scales=True)),
        (te.recipe("mxfp8"), te.recipe("mxfp8", enable_2d_quantization=True)),
        (te.recipe("mxfp8"), te.recipe("block")),
    ):
        with te.autocast(recipe=first):
            call(layer, x, True)
            call(layer, x, False)
        with te.autocast(recipe=second):
            made = f"the cached weight was made by {type(first.weight_quantizer()).__name__}"
            refused(lambda: call(layer, x, False), made, "after a change of recipe")
            call(layer, x, True)
            call(layer, x, False)


@pytest.mark.matrix
@pytest.mark.parametrize("name", [None, *RECIPES])
@pytest.mark.parametrize("kind", BUILD)
def test_fused_accumulation_adds_into_main_grad(kind: str, name: str | None) -> None:
    results = []
    for fused in (False, True):
        torch.manual_seed(0)
        layer = BUILD[kind](fuse_wgrad_accumulation=fused)
        for key in layer.weight_names() if fused else ():
            getattr(layer, key).main_grad = torch.full_like(getattr(layer, key), 0.5).detach()
        for x in batches():
            with te.autocast(enabled=name is not None, recipe=fresh(name)):
                y = call(layer, x)
            y.backward(torch.linspace(-1, 1, y.numel()).view(y.shape))
        weights = [getattr(layer, key) for key in layer.weight_names()]
        if fused:
            assert all(w.grad is None for w in weights)
        results.append([w.main_grad - 0.5 if fused else w.grad for w in weights])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(b, a, rtol=1e-4, atol=1e-4 * float(a.abs().max()))


def test_every_gemm_has_a_main_gradient_of_its_own() -> None:
    """Which is written or added to as its weight says, in its own dtype; that of an empty group is left alone."""
    layer = BUILD["per_gemm"](fuse_wgrad_accumulation=True)
    for g, start in enumerate((float("nan"), 3.0, 1.0)):
        weight = layer.get_parameter(f"weight{g}")
        weight.main_grad = torch.full((48, 64), start, dtype=torch.bfloat16 if g == 1 else torch.float32)
    dense = BUILD["linear"](fuse_wgrad_accumulation=True)
    dense.weight.main_grad = torch.full((48, 64), float("nan"))
    dense.weight.overwrite_main_grad = layer.weight0.overwrite_main_grad = True  # without zeroing
    x, dy = torch.randn(16, 64), torch.randn(16, 48)
    for each in (dense, layer):
        call(each, x).backward(dy)
    torch.testing.assert_close(dense.weight.main_grad, dy.t() @ x)
    torch.testing.assert_close(layer.weight0.main_grad, dy[:7].t() @ x[:7])
    torch.testing.assert_close(layer.weight2.main_grad, 1 + dy[7:].t() @ x[7:])
    assert (layer.weight1.main_grad == 3).all() and layer.weight1.main_grad.dtype == torch.bfloat16


@pytest.mark.slow
def test_main_gradients_of_every_gemm_compile_to_one_graph() -> None:
    layer = BUILD["per_gemm"](fuse_wgrad_accumulation=True)
    weights = [layer.get_parameter(name) for name in layer.weight_names()]
    for w in weights:
        w.main_grad = torch.zeros(48, 64)
    run = torch.compile(layer, fullgraph=True, backend="aot_eager")
    found = []
    for way in (layer, run):
        for w in weights:
            w.main_grad.zero_()
        for x in batches():
            with te.autocast(recipe=te.recipe("mxfp8")):
                y = call(layer, x, run=way)
            y.backward(torch.linspace(-1, 1, y.numel()).view(y.shape))
        found.append([w.main_grad.clone() for w in weights])
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=0)
    assert found[0][0].any() and counters["stats"]["unique_graphs"] == 1 and not counters["graph_break"]


def test_accumulation_needs_a_place_of_the_right_shape() -> None:
    layer = te.Linear(64, 48, fuse_wgrad_accumulation=True)
    refused(lambda: layer(torch.randn(2, 64)), "needs weight.main_grad, a tensor of the weight's shape; it has none")
    layer.weight.main_grad = torch.zeros(64, 48)
    refused(lambda: layer(torch.randn(2, 64)), "has shape (64, 48); expected (48, 64)")


@pytest.mark.parametrize("backend", [None, "aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_fused_accumulation_compiles(backend: str | None) -> None:
    layer = te.Linear(64, 48, bias=False, fuse_wgrad_accumulation=True)
    layer.weight.main_grad = torch.zeros(48, 64)
    run = torch.compile(layer, fullgraph=True, backend=backend) if backend else layer
    expected = torch.zeros(48, 64)
    for x in batches():
        y = run(x)
        dy = torch.linspace(-1, 1, y.numel()).view(y.shape)
        y.backward(dy)
        expected += dy.t() @ x
    torch.testing.assert_close(layer.weight.main_grad, expected)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("kind", BUILD)
def test_delayed_weight_gradients_are_the_same_later(kind: str, fused: bool) -> None:
    results = []
    for later in (False, True):
        torch.manual_seed(0)
        layer = BUILD[kind](delay_wgrad_compute=later, fuse_wgrad_accumulation=fused)
        weights = [getattr(layer, key) for key in layer.weight_names()]
        for w in weights if fused else ():
            w.main_grad = torch.zeros_like(w).detach()
        for x in batches():
            with te.autocast(recipe=te.recipe("mxfp8")):
                y = call(layer, x)
            y.backward(torch.linspace(-1, 1, y.numel()).view(y.shape))
        if later:
            assert all(w.grad is None for w in weights) and not (fused and any(w.main_grad.any() for w in weights))
            layer.backward_dw()
        results.append([w.main_grad if fused else w.grad for w in weights])
    torch.testing.assert_close(results[1], results[0], rtol=0, atol=0)


def test_backward_dw_does_nothing_where_nothing_was_left_out() -> None:
    layer = te.Linear(8, 8)
    layer(torch.randn(2, 8)).sum().backward()
    gradient = layer.weight.grad.clone()
    layer.register_wgrad_accumulation_and_reduce_hooks(lambda: pytest.fail("there is no gradient to wait for"))
    layer.backward_dw()
    assert torch.equal(layer.weight.grad, gradient) and not layer.need_backward_dw()
    assert te.Linear(8, 8, delay_wgrad_compute=True).backward_dw() is None


@pytest.mark.parametrize("name", RECIPES)
def test_saving_the_original_input_changes_memory_and_no_number(name: str) -> None:
    results, kept = [], []
    for save in (False, True):
        torch.manual_seed(0)
        layer = te.Linear(256, 64, bias=False, save_original_input=save)
        x = torch.randn(128, 256).requires_grad_()
        dtypes: list[torch.dtype] = []

        def pack(tensor: Tensor, seen: list[torch.dtype] = dtypes) -> Tensor:
            if tensor.numel() >= 128 * 128:
                seen.append(tensor.dtype)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t), te.autocast(recipe=fresh(name)):
            y = layer(x)
        y.backward(torch.linspace(-1, 1, y.numel()).view(y.shape))
        results.append([y.detach(), x.grad, layer.weight.grad])
        kept.append(dtypes)
    torch.testing.assert_close(results[1], results[0], rtol=0, atol=0)
    assert kept[0].count(torch.float32) + 1 == kept[1].count(torch.float32), kept


def test_the_value_before_quantization_can_be_kept() -> None:
    plain = te.Linear(32, 32)
    torch.manual_seed(0)
    with te.quantized_model_init(recipe=te.recipe("mxfp8"), preserve_high_precision_init_val=True):
        layer = te.Linear(32, 32)
    assert torch.equal(layer.weight.get_high_precision_init_val(), plain.weight)
    layer.weight.clear_high_precision_init_val()
    assert layer.weight.get_high_precision_init_val() is None


def test_nothing_is_kept_of_weights_on_the_meta_device() -> None:
    """They have no values yet; those of `reset_parameters` are quantized like any that are written later."""
    with te.quantized_model_init(recipe=te.recipe("mxfp8"), preserve_high_precision_init_val=True):
        layer = te.Linear(32, 32, device="meta")
    assert layer.weight.is_meta and not hasattr(layer.weight, "get_high_precision_init_val")
    layer.to_empty(device="cpu").reset_parameters()
    assert torch.count_nonzero(layer(torch.randn(4, 32))) > 0


@pytest.mark.matrix
@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("kind", BUILD)
def test_a_kept_weight_stays_where_the_flag_says_so(kind: str, name: str) -> None:
    layer, x = BUILD[kind]().eval(), batches()[0]  # eval: delayed scaling keeps its scales

    def run(first: bool | None, noop: Tensor | None = None) -> Tensor:
        with torch.no_grad(), te.autocast(recipe=fresh(name)), te.microbatch(first, noop=noop):
            return call(layer, x)

    before = run(True, torch.tensor(1.0))  # nothing was kept: the flag has nothing to keep
    with torch.no_grad():
        for weight in map(layer.get_parameter, layer.weight_names()):
            weight.add_(torch.linspace(-1, 1, weight.numel()).view(weight.shape))
    after = run(None)
    assert not torch.equal(after, before)
    for noop in (torch.tensor(1.0), torch.tensor([True]), torch.tensor(3)):
        assert torch.equal(run(True, noop), before) and torch.equal(run(False), before)
    assert torch.equal(run(True, torch.tensor(0.0)), after) and torch.equal(run(False), after)


def test_the_flag_serves_a_whole_model_and_pending_backward_passes() -> None:
    layer = te.Linear(64, 48, bias=False)
    x = batches()[0].requires_grad_()

    def cached(noop: Tensor | None) -> Tensor:
        with te.autocast(recipe=te.recipe("mxfp8")):
            te.cache_weights(layer, noop=noop)
            with te.microbatch(first=False):
                return layer(x)

    first = cached(None)
    layer.weight.data.mul_(2)  # unseen by autograd, which would refuse the pending backward passes
    skipped = cached(torch.ones(()))
    updated = cached(torch.zeros(()))
    assert torch.equal(skipped, first) and torch.equal(updated, 2 * first)
    gradients = [torch.autograd.grad(y.sum(), x)[0] for y in (first, skipped, updated)]
    assert torch.equal(gradients[1], gradients[0]) and torch.equal(gradients[2], 2 * gradients[0])


def test_the_flag_needs_the_first_micro_batch_and_the_same_recipe() -> None:
    for first in (False, None):
        with pytest.raises(ValueError, match=f"noop is for the first micro-batch, which quantizes; first is {first}"):
            te.microbatch(first, noop=torch.zeros(()))
    layer = te.Linear(64, 48)
    with te.autocast(recipe=te.recipe("mxfp8")):
        te.cache_weights(layer)
    with te.autocast(recipe=te.recipe("block")):
        refused(lambda: te.cache_weights(layer, noop=torch.zeros(())), "without noop, after a change of recipe")


@pytest.mark.parametrize("kind", BUILD)
def test_kept_weights_go_where_the_module_goes(kind: str) -> None:
    layer = BUILD[kind]()

    def kept() -> list[torch.Tensor]:
        return [value for name, value in vars(layer).items() if name.startswith("weight_cache")]

    def cache() -> None:
        with te.autocast(recipe=te.recipe("mxfp8")):
            te.cache_weights(layer)

    cache()
    before = kept()
    layer.to("cpu", torch.float32)
    assert before and all(a is b for a, b in zip(kept(), before, strict=True))
    layer.to(torch.bfloat16)  # other weights, of which nothing was kept
    assert kept() == []
    cache()
    layer.to("meta")
    assert kept() == []


@pytest.mark.gpu
def test_kept_weights_follow_to_the_accelerator() -> None:
    layer = te.Linear(64, 64)
    with te.autocast(recipe=te.recipe("mxfp8")):
        te.cache_weights(layer)
        layer.cuda()
        y = layer(torch.randn(32, 64, device="cuda"), is_first_microbatch=False)
    assert y.device.type == "cuda"
