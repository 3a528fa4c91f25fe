"""GEMMs on the quantized numbers themselves, run on CPU: what the dequantizing path computes, or what is missing."""

import pytest
import torch

import te_models.layers as te
from te_models.kernels.gemm import ScaledOperand, gemm_counts, reset_gemm_counts, strict_gemms, traced_fallbacks
from te_models.kernels.gemm.backends import DeviceCapability
from te_models.kernels.gemm.choice import choose_gemm
from te_models.layers.gemm import product as gemm_operand

pytestmark = pytest.mark.usefixtures("definitions")
RECIPES = ["delayed", "current", "block", "mxfp8", "nvfp4"]


@pytest.fixture(autouse=True)
def fresh_counts():
    reset_gemm_counts()
    yield
    reset_gemm_counts()


def run(
    layer_kind: str, chosen: te.Recipe, dtype: torch.dtype, *, stored: bool, fused: bool = False
) -> list[torch.Tensor]:
    torch.manual_seed(0)
    with te.quantized_model_init(enabled=stored, recipe=chosen):
        if layer_kind == "linear":
            layer = te.Linear(96, 64, bias=False, params_dtype=dtype, fuse_wgrad_accumulation=fused)
        else:
            layer = te.GroupedLinear(3, 96, 64, bias=False, params_dtype=dtype, fuse_wgrad_accumulation=fused)
    if fused:
        layer.weight.main_grad = torch.zeros(layer.weight.shape)
    te.set_rounding_seed(layer, 3)
    for step in range(2):  # two, so that delayed scaling has a scale other than one
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(70, 96, generator=generator).to(dtype).requires_grad_()
        layer.zero_grad()
        with te.autocast(recipe=chosen):
            y = layer(x) if layer_kind == "linear" else layer(x, torch.tensor([33, 0, 37]))
        y.backward(torch.randn(70, 64, generator=generator).to(dtype))
    return [y.detach(), x.grad, layer.weight.main_grad if fused else layer.weight.grad]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("stored", [False, True], ids=["plain", "primary"])
@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("kind", ["linear", "grouped"])
def test_quantized_numbers_give_the_same_products(
    kind: str, name: str, stored: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = run(kind, te.recipe(name), dtype, stored=stored)
    assert not any(operation.startswith("scaled") for operation, _ in gemm_counts())
    reset_gemm_counts()
    monkeypatch.setattr(gemm_operand, "_DEQUANTIZING_DEVICES", ())
    got = run(kind, te.recipe(name), dtype, stored=stored)
    unit = 2.0**-8 if dtype == torch.bfloat16 else 2.0**-20
    for a, b in zip(expected, got, strict=True):
        assert (a.float() - b.float()).abs().max() <= 2 * unit * a.float().abs().max()
    ran = gemm_counts()
    if kind == "linear":
        assert ran == {("scaled_gemm", "emulation"): 6}, ran
    else:
        assert ran["scaled_grouped_gemm", "emulation"] == 4 and ran["scaled_grouped_gemm_wgrad", "emulation"] == 2, ran


@pytest.mark.parametrize("kind", ["linear", "grouped"])
@pytest.mark.parametrize("name", RECIPES[:4])
def test_they_accumulate_into_main_grad(kind: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = run(kind, te.recipe(name), torch.float32, stored=False, fused=True)
    monkeypatch.setattr(gemm_operand, "_DEQUANTIZING_DEVICES", ())
    for a, b in zip(expected, run(kind, te.recipe(name), torch.float32, stored=False, fused=True), strict=True):
        torch.testing.assert_close(b, a, rtol=1e-5, atol=1e-5 * float(a.abs().max()))


def _mixed(role: te.QuantizerRole) -> te.Quantizer:
    return te.IdentityQuantizer() if role.tensor_type == "weight" else te.MXFP8Quantizer()


MIXED = te.CustomRecipe(qfactory=_mixed)


def test_a_product_of_one_quantized_side_is_counted_and_warned_about(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gemm_operand, "_DEQUANTIZING_DEVICES", ())
    with pytest.warns(RuntimeWarning, match="there is no kernel for e8m0 by high precision"):
        run("linear", MIXED, torch.float32, stored=False)
    assert gemm_counts()["scaled_gemm", "emulation"] == 6


def test_strict_raises_instead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gemm_operand, "_DEQUANTIZING_DEVICES", ())
    with strict_gemms():
        run("linear", te.recipe("mxfp8"), torch.float32, stored=False)
        with pytest.raises(ValueError, match=r"there is no kernel for .* strict asks for"):
            run("linear", MIXED, torch.float32, stored=False)
    with pytest.warns(RuntimeWarning, match="there is no kernel for"):
        run("linear", MIXED, torch.float32, stored=False)


def test_values_of_a_format_without_packed_numbers_are_a_fallback(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where neither side has any: rows of groups in squares of four bits."""
    chosen = te.CustomRecipe(qfactory=lambda role: te.NVFP4Quantizer(with_2d_quantization=True))
    monkeypatch.setattr(gemm_operand, "_DEQUANTIZING_DEVICES", ())
    with pytest.warns(RuntimeWarning, match="there is no kernel for nvfp4 by nvfp4"):
        run("grouped", chosen, torch.float32, stored=False)
    ran = {name: count for (name, backend), count in gemm_counts().items() if name.startswith("scaled")}
    assert ran == {"scaled_grouped_gemm": 4, "scaled_grouped_gemm_wgrad": 2}


@pytest.mark.parametrize("stored", [False, True])
@pytest.mark.parametrize("grouped", [False, True])
def test_four_bit_weights_in_squares_have_packed_numbers_for_dgrad(
    grouped: bool, stored: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same as for fprop, packed along the other dimension: hardware with a four-bit GEMM multiplies them."""
    monkeypatch.setattr(gemm_operand, "_DEQUANTIZING_DEVICES", ())
    quantizers = te.recipe("nvfp4").quantizers("Linear", "")
    weight = torch.randn(*((3,) if grouped else ()), 64, 96).bfloat16()
    if stored:
        fields = quantizers.weight.quantize_fields(weight)
        right = gemm_operand.stored_operand(quantizers.weight, fields, "columnwise", torch.bfloat16, weight.shape)
    else:
        right = gemm_operand.quantized_operand(quantizers.weight, weight, "columnwise", torch.bfloat16)
    assert isinstance(right, ScaledOperand) and right.kind == "nvfp4"
    assert (right.outer, right.inner) == (96, 64)
    expected = quantizers.weight.rounded(weight, "columnwise", torch.bfloat16)
    found = right.dequantized(torch.bfloat16)
    assert torch.equal(found.values, expected.values.mT) and torch.equal(found.scale, expected.scale)
    if not grouped:
        key = torch.zeros(2, dtype=torch.int64)
        dy = torch.randn(32, 64).bfloat16()
        left = gemm_operand.quantized_operand(quantizers.grad_output, dy, "rowwise", torch.bfloat16, key)
        b200 = DeviceCapability("cuda", (10, 0), True, (12, 9))
        assert choose_gemm(left, right, torch.bfloat16, b200).backend == "native"


def test_a_fallback_in_a_compiled_graph_is_counted_when_it_is_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    """And warned about; it runs uncounted. Another shape is another graph."""

    reset_gemm_counts()
    monkeypatch.setattr(gemm_operand, "_DEQUANTIZING_DEVICES", ())
    compiled = torch.compile(te.Linear(64, 48), fullgraph=True, dynamic=False, backend="eager")
    seen = []
    with pytest.warns(RuntimeWarning, match="there is no kernel for e8m0 by high precision") as warned:
        for rows in (32, 32, 64):
            with torch.no_grad(), te.autocast(recipe=MIXED):
                compiled(torch.randn(rows, 64))
            seen.append(traced_fallbacks().get(("scaled_gemm", "emulation"), 0))
    assert len([w for w in warned if "no kernel" in str(w.message)]) == 1
    assert 0 < seen[0] == seen[1] < seen[2] and not gemm_counts()
    reset_gemm_counts()
    torch._dynamo.reset()
    with pytest.raises(Exception, match="strict asks"), strict_gemms(), torch.no_grad(), te.autocast(recipe=MIXED):
        compiled(torch.randn(32, 64))
