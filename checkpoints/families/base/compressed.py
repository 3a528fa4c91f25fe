"""Attention to compressed keys and routing by token in files: DeepSeek-V4's names."""

from collections.abc import Iterator
from dataclasses import dataclass

from te_models.config import AttentionConfig, ModelConfig

from ...mapping.blocks import joined
from ...mapping.layout_ops import At, Layout, Rows, Stack


@dataclass(frozen=True)
class CompressedNames:
    """How files store attention to compressed keys; the defaults are published names, below `layer`."""

    query_down: str = "attn.wq_a"
    query_norm: str = "attn.q_norm"
    query_up: str = "attn.wq_b"
    key: str = "attn.wkv"
    key_norm: str = "attn.kv_norm"
    output_down: str = "attn.wo_a"
    output_up: str = "attn.wo_b"
    sinks: str = "attn.attn_sink"
    compressor: str = "attn.compressor"
    index_compressor: str = "attn.indexer.compressor"
    index_query: str = "attn.indexer.wq_b"
    index_weights: str = "attn.indexer.weights_proj"
    parts: tuple[str, str, str, str] = ("wkv", "wgate", "ape", "norm")
    hash_table: str = "ffn.gate.tid2eid"

    def attention(self, config: ModelConfig, a: AttentionConfig, at: str, ours: str) -> Iterator[tuple[str, Layout]]:
        """Yield the weight map of one layer's attention, without the norm before it."""
        its = a.compressed
        assert its is not None, "called for attention to compressed keys only"

        def weight(name: str) -> At:
            return At(f"{at}{name}.weight")

        qkv = f"{ours}linear_qkv_down.weight"
        yield qkv, joined(config, qkv, weight(self.query_down), weight(self.key))
        yield f"{ours}linear_q_up.layer_norm_weight", weight(self.query_norm)
        yield f"{ours}linear_q_up.weight", weight(self.query_up)
        yield f"{ours}kv_layernorm.weight", weight(self.key_norm)
        if a.sinks:
            yield f"{ours}core_attention.softmax_offset", At(at + self.sinks)
        down, rank, total = f"{at}{self.output_down}.weight", its.o_lora_rank, its.o_groups * its.o_lora_rank
        yield f"{ours}linear_o_down.weight", Stack(*(Rows(down, g * rank, total) for g in range(its.o_groups)))
        yield f"{ours}linear_proj.weight", weight(self.output_up)
        if its.rate is not None:
            yield from self._compressor(config, at + self.compressor, f"{ours}compressor.")
        if its.index_topk is not None:
            yield from self._compressor(config, at + self.index_compressor, f"{ours}index_compressor.")
            yield f"{ours}linear_index_q.weight", weight(self.index_query)
            yield f"{ours}index_weights.weight", weight(self.index_weights)

    def _compressor(self, config: ModelConfig, at: str, ours: str) -> Iterator[tuple[str, Layout]]:
        keys, gates, bias, norm = (f"{at}.{name}" for name in self.parts)
        yield f"{ours}position_bias", At(bias)
        first = f"{ours}linear_in.weight"
        yield first, joined(config, first, At(f"{keys}.weight"), At(f"{gates}.weight"))
        yield f"{ours}layernorm.weight", At(f"{norm}.weight")
