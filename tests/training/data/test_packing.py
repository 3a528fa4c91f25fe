"""Windows of whole documents: attention, positions, loss and masks within each, and the losses of separate rows."""

import itertools
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from te_models import GPTModel
from te_models.config import ModelConfig
from te_models.kernels.packed_attention import sees_own_document
from te_models.training import PrecisionConfig, TokenDataset, write_dataset
from te_models.training.data.windows import Batch, DocumentPacking, Windows, pack_documents
from te_models.training.data.writer import TokenWriter, write_meta
from te_models.training.ranks.data_parallel import Ranks
from te_models.training.step import loss_weights, make_loss_function
from tests.training.runs import balanced_model, tiny_model

LENGTHS = [5, 9, 16, 3, 40, 7, 1, 12]
ALL = DocumentPacking(whole=True)


def documents(path: Path, lengths: list[int]) -> TokenDataset:
    generator = torch.Generator().manual_seed(0)
    rows = [[torch.randint(1, 256, (n,), generator=generator).tolist()] for n in lengths]
    return write_dataset(path, rows, 257)


@given(st.lists(st.integers(0, 50), max_size=60), st.integers(2, 20))
@settings(deadline=None, max_examples=60)
def test_rows_hold_every_token_once_and_no_row_is_too_long(lengths: list[int], length: int) -> None:
    ends = torch.tensor(lengths, dtype=torch.int64).cumsum(0)
    rows = pack_documents(ends, length)
    spans = [span for row in range(len(rows)) for span in rows.spans(row)]
    covered = sorted(token for start, count in spans for token in range(start, start + count))
    assert covered == list(range(sum(lengths)))
    assert all(0 < sum(count for _, count in rows.spans(row)) <= length for row in range(len(rows)))
    cuts = {0, *ends.tolist()}
    whole = [n for n in lengths if 0 < n <= length]
    assert sum(start in cuts and start + count in cuts for start, count in spans) >= len(whole)


def test_a_row_says_where_its_documents_are(tmp_path: Path) -> None:
    dataset = write_dataset(tmp_path / "d", [[[1, 2, 3]], [[4, 5]], [[6, 7, 8, 9]]], 10)
    batch = Windows(dataset, 6, "all", 0.0, 0, ALL).examples(0, 2)
    assert batch.input_ids.tolist() == [[1, 2, 3, 4, 5, 0], [6, 7, 8, 9, 0, 0]]
    assert batch.labels is not None and batch.position_ids is not None and batch.documents is not None
    assert batch.labels.tolist() == [[-100, 2, 3, -100, 5, -100], [-100, 7, 8, 9, -100, -100]]
    assert batch.position_ids.tolist() == [[0, 1, 2, 0, 1, 0], [0, 1, 2, 3, 0, 1]]
    assert batch.documents.tolist() == [[0, 0, 0, 1, 1, -1], [0, 0, 0, 0, -1, -1]] and batch.scored() == 6
    windows = Windows(dataset, 4, "all", 0.0, 0, DocumentPacking(reset_position_ids=True))
    batch = windows.examples(0, 2)  # consecutive tokens: 1 2 3 4 | 5 6 7 8
    assert batch.position_ids is not None and batch.labels is not None and batch.documents is None
    assert batch.position_ids.tolist() == [[0, 1, 2, 0], [0, 0, 1, 2]]
    assert batch.labels.tolist() == batch.input_ids.tolist()
    batch = Windows(dataset, 4, "all", 0.0, 0, DocumentPacking(eod_mask_loss=True)).examples(0, 2)
    assert batch.labels.tolist() == [[-100, 2, 3, -100], [-100, -100, 7, 8]]
    assert batch.position_ids is None and batch.documents is None


@pytest.mark.parametrize("config", [tiny_model(), tiny_model(moe=True), balanced_model()], ids=["dense", "moe", "mla"])
def test_packed_documents_have_the_losses_of_separate_rows(config: ModelConfig, tmp_path: Path) -> None:
    """To 1e-6 in float32, with the gradients; router losses are left out, which are of all rows together."""
    if config.moe is not None:
        config = config.replace(moe=config.moe.replace(aux_loss_coeff=0.0))
    model = GPTModel(config, dtype=torch.float32)
    f = make_loss_function(model, PrecisionConfig(dtype="fp32"), "cpu", compiled=False)
    dataset = documents(tmp_path / "d", [n for n in LENGTHS if n <= 20])
    packed = Windows(dataset, 20, "all", 0.0, 0, ALL)
    batch = packed.examples(0, len(packed))
    assert len(packed) < dataset.num_documents, "several documents in a row"
    loss, _ = f(batch)
    loss.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    total, count = torch.zeros((), dtype=torch.float64), 0
    for a, b in itertools.pairwise([0, *dataset.document_ends.tolist()]):
        ids = dataset.tokens[a:b][None]
        if b - a > 1:
            row, _ = f(ids)
            (row * (b - a - 1) / batch.scored()).backward()
            total, count = total + row.double().detach() * (b - a - 1), count + b - a - 1
    assert count == batch.scored() and abs(loss.item() - float(total) / count) < 1e-6
    for name, p in model.named_parameters():
        if p.grad is not None and name in gradients:
            torch.testing.assert_close(gradients[name], p.grad, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("kind", ["plain", "sinks", "softcap", "mla", "chunked"])
def test_layers_with_windows_and_chunks_read_documents(kind: str) -> None:
    """As under a mask of all tokens, which layers with softcaps and no window still have."""
    config = balanced_model() if kind == "mla" else tiny_model()
    options = {"sinks": {"sinks": True}, "softcap": {"softcap": 20.0}}.get(kind, {})
    first, size = ("chunked", "chunk_size") if kind == "chunked" else ("sliding", "window_size")
    layers = tuple((first, "full")[i % 2] for i in range(config.num_layers))
    config = config.replace(layer_types=layers, attention=config.attention.replace(**{size: 16}, **options))
    torch.manual_seed(0)
    model, ids = GPTModel(config, dtype=torch.float32), torch.randint(257, (2, 260))
    numbers = torch.tensor([[0] * 90 + [1] * 7 + [2] * 150 + [-1] * 13, [0] * 260])
    visible = sees_own_document(numbers)
    real = numbers >= 0
    ways = ({"document_ids": numbers}, {"attention_mask": visible})
    found, expected = (model(ids, **how).logits[real] for how in ways)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_padding_counts_for_no_router(tmp_path: Path) -> None:
    """The losses of routers are those of the same row without padding."""
    dataset = write_dataset(tmp_path / "d", [[[1, 2, 3]], [[4, 5]]], 257)
    torch.manual_seed(0)
    model, found = GPTModel(tiny_model(moe=True), dtype=torch.float32), []
    for length in (5, 8):
        batch = Windows(dataset, length, "all", 0.0, 0, ALL).examples(0, 1)
        assert batch.documents is not None and batch.position_ids is not None
        places = {"position_ids": batch.position_ids, "document_ids": batch.documents}
        found.append(model(batch.input_ids, **places).load_balancing_loss)
    torch.testing.assert_close(*found)


def masked(path: Path, scored: list[list[int]]) -> TokenDataset:
    path.mkdir()
    with TokenWriter(path, 257, masked=True) as writer:
        for i, marks in enumerate(scored):
            writer.add([i + 1] * len(marks), marks)
            writer.end_document()
    write_meta(path, writer, None)
    return TokenDataset.open(path)


def test_a_loss_mask_becomes_labels(tmp_path: Path) -> None:
    dataset = masked(tmp_path / "d", [[0, 1, 1], [1, 0, 1]])
    batch = Windows(dataset, 6, "all", 0.0, 0).examples(0, 1)
    assert batch.labels.tolist() == [[-100, 1, 1, 2, -100, 2]]
    batch = Windows(dataset, 6, "all", 0.0, 0, ALL).examples(0, 1)
    assert batch.labels.tolist() == [[-100, 1, 1, -100, -100, 2]]


def test_a_step_is_the_mean_over_what_is_scored() -> None:
    """Of all micro-batches, however many predictions each has; also where one has none."""
    model = GPTModel(tiny_model(), dtype=torch.float32)
    f = make_loss_function(model, PrecisionConfig(dtype="fp32"), "cpu", compiled=False)
    ids = torch.randint(257, (4, 16))
    labels = ids.clone()
    labels[0, :14], labels[1, 3:], labels[2] = -100, -100, -100
    whole, _ = f(Batch(ids, labels))
    batches = [Batch(ids[i : i + 1], labels[i : i + 1]) for i in range(4)]
    weights = loss_weights(batches, Ranks(0, 1))
    parts = [f(batch, weight)[0] / 4 for batch, weight in zip(batches, weights, strict=True)]
    torch.testing.assert_close(sum(parts), whole, rtol=1e-6, atol=1e-6)
    mean = torch.stack([f(batch)[0].detach() for batch in batches]).mean()
    assert abs(float(mean) - whole.item()) > 1e-2, "the mean of means is another number"
    assert loss_weights([ids], Ranks(0, 1)) == [None]
