"""The indexer of sparse attention in files: DeepSeek-V3.2's names and fields, common to all families with an
indexer."""

from collections.abc import Iterator

from te_models.config import AttentionConfig, ModelConfig

from ...io.errors import CheckpointError
from ...mapping.layout_ops import At, Layout
from .attentions import Nested, mixers
from .fields import REQUIRED, Entry, Field, HFConfig, OwnEntry, Values, fixed, read_typed, shorten_value
from .layer_fields import check_names

SHARED = "shared"
"""The name of the attention of layers that take the choice of keys of an earlier one."""


def indexer_weights(a: AttentionConfig, at: str, ours: str) -> Iterator[tuple[str, Layout]]:
    """Yield the weight map of one layer's indexer, nothing for a layer that reuses another's."""
    if a.index_channels:
        for name, theirs in (("linear_wq_b", "wq_b"), ("linear_wk", "wk"), ("weights_proj", "weights_proj")):
            yield f"{ours}indexer.{name}.weight", At(f"{at}self_attn.indexer.{theirs}.weight")
        for kind in ("weight", "bias"):
            yield f"{ours}indexer.k_norm.{kind}", At(f"{at}self_attn.indexer.k_norm.{kind}")
        if a.indexer is not None and a.indexer.pool_size is not None:
            for name, theirs in (("linear_wgate.weight", "gate"), ("pool_bias", "ape")):
                yield f"{ours}indexer.{name}", At(f"{at}self_attn.indexer.index_kpool_compress_{theirs}")


class IndexedLayers(OwnEntry):
    """`layer_types` of a family whose layers all have an indexer, or the choice of one: it says nothing else."""

    names = ("layer_types",)

    def read(self, hf: HFConfig) -> Values:
        types = read_typed(hf, "layer_types", list, None)
        layers = read_typed(hf, "num_hidden_layers", int, REQUIRED)
        if types is not None and len(check_names(types, "layer type", ("indexed_attention",))) != layers:
            raise CheckpointError(f"config.json has {len(types)} layer_types for {layers} layers")
        return {}

    def write(self, config: ModelConfig) -> Values:
        return {"layer_types": ["indexed_attention"] * config.num_layers}


class IndexerTypes(OwnEntry):
    """`indexer_types`, "full" or "shared" for each layer; without it `index_topk_pattern` ("FS..." or a list), or every
    `index_topk_freq`-th layer from number `index_skip_topk_offset` - 1 on is full, and all before it."""

    names = ("indexer_types",)

    def read(self, hf: HFConfig, nested: Nested) -> Values:
        layers = read_typed(hf, "num_hidden_layers", int, REQUIRED)
        kinds = read_typed(hf, "indexer_types", list, None)
        pattern = hf.get("index_topk_pattern")
        if kinds is None and pattern is not None:
            if not isinstance(pattern, (str, list)):
                raise CheckpointError(f"config.json has index_topk_pattern = {shorten_value(pattern)}")
            letters = {"F": "full", "S": SHARED} if isinstance(pattern, str) else {}
            kinds = [letters.get(kind, kind) for kind in pattern]
        if kinds is None:
            every = max(read_typed(hf, "index_topk_freq", int, 1), 1)
            first = read_typed(hf, "index_skip_topk_offset", int, 2) - 1
            kinds = ["full" if max(i - first, 0) % every == 0 else SHARED for i in range(layers)]
        if len(check_names(kinds, "indexer type", ("full", SHARED))) < layers:
            raise CheckpointError(f"config.json has {len(kinds)} indexer_types for {layers} layers")
        names = [SHARED if kind == SHARED else "attention" for kind in kinds[:layers]]
        indexer = {"shared": True, "topk": nested["attention"]["indexer"]["topk"]}
        return mixers(nested, names, {SHARED: {"indexer": indexer}})

    def write(self, config: ModelConfig) -> Values:
        attentions = [config.attention_of(layer) for layer in range(config.num_layers)]
        return {"indexer_types": ["full" if a is not None and a.index_channels else SHARED for a in attentions]}


def indexer_fields(*, heads: int, rope_style: str, rotated: str = "first") -> tuple[Entry, ...]:
    """Return the fields of an indexer; the arguments are the class's defaults, and how its heads are rotated."""
    return (
        Field("index_n_heads", "attention.indexer.n_heads", int, heads),
        Field("index_head_dim", "attention.indexer.head_dim", int, 128),
        Field("index_topk", "attention.indexer.topk", int, 2048),
        *fixed({"attention.indexer.rope_style": rope_style, "attention.indexer.rotated": rotated}),
    )
