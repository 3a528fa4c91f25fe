"""The loss of a model from a few tokens' logits at a time: the same numbers, in less memory."""

import pytest
import torch

from te_models import GPTModel
from tests.build import tiny, token_ids
from tests.kernels.test_chunked_cross_entropy import largest_allocation


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_same_loss_and_gradients_without_whole_logits(compiled: bool) -> None:
    model = GPTModel(tiny(vocab_size=4096))
    ids = token_ids(4, 64)
    run = torch.compile(model, fullgraph=True, backend="aot_eager") if compiled else model
    results, sizes = [], []
    for chunk in (None, 16):
        model.output_layer.loss_chunk_tokens = chunk

        def step() -> torch.Tensor:
            model.zero_grad()
            loss = run(ids, labels=ids, return_logits=False).loss
            loss.backward()
            return loss

        loss = step()
        results.append([loss, *(p.grad.clone() for p in model.parameters())])
        sizes.append(largest_allocation(step))
    for whole, chunked in zip(*results, strict=True):
        assert torch.allclose(whole, chunked, rtol=1e-4, atol=1e-6)
    logits = 4 * 64 * 4096 * 4
    assert sizes[0] >= logits and sizes[1] <= logits // 2
