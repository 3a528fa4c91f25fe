"""The path of an accelerator, where GEMMs take the quantized numbers themselves, run on CPU: it computes what the
dequantizing path computes, and says where it cannot."""

from __future__ import annotations

import pytest
import torch

from te_models.kernels.gemm import gemm_counts, reset_gemm_counts, strict_gemms, traced_fallbacks
from te_models.layers import (
    CustomRecipe,
    GroupedLinear,
    IdentityQuantizer,
    Linear,
    MXFP8Quantizer,
    Recipe,
    autocast,
    quantized_model_init,
    recipe,
    set_rounding_seed,
    sides,
)

RECIPES = ["delayed", "current", "block", "mxfp8", "nvfp4"]


@pytest.fixture(autouse=True)
def fresh_counts():
    reset_gemm_counts()
    yield
    reset_gemm_counts()


def run(
    layer_kind: str, chosen: Recipe, dtype: torch.dtype, *, stored: bool, fused: bool = False
) -> list[torch.Tensor]:
    torch.manual_seed(0)
    with quantized_model_init(enabled=stored, recipe=chosen):
        if layer_kind == "linear":
            layer = Linear(96, 64, bias=False, params_dtype=dtype, fuse_wgrad_accumulation=fused)
        else:
            layer = GroupedLinear(3, 96, 64, bias=False, params_dtype=dtype, fuse_wgrad_accumulation=fused)
    if fused:
        layer.weight.main_grad = torch.zeros(layer.weight.shape)
    set_rounding_seed(layer, 3)
    for step in range(2):  # two, so that delayed scaling has a scale other than one
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(70, 96, generator=generator).to(dtype).requires_grad_()
        layer.zero_grad()
        with autocast(recipe=chosen):
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
    expected = run(kind, recipe(name), dtype, stored=stored)
    assert not any(operation.startswith("scaled") for operation, _ in gemm_counts())
    reset_gemm_counts()
    monkeypatch.setattr(sides, "_DEQUANTIZING_DEVICES", ())
    # NVFP4 weights of 16x16 blocks have no packed transpose, and rows of groups no packed kernel
    warned = name == "nvfp4"
    if warned:
        with pytest.warns(RuntimeWarning, match="there is no kernel for"):
            got = run(kind, recipe(name), dtype, stored=stored)
    else:
        got = run(kind, recipe(name), dtype, stored=stored)
    unit = 2.0**-8 if dtype == torch.bfloat16 else 2.0**-20
    for a, b in zip(expected, got, strict=True):
        assert (a.float() - b.float()).abs().max() <= 2 * unit * a.float().abs().max()
    ran = gemm_counts()
    if kind == "linear":
        assert sum(ran.values()) == 6, ran
    elif warned:  # each product is counted as a fallback, those of two operands without packed numbers, too
        assert sum(count for (name, _), count in ran.items() if name.startswith("scaled")) == 6, ran
    else:
        assert ran["scaled_grouped_gemm", "emulation"] == 4 and ran["scaled_grouped_gemm_wgrad", "emulation"] == 2, ran


@pytest.mark.parametrize("kind", ["linear", "grouped"])
@pytest.mark.parametrize("name", RECIPES[:4])
def test_they_accumulate_into_main_grad(kind: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = run(kind, recipe(name), torch.float32, stored=False, fused=True)
    monkeypatch.setattr(sides, "_DEQUANTIZING_DEVICES", ())
    got = run(kind, recipe(name), torch.float32, stored=False, fused=True)
    for a, b in zip(expected, got, strict=True):
        torch.testing.assert_close(b, a, rtol=1e-5, atol=1e-5 * float(a.abs().max()))


def test_a_product_of_one_quantized_side_is_counted_and_warned_about(monkeypatch: pytest.MonkeyPatch) -> None:
    def factory(role):
        return IdentityQuantizer() if role.tensor == "weight" else MXFP8Quantizer()

    monkeypatch.setattr(sides, "_DEQUANTIZING_DEVICES", ())
    with pytest.warns(RuntimeWarning, match="there is no kernel for e8m0 by high precision"):
        run("linear", CustomRecipe(qfactory=factory), torch.float32, stored=False)
    assert gemm_counts()["scaled_gemm", "emulation"] == 6


def test_strict_raises_instead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sides, "_DEQUANTIZING_DEVICES", ())
    with strict_gemms():
        run("linear", recipe("mxfp8"), torch.float32, stored=False)
        with pytest.raises(ValueError, match=r"there is no kernel for .* strict asks for"):
            run("linear", recipe("nvfp4"), torch.float32, stored=False)
    with pytest.warns(RuntimeWarning, match="there is no kernel for"):
        run("linear", recipe("nvfp4"), torch.float32, stored=False)


def test_a_fallback_in_a_compiled_graph_is_counted_when_it_is_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    """And warned about; it runs uncounted. Another shape is another graph."""

    def factory(role):
        return IdentityQuantizer() if role.tensor == "weight" else MXFP8Quantizer()

    torch._dynamo.reset()
    reset_gemm_counts()
    monkeypatch.setattr(sides, "_DEQUANTIZING_DEVICES", ())
    chosen, layer = CustomRecipe(qfactory=factory), Linear(64, 48)
    compiled = torch.compile(layer, fullgraph=True, dynamic=False)
    seen = []
    with pytest.warns(RuntimeWarning, match="there is no kernel for e8m0 by high precision") as warned:
        for rows in (32, 32, 64):
            with torch.no_grad(), autocast(recipe=chosen):
                compiled(torch.randn(rows, 64))
            seen.append(traced_fallbacks().get(("scaled_gemm", "emulation"), 0))
    assert len([w for w in warned if "no kernel" in str(w.message)]) == 1
    assert 0 < seen[0] == seen[1] < seen[2]
    assert not gemm_counts()
    reset_gemm_counts()
    torch._dynamo.reset()
    with pytest.raises(Exception, match="strict asks"), strict_gemms(), torch.no_grad(), autocast(recipe=chosen):
        compiled(torch.randn(32, 64))
