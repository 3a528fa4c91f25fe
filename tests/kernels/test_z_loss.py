"""The z-loss of the logits: the values and gradients of its definition in float64, whole or by chunks."""

import pytest
import torch

from te_models import GPTModel
from te_models.kernels.cross_entropy import linear_cross_entropy_and_z_loss
from tests.build import tiny, token_ids

T, H, V = 13, 8, 37


def _inputs(dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(*shape, generator=generator).to(dtype) for shape in ((T, H), (V, H), (V,))]


@pytest.mark.sentinels("None-False", "5-False")
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("chunk_tokens", [None, 5])
def test_values_and_gradients(chunk_tokens: int | None, compiled: bool) -> None:
    labels = torch.arange(T) * 2
    labels[3] = -100
    exact = [t.requires_grad_() for t in _inputs(torch.float64)]
    logits = 3.0 * torch.tanh(1.5 * (exact[0] @ exact[1].T + exact[2]) / 3.0)
    normalizer, counted = logits.logsumexp(-1), labels != -100
    loss = (normalizer - logits.gather(1, labels.clamp(min=0)[:, None])[:, 0])[counted].mean()
    squares = normalizer[counted].square().mean()
    (loss + 0.1 * squares).backward()
    own = [t.requires_grad_() for t in _inputs(torch.float32)]
    main_grad = torch.ones(V, H)

    def run(main_grad: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        options = {"multiplier": 1.5, "softcap": 3.0, "chunk_tokens": chunk_tokens, "main_grad": main_grad}
        return linear_cross_entropy_and_z_loss(own[0], own[1], labels, own[2], **options)

    f = torch.compile(run, fullgraph=True, backend="aot_eager") if compiled else run
    found = f(None)
    (found[0] + 0.1 * found[1]).backward()
    values, right = [*found, *(t.grad for t in own)], [loss, squares, *(t.grad for t in exact)]
    torch.testing.assert_close([v.detach() for v in values], [r.detach().float() for r in right], rtol=1e-5, atol=1e-6)
    own[1].grad = None
    found = f(main_grad)
    (found[0] + 0.1 * found[1]).backward()
    assert own[1].grad is None
    torch.testing.assert_close(main_grad, 1 + exact[1].grad.float(), rtol=1e-5, atol=1e-5)


def test_of_a_model() -> None:
    model, ids = GPTModel(tiny()).train(), token_ids(2, 12)
    plain = model(ids, labels=ids)
    model.output_layer.logits_z_loss_coeff = 0.5
    expected = 0.5 * plain.logits[:, :-1].float().logsumexp(-1).square().mean()
    for return_logits in (True, False):
        found = model(ids, labels=ids, return_logits=return_logits)
        torch.testing.assert_close(found.logits_z_loss, expected)
        torch.testing.assert_close(found.loss, plain.loss + expected)
    assert model.eval()(ids, labels=ids).logits_z_loss is None
