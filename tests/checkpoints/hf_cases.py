"""The Hugging Face models that the tests convert, how tests read folders without te_models, and what a refusal is."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from te_models.checkpoints import CheckpointError, export_hf, import_hf

transformers = pytest.importorskip("transformers", reason="makes the Hugging Face folders that the tests convert")

# the class has no place among the automatic ones, because its models are published within another
transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES["mistral4"] = "Mistral4ForCausalLM"

SMALL: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN_ROPE = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32}

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "llama-tied-biases-llama3": (
        "LlamaConfig",
        {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True, "rope_parameters": LLAMA3_ROPE},
    ),
    "llama-head-dim": ("LlamaConfig", {"head_dim": 16, "num_key_value_heads": 4}),
    "mistral-window": ("MistralConfig", {"sliding_window": 8, "head_dim": 16}),
    "mistral-full": ("MistralConfig", {"sliding_window": None}),
    "qwen2-tied": ("Qwen2Config", {"tie_word_embeddings": True}),
    "qwen2-windows-yarn": (
        "Qwen2Config",
        {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1, "rope_parameters": YARN_ROPE},
    ),
    "qwen3": ("Qwen3Config", {"head_dim": 16}),
    "qwen3-tied-bias": ("Qwen3Config", {"head_dim": 8, "attention_bias": True, "tie_word_embeddings": True}),
    "mixtral": ("MixtralConfig", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "mixtral-tied-window": (
        "MixtralConfig",
        {"num_local_experts": 3, "num_experts_per_tok": 1, "tie_word_embeddings": True, "sliding_window": 8},
    ),
    "qwen3_moe": (
        "Qwen3MoeConfig",
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": True},
    ),
    "qwen3_moe-mixed-layers": (
        "Qwen3MoeConfig",
        {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "mlp_only_layers": [0]},
    ),
}

HFFolder = Callable[..., Path]


@torch.no_grad()
def randomise(model: torch.nn.Module) -> None:
    """Give every parameter distinct values (norm weights start as ones, biases as zeros, which would hide swaps)."""
    for parameter in model.parameters():
        parameter.normal_(0.0, 0.1)


def stored(folder: Path) -> dict[str, torch.Tensor]:
    """Read all tensors with the safetensors library, which knows nothing of ours."""
    tensors: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        tensors.update(load_file(file))
    return tensors


def there_and_back(source: Path, around: Path) -> Path:
    """Import a folder as `around`/ours, export that, and return where the result is."""
    import_hf(source, around / "ours")
    export_hf(around / "ours", around / "back")
    return around / "back"


@contextmanager
def refused(message: str, folder: Path) -> Iterator[None]:
    """Expect a CheckpointError in which the pattern `message` is found, one sentence, and nothing new in `folder`."""
    before = sorted(folder.rglob("*"))
    with pytest.raises(CheckpointError, match=message) as caught:
        yield
    text = str(caught.value)
    assert "\n" not in text and len(text) < 700, text
    assert sorted(folder.rglob("*")) == before, "something was written"


def assert_same_bits(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    """Compare names, dtypes, shapes and bytes."""
    assert a.keys() == b.keys()
    for name, tensor in a.items():
        assert tensor.dtype == b[name].dtype and tensor.shape == b[name].shape, name
        assert torch.equal(tensor.flatten().view(torch.uint8), b[name].flatten().view(torch.uint8)), name


def plain(value: Any) -> Any:
    """Rotary parameters without those that have defaults or follow from others."""
    if not isinstance(value, dict):
        return value
    implied = {"type", "max_position_embeddings", "beta_fast", "beta_slow", "truncate"}
    if value.get("rope_type") == "longrope":
        implied.add("factor")
    return {k: plain(v) for k, v in value.items() if k not in implied}
