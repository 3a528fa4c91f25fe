"""The model shapes that the benchmarks run, as Hugging Face configurations: llama-shaped and mixtral-shaped (MoE)."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch


@dataclass(frozen=True)
class Shape:
    """One model and the batch it is trained on. `experts` 0 is dense; otherwise top 2 of `experts`."""

    name: str
    hidden: int
    layers: int
    ffn: int
    batch: int
    sequence: int
    experts: int = 0
    head_dim: int = 64
    vocab: int = 8192

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"tokens": self.batch * self.sequence}

    def hugging_face_config(self) -> Any:
        """Return a LlamaConfig or MixtralConfig, grouped-query attention with two query heads per key head."""
        import transformers

        heads = self.hidden // self.head_dim
        common = {
            "vocab_size": self.vocab,
            "hidden_size": self.hidden,
            "intermediate_size": self.ffn,
            "num_hidden_layers": self.layers,
            "num_attention_heads": heads,
            "num_key_value_heads": heads // 2,
            "head_dim": self.head_dim,
            "max_position_embeddings": self.sequence,
            "tie_word_embeddings": False,
            "use_cache": False,
        }
        if not self.experts:
            return transformers.LlamaConfig(**common)
        return transformers.MixtralConfig(**common, num_local_experts=self.experts, num_experts_per_tok=2)

    def write_random_model(self, folder: Path) -> None:
        """Save a bf16 Hugging Face model with seeded random weights, which both sides load."""
        import transformers

        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(self.hugging_face_config(), dtype=torch.bfloat16)
        model.save_pretrained(folder)

    def input_ids(self) -> torch.Tensor:
        """Return a seeded random batch [B, S]."""
        generator = torch.Generator().manual_seed(1)
        return torch.randint(self.vocab, (self.batch, self.sequence), generator=generator)


@dataclass(frozen=True)
class HybridShape(Shape):
    """qwen3_next-shaped, without experts: a layer of attention after every `interval` - 1 of the gated delta rule,
    whose heads have as many channels, and twice as many values as keys."""

    interval: int = 4

    def hugging_face_config(self) -> Any:
        """Return a Qwen3NextConfig."""
        import transformers

        heads = self.hidden // self.head_dim
        return transformers.Qwen3NextConfig(
            vocab_size=self.vocab,
            hidden_size=self.hidden,
            intermediate_size=self.ffn,
            num_hidden_layers=self.layers,
            num_attention_heads=heads,
            num_key_value_heads=heads // 2,
            head_dim=self.head_dim,
            linear_num_key_heads=heads // 2,
            linear_num_value_heads=heads,
            linear_key_head_dim=self.head_dim,
            linear_value_head_dim=self.head_dim,
            mlp_only_layers=[*range(self.layers)],
            full_attention_interval=self.interval,
            max_position_embeddings=self.sequence,
            use_cache=False,
        )


DENSE = (
    Shape("llama-512", hidden=512, layers=4, ffn=1408, batch=2, sequence=256),
    Shape("llama-1024", hidden=1024, layers=2, ffn=2816, batch=2, sequence=512),
)
MOE = (
    Shape("mixtral-512", hidden=512, layers=2, ffn=768, experts=8, batch=2, sequence=256),
    Shape("mixtral-1024", hidden=1024, layers=2, ffn=1408, experts=8, batch=2, sequence=512),
)
# One layer: seven graphs are compiled for each shape.
RECIPES = (
    Shape("llama-256", hidden=256, layers=1, ffn=704, batch=2, sequence=256),
    Shape("llama-512", hidden=512, layers=1, ffn=1408, batch=2, sequence=256),
    Shape("llama-1024", hidden=1024, layers=1, ffn=2816, batch=2, sequence=512),
    Shape("llama-2048", hidden=2048, layers=1, ffn=5632, batch=1, sequence=512),
)
