"""Rows of groups are quantized once for all the GEMMs that take them; of x a layer saves the copy for wgrad."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

import te_models.layers as te
from te_models.kernels import libraries
from te_models.kernels import quantize as q
from te_models.kernels.permute import permute, sort_by_expert, unpermute
from te_models.layers.gemm import grouped as grouped_function
from te_models.layers.gemm import product as gemm_operand
from te_models.layers.gemm import quantized_rows
from te_models.layers.quantizer import group_offsets
from tests.kernels.triton.as_on_a_gpu import NoLibrary

NAMES = ["delayed", "current", "block", "mxfp8", "nvfp4"]
SPLITS = [33, 0, 25]


def as_on_an_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gemm_operand, "_DEQUANTIZING_DEVICES", ())
    monkeypatch.setattr(libraries, "answers", NoLibrary())


def layer(**options: object) -> te.GroupedLinear:
    torch.manual_seed(0)
    module = te.GroupedLinear(3, 96, 64, bias=False, params_dtype=torch.bfloat16, **options)
    te.set_rounding_seed(module, 3)
    return module


def step(module: te.GroupedLinear, chosen: te.Recipe, run: Callable[..., Tensor] | None = None) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(70, 96, generator=generator).bfloat16().requires_grad_()
    with te.autocast(recipe=chosen):
        y = (module if run is None else run)(x, torch.tensor(SPLITS))
    y.backward(torch.randn(70, 64, generator=generator).bfloat16())
    return [y.detach(), x.grad, module.weight.grad]


def assert_same(found: list[Tensor], expected: list[Tensor]) -> None:
    for got, want in zip(found, expected, strict=True):
        assert want.float().norm() > 0
        assert (got.float() - want.float()).norm() <= 2.0**-7 * want.float().norm()


def kept_bytes(run: Callable[[], Tensor]) -> int:
    """What autograd saves, weights apart, which are there anyway."""
    seen: dict[int, int] = {}

    def pack(t: Tensor) -> Tensor:
        if not isinstance(t, torch.nn.Parameter):
            seen[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        run()
    return sum(seen.values())


@pytest.mark.parametrize("accelerator", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_grouped_layers_keep_the_quantized_copy(name: str, accelerator: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As much as a dense layer keeps, and the splits; the whole input where it is asked to."""
    if accelerator:
        as_on_an_accelerator(monkeypatch)
    x = torch.randn(1024, 256, dtype=torch.bfloat16, requires_grad=True)
    whole = x.numel() * x.element_size()
    splits, new = torch.tensor([512, 512]), {"bias": False, "params_dtype": torch.bfloat16}
    found = []
    for module, arguments in (
        (te.Linear(256, 32, **new), ()),
        (te.GroupedLinear(2, 256, 32, **new), (splits,)),
        (te.GroupedLinear(2, 256, 32, save_original_input=True, **new), (splits,)),
    ):
        # frozen: what is saved of a weight for dgrad is not the point here
        inputs = x.detach()
        with te.autocast(recipe=te.recipe(name)):
            found.append(kept_bytes(lambda m=module, i=inputs, a=arguments: m(i, *a)))
    dense, grouped, original = found
    # the padded copy has room for 128 more rows per group; splits, ends and the group of each row are 8 bytes each
    assert grouped <= dense * (1 + 2 * 128 / 1024) + 8 * 1024 + 2048 < whole and original >= whole


@pytest.mark.parametrize("name", NAMES)
def test_saving_the_original_input_changes_no_number(name: str) -> None:
    expected = step(layer(), te.recipe(name))
    assert all(map(torch.equal, step(layer(save_original_input=True), te.recipe(name)), expected))


@pytest.mark.parametrize("name", NAMES)
def test_an_accelerator_quantizes_rows_once_and_pads_none(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One call for x and one for dy, and no copy of either in high precision."""
    chosen = te.recipe(name)
    expected = step(layer(), chosen)
    as_on_an_accelerator(monkeypatch)
    calls: list[str] = []

    def counted(which: str, function: Callable[..., object]) -> Callable[..., object]:
        return lambda *a, **k: (calls.append(which), function(*a, **k))[1]

    for which in ("quantize_grouped_per_tensor", "quantize_grouped_blockwise", "quantize_grouped_nvfp4"):
        monkeypatch.setattr(q, which, counted(which, getattr(q, which)))

    def no_padding(self: group_offsets.PaddedRows, x: Tensor) -> Tensor:
        raise AssertionError("rows were padded in high precision")

    monkeypatch.setattr(group_offsets.PaddedRows, "pad", no_padding)
    assert_same(step(layer(), chosen), expected)
    assert len(calls) == 2, calls


def test_delayed_scaling_records_the_same_amaxes(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for accelerator in (False, True):
        if accelerator:
            as_on_an_accelerator(monkeypatch)
        module = layer()
        step(module, te.recipe("delayed"))
        found.append((module.fp8_scale, module.fp8_grad_amax.clone()))
    assert all(map(torch.equal, *found)) and (found[0][1] > 0).tolist() == [True, False, True]


BLOCK1 = te.Float8BlockQuantizer(block_scaling_dim=1)
BY_ROWS = te.HybridQuantizer(
    rowwise_quantizer=te.MXFP8Quantizer(), columnwise_quantizer=te.Float8CurrentScalingQuantizer()
)
MIXTURES: dict[str, tuple[te.Quantizer, te.Quantizer]] = {  # of x and of dy
    "blocks of other lengths": (BLOCK1, te.MXFP8Quantizer()),
    "blocks and one scale": (te.MXFP8Quantizer(), te.Float8CurrentScalingQuantizer()),
    "one scale and blocks": (te.Float8CurrentScalingQuantizer(), BLOCK1),
    "another format for wgrad": (BY_ROWS, BY_ROWS),
    "plain for wgrad": (
        te.HybridQuantizer(rowwise_quantizer=te.MXFP8Quantizer(), columnwise_quantizer=te.IdentityQuantizer()),
        te.IdentityQuantizer(),
    ),
    "four bits in squares": (te.NVFP4Quantizer(with_2d_quantization=True), te.MXFP8Quantizer()),
}


@pytest.mark.filterwarnings("ignore:scaled_grouped_gemm.* runs as emulation:RuntimeWarning")  # formats that do not mix
@pytest.mark.parametrize("save", [False, True])
@pytest.mark.parametrize("mixture", MIXTURES)
def test_formats_that_are_aligned_differently(mixture: str, save: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    of_x, of_dy = MIXTURES[mixture]

    def factory(role: te.QuantizerRole) -> te.Quantizer:
        return {"input": of_x, "grad_output": of_dy, "weight": te.MXFP8Quantizer()}[role.tensor_type]

    chosen = te.CustomRecipe(qfactory=factory)
    expected = step(layer(save_original_input=True), chosen)
    assert_same(step(layer(save_original_input=save), chosen), expected)
    as_on_an_accelerator(monkeypatch)
    assert_same(step(layer(save_original_input=save), chosen), expected)


def test_rows_quantized_by_a_hybrid_have_the_numbers_of_plain_rows() -> None:
    """Also where wgrad's copy is of one scale, in the rows that came in."""
    quantizer, _ = MIXTURES["another format for wgrad"]
    chosen = te.CustomRecipe(qfactory=lambda role: quantizer)
    x, m_splits, found = torch.randn(70, 96).bfloat16(), torch.tensor(SPLITS), []
    for rows in (x, te.GroupedRows.quantize_rows(x, m_splits, quantizer)):
        module = layer()
        with te.autocast(recipe=chosen):
            module(rows, m_splits).float().square().sum().backward()
        found.append(module.weight.grad)
    assert torch.equal(*found)


@pytest.mark.parametrize("name", ["dequantized", "high_precision"])
@pytest.mark.parametrize("recipe_name", NAMES)
def test_an_overridden_backward_pass(recipe_name: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = te.recipe(recipe_name, backward_override=name)
    expected = step(layer(save_original_input=True), chosen)
    assert all(map(torch.equal, step(layer(), chosen), expected))
    as_on_an_accelerator(monkeypatch)
    assert_same(step(layer(), chosen), expected)


@pytest.mark.sentinels("current")
@pytest.mark.parametrize("name", ["current", "mxfp8"])
def test_an_accelerator_s_graph_is_one_for_all_splits(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    as_on_an_accelerator(monkeypatch)
    module = layer()
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    for splits in (SPLITS, [0, 70, 0]):
        found = []
        for run in (module, compiled):
            x = torch.linspace(-1, 1, 70 * 96).view(70, 96).bfloat16().requires_grad_()
            module.zero_grad()
            with te.autocast(recipe=te.recipe(name)):
                y = run(x, torch.tensor(splits))
            y.float().square().sum().backward()
            found.append([y.detach(), x.grad, module.weight.grad])
        assert all(map(torch.equal, *found))
    assert counters["stats"]["unique_graphs"] == 1 and not counters["graph_break"]


# --- tokens on the way to their experts ----------------------------------------------------------------------------


def experts_step(
    module: te.GroupedLinear, chosen: te.Recipe, run: Callable[..., Tensor] | None = None
) -> tuple[int, list[Tensor]]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(40, 96, generator=generator).bfloat16().requires_grad_()
    chosen_experts = torch.randint(0, 2, (40, 2), generator=generator) * 2  # none for the second
    module.zero_grad()
    with te.autocast(recipe=chosen):
        align = module.row_align(x.device)
        order = sort_by_expert(chosen_experts, 3, align=align)
        rows = (module if run is None else run)(x, order.rows_per_expert, permutation=order, row_align=align)
    y = unpermute(rows, order, torch.rand(40, 2, generator=generator))
    y.backward(torch.randn(40, 64, generator=generator).bfloat16())
    return align, [y.detach(), x.grad, module.weight.grad]


@pytest.mark.parametrize(("name", "align"), [("block", 128), ("mxfp8", 32), ("current", 1), ("nvfp4", 1)])
def test_tokens_are_permuted_and_quantized_in_one_pass(name: str, align: int, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = te.recipe(name)
    found, expected = experts_step(layer(), chosen)
    assert found == 1, "on a CPU the compiler fuses the steps"
    as_on_an_accelerator(monkeypatch)
    calls: list[str] = []
    for where, which in ((grouped_function, "permute"), (quantized_rows, "permute_quantized")):
        function = getattr(where, which)
        monkeypatch.setattr(where, which, lambda *a, w=which, f=function, **k: (calls.append(w), f(*a, **k))[1])
    found, got = experts_step(layer(), chosen)
    assert found == align and calls == (["permute"] if align == 1 else ["permute_quantized"])
    assert_same(got, expected)


@pytest.mark.slow
def test_they_compile_to_one_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    as_on_an_accelerator(monkeypatch)
    module, chosen = layer(), te.recipe("mxfp8")
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    _, expected = experts_step(module, chosen)
    for _ in range(2):
        _, got = experts_step(module, te.recipe("mxfp8"), compiled)
        assert all(map(torch.equal, got, expected))
    assert counters["stats"]["unique_graphs"] == 1 and not counters["graph_break"]


def test_where_that_would_change_numbers_rows_are_quantized_by_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a bias rows that only fill up are not zero; statistics and an overridden backward pass want the values."""
    as_on_an_accelerator(monkeypatch)
    device, mxfp8 = torch.device("cpu"), te.recipe("mxfp8")
    with te.autocast(recipe=mxfp8):
        assert layer().row_align(device) == 32 and te.GroupedLinear(3, 96, 64).row_align(device) == 1
        assert layer(save_original_input=True).row_align(device) == 1
        with torch.no_grad():
            assert layer().row_align(device) == 1
        with te.collect_statistics():
            assert layer().row_align(device) == 1
    with te.autocast(recipe=te.recipe("mxfp8", backward_override="dequantized")):
        assert layer().row_align(device) == 1
    assert layer().row_align(device) == 1
    order = sort_by_expert(torch.zeros(40, 2, dtype=torch.int64), 3)
    x, module = torch.randn(40, 96).bfloat16(), layer()
    with te.autocast(recipe=mxfp8):  # a permutation without room to fill up is an ordinary one
        y = module(x, order.rows_per_expert, permutation=order)
        assert torch.equal(y, module(permute(x, order), order.rows_per_expert))
