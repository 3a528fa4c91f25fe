"""Layers as on a GPU, where GEMMs take the quantized numbers themselves: against the same layers on the CPU.

Both multiply the same quantized numbers, so results differ by the order of sums and by roundings to bfloat16."""

import itertools

import pytest
import torch
from torch import Tensor

from te_models import layers
from te_models.kernels.gemm import gemm_counts, reset_gemm_counts, strict_gemms
from te_models.kernels.permute import sort_by_expert, unpermute
from tests.kernels.triton.as_on_a_gpu import gemms_as_on_a_gpu, rows_as_on_a_gpu


def mixed(role: layers.QuantizerRole) -> layers.Quantizer:
    dtype = torch.float8_e5m2 if role.tensor_type == "grad_output" else torch.float8_e4m3fn
    return layers.MXFP8Quantizer(fp8_dtype=dtype)


RECIPES = {
    "current": layers.Float8CurrentScaling(),
    "delayed": layers.DelayedScaling(),
    "block": layers.Float8BlockScaling(),
    "block, float32 scales": layers.Float8BlockScaling(use_f32_scales=True),
    "mxfp8": layers.MXFP8BlockScaling(),
    "nvfp4": layers.NVFP4BlockScaling(),
    "custom": layers.CustomRecipe(qfactory=mixed),
}
EMULATED = ("nvfp4",)  # an H100 has no four-bit GEMM
ROWS, INNER, OUTER = 37, 40, 24
SPLITS = [5, 0, 20]


def emulations() -> int:
    return sum(count for (_, backend), count in gemm_counts().items() if backend == "emulation")


def assert_close(found: list[Tensor], expected: list[Tensor]) -> None:
    for got, want in zip(found, expected, strict=True):
        assert (got.cpu().float() - want.float()).norm() <= 2.0**-7 * want.float().norm()


def step(kind: str, recipe: layers.Recipe, device: torch.device, accumulate: bool) -> list[Tensor]:
    """Return output and gradients of one layer, the weight's added to a main gradient of ones or not."""
    generator = torch.Generator().manual_seed(0)
    fused = {"fuse_wgrad_accumulation": accumulate, "params_dtype": torch.bfloat16, "device": device}
    if kind == "Linear":
        module = layers.Linear(INNER, OUTER, bias=False, **fused)
    else:
        module = layers.GroupedLinear(len(SPLITS), INNER, OUTER, bias=False, **fused)
    layers.set_rounding_seed(module, 3)  # the same random bits in every call
    (weight,) = module.parameters()
    with torch.no_grad():
        weight.copy_(torch.randn(weight.shape, generator=generator) / 8)
    if accumulate:
        weight.main_grad = torch.ones_like(weight, dtype=torch.float32)
    x = torch.randn(ROWS, INNER, generator=generator).bfloat16().to(device).requires_grad_()
    arguments = () if kind == "Linear" else (torch.tensor(SPLITS, device=device),)
    with layers.autocast(recipe=recipe):
        y = module(x, *arguments)
    y.backward(torch.randn(y.shape, generator=generator).bfloat16().to(device))
    assert x.grad is not None
    dw = weight.main_grad if accumulate else weight.grad
    assert dw is not None
    return [y.detach(), x.grad, dw]


@pytest.mark.sentinels("mxfp8-Linear-False", "current-Linear-False", "nvfp4-Linear-False", "delayed-GroupedLinear-True")
@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("kind", ["Linear", "GroupedLinear"])
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.filterwarnings("ignore:scaled_.* runs as emulation:RuntimeWarning")  # counted, see EMULATED
def test_quantized_numbers_reach_the_kernels(
    recipe: str, kind: str, accumulate: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = step(kind, RECIPES[recipe], torch.device("cpu"), accumulate)
    if device.type == "cpu":
        gemms_as_on_a_gpu(monkeypatch)
    reset_gemm_counts()
    found = step(kind, RECIPES[recipe], device, accumulate)
    scaled = {name: backend for name, backend in gemm_counts() if name.startswith("scaled")}
    assert scaled and emulations() == (3 if recipe in EMULATED else 0)
    assert_close(found, expected)
    if kind == "GroupedLinear":
        assert not found[0][sum(SPLITS) :].any()


@pytest.mark.sentinels("Linear-input", "Linear-weight", "Linear-None", "GroupedLinear-None")
@pytest.mark.parametrize("frozen", ["input", "weight", None])
@pytest.mark.parametrize("kind", ["Linear", "GroupedLinear"])
def test_no_gemm_of_a_format_without_kernels_falls_back_silently(
    kind: str, frozen: str | None, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of the three GEMMs warns, counts, and is an error where fallbacks are refused."""
    if device.type == "cpu":
        gemms_as_on_a_gpu(monkeypatch)
    module = (layers.Linear if kind == "Linear" else layers.GroupedLinear)(
        *((64, 32) if kind == "Linear" else (2, 64, 32)), bias=False, device=device
    )
    module.weight.requires_grad_(frozen != "weight")
    x = torch.randn(32, 64, device=device, requires_grad=frozen != "input")
    arguments = () if kind == "Linear" else (torch.tensor([16, 16], device=device),)
    reset_gemm_counts()
    with pytest.warns(RuntimeWarning, match="runs as emulation"), layers.autocast(recipe=RECIPES["nvfp4"]):
        y = module(x, *arguments)
    assert emulations() == 1
    reset_gemm_counts()
    with pytest.raises(ValueError, match="strict asks for"), strict_gemms():
        y.sum().backward(retain_graph=True)
    with pytest.warns(RuntimeWarning, match="runs as emulation"):
        y.sum().backward()
    assert emulations() == (2 if frozen is None else 1)


@pytest.mark.sentinels("input-True")
@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize(
    "recipe",
    [
        layers.Float8BlockScaling(x_block_scaling_dim=2, w_block_scaling_dim=1),
        layers.Float8BlockScaling(grad_block_scaling_dim=2, w_block_scaling_dim=1),
        layers.Float8BlockScaling(x_block_scaling_dim=2, w_block_scaling_dim=1, use_f32_scales=True),
    ],
    ids=["input", "gradient", "float32 scales"],
)
def test_rows_in_blocks_of_several_rows_fall_back(
    recipe: layers.Recipe, accumulate: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No grouped kernel reads them; two of the three GEMMs have them."""
    expected = step("GroupedLinear", recipe, torch.device("cpu"), accumulate)
    if device.type == "cpu":
        gemms_as_on_a_gpu(monkeypatch)
    reset_gemm_counts()
    with pytest.warns(RuntimeWarning, match="no kernel for .* rows in 128x128 blocks"):
        found = step("GroupedLinear", recipe, device, accumulate)
    assert emulations() == 2
    assert_close(found, expected)


def experts_step(recipe: layers.Recipe, device: torch.device) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    module = layers.GroupedLinear(2, INNER, OUTER, bias=False, params_dtype=torch.bfloat16, device=device)
    with torch.no_grad():
        module.weight.copy_(torch.randn(module.weight.shape, generator=generator) / 8)
    x = torch.randn(24, INNER, generator=generator).bfloat16().to(device).requires_grad_()
    chosen = torch.randint(0, 2, (24, 1), generator=generator).to(device)
    with layers.autocast(recipe=recipe):
        align = module.row_align(device)
        order = sort_by_expert(chosen, 2, align=align)
        y = unpermute(module(x, order.rows_per_expert, permutation=order, row_align=align), order, None)
    y.backward(torch.randn(y.shape, generator=generator).bfloat16().to(device))
    assert x.grad is not None and module.weight.grad is not None
    return [y.detach(), x.grad, module.weight.grad]


@pytest.mark.sentinels("mxfp8-rows", "mxfp8-tokens")
@pytest.mark.parametrize(
    ("recipe", "what"), [("current", "rows"), *itertools.product(("block", "mxfp8"), ("rows", "tokens"))]
)
def test_gemms_get_rows_as_kernels_make_them(
    recipe: str, what: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both copies of x and of dy from one kernel each, wgrad's in padded rows that lie transposed; of tokens, too."""

    def run(where: torch.device) -> list[Tensor]:
        recipe_of = RECIPES[recipe]
        return experts_step(recipe_of, where) if what == "tokens" else step("GroupedLinear", recipe_of, where, False)

    expected = run(torch.device("cpu"))
    if device.type == "cpu":
        gemms_as_on_a_gpu(monkeypatch)
        rows_as_on_a_gpu(monkeypatch)
    reset_gemm_counts()
    found = run(device)
    assert emulations() == 0
    assert_close(found, expected)
