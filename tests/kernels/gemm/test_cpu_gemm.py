"""On CPU, 16-bit matrices are multiplied in float32 where that is faster: the same sums, rounded once, and only there.

What is saved for the backward pass stays 16-bit, in eager mode and in graphs."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import EagerAndRecordGraphs
from torch.utils._python_dispatch import TorchDispatchMode

from te_models.kernels.cross_entropy import linear_cross_entropy
from te_models.kernels.gemm import cpu, cpu_gemm, linear, linear_accumulating, matmul, set_cpu_gemm, using_cpu_gemm
from te_models.kernels.gemm.float32 import FEW_ROWS, float32_product, gemm_float32
from te_models.kernels.grouped_gemm import grouped_gemm, grouped_gemm_wgrad
from tests.compare import refused

SPLITS = torch.tensor([5, 0, 9])


def made(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + len(shape))).to(dtype)


def linear_and_gradients(dtype: torch.dtype, function: Callable[..., Tensor] = linear) -> list[Tensor]:
    inputs = [made(2, 33, 300, dtype=dtype), made(70, 300, dtype=dtype, seed=3), made(70, dtype=dtype)]
    for tensor in inputs:
        tensor.requires_grad_()
    y = function(*inputs)
    return [y.detach(), *torch.autograd.grad(y.float().square().sum(), inputs)]


def accumulating(dtype: torch.dtype) -> list[Tensor]:
    main_grad = torch.zeros(70, 300)
    x = made(2, 33, 300, dtype=dtype).requires_grad_()
    y = linear_accumulating(x, made(70, 300, dtype=dtype, seed=3).requires_grad_(), None, main_grad)
    return [y.detach(), *torch.autograd.grad(y.float().sum(), x), main_grad]


def grouped(dtype: torch.dtype) -> list[Tensor]:
    a, b = made(14, 300, dtype=dtype), made(3, 40, 300, dtype=dtype)
    y = grouped_gemm(a, b, SPLITS)
    return [y, grouped_gemm(y, b, SPLITS, transpose_b=False), grouped_gemm_wgrad(y, a, SPLITS)]


def chunked_loss(dtype: torch.dtype) -> list[Tensor]:
    hidden, weight = (t.requires_grad_() for t in (made(24, 300, dtype=dtype), made(50, 300, dtype=dtype, seed=1)))
    loss = linear_cross_entropy(hidden, weight, torch.arange(24), chunk_tokens=10)
    return [loss.detach(), *torch.autograd.grad(loss, (hidden, weight))]


CASES: dict[str, Callable[[torch.dtype], list[Tensor]]] = {
    "linear": linear_and_gradients,
    "accumulating": accumulating,
    "grouped": grouped,
    "loss": chunked_loss,
    "matmul": lambda dtype: [matmul(made(2, 3, 8, 300, dtype=dtype), made(2, 3, 300, 9, dtype=dtype))],
}


def dispatched_gemms(function: Callable[[], Any]) -> set[torch.dtype]:
    """Return the dtypes of the matrices that torch multiplies while `function` runs."""
    found = set()

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func.overloadpacket.__name__ in ("mm", "addmm", "bmm", "baddbmm"):
                found.update(a.dtype for a in args if isinstance(a, Tensor) and a.dim() > 1)
            elif func.overloadpacket.__name__ == "gemm_float32":
                found.add(torch.float32)
            return func(*args, **(kwargs or {}))

    with Watch():
        function()
    return found


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", CASES)
def test_float32_gemms_give_the_same_sums_rounded_once(case: str, dtype: torch.dtype) -> None:
    exact = CASES[case](torch.float64) if case not in ("accumulating", "grouped", "loss") else None
    with using_cpu_gemm("float32"):
        found = CASES[case](dtype)
    with using_cpu_gemm("bf16"):
        expected = CASES[case](dtype)
    for a, b in zip(found, expected, strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape
        assert (a.float() - b.float()).norm() <= 2 * torch.finfo(dtype).eps * b.float().norm()
    assert exact is None or exact[0].shape == found[0].shape


@pytest.mark.parametrize("case", sorted(CASES.keys() - {"grouped", "loss"}))
def test_every_matrix_that_is_multiplied_is_up_cast(case: str) -> None:
    with using_cpu_gemm("float32"):
        assert dispatched_gemms(lambda: CASES[case](torch.bfloat16)) == {torch.float32}
    with using_cpu_gemm("bf16"):
        assert torch.bfloat16 in dispatched_gemms(lambda: CASES[case](torch.bfloat16))


def test_few_rows_read_the_weight_as_it_is() -> None:
    weight = made(32, 64)
    few, more = made(FEW_ROWS - 1, 64), made(FEW_ROWS, 64)
    assert dispatched_gemms(lambda: float32_product(few, weight.t(), None, torch.bfloat16)) == {torch.bfloat16}
    assert dispatched_gemms(lambda: float32_product(more, weight.t(), None, torch.bfloat16)) == {torch.float32}


@pytest.mark.parametrize("compiled", [False, True])
def test_what_is_saved_for_the_backward_pass_stays_sixteen_bit(compiled: bool) -> None:
    saved: list[Tensor] = []
    function = torch.compile(linear, fullgraph=True, backend="aot_eager") if compiled else linear
    with using_cpu_gemm("float32"):
        with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
            y = function(made(33, 300).requires_grad_(), made(70, 300, seed=3).requires_grad_())
        y.sum().backward()
    assert saved and {t.dtype for t in saved if t.dim() > 1} == {torch.bfloat16}


def test_no_piece_in_float32_is_larger_than_four_mebibytes() -> None:
    left, right, wanted = made(1030, 4100), made(4100, 1100, seed=3), []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            found = func(*args, **(kwargs or {}))
            wanted.append(found.numel() if isinstance(found, Tensor) and found.dtype == torch.float32 else 0)
            return found

    for factor in (right, right.t().contiguous().t()):
        with Watch():
            found = float32_product(left, factor, None, torch.bfloat16)
        torch.testing.assert_close(found, (left.float() @ right.float()).bfloat16(), rtol=2**-7, atol=2**-5)
    assert max(wanted) <= 2**20


def test_the_gradient_of_a_weight_lies_as_the_weight_does() -> None:
    """Or autograd would copy it."""
    weight = made(70, 300).requires_grad_()
    for function in (linear, torch.compile(linear, fullgraph=True, backend="aot_eager")):
        with using_cpu_gemm("float32"):
            (found,) = torch.autograd.grad(function(made(33, 300), weight).sum(), weight)
        assert found.is_contiguous()


def test_autocast_does_not_round_up_cast_operands_again() -> None:
    left, right = made(33, 300), made(300, 70, seed=3)
    exact = left.double() @ right.double()
    with using_cpu_gemm("float32"), torch.autocast("cpu", torch.bfloat16):
        found = gemm_float32(left, right, None, torch.float32)
    assert (found - exact).abs().max() <= 1e-6 * exact.abs().max()


def test_second_derivatives_and_function_transforms() -> None:
    x, weight = made(6, 8).requires_grad_(), made(5, 8, seed=2).requires_grad_()
    with using_cpu_gemm("float32"):
        (first,) = torch.autograd.grad(linear(x, weight).float().pow(3).sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(first.float().sum(), weight)
        by_function = torch.func.grad(lambda w: linear(x.detach(), w).float().sum())(weight.detach())
    assert second.abs().sum() > 0
    torch.testing.assert_close(by_function, x.detach().float().sum(0).expand(5, 8).bfloat16(), rtol=2**-7, atol=2**-7)


def test_a_graph_follows_a_change_of_the_setting() -> None:
    compiled = torch.compile(lambda x, w: linear(x, w), backend="aot_eager", fullgraph=True)
    x, weight = made(33, 300), made(70, 300, seed=3)
    for backend in ("float32", "bf16", "float32"):
        with using_cpu_gemm(backend):
            assert torch.equal(compiled(x, weight), linear(x, weight))


@pytest.mark.parametrize("choice", ["float32", "bf16"])
def test_a_graph_that_is_the_first_to_multiply_makes_the_choice(choice: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process whose first GEMM is traced multiplies as one that began eagerly."""
    graphs = EagerAndRecordGraphs()
    monkeypatch.setattr(cpu, "automatic_choice", lambda: (choice, "the test says so"))
    monkeypatch.setattr(cpu, "_backend", None)
    compiled = torch.compile(lambda x, w: linear(x, w), backend=graphs, fullgraph=True)
    x, weight = made(33, 300), made(70, 300, seed=3)
    for _ in range(2):
        assert torch.equal(compiled(x, weight), linear(x, weight))
    (graph,) = graphs.graphs
    assert ("gemm_float32" in graph.code) == (choice == "float32")


def test_instruction_sets_decide_where_they_can(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA", raising=False)
    for amx, bf16, expected in ((True, True, "bf16"), (False, False, "float32")):
        monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda amx=amx: amx)
        monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda bf16=bf16: bf16)
        assert cpu.automatic_choice()[0] == expected
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: True)
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    assert cpu.automatic_choice()[0] == "float32"


@pytest.mark.parametrize(("times", "expected"), [((1.0, 2.0), "bf16"), ((2.0, 1.0), "float32")])
def test_a_machine_measures_once(
    times: tuple[float, float], expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TE_MODELS_CACHE", str(tmp_path))
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    monkeypatch.setattr(cpu, "_time_both", lambda: dict(zip(("bf16", "float32"), times, strict=True)))
    assert cpu.automatic_choice()[0] == expected
    monkeypatch.setattr(cpu, "_time_both", lambda: pytest.fail("measured again"))
    assert cpu.automatic_choice()[0] == expected
    for damage in ("", "[]", '{"a": 1}', '{"a": {"bf16": "x"}}', "\udcff"):
        (tmp_path / "cpu_gemm.json").write_bytes(damage.encode(errors="surrogateescape"))
        monkeypatch.setattr(cpu, "_time_both", lambda: {"bf16": 1.0, "float32": 3.0})
        assert cpu.automatic_choice()[0] == "bf16"


@pytest.mark.slow
def test_the_measurement_measures(tmp_path: Path) -> None:
    code = "from te_models.kernels.gemm import cpu; import json; print(json.dumps(cpu._time_both()))"
    found = json.loads(subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, text=True).stdout)
    assert found.keys() == {"bf16", "float32"} and all(0 < value < 60_000 for value in found.values())


def test_the_choice_holds_for_the_process() -> None:
    before = cpu_gemm()
    with using_cpu_gemm("bf16" if before == "float32" else "float32"):
        assert cpu_gemm() != before
    assert cpu_gemm() == before
    refused(lambda: set_cpu_gemm("fp32"), "the CPU GEMM is 'fp32'; allowed: auto, bf16, float32")


@pytest.mark.parametrize("rows", [2, 9, 300])
@pytest.mark.parametrize("lying", ["by rows", "by columns"])
def test_every_product_in_pieces_is_the_product(rows: int, lying: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Consecutive rows of the right side, columns of it, and pieces of both sides; with a bias, and into a tensor."""
    left, right, bias = made(rows, 96, seed=1), made(96, 80, seed=2), made(80, seed=3)
    right = right if lying == "by rows" else right.t().contiguous().t()
    exact = left.double() @ right.double()
    for cached, piece in ((1 << 18, 1 << 24), (80 * 20, 1 << 24), (80 * 20, 80 * 20)):
        monkeypatch.setattr("te_models.kernels.gemm.float32._CACHED", cached)
        monkeypatch.setattr("te_models.kernels.gemm.float32._PIECE", piece)
        for added in (None, bias):
            expected = (exact if added is None else exact + added.double()).to(torch.bfloat16)
            found = float32_product(left, right, added, torch.bfloat16)
            into = torch.full_like(found, float("nan"))
            assert float32_product(left, right, added, torch.bfloat16, into) is into
            assert torch.equal(into, found)
            torch.testing.assert_close(found, expected, rtol=2**-7, atol=2**-6)
