"""The names and shapes of a model's parameters, as `GPTModel` registers them and our files store them.

Legend: H hidden, V vocabulary, P positions, N query heads, G key/value heads, D head dim, F dense ffn, E experts,
I expert ffn. Every gated first projection holds its gate rows, then its up rows; `linear_qkv` holds q, then k, then v;
`linear_qkv_down` (latent attention) q or its latent, then the latent of k and v, then the rotated part of k.

A configuration decides how many tensors are expected, so a hostile one could ask for a list of 10^9 layers. The bounds
(`check_counts`, `check_held`) are far above any model. Within them the files must hold as many tensors as the layers
and experts have at least. That is compared before the first name is made: what the files hold bounds the work.
"""

import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Literal, get_args

from te_models.config import AttentionConfig, ModelConfig
from te_models.config.model import MAX_LAYERS

from ..io.boxes import Shape
from ..io.errors import CheckpointError, shorten

ExpertLayout = Literal["grouped", "per-gemm"]

EXPERT_BIAS = ".router.expert_bias"
"""How the names of biases end that choose experts: models have them in float32."""

XIELU_NUMBERS: dict[str, Shape] = {"alpha_p": (1,), "alpha_n": (1,), "beta": (), "eps": ()}
"""What the activation of an MLP learns, and what it stores beside that."""


def check_layout(layout: str) -> ExpertLayout:
    """Return `layout` if it is one; raise CheckpointError naming the choices otherwise."""
    if layout != "grouped" and layout != "per-gemm":
        raise CheckpointError(
            f"the expert layout is {layout!r}; allowed: {', '.join(map(repr, get_args(ExpertLayout)))}"
        )
    return layout


def _grouped(config: ModelConfig) -> dict[str, Shape]:
    """Return the parameters in the layout "grouped", remembered for the configuration that was asked about last: what
    opens and loads a folder asks ten times."""
    of, found = _remembered[0]
    if of() is not config:
        found = dict(_tensors(config))
        _remembered[0] = weakref.ref(config), found
    return found


_remembered: list[tuple[Callable[[], ModelConfig | None], dict[str, Shape]]] = [(lambda: None, {})]


def expected_tensors(config: ModelConfig, layout: ExpertLayout = "grouped") -> dict[str, Shape]:
    """Return the name and shape of every parameter, in model order.

    `layout` "grouped" stores the experts' weights as one `weight [E, out, in]`, "per-gemm" as `weight0`, `weight1` and
    so on, each `[out, in]`.
    """
    grouped = _grouped(config)
    if check_layout(layout) == "grouped":
        return dict(grouped)
    names: dict[str, Shape] = {}
    for name, shape in grouped.items():
        if is_expert_stack(name):
            names.update((f"{name}{g}", shape[1:]) for g in range(shape[0]))
        else:
            names[name] = shape
    return names


def shape_of(config: ModelConfig, name: str) -> Shape:
    """Return the shape of a parameter in the layout "grouped". Raises CheckpointError where the model has none of this
    name."""
    shape = _grouped(config).get(name)
    if shape is None:
        raise CheckpointError(f"this model has no parameter {name}")
    return shape


def is_expert_stack(name: str) -> bool:
    """Whether a grouped-layout name is a stack over experts, the only thing in which the layouts differ."""
    return ".mlp.experts." in name


def is_table(name: str) -> bool:
    """Whether a parameter is a table of whole numbers, int64."""
    return name.endswith(".router.expert_of_token")


def is_linear_weight(name: str) -> bool:
    """Whether a parameter is the weight of a linear layer that runs under a recipe (a router is not)."""
    return ".linear_" in name and name.rpartition(".")[2].startswith("weight")


def head_sizes(a: AttentionConfig) -> tuple[int, int, int]:
    """Return (N, G, D): query heads, key/value heads, head dimension."""
    assert a.num_query_groups is not None and a.kv_channels is not None, "a valid configuration has them filled in"
    return a.num_attention_heads, a.num_query_groups, a.kv_channels


def _tensors(config: ModelConfig) -> Iterator[tuple[str, Shape]]:
    H, V, emb = config.hidden_size, config.vocab_size, config.embedding
    yield "embedding.word_embeddings.weight", (V, H)
    if emb.position_embedding_type == "learned_absolute":
        yield "embedding.position_embeddings.weight", (config.max_position_embeddings + emb.position_offset, H)
    if emb.layernorm:
        yield from _norm(config, "embedding.layernorm.", "")
    for i in range(config.num_layers):
        yield from _layer(config, i, f"decoder.layers.{i}.")
    for b in range(0 if config.shared_blocks is None else config.shared_blocks.num_blocks):
        yield from _shared_block(config, f"decoder.shared_blocks.{b}.")
    yield from _norm(config, "decoder.final_layernorm.", "")
    if config.hyper_connections is not None and config.hyper_connections.output == "weighted":
        yield from _hyper_connection(config, "decoder.final_hyper_connection.", output=True)
    if config.alternating_updates is not None:
        for end in ("in", "out"):
            for lane in range(config.alternating_updates.lanes - 1):
                yield f"decoder.lane_projections.linear_{end}.{lane}.weight", (H, H)
    if config.per_layer_embedding is not None and config.norm.has_weight:
        yield "decoder.per_layer_layernorm.weight", (config.per_layer_embedding.channels,)
    if not emb.share_embeddings_and_output_weights:
        yield "output_layer.weight", (V, H)
    if emb.output_bias:
        yield "output_layer.bias", (V,)
    for k in range(config.mtp_num_layers):
        p = f"mtp.layers.{k}."
        for norm in ("enorm.", "hnorm."):
            yield from _norm(config, p + norm, "")
        yield f"{p}eh_proj.weight", (H, 2 * H)
        yield from _layer(config, config.num_layers - 1, f"{p}transformer_layer.")
        yield from _norm(config, f"{p}final_layernorm.", "")


def _layer(config: ModelConfig, i: int, p: str) -> Iterator[tuple[str, Shape]]:
    """A layer of the kind of number `i`, whose names begin with `p`."""
    attention, mixer, after = config.attention_of(i), config.mixer_of(i), config.norms_after(i)
    apart = config.has_input_layernorm(i)
    shares = config.shared_block_of(i) is not None
    if shares:
        yield from _shared_use(config, i, f"{p}shared_use.")
    if apart:
        yield from _norm(config, f"{p}input_layernorm.", "")
    if attention is not None and not shares:
        normed = config.norms_before(i) and not apart
        if attention.compressed is not None:
            yield from _compressed_attention(config, attention, f"{p}self_attention.")
        elif attention.mla is None:
            yield from _attention(config, attention, p, normed, own_keys=config.kv_source(i) is None)
        else:
            yield from _latent_attention(config, attention, p, normed)
    for its in () if mixer is None else mixer.parameters(config.hidden_size):
        yield f"{p}mixer.{its.name}", its.shape
    if after and (attention or mixer):
        yield from _norm(config, f"{p}post_self_attn_layernorm.", "")
    if config.has_mlp(i):
        moe = config.moe if config.is_moe_layer(i) else None
        if config.norms_before(i) and not (moe is not None and moe.own_norms):
            place = ("mlp.linear_fc1.", "layer_norm_") if moe is None else ("pre_mlp_layernorm.", "")
            yield from _norm(config, p + place[0], place[1])
        yield from _dense(config, i, p) if moe is None else _experts(config, i, p)
        if after or (moe is not None and moe.post_layernorm):
            yield from _norm(config, f"{p}post_mlp_layernorm.", "")
    yield from _additions(config, p)
    if config.hyper_connections is not None:
        for there, sublayer in ((config.mixer_names(i), "self_attention"), (config.has_mlp(i), "mlp")):
            if there:
                yield from _hyper_connection(config, f"{p}{sublayer}_hyper_connection.")


def _shared_block(config: ModelConfig, p: str) -> Iterator[tuple[str, Shape]]:
    shared = config.shared_blocks
    attention = None if shared is None else config.attention_of(shared.layers[0])
    assert shared is not None and attention is not None, "checked by the configuration"
    wide = config.replace(hidden_size=2 * config.hidden_size)
    yield from _norm(wide, f"{p}input_layernorm.", "")
    for name, shape in _attention(wide, attention, p, False, own_keys=True):
        yield name, (config.hidden_size, *shape[1:]) if ".linear_proj." in name else shape
    yield from _norm(config, f"{p}pre_mlp_layernorm.", "")
    yield from _dense(config, shared.layers[0], p)


def _shared_use(config: ModelConfig, layer: int, p: str) -> Iterator[tuple[str, Shape]]:
    shared, attention, H = config.shared_blocks, config.attention_of(layer), config.hidden_size
    assert shared is not None and attention is not None, "checked by the configuration"
    rank = shared.lora_rank
    if shared.attention_lora:
        yield f"{p}qkv_down.weight", (3 * rank, 2 * H)
        for number, rows in enumerate(attention.qkv_rows()):
            yield f"{p}qkv_up.{number}.weight", (rows, rank)
    yield f"{p}fc1_down.weight", (rank, H)
    yield f"{p}fc1_up.weight", (config.mlp.ffn_hidden_size * (2 if config.mlp.gated else 1), rank)
    yield f"{p}linear_out.weight", (H, H)


def _additions(config: ModelConfig, p: str) -> Iterator[tuple[str, Shape]]:
    """What a layer adds to the residual stream beside its mixers and its MLP."""
    H, rank, updates, embedding = (
        config.hidden_size,
        config.laurel_rank,
        config.alternating_updates,
        config.per_layer_embedding,
    )
    if rank is not None:
        yield f"{p}laurel.linear_left.weight", (rank, H)
        yield f"{p}laurel.linear_right.weight", (H, rank)
        yield from _norm(config, f"{p}laurel.layernorm.", "")
    if updates is not None:
        M = updates.lanes
        yield f"{p}alternating_updates.router", (M, H)
        yield f"{p}alternating_updates.prediction", (M * M, M)
        yield f"{p}alternating_updates.correction", (M, M)
        yield f"{p}alternating_updates.scale", (H,)
        yield from _norm(config, f"{p}alternating_updates.layernorm.", "")
    if embedding is not None:
        C = embedding.channels
        yield f"{p}per_layer_embedding.weight", (embedding.vocab_size, C)
        yield f"{p}per_layer_embedding.linear_in.weight", (C, H)
        yield f"{p}per_layer_embedding.linear_gate.weight", (C, H)
        yield f"{p}per_layer_embedding.linear_proj.weight", (H, C)
        yield from _norm(config, f"{p}per_layer_embedding.layernorm.", "")
    if config.layer_scalar:
        yield f"{p}layer_scalar.value", (1,)


def _hyper_connection(config: ModelConfig, p: str, *, output: bool = False) -> Iterator[tuple[str, Shape]]:
    assert config.hyper_connections is not None, "called for models with several lanes only"
    lanes = config.hyper_connections.lanes
    rows, scales = (lanes, 1) if output else (lanes * (2 + lanes), 3)
    yield f"{p}weight", (rows, config.stream_size)
    yield f"{p}bias", (rows,)
    yield f"{p}scale", (scales,)


def _norm(config: ModelConfig, owner: str, prefix: str) -> Iterator[tuple[str, Shape]]:
    if config.norm.has_weight:
        yield f"{owner}{prefix}weight", (config.hidden_size,)
    if config.norm.bias:
        yield f"{owner}{prefix}bias", (config.hidden_size,)


def _attention(
    config: ModelConfig, a: AttentionConfig, p: str, normed: bool, *, own_keys: bool
) -> Iterator[tuple[str, Shape]]:
    H, (N, G, D) = config.hidden_size, head_sizes(a)
    Dv, rows = a.value_channels, sum(a.qkv_rows(own_keys=own_keys))
    if normed:
        yield from _norm(config, f"{p}self_attention.linear_qkv.", "layer_norm_")
    yield f"{p}self_attention.linear_qkv.weight", (rows, H)
    if a.has_bias_apart:
        yield f"{p}self_attention.qkv_bias", (rows - a.gate_rows,)
    elif a.add_qkv_bias:
        yield f"{p}self_attention.linear_qkv.bias", (rows,)
    if a.qk_layernorm in ("head", "each_head", "full"):
        for norm, heads in (("q_layernorm", N), ("k_layernorm", G))[: 1 + own_keys]:
            for kind in ("weight", "bias") if a.qk_layernorm_bias else ("weight",):
                yield f"{p}self_attention.{norm}.{kind}", (D if a.qk_layernorm == "head" else heads * D,)
    if a.sinks:
        yield f"{p}self_attention.core_attention.softmax_offset", (N,)
    if a.has_head_gate:
        yield f"{p}self_attention.head_gate.weight", (N, H)
    yield f"{p}self_attention.linear_proj.weight", (H, N * Dv)
    if a.add_output_bias:
        yield f"{p}self_attention.linear_proj.bias", (H,)
    yield from _indexer(config, a, H, f"{p}self_attention.indexer.")


def _compressed_attention(config: ModelConfig, a: AttentionConfig, p: str) -> Iterator[tuple[str, Shape]]:
    its, H, N, D = a.compressed, config.hidden_size, a.num_attention_heads, a.key_channels
    assert its is not None, "called for attention to compressed keys only"
    yield f"{p}linear_qkv_down.weight", (its.q_lora_rank + D, H)
    yield f"{p}linear_q_up.layer_norm_weight", (its.q_lora_rank,)
    yield f"{p}linear_q_up.weight", (N * D, its.q_lora_rank)
    yield f"{p}kv_layernorm.weight", (D,)
    if a.sinks:
        yield f"{p}core_attention.softmax_offset", (N,)
    yield f"{p}linear_o_down.weight", (its.o_groups, its.o_lora_rank, N * D // its.o_groups)
    yield f"{p}linear_proj.weight", (H, its.o_groups * its.o_lora_rank)
    sizes = {} if its.rate is None else {"compressor": D}
    sizes |= {} if its.index_topk is None else {"index_compressor": its.index_head_dim}
    for name, size in sizes.items():
        yield f"{p}{name}.position_bias", (its.rate or 0, its.series * size)
        yield f"{p}{name}.linear_in.weight", (2 * its.series * size, H)
        yield f"{p}{name}.layernorm.weight", (size,)
    if its.index_topk is not None:
        yield f"{p}linear_index_q.weight", (its.index_n_heads * its.index_head_dim, its.q_lora_rank)
        yield f"{p}index_weights.weight", (its.index_n_heads, H)


def _indexer(config: ModelConfig, a: AttentionConfig, inputs: int, p: str) -> Iterator[tuple[str, Shape]]:
    """inputs: channels of what index queries are projected from."""
    indexer = a.indexer
    if indexer is not None and a.index_channels:
        size = indexer.head_dim
        yield f"{p}linear_wq_b.weight", (indexer.n_heads * size, inputs)
        yield f"{p}linear_wk.weight", (size, config.hidden_size)
        yield f"{p}k_norm.weight", (size,)
        yield f"{p}k_norm.bias", (size,)
        yield f"{p}weights_proj.weight", (indexer.n_heads, config.hidden_size)
        if indexer.pool_size is not None:
            yield f"{p}linear_wgate.weight", (size, config.hidden_size)
            yield f"{p}pool_bias", (indexer.pool_size, size)


def _latent_attention(config: ModelConfig, a: AttentionConfig, p: str, normed: bool) -> Iterator[tuple[str, Shape]]:
    mla, N, H = a.mla, a.num_attention_heads, config.hidden_size
    assert mla is not None, "called for latent attention only"
    ours, qk = f"{p}self_attention.", mla.qk_head_dim + mla.qk_pos_emb_head_dim
    rows = (mla.q_lora_rank or N * qk) + mla.kv_lora_rank + mla.qk_pos_emb_head_dim
    if normed:
        yield from _norm(config, f"{ours}linear_qkv_down.", "layer_norm_")
    yield f"{ours}linear_qkv_down.weight", (rows, H)
    if a.add_qkv_bias and mla.q_lora_rank is not None:
        yield f"{ours}linear_qkv_down.bias", (rows,)
    elif a.add_qkv_bias:
        yield f"{ours}latent_bias", (mla.kv_lora_rank + mla.qk_pos_emb_head_dim,)
    if mla.q_lora_rank is not None:
        yield f"{ours}linear_q_up.layer_norm_weight", (mla.q_lora_rank,)
        yield f"{ours}linear_q_up.weight", (N * qk, mla.q_lora_rank)
    yield f"{ours}linear_kv_up.layer_norm_weight", (mla.kv_lora_rank,)
    yield f"{ours}linear_kv_up.weight", (N * (mla.qk_head_dim + mla.v_head_dim), mla.kv_lora_rank)
    if a.has_head_gate:
        yield f"{ours}head_gate.weight", (N, H)
    yield f"{ours}linear_proj.weight", (H, N * mla.v_head_dim)
    if a.add_output_bias:
        yield f"{ours}linear_proj.bias", (H,)
    yield from _indexer(config, a, mla.q_lora_rank or H, f"{ours}indexer.")


def _dense(config: ModelConfig, i: int, p: str) -> Iterator[tuple[str, Shape]]:
    m, H = config.mlp, config.hidden_size
    rows = config.ffn_hidden_size(i) * (2 if m.gated else 1)
    yield f"{p}mlp.linear_fc1.weight", (rows, H)
    if m.bias:
        yield f"{p}mlp.linear_fc1.bias", (rows,)
    if m.activation == "xielu":
        yield from ((f"{p}mlp.xielu.{name}", shape) for name, shape in XIELU_NUMBERS.items())
    yield f"{p}mlp.linear_fc2.weight", (H, config.ffn_hidden_size(i))
    if m.bias:
        yield f"{p}mlp.linear_fc2.bias", (H,)


def _experts(config: ModelConfig, i: int, p: str) -> Iterator[tuple[str, Shape]]:
    moe, H = config.moe, config.hidden_size
    assert moe is not None, "called for MoE layers only"
    E, I, gates = moe.num_moe_experts, moe.moe_ffn_hidden_size, 2 if config.mlp.gated else 1
    if moe.own_norms:
        for own in ("pre_shared", "post_shared", "pre_experts", "post_experts"):
            yield from _norm(config, f"{p}mlp.{own}_layernorm.", "")
    yield f"{p}mlp.router.weight", (E, H)
    if moe.router.linear_bias:
        yield f"{p}mlp.router.bias", (E,)
    if moe.router.normed_input:
        yield f"{p}mlp.router.norm_weight", (H,)
    if moe.router.expert_scale:
        yield f"{p}mlp.router.expert_scale", (E,)
    if i in moe.hash_layers:
        yield f"{p}mlp.router.expert_of_token", (config.vocab_size, moe.moe_router_topk)
    elif moe.router.expert_bias:
        yield f"{p}mlp{EXPERT_BIAS}", (E,)
    L = moe.moe_latent_size or H
    if moe.moe_latent_size is not None:
        for name, rows, columns in (("fc1", L, H), ("fc2", H, L)):
            yield f"{p}mlp.{name}_latent_proj.weight", (rows, columns)
            if config.mlp.bias:
                yield f"{p}mlp.{name}_latent_proj.bias", (rows,)
    yield f"{p}mlp.experts.linear_fc1.weight", (E, gates * I, L)
    if moe.bias:
        yield f"{p}mlp.experts.linear_fc1.bias", (E, gates * I)
    yield f"{p}mlp.experts.linear_fc2.weight", (E, L, I)
    if moe.bias:
        yield f"{p}mlp.experts.linear_fc2.bias", (E, L)
    shared = moe.shared_expert_intermediate_size
    if shared is not None:
        yield f"{p}mlp.shared_experts.linear_fc1.weight", (gates * shared, H)
        if config.mlp.bias:
            yield f"{p}mlp.shared_experts.linear_fc1.bias", (gates * shared,)
        yield f"{p}mlp.shared_experts.linear_fc2.weight", (H, shared)
        if config.mlp.bias:
            yield f"{p}mlp.shared_experts.linear_fc2.bias", (H,)
        if moe.shared_expert_gate:
            yield f"{p}mlp.shared_experts.gate_weight", (1, H)


MAX_EXPERTS = 100_000
"""Experts in all layers; 384 in 60 layers are 23,040."""
_PER_SUBLAYER = 2
"""Tensors that every sublayer has, in any form."""
_PER_EXPERT = 2
MAX_STRANGERS = 20_000
"""Tensors that a model does not use, such as layers that predict further tokens: 256 experts with scales are 1,536."""


def check_counts(layers: object, experts: object = None) -> None:
    """Raise CheckpointError if a configuration claims more layers, or experts in all layers, than any model has."""
    if isinstance(layers, int) and layers > MAX_LAYERS:
        raise CheckpointError(f"the configuration claims {_short(layers)} layers; at most {MAX_LAYERS} are supported")
    if isinstance(layers, int) and isinstance(experts, int) and layers * experts > MAX_EXPERTS:
        raise CheckpointError(
            f"the configuration claims {_short(experts)} experts in {layers} layers; at most {MAX_EXPERTS} in all"
        )


def check_held(config: ModelConfig, held: int, where: str, *, experts_apart: bool) -> None:
    """Raise CheckpointError if the files hold fewer tensors than the layers of the model have at least.

    held: how many. experts_apart: every expert has separate tensors.
    """
    layers = range(config.num_layers)
    least = _PER_SUBLAYER * sum(bool(config.mixer_names(i)) + config.has_mlp(i) for i in layers)
    if held < least:
        raise CheckpointError(
            f"the tensors of {where} do not fit its configuration: it claims {config.num_layers} layers, which have "
            f"{least / config.num_layers:g} tensors each at least, and the files hold {held}"
        )
    if experts_apart and not holds_experts(config, held):
        assert config.moe is not None, "only experts can be missing here"
        raise CheckpointError(
            f"the tensors of {where} do not fit its configuration: it claims {config.moe.num_moe_experts} experts in a "
            f"layer, which have {_PER_EXPERT} tensors each at least, and the files hold {held}"
        )


def holds_experts(config: ModelConfig, held: int) -> bool:
    """Whether `held` tensors are enough for a model with one set of tensors per expert."""
    if config.moe is None:
        return True
    layers = config.num_layers if config.moe.layers is None else len(config.moe.layers)
    return held >= _PER_EXPERT * layers * config.moe.num_moe_experts


def check_strangers(names: Sequence[str], where: str) -> None:
    """Raise CheckpointError if there are more tensors outside of the configuration than any model has."""
    if len(names) > MAX_STRANGERS:
        raise CheckpointError(
            f"the tensors of {where} do not fit its configuration: not part of this model: {shorten(names)}"
        )


def _short(number: int) -> str:
    return str(number) if number < 10**18 else "more than 10^18"
