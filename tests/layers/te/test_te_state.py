"""What programs of Transformer Engine read of layers and regions: `fp8_meta`, `quantizers`, states, global state."""

import copy

import pytest
import torch

import te_models.layers as te
from te_models.layers import FP8GlobalStateManager as Manager
from tests.compare import refused

RECIPE = te.DelayedScaling(margin=1, fp8_format=te.Format.HYBRID, amax_history_len=4, amax_compute_algo="max")


def run(layer: torch.nn.Module, x: torch.Tensor, *args: object) -> torch.Tensor:
    with te.autocast(recipe=RECIPE):
        y = layer(x, *args)
    y.backward(torch.full_like(y, 0.5))
    return y


def test_histories_and_scales_of_delayed_scaling() -> None:
    layer = te.Linear(32, 32)
    assert layer.fp8_meta == {"fp8_checkpoint": False, "fp8_group": None} and not layer.fp8
    assert layer.quantizers == {"scaling_fwd": [], "scaling_bwd": []}
    weight = layer.weight.detach().abs().max().item()
    for factor in (3.0, 5.0):
        run(layer, torch.full((4, 32), factor))
    meta = layer.fp8_meta
    assert layer.fp8 and meta["recipe"] == RECIPE and meta["fp8_checkpoint"] and meta["num_gemms"] == 1
    assert (meta["fp8_max_fwd"], meta["fp8_max_bwd"]) == (448, 57344)
    forward, backward = meta["scaling_fwd"], meta["scaling_bwd"]
    zero = [0.0, 0.0, 0.0]
    expected = torch.tensor([zero, zero, [3.0, weight, 0.0], [5.0, weight, 0.0]])
    assert torch.equal(forward.amax_history, expected)  # row 0: since the last update; the newest of the others last
    torch.testing.assert_close(forward.scale, torch.tensor([448 / 2 / 5, 448 / 2 / weight, 1.0]))
    assert torch.equal(backward.amax_history[:, 0], torch.tensor([0.5, 0.0, 0.0, 0.5]))
    assert backward.scale[0].item() == 57344 / 2 / 0.5
    assert (forward.dtype, backward.dtype) == (torch.float8_e4m3fn, torch.float8_e5m2)


def test_slots_of_several_gemms() -> None:
    x = torch.randn(6, 16)
    experts = te.GroupedLinear(2, 16, 16)
    run(experts, x, [2, 4])
    newest = experts.fp8_meta["scaling_fwd"].amax_history[-1].view(2, 3)
    assert torch.equal(newest[:, 0], torch.stack([part.abs().max() for part in x.split([2, 4])]))
    assert torch.equal(newest[:, 1], experts.weight.detach().abs().amax((1, 2)))
    mlp = te.LayerNormMLP(16, 32)
    run(mlp, x)
    newest = mlp.fp8_meta["scaling_fwd"].amax_history[-1]
    assert newest[1] == mlp.fc1_weight.detach().abs().max() and newest[4] == mlp.fc2_weight.detach().abs().max()
    assert [len(found) for found in mlp.quantizers.values()] == [6, 4]


def test_assigned_state_is_the_layers_and_copies_refuse_writes() -> None:
    first, x = te.Linear(32, 32), torch.randn(4, 32)
    second = copy.deepcopy(first)
    run(first, x)
    run(second, 10 * x)
    for key in ("scaling_fwd", "scaling_bwd"):
        run(second, x)
        second.fp8_meta[key].scale = first.fp8_meta[key].scale
        second.fp8_meta[key].amax_history = first.fp8_meta[key].amax_history
        assert torch.equal(second.fp8_meta[key].scale, first.fp8_meta[key].scale)
        assert torch.equal(second.fp8_meta[key].amax_history, first.fp8_meta[key].amax_history)
    assert torch.equal(run(first, x), run(second, x))
    state = first.fp8_meta["scaling_fwd"]
    with pytest.raises(TypeError, match="fill_ would write to a copy of a layer's state; assign to scale"):
        state.scale.fill_(1.0)
    with pytest.raises(TypeError, match="__setitem__ would write to a copy"):
        state.amax_history[0] = 0.0
    assert torch.equal(state.scale_inv * state.scale, torch.ones(3))
    with pytest.raises(AttributeError, match="scale_inv"):
        state.scale_inv = state.scale_inv
    refused(lambda: state.scale_inv.mul_(2.0), "mul_ would write to a copy", error=TypeError)
    assert type(state.scale * 2) is torch.Tensor and torch.isfinite(state.scale).all()


def test_quantizers_of_a_layer() -> None:
    layer = te.Linear(32, 32)
    with te.autocast(recipe=te.Float8BlockScaling()):
        layer(torch.randn(4, 32))
        of_input, of_weight, of_output = layer.quantizers["scaling_fwd"]
        of_input.set_usage(columnwise=False)  # of a copy: the recipe's value stays
    assert of_input.block_scaling_dim == 1 and of_weight.block_scaling_dim == 2 and of_output is None
    assert layer.quantizers["scaling_fwd"][0].columnwise_usage
    assert layer.fp8_meta["recipe"] == te.Float8BlockScaling()
    run(layer, torch.ones(4, 32))
    live = layer.quantizers["scaling_fwd"][0]
    assert live.scale.item() == layer.fp8_meta["scaling_fwd"].scale[0].item() == 448 / 2
    live(torch.full((2, 32), 7.0))
    assert layer.fp8_meta["scaling_fwd"].amax_history[0, 0].item() == 7  # recorded where the next update looks
    gradient = layer.quantizers["scaling_bwd"][0]
    assert gradient.fp8_dtype == torch.float8_e5m2 and layer.quantizers["scaling_bwd"][1] is None


def test_flags_of_a_layer() -> None:
    layer, x = te.Linear(32, 32), torch.randn(4, 32)
    with te.autocast(enabled=False, calibrating=True, recipe=RECIPE):
        layer(x)
    assert layer.fp8_calibration and not layer.fp8 and layer.fp8_meta["recipe"] == RECIPE
    layer(x)
    assert not layer.fp8_calibration and not layer.primary_weights_in_fp8
    with te.quantized_model_init():
        assert te.Linear(32, 32).primary_weights_in_fp8


def test_recipe_states_of_their_own() -> None:
    state = te.RecipeState.create(RECIPE, mode="forward", num_quantizers=3, device="cpu")
    assert isinstance(state, te.DelayedScalingRecipeState) and state.amax_history.shape == (4, 3)
    state.scale.fill_(2.0)
    quantizers = state.make_quantizers()
    quantizers[1](torch.full((4, 16), -3.0))
    assert torch.equal(state.amax_history[0], torch.tensor([0.0, 3.0, 0.0])) and quantizers[2].scale.item() == 2
    nvfp4 = te.RecipeState.create(te.NVFP4BlockScaling(), mode="forward", num_quantizers=3)
    assert [q.with_2d_quantization for q in nvfp4.make_quantizers()] == [False, True, False]
    roles = [te.QuantizerRole("linear", "weight"), None]
    states = te.RecipeState.create(te.NVFP4BlockScaling(), mode="backward", num_quantizers=2, roles=roles)
    (weight, gradient) = states.make_quantizers()
    assert weight.with_2d_quantization and gradient.stochastic_rounding
    asked = []
    custom = te.CustomRecipe(qfactory=lambda role: asked.append(role) or te.MXFP8Quantizer())
    states = te.RecipeState.create(custom, mode="backward", num_quantizers=2, roles=roles)
    assert states.make_quantizers() == [te.MXFP8Quantizer()] * 2
    assert asked == [roles[0], te.QuantizerRole("linear", "grad_output", "", "Linear")]
    refused(lambda: te.RecipeState.create(RECIPE, mode="both"), "mode is 'both'; allowed: 'forward', 'backward'")
    with pytest.raises(ValueError, match="roles has 2 entries; allowed: 3"):
        te.RecipeState.create(RECIPE, mode="forward", num_quantizers=3, roles=roles)


def test_the_global_state_says_what_is_in_force() -> None:
    Manager.reset()
    assert not Manager.is_fp8_enabled() and not Manager.is_fp8_calibration() and not Manager.with_fp8_parameters()
    assert Manager.get_fp8_recipe() == te.Float8CurrentScaling() and Manager.get_fp8_group() is None
    with te.fp8_autocast(fp8_recipe=RECIPE), te.fp8_model_init(preserve_high_precision_init_val=True):
        assert Manager.is_fp8_enabled() and Manager.get_fp8_recipe() is RECIPE
        assert Manager.with_fp8_parameters() and Manager.with_high_precision_init_val()
        refused(Manager.reset, "reset() inside of a region", error=RuntimeError)
    with te.autocast(enabled=False, calibrating=True):
        assert Manager.is_fp8_calibration() and not Manager.is_fp8_enabled()
    assert Manager.is_fp8_available() == Manager.is_nvfp4_available() == (True, "")
    assert (Manager.get_meta_tensor_key(), Manager.get_fwd_bwd_key(forward=False)) == ("scaling_fwd", "backward")


def test_an_update_asked_for_by_hand() -> None:
    """As training loops do after the backward pass: the gradient's amax is in its scale from then on."""
    layer = te.Linear(32, 32)
    run(layer, torch.ones(4, 32))
    assert layer.fp8_meta["scaling_bwd"].scale[0].item() == 1
    Manager.reduce_and_update_fp8_tensors(forward=False)
    assert layer.fp8_meta["scaling_bwd"].scale[0].item() == 57344 / 2 / 0.5
