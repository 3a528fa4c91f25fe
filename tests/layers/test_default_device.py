"""What works on tensors that are there gives the same under any default device; `pytest --default-device meta`."""

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

import te_models.layers as te
from te_models.kernels.backend import using_backend
from te_models.layers.optimizers import FusedAdam, FusedSGD
from tests.default_device import defaulting

BF16 = torch.bfloat16
NAMES = ("delayed", "current", "block", "mxfp8", "nvfp4")
Case = Callable[[], list[Tensor]]


@pytest.fixture
def libraries() -> Iterator[None]:
    """A process that uses the C++ libraries from the start."""
    with using_backend("compiled"):
        yield


def normal(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu").to(dtype)


def layer(make: Callable[[], nn.Module], *inputs: Tensor) -> Case:
    torch.manual_seed(0)
    module = make()

    def run() -> list[Tensor]:
        with torch.no_grad():
            return [module(*inputs)]

    return run


def trained(name: str) -> Case:
    """Forward and backward pass of a layer under a recipe, of one that stores its weight as well."""

    def run() -> list[Tensor]:
        found = []
        for stored in (False, True):
            torch.manual_seed(0)
            with te.quantized_model_init(enabled=stored, recipe=te.recipe(name)):
                module = te.Linear(64, 96, params_dtype=BF16, device="cpu")
            te.set_rounding_seed(module, 1)
            x = normal(32, 64, dtype=BF16).requires_grad_()
            with te.autocast(recipe=te.recipe(name)):
                y = module(x)
            y.backward(normal(32, 96, dtype=BF16))
            quantized = te.recipe(name).weight_quantizer()(normal(64, 96))
            found += [y.detach(), x.grad, module.weight.grad, quantized.dequantize()]
        return found

    return run


def stepped(make: Callable[[list[nn.Parameter]], torch.optim.Optimizer]) -> Case:
    def run() -> list[Tensor]:
        parameter = nn.Parameter(normal(64, 96, dtype=BF16))
        optimizer = make([parameter])
        for _ in range(2):
            parameter.grad = normal(64, 96, dtype=BF16)
            optimizer.step()
        state = [value for value in optimizer.state[parameter].values() if isinstance(value, Tensor)]
        return [parameter.detach(), *state]

    return run


CASES: dict[str, Callable[[], Case]] = {
    "RMSNorm": lambda: layer(lambda: te.RMSNorm(1024), normal(600, 1024)),
    "LayerNorm": lambda: layer(lambda: te.LayerNorm(1024), normal(600, 1024)),
    "Linear": lambda: layer(lambda: te.Linear(512, 256, params_dtype=BF16), normal(1, 512, dtype=BF16)),
    "LayerNormMLP": lambda: layer(lambda: te.LayerNormMLP(64, 96, activation="swiglu"), normal(600, 64)),
    "GroupedLinear": lambda: layer(lambda: te.GroupedLinear(2, 64, 96), normal(7, 64), [3, 4]),
    "attention": lambda: layer(lambda: te.TransformerLayer(64, 96, 4).eval(), normal(32, 2, 64)),
    **{name: lambda name=name: trained(name) for name in NAMES},
    "AdamW": lambda: stepped(lambda parameters: te.FusedAdamW(parameters, lr=1e-2)),
    "AdamW with moments in FP8": lambda: stepped(lambda p: te.FusedAdamW(p, lr=1e-2, moment_dtype="float8")),
    "Adam": lambda: stepped(lambda parameters: FusedAdam(parameters, lr=1e-2, master_weights=True)),
    "SGD": lambda: stepped(lambda parameters: FusedSGD(parameters, lr=1e-2, momentum=0.9)),
}


@pytest.mark.filterwarnings("ignore:.* runs as emulation:RuntimeWarning")
@pytest.mark.parametrize("default", [torch.device("meta"), torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_values_on_the_cpu_stay_there(name: str, default: torch.device | torch.dtype, libraries: None) -> None:
    run = CASES[name]()
    expected = run()
    with defaulting(default):
        found = run()
    assert [t.device.type for t in found] == ["cpu"] * len(expected)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
