"""Files of tokenizers: sound ones of every kind, hostile ones, and a strategy of damaged ones."""

from __future__ import annotations

import base64
import copy
import json
import random
from collections.abc import Callable
from typing import Any

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
