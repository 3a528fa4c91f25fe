"""Rules of layouts that follow from the configuration of a run, and from the number of ranks."""

from collections.abc import Iterator
from typing import get_args

from .facts import REST, ExpertDispatch, ExpertLayout, Facts, Rule


def choices(f: Facts) -> Iterator[Rule]:
    """Yield the rules of what is one of several words."""
    for name, words in {"expert_layout": ExpertLayout, "expert_dispatch": ExpertDispatch}.items():
        yield Rule(name, getattr(f, name) in get_args(words), ", ".join(map(repr, get_args(words))))


def positive_sizes(f: Facts) -> Iterator[Rule]:
    """Yield the rules that no number of ranks could make right."""
    prefix, part = ("", f.dims) if f.parallel is None else ("parallel.", f.parallel)
    for name in (name for name in part.__dataclass_fields__ if name.endswith("_size")):
        size, rest = getattr(part, name), name == "data_parallel_shard_size"
        also = f", or {REST} for all ranks that are left" if rest else ""
        holds = size is None or size > 0 or (rest and size == REST)
        yield Rule(prefix + name, holds, says=f" is {size}; allowed: a positive integer{also}")


def parallel_table(f: Facts) -> Iterator[Rule]:
    """Yield the rules of the table [parallel] by itself."""
    p, staged = f.parallel, f.parallel.pipeline_model_parallel_size > 1
    sharded = p.data_parallel_shard_size != 1  # as the table says, whatever ranks it leaves
    no_shards, no_stages = "with data_parallel_shard_size = 1", "with pipeline_model_parallel_size = 1"
    yield from positive_sizes(f)
    spread = f.ep > 1 and f.expert_dispatch == "all_to_all"
    allowed = "False without expert_model_parallel_size, and with another expert_dispatch than 'all_to_all'"
    yield Rule("parallel.moe_shared_expert_overlap", spread, allowed)
    yield Rule("parallel.sequence_parallel", f.tp > 1, "False with tensor_model_parallel_size = 1")
    yield Rule("parallel.async_tensor_parallel", f.sequence_parallel, "False without sequence_parallel")
    yield Rule("parallel.cp_comm_type", f.cp > 1, "'all_gather' with context_parallel_size = 1")
    yield Rule("parallel.pipeline_schedule", staged, f"'1F1B' {no_stages}")
    yield Rule("parallel.pipeline_split", staged, f"unset {no_stages}")
    balances = staged and not p.pipeline_split
    yield Rule("parallel.pipeline_balance", balances, f"False {no_stages}, or pipeline_split")
    yield Rule("parallel.virtual_pipeline_model_parallel_size", staged, f"null {no_stages}")
    ranks = p.reshard_after_forward
    yield Rule("parallel.reshard_after_forward", sharded, f"'default' {no_shards}")
    several = isinstance(ranks, str) or ranks > 1
    yield Rule("parallel.reshard_after_forward", several, "'default', 'always', 'never' or 2 and more ranks")
    allowed = "False with data_parallel_shard_size, whose shards each rank updates alone"
    yield Rule("parallel.use_distributed_optimizer", not sharded, allowed)
    yield Rule("parallel.cpu_offload", sharded, f"False {no_shards}")
    yield Rule("parallel.reduce_dtype", sharded, "'float32' without shards")
    step, key = p.reduce_gradients == "step", "parallel.reduce_gradients"
    yield Rule(key, sharded or step, f"'step' {no_shards}")
    yield Rule(key, not staged or step, "'step' with pipeline stages, whose schedule adds gradients up")
    why = f"{p.reduce_dtype!r}, in which the gradients of micro-batches would be added up"
    yield Rule(key, not step or p.reduce_dtype == "float32", f"'micro_batch' with reduce_dtype = {why}")


def rules_of_run(f: Facts) -> Iterator[Rule]:
    """Yield the rules of the whole configuration of a run."""
    run, p, precision, stored = f.run, f.parallel, f.run.precision, f.run.precision.quantized_weights
    whole, staged = run.compile and run.compile_mode == "whole", p.pipeline_model_parallel_size > 1
    for size in ("data_parallel_shard_size", "pipeline_model_parallel_size"):
        divided, says = getattr(p, size) != 1, f"allowed: 'block' with parallel.{size}, or compile = false"
        yield Rule("compile_mode", not (divided and whole), says=f" is 'whole'; {says}")
    deepep = "with parallel.expert_dispatch = 'deepep'"
    says = f" is True; allowed: False {deepep}, whose calls torch cannot trace"
    yield Rule("compile", not (f.uses_deepep and run.compile), says=says)
    says = f" is 'fp32'; allowed: 'bf16' and 'bf16-mixed' {deepep}"
    yield Rule("precision.dtype", not f.uses_deepep or precision.dtype != "fp32", says=says)
    key, why = "parallel.async_tensor_parallel", "because the gathered rows are {} before they are multiplied"
    yield Rule(key, run.compile, "False with compile = false")
    yield Rule("parallel.moe_shared_expert_overlap", not run.compile, "False with compile = true")
    recipe = next((name for name in precision.recipe_names if name != "none"), None)
    yield Rule(key, recipe is None, f"False with precision.recipe = {recipe!r}, {why.format('quantized')}")
    mixed = precision.dtype == "bf16-mixed"
    yield Rule(key, not mixed, f"False with precision.dtype = 'bf16-mixed', {why.format('cast')}")
    allowed = "False with a graph of the whole loss, or pipeline stages"
    yield Rule("model.activation_offloading", not (whole or staged), allowed)
    recipe = next((name for name in precision.recipe_names if name not in ("block", "mxfp8")), None)
    allowed = f"another way with precision.recipe = {recipe!r}, or the recipe 'block' or 'mxfp8', which round each row "
    quantized = f.expert_dispatch == "all_to_all_quantized"
    yield Rule("parallel.expert_dispatch", not quantized or recipe is None, allowed + "by itself")
    allowed = "another one with parallel.cpu_offload = true, because matrix products belong on the device"
    yield Rule("optimizer.kind", run.optimizer.kind != "muon" or not p.cpu_offload, allowed)
    method, alone = run.posttraining.method, {"distill": "every rank has the teacher whole"}
    alone["dpo"] = "ranks share the pairs alone"
    for size in (*("tensor_model", "pipeline_model", "context", "expert_model"), "shard"):
        key = "parallel." + ("data_parallel_shard_size" if size == "shard" else f"{size}_parallel_size")
        yield Rule(key, method not in alone, f"1 with posttraining.method = {method!r}: {alone.get(method)}")
    whole_ranks = isinstance(p.reshard_after_forward, str) or not (stored or f.distributed)
    where = "with precision.quantized_weights or distributed experts"
    yield Rule("parallel.reshard_after_forward", whole_ranks, "default, always, never", where)
    allowed = "none, because a rank has the logits of a part of the queries"
    yield Rule("optimizer.qk_clip_threshold", f.cp == 1, allowed, "with parallel.context_parallel_size")
    for name in ("kind", "ema_decay", "qk_clip_threshold"):
        yield Rule(f"optimizer.{name}", not stored, "its default", "with precision.quantized_weights")
    # rows of an expert differ between ranks that split the layers, and after them their generators
    where = "with expert_tensor_parallel_size other than tensor_model_parallel_size"
    yield Rule("lora.dropout", not (run.lora.rank and f.apart and f.tp > 1), "0", where)
    length, where = run.data.sequence_length, f"with parallel.context_parallel_size = {f.cp}"
    says = f" is {length}; allowed {where}: a multiple of {2 * f.cp}"
    yield Rule("data.sequence_length", f.cp == 1 or length % (2 * f.cp) == 0, says=says)
    tokens = run.data.micro_batch_size * length // f.cp
    says = f" and sequence_length make {tokens} tokens; allowed with parallel.sequence_parallel: a multiple of "
    says += f"tensor_model_parallel_size, {f.tp}"
    yield Rule("data.micro_batch_size", not f.sequence_parallel or tokens % f.tp == 0, says=says)


def rules_of_updates(f: Facts) -> Iterator[Rule]:
    """Yield the rules of ranks that update parts of the same parameters, and of ranks that make steps alone."""
    run, p, stored = f.run, f.parallel, f.run.precision.quantized_weights
    whole, where = not p.use_distributed_optimizer, "with parallel.use_distributed_optimizer"
    yield Rule("optimizer.kind", whole, f"'adamw' {where}")
    yield Rule("optimizer.qk_clip_threshold", whole, f"null {where}")
    allowed = "False with precision.quantized_weights, whose blocks ranks would cut"
    yield Rule("parallel.use_distributed_optimizer", not stored, allowed)
    together, where = not run.diloco.inner_steps, "with diloco.inner_steps"
    kinds = "tensor_model", "pipeline_model", "context", "expert_model", "expert_tensor"
    for name in ("data_parallel_shard_size", *(f"{kind}_parallel_size" for kind in kinds)):
        holds = together or getattr(p, name) in (1, None)
        yield Rule(f"parallel.{name}", holds, f"1 {where}, because each rank has a whole replica")
    yield Rule("parallel.use_distributed_optimizer", together, f"False {where}")
    yield Rule("optimizer.kind", together or run.optimizer.kind != "schedule_free", f"another one {where}")
    defaults = {"optimizer.qk_clip_threshold": "null", "optimizer.ema_decay": "null", "lora.rank": "0"}
    for key, default in (defaults | {"precision.quantized_weights": "False"}).items():
        yield Rule(key, together, f"{default} {where}")


def run_on_ranks(f: Facts) -> Iterator[Rule]:
    """Yield the rules of a run that begins: its model and the number of ranks are known."""
    length, positions = f.run.data.sequence_length, f.model.max_position_embeddings
    says = f" is {length}, but the model has {positions} positions"
    yield Rule("data.sequence_length", length <= positions, says=says)
    yield Rule("precision.cache_weights", not f.is_sharded, "False", "with parallel.data_parallel_shard_size")
    together, count = f.run.diloco.replica_ranks, f.dims.ranks
    says = f" is {together}; allowed: a divisor of the number of ranks, {count}"
    yield Rule("diloco.replica_ranks", count % together == 0, says=says)
    asked, over = f.parallel.reshard_after_forward, f.dims.data_parallel_shard_size * f.dims.context_parallel_size
    holds = isinstance(asked, str) or over % asked == 0
    allowed = f"a divisor of the {over} ranks over which parameters are sharded"
    yield Rule("parallel.reshard_after_forward", holds, allowed)


def ranks(f: Facts) -> Iterator[Rule]:
    """Yield the rules of sizes and a number of ranks."""
    d = f.dims
    yield Rule("ranks", d.ranks > 0, says=f" is {d.ranks}; allowed: a positive integer")
    yield from positive_sizes(f)
    left, copies = d.ranks, "data_parallel_replicate_size"
    last = copies if d.data_parallel_shard_size == REST else "data_parallel_shard_size"
    for name in ("pipeline_model_parallel_size", "tensor_model_parallel_size", "context_parallel_size", last):
        size = getattr(d, name) or 1
        says = f" is {size}; allowed: a divisor of the number of ranks, {left}"
        yield Rule(name, left % size == 0, says=says)
        left //= size
    fit = last == copies or d.data_parallel_replicate_size in (None, left)
    allowed = f"{left}, which the other sizes leave of {d.ranks} ranks"
    yield Rule(copies, fit, says=f" is {d.data_parallel_replicate_size}; allowed: {allowed}")


def experts_on_ranks(f: Facts) -> Iterator[Rule]:
    """Yield the rules of the ranks over which experts are distributed, whose sizes are all filled in."""
    d, apart = f.dims, f.dims.splits_experts_apart
    ep, etp, over = d.expert_model_parallel_size, d.expert_tensor_parallel_size, d.expert_ranks
    what = "data_parallel_shard_size" if d.is_sharded else "data_parallel_replicate_size"
    what += " x context_parallel_size" if d.context_parallel_size > 1 else ""
    what += " x tensor_model_parallel_size" if apart and d.tensor_model_parallel_size > 1 else ""
    says = f" is {etp}; allowed: a divisor of {what}, {over}"
    yield Rule("expert_tensor_parallel_size", not apart or over % etp == 0, says=says)
    left = over // etp if apart else over
    what += f" / expert_tensor_parallel_size, {left}" if left != over else f", {over}"
    yield Rule("expert_model_parallel_size", left % ep == 0, says=f" is {ep}; allowed: a divisor of {what}")
