"""Tokenizers of GGUF files on real text: those that come out of a file give the tokens of those that went in."""

import json
from pathlib import Path
from typing import Any

import pytest

from te_models.checkpoints import import_hf
from te_models.gguf import export_gguf, import_gguf
from te_models.gguf.tokenizer import _PATTERNS

pytest.importorskip("gguf")
transformers: Any = pytest.importorskip("transformers")
tokenizers: Any = pytest.importorskip("tokenizers")

ROOT = Path(__file__).resolve().parents[3]
TEXTS = [ROOT / name for name in ("README.md", "LICENSE", "docs/numerics.md", "kernels/cpp/gemv.cpp", "Makefile")]
FURTHER = ["  two  spaces\n\n\ttab \r\n", "12345 67.8e-9", "don't WON'T it's", "na\u00efve \u6771\u4eac \U0001f642"]
WORDS = 1200
SMALL: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
SMALL |= {"vocab_size": WORDS, "bos_token_id": None, "eos_token_id": None}


def lines() -> list[str]:
    return [line for path in TEXTS for line in path.read_text(encoding="utf-8").split("\n\n")]


def byte_level(name: str) -> Any:
    """A byte-level BPE trained on the texts. name: what splits text before it."""
    found = tokenizers.Tokenizer(tokenizers.models.BPE())
    steps, pre = tokenizers.pre_tokenizers, {name: pattern for pattern, name in _PATTERNS.items()}
    if name == "smollm":
        split = [steps.Digits(individual_digits=True), steps.ByteLevel(add_prefix_space=False, use_regex=True)]
    elif name == "gpt-2":
        split = [steps.ByteLevel(add_prefix_space=False, use_regex=True)]
    else:
        pattern = tokenizers.Regex(pre[name])
        split = [steps.Split(pattern, "isolated"), steps.ByteLevel(add_prefix_space=False, use_regex=False)]
    found.pre_tokenizer = steps.Sequence(split)
    found.decoder = tokenizers.decoders.ByteLevel()
    alphabet = steps.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=WORDS - 2, initial_alphabet=alphabet, show_progress=False)
    found.train_from_iterator(lines(), trainer)
    return found


def pieces() -> Any:
    """A BPE over pieces with bytes to fall back on, as sentencepiece's."""
    bytes_ = [f"<0x{i:02X}>" for i in range(256)]
    trained = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    normal = tokenizers.normalizers
    trained.normalizer = normal.Sequence([normal.Prepend("▁"), normal.Replace(" ", "▁")])
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=WORDS - 300, special_tokens=["<unk>"], show_progress=False)
    trained.train_from_iterator(lines(), trainer)
    state = json.loads(trained.to_str())
    vocab = {"<unk>": 0} | {name: 1 + i for i, name in enumerate(bytes_)}
    vocab |= {name: len(vocab) + i for i, name in enumerate(n for n in state["model"]["vocab"] if n != "<unk>")}
    order = sorted((name for name in vocab if len(name) > 1 and vocab[name] > 256), key=vocab.__getitem__)
    pairs = [(name[:i], name[i:]) for name in order for i in range(len(name) - 1, 0, -1)]  # as transformers lists them
    state["model"]["merges"] = [[a, b] for a, b in pairs if a in vocab and b in vocab]
    state["model"]["vocab"], state["added_tokens"] = vocab, []
    found = tokenizers.Tokenizer.from_str(json.dumps(state))
    steps = tokenizers.decoders
    found.decoder = steps.Sequence(
        [steps.Replace("▁", " "), steps.ByteFallback(), steps.Fuse(), steps.Strip(" ", 1, 0)]
    )
    return found


@pytest.mark.parametrize("name", ["llama-bpe", "gpt-2", "qwen2", "smollm", "pieces"])
def test_real_text_has_the_same_tokens(tmp_path: Path, name: str) -> None:
    """Before and after a GGUF file: prose, code, a licence, numbers, spaces, other scripts, special tokens."""
    config = transformers.LlamaConfig(**SMALL)
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "hf")
    made = pieces() if name == "pieces" else byte_level(name)
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>", eos_token="</s>")
    theirs.save_pretrained(tmp_path / "hf")
    path = tmp_path / "hf/config.json"
    ids = {"bos_token_id": theirs.bos_token_id, "eos_token_id": theirs.eos_token_id}
    path.write_text(json.dumps(json.loads(path.read_text()) | ids))
    import_hf(tmp_path / "hf", tmp_path / "ours")
    assert export_gguf(tmp_path / "ours", tmp_path / "model.gguf", type="f16") == []
    import_gguf(tmp_path / "model.gguf", tmp_path / "again")
    again = transformers.AutoTokenizer.from_pretrained(str(tmp_path / "again"))
    for text in (*(path.read_text(encoding="utf-8") for path in TEXTS), *FURTHER):
        expected = theirs(text, add_special_tokens=False).input_ids
        found = again(text, add_special_tokens=False).input_ids
        assert found == expected, text[:40]
        assert again.decode(found) == theirs.decode(expected)
