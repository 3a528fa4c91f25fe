"""A few rows by a plain weight: float32 sums, rounded once and the same for any number of rows."""

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import EagerAndRecordGraphs
from torch._subclasses.fake_tensor import FakeTensorMode

from te_models import GPTModel, MLPConfig, generate
from te_models.kernels.gemm import dense, gemv
from te_models.kernels.gemm.gemv import FEW, LEAST, MOST_IN_GROUPS
from te_models.kernels.grouped_gemm import grouped_gemm
from te_models.kernels.grouped_gemm.reference import multiply
from te_models.kernels.quantize.cpu import rounding as shared
from te_models.layers import GroupedLinear, Linear
from tests.build import tiny
from tests.kernels.fewer_instructions import compiled_quickly
from tests.kernels.gemm.test_few_rows import BF16, F32, INSTRUCTIONS, assert_within_bound, rows
from tests.patches import without_compiler

pytestmark = pytest.mark.skipif(not torch.cpu._is_avx2_supported(), reason="the kernel is for x86 CPUs with AVX2")
SHAPES = ((256, 512), (515, 336), (301, 1123), (70000, 3))  # of weights; columns that end within four vectors, and one


@pytest.fixture(params=INSTRUCTIONS)
def instructions(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The library of this CPU's widest vectors, and that of AVX2's."""
    if request.param == "avx2":
        function = gemv._function
        monkeypatch.setattr(
            gemv, "_function", lambda dtype, name="te_rows": compiled_quickly(function, dtype, name, True)
        )


def weight_of(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)


@pytest.mark.parametrize("dtype", (BF16, F32))
def test_sums_are_float32_and_do_not_depend_on_the_number_of_rows(instructions: None, dtype: torch.dtype) -> None:
    for shape in SHAPES:
        weight, bias, x = weight_of(shape, dtype), rows(1, shape[0], dtype)[0], rows(FEW, shape[1], dtype)
        whole = gemv.gemv_linear(x, weight, None)
        assert_within_bound(whole, x, weight)
        for count in range(1, FEW + 1):
            assert gemv.uses_gemv(x[:count], weight)
            assert torch.equal(gemv.gemv_linear(x[:count], weight, None), whole[:count])
            with_bias = gemv.gemv_linear(x[:count], weight, bias)
            assert_within_bound(with_bias, x[:count], weight, bias)
        assert torch.equal(gemv.gemv_linear(x[:6].view(2, 3, -1), weight, bias), with_bias[:6].view(2, 3, -1))


def test_bfloat16_is_summed_in_the_order_of_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    function = gemv._function
    monkeypatch.setattr(gemv, "_function", lambda dtype, name="te_rows": function(dtype, name, True))
    for shape in ((128, 576), (128, 583), (4096, 17), (2048, 64)):
        weight, x = weight_of(shape, BF16), rows(3, shape[1], BF16)
        wide = gemv.gemv_linear(x.float(), weight.float(), None)
        assert torch.equal(gemv.gemv_linear(x, weight, None), wide.to(BF16)), shape


def test_rows_of_a_weight_need_not_follow_one_another(instructions: None) -> None:
    whole, x = weight_of((300, 640), BF16), rows(3, 400, BF16)
    part = whole[:, 100:500]
    assert gemv.uses_gemv(x, part)
    assert torch.equal(gemv.gemv_linear(x, part, None), gemv.gemv_linear(x, part.contiguous(), None))


@pytest.mark.parametrize("value", (torch.inf, torch.nan))
def test_infinities_and_nan_stay_in_their_results(instructions: None, value: float) -> None:
    for columns in (512, 337):
        weight, x = weight_of((256, columns), F32), rows(2, columns, F32)
        weight[7, -1], x[1, 3] = value, value
        y = gemv.gemv_linear(x, weight, None)
        assert not y[0, 7].isfinite() and not y[1].isfinite().any()
        assert y[0, :7].isfinite().all() and y[0, 8:].isfinite().all()


@pytest.mark.parametrize("dtype", (BF16, F32))
def test_groups_of_few_rows_are_multiplied_so_and_others_by_a_gemm(instructions: None, dtype: torch.dtype) -> None:
    weight, splits = weight_of((5, 256, 264), dtype), torch.tensor([3, 0, 1, FEW + 1, FEW])
    total = int(splits.sum())
    x = rows(total + 2, 264, dtype)
    y = grouped_gemm(x, weight, splits)
    begin = 0
    for g, count in enumerate(splits.tolist()):
        own = x[begin : begin + count]
        expected = gemv.gemv_linear(own, weight[g], None) if 0 < count <= FEW else own @ weight[g].t()
        assert torch.equal(y[begin : begin + count], expected), g
        begin += count
    assert (y[total:] == 0).all()
    turned = grouped_gemm(x[:, :256].contiguous(), weight, splits, transpose_b=False)
    assert torch.equal(turned[:3], x[:3, :256] @ weight[0])


def test_groups_of_a_large_call_have_the_bits_of_a_gemm() -> None:
    weight, splits = weight_of((2, 256, 264), BF16), torch.tensor([MOST_IN_GROUPS - 3, 4])
    x = rows(MOST_IN_GROUPS + 1, 264, BF16)
    y = grouped_gemm(x, weight, splits)
    expected = torch.empty(4, 256, dtype=BF16)
    multiply(x[-4:], weight[1].t(), expected)
    assert torch.equal(y[-4:], expected)
    few = grouped_gemm(x[1:], weight, splits - torch.tensor([1, 0]))
    assert torch.equal(few[-4:], gemv.gemv_linear(x[-4:], weight[1], None))


@torch.no_grad()
def test_it_serves_plain_matrices_alone() -> None:
    weight, x = weight_of((256, 512), F32), rows(1, 512, F32)
    assert gemv.uses_gemv(x, weight) and gemv.uses_gemv(x, torch.nn.Parameter(weight, requires_grad=False))
    assert not gemv.uses_gemv(rows(FEW + 1, 512, F32), weight) and not gemv.uses_gemv(x[:0], weight)
    assert not gemv.uses_gemv(x, weight.bfloat16()) and not gemv.uses_gemv(x.half(), weight.half())
    assert not gemv.uses_gemv(rows(1, 256, F32), weight.t())
    assert not gemv.uses_gemv(rows(1, 8, F32), weight_of((LEAST // 8 - 1, 8), F32))
    each = torch.func.vmap(lambda row: torch.tensor(float(gemv.uses_gemv(row[None], weight))))
    assert not each(rows(3, 512, F32)).any()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert not gemv.uses_gemv(x, weight) and gemv.uses_gemv(x.bfloat16(), weight.bfloat16())
    with FakeTensorMode():
        assert not gemv.uses_gemv(torch.empty(1, 512), torch.empty(256, 512))


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch.jit.trace is deprecated, and still used
def test_a_trace_has_what_is_computed() -> None:
    layer = Linear(512, 256)
    with torch.no_grad():
        traced = torch.jit.trace(layer, rows(1, 512, F32))
        x = torch.ones(1, 512)
        torch.testing.assert_close(traced(x), layer(x), rtol=1e-5, atol=1e-5)


def test_layers_call_it(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    function = gemv._function
    monkeypatch.setattr(gemv, "_function", lambda *arguments: calls.append(arguments) or function(*arguments))
    layer, experts = Linear(512, 256), GroupedLinear(2, 512, 256)
    x, splits = rows(3, 512, F32), torch.tensor([1, 2])
    expected = torch.nn.functional.linear(x, layer.weight, layer.bias)
    with torch.no_grad():
        torch.testing.assert_close(layer(x), expected, rtol=1e-5, atol=1e-5)
        assert len(calls) == 1
        experts(x, splits)
    assert [name for _, *name in calls] == [[], ["te_rows_of_groups"]]
    layer(x).sum().backward()  # a gradient is wanted
    assert len(calls) == 2


def test_a_graph_of_few_rows_has_it_and_one_of_many_has_none() -> None:
    layer = Linear(512, 256, params_dtype=BF16)
    for count, inside in ((1, True), (FEW, True), (FEW + 1, False)):
        torch._dynamo.reset()
        backend, x = EagerAndRecordGraphs(), rows(count, 512, BF16)
        with torch.no_grad():
            assert torch.equal(torch.compile(layer, fullgraph=True, backend=backend, dynamic=False)(x), layer(x))
        assert ("te_models.gemv" in backend.graphs[0].code) == inside, backend.graphs[0].code
    torch._dynamo.reset()
    backend = EagerAndRecordGraphs()
    run = torch.compile(layer, fullgraph=True, backend=backend, dynamic=True)
    with torch.no_grad():
        for count in (3, 5, 40):
            run(rows(count, 512, BF16))
    assert len(backend.graphs) == 1 and "gemv" not in backend.graphs[0].code, "any number of rows"
    torch._dynamo.reset()
    backend = EagerAndRecordGraphs()
    torch.compile(layer, fullgraph=True, backend=backend)(rows(1, 512, BF16))
    assert "gemv" not in backend.graphs[0].code, "a gradient is wanted"


def test_without_a_compiler_a_gemm_runs(monkeypatch: pytest.MonkeyPatch, asked_anew: None) -> None:
    monkeypatch.setattr(gemv, "_function", without_compiler)
    weight, x = weight_of((256, 512), F32), rows(1, 512, F32)
    with torch.no_grad():
        y = dense.linear(x, weight)
    assert torch.equal(y, torch.nn.functional.linear(x, weight))
    assert shared.fallbacks == {"there is no C++ compiler": 1}


def test_tokens_of_a_batch_are_those_of_each_prompt_alone() -> None:
    """Greedy text of a model whose weights are large enough."""
    model = GPTModel(tiny(hidden_size=256, vocab_size=512, mlp=MLPConfig(ffn_hidden_size=512))).eval()
    prompts = torch.randint(0, 512, (4, 6), generator=torch.Generator().manual_seed(1))
    for prompt, text in zip(prompts, generate(model, prompts, 12), strict=True):
        assert torch.equal(generate(model, prompt[None], 12)[0], text)
