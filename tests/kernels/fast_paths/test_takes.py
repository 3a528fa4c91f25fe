"""The line that says what a fast path takes: what it refuses, in which words, and where an operation asks it."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from te_models.kernels.custom_op import like, operation, registration, takes
from te_models.kernels.custom_op.takes import apart
from tests.compare import refused

BF16, F32 = torch.bfloat16, torch.float32
LINEAR = takes("x: T [..., K]; weight: T [N, K] rows; bias: T [N]?; K % 16 == 0", T=(BF16, F32))


def ones(*shape: int, **options: Any) -> Tensor:
    return torch.ones(shape, **options)


@pytest.mark.parametrize(
    ("x", "weight", "bias", "wrong"),
    [
        (ones(2, 3, 32), ones(8, 32), ones(8), ""),
        (ones(32), ones(8, 32), None, ""),
        (ones(2, 32), ones(8, 64)[:, :32], None, ""),
        (ones(0, 32), ones(8, 32), None, ""),
        (ones(2, 32), ones(8, 48), None, "weight"),
        (ones(2, 32), ones(8, 32, dtype=BF16), None, "weight"),
        (ones(2, 32, dtype=torch.float16), ones(8, 32, dtype=torch.float16), None, "x"),
        (ones(2, 32), ones(32, 8).t(), None, "weight"),
        (ones(2, 32), ones(1, 8, 32), None, "weight"),
        (torch.ones(()), ones(8, 32), None, "x"),
        (ones(2, 32), ones(8, 32), ones(1), "bias"),
        (ones(2, 32), ones(8, 32), ones(8, dtype=BF16), "bias"),
        (ones(2, 24), ones(8, 24), None, "arguments"),
        (ones(2, 32), ones(8, 32, device="meta"), None, "weight"),
        (ones(2, 32), None, None, "weight"),
    ],
)
def test_it_names_the_first_argument_that_does_not_fit(x: Any, weight: Any, bias: Any, wrong: str) -> None:
    assert LINEAR.misfit(x, weight, bias) == wrong and LINEAR.misfit_on_cpu(x, weight, bias) == wrong
    if weight is not None:
        assert LINEAR.misfit_of_fakes(x, weight, bias) == (wrong if weight.stride()[-1] == 1 else "")


def test_memory_that_does_not_hold_the_values_is_refused() -> None:
    negative = torch.ones(2, 32, dtype=torch.complex64).conj().imag
    zeros = torch._efficientzerotensor((2, 32))  # pyright: ignore[reportPrivateImportUsage]
    sparse = ones(2, 32).to_sparse()
    assert negative.is_neg()
    for x in (negative, zeros, sparse):
        assert LINEAR.misfit_on_cpu(x, ones(8, 32), None) == "x"

    class Own(Tensor):
        pass

    assert LINEAR.misfit_on_cpu(ones(2, 32).as_subclass(Own), ones(8, 32), None) == "x"
    assert not LINEAR.misfit_on_cpu(torch.nn.Parameter(ones(2, 32)), ones(8, 32), None)


def test_sizes_of_any_number_and_conditions_of_values() -> None:
    both = takes("q: any [*B, S]; k: any [*B, L]; ids: int32|int64 [..., S, L]; most: value; S <= most")
    q, k, ids = ones(2, 3, 4), ones(2, 3, 5), ones(4, 5, dtype=torch.int64)
    assert not both.misfit(q, k, ids, 4) and both.misfit(q, k, ids, 3) == "arguments"
    assert both.misfit(q, k[0], ids, 4) == "k" and both.misfit(q, k, ids.t(), 4) == "ids"
    assert both.misfit(q, k, ids.float(), 4) == "ids" and not both.misfit(q[0], k[0], ids[None].int(), 4)


def test_what_is_written_lies_apart() -> None:
    update = takes("weight: T [N] written; gradient: T [N] contiguous; state: T [N] written", T=(F32,))
    memory = torch.zeros(40)
    assert not update.misfit_on_cpu(memory[:10], memory[10:20], memory[20:30])
    assert update.misfit_on_cpu(memory[:10], memory[9:19], memory[20:30]) == "arguments"
    assert update.misfit_on_cpu(memory[:10], memory[20:30], memory[5:15]) == "arguments"
    assert update.misfit_on_cpu(memory[:20:2], memory[20:30], memory[30:]) == "weight"
    assert apart([memory[:0]], [memory]) and not apart([memory[:1]], [memory.view(2, 20).t()])


def test_texts_that_are_none_are_refused() -> None:
    refused(lambda: takes("x: any [N] dense"), "x has the flags dense; allowed: contiguous, rows, written")
    refused(lambda: takes("x: any; bias: any [N]?"), "bias: any [N]? may be None and is the first to name N")
    refused(lambda: takes("x: any [..., N, *B]"), "x has 2 parts of any number of dimensions; allowed: one")
    with pytest.raises(TypeError, match="test_takes says what it takes of y, which are no parameters of its"):

        @operation("test_takes", lambda x: like(x), takes=takes("y: any"))
        def none(x: Tensor) -> Tensor: ...


def test_an_operation_and_its_fake_refuse_the_same_in_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registration, "_REGISTERED", {})

    @operation("test_added", lambda x: like(x), takes=takes("x: T [..., K]; bias: T [K]?", T=(BF16, F32)))
    def added(x: Tensor, bias: Tensor | None) -> Tensor:
        return x.clone() if bias is None else x + bias

    message = r"^test_added: bias is torch.float32 \(1,\) beside x torch.float32 \(2, 3\); allowed: T \[K\]\?$"
    x = ones(2, 3)
    assert torch.equal(added(x, ones(3)), 2 * x) and torch.equal(added(x, None), x)
    with pytest.raises(ValueError, match=message):
        added(x, ones(1))
    with FakeTensorMode() as mode, pytest.raises(ValueError, match=message):
        added(mode.from_tensor(x), mode.from_tensor(ones(1)))

    @torch.compile(dynamic=True, fullgraph=True, backend="eager")
    def compiled(x: Tensor, bias: Tensor) -> Tensor:
        return added(x, bias) * 2

    assert torch.equal(compiled(x, ones(3)), 4 * x) and torch.equal(compiled(ones(4, 5), ones(5)), 4 * ones(4, 5))
