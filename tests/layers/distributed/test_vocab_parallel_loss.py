"""The loss of a split vocabulary with its z-loss, on one rank: values and gradients in float64, whole or by chunks."""

import pytest
import torch

from te_models.layers.distributed.vocab_parallel import VocabShard, vocab_parallel_linear_cross_entropy

T, H, V = 13, 8, 37


@pytest.mark.parametrize("coefficient", [0.0, 0.3])
@pytest.mark.parametrize("chunk_tokens", [None, 5])
@pytest.mark.parametrize("in_main_grad", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_values_and_gradients(
    coefficient: float, chunk_tokens: int | None, in_main_grad: bool, dtype: torch.dtype
) -> None:
    hidden, weight, bias = (torch.randn(shape, dtype=torch.float64) for shape in ((T, H), (V, H), (V,)))
    exact = [t.clone().requires_grad_() for t in (hidden, weight, bias)]
    labels = torch.arange(T) * 2
    labels[3] = -100
    logits = 3.0 * torch.tanh(1.5 * (exact[0] @ exact[1].T + exact[2]) / 3.0)
    normalizer, counted = logits.logsumexp(-1), labels != -100
    loss = (normalizer - logits.gather(1, labels.clamp(min=0)[:, None])[:, 0])[counted].mean()
    squares = normalizer[counted].square().mean()
    total = loss + coefficient * squares
    (2 * total).backward()
    own = [t.to(dtype).requires_grad_() for t in (hidden, weight, bias)]
    main_grad = torch.zeros(V, H) if in_main_grad else None
    options = {"multiplier": 1.5, "softcap": 3.0, "chunk_tokens": chunk_tokens, "main_grad": main_grad}
    found, z_loss = vocab_parallel_linear_cross_entropy(
        own[0], own[1], labels, VocabShard(), own[2], z_loss_coeff=coefficient, **options
    )
    assert not z_loss.requires_grad
    (2 * found).backward()
    of_weight = own[1].grad if main_grad is None else main_grad
    expected = [total, squares if coefficient else torch.zeros(()), *(t.grad for t in exact)]
    for value, right in zip([found, z_loss, own[0].grad, of_weight, own[2].grad], expected, strict=True):
        exact_sum = value.dtype == torch.float64  # a main_grad is float32
        tolerances = {"rtol": 1e-13, "atol": 1e-14} if exact_sum else {"rtol": 1e-5, "atol": 1e-6}
        torch.testing.assert_close(value.detach(), right.detach().to(value.dtype), **tolerances)
    assert found.dtype == own[0].grad.dtype == dtype
