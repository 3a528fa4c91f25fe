"""GGUF files: models that go out and come back, every block type, tokenizers, and what is refused."""

import json
import warnings
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from te_models import GPTModel
from te_models.checkpoints import CheckpointError, import_hf, quantize
from te_models.gguf import export_gguf, import_gguf
from te_models.gguf.reading import GGUFStore
from tests.checkpoints.hf_cases import stored, transformers
from tests.compare import refused

gguf = pytest.importorskip("gguf", reason="reads and writes GGUF: te_models[gguf]")

SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
}
_MOE = {"moe_intermediate_size": 64, "num_experts": 4, "num_experts_per_tok": 2}
_GEMMA = {"query_pre_attn_scalar": 16, "sliding_window": 8}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama3": (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 500000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            }
        },
    ),
    "mistral": ("mistral", {"sliding_window": None}),
    "mixtral": ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen2": ("qwen2", {}),
    "qwen2_moe": ("qwen2_moe", _MOE | {"shared_expert_intermediate_size": 96}),
    "qwen3": ("qwen3", {"tie_word_embeddings": True}),
    "qwen3_moe": ("qwen3_moe", _MOE | {"norm_topk_prob": True}),
    "gemma": ("gemma", {}),
    "gemma2": ("gemma2", _GEMMA),
    "gemma3": ("gemma3_text", _GEMMA | {"num_hidden_layers": 7}),
    "olmo2": ("olmo2", {}),
    "olmoe": ("olmoe", {"num_experts": 4, "num_experts_per_tok": 2}),
    "granite": (
        "granite",
        {
            "attention_multiplier": 0.2,
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.5,
            "logits_scaling": 4.0,
            "attention_bias": True,
        },
    ),
    "smollm3": ("smollm3", {"num_hidden_layers": 5, "pad_token_id": 0}),
    "starcoder2": ("starcoder2", {"norm_epsilon": 1e-4}),
    "stablelm": ("stablelm", {"use_qkv_bias": True}),
    "stablelm side by side": ("stablelm", {"use_parallel_residual": True}),
    "cohere": ("cohere", {"logit_scale": 0.25}),
    "arcee": ("arcee", {}),
    "ernie4_5": ("ernie4_5", {"tie_word_embeddings": False}),
    "seed_oss": ("seed_oss", {"attention_out_bias": True}),
}


READ_BY_TRANSFORMERS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {"head_dim": 128},
    "gemma2": {"head_dim": 256, "query_pre_attn_scalar": 256, "sliding_window": 4096},
    "starcoder2": {"vocab_size": 49152},
    "stablelm": {},
}
"""Sizes that its reader takes for granted, where it does not read them."""


def make(root: Path, case: str, **changes: Any) -> Path:
    """Return a folder of ours with a tiny model whose norms are not ones."""
    family, options = MODELS[case]
    config = transformers.AutoConfig.for_model(family, **(SIZES | options | changes))
    with torch.random.fork_rng(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(3)
        model = transformers.AutoModelForCausalLM.from_config(config)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.normal_(std=0.2)
        model.save_pretrained(root / "hf")
    import_hf(root / "hf", root / "ours")
    return root / "ours"


@torch.no_grad()
def logits(folder: Path) -> torch.Tensor:
    model = GPTModel.from_pretrained(folder, dtype=torch.float32).eval()
    return model(torch.arange(24)[None] * 3 % 96).logits


@pytest.mark.sentinels("llama", "llama3", "mixtral", "qwen3_moe", "gemma2")
@pytest.mark.parametrize("case", MODELS)
def test_a_model_goes_out_and_comes_back(tmp_path: Path, case: str) -> None:
    ours = make(tmp_path, case)
    export_gguf(ours, tmp_path / "model.gguf", type="f32")
    reader = gguf.GGUFReader(str(tmp_path / "model.gguf"))
    assert {entry.tensor_type.name for entry in reader.tensors} == {"F32"}
    import_gguf(tmp_path / "model.gguf", tmp_path / "again")
    before, after = stored(ours), stored(tmp_path / "again")
    assert before.keys() == after.keys()
    for name, value in before.items():
        bound = 1e-6 if "gemma" in case and "norm" in name else 0.0  # stored plus one
        assert (after[name].view(value.shape) - value).abs().max() <= bound, name
    torch.testing.assert_close(logits(tmp_path / "again"), logits(ours), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("case", READ_BY_TRANSFORMERS)
def test_transformers_reads_the_same_model(tmp_path: Path, case: str) -> None:
    """Its own reader of GGUF, as another opinion about names, rows and norms."""
    ours = make(tmp_path, case, **READ_BY_TRANSFORMERS[case])
    export_gguf(ours, tmp_path / "model.gguf", type="f32")
    with warnings.catch_warnings(action="ignore"):
        model = transformers.AutoModelForCausalLM.from_pretrained(
            str(tmp_path), gguf_file="model.gguf", dtype=torch.float32, attn_implementation="eager"
        )
    with torch.no_grad():
        found = model(torch.arange(24)[None] * 3 % 96).logits
    torch.testing.assert_close(found, logits(ours), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(("type", "bound"), [("f16", 2**-10), ("bf16", 2**-8), ("q8_0", 2**-6)])
def test_types_of_matrices(tmp_path: Path, type: str, bound: float) -> None:
    ours = make(tmp_path, "qwen3_moe")
    export_gguf(ours, tmp_path / "model.gguf", type=type)
    reader = gguf.GGUFReader(str(tmp_path / "model.gguf"))
    assert {entry.tensor_type.name for entry in reader.tensors} == {type.upper(), "F32"}
    plan = import_gguf(tmp_path / "model.gguf", tmp_path / "again", dtype="float32")
    assert plan.report is not None and ("dequantized" in str(plan.report)) == (type == "q8_0")
    before, after = stored(ours), stored(tmp_path / "again")
    for name, value in before.items():
        assert (after[name] - value).abs().max() <= bound * value.abs().max(), name


def test_quantized_weights_are_written_as_values(tmp_path: Path) -> None:
    quantize(make(tmp_path, "llama"), tmp_path / "int8", "int8")
    export_gguf(tmp_path / "int8", tmp_path / "model.gguf", type="f32")
    import_gguf(tmp_path / "model.gguf", tmp_path / "again")
    torch.testing.assert_close(logits(tmp_path / "again"), logits(tmp_path / "int8"))


def blocks() -> list[str]:
    """Return the block types that the package dequantizes."""
    found = []
    for kind in gguf.GGMLQuantizationType:
        block, width = gguf.GGML_QUANT_SIZES.get(kind, (1, 0))
        if block > 1 and 256 % block == 0:
            try:
                gguf.dequantize(numpy.zeros((1, 256 // block * width), numpy.uint8), kind)
            except NotImplementedError:
                continue
            found.append(kind.name)
    return found


@pytest.mark.parametrize("name", blocks())
def test_every_block_type_is_read_in_regions(tmp_path: Path, name: str) -> None:
    """A file with one matrix of random blocks: rows and columns of it are what the package gives for all."""
    kind = gguf.GGMLQuantizationType[name]
    block, width = gguf.GGML_QUANT_SIZES[kind]
    raw = numpy.random.default_rng(0).integers(0, 60, (256, 256 // block * width), dtype=numpy.uint8)
    options = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64, "num_hidden_layers": 1}
    config = transformers.LlamaConfig(**(SIZES | options))
    writer = gguf.GGUFWriter(str(tmp_path / "model.gguf"), "llama")
    for key, value in {
        "context_length": 128,
        "embedding_length": 256,
        "block_count": 1,
        "feed_forward_length": 256,
    }.items():
        writer.add_uint32(f"llama.{key}", value)
    writer.add_uint32("llama.attention.head_count", 4)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-5)
    for n in ("token_embd", "output"):
        writer.add_tensor(f"{n}.weight", numpy.ones((96, 256), numpy.float32))
    for n in ("output_norm", "blk.0.attn_norm", "blk.0.ffn_norm"):
        writer.add_tensor(f"{n}.weight", numpy.ones(256, numpy.float32))
    for n in ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"):
        writer.add_tensor(f"blk.0.{n}.weight", raw, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert config.hidden_size == 256
    expected = torch.from_numpy(gguf.dequantize(raw, kind).astype(numpy.float32))
    store = GGUFStore(tmp_path / "model.gguf")
    up, q = (f"model.layers.0.{n}.weight" for n in ("mlp.up_proj", "self_attn.q_proj"))
    torch.testing.assert_close(store.view(up), expected, rtol=0, atol=0, equal_nan=True)
    from te_models.checkpoints.io.boxes import Range

    part = store.read(up, (Range(7, 90, 3), Range(33, 200)))
    torch.testing.assert_close(part, expected[7:90:3, 33:200], rtol=0, atol=0, equal_nan=True)
    halves = expected.view(4, 32, 2, 256).transpose(1, 2).reshape(256, 256)
    part = store.read(q, (Range(70, 131), Range(0, 256)))
    torch.testing.assert_close(part, halves[70:131], rtol=0, atol=0, equal_nan=True)
    store.close()


def byte_level(root: Path) -> Any:
    """Return a byte-level tokenizer of 96 tokens at most, saved beside the model."""
    tokenizers = pytest.importorskip("tokenizers")
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())[:80]
    vocab = {c: i for i, c in enumerate(alphabet)} | {"he": 80, "ll": 81, "hell": 82}
    model = tokenizers.models.BPE(vocab=vocab, merges=[("h", "e"), ("l", "l"), ("he", "ll")])
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    wrapped = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")
    wrapped.chat_template = "{{ messages[0].content }}"
    wrapped.save_pretrained(root)
    return wrapped


def test_the_tokenizer_travels(tmp_path: Path) -> None:
    make(tmp_path, "llama")
    theirs = byte_level(tmp_path / "hf")
    path = tmp_path / "hf/config.json"
    values = json.loads(path.read_text()) | {"bos_token_id": theirs.bos_token_id, "eos_token_id": theirs.eos_token_id}
    path.write_text(json.dumps(values))
    import_hf(tmp_path / "hf", tmp_path / "with")
    assert export_gguf(tmp_path / "with", tmp_path / "model.gguf") == []
    fields = {n: f.contents() for n, f in gguf.GGUFReader(str(tmp_path / "model.gguf")).fields.items()}
    assert fields["tokenizer.ggml.model"] == "gpt2" and fields["tokenizer.ggml.pre"] == "gpt-2"
    assert len(fields["tokenizer.ggml.tokens"]) == 96 and fields["tokenizer.ggml.merges"] == ["h e", "l l", "he ll"]
    assert fields["tokenizer.ggml.token_type"][theirs.bos_token_id] == 3
    assert fields["tokenizer.chat_template"] == theirs.chat_template
    import_gguf(tmp_path / "model.gguf", tmp_path / "again")
    again = transformers.AutoTokenizer.from_pretrained(str(tmp_path / "again"))
    for text in ("hello hell", "<s>he</s>"):
        assert again(text, add_special_tokens=False).input_ids == theirs(text, add_special_tokens=False).input_ids


def test_what_is_refused(tmp_path: Path) -> None:
    ours = make(tmp_path, "llama")
    with pytest.raises(CheckpointError, match="the type is 'q4'; allowed: f32, f16, bf16, q8_0"):
        export_gguf(ours, tmp_path / "x.gguf", type="q4")
    (tmp_path / "there.gguf").write_bytes(b"no GGUF")
    with pytest.raises(CheckpointError, match=r"there.gguf exists already; choose another file, or --overwrite"):
        export_gguf(ours, tmp_path / "there.gguf")
    with pytest.raises(CheckpointError, match=r"there.gguf is no GGUF file that can be read"):
        import_gguf(tmp_path / "there.gguf", tmp_path / "x")
    refused(lambda: import_gguf(tmp_path / "absent.gguf", tmp_path / "x"), "is no file", error=CheckpointError)
    export_gguf(ours, tmp_path / "model.gguf")
    whole = (tmp_path / "model.gguf").read_bytes()
    (tmp_path / "cut.gguf").write_bytes(whole[:-5000])
    refused(lambda: import_gguf(tmp_path / "cut.gguf", tmp_path / "x"), "cut.gguf", error=CheckpointError)
    assert not (tmp_path / "x").exists() and not list(tmp_path.glob(".*.part"))


def test_a_model_that_llama_cpp_computes_otherwise_is_refused(tmp_path: Path) -> None:
    config = transformers.Qwen3MoeConfig(**(SIZES | _MOE), norm_topk_prob=False)
    transformers.Qwen3MoeForCausalLM(config).save_pretrained(tmp_path / "hf")
    import_hf(tmp_path / "hf", tmp_path / "ours")
    with pytest.raises(
        CheckpointError, match=r"llama.cpp computes qwen3moe models with moe\..* which GGUF does not say"
    ):
        export_gguf(tmp_path / "ours", tmp_path / "x.gguf")


OTHERWISE = {
    "starcoder2": ({"sliding_window": 8}, "window"),
    "olmoe": ({"norm_topk_prob": True}, "router.normalize"),
    "smollm3": ({"no_rope_layers": [1, 0, 1, 1, 1]}, "layer_types"),
    "cohere": ({"use_qk_norm": True}, "attention.qk_layernorm"),
}


@pytest.mark.parametrize("case", OTHERWISE)
def test_a_field_that_llama_cpp_does_not_read_is_named(tmp_path: Path, case: str) -> None:
    changes, field = OTHERWISE[case]
    ours = make(tmp_path, case, **changes)
    with pytest.raises(CheckpointError, match=field):
        export_gguf(ours, tmp_path / "model.gguf", type="f32")
    assert not (tmp_path / "model.gguf").exists()


def test_heads_that_are_rotated_in_part_are_refused(tmp_path: Path) -> None:
    """Where llama.cpp's architecture can, and the family here cannot."""
    from te_models.gguf.architectures import gguf_hf_config, key_values

    ours = make(tmp_path, "llama")
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    values = {**key_values(config, "llama"), "general.architecture": "llama", "llama.rope.dimension_count": 8}
    with pytest.raises(CheckpointError, match=r"rope.dimension_count = 8; supported: 16"):
        gguf_hf_config(values, {}, "the file")
    assert ours.exists()
