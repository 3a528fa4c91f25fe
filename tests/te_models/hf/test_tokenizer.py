"""Tokenizers of strangers: the right ids from sound files, one sentence and bounded work from all others."""

import base64
import copy
import json
import os
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

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

REGEX = {"Regex": r"\s+|[a-z]+|."}
WORDS = {"<unk>": 0, "a": 1, "b": 2, "ab": 3, "c": 4, "##b": 5, "▁": 6, "<s>": 7}


def tokenizer_file(**parts: Any) -> dict[str, Any]:
    """A tokenizer.json of single words, with the named parts changed."""
    empty = dict.fromkeys(("truncation", "padding", "normalizer", "pre_tokenizer", "post_processor", "decoder"))
    model = {"type": "WordLevel", "vocab": WORDS, "unk_token": "<unk>"}
    return {"version": "1.0", **empty, "added_tokens": [], "model": model, **parts}


def replacements(count: int, content: str = "aa", pattern: str = "a") -> dict[str, Any]:
    rule = {"type": "Replace", "pattern": {"String": pattern}, "content": content}
    return {"type": "Sequence", "normalizers": [rule] * count}


def charsmap(data: bytes) -> dict[str, Any]:
    return {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(data).decode()}


def template(pieces: int, ids: int) -> dict[str, Any]:
    return {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "x", "type_id": 0}}] * pieces + [{"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [],
        "special_tokens": {"x": {"id": "x", "ids": [1] * ids, "tokens": ["a"] * ids}},
    }


ADDED = {
    **dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False),
    "id": 7,
    "content": "<s>",
    "special": True,
}
SPLIT = {"type": "Split", "pattern": REGEX, "behavior": "Isolated", "invert": False}
BPE = {"type": "BPE", "vocab": WORDS, "merges": [["a", "b"]], "unk_token": "<unk>", "byte_fallback": False}
WORD_PIECE = {
    "type": "WordPiece",
    "vocab": WORDS,
    "unk_token": "<unk>",
    "continuing_subword_prefix": "##",
    "max_input_chars_per_word": 9,
}
UNIGRAM = {"type": "Unigram", "unk_id": 0, "vocab": [[w, -1.0 * i] for w, i in WORDS.items()], "byte_fallback": False}
BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
METASPACE = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True}
BERT = {
    "type": "BertNormalizer",
    "clean_text": True,
    "handle_chinese_chars": True,
    "strip_accents": None,
    "lowercase": True,
}
DECODERS = [{"type": "Replace", "pattern": {"String": "▁"}, "content": " "}, {"type": "ByteFallback"}, {"type": "Fuse"}]

SOUND: dict[str, dict[str, Any]] = {
    "words": tokenizer_file(added_tokens=[ADDED], pre_tokenizer=SPLIT, post_processor=template(1, 1)),
    "bpe": tokenizer_file(model=BPE, pre_tokenizer=BYTE_LEVEL, decoder=BYTE_LEVEL, post_processor=BYTE_LEVEL),
    "word piece": tokenizer_file(model=WORD_PIECE, normalizer=BERT, pre_tokenizer={"type": "BertPreTokenizer"}),
    "unigram": tokenizer_file(
        model=UNIGRAM,
        normalizer={"type": "Sequence", "normalizers": [{"type": "NFKC"}, {"type": "Prepend", "prepend": "▁"}]},
        pre_tokenizer={"type": "Sequence", "pretokenizers": [SPLIT, METASPACE]},
        decoder={"type": "Sequence", "decoders": DECODERS},
    ),
}

MARKED = {"type": "Replace", "pattern": {"String": "b"}, "content": "b"}
HOSTILE: dict[str, tuple[Any, str]] = {
    "a charsmap that panics": (
        tokenizer_file(normalizer=charsmap(b"\x04\0\0\0\xff\xff\xff\xffabc")),
        "refuses it .index out of bounds",
    ),
    "a charsmap of a size that is none": (tokenizer_file(normalizer=charsmap(b"\xff" * 4)), "ends the library"),
    "replacements that double": (tokenizer_file(normalizer=replacements(40)), "by 1e.12 times as long ones, more than"),
    "replacements that double while decoding": (
        tokenizer_file(decoder={"type": "Sequence", "decoders": replacements(40)["normalizers"]}),
        "by 1e.12 times as long ones, more than",
    ),
    "many rules": (tokenizer_file(normalizer=replacements(101, "a")), "has 102 rules, more than the 100 allowed"),
    "many tokens beside a text": (tokenizer_file(post_processor=template(999, 999)), "puts 998001 tokens beside a"),
    "a long token": (
        tokenizer_file(model={"type": "WordLevel", "vocab": {"x" * 5000: 0}, "unk_token": "x" * 5000}),
        "a token of 5000 characters, more than the 4096 allowed",
    ),
    "a pattern that is none": (tokenizer_file(pre_tokenizer={**SPLIT, "pattern": {"Regex": "("}}), "unmatched parenth"),
    "a model of no kind": (tokenizer_file(model={"type": "Other"}), "refuses it"),
    "merges of what is no token": (tokenizer_file(model={**BPE, "merges": [["q", "r"]]}), "refuses it"),
    "nested parts": ('{"normalizer":' + '{"type":"Sequence","normalizers":[' * 5000, "refuses it .recursion limit"),
    "no object": ("[]", "refuses it"),
    "no JSON": ("{", "refuses it"),
    "nothing": ("", "refuses it"),
    "no text": (b"\xff\xfe{}", "refuses it .*can't decode byte"),
    "a number that is no id": ('{"model":{"type":"WordLevel","vocab":{"a":-1},"unk_token":"a"}}', "refuses it"),
}
"""tokenizer.json, and what the sentence about it says."""


def as_bytes(content: Any) -> bytes:
    """The file of a value, of its text, or of these very bytes."""
    text = content if isinstance(content, (str, bytes)) else json.dumps(content)
    return text if isinstance(text, bytes) else text.encode()


_ODD: list[Any] = [None, True, -1, 0, 3, 2**31, 2**64, 0.5, 1e308, "", "a", "x" * 5000, "\0", "▁", [], {}, [[]], "<s>"]


def _nodes(value: Any) -> list[tuple[Any, Any]]:
    """Every place in a JSON value, as what holds it and its key there."""
    places: list[tuple[Any, Any]] = []
    if isinstance(value, (dict, list)):
        for key in list(value) if isinstance(value, dict) else range(len(value)):
            places += [(value, key), *_nodes(value[key])]
    return places


def _changed_value(value: Any, rng: random.Random) -> Any:
    value = copy.deepcopy(value)
    for _ in range(rng.randint(1, 3)):
        places = _nodes(value)
        holder, key = rng.choice(places)
        kind = rng.randrange(5)
        if kind == 0:
            holder[key] = rng.choice(_ODD)
        elif kind == 1:
            del holder[key]
        elif kind == 2:
            other, name = rng.choice(places)
            holder[key] = copy.deepcopy(other[name]) if name in other or isinstance(other, list) else None
        elif kind == 3 and isinstance(holder, list):
            holder += [copy.deepcopy(holder[key])] * rng.choice([1, 50, 2000])
        else:
            donor = rng.choice(list(SOUND.values()))
            part = rng.choice(list(donor))
            if isinstance(value, dict):
                value[part] = copy.deepcopy(donor[part])
    return value


def _changed_bytes(data: bytes, rng: random.Random) -> bytes:
    changed = bytearray(data)
    for _ in range(rng.randint(1, 8)):
        at = rng.randrange(len(changed) + 1)
        kind = rng.randrange(4)
        if kind == 0 and at < len(changed):
            changed[at] ^= 1 << rng.randrange(8)
        elif kind == 1:
            changed[at:at] = bytes(rng.randrange(256) for _ in range(rng.randint(1, 9)))
        elif kind == 2:
            del changed[at : at + rng.choice([1, 10, 1000])]
        else:
            changed = changed[: max(1, at)]
    return bytes(changed)


def damaged(rng: random.Random) -> bytes:
    """A sound tokenizer.json or a hostile one, with something changed."""
    hostile = [content for content, _ in HOSTILE.values() if isinstance(content, dict)]
    start = rng.choice([*SOUND.values(), *SOUND.values(), rng.choice(hostile)])
    how: list[Callable[[], bytes]] = [
        lambda: as_bytes(_changed_value(start, rng)),
        lambda: _changed_bytes(as_bytes(start), rng),
        lambda: as_bytes({**start, "normalizer": charsmap(rng.randbytes(rng.choice([4, 8, 60, 3000])))}),
    ]
    return rng.choice([how[0], how[0], how[1], how[2]])()


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
    assert ids and tokenizer.encode(TEXT) == ids
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
    assert main([]) == 3 and "te-models: PanicException: index out of bounds" in capsys.readouterr().err


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
    assert 1500 < refused < 4999 and ended < 2500


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
