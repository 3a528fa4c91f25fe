"""Log-probabilities of given tokens: the definition on float64 logits in every layout of rows, and by any chunks."""

import pytest
import torch

import te_models.kernels.cross_entropy.log_probs as chunks
from te_models import GPTModel, logprobs
from te_models.config import EmbeddingConfig
from te_models.layers.distributed.vocab_parallel import vocab_parallel_linear_log_probs
from tests.build import FURTHER, VARIANTS, tiny, token_ids
from tests.compare import refused

T, H, V = 13, 8, 37


def inputs(dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(*s, generator=generator).to(dtype).requires_grad_() for s in ((T, H), (V, H), (V,))]


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(("tokens", "words"), [(None, 40), (5, 16)])
def test_values_and_gradients(tokens: int | None, words: int, compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunks, "CHUNK_WORDS", words)
    labels, factor = torch.arange(T) * 2, torch.linspace(-1, 1, T)
    labels[3] = -100
    exact = inputs(torch.float64)
    logits = 3.0 * torch.tanh(1.5 * (exact[0] @ exact[1].T + exact[2]) / 3.0)
    expected = logits.log_softmax(-1).gather(1, labels.clamp(min=0)[:, None])[:, 0] * (labels != -100)
    (expected * factor).sum().backward()
    own = inputs(torch.float32)

    def run(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        options = {"multiplier": 1.5, "softcap": 3.0, "chunk_tokens": tokens}
        return vocab_parallel_linear_log_probs(hidden, weight, labels, None, bias, **options)

    found = (torch.compile(run, fullgraph=True, backend="aot_eager") if compiled else run)(*own)
    (found * factor).sum().backward()
    assert found[3] == 0 and found.dtype == torch.float32
    for value, right in zip([found, *(t.grad for t in own)], [expected, *(t.grad for t in exact)], strict=True):
        torch.testing.assert_close(value.detach(), right.detach().float(), rtol=1e-5, atol=1e-5)
    if compiled:  # the operations are the same ones
        assert torch.equal(found, run(*own))


def definition(model: GPTModel, ids: torch.Tensor) -> torch.Tensor:
    """Of one row without padding: [S], 0 at the end."""
    found = model(ids[None]).logits[0, :-1].double().log_softmax(-1).gather(1, ids[1:, None])[:, 0]
    return torch.cat([found, found.new_zeros(1)])


@pytest.mark.parametrize("name", ["dense", "tied", "learned_positions", "moe_shared", "softcaps"])
def test_rows_are_packed_padded_and_scored_in_part(name: str) -> None:
    model = GPTModel(VARIANTS[name], dtype=torch.float64).eval()
    ids = token_ids(2, 12)
    expected = torch.stack([definition(model, row) for row in ids])
    torch.testing.assert_close(logprobs(model, ids), expected)
    labels = ids.clone()
    labels[:, 5:8] = -100
    scored = torch.cat([(labels != -100)[:, 1:], torch.zeros(2, 1, dtype=torch.bool)], 1)
    torch.testing.assert_close(logprobs(model, ids, labels), expected * scored)

    for columns in (slice(3, None), slice(None, 9)):  # padded on the left, on the right
        mask = torch.zeros(2, 12, dtype=torch.int64)
        mask[1], mask[0, columns] = 1, 1
        part = expected.clone()
        part[0] = 0
        part[0, columns] = definition(model, ids[0, columns])
        torch.testing.assert_close(logprobs(model, ids, attention_mask=mask), part)

    documents = torch.tensor([[0] * 5 + [1] * 7, [3] * 4 + [-1] * 2 + [7] * 6])
    part = torch.zeros_like(expected)
    for row, columns in ((0, slice(0, 5)), (0, slice(5, 12)), (1, slice(0, 4)), (1, slice(6, 12))):
        part[row, columns] = definition(model, ids[row, columns])
    torch.testing.assert_close(logprobs(model, ids, document_ids=documents), part)


def test_a_last_stage_has_them_and_others_are_refused() -> None:
    model, ids = GPTModel(FURTHER["moe_ahead"].replace(mtp_num_layers=0)).eval(), token_ids(2, 12)
    first, last = model.stage(0, 1), model.stage(1, 2)
    found = logprobs(last, ids, inputs_embeds=first(ids).hidden_states[-1])
    assert torch.equal(found, logprobs(model, ids))
    refused(lambda: logprobs(first, ids), "pipeline stage without the output layer; allowed: the last stage")


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_no_logits_of_all_tokens_are_kept(compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunks, "CHUNK_WORDS", 64)
    config = tiny(vocab_size=501, embedding=EmbeddingConfig(share_embeddings_and_output_weights=True))
    torch.manual_seed(0)
    model = GPTModel(config)
    model.output_layer.loss_chunk_tokens = 8
    ids, kept = token_ids(3, 16), []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tuple(tensor.shape))
        return tensor

    def run() -> torch.Tensor:
        return model(ids, labels=ids, return_logits=False, return_logprobs=True).logprobs

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        found = (torch.compile(run, fullgraph=True, backend="aot_eager") if compiled else run)()
        found.sum().backward()
    assert kept and not any(501 in shape and {48, 3} & {*shape} for shape in kept)
    torch.testing.assert_close(found, torch.stack([definition(model, row).float() for row in ids]))


def test_what_does_not_fit_is_refused() -> None:
    model, ids = GPTModel(tiny()), token_ids(2, 12)
    refused(lambda: logprobs(model, ids, ids[:, 1:]), "labels has shape [2, 11]; allowed: [2, 12], as tokens")
    with pytest.raises(ValueError, match="attention_mask and document_ids are both given; allowed: one of them"):
        logprobs(model, ids, attention_mask=torch.ones_like(ids), document_ids=ids)
    refused(lambda: model(ids, return_logprobs=True), "return_logprobs is True; allowed: with labels")
