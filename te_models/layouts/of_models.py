"""Rules of layouts that follow from the model, from its pipeline stages, and from the mesh over which it was built."""

from collections.abc import Iterator

from ..config import AttentionConfig, Mamba2Config, MixerConfig
from .facts import Facts, Rule

SCHEDULES = "1F1B, GPipe, Interleaved1F1B, LoopedBFS, InterleavedZeroBubble, ZBVZeroBubble, DualPipeV"
_ENDS = ("alternating_updates", "per_layer_embedding")


def stages(f: Facts) -> Iterator[Rule]:
    """Yield the rules of pipeline stages."""
    s, key = f.stages, "parallel.pipeline_schedule"
    says = f" is {s.schedule!r}; allowed: a schedule that torch has, such as {SCHEDULES}"
    yield Rule(key, s.is_known, says=says)
    says = f" is {s.stages_per_rank} with {key} = {s.schedule!r}; allowed: {s.allowed_per_rank}"
    yield Rule("parallel.virtual_pipeline_model_parallel_size", s.has_its_stages, says=says)
    says = f" is {list(s.split)}; allowed: a number of layers, 1 or more, for each of {s.stages} stages"
    each = not s.split or (len(s.split) == s.stages and min(s.split) > 0)
    yield Rule("parallel.pipeline_split", each, says=says)
    says = f" is {s.schedule!r}; allowed with data_parallel_shard_size: 1F1B, GPipe, Interleaved1F1B and LoopedBFS, "
    says += "because FSDP2 reduces gradients when backward passes end"
    yield Rule(key, not (f.is_sharded and s.is_later), says=says)


def stages_of_run(f: Facts) -> Iterator[Rule]:
    """Yield the rules of a run with pipeline stages."""
    schedule = f.stages.schedule
    where = f"with parallel.pipeline_schedule = {schedule!r}, which computes weight gradients apart"
    yield Rule("compile", not (f.run.compile and f.stages.is_later), says=f" is True; allowed {where}: False")


def layers_on_stages(f: Facts) -> Iterator[Rule]:
    """Yield the rules of the layers of all stages."""
    s, layers = f.stages, f.num_layers
    says = f" is {s.ranks} with {s.stages_per_rank} stages each, and the model has {layers} layers; allowed: at most "
    yield Rule("parallel.pipeline_model_parallel_size", layers >= s.stages, says=says + "as many stages as layers")
    says = f" is {list(s.split)}, {sum(s.split)} layers, and the model has {layers}"
    yield Rule("parallel.pipeline_split", not s.split or sum(s.split) == layers, says=says)


def stages_of_shared_blocks(f: Facts) -> Iterator[Rule]:
    """Yield the rules of pipeline stages whose layers share blocks, which every stage has."""
    s, shards = f.stages, " and data_parallel_shard_size" if f.is_sharded else ""
    alone = f.model.shared_blocks is None or s.stages_per_rank == 1
    says = f": {s.stages_per_rank} stages of a rank share blocks; allowed with parallel.pipeline_schedule = "
    says += f"{s.schedule!r}{shards}: a model that shares none, or 1F1B and GPipe"
    yield Rule("shared_blocks", alone or not (f.is_sharded or s.is_later), says=says)


def model(f: Facts) -> Iterator[Rule]:
    """Yield the rules of a model and the ranks that share it."""
    config, moe, deepep = f.model, f.model.moe, "with expert_dispatch 'deepep'"
    says = " is None: a model without experts has none to "
    yield Rule("moe", moe is not None or not f.distributed, says=says + "distribute over ep_group")
    allowed = "allowed: no expert_tensor_parallel_size"
    yield Rule("moe", moe is not None or not f.apart, says=f"{says}split; {allowed}")
    where = "with expert_tensor_parallel_size"
    yield Rule("expert_layout", f.ep == 1, "'grouped'", "where experts are distributed")
    yield Rule("expert_layout", not f.apart, "'grouped'", where)
    if moe is not None:
        yield Rule("moe.moe_pad_expert_input_to_capacity", not f.apart, "False", where)
        yield Rule("moe.moe_pad_expert_input_to_capacity", not f.uses_deepep, "False", deepep)
        yield Rule("hidden_size", not f.uses_deepep or config.hidden_size % 8 == 0, "a multiple of 8", deepep)
    says = f" is {f.etp}; allowed {deepep}: 1 or tensor_model_parallel_size"
    yield Rule("expert_tensor_parallel_size", not (f.expert_dispatch == "deepep" and f.apart and f.etp > 1), says=says)
    yield Rule("vocab_size", config.vocab_size >= f.tp, f"a word or more for each of {f.tp} ranks")
    for name in ("hyper_connections", *_ENDS, "laurel_rank", "shared_blocks"):
        it = "them" if name == "hyper_connections" else "it"
        says = f": a model with {it} cannot have sequence_parallel; allowed: without it"
        yield Rule(name, not f.shares_tokens or getattr(config, name) is None, says=says)
    dropouts = {"hidden_dropout": config.hidden_dropout, "embedding.embedding_dropout": config.embedding_dropout}
    for name, p in dropouts.items():
        why = "because ranks that split layers draw the same numbers"
        says = f" is {p}; allowed with sequence_parallel: 0, {why}"
        yield Rule(name, not f.shares_tokens or not p, says=says)
    whole, cannot = f.tp == 1, f"cannot be split over {f.tp} ranks"
    says = f": a model with it, whose bounds are of all gates, {cannot}"
    yield Rule("activation_sparsity", whole or not any(config.activation_sparsity or ()), says=says)
    sizes = {"mlp.ffn_hidden_size": config.mlp.ffn_hidden_size if config.has_dense_layers else 0}
    for name, mixer in config.named_mixers().items():
        groups = _groups_in_parts(mixer, f.tp)
        sizes |= {f"{name}.{field}": size for field, size in mixer.shared_sizes().items() if field != groups}
        if not isinstance(mixer, AttentionConfig):
            continue
        known = mixer.qk_layernorm != "full" or config.norm.normalization == "RMSNorm"
        yield Rule(f"{name}.qk_layernorm", whole or known, says=f": a model with a LayerNorm over all heads {cannot}")
        says = f": a model with it, of one key head, {cannot}"
        yield Rule(f"{name}.compressed", whole or mixer.compressed is None, says=says)
        over_heads, ranks = mixer.qk_layernorm in ("each_head", "full"), f"{f.tp} ranks"
        says = f" is {mixer.qk_layernorm!r}; allowed where {ranks} share {mixer.key_value_sizes[0]} num_query_groups: "
        yield Rule(f"{name}.qk_layernorm", not (groups and over_heads), says=says + "'none', 'head' or 'l2'")
    sizes["moe.shared_expert_intermediate_size"] = (moe and moe.shared_expert_intermediate_size) or 0
    sizes |= {f"ffn_hidden_sizes[{i}]": size for i, size in enumerate(config.ffn_hidden_sizes or ())}
    shared = [(name, size, f.tp) for name, size in sizes.items()]
    if moe is not None:
        shared += [("moe.moe_ffn_hidden_size", moe.moe_ffn_hidden_size, f.etp)]
        shared += [("moe.num_moe_experts", moe.num_moe_experts, f.ep)]
    for name, size, ranks in shared:
        yield Rule(name, size % ranks == 0, says=f" is {size}, which {ranks} ranks cannot share equally")


def _groups_in_parts(mixer: MixerConfig, ranks: int) -> str | None:
    """Return the field of groups, fewer than the ranks that split a layer, of each of which several ranks have equally
    many rows; None where each rank has whole groups, or cannot have parts of them."""
    if isinstance(mixer, AttentionConfig):
        field, groups, *channels = "num_query_groups", *mixer.key_value_sizes
    elif isinstance(mixer, Mamba2Config):
        field, groups, *channels = "num_groups", mixer.num_groups, mixer.state_size
    else:
        return None
    latent = isinstance(mixer, AttentionConfig) and mixer.mla is not None
    divides = ranks > groups and ranks % groups == 0 and all(groups * size % ranks == 0 for size in channels)
    return field if divides and not latent else None


def shared_sequences(f: Facts) -> Iterator[Rule]:
    """Yield the rules of ranks that share sequences and reach each other's keys in another way than by gathering."""
    way = None if f.cp == 1 or f.cp_comm_type == "all_gather" else f.cp_comm_type
    for name, mixer in f.model.named_mixers().items():
        if not isinstance(mixer, AttentionConfig):
            continue
        says = f": an indexer scores all keys for a query; allowed with cp_comm_type {f.cp_comm_type!r}: attention "
        yield Rule(f"{name}.indexer", way is None or mixer.indexer is None, says=says + "without one")
        says = f" is {mixer.attention_dropout}; allowed with cp_comm_type 'p2p': 0"
        yield Rule(f"{name}.attention_dropout", way != "p2p" or mixer.attention_dropout == 0, says=says)
        heads = mixer.num_attention_heads // f.tp
        says = f" is {mixer.num_attention_heads}"
        says += "" if f.tp == 1 else f", {heads} on each of {f.tp} ranks that split layers"
        says += f"; allowed with cp_comm_type 'a2a': a multiple of the {f.cp} ranks"
        yield Rule(f"{name}.num_attention_heads", way != "a2a" or heads % f.cp == 0, says=says)


def model_of_run(f: Facts) -> Iterator[Rule]:
    """Yield the rules of a run with a model."""
    moe = f.model.moe
    beside = moe is not None and moe.shared_expert_intermediate_size is not None and not moe.own_norms
    allowed = "a model with moe.shared_expert_intermediate_size, without moe.own_norms"
    yield Rule("parallel.moe_shared_expert_overlap", beside, allowed)
    attentions = [mixer for mixer in f.model.named_mixers().values() if isinstance(mixer, AttentionConfig)]
    joint = any(a.mla is not None and a.mla.q_lora_rank is None for a in attentions)
    clips = f.run.optimizer.qk_clip_threshold is not None
    says = f" is {f.tp}; allowed with optimizer.qk_clip_threshold: 1, because every rank has the queries of all heads "
    says += "(attention.mla.q_lora_rank is unset)"
    yield Rule("parallel.tensor_model_parallel_size", f.tp == 1 or not (clips and joint), says=says)
    in_parts = any(_groups_in_parts(attention, f.tp) for attention in attentions)
    says = " is more than attention.num_query_groups; allowed with optimizer.qk_clip_threshold: as many at most, "
    says += "because a rank has a part of a head's rows"
    yield Rule("parallel.tensor_model_parallel_size", not (clips and in_parts), says=says)


def layers_of_stage(f: Facts) -> Iterator[Rule]:
    """Yield the rules of the layers of one stage."""
    config, moe, layers = f.model, f.model.moe, f.layers
    whole = len(layers) == config.num_layers
    joint = moe is not None and moe.moe_router_load_balancing_type == "joint_aux_loss" and moe.aux_loss_coeff > 0
    says = " is 'joint_aux_loss', which compares experts over all layers; allowed in a stage: 'aux_loss', "
    says += "'seq_aux_loss', 'global_aux_loss', or moe.aux_loss_coeff = 0"
    yield Rule("moe.moe_router_load_balancing_type", whole or not joint, says=says)
    chooses: int | None = None
    for layer in range(config.num_layers):
        attention = config.attention_of(layer)
        indexer = None if attention is None else attention.indexer
        if indexer is not None and not indexer.shared:
            chooses = layer
        elif indexer is not None and layer in layers:
            says = f" with layer {layer}, which shares the choice of keys of layer {chooses}; allowed in a stage: with "
            yield Rule("a stage is asked for", chooses in layers, says=says + "that one")
    says = ": a model with layers that read the tokens cannot be cut into stages"
    yield Rule("moe.hash_layers", whole or moe is None or not moe.hash_layers, says=says)
    for name in _ENDS:
        says = ": a model with it, both of whose ends read it, cannot be cut into stages"
        yield Rule(name, whole or getattr(config, name) is None, says=says)
    for source in {config.kv_source(layer) for layer in layers} - {None}:
        says = f" has {source}, which is in another stage than a layer that reads its keys; allowed: stages with both"
        yield Rule("kv_source_layers", source in layers, says=says)


def mesh(f: Facts) -> Iterator[Rule]:
    """Yield the rules of a model and the mesh over which it was built."""
    for name, built in f.built.items():
        size = getattr(f.dims, name)
        says = f" of the mesh is {size}, and the model was built over {built}; allowed: the groups of mesh.model_groups"
        yield Rule(name, size == built, says=says)
