"""`parallel_cross_entropy` on one rank, and the mathematics of a split vocabulary, against the whole one in float64."""

import pytest
import torch
from torch import Tensor

import te_models.layers as te
from te_models.kernels import launch
from te_models.kernels.cross_entropy import combined_loss, rows, shard_gradient, shard_statistics

F32 = 2.0**-24


def given(*shape: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Logits of these dimensions, the last the vocabulary, and labels, every fourth of which does not count."""
    generator = torch.Generator().manual_seed(sum(shape))
    logits = (4 * torch.randn(*shape, generator=generator)).to(dtype)
    labels = torch.randint(shape[-1], shape[:-1], generator=generator)
    labels.view(-1)[1::4] = -100
    return logits, labels


def exact(logits: Tensor, labels: Tensor, smoothing: float) -> Tensor:
    """Each token's loss in float64, written out."""
    one_hot = torch.full(logits.shape, smoothing / logits.shape[-1], dtype=torch.float64)
    chosen = torch.full((*labels.shape, 1), 1 - smoothing, dtype=torch.float64)
    one_hot = one_hot.scatter_add(-1, labels.clamp(min=0)[..., None], chosen)
    return -(one_hot * logits.double().log_softmax(-1)).sum(-1) * (labels != -100)


def bound(logits: Tensor) -> float:
    """Of a loss: the roundings of exponents, of the sum and of its logarithm, each relative to the largest logit."""
    return 32 * F32 * (1 + logits.abs().max().item())


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_one_rank(smoothing: float) -> None:
    logits, target = given(2, 5, 7, dtype=torch.bfloat16)
    logits.requires_grad_()
    loss = te.parallel_cross_entropy(logits, target, smoothing)
    expected = exact(logits, target, smoothing)
    assert loss.dtype is torch.float32 and loss.shape == (2, 5)
    assert (loss - expected).abs().max() <= bound(logits)
    counted = (target != -100).sum()
    mean = te.parallel_cross_entropy(logits, target, smoothing, True, None, -100, True)
    torch.testing.assert_close(mean.double(), expected.sum() / counted, rtol=1e-5, atol=1e-6)
    (ours,), (theirs,) = (torch.autograd.grad(t.sum(), logits) for t in (loss, expected))
    assert ours.dtype is torch.bfloat16
    assert ((ours.double() - theirs.double()).abs() <= 2.0**-7 * theirs.double().abs() + 1e-5).all()
    other = te.parallel_cross_entropy(input=logits, target=target.where(target >= 0, 6), ignore_idx=6)
    assert not other[target == -100].any()
    assert te.parallel_cross_entropy(logits, torch.full((2, 5), -100), reduce_loss=True).item() == 0


def test_gradients_of_the_losses_in_float64() -> None:
    logits, target = given(3, 5, dtype=torch.float64)
    logits.requires_grad_()
    assert torch.autograd.gradcheck(lambda x: te.parallel_cross_entropy(x, target, 0.1), logits)


def test_what_does_not_fit_is_refused() -> None:
    logits, target = given(2, 5, 7)
    with pytest.raises(ValueError, match=r"target has shape \(10,\); allowed with these logits: \(2, 5\)"):
        te.parallel_cross_entropy(logits, target.flatten())
    with pytest.raises(ValueError, match="target has 7; allowed: 0 to 6, or ignore_idx, -100"):
        te.parallel_cross_entropy(logits, torch.full((2, 5), 7))
    with pytest.raises(ValueError, match=r"label_smoothing is 1\.5; allowed: a number from 0 to 1"):
        te.parallel_cross_entropy(logits, target, 1.5)
    with pytest.raises(ValueError, match="dist_process_group is a str; allowed: a process group"):
        te.parallel_cross_entropy(logits, target, dist_process_group="tp")


@pytest.mark.parametrize("kernels", [False, True], ids=["torch", "triton"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_shards_make_the_loss_of_the_whole(smoothing: float, kernels: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Magnitudes that overflow a plain sum of exponentials, a shard with no word allowed, several steps of rows."""
    monkeypatch.setattr(rows, "_STEP_ELEMENTS", 3 * 40)
    monkeypatch.setattr(launch, "as_accelerator", kernels)
    logits, labels = given(8, 120)
    logits[0, :40] += 400.0
    if not (smoothing or kernels):  # the interpreter warns of log(0)
        logits[2, 80:] = -torch.inf
        labels[2] = 3
    leaf = logits.double().requires_grad_()
    expected = exact(leaf, labels, smoothing) if smoothing else _plain(leaf, labels)
    shards = list(enumerate(logits.split(40, 1)))
    parts = torch.stack([shard_statistics(part, labels, 40 * i, smoothing) for i, part in shards])
    loss, normalizer = combined_loss(parts, labels, 120, smoothing)
    finite = logits[logits.isfinite()]
    assert ((loss - expected).abs() <= bound(finite)).all() and not loss[labels == -100].any()
    scale = torch.rand(8)
    options = (normalizer, scale, 120, smoothing)
    gradient = torch.cat([shard_gradient(part, labels, 40 * i, *options) for i, part in shards], 1)
    (right,) = torch.autograd.grad(expected, leaf, scale.double())
    # of a probability: that of the exponent, and the rounding of the sum with the one of the label
    assert ((gradient - right).abs() <= 2 * bound(finite) * (right.abs() + F32)).all()
    parts[:, 2] = 0
    assert combined_loss(parts, labels, 120)[0][labels != -100].isnan().all()  # a label that no shard has


def _plain(logits: Tensor, labels: Tensor) -> Tensor:
    return (logits.logsumexp(-1) - logits.gather(1, labels.clamp(min=0)[:, None])[:, 0]) * (labels != -100)
