"""NVFP4 with scales of rows, two candidates per block, or no signs: bit for bit an independent emulation."""

from collections.abc import Callable

import numpy as np
import pytest
import torch

from te_models.kernels.quantize import quantize_four_over_six
from te_models.layers import CustomRecipe, GroupedLinear, GroupedRows, Linear, NVFP4BlockScaling, autocast
from te_models.layers.quantizer import HybridQuantizer, NVFP4Quantizer, Quantizer
from tests.layers import emulation_nvfp4 as em
from tests.layers.quantizer.inputs import matrices
from tests.layers.quantizer.test_nvfp4_fields import assert_same

ROWS = NVFP4Quantizer(row_scaled_nvfp4=True, columnwise=False)


@pytest.mark.sentinels("448-MSE-1-torch.float32", "256-MAE-1-torch.bfloat16")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("e4m3_max", "err_mode", "block_rows"), [(256, "MAE", 1), (448, "MSE", 1), (256, "MSE", 16)])
def test_four_over_six_is_the_emulation(e4m3_max: int, err_mode: str, block_rows: int, dtype: torch.dtype) -> None:
    options = {"nvfp4_use_4over6": True, "nvfp4_e4m3_max": e4m3_max, "nvfp4_4over6_err_mode": err_mode}
    quantizer = NVFP4Quantizer(with_2d_quantization=block_rows == 16, **options)
    for what, x, values in matrices(dtype, ["normal", "zeros", "ties E2M1", "NaN", "outlier"]):
        expected = em.four_over_six(values, block_rows, e4m3_max, err_mode == "MSE")
        fields = quantizer.quantize_fields(x)
        assert_same(fields, "rowwise", expected, what)
        if block_rows == 1:
            assert_same(fields, "columnwise", em.four_over_six(values.T, 1, e4m3_max, err_mode == "MSE"), what)
        if np.isfinite(values).all():
            found = quantizer.dequantize_fields(fields, torch.float32, x.shape)
            np.testing.assert_allclose(found.numpy(), expected.values, rtol=3e-7, atol=0)


def test_a_block_whose_largest_value_is_better_off_at_four() -> None:
    """A 5 beside a 6 becomes 4, which is 1 off. With the 6 at 4 it is at 10/3, becomes 3, and is decoded as 4.5."""
    x = torch.full((1, 16), 5.0)
    x[0, 0] = 6.0
    packed, scales, _ = quantize_four_over_six(x, e4m3_max=256)
    plain, by_six = quantize_four_over_six(torch.full((1, 16), 6.0), e4m3_max=256)[:2]
    assert scales.float().item() == 1.5 * by_six.float().item() == 384
    assert plain.unique().item() == 0x77 and packed[0, 1:].unique().item() == 0x55 and packed[0, 0].item() == 0x56


@pytest.mark.parametrize("four_over_six", [False, True])
def test_a_row_with_its_own_scale_is_a_matrix_of_one_row(four_over_six: bool) -> None:
    x = torch.randn(5, 40) * torch.tensor([1.0, 1e-3, 0.0, 1e4, 7.0])[:, None]
    options = {"nvfp4_use_4over6": four_over_six, "nvfp4_e4m3_max": 256 if four_over_six else 448}
    quantizer = NVFP4Quantizer(row_scaled_nvfp4=True, columnwise=False, **options)
    whole, alone = quantizer.quantize(x), NVFP4Quantizer(columnwise=False, **options)
    for i in range(5):
        row = alone.quantize(x[i : i + 1])
        for name in ("rowwise_data", "rowwise_scale_inv"):
            assert same_bytes(whole.fields[name][i : i + 1], row.fields[name])
        assert whole.fields["rowwise_amax"][i].item() == row.fields["rowwise_amax"].item()
        assert torch.equal(whole.dequantize()[i : i + 1], row.dequantize())
    rows = GroupedRows.quantize_rows(x, torch.tensor([2, 0, 3]), quantizer)
    assert all(same_bytes(rows.fields[name], field) for name, field in whole.fields.items())
    assert torch.equal(rows.dequantize(), whole.dequantize())
    assert torch.equal(rows.members()[2].dequantize(), whole.dequantize()[2:])


def same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.view(torch.uint8), b.view(torch.uint8))


CASES: dict[str, Callable[[], Quantizer]] = {
    "4/6": lambda: NVFP4Quantizer(nvfp4_use_4over6=True, nvfp4_e4m3_max=256),
    "no signs": lambda: NVFP4Quantizer(with_rht=True, with_random_sign_mask=False),
}


@pytest.mark.parametrize("case", CASES)
def test_rows_by_group_are_the_groups_alone(case: str) -> None:
    quantizer, splits = CASES[case](), [3, 0, 21]
    x = torch.randn(24, 32, generator=torch.Generator().manual_seed(0))
    rows = GroupedRows.quantize_rows(x, torch.tensor(splits), quantizer)
    for member, values in zip(rows.members(), x.split(splits), strict=True):
        if len(values):
            alone = quantizer.quantize(values)
            for name, field in alone.fields.items():
                found = member.fields[name]
                assert found.item() == field.item() if name.endswith("amax") else same_bytes(found, field), name
    columnwise = quantizer.with_usage(rowwise=False, columnwise=True)
    found = GroupedRows.quantize_rows(x, torch.tensor(splits), columnwise).dequantize()
    alone = torch.cat([columnwise.quantize(values).dequantize() for values in x.split(splits) if len(values)])
    assert torch.equal(found, alone)


def test_the_transform_without_random_signs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(em, "SIGNS", np.ones(16))
    values = np.round(np.random.default_rng(0).standard_normal((37, 20)) * 256) / 256  # sums are exact
    fields = CASES["no signs"]().quantize_fields(torch.from_numpy(values.astype(np.float32)))
    expected = em.quantize(em.rotate(em.to_bfloat16(values.astype(np.float32).T)))
    assert_same(fields, "columnwise", expected, "no signs", any_zero=True)
    assert_same(fields, "rowwise", em.quantize(values.astype(np.float32)), "no signs")


RECIPES = [
    NVFP4BlockScaling(disable_rht=True, disable_stochastic_rounding=True, row_scaled_activation=True),
    NVFP4BlockScaling(row_scaled_activation=True, backward_override="dequantized"),
    NVFP4BlockScaling(disable_rht=True, disable_stochastic_rounding=True, nvfp4_4over6="all"),
    NVFP4BlockScaling(disable_stochastic_rounding=True, nvfp4_4over6="weights", nvfp4_4over6_err_mode="MSE"),
]


@pytest.mark.parametrize("recipe", RECIPES, ids=["rows", "rows forward", "4/6", "4/6 weights"])
@pytest.mark.parametrize("grouped", [False, True])
def test_layers_multiply_what_the_quantizers_make(recipe: NVFP4BlockScaling, grouped: bool) -> None:
    x, dy = torch.randn(32, 64, requires_grad=True), torch.randn(32, 48)
    layer = GroupedLinear(1, 64, 48, bias=False) if grouped else Linear(64, 48, bias=False)
    with autocast(recipe=recipe):
        y = layer(x, *([torch.tensor([32])] if grouped else []))
    y.backward(dy)
    quantizers = recipe.quantizers("Linear", "")
    w = layer.weight.detach().view(48, 64)

    def stored(quantizer: Quantizer, tensor: torch.Tensor, usage: str) -> torch.Tensor:
        own = quantizer.member(usage).with_usage(rowwise=usage == "rowwise", columnwise=usage == "columnwise")
        return own.quantize(tensor).dequantize(torch.float32)

    of_x, of_w, of_dy = quantizers.input, quantizers.weight, quantizers.grad_output
    torch.testing.assert_close(y.detach(), stored(of_x, x.detach(), "rowwise") @ stored(of_w, w, "rowwise").t())
    if recipe.backward_override is None:
        torch.testing.assert_close(x.grad, stored(of_dy, dy, "rowwise") @ stored(of_w, w, "columnwise"))
        expected = stored(of_dy, dy, "columnwise").t() @ stored(of_x, x.detach(), "columnwise")
        torch.testing.assert_close(layer.weight.grad.view(48, 64), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: NVFP4Quantizer(row_scaled_nvfp4=True).quantize(torch.ones(2, 16)), "row_scaled_nvfp4 has no columnwi"),
        (lambda: NVFP4Quantizer(row_scaled_nvfp4=True, with_2d_quantization=True), "row_scaled_nvfp4 and with_2d_quan"),
        (lambda: NVFP4Quantizer(nvfp4_use_4over6=True, with_rht=True), "with_rht and nvfp4_use_4over6 are both True"),
        (lambda: NVFP4Quantizer(nvfp4_use_4over6=True, stochastic_rounding=True), "stochastic_rounding and nvfp4_use"),
        (lambda: NVFP4Quantizer(nvfp4_e4m3_max=256), "nvfp4_e4m3_max is 256; allowed: 448, and 256 with nvfp4_use_4ov"),
        (lambda: NVFP4Quantizer(nvfp4_4over6_err_mode="max"), "nvfp4_4over6_err_mode is 'max'; allowed: 'MAE', 'MSE'"),
        (lambda: NVFP4BlockScaling(nvfp4_4over6="all"), "nvfp4_4over6 is 'all'; allowed with disable_rht"),
        (lambda: NVFP4BlockScaling(nvfp4_4over6="input"), "nvfp4_4over6 is 'input'; allowed: 'none', 'weights', 'act"),
    ],
)
def test_options_that_exclude_each_other(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_transforms_with_and_without_signs_do_not_cancel() -> None:
    signs, none = NVFP4Quantizer(with_rht=True), CASES["no signs"]()
    chosen = CustomRecipe(lambda role: none if role.tensor_type == "input" else NVFP4Quantizer(with_rht=True))
    with pytest.raises(ValueError, match="weight has the random Hadamard transform"):
        chosen.quantizers("Linear", "")
    made = {"input": none, "weight": NVFP4Quantizer(), "grad_output": HybridQuantizer(columnwise_quantizer=signs)}
    with pytest.raises(ValueError, match="different signs in the random Hadamard transform"):
        CustomRecipe(lambda role: made[role.tensor_type]).quantizers("Linear", "")


def test_files_name_options_only_where_they_are_used() -> None:
    """So that readers of the first files read those of ordinary NVFP4."""
    assert set(NVFP4Quantizer().to_dict()) == {
        *("format", "rowwise", "columnwise", "with_rht", "stochastic_rounding", "with_2d_quantization")
    }
    assert "nvfp4_4over6" not in NVFP4BlockScaling().to_dict()
    assert Quantizer.from_dict(ROWS.to_dict()) == ROWS
    for recipe in RECIPES:
        assert NVFP4BlockScaling.from_json(recipe.to_json()) == recipe
