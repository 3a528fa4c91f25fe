"""Stochastic rounding is unbiased, reproducible from (seed, step, tensor), and the same when compiled."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch._dynamo.utils import counters
from torch._subclasses.fake_tensor import FakeTensorMode

import te_models.layers as te
from tests.compare import raw, refused, same_bits
from tests.layers import emulation_nvfp4 as em

DRAWS = 1024


def draws(quantizer: te.NVFP4Quantizer, x: torch.Tensor) -> np.ndarray:
    """x rounded DRAWS times, in float64: [DRAWS, rows, columns]."""
    found = []
    for step in range(DRAWS):
        operand = quantizer.rounded(x, "rowwise", torch.float32, torch.tensor([11, step]))
        found.append(operand.values.double().numpy() * operand.scale.item())
    return np.stack(found)


def test_the_mean_is_the_value() -> None:
    """Every element is rounded to one of its two neighbours, a Bernoulli variable of known variance, so the mean of the
    draws in units of its standard deviation is normal: |z| < 5.5 for each of 768 elements (chance 3e-5 over all of
    them), the mean of z within 5 / sqrt(768) of 0, and that of z^2 within 5 sqrt(2 / 768) of 1. Rounding to nearest
    fails all three."""
    x = torch.randn(16, 48, generator=torch.Generator().manual_seed(3))
    nearest = em.quantize(x.numpy())
    exact = x.double().numpy()
    # each block's step: the value of code 1 is half of it
    decode = float(np.float32(1) / em.global_encode(nearest.amax))
    scale = em.per_element(em.E4M3.decode(nearest.scales), (1, 16), x.shape) * decode
    magnitude = np.minimum(np.abs(exact) / scale, 6.0)
    below = np.clip(np.searchsorted(em.E2M1.values, magnitude, side="right") - 1, 0, 6)
    low, high = em.E2M1.values[below] * scale, em.E2M1.values[below + 1] * scale
    probability = (magnitude * scale - low) / (high - low)
    inside = (probability > 0.01) & (probability < 0.99)  # elsewhere DRAWS draws are not normal
    assert inside.sum() > 700
    clamped = np.abs(exact) > 6 * scale

    def z_scores(rounded: np.ndarray) -> np.ndarray:
        deviation = (high - low) * np.sqrt(probability * (1 - probability) / DRAWS)
        return ((np.abs(rounded).mean(0) - magnitude * scale)[inside]) / deviation[inside]

    rounded = draws(te.NVFP4Quantizer(stochastic_rounding=True), x)
    assert (np.isclose(np.abs(rounded), low, 1e-6, 0) | np.isclose(np.abs(rounded), high, 1e-6, 0)).all()
    assert np.array_equal(np.signbit(rounded).all(0), np.signbit(exact))
    assert np.allclose(np.abs(rounded[:, clamped]), (6 * scale)[clamped], rtol=1e-6)
    z = z_scores(rounded)
    assert np.abs(z).max() < 5.5 and abs(z.mean()) < 5 / np.sqrt(z.size)
    assert abs((z**2).mean() - 1) < 5 * np.sqrt(2 / z.size)
    biased = z_scores(nearest.values[None])
    assert np.abs(biased).max() > 5.5 and (biased**2).mean() > 10


def test_bits_follow_from_seed_step_and_tensor_alone() -> None:
    quantizer = te.NVFP4Quantizer(stochastic_rounding=True)
    x = torch.randn(32, 32, generator=torch.Generator().manual_seed(0))
    x = x + x.mT  # so that both copies round the same numbers

    def data(seed: int, step: int, usage: str) -> torch.Tensor:
        return quantizer.quantize_fields(x, torch.tensor([seed, step]))[f"{usage}_data"]

    first = data(1, 2, "rowwise")
    torch.rand(100)  # the global generator has no part in it
    assert torch.equal(first, data(1, 2, "rowwise"))
    others = [data(2, 2, "rowwise"), data(1, 3, "rowwise"), data(2**32 + 1, 2, "rowwise"), data(1, 2, "columnwise")]
    for i, a in enumerate([first, *others]):
        for b in others[i:]:
            # with other bits about half of the numbers that lie well between two neighbours come out different
            assert (a != b).float().mean() > 0.3


KEY = torch.tensor([7, 3])
SPLITS = torch.tensor([5, 0, 19])


# how a tensor is quantized by the public classes: (the rank of x, what is given a quantizer, x and a key)
WAYS: dict[str, tuple[int, Callable[..., Any]]] = {
    "quantize": (2, lambda q, x, key: q.quantize(x, key)),
    "call": (2, lambda q, x, key: q(x, key=key)),
    "class": (2, lambda q, x, key: te.NVFP4Tensor.quantize(x, q, key)),
    "storage": (2, lambda q, x, key: te.QuantizedStorage.quantize(x, q, key)),
    "quantize_": (2, lambda q, x, key: te.NVFP4Tensor.empty(x.shape, q, x.dtype).quantize_(x, key=key)),
    "quantize_grouped": (3, lambda q, x, key: q.quantize_grouped(x, key)),
    "grouped storage": (3, lambda q, x, key: te.GroupedTensorStorage.quantize(x, q, key=key)),
    "grouped quantize_": (3, lambda q, x, key: te.GroupedTensor.empty(x.shape, q, x.dtype).quantize_(x, key=key)),
    "rows": (1, lambda q, x, key: te.GroupedRows.quantize_rows(x, SPLITS, q, key)),
    "rows quantize_": (
        1,
        lambda q, x, key: te.GroupedRows.empty(x.shape, q, x.dtype, groups=3).quantize_(x, m_splits=SPLITS, key=key),
    ),
    "rows storage": (1, lambda q, x, key: te.GroupedTensorStorage.quantize(x, q, SPLITS, key)),
}


@pytest.mark.parametrize("format", ["nvfp4", "hybrid"])
@pytest.mark.parametrize("way", WAYS)
def test_tensors_are_quantized_with_a_key(way: str, format: str) -> None:
    quantizer: te.Quantizer = te.NVFP4Quantizer(stochastic_rounding=True)
    if format == "hybrid":
        if way in ("class", "quantize_"):
            quantizer = te.NVFP4Quantizer(stochastic_rounding=True, with_rht=True)
        else:
            quantizer = te.HybridQuantizer(rowwise_quantizer=quantizer, columnwise_quantizer=te.MXFP8Quantizer())
    rank, make = WAYS[way]
    x = torch.randn(*(3,) * (rank == 3), 24, 32, generator=torch.Generator().manual_seed(1))
    found = make(quantizer, x, KEY)
    expected = quantizer.quantize_rows(x, SPLITS, KEY) if rank == 1 else quantizer.quantize_fields(x, KEY)
    assert same_bits(found, expected)
    assert (found.rowwise_data != make(quantizer, x, torch.tensor([7, 4])).rowwise_data).float().mean() > 0.2
    refused(lambda: make(quantizer, x, None), "pass key")
    for wrong in (torch.tensor(3), torch.tensor([1.0, 2.0])):
        refused(lambda wrong=wrong: make(quantizer, x, wrong), "allowed: int64 [2]")


@pytest.mark.slow
@pytest.mark.parametrize("grouped", [False, True])
def test_a_graph_quantizes_with_a_key(grouped: bool) -> None:
    """The key is data: another one compiles nothing."""
    quantizer = te.NVFP4Quantizer(stochastic_rounding=True)
    x = torch.randn(2, 16, 32) if grouped else torch.randn(16, 32)

    def run(x: torch.Tensor, key: torch.Tensor) -> te.QuantizedTensor:
        return quantizer.quantize_grouped(x, key) if grouped else quantizer.quantize(x, key)

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    for counter in range(3):
        key = torch.tensor([5, counter])
        assert same_bits(compiled(x, key), run(x, key))
    assert counters["stats"]["unique_graphs"] == 1


def model() -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(te.Linear(48, 64), te.Linear(64, 32, bias=False))


def train(layers: torch.nn.Module, *steps: int) -> list[torch.Tensor]:
    """The gradients of each step."""
    found = []
    for step in steps:
        layers.zero_grad()
        x = torch.randn(40, 48, generator=torch.Generator().manual_seed(step))
        with te.autocast(recipe=te.NVFP4BlockScaling()):
            y = layers(x)
            y.backward(torch.linspace(-1, 1, y.numel()).view(y.shape) ** 3)
        found += [p.grad.clone() for p in layers.parameters()]
    return found


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return all(torch.equal(raw(x), raw(y)) for x, y in zip(a, b, strict=True))


def test_a_run_repeats_with_its_seed_and_resumes_from_its_state() -> None:
    reference, again, other, resumed = (model() for _ in range(4))
    for layers, seed in ((reference, 5), (again, 5), (other, 6)):
        te.set_rounding_seed(layers, seed)
    expected = train(reference, 0, 1, 2)
    assert same(train(again, 0, 1), expected[:6]) and not same(train(other, 0), expected[:3])
    resumed.load_state_dict(again.state_dict())
    state = {k: v.tolist() for k, v in te.recipe_state(resumed).items()}
    assert state == {"0.fp8_rng_state": [5 << 20, 2], "1.fp8_rng_state": [(5 << 20) + 1, 2]}
    assert same(train(resumed, 2), expected[6:])


def streams(layers: torch.nn.Module) -> list[int]:
    return [int(module.fp8_rng_state[0]) for module in layers.modules() if isinstance(module, te.QuantizedModule)]


def test_an_unseeded_layer_draws_by_the_state_of_torchs_generator() -> None:
    """Equal layers on equal data: two of them round apart, a rebuilt one after the same seed rounds the same."""
    weights = te.Linear(48, 64).state_dict()

    def gradient(seed: int, before: int) -> list[torch.Tensor]:
        torch.manual_seed(seed)
        for _ in range(before):
            te.Linear(8, 8)
        layer = te.Linear(48, 64)
        layer.load_state_dict(weights)
        return train(layer, 0)

    found = gradient(3, 0)
    assert same(gradient(3, 0), found)
    assert not same(gradient(3, 1), found), "the second layer draws what the first one draws"
    assert not same(gradient(4, 0), found), "torch.manual_seed has no effect"


def test_building_a_layer_draws_nothing_but_its_parameters() -> None:
    built = [te.Linear(8, 8).weight for _ in range(2)]
    torch.manual_seed(0)
    for weight in built:
        assert torch.equal(weight, torch.empty(8, 8).normal_(0.0, 0.023))


@pytest.mark.parametrize(
    "options", [{"device": "meta"}, {"init_method": torch.nn.init.ones_}], ids=["meta device", "constant values"]
)
def test_layers_that_draw_no_values_have_streams_of_their_own(options: dict) -> None:
    dense = (te.Linear, te.LayerNormLinear, te.ops.BasicLinear, te.LayerNormMLP)
    layers = torch.nn.Sequential(te.Linear(8, 8), *(kind(8, 8, **options) for kind in dense))
    layers.extend(kind(2, 8, 8, **options) for kind in (te.GroupedLinear, te.ops.GroupedLinear))
    assert len(set(streams(layers))) == 7


def test_layers_build_under_fake_tensors() -> None:
    with FakeTensorMode():
        assert te.Linear(8, 8).weight.shape == (8, 8)


def test_only_streams_in_use_are_state() -> None:
    layer, other = te.Linear(48, 64), te.Linear(48, 64)
    assert te.recipe_state(layer) == {}
    train(layer, 0)
    other.load_state_dict(layer.state_dict())
    assert streams(other) == streams(layer)
    te.set_rounding_seed(other, 0)
    assert te.recipe_state(other)["fp8_rng_state"].tolist() == [0, 0]


@pytest.mark.parametrize("seed", [-1, 2**42])
def test_seeds_have_a_range(seed: int) -> None:
    with pytest.raises(ValueError, match=f"seed is {seed}; allowed: 0 to 4398046511103"):
        te.set_rounding_seed(te.Linear(8, 8), seed)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_training_rounds_to_the_same_bits(backend: str) -> None:
    """The key is that of the forward pass, although the graph's last step is to advance the counter."""
    found = []
    for compiled in (False, True):
        layer = model()[1]
        te.set_rounding_seed(layer, 9)
        run = torch.compile(layer, fullgraph=True, backend=backend) if compiled else layer
        x = torch.randn(40, 64, generator=torch.Generator().manual_seed(0), requires_grad=True)
        with te.autocast(recipe=te.NVFP4BlockScaling()):
            first, second = run(x), run(x)  # two micro-batches in flight
        for y in (first, second):
            y.backward(torch.linspace(-1, 1, y.numel()).view(y.shape) ** 3)
            found += [x.grad.clone(), layer.weight.grad.clone()]
            x.grad = layer.weight.grad = None
    assert counters["stats"]["unique_graphs"] == 1 and same(found[:4], found[4:])
    assert not same(found[:2], found[2:4])
