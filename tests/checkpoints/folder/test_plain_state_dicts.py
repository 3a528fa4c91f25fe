"""State dicts of layers with quantized weights through safetensors, bit for bit, without a model folder."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load, save, save_file
from torch import nn

import te_models.layers as te
from te_models.checkpoints import CheckpointError, from_plain_state_dict, plain_state_dict
from tests.compare import raw, same_bits

HYBRID = te.HybridQuantizer(rowwise_quantizer=te.MXFP8Quantizer(), columnwise_quantizer=te.Float8BlockQuantizer())
FLAT = te.HybridQuantizer(
    rowwise_quantizer=te.MXFP8Quantizer(), columnwise_quantizer=te.Float8BlockQuantizer(block_scaling_dim=1)
)
RECIPES: dict[str, te.Recipe] = {
    name: te.recipe(name) for name in ("delayed", "current", "block", "mxfp8", "nvfp4")
} | {
    "nvfp4 1-D": te.recipe("nvfp4", disable_2d_quantization=True),
    "hybrid": te.CustomRecipe(qfactory=lambda role: HYBRID if role.tensor_type == "weight" else FLAT),
    "identity": te.CustomRecipe(qfactory=lambda role: te.IdentityQuantizer()),
}
LAYERS: dict[str, Callable[[], nn.Module]] = {
    "dense": lambda: te.Linear(33, 50, name="layer"),
    "grouped": lambda: te.GroupedLinear(3, 33, 50, name="layer"),
    "per GEMM": lambda: te.GroupedLinear(3, 33, 50, single_grouped_weight=False, name="layer"),
    "model": lambda: nn.Sequential(te.LayerNormMLP(32, 48, name="layer"), nn.BatchNorm1d(32)),
}


def build(name: str, kind: str, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    with te.quantized_model_init(recipe=RECIPES[name]):
        return LAYERS[kind]()


def same(a: dict[str, Any], b: dict[str, Any]) -> bool:
    def equal(x: torch.Tensor, y: torch.Tensor) -> bool:
        if isinstance(x, te.QuantizedTensor) or isinstance(y, te.QuantizedTensor):
            numbers = [(v.quantizer.to_dict(), v.dtype) for v in (x, y)]
            return type(x) is type(y) and numbers[0] == numbers[1] and same_bits(x, y)
        return x.dtype == y.dtype and torch.equal(raw(x), raw(y))

    return a.keys() == b.keys() and all(equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("name", RECIPES)
def test_a_layer_passes_through_a_safetensors_file(name: str, kind: str, tmp_path: Path) -> None:
    source, target = build(name, kind, 1), build(name, kind, 2)
    tensors, metadata = plain_state_dict(source.state_dict())
    assert all(type(value) is torch.Tensor for value in tensors.values())
    save_file(tensors, tmp_path / "layer.safetensors", metadata=metadata)
    with safe_open(tmp_path / "layer.safetensors", "pt") as file:
        state = from_plain_state_dict({key: file.get_tensor(key) for key in file.keys()}, file.metadata())  # noqa: SIM118
    assert same(state, dict(source.state_dict())) and not same(state, dict(target.state_dict()))
    target.load_state_dict(state)
    assert same(dict(target.state_dict()), dict(source.state_dict()))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_logical_dtype_is_kept(dtype: torch.dtype) -> None:
    layer = build("mxfp8", "grouped", 1).to(dtype)
    tensors, metadata = plain_state_dict(layer.state_dict(keep_vars=True))
    state = from_plain_state_dict(load(save(tensors, metadata)), metadata)
    assert state["weight"].dtype is dtype and same(state, dict(layer.state_dict()))


def test_the_state_of_a_recipe_and_plain_layers_need_no_metadata_of_ours() -> None:
    layer = te.Linear(16, 16)
    with te.autocast(recipe=te.DelayedScaling()):
        layer(torch.randn(4, 16)).sum().backward()
    state = dict(layer.state_dict())
    tensors, metadata = plain_state_dict(state)
    assert metadata == {"format": "pt"} and tensors.keys() == state.keys()
    assert same(from_plain_state_dict(load(save(tensors)), None), state)


def test_what_does_not_fit_is_named() -> None:
    layer = build("mxfp8", "dense", 1)
    tensors, metadata = plain_state_dict(layer.state_dict())
    with pytest.raises(CheckpointError, match="weight cannot be put together: the field rowwise_scale_inv is nothing"):
        from_plain_state_dict({k: v for k, v in tensors.items() if k != "weight_scale_inv"}, metadata)
    with pytest.raises(CheckpointError, match="the field rowwise_data is"):
        from_plain_state_dict(tensors | {"weight": tensors["weight"][:-1]}, metadata)
    values = json.loads(metadata["te_models"])
    for broken, message in (
        ({}, "does not map parameter names to shapes"),
        ({"shapes": {}}, "no shape of weight"),
        ({"shapes": {"weight": [50, -1]}}, "does not map parameter names to shapes"),
        ({"shapes": {"weight": [50]}}, "does not map parameter names to shapes"),
        ({"shapes": {"weight": [1 << 40, 1 << 40]}}, "does not map parameter names to shapes"),
        ({"shapes": {"weight": [1 << 20, 1 << 20]}}, "cannot be put together"),
    ):
        changed = {k: v for k, v in values.items() if k != "shapes"} | broken
        with pytest.raises(CheckpointError, match=message):
            from_plain_state_dict(tensors, {"te_models": json.dumps(changed)})
    state = dict(layer.state_dict())
    with pytest.raises(CheckpointError, match="weight_scale_inv is both"):
        plain_state_dict(state | {"weight_scale_inv": torch.ones(1)})
    with pytest.raises(CheckpointError, match="extra is a int; allowed: plain tensors and quantized ones"):
        plain_state_dict(state | {"extra": 3})
    with pytest.raises(CheckpointError, match="logical_dtype"):
        plain_state_dict(build("mxfp8", "dense", 1).double().state_dict())
