"""deepseek_v4: one head that is key and value, a window and compressed keys, hyper-connections, experts by token in the
first layers (DeepSeek-V4)."""

from dataclasses import replace

from te_models.config import AttentionConfig, ModelConfig, RopeConfig

from ..io.errors import CheckpointError
from .base.attentions import Nested, mixers
from .base.common import HeadDim, decoder_fields
from .base.compressed import CompressedNames
from .base.family import Family
from .base.fields import (
    REQUIRED,
    Choice,
    Field,
    Fixed,
    HFConfig,
    OneOf,
    Only,
    OwnEntry,
    Values,
    fixed,
    read_typed,
    shorten_value,
)
from .base.layer_fields import check_names
from .base.moe_fields import RouterLoss, expert_sizes
from .base.names import Fused, Names, PerExpert
from .base.rope import Rope, check_nested
from .base.unused import Unused

_TYPES = {
    "sliding_attention": "attention",
    "compressed_sparse_attention": "sparse",
    "heavily_compressed_attention": "heavy",
}
_RATES = {"compressed_sparse_attention": 4, "heavily_compressed_attention": 128}
_RATIOS = {0: "sliding_attention", 4: "compressed_sparse_attention", 128: "heavily_compressed_attention"}
_OLDER = {"compressed_sparse_attention": "compress_rate_csa", "heavily_compressed_attention": "compress_rate_hca"}
_HASHED = 3
_WIDTH = ("moe_intermediate_size", "intermediate_size")


class CompressedLayers(OwnEntry):
    """What the queries of each layer see, by `layer_types` and `compress_rates`, or `compress_ratios` of each layer (0,
    4 or 128), as published; the two rotary embeddings, of layers with compressed keys and of those without; and the
    layers whose experts a table chooses, by `mlp_layer_types`, or the first `num_hash_layers`."""

    names = (
        "layer_types",
        "compress_rates",
        "compress_ratios",
        *_OLDER.values(),
        "mlp_layer_types",
        "num_hash_layers",
        "rope_theta",
        "compress_rope_theta",
        "rope_parameters",
        "rope_scaling",
        "partial_rotary_factor",
        "qk_rope_head_dim",
        "index_n_heads",
        "index_head_dim",
        "index_topk",
    )

    def read(self, hf: HFConfig, nested: Nested) -> Values:
        layers, rates = read_typed(hf, "num_hidden_layers", int, REQUIRED), self._rates(hf)
        kinds = self._kinds(hf, layers)
        ropes = {name: {**rope, "style": "interleaved"} for name, rope in self._ropes(hf, nested).items()}
        shared = {"rate": rates["compressed_sparse_attention"], "overlap": True}
        for name, default in (("index_n_heads", 64), ("index_head_dim", 128), ("index_topk", 512)):
            shared[name] = read_typed(hf, name, int, default)
        base = nested["attention"]["compressed"]
        changes = {
            "sparse": {"compressed": base | shared, "rope": ropes["compress"]},
            "heavy": {"compressed": base | {"rate": rates["heavily_compressed_attention"]}, "rope": ropes["compress"]},
        }
        moe = dict(nested["moe"]) | {"hash_layers": self._hashed(hf, layers)}
        types = ["sliding" if kind == "sliding_attention" else "full" for kind in kinds]
        found = mixers(nested, [_TYPES[kind] for kind in kinds], changes)
        return {"layer_types": types, "rope": ropes["main"], "moe": moe} | found

    @staticmethod
    def _rates(hf: HFConfig) -> dict[str, int]:
        said = hf.get("compress_rates") or {}
        if not isinstance(said, dict) or not set(said) <= set(_RATES):
            raise CheckpointError(
                f"config.json has compress_rates = {shorten_value(said)}; allowed: {', '.join(_RATES)}"
            )
        rates = {kind: read_typed(said, kind, int, default) for kind, default in _RATES.items()}
        return {kind: read_typed(hf, older, int, rates[kind]) for kind, older in _OLDER.items()}

    @staticmethod
    def _kinds(hf: HFConfig, layers: int) -> list[str]:
        kinds, ratios = read_typed(hf, "layer_types", list, None), read_typed(hf, "compress_ratios", list, None)
        if kinds is None and ratios is not None:
            kinds = [_RATIOS[ratio] for ratio in check_names(ratios, "compress ratio", _RATIOS)]  # type: ignore[index, arg-type]
        if kinds is None:
            others = [_RATIOS[4] if i % 2 else _RATIOS[128] for i in range(max(layers - 2, 0))]
            kinds = [_RATIOS[128]] * min(layers, 2) + others
        if len(check_names(kinds, "layer type", _TYPES)) < layers:
            raise CheckpointError(f"config.json has {len(kinds)} layer_types and {layers} layers")
        return kinds[:layers]

    @staticmethod
    def _hashed(hf: HFConfig, layers: int) -> list[int]:
        kinds = read_typed(hf, "mlp_layer_types", list, None)
        if kinds is None:
            return list(range(min(layers, max(read_typed(hf, "num_hash_layers", int, _HASHED), 0))))
        if len(check_names(kinds, "MLP kind", ("hash_moe", "moe"))) < layers:
            raise CheckpointError(f"config.json has {len(kinds)} mlp_layer_types and {layers} layers")
        return [i for i, kind in enumerate(kinds[:layers]) if kind == "hash_moe"]

    @staticmethod
    def _ropes(hf: HFConfig, nested: Nested) -> dict[str, Values]:
        said = hf.get("rope_scaling") or hf.get("rope_parameters") or {}
        if not isinstance(said, dict):
            raise CheckpointError(f"config.json has rope parameters that are not an object: {shorten_value(said)}")
        size, partial = nested["attention"]["kv_channels"], hf.get("partial_rotary_factor")
        if partial is None and hf.get("qk_rope_head_dim") is not None:
            partial = read_typed(hf, "qk_rope_head_dim", int, None) / size
        usual = (
            0.125
            if partial is None
            else read_typed({"partial_rotary_factor": partial}, "partial_rotary_factor", float, 0)
        )
        bases = {"main": read_typed(hf, "rope_theta", float, 1e4)}
        bases["compress"] = read_typed(hf, "compress_rope_theta", float, 1.6e5)
        both = all(isinstance(said.get(name), dict) for name in bases)
        parameters = {name: said[name] for name in bases} if both else {"main": {}, "compress": said}
        found = {}
        for name, values in parameters.items():
            values = (
                values if both else {k: v for k, v in values.items() if k not in ("rope_theta", "main", "compress")}
            )
            outside = {} if both else {"rope_theta": bases[name], "partial_rotary_factor": usual}
            kind = values.get("rope_type", values.get("type", "default"))
            if kind == "yarn" and not both:
                values = {"attention_factor": 1.0, **values}
            rope = Rope(1e4, partial=1.0, types=("default", "yarn"))
            check_nested(values)
            lengths = {n: hf[n] for n in ("max_position_embeddings",) if n in hf}
            found[name] = rope.rope_fields({"max_position_embeddings": 1048576} | lengths, values, outside)
        return found

    def write(self, config: ModelConfig) -> Values:
        found = {value: key for key, value in _TYPES.items()}
        names = config.layer_mixers or ("attention",) * config.num_layers
        kinds, rates = [found.get(name, name) for name in names], dict(_RATES)
        values: Values = {}
        compress: RopeConfig | None = None
        for name, kind in found.items():
            mixer = (config.mixers or {}).get(kind and name)
            if not isinstance(mixer, AttentionConfig) or mixer.compressed is None:
                continue
            its, compress = mixer.compressed, mixer.rope
            rates[kind] = its.rate or 0
            if its.index_topk is not None:
                values |= {"index_n_heads": its.index_n_heads, "index_head_dim": its.index_head_dim}
                values["index_topk"] = its.index_topk
        if rates == _RATES:
            ratios = {kind: ratio for ratio, kind in _RATIOS.items()}
            values["compress_ratios"] = [ratios.get(kind, kind) for kind in kinds]
        else:
            values |= {"layer_types": kinds, "compress_rates": rates}
        hashed = () if config.moe is None else config.moe.hash_layers
        if hashed == tuple(range(len(hashed))):
            values["num_hash_layers"] = len(hashed)
        else:
            values["mlp_layer_types"] = ["hash_moe" if i in hashed else "moe" for i in range(config.num_layers)]
        main = config.rope
        values["rope_parameters"] = {
            "main": Rope(partial=1.0).rope_values(main),
            "compress": Rope(partial=1.0).rope_values(compress or main),
        }
        return values | {"rope_theta": main.rotary_base, "partial_rotary_factor": main.rotary_percent}


_HUB = Names(
    embedding="embed",
    final_norm="norm",
    output="head",
    layer="layers.{i}",
    norms=("attn_norm", None, "ffn_norm", None),
    router="ffn.gate",
    selection_bias="ffn.gate.bias",
    experts=PerExpert(*(f"ffn.experts.{{e}}.w{n}" for n in (1, 3, 2))),
    shared_fc1=("ffn.shared_experts.w1", "ffn.shared_experts.w3"),
    shared_fc2="ffn.shared_experts.w2",
    compressed=CompressedNames(),
    scales="scale",
)
_SAVED = replace(
    _HUB,
    scales=None,
    form="saved",
    embedding="model.embed_tokens",
    final_norm="model.norm",
    layer="model.layers.{i}",
    final_hyper_connection="model.hc_head.hc_{part}",
    compressed=CompressedNames(key_norm="attn.norm"),
)
_INDEXER = "self_attn.compressor.indexer"
_IN_MEMORY = Names(
    form="fused",
    selection_bias="mlp.gate.e_score_correction_bias",
    experts=Fused(),
    compressed=CompressedNames(
        query_down="self_attn.q_a_proj",
        query_norm="self_attn.q_a_norm",
        query_up="self_attn.q_b_proj",
        key="self_attn.kv_proj",
        key_norm="self_attn.kv_norm",
        output_down="self_attn.o_a_proj",
        output_up="self_attn.o_b_proj",
        sinks="self_attn.sinks",
        compressor="self_attn.compressor",
        index_compressor=_INDEXER,
        index_query=f"{_INDEXER}.q_b_proj",
        index_weights=f"{_INDEXER}.scorer.weights_proj",
        parts=("kv_proj", "gate_proj", "position_bias", "kv_norm"),
        hash_table="mlp.gate.tid2eid",
    ),
    hyper_connection="{sublayer}_hc.{part}",
    final_hyper_connection="model.hc_head.hc_{part}",
)

DEEPSEEK_V4 = Family(
    model_type="deepseek_v4",
    fields=(
        *decoder_fields(
            max_positions=1048576, without=("intermediate_size", "num_key_value_heads", "head_dim", "hidden_act")
        ),
        Only("hidden_act", "silu"),
        HeadDim(512),
        Fixed("norm.cast_order", "weight_first"),
        Only("num_key_value_heads", 1),
        *fixed({"attention.num_query_groups": 1, "attention.key_is_value": True, "attention.sinks": True}),
        Only("attention_bias", False),
        Only("mlp_bias", False),
        Field("sliding_window", "attention.window_size", int, 128),
        Field("q_lora_rank", "attention.compressed.q_lora_rank", int, 1024),
        Field("o_groups", "attention.compressed.o_groups", int, 8),
        Field("o_lora_rank", "attention.compressed.o_lora_rank", int, 1024),
        Field("hc_mult", "hyper_connections.lanes", int, 4),
        Field("hc_sinkhorn_iters", "hyper_connections.sinkhorn_iterations", int, 20),
        Field("hc_eps", "hyper_connections.epsilon", float, 1e-6),
        Field("swiglu_limit", "mlp.clamp", float, 10.0),
        *expert_sizes(("n_routed_experts", "num_local_experts"), 256, 6),
        OneOf(_WIDTH, "moe.moe_ffn_hidden_size", int, 2048),
        OneOf(_WIDTH, "moe.shared_expert_intermediate_size", int, 2048),
        OneOf(_WIDTH, "mlp.ffn_hidden_size", int, 2048),
        Only("n_shared_experts", 1),
        Choice(
            "scoring_func",
            "moe.router.score",
            {name: name for name in ("sqrtsoftplus", "softmax", "sigmoid")},
            "sqrtsoftplus",
        ),
        Only("norm_topk_prob", True),  # transformers does not read it: the scores always add up to 1
        *fixed({"moe.router.expert_bias": True, "moe.router.normalize_eps": 1e-20, "moe.router.dtype": "float32"}),
        Field("routed_scaling_factor", "moe.router.scaling_factor", float, 1.5),
        RouterLoss(),
    ),
    mixers=CompressedLayers(),
    names=_HUB,
    other_names=(_SAVED, _IN_MEMORY),
    unused=Unused(("*.rotary_emb.inv_freq", "mtp.*", "model.mtp.*")),
    keeps_dtype=("*.router.expert_bias", "*_hyper_connection.*", "*.softmax_offset", "*.position_bias"),
)
