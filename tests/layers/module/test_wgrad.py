"""Weight gradients that are fused into main gradients or delayed: only those that are wanted, and in float32."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import te_models.layers as te
from te_models.kernels.gemm import reference as dense
from te_models.kernels.grouped_gemm import reference as grouped
from tests.compare import refused

SPLITS = torch.tensor([3, 5, 8])


def experts(**options: bool) -> te.GroupedLinear:
    torch.manual_seed(0)
    return te.GroupedLinear(3, 64, 32, bias=False, single_grouped_weight=False, **options)


@pytest.mark.parametrize(
    "layer",
    [
        *(kind(64, 32, fuse_wgrad_accumulation=True) for kind in (te.Linear, te.ops.Linear, te.LayerNormMLP)),
        experts(fuse_wgrad_accumulation=True),
    ],
    ids=lambda layer: type(layer).__name__,
)
@pytest.mark.parametrize("name", [None, "mxfp8"], ids=str)
def test_no_main_gradient_is_asked_for_where_none_is_written(layer: nn.Module, name: str | None) -> None:
    rest = (SPLITS,) if isinstance(layer, te.GroupedLinear) else ()
    with te.autocast(enabled=name is not None, recipe=name and te.recipe(name)):
        with torch.no_grad():
            y = layer(torch.ones(16, 64), *rest)
        x = torch.ones(16, 64, requires_grad=True)
        layer.requires_grad_(False)
        assert torch.equal(layer(x, *rest), y)
        layer(x, *rest).sum().backward()
        layer.requires_grad_(True)
        refused(lambda: layer(x, *rest), "needs weight.main_grad")
    assert torch.count_nonzero(x.grad) > 0


@pytest.mark.parametrize("name", [None, "mxfp8"], ids=str)
@pytest.mark.parametrize("delayed", [False, True])
@pytest.mark.parametrize("fused", [False, True])
def test_a_frozen_member_gets_no_gradient(fused: bool, delayed: bool, name: str | None) -> None:
    x = torch.randn(16, 64)

    def gradients(layer: te.GroupedLinear) -> list[Tensor | None]:
        layer.weight1.requires_grad_(False)
        with te.autocast(enabled=name is not None, recipe=name and te.recipe(name)):
            layer(x, SPLITS).sum().backward()
        if layer._later is not None:
            layer.backward_dw()
        return [getattr(w, "main_grad", None) if w.grad is None else w.grad for w in layer.parameters()]

    expected = gradients(experts())
    layer = experts(fuse_wgrad_accumulation=fused, delay_wgrad_compute=delayed)
    for weight in (layer.weight0, layer.weight2) if fused else ():
        weight.main_grad = torch.zeros(weight.shape)
    found = gradients(layer)
    assert expected[1] is None and found[1] is None
    for g in (0, 2):
        torch.testing.assert_close(found[g], expected[g], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("written", ["x", "dy"])
@pytest.mark.parametrize("grouped", [False, True])
def test_what_a_delayed_gradient_reads_is_not_written_to(grouped: bool, written: str) -> None:
    """Its gradient was that of the values written."""
    layer = experts(delay_wgrad_compute=True) if grouped else te.Linear(64, 32, bias=False, delay_wgrad_compute=True)
    rest = (SPLITS,) if grouped else ()
    tensors = {"x": torch.randn(16, 64), "dy": torch.randn(16, 32)}
    layer(tensors["x"], *rest).backward(tensors["dy"])
    tensors[written].zero_()
    refused(layer.backward_dw, "was written to between the backward pass and backward_dw()", error=RuntimeError)
    with te.autocast(recipe=te.recipe("mxfp8")):
        layer(tensors["x"], *rest).backward(tensors["dy"])
    tensors[written].fill_(1.0)  # the quantized copies are the layer's own
    layer.backward_dw()
    assert all(weight.grad is not None for weight in layer.parameters())


@pytest.mark.parametrize("delayed", [False, True])
@pytest.mark.parametrize("name", [None, "mxfp8"], ids=str)
@pytest.mark.parametrize(
    "kind", [te.Linear, te.LayerNormLinear, te.LayerNormMLP, experts, te.GroupedLinear], ids=lambda kind: kind.__name__
)
def test_the_first_micro_batch_writes_main_gradients(kind: Callable[..., nn.Module], name: str, delayed: bool) -> None:
    """Scripts that tell Transformer Engine which one is the first zero nothing; sums grew over all steps."""
    sizes = {"GroupedLinear": (3, 64, 32), "experts": ()}.get(kind.__name__, (64, 32))
    layer = kind(*sizes, fuse_wgrad_accumulation=True, delay_wgrad_compute=delayed)
    weights = [p for n, p in layer.named_parameters() if "weight" in n and "layer_norm" not in n]
    rest = (SPLITS,) if isinstance(layer, te.GroupedLinear) else ()

    def run(first: bool | None, batch: Tensor) -> list[Tensor]:
        with te.autocast(enabled=name is not None, recipe=name and te.recipe(name)):
            layer(batch, *rest, is_first_microbatch=first).sum().backward()
        if delayed:
            layer.backward_dw()
        return [weight.main_grad.clone() for weight in weights]

    batches = torch.randn(2, 16, 64)
    for weight in weights:
        weight.main_grad = torch.full(weight.shape, 7.0)
    one = run(True, batches[0])
    assert all(grad.abs().max() > 0 for grad in one)
    both = run(False, batches[1])
    assert all(torch.equal(a, b) for a, b in zip(one, run(True, batches[0]), strict=True))
    assert all(torch.equal(a, b) for a, b in zip(both, run(False, batches[1]), strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(one, both, strict=True))


KINDS: dict[str, Callable[..., nn.Module]] = {
    "Linear": lambda **options: te.Linear(64, 32, bias=False, **options),
    "LayerNormLinear": lambda **options: te.LayerNormLinear(64, 32, bias=False, **options),
    "LayerNormMLP": lambda **options: te.LayerNormMLP(64, 32, bias=False, **options),
    "GroupedLinear": lambda **options: te.GroupedLinear(1, 64, 32, bias=False, single_grouped_weight=True, **options),
    "per-GEMM": lambda **options: te.GroupedLinear(1, 64, 32, bias=False, single_grouped_weight=False, **options),
    "ops.Linear": lambda **options: te.ops.Linear(64, 32, bias=False, **options),
    "ops.GroupedLinear": lambda **options: te.ops.GroupedLinear(1, 64, 32, bias=False, **options),
}


def main_gradients(
    kind: str, rows: int, name: str | None, run: Callable[..., Any] = lambda function, *given: function(*given)
) -> list[Tensor]:
    """Return what two micro-batches leave in the float32 main gradients of bfloat16 weights."""
    torch.manual_seed(0)
    layer = KINDS[kind](params_dtype=torch.bfloat16, fuse_wgrad_accumulation=True)
    weights = [w for w in layer.parameters() if w.dim() > 1]
    for weight in weights:
        with torch.no_grad():
            weight.copy_(torch.linspace(-0.2, 0.2, weight.numel()).view(weight.shape))
        weight.main_grad = torch.zeros(weight.shape)
    rest = (torch.tensor([rows]),) if "Grouped" in kind or kind == "per-GEMM" else ()

    def forward(x: Tensor) -> Tensor:
        with te.autocast(enabled=name is not None, recipe=name and te.recipe(name)):
            return layer(x, *rest)

    for seed in (1, 2):
        x, dy = torch.randn(2, rows, 64, generator=torch.Generator().manual_seed(seed)).bfloat16()
        y = run(forward, x)
        y.backward(dy[:, : y.shape[-1]])
    return [weight.main_grad.reshape(-1, weight.shape[-1]) for weight in weights]


def in_float64(out: Tensor, left: Tensor, right: Tensor, accumulate: bool, scale: Tensor | None) -> None:
    """`accumulate_product` without a rounding until the sum reaches `out`."""
    product = (left.double() @ right.double()) * (1.0 if scale is None else scale.double())
    out.copy_(out.double() + product if accumulate else product)


@pytest.mark.sentinels("16-None", "96-mxfp8", "16-delayed")
@pytest.mark.parametrize("name", [None, "delayed", "current", "block", "mxfp8", "nvfp4"], ids=str)
@pytest.mark.parametrize("rows", [16, 96])
def test_bfloat16_layers_accumulate_in_float32(rows: int, name: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """On CPU each product of more than 32 rows was rounded to bfloat16, 0.17 % off, before it was added."""
    found = {kind: main_gradients(kind, rows, name) for kind in KINDS}
    for module in (dense, grouped):
        monkeypatch.setattr(module, "accumulate_product", in_float64)
    for kind, gradients in found.items():
        for gradient, exact in zip(gradients, main_gradients(kind, rows, name), strict=True):
            assert (gradient - exact).norm() < 1e-6 * exact.norm(), kind
    same = ("Linear", "GroupedLinear", "per-GEMM", "ops.Linear", "ops.GroupedLinear")
    assert all(torch.equal(found[kind][0], found["Linear"][0]) for kind in same)


@pytest.mark.slow
def test_a_compiled_layer_accumulates_in_float32() -> None:
    compiled = functools.partial(torch.compile, fullgraph=True, backend="aot_eager")
    (found,) = main_gradients("per-GEMM", 96, "mxfp8", lambda function, x: compiled(function)(x))
    (eager,) = main_gradients("per-GEMM", 96, "mxfp8")
    assert torch.equal(found, eager)


@pytest.mark.sentinels("Linear-True", *(f"{kind}-False" for kind in KINDS))
@pytest.mark.parametrize(
    ("kind", "compiled"),
    [(kind, False) for kind in KINDS] + [("LayerNormMLP", True), ("Linear", True), ("per-GEMM", True)],
)
def test_a_wrapper_that_waits_for_every_gradient_hears_of_it(kind: str, compiled: bool) -> None:
    """As Megatron's DistributedDataParallel: it sets the attribute, reads it in the hook, adds what was not fused."""
    layer = KINDS[kind](fuse_wgrad_accumulation=True)
    weights = [w for w in layer.parameters() if w.dim() > 1]
    heard: list[bool] = []
    for weight in weights:
        weight.main_grad, weight.grad_added_to_main_grad = torch.zeros(weight.shape), False
        weight.register_post_accumulate_grad_hook(lambda w: heard.append(w.grad_added_to_main_grad))
    rest = (torch.tensor([16]),) if "Grouped" in kind or kind == "per-GEMM" else ()
    run = torch.compile(layer, fullgraph=True, backend="aot_eager") if compiled else layer
    run(torch.randn(16, 64), *rest).square().sum().backward()
    assert heard == [True] * len(weights)
    for weight in weights:
        before = weight.main_grad.clone()
        assert weight.grad.shape == weight.shape and not weight.grad.any() and before.any()
        assert torch.equal(te.gradient_of(weight), before)


class Experts(nn.Module):
    """A model of every layer with GEMMs, each with its own way of fusing a weight gradient."""

    def __init__(self, **options: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = te.Linear(64, 64, **options)
        self.norm = te.LayerNormLinear(64, 64, **options)
        self.mlp = te.LayerNormMLP(64, 64, **options)
        self.grouped = te.GroupedLinear(3, 64, 64, **options)
        self.per_gemm = te.GroupedLinear(3, 64, 64, single_grouped_weight=False, **options)
        self.head = te.ops.Sequential(te.ops.Linear(64, 64, **options))

    def forward(self, x: Tensor) -> Tensor:
        x = self.mlp(self.norm(self.first(x)))
        return self.head(self.per_gemm(self.grouped(x, SPLITS), SPLITS))

    def backward_dw(self) -> None:
        for module in self.modules():
            if module is not self and hasattr(module, "backward_dw"):
                module.backward_dw()


class Buckets:
    """Megatron's data parallelism: flat buckets of main gradients, each reduced when hooks of all its members ran."""

    def __init__(self, model: nn.Module, size: int) -> None:
        self.last, self.reduced, self.waiting = False, [], []
        self.accumulators: list[Any] = []
        parameters = list(model.parameters())
        for begin in range(0, len(parameters), size):
            members = parameters[begin : begin + size]
            flat = torch.zeros(sum(p.numel() for p in members))
            self.waiting.append({id(p) for p in members})
            for parameter, part in zip(members, flat.split([p.numel() for p in members]), strict=True):
                parameter.main_grad, parameter.grad_added_to_main_grad = part.view(parameter.shape), False
                hook = functools.partial(self.arrived, parameter, len(self.waiting) - 1)
                if getattr(parameter, "skip_backward_post_hook", False):
                    owner = next(m for m in model.modules() if any(p is parameter for p in m.parameters(False)))
                    owner.register_wgrad_accumulation_and_reduce_hooks(hook)
                else:
                    accumulator = parameter.expand_as(parameter).grad_fn.next_functions[0][0]
                    accumulator.register_hook(hook)
                    self.accumulators.append(accumulator)

    def arrived(self, parameter: nn.Parameter, bucket: int, *_: Any) -> None:
        assert parameter.grad is not None, "the hook ran, and there is no gradient"
        if not parameter.grad_added_to_main_grad or getattr(parameter, "zero_out_wgrad", False):
            parameter.main_grad.add_(parameter.grad)
        parameter.grad = None
        if self.last:
            self.waiting[bucket].remove(id(parameter))
            if not self.waiting[bucket]:
                self.reduced.append(bucket)


@pytest.mark.parametrize("name", [None, "mxfp8", "stored"], ids=str)
@pytest.mark.parametrize("delayed", [False, True])
def test_buckets_of_a_wrapper_fill(delayed: bool, name: str | None) -> None:
    """Every bucket is reduced once, in the last of three micro-batches, and holds what autograd alone would sum up."""
    chosen = None if name is None else te.recipe("mxfp8")
    region = functools.partial(te.autocast, enabled=name is not None, recipe=chosen)
    with te.quantized_model_init(enabled=name == "stored", recipe=chosen):
        plain = Experts()
        model = Experts(fuse_wgrad_accumulation=True, delay_wgrad_compute=delayed)
    model.mlp.fc1_weight.zero_out_wgrad = True
    wrapper = Buckets(model, size=5)
    for i in range(3):
        x, wrapper.last = torch.randn(16, 64, generator=torch.Generator().manual_seed(i)), i == 2
        for one in (plain, model):
            with region():
                y = one(x)
            y.square().sum().backward()
        if delayed:
            assert not wrapper.last or len(wrapper.reduced) < len(wrapper.waiting)
            model.backward_dw()
    assert sorted(wrapper.reduced) == list(range(len(wrapper.waiting))) and len(wrapper.reduced) > 2
    for parameter, expected in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(parameter.main_grad, expected.grad, rtol=1e-5, atol=1e-4)
