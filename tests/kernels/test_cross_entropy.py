"""Cross entropy: against float64, with labels to ignore, in chunks, and without float32 logits in memory."""

import re

import pytest
import torch
from torch._inductor.utils import run_fw_bw_and_get_code

from te_models.kernels.cross_entropy import IGNORE_INDEX, cross_entropy, linear_cross_entropy, rows, shift_labels
from tests.compare import Largest
from tests.kernels.triton.op_inputs import linear_cross_entropy_inputs as inputs

UNIT = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8}


def exact_loss(x, weight, bias, labels, multiplier, softcap) -> torch.Tensor:
    logits = x @ weight.t() * multiplier if bias is None else (x @ weight.t() + bias) * multiplier
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    valid = labels != IGNORE_INDEX
    chosen = logits[valid].gather(1, labels[valid][:, None])[:, 0]
    return (logits[valid].logsumexp(-1) - chosen).sum() / max(1, int(valid.sum()))


def test_chunks_do_not_change_the_result(monkeypatch) -> None:
    x, weight, _, labels = inputs(50, 16, 31, torch.float32)
    results = []
    for elements in (1, 31 * 7, 1 << 20):
        monkeypatch.setattr(rows, "_STEP_ELEMENTS", elements)
        leaves = [x.clone().requires_grad_(), weight.clone().requires_grad_()]
        loss = linear_cross_entropy(*leaves, labels)
        results.append([loss, *torch.autograd.grad(loss, leaves)])
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def test_loss_from_logits_equals_torch() -> None:
    logits = torch.randn(20, 33, generator=torch.Generator().manual_seed(0)).bfloat16()
    labels = torch.arange(20)
    expected = torch.nn.functional.cross_entropy(logits.float(), labels)
    assert torch.allclose(cross_entropy(logits, labels), expected, rtol=4 * UNIT[torch.float32], atol=0)


def test_without_a_valid_label_loss_and_gradient_are_zero() -> None:
    x, weight, _, labels = inputs(5, 8, 11, torch.float32, ignored=1.1)
    leaves = [x.requires_grad_(), weight.requires_grad_()]
    for loss in (linear_cross_entropy(*leaves, labels), cross_entropy(x @ weight.t(), labels)):
        assert loss.item() == 0 and all(g.abs().max() == 0 for g in torch.autograd.grad(loss, leaves))


def test_ignored_tokens_change_nothing() -> None:
    x, weight, _, labels = inputs(30, 8, 11, torch.float32)
    kept = labels != IGNORE_INDEX
    leaf = x.clone().requires_grad_()
    loss = linear_cross_entropy(leaf, weight, labels)
    loss.backward()
    assert loss.item() == pytest.approx(linear_cross_entropy(x[kept], weight, labels[kept]).item(), rel=1e-6)
    assert leaf.grad[~kept].abs().max() == 0


def test_a_vocabulary_beyond_2_to_the_18() -> None:
    x, weight, _, labels = inputs(3, 4, 300_000, torch.float32, ignored=0)
    labels[0] = 299_999
    exact = exact_loss(x.double(), weight.double(), None, labels, 1.0, None)
    assert linear_cross_entropy(x, weight, labels).item() == pytest.approx(exact.item(), rel=1e-6)


def test_labels_are_those_of_the_next_position() -> None:
    labels = torch.tensor([[1, 2, 3], [4, IGNORE_INDEX, 6]])
    assert shift_labels(labels).tolist() == [[2, 3, IGNORE_INDEX], [IGNORE_INDEX, 6, IGNORE_INDEX]]
    assert shift_labels(torch.zeros(2, 1, dtype=torch.int64)).tolist() == [[IGNORE_INDEX]] * 2


def test_a_second_backward_is_refused() -> None:
    x, weight, _, labels = inputs(5, 8, 11, torch.float32)
    loss = linear_cross_entropy(x.requires_grad_(), weight, labels)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="differentiated twice"):
        loss.backward()


def test_eager_never_holds_float32_logits_of_all_tokens(monkeypatch) -> None:
    monkeypatch.setattr(rows, "_STEP_ELEMENTS", 512 * 16)
    monkeypatch.setattr("te_models.kernels.gemm.float32._PIECE", 512 * 16)
    monkeypatch.setattr("te_models.kernels.gemm.float32._CACHED", 512 * 16)
    x, weight, _, labels = inputs(256, 8, 512, torch.bfloat16)
    with Largest(torch.float32) as largest:
        linear_cross_entropy(x.requires_grad_(), weight.requires_grad_(), labels).backward()
    assert largest.elements == 512 * 16


def test_compiled_never_holds_float32_logits_of_all_tokens() -> None:
    x, weight, _, labels = inputs(256, 8, 512, torch.bfloat16)
    x.requires_grad_(), weight.requires_grad_()
    compiled = torch.compile(linear_cross_entropy, fullgraph=True)
    loss, codes = run_fw_bw_and_get_code(lambda: compiled(x, weight, labels))
    torch.testing.assert_close(loss, linear_cross_entropy(x, weight, labels), rtol=2 * UNIT[torch.bfloat16], atol=0)
    buffers = re.findall(r"empty_strided_cpu\(\((\d+), (\d+)\), \([^)]*\), torch\.(\w+)\)", "\n".join(codes))
    whole = [kind for rows, columns, kind in buffers if (int(rows), int(columns)) == (256, 512)]
    assert whole in (["bfloat16"], [])  # the logits, overwritten by their gradient; in memory of the GEMM, or allocated
