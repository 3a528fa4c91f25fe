"""A learning rate that is another in every step compiles nothing again, in a step compiled whole or in part."""

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

from te_models.layers import FusedAdamW
from tests.build import weight_quantizers
from tests.layers.optimizers.test_fused_adamw import NOT_COMPILED

RATES = (0.01, 0.02, 0.03, 0.04)


def weights(quantized: bool) -> list[nn.Parameter]:
    torch.manual_seed(0)
    values = [torch.randn(32, 64), torch.randn(64)]
    return [nn.Parameter(weight_quantizers()["mxfp8"].quantize(v) if quantized and v.dim() == 2 else v) for v in values]


def train(parameters: list[nn.Parameter], optimizer: torch.optim.Optimizer, step: Callable[[], object]) -> list[int]:
    """Return how many graphs there were after each step."""
    seen = []
    for index, rate in enumerate(RATES):
        torch.manual_seed(index)
        for parameter in parameters:
            parameter.grad = torch.randn(parameter.shape)
        group = optimizer.param_groups[0]
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate
        step()
        seen.append(counters["stats"]["unique_graphs"])
    return seen


@pytest.mark.sentinels("ours-False")
@pytest.mark.parametrize(("kind", "quantized"), [("ours", False), ("ours", True), ("torch", False)])
def test_a_step_compiled_whole(kind: str, quantized: bool) -> None:
    """Masters differ by float32 roundings, which can move a quantized value; the others are compared."""
    found = []
    for compiled in (False, True):
        parameters, rate = weights(quantized), torch.tensor(0.0)
        if kind == "ours":
            optimizer: torch.optim.Optimizer = FusedAdamW(parameters, lr=rate)
            optimizer.init_state()
        else:
            optimizer = torch.optim.AdamW(parameters, lr=rate, capturable=False, foreach=False)
            for parameter in parameters:
                parameter.grad = torch.ones(parameter.shape)
            optimizer.step()  # makes the state, which the compiled step then finds; the rate is zero
        step: Callable[[], object] = optimizer.step
        if compiled:
            step = torch.compile(step, fullgraph=kind == "ours", backend="aot_eager")
        seen = train(parameters, optimizer, step)
        assert seen == [seen[0]] * len(RATES) and (seen[0] > 0) == compiled
        found.append(parameters)
    eager, whole = found
    torch.testing.assert_close(whole[1], eager[1], rtol=1e-5, atol=1e-6)
    if not quantized:
        torch.testing.assert_close(whole[0], eager[0], rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@NOT_COMPILED
def test_a_step_compiled_in_part() -> None:
    """The rate is a number; requantization and the encoding of moments are compiled."""
    parameters = weights(True)
    optimizer = FusedAdamW(parameters, lr=0.0, moment_dtype="float8", compile=True)
    before = [p.detach().clone() for p in parameters]
    seen = train(parameters, optimizer, optimizer.step)
    assert seen[0] > 0 and seen == [seen[0]] * len(RATES)
    assert not torch.equal(before[1], parameters[1])
    assert not torch.equal(before[0].dequantize(), parameters[0].detach().dequantize())
