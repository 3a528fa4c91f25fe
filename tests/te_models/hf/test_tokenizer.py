"""Tokenizers of strangers: the right ids from sound files, one sentence and bounded work from all others."""

from __future__ import annotations

import json
import os
import random
import re
from pathlib import Path

import pytest

from te_models.checkpoints import CheckpointError
from te_models.checkpoints.folder.special_tokens import named_tokens
from te_models.cli.main import main
from te_models.tokenizer import (
    MAX_FILE_BYTES,
    MAX_MEMORY_BYTES,
    TokenizerError,
    _Process,
    encode_as_transformers,
    read_tokenizer,
)
from te_models.training.data.encoder import load_encoder
from tests.te_models.tokenizer_cases import HOSTILE, SOUND, as_bytes, damaged, replacements, tokenizer_file

tokenizers = pytest.importorskip("tokenizers")
TEXT = "ab c <s> aab bc\n" * 3


def folder_with(folder: Path, content: object, name: str = "tokenizer.json") -> Path:
    (folder / name).write_bytes(as_bytes(content))
    return folder


@pytest.mark.parametrize("kind", SOUND)
def test_ids_and_texts_are_the_library_s(kind: str, tmp_path: Path) -> None:
    whole = tokenizers.Tokenizer.from_str(json.dumps(SOUND[kind]))
    tokenizer = read_tokenizer(folder_with(tmp_path, SOUND[kind]), "this test")
    ids = whole.encode(TEXT).ids
    assert ids
    assert tokenizer.encode(TEXT) == ids
    assert tokenizer.encode(TEXT, add_special_tokens=False) == whole.encode(TEXT, add_special_tokens=False).ids
    assert tokenizer.decode(ids) == whole.decode(ids, skip_special_tokens=False)
    assert tokenizer.vocab_size == whole.get_vocab_size()
    assert [tokenizer.token_to_id(token) for token in ("ab", "no token")] == [3, None]
    assert tokenizer.encode("") == whole.encode("").ids
    tokenizer.close()
    with pytest.raises(TokenizerError, match="was closed"):
        tokenizer.encode(TEXT)


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_file_is_one_sentence(case: str, tmp_path: Path) -> None:
    content, says = HOSTILE[case]
    with pytest.raises(TokenizerError, match=f"tokenizer.json cannot be used: .*{says}") as error:
        read_tokenizer(folder_with(tmp_path, content), "this test").encode("abc")
    assert len(str(error.value)) < 500 and "\n" not in str(error.value)


def test_applying_is_bounded() -> None:
    """Memory and processor time; what is measured here is what ends it, so with less than usual."""
    grows = as_bytes(tokenizer_file(normalizer=replacements(13)))
    process = _Process("it", 100 << 20)
    process.ask(b"J", grows, 32)
    with pytest.raises(TokenizerError, match="as taking more than the 100 MiB of memory allowed does"):
        process.ask(b"e", b"a" * 10_000, 1 << 20)
    with pytest.raises(TokenizerError, match="it was closed"):
        process.ask(b"e", b"a", 1 << 20)
    process = _Process("it", MAX_MEMORY_BYTES, 0)
    rules = replacements(11)["normalizers"] + replacements(88, "b", "b")["normalizers"]
    process.ask(b"J", as_bytes(tokenizer_file(normalizer={"type": "Sequence", "normalizers": rules})), 32)
    with pytest.raises(TokenizerError, match="more than the 0 seconds of processor time allowed"):
        process.ask(b"e", b"ab" * 4000, 1 << 20)


def test_a_file_that_is_elsewhere_or_no_file_is_refused(tmp_path: Path) -> None:
    """As `import` refuses it, and without opening it."""
    outside = folder_with(tmp_path, SOUND["words"], "elsewhere.json")
    for name in ("link", "pipe", "folder", "large"):
        (tmp_path / name).mkdir()
    (tmp_path / "link" / "tokenizer.json").symlink_to(outside / "elsewhere.json")
    os.mkfifo(tmp_path / "pipe" / "tokenizer.json")
    (tmp_path / "folder" / "tokenizer.json").mkdir()
    with (tmp_path / "large" / "tokenizer.json").open("wb") as file:
        file.truncate(MAX_FILE_BYTES + 1)
    for name, says in {
        "link": "is a symbolic link that leaves the folder",
        "pipe": "is not a regular file",
        "folder": "is not a regular file",
        "large": f"has {MAX_FILE_BYTES + 1} bytes, more than the {MAX_FILE_BYTES} allowed",
    }.items():
        with pytest.raises((TokenizerError, CheckpointError), match=says):
            read_tokenizer(tmp_path / name, "this test")
    (tmp_path / "link" / "tokenizer_config.json").symlink_to(outside / "elsewhere.json")
    with pytest.raises(CheckpointError, match="is a symbolic link that leaves the folder"):
        named_tokens(tmp_path / "link")
    with pytest.raises(CheckpointError, match=r"tokenizer.json of .* is a symbolic link that leaves the folder"):
        encode_as_transformers(tmp_path / "link", TEXT)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ({"eos_token": 3}, "an eos_token that is a int; allowed: text"),
        ({"eos_token": {"content": ["x"]}}, "an eos_token that is a list; allowed: text"),
        ([], "holds a JSON list where an object is expected"),
        ("{", "is not valid JSON"),
        (b"\xff", "is not UTF-8 text"),
        ('{"eos_token":' + "[" * 100_000, "nested too deeply"),
        ({"eos_token": "<no token>"}, "names the eos_token '<no token>', which its tokenizer.json does not have"),
    ],
)
def test_damaged_settings_are_one_sentence(content: object, says: str, tmp_path: Path) -> None:
    folder_with(tmp_path, content, "tokenizer_config.json")
    with pytest.raises(ValueError, match=says):
        load_encoder(str(folder_with(tmp_path, SOUND["words"])))


def test_commands_end_with_2_and_a_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = folder_with(tmp_path, HOSTILE["a charsmap that panics"][0])
    (folder / "config.json").write_text("{}")
    (tmp_path / "text.txt").write_text(TEXT)
    (tmp_path / "run.toml").write_text(
        f'output_dir = "{tmp_path}/run"\nsteps = 1\ndevice = "cpu"\ncompile = false\n'
        f"[model.config]\nvocab_size = 9\nhidden_size = 8\nnum_layers = 1\nmax_position_embeddings = 8\n"
        f"attention = {{num_attention_heads = 1}}\nmlp = {{ffn_hidden_size = 8}}\n"
        f'[data]\npath = "{tmp_path}/tokens"\ntext = ["{tmp_path}/text.txt"]\ntokenizer = "{folder}"\n'
        f"sequence_length = 4\n"
    )
    for words in (["generate", str(folder), "--prompt", "a"], ["train", str(tmp_path / "run.toml")]):
        assert main(words) == 2
        said = capsys.readouterr().err.strip().splitlines()
        assert re.fullmatch(r"te-models: .*/tokenizer.json cannot be used: the library refuses it .*", said[-1])


def test_a_panic_is_an_error_of_the_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of a library in this process, too: what it raises is no Exception."""
    data = as_bytes(HOSTILE["a charsmap that panics"][0]).decode()
    monkeypatch.setattr("te_models.cli.main._parse", lambda argv: _Arguments(data))
    assert main([]) == 3
    assert "te-models: PanicException: index out of bounds" in capsys.readouterr().err


class _Arguments:
    debug = False

    def __init__(self, data: str) -> None:
        self._data = data

    def run(self, args: object) -> int:
        return len(tokenizers.Tokenizer.from_str(self._data).encode("abc"))


def fuzz(count: int, seed: int) -> tuple[int, int]:
    """Read and apply so many damaged files; return how many were refused, and how many ended their process."""
    rng, process = random.Random(seed), _Process("it", MAX_MEMORY_BYTES, 20)
    refused = ended = 0
    for _ in range(count):
        data = damaged(rng)
        try:
            process.ask(b"J", data, 32)
            ids = process.ask(b"E", TEXT.encode(), 1 << 20)
            process.ask(b"d", ids, 1 << 20)
        except TokenizerError as error:
            refused += 1
            assert "\n" not in str(error) and len(str(error)) < 500
            if process._process.poll() is not None:
                ended += 1
                process = _Process("it", MAX_MEMORY_BYTES, 20)
    process.close()
    return refused, ended


def test_damaged_files_are_read_or_refused() -> None:
    refused, _ = fuzz(60, 0)
    assert 15 < refused < 60


@pytest.mark.slow
def test_thousands_of_damaged_files_are_read_or_refused() -> None:
    refused, ended = fuzz(5000, 1)
    assert 1500 < refused < 4999
    assert ended < 2500


@pytest.mark.slow
def test_transformers_reads_hostile_folders_in_the_other_process(tmp_path: Path) -> None:
    """Of every kind: fast tokenizers, sentencepiece models, and settings that name classes and code."""
    pytest.importorskip("transformers")
    rng, process = random.Random(2), _Process("it", 6 << 30)
    for number in range(300):
        folder = tmp_path / str(number)
        folder.mkdir()
        folder_with(folder, {"model_type": rng.choice(["llama", "gemma", "bert", "gpt2", "t5"])}, "config.json")
        classes = [None, "LlamaTokenizer", "PreTrainedTokenizerFast", "BertTokenizer", "No", 3, ["x"]]
        settings = {"tokenizer_class": rng.choice(classes), "eos_token": rng.choice(["a", {"content": 3}, 3, None])}
        settings |= rng.choice([{}, {"auto_map": {"AutoTokenizer": ["x.X", None]}}, {"added_tokens_decoder": {"x": 3}}])
        folder_with(folder, rng.choice([settings, settings, "{", [], rng.randbytes(20)]), "tokenizer_config.json")
        if rng.random() < 0.7:
            folder_with(folder, damaged(rng))
        if rng.random() < 0.5:
            folder_with(folder, rng.randbytes(rng.choice([0, 9, 2000])), "tokenizer.model")
        try:
            process.ask(b"R", json.dumps({"folder": str(folder), "model": {}}).encode(), 1 << 24)
            process.ask(b"F", json.dumps({"folder": str(folder), "text": TEXT}).encode(), 1 << 20)
        except TokenizerError as error:
            assert "\n" not in str(error) and len(str(error)) < 500
            if process._process.poll() is not None:
                process = _Process("it", 6 << 30)
    process.close()


@pytest.mark.slow
def test_a_hostile_folder_is_refused_where_logits_are_compared(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    folder = folder_with(tmp_path, HOSTILE["a charsmap that panics"][0])
    folder_with(folder, {"model_type": "llama"}, "config.json")
    with pytest.raises(TokenizerError, match=r"the tokenizer of .* cannot be used: the library refuses it"):
        encode_as_transformers(folder, TEXT)
