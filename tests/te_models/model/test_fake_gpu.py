"""As on a GPU, on tensors without values: everything is on the device, and the host never waits for it.

Backward passes want a real device, see test_moe_on_gpu."""

import pytest
import torch
from torch import nn

from te_models import GPTModel, RopeConfig
from te_models.layers import FusedAdamW, GroupedLinear, LayerNormLinear, LayerNormMLP, Linear, autocast, ops
from tests.build import VARIANTS, tiny
from tests.layers.matrix_recipes import NAMES, fresh
from tests.te_models.fake_gpu import Apart, fake_gpu

needs_cuda_build = pytest.mark.skipif(
    torch.version.cuda is None, reason="this torch is built without CUDA, which even tensors without values need"
)
LAYERS = {
    "Linear": lambda **new: Linear(32, 64, **new),
    "LayerNormLinear": lambda **new: LayerNormLinear(32, 64, **new),
    "LayerNormMLP": lambda **new: LayerNormMLP(32, 64, **new),
    "GroupedLinear": lambda **new: GroupedLinear(2, 32, 64, **new),
    "ops.BasicLinear": lambda **new: ops.BasicLinear(32, 64, **new),
    "ops.GroupedLinear": lambda **new: ops.GroupedLinear(2, 32, 64, **new),
}
LONG = RopeConfig(
    scaling="longrope", short_factor=(1.0,) * 4, long_factor=(2.0,) * 4, original_max_position_embeddings=8
)
MODELS = {
    "dense": VARIANTS["dense"],
    "moe": VARIANTS["moe_shared"],
    "gemma": VARIANTS["softcaps"],
    "longrope": tiny(rope=LONG),
    "dynamic rope": tiny(rope=RopeConfig(scaling="dynamic", factor=2.0)),
}


@pytest.mark.parametrize("kind", LAYERS)
def test_live_state_is_on_the_device_that_a_layer_is_made_on(kind: str) -> None:
    """Kernels read scales, amaxes and random keys; a layer that is moved takes them along."""
    with fake_gpu():
        layer = LAYERS[kind](device="cuda")
        state = {n: value for n, value in vars(layer).items() if n.lstrip("_").startswith("fp8_") and value is not None}
        assert len(state) == 10
        assert {value.device for value in state.values()} == {next(layer.parameters()).device}
        assert LAYERS[kind](device="meta").fp8_scale.device.type == "cpu"


def test_live_state_of_an_operation_without_parameters_moves_with_it() -> None:
    with fake_gpu():
        quantize = ops.Quantize()
        before = quantize.fp8_scale.device
        for device, expected in (("meta", before), ("cuda", torch.empty(0, device="cuda").device)):
            quantize.to_empty(device=device)
            assert {quantize.fp8_scale.device, quantize.fp8_rng_state.device} == {expected}


@needs_cuda_build
@pytest.mark.parametrize(
    ("kind", "name"), [*((kind, None) for kind in MODELS), *((kind, n) for kind in ("dense", "moe") for n in NAMES[1:])]
)
def test_a_forward_pass_leaves_the_host_alone(kind: str, name: str | None) -> None:
    """The exit of the recipe's region is part of it: delayed scaling computes new scales there."""
    with fake_gpu():
        model = GPTModel(MODELS[kind], params_dtype=torch.bfloat16, device="cuda")
        ids = torch.zeros(2, 16, dtype=torch.int64, device="cuda")
        with Apart(), autocast(enabled=name is not None, recipe=fresh(name)):
            loss = model(ids, labels=ids, return_logits=False, attention_mask=torch.ones_like(ids)).loss
        assert loss.device.type == "cuda"


@needs_cuda_build
@pytest.mark.parametrize("moment_dtype", ["float32", "bfloat16", "float8"])
def test_an_optimizer_step_leaves_the_host_alone(moment_dtype: str) -> None:
    with fake_gpu():
        layers = nn.ModuleList(Linear(32, 64, device="cuda", params_dtype=torch.bfloat16) for _ in range(2))
        optimizer = FusedAdamW(layers.parameters(), master_weights=True, moment_dtype=moment_dtype)
        optimizer.init_state()
        for parameter in layers.parameters():
            parameter.grad = torch.zeros_like(parameter)
        with Apart():
            optimizer.step()
            optimizer.step(noop=torch.zeros((), dtype=torch.bool, device="cuda"))
