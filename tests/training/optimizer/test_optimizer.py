"""The optimizer against the AdamW equations in float64, its parameter groups, clipping, masters and state."""

import math

import pytest
import torch

from te_models.training.config import OptimizerConfig
from te_models.training.optimizer.adamw import Optimizer
from te_models.training.optimizer.groups import is_decayed
from tests.training.runs import assert_same_bits


def make(dtype: torch.dtype, seed: int = 0) -> dict[str, torch.nn.Parameter]:
    torch.manual_seed(seed)
    shapes = {"fc.weight": (8, 6), "norm.layer_norm_weight": (6,), "experts.bias": (3, 8)}
    shapes |= dict.fromkeys(("fc.bias", "experts.bias0"), (8,))
    return {name: torch.nn.Parameter(torch.randn(shape).to(dtype)) for name, shape in shapes.items()}


def set_gradients(parameters: dict[str, torch.nn.Parameter], step: int, scale: float = 1.0) -> None:
    torch.manual_seed(100 + step)
    for parameter in parameters.values():
        parameter.grad = (scale * torch.randn(parameter.shape)).to(parameter.dtype)


def test_equals_the_adamw_equations() -> None:
    parameters = make(torch.float64)
    config = OptimizerConfig(weight_decay=0.3, betas=(0.8, 0.95), eps=1e-6)
    expected = {name: p.detach().clone() for name, p in parameters.items()}
    m, v = ({name: torch.zeros_like(p) for name, p in expected.items()} for _ in "mv")
    optimizer = Optimizer(parameters.items(), config)
    for t, lr in enumerate([0.5, 0.25, 0.125], start=1):  # exact in float32, the dtype of the learning rate
        set_gradients(parameters, t)
        for name, w in expected.items():
            g = parameters[name].grad
            if name == "fc.weight":
                w *= 1 - lr * 0.3
            m[name] = 0.8 * m[name] + 0.2 * g
            v[name] = 0.95 * v[name] + 0.05 * g * g
            w -= lr * (m[name] / (1 - 0.8**t)) / ((v[name] / (1 - 0.95**t)).sqrt() + 1e-6)
        optimizer.step(lr)
    for name, parameter in parameters.items():
        torch.testing.assert_close(parameter.detach(), expected[name], rtol=1e-6, atol=1e-7)


def test_only_matrices_decay() -> None:
    assert [name for name, p in make(torch.float32).items() if is_decayed(name, p)] == ["fc.weight"]


def test_clipping_scales_to_the_limit_and_reports_the_norm_before() -> None:
    parameters = make(torch.float32)
    optimizer = Optimizer(parameters.items(), OptimizerConfig(clip_grad_norm=1.0))
    set_gradients(parameters, 0, scale=10.0)
    before = math.sqrt(sum(float(p.grad.double().square().sum()) for p in parameters.values()))
    assert float(optimizer.clip_gradients()) == pytest.approx(before, rel=1e-6)
    after = math.sqrt(sum(float(p.grad.double().square().sum()) for p in parameters.values()))
    assert after == pytest.approx(1.0, rel=1e-6)
    set_gradients(parameters, 0, scale=1e-3)
    unchanged = {name: p.grad.clone() for name, p in parameters.items()}
    optimizer.clip_gradients()
    assert_same_bits(unchanged, {name: p.grad for name, p in parameters.items()})


def test_bf16_norm_is_accumulated_in_float32() -> None:
    parameter = torch.nn.Parameter(torch.zeros(300, 300, dtype=torch.bfloat16))
    optimizer = Optimizer([("w", parameter)], OptimizerConfig(clip_grad_norm=None))
    parameter.grad = torch.full_like(parameter, 1.0078125)
    assert float(optimizer.clip_gradients()) == pytest.approx(300 * 1.0078125, rel=1e-4)  # of bf16: 302, 1e-3 away


def test_masters_collect_updates_that_bf16_would_lose() -> None:
    """1000 steps of 1e-5 from 1.0: each is far below bf16's spacing of 2^-8 there, their sum is not."""
    end = {}
    for masters in (False, True):
        parameter = torch.nn.Parameter(torch.ones(2, 2, dtype=torch.bfloat16))
        optimizer = Optimizer([("w", parameter)], OptimizerConfig(weight_decay=0.0, master_weights=masters))
        for _ in range(1000):
            parameter.grad = torch.ones_like(parameter)
            optimizer.step(1e-5)
        end[masters] = float(parameter.detach()[0, 0])
    assert end[False] == 1.0 and end[True] == pytest.approx(0.99, abs=2**-8)


@pytest.mark.parametrize("moments", ["float32", "bfloat16", "float8"])
@pytest.mark.parametrize("masters", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_state_round_trip_continues_bitwise(dtype: torch.dtype, masters: bool, moments: str) -> None:
    config = OptimizerConfig(master_weights=masters, moment_dtype=moments)

    def fresh() -> tuple[dict[str, torch.nn.Parameter], Optimizer]:
        parameters = make(dtype)
        return parameters, Optimizer(parameters.items(), config, seed=7)

    one, optimizer = fresh()
    assert optimizer.masters.keys() == (one.keys() if masters and dtype is torch.bfloat16 else set())
    for step in range(4):
        set_gradients(one, step)
        optimizer.step(0.1)
        if step == 1:
            saved = {k: t.clone() for k, t in optimizer.state_tensors().items()}
            weights = {k: p.detach().clone() for k, p in one.items()}
    two, resumed = fresh()
    with torch.no_grad():
        for name, p in two.items():
            p.copy_(weights[name])
    resumed.load_state_tensors(saved)
    for step in (2, 3):
        set_gradients(two, step)
        resumed.step(0.1)
    assert_same_bits({k: p.detach() for k, p in one.items()}, {k: p.detach() for k, p in two.items()})
    assert_same_bits(optimizer.state_tensors(), resumed.state_tensors())
