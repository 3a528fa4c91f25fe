"""Token data sets: what is written is what is read, in an order that is a function of (seed, position)."""

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from te_models.training import DataError, DocumentOptions, TokenDataset, Windows, build_dataset, write_dataset
from te_models.training.data.dataset import check_vocabulary
from te_models.training.data.documents import matching_files
from tests.compare import refused
from tests.training.runs import TEXT


def numbered(path: Path, count: int) -> TokenDataset:
    """A data set whose token at index i is i."""
    return write_dataset(path, [[range(count)]], vocab_size=count)


def split(dataset: TokenDataset, name: str, *, S: int = 4, fraction: float = 0.2, seed: int = 1) -> Windows:
    return Windows(dataset, S, name, fraction, seed)


@pytest.mark.parametrize(("vocab_size", "dtype"), [(2**16, "uint16"), (2**16 + 1, "uint32"), (2**32, "uint32")])
def test_ids_survive_up_to_the_vocabulary(tmp_path: Path, vocab_size: int, dtype: str) -> None:
    dataset = write_dataset(tmp_path / "d", [[[0, 1, vocab_size - 1], [7]], [[2]]], vocab_size)
    assert json.loads((tmp_path / "d" / "meta.json").read_text())["dtype"] == dtype
    assert dataset.tokens.to(torch.int64).tolist() == [0, 1, vocab_size - 1, 7, 2]
    assert (len(dataset), dataset.num_documents) == (5, 2)


@pytest.mark.parametrize("bad", [-1, 100])
def test_ids_outside_the_vocabulary_write_nothing(tmp_path: Path, bad: int) -> None:
    with pytest.raises(DataError, match="outside the vocabulary of 100"):
        write_dataset(tmp_path / "d", [[[1, bad]]], vocab_size=100)
    assert list(tmp_path.iterdir()) == []


def test_no_tokens_and_existing_targets_are_refused(tmp_path: Path) -> None:
    refused(lambda: write_dataset(tmp_path / "d", [[], [[]]], vocab_size=10), "hold no token", error=DataError)
    numbered(tmp_path / "d", 3)
    refused(lambda: numbered(tmp_path / "d", 3), "exists already", error=DataError)


def test_text_becomes_bytes_with_document_ends(tmp_path: Path) -> None:
    texts = ["one\r\ntwo\n", "drei — é", "x" * 3_000_000]
    for i, text in enumerate(texts):
        (tmp_path / f"{i}.txt").write_bytes(text.encode())
    dataset = build_dataset(tmp_path / "d", [tmp_path / "*.txt"], "bytes")
    tokens = dataset.tokens.to(torch.int64).tolist()
    documents = b"".join(bytes([t]) if t < 256 else b"\xff" for t in tokens).split(b"\xff")
    assert documents.pop() == b"" and sorted(d.decode() for d in documents) == sorted(texts)


def test_a_hugging_face_tokenizer_gives_its_own_ids(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel()
    text = "def f(x):\n    return x + 1\n" * 50
    tokenizer.train_from_iterator(
        [text], trainers.BpeTrainer(vocab_size=300, special_tokens=["<end>"], show_progress=False)
    )
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<end>"}))
    (tmp_path / "a.py").write_text(text)
    dataset = build_dataset(tmp_path / "d", [tmp_path / "a.py"], str(tmp_path))
    ids = tokenizer.encode(text).ids
    assert len(ids) < len(text)
    assert dataset.tokens.to(torch.int64).tolist() == [*ids, tokenizer.token_to_id("<end>")]


def test_a_tokenizer_that_cuts_and_fills_up_texts_reads_all_of_them(tmp_path: Path) -> None:
    """Some tokenizer.json files say how long a text may be; and ids may have gaps."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({"a": 0, "b": 1, "<unk>": 2, "c": 9}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.enable_truncation(3)
    tokenizer.enable_padding(length=8, pad_id=2)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "a.txt").write_text("a b c a b c a")
    (tmp_path / "b.txt").write_text("b b")
    with pytest.raises(DataError, match=r"names no token that ends a text \(eos_token\), so that documents"):
        build_dataset(tmp_path / "d", [tmp_path / "*.txt"], str(tmp_path))
    options = DocumentOptions(add_eos_token=False)
    dataset = build_dataset(tmp_path / "d", [tmp_path / "*.txt"], str(tmp_path), options=options)
    assert dataset.vocab_size == 10 and dataset.largest_id() == 9
    assert sorted(dataset.tokens.tolist()) == sorted([0, 1, 9, 0, 1, 9, 0, 1, 1])


def test_wrong_sources_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no text file matches"):
        build_dataset(tmp_path / "d", [tmp_path / "*.absent"], "bytes")
    refused(lambda: build_dataset(tmp_path / "d", [TEXT], str(tmp_path)), "no tokenizer.json", error=DataError)
    (tmp_path / "empty").mkdir()
    refused(lambda: TokenDataset.open(tmp_path / "empty"), "not a token data set", error=DataError)


def test_a_folder_is_the_files_in_it(tmp_path: Path) -> None:
    corpus = tmp_path / "corpus"
    for name in ("b.txt", "a/deep/c.py", "a/z.jsonl", "saved/state.json", "saved/data.arrow", ".git/HEAD", "a/.hidden"):
        (corpus / name).parent.mkdir(parents=True, exist_ok=True)
        (corpus / name).write_text("text")
    (corpus / "a/again").symlink_to(corpus)  # a circle
    found = [file.relative_to(corpus).as_posix() for file in matching_files([corpus])]
    assert found == ["a/deep/c.py", "a/z.jsonl", "b.txt", "saved"]
    assert matching_files([corpus / "saved"]) == [corpus / "saved"]

    def refused(folder: Path) -> str:
        with pytest.raises(DataError) as error:
            matching_files([folder])
        return str(error.value).replace(str(tmp_path), "")

    (corpus / "model.safetensors").write_bytes(b"\x10\0\0\0\0\0\0\0{}")
    assert refused(corpus).startswith("/corpus/model.safetensors is no text; allowed in a folder: text, .jsonl")
    (tmp_path / "empty/inner").mkdir(parents=True)
    assert refused(tmp_path / "empty").startswith("the folder /empty holds no files; allowed in a folder: text")
    (corpus / "dataset_dict.json").write_text("{}")
    assert refused(corpus) == "/corpus has the splits saved; name one of them, as in /corpus/saved"
    numbered(tmp_path / "tokens", 100)
    assert refused(tmp_path / "tokens").startswith("/tokens is a token data set already, for data.path; allowed")


def test_damage_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "d"
    numbered(folder, 100)
    meta = json.loads((folder / "meta.json").read_text())
    with (folder / "tokens.bin").open("ab") as file:
        file.truncate(198)
    refused(lambda: TokenDataset.open(folder), "has 198 bytes, but 100 tokens of uint16 need 200", error=DataError)
    for key, value in {"version": 2, "dtype": "int7", "num_tokens": -1, "vocab_size": "many"}.items():
        (folder / "meta.json").write_text(json.dumps(meta | {key: value}))
        with pytest.raises(DataError):
            TokenDataset.open(folder)


def test_an_epoch_reads_each_training_window_once_and_no_validation_window(tmp_path: Path) -> None:
    dataset = numbered(tmp_path / "d", 103)  # 25 windows of 4, 3 tokens left over
    train, validation = split(dataset, "train"), split(dataset, "validation")
    assert (len(train), len(validation)) == (20, 5)
    first, second = train.batch(0, 20), train.batch(20, 20)
    everything = torch.arange(100).view(25, 4)
    assert torch.equal(first[first[:, 0].argsort()], everything[:20])
    assert torch.equal(second[second[:, 0].argsort()], everything[:20]) and not torch.equal(first, second)
    assert not torch.equal(first, everything[:20]) and torch.equal(validation.batch(0, 5), everything[20:])


@given(st.integers(0, 2**40), st.integers(1, 9), st.integers(0, 5))
@settings(deadline=None, max_examples=30)
def test_batches_are_their_positions(
    tmp_path_factory: pytest.TempPathFactory, position: int, size: int, seed: int
) -> None:
    dataset = write_dataset(tmp_path_factory.mktemp("x") / "d", [[range(60)]], vocab_size=60)
    windows = split(dataset, "train", seed=seed)
    one_by_one = torch.cat([windows.batch(p, 1) for p in range(position, position + size)])
    assert torch.equal(windows.batch(position, size), one_by_one)


def test_the_seed_decides_the_order(tmp_path: Path) -> None:
    dataset = numbered(tmp_path / "d", 400)
    assert torch.equal(split(dataset, "train", seed=3).batch(0, 50), split(dataset, "train", seed=3).batch(0, 50))
    assert not torch.equal(split(dataset, "train", seed=3).batch(0, 50), split(dataset, "train", seed=4).batch(0, 50))


def test_too_small_a_data_set_is_named(tmp_path: Path) -> None:
    refused(lambda: split(numbered(tmp_path / "d", 3), "train"), "not one train window of 4 tokens", error=DataError)
    refused(lambda: split(numbered(tmp_path / "e", 7), "validation"), "not one validation window", error=DataError)


def test_a_vocabulary_is_checked_by_the_ids_that_occur(tmp_path: Path) -> None:
    """A tokenizer may know more tokens than the model; an earlier data set does not say which occur."""
    dataset = write_dataset(tmp_path / "d", [[[3, 9]], [[4]]], vocab_size=200)
    check_vocabulary(dataset, 10)
    with pytest.raises(DataError, match=r"d has the token id 9; allowed: below 9, the size of the model's vocabulary"):
        check_vocabulary(dataset, 9)
    meta = json.loads((tmp_path / "d" / "meta.json").read_text())
    assert meta.pop("largest_token_id") == 9
    (tmp_path / "d" / "meta.json").write_text(json.dumps(meta))
    check_vocabulary(TokenDataset.open(tmp_path / "d"), 10)
    refused(lambda: check_vocabulary(TokenDataset.open(tmp_path / "d"), 9), "has the token id 9", error=DataError)
    meta["largest_token_id"] = 200
    (tmp_path / "d" / "meta.json").write_text(json.dumps(meta))
    refused(lambda: TokenDataset.open(tmp_path / "d"), "largest_token_id is 200; allowed: 0 to 199", error=DataError)
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n{"text": "\u00e9"}\n')
    with pytest.raises(DataError, match=r"a.jsonl, line 2 has the token id 195; allowed: below 150"):
        options = {"options": DocumentOptions(add_eos_token=False), "model_vocab_size": 150}
        build_dataset(tmp_path / "e", [tmp_path / "a.jsonl"], "bytes", **options)
