"""What quantization did to each operand: noted on request, eager and compiled, changing no number."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import nn

import te_models.layers as te
from te_models.layers.quantizer.group_offsets import GroupOffsets


def fp8(values: np.ndarray, dtype: torch.dtype) -> np.ndarray:
    return torch.from_numpy(values).to(dtype).float().numpy()


@pytest.mark.sentinels("None")
@pytest.mark.parametrize("backend", [None, "aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_they_are_those_of_the_operands(backend: str | None) -> None:
    layer = te.Linear(64, 32, bias=False)
    run = torch.compile(layer, fullgraph=True, backend=backend) if backend else layer
    x, dy = torch.randn(16, 64), torch.randn(16, 32)
    x[0, :4] = torch.tensor([1e-8, -1e-8, 0.0, 40.0])  # two underflows, one zero that is none, the maximum
    with te.autocast(recipe=te.Float8CurrentScaling()), te.collect_statistics():
        y = run(x)
    y.backward(dy)
    found = te.quantization_statistics(layer)
    assert set(found) == {"input", "weight", "grad_output"}
    for role, tensor, dtype in (
        ("input", x, torch.float8_e4m3fn),
        ("weight", layer.weight.detach(), torch.float8_e4m3fn),
        ("grad_output", dy, torch.float8_e5m2),
    ):
        values = tensor.numpy().astype(np.float32)
        amax = np.abs(values).max()
        scale = np.float32(torch.finfo(dtype).max) / amax
        became = fp8(values * scale, dtype)
        assert found[role]["amax"] == amax
        assert found[role]["scale_min"] == found[role]["scale_max"] == pytest.approx(scale, rel=1e-6)
        nonzero = values != 0
        underflow = ((became == 0) & nonzero).sum() / nonzero.sum()
        assert found[role]["underflow"] == pytest.approx(underflow, abs=1e-7)
        assert found[role]["saturation"] == 0.0
    assert found["input"]["underflow"] >= 2 / x.numel()


def test_an_old_scale_saturates() -> None:
    layer = te.Linear(64, 32, bias=False)
    for size in (1.0, 100.0):
        with te.autocast(recipe=te.DelayedScaling()), te.collect_statistics():
            layer(torch.full((4, 64), size))
    assert te.quantization_statistics(layer)["input"]["saturation"] == 1.0
    assert te.quantization_statistics(layer)["input"]["amax"] == 100.0


def test_grouped_rows_are_judged_by_their_own_scales() -> None:
    layer = te.GroupedLinear(2, 32, 16, bias=False)
    x = torch.cat((torch.full((3, 32), 1.0), torch.full((5, 32), 50.0)))
    for _ in range(2):
        with te.autocast(recipe=te.DelayedScaling()), te.collect_statistics():
            layer(x, torch.tensor([3, 5]))
    found = te.quantization_statistics(layer)["input"]
    assert (found["amax"], found["saturation"]) == (50.0, 0.0)
    assert found["scale_min"] == pytest.approx(448 / 50) and found["scale_max"] == pytest.approx(448)


def test_experts_are_not_judged_by_the_scale_of_all() -> None:
    """Rows of 1e-6 beside rows of 5000: under one scale for both, the small ones would all become zero."""
    layer = te.GroupedLinear(2, 32, 16, bias=False)
    x = torch.cat((torch.full((24, 32), 1e-6), torch.full((40, 32), 5000.0)))
    for name in ("current", "nvfp4"):
        with te.autocast(recipe=te.recipe(name)), te.collect_statistics():
            y = layer(x, torch.tensor([24, 40]))
        y.backward(x[:, :16])
        for role in ("input", "grad_output"):
            found = te.quantization_statistics(layer)[role]
            assert found["amax"] == 5000 and found["underflow"] == 0, (name, role, found)
            assert found["scale_max"] > 1e8 * found["scale_min"]


ROWS: dict[str, te.Quantizer | te.Float8Quantizer] = {
    "float8": te.Float8CurrentScalingQuantizer(fp8_dtype=torch.float8_e5m2),
    "float8_block": te.Float8BlockQuantizer(block_scaling_dim=1, force_pow_2_scales=False),
    "float8_block_2d": te.Float8BlockQuantizer(),
    "mxfp8": te.MXFP8Quantizer(),
    "mxfp8_2d": te.MXFP8Quantizer(two_dimensional=True),
    "nvfp4": te.NVFP4Quantizer(with_rht=True),
    "nvfp4_2d": te.NVFP4Quantizer(with_2d_quantization=True),
    "identity": te.IdentityQuantizer(),
    "hybrid": te.HybridQuantizer(rowwise_quantizer=te.MXFP8Quantizer(two_dimensional=True)),
    "live": te.Float8Quantizer(torch.tensor([2.0, 3.0, 50.0, 1e-3]), None, torch.float8_e4m3fn),
}


@pytest.mark.parametrize("splits", [[5, 0, 37, 128], [0, 0, 0, 0]], ids=str)
@pytest.mark.parametrize("name", ROWS)
def test_statistics_of_groups_are_those_of_each_groups_rows(name: str, splits: list[int]) -> None:
    quantizer = ROWS[name]
    torch.manual_seed(0)
    x = torch.randn(180, 70) * torch.exp(4 * torch.randn(180, 1))
    x[sum(splits) :] = float("nan")  # what is past the last group has no part in anything
    found = quantizer.rows_statistics(x, GroupOffsets.of(torch.tensor(splits), len(x)))
    parts = [(i, part) for i, part in enumerate(x[: sum(splits)].split(splits)) if len(part)]
    own = []
    for i, part in parts:
        one = te.Float8Quantizer(quantizer.scale[i], None, quantizer.fp8_dtype) if name == "live" else quantizer
        own.append({k: v.item() for k, v in one.statistics(part).items()})
    weights = [len(part) for _, part in parts]
    expected = {"amax": 0.0, "scale_min": 1.0, "scale_max": 1.0, "underflow": 0.0, "saturation": 0.0}
    if own:
        expected = {
            "amax": max(s["amax"] for s in own),
            "scale_min": min(s["scale_min"] for s in own),
            "scale_max": max(s["scale_max"] for s in own),
            # no value is zero, so that both are fractions of all of a group's
            "underflow": np.average([s["underflow"] for s in own], weights=weights),
            "saturation": np.average([s["saturation"] for s in own], weights=weights),
        }
    assert {k: v.item() for k, v in found.items()} == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
@pytest.mark.parametrize("name", ["current", "block", "mxfp8", "nvfp4"])
def test_what_is_not_finite_is_reported(name: str, value: float) -> None:
    layer, x = te.Linear(32, 32), torch.randn(4, 32)
    x[1, 2] = value
    with te.autocast(recipe=te.recipe(name)), te.collect_statistics():
        layer(x).sum().backward()
    found = te.quantization_statistics(layer)
    assert set(found) == {"input", "weight", "grad_output"}
    assert found["input"]["amax"] == pytest.approx(value, nan_ok=True)
    assert np.isfinite(found["weight"]["amax"])


@pytest.mark.slow
def test_noting_now_and_then_costs_one_graph() -> None:
    layer = te.Linear(32, 16)
    run = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for size, noting in ((1.0, False), (2.0, True), (3.0, False), (4.0, True), (5.0, False)):
        with te.autocast(recipe=te.Float8CurrentScaling()), te.collect_statistics(noting):
            run(torch.full((4, 32), size)).sum().backward()
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2
    assert te.quantization_statistics(layer)["input"]["amax"] == 4.0


def test_formats_in_turn_are_noted_in_graphs() -> None:
    """Each format has another largest number: a constant of its graph."""
    layer, x = nn.Sequential(te.Linear(32, 32), te.Linear(32, 32)), torch.randn(4, 32)
    run = torch.compile(layer, fullgraph=True, backend="eager")
    found = []
    for forward in (layer, run):
        for recipe in (
            te.NVFP4BlockScaling(disable_rht=True, disable_stochastic_rounding=True),
            te.MXFP8BlockScaling(),
        ):
            with te.autocast(recipe=recipe), te.collect_statistics():
                forward(x)
            found.append(te.quantization_statistics(layer))
    assert found[:2] == found[2:] and found[0] != found[1]


def test_evaluation_leaves_no_trace() -> None:
    layer = te.LayerNormMLP(32, 48, activation="swiglu").train()
    with te.autocast(recipe=te.recipe("mxfp8")), te.collect_statistics():
        layer(torch.randn(4, 32)).sum().backward()
        before = te.quantization_statistics(layer)
        layer.eval()
        y = layer(torch.randn(4, 32) * 100)
    y.sum().backward()
    assert te.quantization_statistics(layer) == before


@pytest.mark.parametrize("name", ["delayed", "nvfp4"])
@pytest.mark.parametrize(
    "build", [lambda: te.LayerNormMLP(32, 48), lambda: te.GroupedLinear(2, 32, 16)], ids=["mlp", "moe"]
)
def test_weights_kept_for_a_step_are_noted_where_they_are_quantized(build: Callable[[], nn.Module], name: str) -> None:
    found = []
    for caching in (False, True):
        torch.manual_seed(0)
        layer = build()
        arguments = (torch.randn(8, 32), *((torch.tensor([3, 5]),) if isinstance(layer, te.GroupedLinear) else ()))
        with te.autocast(recipe=te.recipe(name)), te.collect_statistics():
            if caching:
                te.cache_weights(layer)
            with te.microbatch(False if caching else None):
                layer(*arguments)
        found.append(te.quantization_statistics(layer))
    assert found[0] == found[1] and any(key.endswith("weight") for key in found[0])


@pytest.mark.parametrize("name", ["delayed", "current", "block", "mxfp8", "nvfp4"])
def test_noting_them_changes_no_number(name: str) -> None:
    results = []
    for noting in (False, True):
        torch.manual_seed(0)
        layer = te.LayerNormMLP(64, 48, activation="swiglu")
        te.set_rounding_seed(layer, 1)
        for step in range(2):
            x = torch.randn(16, 64, generator=torch.Generator().manual_seed(step)).requires_grad_()
            with te.autocast(recipe=te.recipe(name)), te.collect_statistics(noting):
                y = layer(x)
            y.square().sum().backward()
        results.append([y.detach(), x.grad, *(p.grad for p in layer.parameters())])
        names = {f"{gemm}.{role}" for gemm in ("fc1", "fc2") for role in ("input", "weight", "grad_output")}
        assert set(te.quantization_statistics(layer)) == (names if noting else set())
    torch.testing.assert_close(results[1], results[0], rtol=0, atol=0)


def test_weights_stored_quantized_have_none() -> None:
    with te.quantized_model_init(recipe=te.NVFP4BlockScaling()):
        layer = te.Linear(64, 32)
    with te.autocast(recipe=te.NVFP4BlockScaling()), te.collect_statistics():
        layer(torch.randn(4, 64)).sum().backward()
    assert set(te.quantization_statistics(layer)) == {"input", "grad_output"}


def test_inputs_that_come_quantized_have_none() -> None:
    model = te.ops.Sequential(te.ops.Quantize(), te.ops.BasicLinear(64, 32))
    with te.autocast(recipe=te.recipe("mxfp8")), te.collect_statistics():
        model(torch.randn(4, 64)).sum().backward()
    assert set(te.quantization_statistics(model)) == {"1.weight", "1.grad_output"}
