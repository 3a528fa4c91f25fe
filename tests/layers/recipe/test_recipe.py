"""Recipes are values; regions nest and restore."""

import importlib
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from te_models.layers import (
    RECIPES,
    CustomRecipe,
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    Format,
    IdentityQuantizer,
    Linear,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    PerModuleRecipe,
    QuantizedTensor,
    Quantizer,
    QuantizerRole,
    Recipe,
    autocast,
    current_recipe,
    quantized_model_init,
    recipe,
    storage_recipe,
)
from te_models.layers.recipe import MMParams, QParams
from tests.compare import refused

EXAMPLES = [
    Float8CurrentScaling(fp8_format=Format.E4M3, amax_epsilon=0.1),
    Float8BlockScaling(use_f32_scales=True, w_block_scaling_dim=1, x_block_scaling_dim=2),
    MXFP8BlockScaling(enable_2d_quantization=True, fp8_format=Format.HYBRID),
    DelayedScaling(margin=1, amax_history_len=3, amax_compute_algo="most_recent", reduce_amax=False),
    NVFP4BlockScaling(disable_rht=True, backward_override="dequantized"),
    PerModuleRecipe(default=MXFP8BlockScaling(), rules=(("*.linear_proj", "bf16"), ("*fc1", Float8BlockScaling()))),
]


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda r: r.NAME)
def test_json_round_trip(example: Recipe) -> None:
    again = Recipe.from_json(example.to_json())
    assert again == example and hash(again) == hash(example)
    assert again is not example and repr(again) == repr(example)


def test_by_name() -> None:
    assert set(RECIPES) == {"delayed", "current", "block", "mxfp8", "nvfp4", "custom", "per_module"}
    values = {"custom": {"qfactory": lambda role: IdentityQuantizer()}, "per_module": {"default": MXFP8BlockScaling()}}
    for name, cls in RECIPES.items():
        assert type(recipe(name, **values.get(name, {}))) is cls
    assert recipe("mxfp8", enable_2d_quantization=True) == MXFP8BlockScaling(enable_2d_quantization=True)
    refused(lambda: recipe("int8"), "recipe is 'int8'; allowed: 'delayed', 'current', 'block', 'mxfp8'")
    refused(lambda: recipe("custom"), "the recipe 'custom' needs qfactory; use CustomRecipe")
    refused(lambda: Recipe.from_dict({"recipe": "block", "speed": 1}), "no field 'speed'")


def test_transformer_engines_module_of_recipes() -> None:
    """`from transformer_engine.common import recipe` and `from transformer_engine.common.recipe import ...`."""
    module = importlib.import_module("te_models.layers.recipe")
    for name in ("DelayedScaling", "Float8CurrentScaling", "MXFP8BlockScaling", "Format", "MMParams", "QParams"):
        assert getattr(module, name) is getattr(recipe, name)
    assert recipe.Format is Format


def test_arguments_in_transformer_engines_order() -> None:
    assert DelayedScaling(1, Format.E4M3, 16, "most_recent", None, False, False, False) == DelayedScaling(
        margin=1, fp8_format=Format.E4M3, amax_history_len=16, amax_compute_algo="most_recent", reduce_amax=False
    )
    fast, split = MMParams(use_split_accumulator=False), MMParams()
    assert Float8CurrentScaling(True, Format.E4M3, fast, split, split, False, False) == Float8CurrentScaling(
        use_power_2_scales=True, fp8_format=Format.E4M3
    )
    assert Float8BlockScaling(True, Format.E4M3, 1, 1, 2, split, split, split, False, False) == Float8BlockScaling(
        use_f32_scales=True, w_block_scaling_dim=1, grad_block_scaling_dim=2
    )
    assert MXFP8BlockScaling(0, Format.HYBRID, False, False) == MXFP8BlockScaling(fp8_format=Format.HYBRID)
    assert CustomRecipe(by_tensor).quantizers("Linear", "").weight == IdentityQuantizer()
    assert DelayedScaling(interval=1) == DelayedScaling(interval=-1) == DelayedScaling()


def by_tensor(role: QuantizerRole) -> Quantizer:
    return IdentityQuantizer()


PREDICATES = {
    "delayed": ("delayed", "float8_per_tensor_scaling"),
    "current": ("float8_current_scaling", "float8_per_tensor_scaling"),
    "block": ("float8_block_scaling",),
    "mxfp8": ("mxfp8",),
    "nvfp4": ("nvfp4",),
    "custom": ("custom",),
    "per_module": (),
}


def test_predicates_of_values_and_classes() -> None:
    names = {name for names in PREDICATES.values() for name in names}
    for name, cls in RECIPES.items():
        assert {predicate for predicate in names if getattr(cls, predicate)()} == set(PREDICATES[name])
    assert recipe("mxfp8").mxfp8() and not recipe("mxfp8").nvfp4() and not Recipe.mxfp8()


def test_what_formats_and_recipes_say_in_transformer_engines_words() -> None:
    assert (Format.E4M3.value.max_fwd, Format.E4M3.value.max_bwd) == (448, 448)
    assert (Format.HYBRID.value.max_fwd, Format.HYBRID.value.max_bwd) == (448, 57344)
    assert Format.E5M2.value.max_fwd == torch.finfo(torch.float8_e5m2).max and Format.E2M1.value.max_bwd == 6
    assert Float8CurrentScaling(use_power_2_scales=True).fp8_quant_fwd_weight == QParams(power_2_scale=True)
    assert Float8BlockScaling(amax_epsilon=0.5).fp8_quant_bwd_grad == QParams(power_2_scale=True, amax_epsilon=0.5)
    assert not Float8CurrentScaling().fp8_gemm_fprop.use_split_accumulator and not DelayedScaling().fp8_dpa


def test_hybrid_uses_e5m2_for_gradients_only() -> None:
    quantizers = Float8CurrentScaling().quantizers("Linear", "")
    dtypes = [q.fp8_dtype for q in (quantizers.input, quantizers.weight, quantizers.grad_output)]
    assert dtypes == [torch.float8_e4m3fn, torch.float8_e4m3fn, torch.float8_e5m2]


def test_regions_nest_and_restore() -> None:
    assert current_recipe() is None
    with autocast(recipe=MXFP8BlockScaling()):
        with autocast(recipe=Float8BlockScaling()):
            assert current_recipe() == Float8BlockScaling()
            with autocast(enabled=False):
                assert current_recipe() is None
        assert current_recipe() == MXFP8BlockScaling()
        with pytest.raises(RuntimeError, match="boom"), autocast():
            assert current_recipe() == Float8CurrentScaling()
            raise RuntimeError("boom")
        assert current_recipe() == MXFP8BlockScaling()
    assert current_recipe() is None
    refused(lambda: autocast(recipe="mxfp8"), "allowed: a Recipe", error=TypeError)


@pytest.mark.parametrize("region", [autocast, quantized_model_init])
def test_one_region_may_be_entered_inside_itself(region: type) -> None:
    """A layer that holds its region may contain another that was given the same one."""
    shared = region(recipe=MXFP8BlockScaling())
    for _ in range(2):
        with shared:
            with shared:
                assert MXFP8BlockScaling() in (current_recipe(), storage_recipe())
            assert MXFP8BlockScaling() in (current_recipe(), storage_recipe())
        assert current_recipe() is None and storage_recipe() is None


def test_a_region_inside_a_calibrating_one_computes_under_its_recipe() -> None:
    layer, x = Linear(64, 32), torch.randn(8, 64)
    with autocast(recipe=MXFP8BlockScaling()):
        expected = layer(x)
    with autocast(enabled=False, calibrating=True, recipe=DelayedScaling()):
        assert torch.equal(layer(x), torch.nn.functional.linear(x, layer.weight, layer.bias))
        with autocast(recipe=MXFP8BlockScaling()):
            assert torch.equal(layer(x), expected)
        assert not torch.equal(layer(x), expected)


def test_the_outermost_region_decides_the_reduction_group() -> None:
    outer, inner = dist.ProcessGroup(0, 1), dist.ProcessGroup(0, 1)  # never reduced over: nothing runs delayed
    with autocast(amax_reduction_group=outer), autocast(amax_reduction_group=outer), autocast():
        pass
    for group in (None, outer):
        with (
            autocast(enabled=False, amax_reduction_group=group),
            pytest.raises(ValueError, match="amax_reduction_group is not the outermost autocast region's"),
            autocast(amax_reduction_group=inner),
        ):
            pass
    assert current_recipe() is None


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Float8BlockScaling(x_block_scaling_dim=2), "x_block_scaling_dim and w_block_scaling_dim are both 2"),
        (lambda: Float8BlockScaling(grad_block_scaling_dim=3), "grad_block_scaling_dim is 3"),
        # said where the region is opened, not at its exit after a whole step
        (lambda: autocast(amax_reduction_group="dp"), "amax_reduction_group is a str; allowed: a process group"),
        # values that would change numbers
        (lambda: DelayedScaling(interval=2), "interval is 2, which this library does not have; allowed: 1"),
        (lambda: DelayedScaling(scaling_factor_compute_algo=max), "scaling_factor_compute_algo is <built-in"),
        (lambda: DelayedScaling(fp8_format=Format.E5M2), "fp8_format is Format.E5M2; allowed: Format.E4M3, Format.HYB"),
        (lambda: MXFP8BlockScaling(margin=1), "margin is 1, which this library does not have; allowed: 0"),
        (lambda: Float8CurrentScaling(fp8_gemm_fprop=MMParams(True)), r"fp8_gemm_fprop is MMParams\(use_split_accumul"),
        (lambda: Float8BlockScaling(fp8_mha=True), "fp8_mha is True, which this library does not have; allowed: False"),
        (lambda: CustomRecipe(by_tensor, fp8_dpa=True), "fp8_dpa is True, which this library does not have"),
        # values of another type, or out of range
        (lambda: Float8CurrentScaling(fp8_format="E4M3"), "fp8_format is 'E4M3'; allowed: Format.E4M3, Format.HYBRID"),
        (lambda: Recipe.from_dict({"recipe": "current", "fp8_format": "E3M4"}), "fp8_format is 'E3M4'; allowed"),
        (lambda: Recipe.from_json("[1]"), r"a recipe is \[1\]; allowed: an object"),
        (lambda: DelayedScaling(margin="1"), "margin is '1'; allowed: an integer"),
        (lambda: DelayedScaling(margin=True), "margin is True; allowed: an integer"),
        (lambda: DelayedScaling(amax_history_len=True), "amax_history_len is True; allowed: a positive integer"),
        (lambda: DelayedScaling(reduce_amax="x"), "reduce_amax is 'x'; allowed: True or False"),
        (lambda: MXFP8BlockScaling(enable_2d_quantization="False"), "enable_2d_quantization is 'False'; allowed: True"),
        (lambda: recipe("block", use_f32_scales="no"), "use_f32_scales is 'no'; allowed: True or False"),
        (lambda: NVFP4BlockScaling(disable_rht=1), "disable_rht is 1; allowed: True or False"),
        (lambda: Float8BlockScaling(x_block_scaling_dim=True), "x_block_scaling_dim is True; allowed: an integer"),
        (lambda: Float8BlockScaling(w_block_scaling_dim=2.0), "w_block_scaling_dim is 2.0; allowed: an integer"),
        (lambda: Float8CurrentScaling(amax_epsilon="1"), "amax_epsilon is '1'; allowed: a finite number"),
        (lambda: Float8CurrentScaling(amax_epsilon=float("nan")), "amax_epsilon is nan; allowed: a finite number"),
        (lambda: Float8CurrentScaling(amax_epsilon=-1.0), "amax_epsilon is -1.0; allowed: a finite number from 0"),
        (lambda: Float8BlockScaling(amax_epsilon=-1), "amax_epsilon is -1; allowed: a finite number from 0"),
        (lambda: Recipe.from_json('{"recipe": "nvfp4", "disable_rht": "false"}'), "disable_rht is 'false'; allowed"),
        (lambda: recipe("mxfp8", speed=1), "MXFP8BlockScaling has no field 'speed'; its fields are: backward_override"),
        (lambda: DelayedScaling(amax_history_len=16.5), "amax_history_len is 16.5; allowed: a positive integer"),
        (lambda: DelayedScaling(amax_history_len=0), "amax_history_len is 0; allowed: a positive integer"),
    ],
)
def test_a_field_that_is_not_allowed_is_named(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_backward_uses_the_recipe_of_its_forward() -> None:
    layer, x = Linear(64, 32), torch.randn(8, 64)

    def gradient(outside: Recipe | None) -> torch.Tensor:
        layer.zero_grad()
        with autocast(recipe=MXFP8BlockScaling()):
            y = layer(x)
        with autocast(enabled=outside is not None, recipe=outside):
            y.backward(torch.ones_like(y) / 3)
        return layer.weight.grad.clone()

    assert torch.equal(gradient(None), gradient(Float8BlockScaling()))


def test_quantized_model_init_applies_to_layers_built_inside() -> None:
    with quantized_model_init(recipe=MXFP8BlockScaling()):
        inside = Linear(64, 32)
        with quantized_model_init(enabled=False):
            not_this = Linear(64, 32)
    assert isinstance(inside.weight, QuantizedTensor) and not isinstance(inside.bias, QuantizedTensor)
    assert not isinstance(not_this.weight, QuantizedTensor)
    assert not isinstance(Linear(64, 32).weight, QuantizedTensor)
