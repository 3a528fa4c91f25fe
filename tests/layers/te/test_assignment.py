"""Recipes that are assigned to after they were made, as programs of Transformer Engine do."""

import copy

import pytest
import torch

import te_models.layers as te
from te_models.layers.recipe import MMParams, QParams


def nvfp4(x: QParams, w: QParams, dy: QParams) -> te.Recipe:
    chosen = te.NVFP4BlockScaling()
    chosen.fp4_quant_fwd_inp = x
    chosen.fp4_quant_fwd_weight = w
    chosen.fp4_quant_bwd_grad = dy
    return chosen


RHT, TWO = QParams(random_hadamard_transform=True), QParams(fp4_2d_quantization=True)
SR = QParams(stochastic_rounding=True)
CASES = {
    "nothing": (
        (QParams(), QParams(), QParams()),
        dict.fromkeys(("disable_rht", "disable_stochastic_rounding", "disable_2d_quantization"), True),
    ),
    "transform": ((RHT, QParams(), RHT), {"disable_stochastic_rounding": True, "disable_2d_quantization": True}),
    "blocks": ((QParams(), TWO, QParams()), {"disable_rht": True, "disable_stochastic_rounding": True}),
    "rounding": ((QParams(), QParams(), SR), {"disable_rht": True, "disable_2d_quantization": True}),
}


@pytest.mark.parametrize("case", CASES)
def test_quantization_parameters_are_assigned_one_by_one(case: str) -> None:
    asked, fields = CASES[case]
    chosen, expected = nvfp4(*asked), te.NVFP4BlockScaling(**fields)
    assert chosen == expected and hash(chosen) == hash(expected) and chosen.to_json() == expected.to_json()
    assert (chosen.fp4_quant_fwd_inp, chosen.fp4_quant_fwd_weight, chosen.fp4_quant_bwd_grad) == asked
    assert chosen.quantizers("Linear", "") == expected.quantizers("Linear", "")
    outputs = []
    for recipe in (chosen, expected):
        torch.manual_seed(0)
        layer, x = te.Linear(64, 32), torch.randn(32, 64, requires_grad=True)
        with te.autocast(recipe=recipe):
            y = layer(x)
        y.square().sum().backward()
        outputs.append((y, x.grad, layer.weight.grad))
    torch.testing.assert_close(*outputs, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("chosen", "name", "value"),
    [
        (te.NVFP4BlockScaling(), "row_scaled_activation", True),
        (te.MXFP8BlockScaling(), "backward_override", "dequantized"),
        (te.MXFP8BlockScaling(), "enable_2d_quantization", True),
        (te.DelayedScaling(), "reduce_amax", False),
        (te.DelayedScaling(), "amax_history_len", 3),
        (te.Float8CurrentScaling(), "fp8_format", te.Format.E4M3),
        (te.Float8BlockScaling(), "use_f32_scales", True),
    ],
    ids=str,
)
def test_a_field_is_assigned(chosen: te.Recipe, name: str, value: object) -> None:
    chosen = copy.deepcopy(chosen)
    expected = chosen.replace(**{name: value})
    setattr(chosen, name, value)
    assert chosen == expected and getattr(chosen, name) == value
    assert te.Recipe.from_json(chosen.to_json()) == expected


def test_scales_are_assigned_for_all_operands() -> None:
    chosen = te.Float8CurrentScaling()
    params = QParams(power_2_scale=True, amax_epsilon=0.5)
    for name in ("fp8_quant_fwd_inp", "fp8_quant_fwd_weight"):
        setattr(chosen, name, params)
        sentence = "fp8_quant_fwd_inp, fp8_quant_fwd_weight, fp8_quant_bwd_grad differ from each other; allowed: the"
        with pytest.raises(ValueError, match=sentence):
            te.autocast(recipe=chosen).__enter__()
    chosen.fp8_quant_bwd_grad = params
    assert chosen == te.Float8CurrentScaling(use_power_2_scales=True, amax_epsilon=0.5)
    block = te.Float8BlockScaling()
    block.fp8_gemm_fprop = MMParams(use_split_accumulator=True)  # the default
    assert block == te.Float8BlockScaling()


def test_a_region_takes_what_the_recipe_means_when_it_is_entered() -> None:
    """And a layer that has run under the object notices that it means something else now."""
    layer, x = te.Linear(256, 32), torch.randn(32, 256)
    chosen = te.Float8BlockScaling(use_f32_scales=True)
    other, region = copy.copy(chosen), te.autocast(recipe=chosen)
    with region:
        plain = layer(x)
        with te.autocast(enabled=False), pytest.raises(ValueError, match="Float8BlockScaling that is in force; allo"):
            chosen.w_block_scaling_dim = 1
    assert te.PerModuleRecipe(default=chosen).default is chosen
    chosen.fp8_format = te.Format.HYBRID
    inner = te.PerModuleRecipe(default=chosen)
    chosen.w_block_scaling_dim = 1
    expected = te.Float8BlockScaling(use_f32_scales=True, fp8_format=te.Format.HYBRID, w_block_scaling_dim=1)
    for entered in (region, te.autocast(recipe=chosen), te.autocast(recipe=expected)):
        with entered:
            assert te.current_recipe() == expected and te.current_recipe() is not chosen
            assert not torch.equal(layer(x), plain)
    assert other == te.Float8BlockScaling(use_f32_scales=True) and inner.default != chosen
    copy.copy(chosen).w_block_scaling_dim = 2
    assert chosen == expected
    with te.quantized_model_init(recipe=chosen):
        assert te.Linear(64, 64).weight.quantizer == expected.weight_quantizer()


@pytest.mark.slow
def test_compiled_code_sees_an_assignment() -> None:
    layer, x, chosen = te.Linear(256, 32), torch.randn(32, 256), te.Float8BlockScaling(use_f32_scales=True)
    run = torch.compile(layer, fullgraph=True, backend="aot_eager")
    found = []
    for dim in (1, 2):
        with te.autocast(recipe=chosen):
            found.append(run(x))
            assert torch.equal(found[-1], layer(x))
        chosen.w_block_scaling_dim = dim
        found.append(run_under(layer, x, chosen))
    assert torch.equal(found[0], found[3]) and torch.equal(found[1], found[2]) and not torch.equal(found[0], found[1])


def run_under(layer: te.Linear, x: torch.Tensor, recipe: te.Recipe) -> torch.Tensor:
    with te.autocast(recipe=recipe):
        return layer(x)


@pytest.mark.parametrize(
    ("name", "value", "sentence"),
    [
        ("fp4_quant_fwd_weight", RHT, "fp4_quant_fwd_weight has random_hadamard_transform=True; allowed: False"),
        ("fp4_quant_fwd_inp", SR, "fp4_quant_fwd_inp has stochastic_rounding=True; allowed: False"),
        ("fp4_quant_bwd_grad", {"stochastic_rounding": True}, "fp4_quant_bwd_grad is .*; allowed: a QParams"),
        ("fp8_dpa", True, "fp8_dpa is True, which this library does not have; allowed: False"),
        ("disable_rth", True, "NVFP4BlockScaling has no field 'disable_rth' to assign .*did you mean 'disable_rht'"),
        ("disable_rht", "yes", "disable_rht is 'yes'; allowed: True or False"),
    ],
)
def test_what_a_recipe_cannot_mean_is_refused(name: str, value: object, sentence: str) -> None:
    chosen = te.NVFP4BlockScaling()
    with pytest.raises(ValueError, match=sentence):
        setattr(chosen, name, value)
    assert chosen == te.NVFP4BlockScaling() and chosen.quantizers("", "") == te.NVFP4BlockScaling().quantizers("", "")


def test_half_of_the_parameters_are_no_recipe() -> None:
    chosen = te.NVFP4BlockScaling()
    chosen.fp4_quant_fwd_inp = QParams()
    sentence = "fp4_quant_fwd_inp has random_hadamard_transform=False and fp4_quant_bwd_grad True"
    for use in (
        te.autocast(recipe=chosen).__enter__,
        lambda: chosen.quantizers("", ""),
        lambda: te.PerModuleRecipe(default=chosen),
        chosen.weight_quantizer,
        chosen.to_json,
    ):
        with pytest.raises(ValueError, match=sentence):
            use()
    chosen.fp4_quant_bwd_grad = QParams()
    assert chosen == te.NVFP4BlockScaling(disable_rht=True, disable_stochastic_rounding=True)
    assert chosen.weight_quantizer() == te.NVFP4BlockScaling().weight_quantizer()
