"""Each token of a document is predicted once, with the context that the windows give it, whatever the batch."""

import pytest
import torch
import torch.nn.functional as F

from te_models import GPTModel
from te_models.evaluation import TextScore, score_documents
from te_models.evaluation.perplexity import sliding_windows
from tests.training.runs import tiny_model


@pytest.fixture(scope="module")
def model() -> GPTModel:
    """A mixture with an auxiliary loss, which is no part of a perplexity; 64 positions."""
    torch.manual_seed(0)
    return GPTModel(tiny_model(moe=True, hidden=32), params_dtype=torch.float32).train()


def nats_of(model: GPTModel, ids: list[int], seq_length: int, stride: int) -> float:
    """The definition: the windows one after another, of each what no earlier one has predicted."""
    model.eval()
    total, done = 0.0, 1
    for begin in range(0, len(ids), stride):
        window = torch.tensor([ids[begin : begin + seq_length]])
        end = begin + window.shape[1]
        with torch.no_grad():
            log_p = F.log_softmax(model(window).logits[0].double(), -1)
        for place in range(done, end):
            total -= float(log_p[place - 1 - begin, ids[place]])
        done = max(done, end)
    model.train()
    return total


@pytest.mark.parametrize(("seq_length", "stride", "batch_size"), [(64, 32, 1), (16, 5, 4), (2, 1, 3)])
def test_scores_are_those_of_the_definition(model: GPTModel, seq_length: int, stride: int, batch_size: int) -> None:
    generator = torch.Generator().manual_seed(1)
    documents = [torch.randint(257, (n,), generator=generator).tolist() for n in (63, 1, 18, 0, 41)]
    score = score_documents(
        model, [(ids, 2 * len(ids)) for ids in documents], seq_length=seq_length, stride=stride, batch_size=batch_size
    )
    expected = sum(nats_of(model, ids, seq_length, stride) for ids in documents)
    assert score.nats == pytest.approx(expected, rel=1e-5)
    assert (score.tokens, score.nbytes, score.documents) == (62 + 17 + 40, 2 * 123, 5)
    assert model.training and model.output_layer.loss_chunk_tokens is None


def test_windows_predict_every_token_once() -> None:
    for tokens in range(40):
        found = [place for _, end, scored in sliding_windows(tokens, 7, 3) for place in range(scored, end)]
        assert found == list(range(1, tokens))
        assert all(end - begin <= 7 and begin < scored for begin, end, scored in sliding_windows(tokens, 7, 3))


def test_numbers_have_their_units() -> None:
    found = (TextScore(1.0, 1, 1, 1) + TextScore(3.0, 3, 3, 1)).to_dict()
    assert found["nats_per_token"] == 1.0 and found["perplexity"] == pytest.approx(2.718281828)
    assert found["bits_per_byte"] == pytest.approx(1.442695041)
    assert TextScore(0.0, 0, 0, 0).to_dict()["perplexity"] is None


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"seq_length": 65}, "seq_length is 65; allowed: 2 to 64"),
        ({"seq_length": 8, "stride": 8}, "stride is 8; allowed: 1 to 7"),
        ({"seq_length": 8, "batch_size": 0}, "batch_size is 0; allowed: 1 or more"),
        ({"seq_length": 8}, "a token is 999; allowed: below 257"),
    ],
)
def test_what_is_not_allowed_is_said(model: GPTModel, options: dict[str, int], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        score_documents(model, [([1, 999], 2)], **options)
