"""Cross entropy kernels against float64: losses, gradients in place or not, labels to ignore, masked words, NaN."""

import pytest
import torch

from te_models.kernels.cross_entropy import IGNORE_INDEX, op, rows
from tests.kernels.test_cross_entropy import UNIT, exact_loss
from tests.kernels.triton.op_inputs import cross_entropy_inputs as case
from tests.kernels.triton.op_inputs import linear_cross_entropy_inputs as inputs

F32 = UNIT[torch.float32]
# T, V
SHAPES = [(1, 1), (3, 15), (4, 17), (5, 127), (2, 128), (17, 129), (3, 1000), (2, 8192), (2, 20_001), (0, 5)]


def exact(logits, labels):
    """Each token's loss in float64, the gradient of their sum, and the largest magnitude of each row."""
    z = logits.double()
    valid = labels != IGNORE_INDEX
    columns = torch.where(valid, labels, 0)[:, None]
    loss = torch.where(valid, z.logsumexp(-1) - z.gather(1, columns)[:, 0], 0.0)
    gradient = z.softmax(-1).scatter_add(1, columns, torch.full_like(columns, -1, dtype=torch.float64))
    size = z.abs().amax(1, keepdim=True) if z.numel() else z.new_zeros(z.shape[0], 1)
    return loss, gradient * valid[:, None], size


def check_loss(loss, right, size) -> None:
    """Errors: of each exponential's argument, of the sum (their mean weighs little), of the logarithm, of tanh."""
    assert loss.dtype == torch.float32
    assert ((loss.double() - right).abs() <= 32 * F32 * (1 + size[:, 0])).all()


def check_gradient(gradient, right, scale, size, dtype) -> None:
    bound = UNIT[dtype] * right.abs() + 64 * F32 * (1 + size) * (right.abs() + F32)
    assert ((gradient.double() - right * scale).abs() <= bound * scale).all()


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_loss_then_gradient(device, shape, dtype) -> None:
    check_both(device, shape, dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(8192, 32_000), (512, 128_256), (33, 300_007)])
def test_loss_then_gradient_real_sizes(device, shape) -> None:
    check_both(device, shape, torch.bfloat16)


def check_both(device, shape, dtype) -> None:
    logits, labels = case(shape, dtype, device)
    loss, normalizer = op.cross_entropy_fwd(logits, labels)
    right, gradient, size = exact(logits, labels)
    check_loss(loss, right, size)
    assert ((normalizer.double() - logits.double().logsumexp(-1)).abs() <= 32 * F32 * (1 + size[:, 0])).all()
    scale = torch.rand(shape[0], generator=torch.Generator().manual_seed(0)).to(device)
    got = op.cross_entropy_bwd(logits, labels, normalizer, scale)
    assert got.dtype == dtype
    check_gradient(got, gradient, scale[:, None], size, dtype)


@pytest.mark.matrix
@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize(("multiplier", "softcap"), [(1.0, None), (0.5, None), (0.5, 3.0)])
@pytest.mark.parametrize("shape", [(4, 129), (2, 8193)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_in_place(device, shape, dtype, multiplier, softcap) -> None:
    from te_models.kernels.cross_entropy import triton

    logits, labels = case(shape, dtype, device)
    leaf = logits.double().requires_grad_()
    z = leaf * multiplier if softcap is None else softcap * torch.tanh(leaf * multiplier / softcap)
    right, gradient, size = exact(z.detach(), labels)
    (gradient,) = torch.autograd.grad(z, leaf, gradient)
    scale = torch.tensor(0.3, device=device)
    factors = [None if v in (None, 1.0) else torch.tensor(v, device=device) for v in (multiplier, softcap)]
    for function in (triton.cross_entropy_grad_, rows.loss_and_gradient_):  # the device's and the CPU's
        overwritten = logits.clone()
        check_loss(function(overwritten, labels, None, *factors), right, size)
        assert torch.equal(overwritten, logits)
        check_loss(function(overwritten, labels, scale, *factors), right, size)
        check_gradient(overwritten, gradient, scale, size, dtype)


def test_masked_words_cost_nothing_and_nan_shows(device) -> None:
    logits, labels = case((4, 20_001), torch.float32, device)
    labels[:] = 20_000
    logits[0, :19_000] = -float("inf")
    logits[1, 3] = float("nan")
    labels[2] = 20_001  # no such word
    loss, normalizer = op.cross_entropy_fwd(logits, labels)
    assert loss[0].item() == pytest.approx((logits[0].logsumexp(0) - logits[0, -1]).item(), rel=1e-5)
    assert loss.isnan().tolist() == [False, True, True, False]
    gradient = op.cross_entropy_bwd(logits, labels, normalizer, torch.ones(4, device=device))
    assert gradient[0, :19_000].abs().max() == 0


def test_gradients_through_autograd_and_strides(device) -> None:
    logits = torch.randn(9, 5, device=device).t().requires_grad_()
    labels = torch.tensor([0, 8, IGNORE_INDEX, 3, 3], device=device)
    loss, normalizer = op.cross_entropy_fwd(logits, labels)
    assert not normalizer.requires_grad
    (got,) = torch.autograd.grad(loss.mean(), logits)
    kept = torch.nn.functional.cross_entropy(logits, labels, ignore_index=IGNORE_INDEX, reduction="none").mean()
    assert torch.allclose(got, torch.autograd.grad(kept, logits)[0], rtol=1e-5, atol=1e-7)


def test_scaling_keeps_the_factor_unrounded(device) -> None:
    from te_models.kernels.cross_entropy import triton

    x = torch.randn(3, 1000, device=device).bfloat16()
    factor = torch.tensor(1 / 3, device=device)
    assert torch.equal(triton.scaled_in_float32(x, factor), (x.float() * factor).bfloat16())


@pytest.mark.gpu
@pytest.mark.parametrize("chunk_tokens", [None, 1000])
def test_linear_cross_entropy_real_size(device, chunk_tokens) -> None:
    from te_models.kernels.cross_entropy import linear_cross_entropy

    x, weight, _, labels = (None if t is None else t.to(device) for t in inputs(4096, 1024, 32_000, torch.bfloat16))
    leaves = [x.requires_grad_(), weight.requires_grad_()]
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    loss = linear_cross_entropy(*leaves, labels, chunk_tokens=chunk_tokens)
    (loss / 3).backward()
    peak = torch.cuda.max_memory_allocated() - before
    exact_leaves = [t.detach().float().requires_grad_() for t in leaves]
    expected = exact_loss(*exact_leaves, None, labels, 1.0, None)
    (expected / 3).backward()
    assert abs(loss.item() - expected.item()) <= 4 * UNIT[torch.bfloat16]
    for got, want in zip(leaves, exact_leaves, strict=True):
        assert (got.grad - want.grad).abs().max() <= 8 * UNIT[torch.bfloat16] * want.grad.abs().max()
    # The float32 sum of the weight's gradient and its result stand beside one chunk's logits.
    logits = (chunk_tokens or 4096) * 32_000 * 2
    assert peak <= logits + 4 * weight.numel() * 4 + 4 * x.numel() * 4
