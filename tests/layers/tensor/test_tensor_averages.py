"""Masters and averages of quantized weights: float32 ones move by small steps, quantized ones are refused."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn, get_ema_multi_avg_fn

from te_models.kernels.torch_versions import TORCH_2_11
from te_models.layers import GroupedLinear, Linear, QuantizedTensor, autocast, quantized_model_init, recipe
from tests.build import weight_quantizers
from tests.compare import in_dtype, same_bits

FORMATS = weight_quantizers()
RECIPES = ["current", "block", "mxfp8", "nvfp4"]


def model(name: str, dtype: torch.dtype = torch.float32) -> nn.Sequential:
    """Two layers that share one quantized weight, and experts."""
    torch.manual_seed(0)
    with quantized_model_init(recipe=recipe(name)):
        layers = nn.Sequential(Linear(64, 64), Linear(64, 64), GroupedLinear(2, 64, 64))
    layers[1].weight = layers[0].weight
    layers[0].weight.partition_dim = 1
    return layers.to(dtype)


@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_master_made_by_float_moves_by_small_steps(name: str, grouped: bool, dtype: torch.dtype) -> None:
    """100 steps of 1/1000 of the weights' size; 5 of 4096 values moved when the copy stayed quantized."""
    values = torch.randn((2, 64, 64) if grouped else (64, 64), generator=torch.Generator().manual_seed(0))
    weight = FORMATS[name].quantize_grouped(values) if grouped else FORMATS[name].quantize(values)
    weight = nn.Parameter(in_dtype(weight, dtype))
    for master in (weight.detach().clone().float(), weight.detach().float().clone(), weight.data.float()):
        assert type(master) is torch.Tensor and master.dtype is torch.float32
        before = master.clone()
        assert torch.equal(before, weight.detach().dequantize(torch.float32))
        for _ in range(100):
            master.sub_(1e-3)
        torch.testing.assert_close(master, before - 0.1, rtol=0, atol=1e-4)


@pytest.mark.parametrize("average", [None, get_ema_avg_fn(0.99), "multi"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", RECIPES)
def test_averaged_models_are_kept_in_float32(name: str, dtype: torch.dtype, average: Callable | str | None) -> None:
    source = model(name, dtype)
    options = {"multi_avg_fn": get_ema_multi_avg_fn(0.99)} if average == "multi" else {"avg_fn": average}
    averaged = AveragedModel(source, **options)
    weight = averaged.module[0].weight
    assert type(weight) is nn.Parameter and weight.dtype is torch.float32 and weight.partition_dim == 1
    assert averaged.module[1].weight is weight and averaged.module[2].weight.dim() == 3
    assert not any(isinstance(p, QuantizedTensor) for p in averaged.parameters())
    assert isinstance(source[0].weight, QuantizedTensor)
    averaged.update_parameters(source)
    start = source[0].weight.detach().float()
    assert torch.equal(weight, start)
    with torch.no_grad():
        source[0].weight.copy_(start + 1)
    end = source[0].weight.detach().float()
    if TORCH_2_11 and dtype is torch.bfloat16 and not callable(average):
        with pytest.raises(RuntimeError, match="the same dtype"):  # its averages of many tensors are of one dtype
            averaged.update_parameters(source)
        return
    for _ in range(3):
        averaged.update_parameters(source)
    share = 3 / 4 if average is None else 1 - 0.99**3
    # avg_fn of a bfloat16 weight reads its value in that dtype
    torch.testing.assert_close(weight.detach(), start + share * (end - start), rtol=2**-8, atol=2**-8)
    assert ((weight - start) > 0.01).float().mean() > 0.99


def test_an_averaged_model_runs_and_goes_back_into_quantized_weights() -> None:
    source = model("block")
    averaged = AveragedModel(source)
    averaged.update_parameters(source)
    x = torch.randn(32, 64)
    with torch.no_grad(), autocast(recipe=recipe("block")):
        assert torch.equal(averaged.module[0](x), source[0](x))
    target = model("block")
    target[0].weight.data.zero_()
    target.load_state_dict(averaged.module.state_dict())
    assert same_bits(target[0].weight, source[0].weight)


@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("name", FORMATS)
def test_averages_in_a_quantized_copy_are_refused(name: str, grouped: bool) -> None:
    x = torch.randn((2, 64, 64) if grouped else (64, 64))
    weight = nn.Parameter(FORMATS[name].quantize_grouped(x) if grouped else FORMATS[name].quantize(x))
    average = copy.deepcopy(weight).detach()
    before = average.clone()
    for step in (
        lambda: average.lerp_(weight.detach(), 0.1),
        lambda: average.lerp_(weight.detach().float(), 0.1),
        lambda: average.add_(weight.detach(), alpha=0.1),
        lambda: average.sub_(weight.data),
        lambda: torch._foreach_lerp_([average], [weight.detach()], 0.1),
        lambda: torch._foreach_add_([average], [weight.detach()], alpha=0.1),
    ):
        with pytest.raises(ValueError, match="keep averages in float32"):
            step()
    assert same_bits(average, before)
    plain = weight.detach().float()
    plain.mul_(0.9).add_(weight.detach(), alpha=0.1)
    torch._foreach_lerp_([plain], [weight.detach()], 0.1)
    torch.testing.assert_close(plain, weight.detach().dequantize(), rtol=1e-5, atol=1e-5)
    average.add_(average.detach())  # of itself it is no average
    average.mul_(2).add_(x, alpha=-0.1)  # an optimizer's step
