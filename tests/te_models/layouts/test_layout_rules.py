"""Each rule about layouts over ranks is broken by a case here, and the configuration of a run, a plan and a model that
is built say the same sentence about it."""

import ast
import inspect
import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from te_models import AttentionConfig, ConfigError, GPTModel, MLAConfig, ModelConfig, NormConfig
from te_models.config import HyperConnectionConfig, IndexerConfig
from te_models.layouts import GROUPS, Facts, check_layout_rules, of_models, of_runs
from te_models.model import Build
from te_models.parallel import ParallelDims, StageLayout, parallelize
from te_models.training.config import (
    DataConfig,
    DiLoCoConfig,
    LoRAConfig,
    ModelSource,
    OptimizerConfig,
    ParallelConfig,
    PosttrainingConfig,
    PrecisionConfig,
    ScheduleConfig,
)
from te_models.training.config.file import load_config
from te_models.training.preflight import check_run_layout
from tests.build import VARIANTS, heads, tiny, tiny_moe
from tests.te_models.mixers.test_recurrent_mixers import hybrid
from tests.training.processes import as_toml
from tests.training.runs import tiny_model, tiny_run

FIRST = {"tensor_model_parallel_size": 2}
SEQUENCE = {**FIRST, "sequence_parallel": True}
EXPERTS = {"expert_model_parallel_size": 2}
APART = {"expert_tensor_parallel_size": 2}
STAGES = {"pipeline_model_parallel_size": 2}
SHARDS = {"data_parallel_shard_size": 2}
HEADS = heads(None)
LATENT = MLAConfig(kv_lora_rank=10, qk_head_dim=8, qk_pos_emb_head_dim=4, v_head_dim=6)
LATENT_HEADS = ModelSource(config=tiny(attention=HEADS.replace(mla=LATENT)))
INDEXER = IndexerConfig(n_heads=2, head_dim=8, topk=4)
CHOOSES = HEADS.replace(kv_channels=8, indexer=INDEXER)
PADDED = {"moe_expert_capacity_factor": 1.0, "moe_pad_expert_input_to_capacity": True}
DEEPEP = {"expert_dispatch": "deepep"}

TABLES: list[tuple[dict[str, Any], str]] = [
    ({"context_parallel_size": 0}, "parallel.context_parallel_size is 0; allowed: a positive integer"),
    ({"data_parallel_shard_size": -2}, "is -2; allowed: a positive integer, or -1 for all ranks that are left"),
    ({"sequence_parallel": True}, "parallel.sequence_parallel is True; allowed: False with tensor_model_parallel_size"),
    (
        {"moe_shared_expert_overlap": True},
        "parallel.moe_shared_expert_overlap is True; allowed: False without expert_model_parallel_size, and with",
    ),
    ({"cp_comm_type": "p2p"}, "parallel.cp_comm_type is 'p2p'; allowed: 'all_gather' with context_parallel_size = 1"),
    (
        {**SHARDS, "use_distributed_optimizer": True},
        "parallel.use_distributed_optimizer is True; allowed: False with data_parallel_shard_size, whose shards each",
    ),
    ({**FIRST, "async_tensor_parallel": True}, "async_tensor_parallel is True; allowed: False without sequence_para"),
    ({"pipeline_schedule": "GPipe"}, "pipeline_schedule is 'GPipe'; allowed: '1F1B' with pipeline_model_parallel_size"),
    ({"pipeline_split": (1, 1)}, "pipeline_split is [1, 1]; allowed: unset with pipeline_model_parallel_size = 1"),
    ({"pipeline_balance": True}, "pipeline_balance is True; allowed: False with pipeline_model_parallel_size = 1, or"),
    ({"virtual_pipeline_model_parallel_size": 2}, "is 2; allowed: null with pipeline_model_parallel_size = 1"),
    ({"reshard_after_forward": "always"}, "is 'always'; allowed: 'default' with data_parallel_shard_size = 1"),
    ({**SHARDS, "reshard_after_forward": 1}, "is 1; allowed: 'default', 'always', 'never' or 2 and more ranks"),
    ({"cpu_offload": True}, "cpu_offload is True; allowed: False with data_parallel_shard_size = 1"),
    ({"reduce_dtype": "bfloat16"}, "reduce_dtype is 'bfloat16'; allowed: 'float32' without shards"),
    ({"reduce_gradients": "micro_batch"}, "is 'micro_batch'; allowed: 'step' with data_parallel_shard_size = 1"),
    ({**SHARDS, **STAGES, "reduce_gradients": "micro_batch"}, "allowed: 'step' with pipeline stages, whose schedule"),
    (
        {**SHARDS, "reduce_gradients": "step", "reduce_dtype": "bfloat16"},
        "is 'step'; allowed: 'micro_batch' with reduce_dtype = 'bfloat16', in which the gradients of micro-batches",
    ),
]
"""Tables [parallel], and what is said about them."""

ASYNC = {"parallel": ParallelConfig(**SEQUENCE, async_tensor_parallel=True)}
BLOCKS = {"compile": True, "compile_mode": "block"}
DEEP_RUN = {"parallel": ParallelConfig(**EXPERTS, **DEEPEP), "model": ModelSource(config=tiny_model(moe=True))}
STORED = PrecisionConfig(recipe="mxfp8", quantized_weights=True)
CLIPPED = OptimizerConfig(qk_clip_threshold=100.0)
ZB = ParallelConfig(**STAGES, pipeline_schedule="InterleavedZeroBubble")
BESIDE = {"parallel": ParallelConfig(**EXPERTS, moe_shared_expert_overlap=True)}
ZERO = {"parallel": ParallelConfig(use_distributed_optimizer=True)}
LOCAL = {"diloco": DiLoCoConfig(inner_steps=2), "steps": 4}
FOUR_LAYERS = ModelSource(config=tiny_model(layers=4))
RUNS: list[tuple[dict[str, Any], str]] = [
    ({"compile": True, "parallel": ParallelConfig(**SHARDS)}, "compile_mode is 'whole'; allowed: 'block' with"),
    ({**DEEP_RUN, **BLOCKS, "precision": PrecisionConfig(dtype="bf16")}, "compile is True; allowed: False with"),
    (DEEP_RUN, "precision.dtype is 'fp32'; allowed: 'bf16' and 'bf16-mixed' with parallel.expert_dispatch = 'deepep'"),
    (
        {**BESIDE, **BLOCKS, "model": ModelSource(config=tiny_moe(shared_expert_intermediate_size=8))},
        "parallel.moe_shared_expert_overlap is True; allowed: False with compile = true",
    ),
    (
        {**BESIDE, "model": ModelSource(config=tiny_moe())},
        "is True; allowed: a model with moe.shared_expert_intermediate_size, without moe.own_norms",
    ),
    (
        {**ZERO, "optimizer": OptimizerConfig(kind="muon")},
        "optimizer.kind is 'muon'; allowed: 'adamw' with parallel.use_distributed_optimizer",
    ),
    (
        {**ZERO, "optimizer": CLIPPED},
        "optimizer.qk_clip_threshold is 100.0; allowed: null with parallel.use_distributed_optimizer",
    ),
    (
        {**ZERO, "precision": STORED},
        "is True; allowed: False with precision.quantized_weights, whose blocks ranks would cut",
    ),
    (
        {**LOCAL, "parallel": ParallelConfig(**FIRST)},
        "tensor_model_parallel_size is 2; allowed: 1 with diloco.inner_steps, because each rank has a whole replica",
    ),
    (
        {**LOCAL, "parallel": ParallelConfig(**APART), "model": ModelSource(config=tiny_model(moe=True))},
        "expert_tensor_parallel_size is 2; allowed: 1 with diloco.inner_steps, because each rank has a whole replica",
    ),
    ({**LOCAL, **ZERO}, "parallel.use_distributed_optimizer is True; allowed: False with diloco.inner_steps"),
    (
        {**LOCAL, "optimizer": OptimizerConfig(kind="schedule_free"), "schedule": ScheduleConfig(kind="constant")},
        "optimizer.kind is 'schedule_free'; allowed: another one with diloco.inner_steps",
    ),
    (
        {**LOCAL, "optimizer": OptimizerConfig(ema_decay=0.9)},
        "optimizer.ema_decay is 0.9; allowed: null with diloco.inner_steps",
    ),
    ({**LOCAL, "lora": LoRAConfig(rank=2)}, "lora.rank is 2; allowed: 0 with diloco.inner_steps"),
    ({**LOCAL, "precision": STORED}, "precision.quantized_weights is True; allowed: False with diloco.inner_steps"),
    (
        {
            "parallel": ParallelConfig(**FIRST),
            "optimizer": CLIPPED,
            "model": ModelSource(config=tiny(attention=HEADS.replace(num_query_groups=1))),
        },
        "parallel.tensor_model_parallel_size is more than attention.num_query_groups; allowed with optimizer.qk_clip_t",
    ),
    (
        {"parallel": ZB, "model": ModelSource(config=hybrid("in_shared_blocks"))},
        "2 stages of a rank share blocks; allowed with parallel.pipeline_schedule = 'InterleavedZeroBubble': a model t",
    ),
    (
        {
            "parallel": ParallelConfig(**STAGES, **SHARDS, pipeline_schedule="Interleaved1F1B"),
            "model": ModelSource(config=hybrid("in_shared_blocks")),
        },
        "allowed with parallel.pipeline_schedule = 'Interleaved1F1B' and data_parallel_shard_size: a model that shares",
    ),
    (ASYNC, "parallel.async_tensor_parallel is True; allowed: False with compile = false"),
    (
        {**ASYNC, "compile": True, "precision": PrecisionConfig(recipe="mxfp8")},
        "is True; allowed: False with precision.recipe = 'mxfp8', because the gathered rows are quantized before",
    ),
    (
        {**ASYNC, "compile": True, "precision": PrecisionConfig(dtype="bf16-mixed")},
        "is True; allowed: False with precision.dtype = 'bf16-mixed', because the gathered rows are cast before",
    ),
    (
        {"compile": True, "model": ModelSource(config=tiny_model(), activation_offloading=True)},
        "model.activation_offloading is True; allowed: False with a graph of the whole loss, or pipeline stages",
    ),
    (
        {
            "parallel": ParallelConfig(**EXPERTS, expert_dispatch="all_to_all_quantized"),
            "precision": PrecisionConfig(recipe="current"),
        },
        "is 'all_to_all_quantized'; allowed: another way with precision.recipe = 'current', or the recipe 'block'",
    ),
    (
        {"parallel": ParallelConfig(**SHARDS, cpu_offload=True), "optimizer": OptimizerConfig(kind="muon")},
        "optimizer.kind is 'muon'; allowed: another one with parallel.cpu_offload = true",
    ),
    (
        {
            "parallel": ParallelConfig(context_parallel_size=2),
            "posttraining": PosttrainingConfig(method="distill", teacher="teacher"),
        },
        "context_parallel_size is 2; allowed: 1 with posttraining.method = 'distill': every rank has the teacher whole",
    ),
    (
        {"parallel": ParallelConfig(**SHARDS, reshard_after_forward=2), "precision": STORED},
        "is 2; allowed with precision.quantized_weights or distributed experts: default, always, never",
    ),
    (
        {"parallel": ParallelConfig(context_parallel_size=2), "optimizer": CLIPPED},
        "optimizer.qk_clip_threshold is 100.0; allowed with parallel.context_parallel_size: none, because a rank has",
    ),
    (
        {"precision": STORED, "optimizer": OptimizerConfig(ema_decay=0.9)},
        "optimizer.ema_decay is 0.9; allowed with precision.quantized_weights: its default",
    ),
    (
        {
            "parallel": ParallelConfig(**FIRST, expert_tensor_parallel_size=1),
            "lora": LoRAConfig(rank=2, dropout=0.1),
            "model": ModelSource(config=tiny_model(moe=True)),
        },
        "lora.dropout is 0.1; allowed with expert_tensor_parallel_size other than tensor_model_parallel_size: 0",
    ),
    (
        {"parallel": ParallelConfig(context_parallel_size=3)},
        "data.sequence_length is 32; allowed with parallel.context_parallel_size = 3: a multiple of 6",
    ),
    (
        {"parallel": ParallelConfig(context_parallel_size=3), "data": DataConfig(path="data")},
        "data.sequence_length is 1024; allowed with parallel.context_parallel_size = 3: a multiple of 6",
    ),
    (
        {"parallel": ParallelConfig(tensor_model_parallel_size=3, sequence_parallel=True)},
        "data.micro_batch_size and sequence_length make 64 tokens; allowed with parallel.sequence_parallel: a multiple",
    ),
    (
        {
            "parallel": ParallelConfig(**FIRST),
            "optimizer": CLIPPED,
            "model": ModelSource(config=tiny(attention=HEADS.replace(mla=LATENT))),
        },
        "parallel.tensor_model_parallel_size is 2; allowed with optimizer.qk_clip_threshold: 1, because every rank has",
    ),
    (
        {**BLOCKS, "parallel": ZB, "model": FOUR_LAYERS},
        "compile is True; allowed with parallel.pipeline_schedule = 'InterleavedZeroBubble', which computes weight",
    ),
    (
        {"parallel": ZB.replace(**SHARDS), "model": FOUR_LAYERS},
        "parallel.pipeline_schedule is 'InterleavedZeroBubble'; allowed with data_parallel_shard_size: 1F1B, GPipe",
    ),
    (
        {"parallel": ParallelConfig(pipeline_model_parallel_size=3)},
        "pipeline_model_parallel_size is 3 with 1 stages each, and the model has 2 layers; allowed: at most as many",
    ),
    (
        {"parallel": ParallelConfig(**STAGES, pipeline_split=(1, 2))},
        "pipeline_split is [1, 2], 3 layers, and the model has 2",
    ),
]
"""Changes of a run, and what is said about them."""

ON_RANKS: list[tuple[Callable[[], Any], str]] = [
    (lambda: ParallelDims(ranks=0), "ranks is 0; allowed: a positive integer"),
    (lambda: ParallelDims(ranks=2, context_parallel_size=0), "context_parallel_size is 0; allowed: a positive integer"),
    (lambda: ParallelDims(ranks=3, **FIRST), "is 2; allowed: a divisor of the number of ranks, 3"),
    (
        lambda: ParallelDims(ranks=4, data_parallel_replicate_size=2),
        "data_parallel_replicate_size is 2; allowed: 4, which the other sizes leave of 4 ranks",
    ),
    (
        lambda: ParallelDims(ranks=2, expert_model_parallel_size=4),
        "expert_model_parallel_size is 4; allowed: a divisor of data_parallel_replicate_size, 2",
    ),
    (
        lambda: ParallelDims(ranks=2, expert_tensor_parallel_size=4),
        "expert_tensor_parallel_size is 4; allowed: a divisor of data_parallel_replicate_size, 2",
    ),
    (lambda: StageLayout(2, "2F2B"), "pipeline_schedule is '2F2B'; allowed: a schedule that torch has, such as 1F1B"),
    (lambda: StageLayout(2, "1F1B", 2), "is 2 with parallel.pipeline_schedule = '1F1B'; allowed: 1"),
    (lambda: StageLayout(2, "GPipe", split=(1, 1, 1)), "is [1, 1, 1]; allowed: a number of layers, 1 or more, for"),
    (lambda: Build(expert_layout="apart"), "expert_layout is 'apart'; allowed: 'grouped', 'per-gemm'"),
    (
        lambda: check_layout_rules(Facts(dims=ParallelDims(ranks=2, **FIRST), built={"tensor_model_parallel_size": 1})),
        "tensor_model_parallel_size of the mesh is 2, and the model was built over 1; allowed: the groups of",
    ),
]

JOINT = tiny_moe(moe_router_load_balancing_type="joint_aux_loss", aux_loss_coeff=0.01)
NARROW = tiny_moe().replace(hidden_size=36, attention=HEADS.replace(kv_channels=8))
SEQUENCES = {"context_parallel_size": 2}
MODELS: list[tuple[ModelConfig, dict[str, Any], str]] = [
    (tiny(), EXPERTS, "moe is None: a model without experts has none to distribute over ep_group"),
    (tiny(), APART, "moe is None: a model without experts has none to split; allowed: no expert_tensor_parallel_size"),
    (tiny_moe(), {**EXPERTS, "expert_layout": "per-gemm"}, "expert_layout is 'per-gemm'; allowed where experts are"),
    (tiny_moe(), {**APART, "expert_layout": "per-gemm"}, "is 'per-gemm'; allowed with expert_tensor_parallel_size: "),
    (tiny_moe(**PADDED), APART, "moe_pad_expert_input_to_capacity is True; allowed with expert_tensor_parallel_size"),
    (tiny_moe(**PADDED), {**EXPERTS, **DEEPEP}, "is True; allowed with expert_dispatch 'deepep': False"),
    (
        tiny_moe().replace(hidden_size=36, attention=HEADS.replace(kv_channels=8)),
        {**EXPERTS, **DEEPEP},
        "hidden_size is 36; allowed with expert_dispatch",
    ),
    (tiny_moe(), {**APART, **DEEPEP}, "is 2; allowed with expert_dispatch 'deepep': 1 or tensor_model_parallel_size"),
    (tiny(vocab_size=1), FIRST, "vocab_size is 1; allowed: a word or more for each of 2 ranks"),
    (tiny(activation_sparsity=(0.5, 0.0)), FIRST, "activation_sparsity: a model with it, whose bounds"),
    (
        tiny(attention=HEADS.replace(qk_layernorm="full"), norm=NormConfig(normalization="LayerNorm")),
        FIRST,
        "attention.qk_layernorm: a model with a LayerNorm over all heads cannot be split over 2 ranks",
    ),
    (
        tiny(attention=HEADS.replace(num_query_groups=1, qk_layernorm="each_head")),
        FIRST,
        "attention.qk_layernorm is 'each_head'; allowed where 2 ranks share 1 num_query_groups: 'none', 'head' or 'l2'",
    ),
    (
        tiny(attention=CHOOSES),
        {**SEQUENCES, "cp_comm_type": "a2a"},
        "attention.indexer: an indexer scores all keys for a query; allowed with cp_comm_type 'a2a': attention without",
    ),
    (
        tiny(attention=HEADS.replace(attention_dropout=0.1)),
        {**SEQUENCES, "cp_comm_type": "p2p"},
        "attention.attention_dropout is 0.1; allowed with cp_comm_type 'p2p': 0",
    ),
    (
        tiny(attention=AttentionConfig(num_attention_heads=3, kv_channels=8)),
        {**SEQUENCES, "cp_comm_type": "a2a"},
        "attention.num_attention_heads is 3; allowed with cp_comm_type 'a2a': a multiple of the 2 ranks",
    ),
    (tiny_moe(num_moe_experts=3), EXPERTS, "moe.num_moe_experts is 3, which 2 ranks cannot share equally"),
    (tiny_moe(moe_ffn_hidden_size=7), APART, "moe.moe_ffn_hidden_size is 7, which 2 ranks cannot share equally"),
    (tiny(hidden_dropout=0.1), SEQUENCE, "hidden_dropout is 0.1; allowed with sequence_parallel: 0, because ranks"),
    (
        tiny(laurel_rank=4, block="sandwich"),
        SEQUENCE,
        "laurel_rank: a model with it cannot have sequence_parallel; allowed: without it",
    ),
    (
        tiny(hyper_connections=HyperConnectionConfig()),
        SEQUENCE,
        "hyper_connections: a model with them cannot have sequence_parallel; allowed: without it",
    ),
    (VARIANTS["compressed"], FIRST, "attention.compressed: a model with it, of one key head, cannot be"),
    (VARIANTS["alternating_updates"], STAGES, "alternating_updates: a model with it, both of whose ends read it, ca"),
    (
        tiny(
            attention=CHOOSES,
            mixers={"shares": CHOOSES.replace(indexer=INDEXER.replace(shared=True))},
            layer_mixers=("attention", "shares"),
        ),
        STAGES,
        "a stage is asked for with layer 1, which shares the choice of keys of layer 0; allowed in a stage: with that",
    ),
    (JOINT, STAGES, "moe.moe_router_load_balancing_type is 'joint_aux_loss', which compares experts over all layers"),
    (tiny_moe(hash_layers=(0,)), STAGES, "moe.hash_layers: a model with layers that read the tokens cannot be cut"),
    (
        tiny(kv_source_layers=(0, 0)),
        STAGES,
        "kv_source_layers has 0, which is in another stage than a layer that reads its keys; allowed: stages with both",
    ),
]
"""Models, sizes with which they cannot be, and what is said about it."""


@pytest.fixture
def ranks_of() -> Iterator[Callable[[int], None]]:
    """Make this process the first of so many ranks, until the test ends."""
    yield lambda ranks: dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
    if dist.is_initialized():
        dist.destroy_process_group()


def refused(what: Callable[[], Any]) -> ConfigError:
    with pytest.raises(ConfigError) as raised:
        what()
    return raised.value


def statement(facts: Facts) -> tuple[str, int]:
    """The function and the line that yield the first broken rule."""
    for needs, group in GROUPS:
        if any(getattr(facts, name) is None for name in needs.split()):
            continue
        generator: Any = group(facts)
        for rule in generator:
            if facts.sentence(rule):
                while generator.gi_yieldfrom is not None:
                    generator = generator.gi_yieldfrom
                return generator.gi_code.co_name, generator.gi_frame.f_lineno
    raise AssertionError("no rule is broken")


def facts_of(error: ConfigError) -> Facts:
    """What was known where a rule was found to be broken."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace.tb_frame.f_locals["facts"]


def source_of(model: ModelConfig, folder: Path) -> ModelSource:
    """The model as a file, which the configuration of a run does not read."""
    file = folder / "model.json"
    file.write_text(json.dumps(model.to_dict()))
    return ModelSource(config_file=str(file))


def errors(tmp_path: Path) -> Iterator[tuple[ConfigError, str]]:
    for table, says in TABLES:
        yield refused(lambda table=table: ParallelConfig(**table)), says
    for changes, says in RUNS:
        yield refused(lambda changes=changes: tiny_run(tmp_path, **changes)), says
    for what, says in ON_RANKS:
        yield refused(what), says
    dims = ParallelDims(ranks=3, data_parallel_shard_size=3)
    parallel = ParallelConfig(data_parallel_shard_size=-1, reshard_after_forward=2)
    run = tiny_run(tmp_path, parallel=parallel)
    says = "is 2; allowed: a divisor of the 3 ranks over which parameters are sharded"
    yield refused(lambda: check_run_layout(run, run.model.config, dims)), says
    short = run.model.config.replace(max_position_embeddings=16)
    yield (
        refused(lambda: check_run_layout(run, short, dims)),
        "data.sequence_length is 32, but the model has 16 positions",
    )
    cached = tiny_run(
        tmp_path,
        parallel=ParallelConfig(data_parallel_shard_size=-1),
        precision=PrecisionConfig(recipe="mxfp8", cache_weights=True),
    )
    says = "precision.cache_weights is True; allowed with parallel.data_parallel_shard_size: False"
    yield refused(lambda: check_run_layout(cached, cached.model.config, dims)), says
    local = tiny_run(tmp_path, diloco=DiLoCoConfig(inner_steps=2, replica_ranks=2), steps=4)
    says = "diloco.replica_ranks is 2; allowed: a divisor of the number of ranks, 3"
    yield refused(lambda: check_run_layout(local, local.model.config, ParallelDims(ranks=3))), says
    for model, sizes, says in MODELS:
        sizes = dict(sizes)
        source = source_of(model, tmp_path).replace(expert_layout=sizes.pop("expert_layout", "grouped"))
        options = {"precision": PrecisionConfig(dtype="bf16")}
        planned = tiny_run(tmp_path, model=source, parallel=ParallelConfig(**sizes), **options)
        yield refused(lambda: check_run_layout(planned, model, dims_of(sizes))), says  # noqa: B023


def dims_of(sizes: dict[str, Any]) -> ParallelDims:
    return ParallelDims.of(sizes, 2)


def test_every_rule_has_a_case_that_breaks_it(tmp_path: Path) -> None:
    found = set()
    for error, says in errors(tmp_path):
        assert says in str(error)
        found.add(statement(facts_of(error)))
    for module in (of_runs, of_models):
        for function in ast.parse(inspect.getsource(module)).body:
            for node in ast.walk(function):
                if isinstance(node, ast.Yield):
                    lines = range(node.lineno, (node.end_lineno or 0) + 1)
                    name = function.name
                    assert any((name, line) in found for line in lines), f"{module.__name__}:{node.lineno} of {name}"


@pytest.mark.parametrize(("model", "sizes", "says"), MODELS, ids=[case[2][:40] for case in MODELS])
def test_configuration_plan_and_model_say_the_same(
    model: ModelConfig, sizes: dict[str, Any], says: str, tmp_path: Path, ranks_of: Callable[[int], None]
) -> None:
    sizes = dict(sizes)
    layout, staged = sizes.pop("expert_layout", "grouped"), "pipeline_model_parallel_size" in sizes
    precision, parallel = PrecisionConfig(dtype="bf16"), ParallelConfig(**sizes)
    inline, read = ModelSource(config=model, expert_layout=layout), source_of(model, tmp_path)
    planned = tiny_run(tmp_path, model=read.replace(expert_layout=layout), parallel=parallel, precision=precision)
    sentence = str(refused(lambda: check_run_layout(planned, model, dims_of(sizes))))
    assert says in sentence
    if not staged:  # of stages a configuration does not know the layers, which may be balanced
        assert (
            str(refused(lambda: tiny_run(tmp_path, model=inline, parallel=parallel, precision=precision))) == sentence
        )
    ranks_of(2)
    options: dict[str, Any] = {"device": "meta", "expert_layout": layout}
    options["expert_dispatch"] = sizes.get("expert_dispatch", "all_to_all")
    options["sequence_parallel"] = sizes.get("sequence_parallel", False)
    names = {"tp_group": "tensor_model", "ep_group": "expert_model", "etp_group": "expert_tensor"}
    groups = {group: dist.group.WORLD for group, size in names.items() if f"{size}_parallel_size" in sizes}

    def build() -> None:
        whole = GPTModel(model, **options, **groups)
        if "context_parallel_size" in sizes:
            whole.set_context_parallel_group(dist.group.WORLD, sizes["cp_comm_type"])
        for layer in range(2) if staged else ():
            whole.stage(layer, layer + 1)

    assert str(refused(build)) == sentence


@pytest.mark.parametrize(
    ("model", "table"),
    [
        (tiny(attention=HEADS.replace(num_query_groups=1)), FIRST),
        (tiny(attention=HEADS.replace(num_query_groups=1, qk_layernorm="head")), FIRST),
        (hybrid("in_shared_blocks"), FIRST),  # Mamba-2 of one group
        (tiny(attention=HEADS.replace(indexer=INDEXER.replace(loss_coeff=1.0))), FIRST),
        (hybrid("in_shared_blocks"), STAGES),
        (hybrid("in_shared_blocks"), {**STAGES, "pipeline_schedule": "Interleaved1F1B"}),
        (hybrid("in_shared_blocks"), {**STAGES, **SHARDS}),
        (tiny(attention=HEADS), {"context_parallel_size": 4, "cp_comm_type": "a2a"}),
        (tiny(attention=CHOOSES), {"context_parallel_size": 2}),
        (tiny(), {"use_distributed_optimizer": True, **STAGES, "pipeline_schedule": "1F1B"}),
    ],
)
def test_layouts_that_can_be(model: ModelConfig, table: dict[str, Any], tmp_path: Path) -> None:
    run = tiny_run(tmp_path, model=ModelSource(config=model), parallel=ParallelConfig(**table))
    ranks = math.prod(size for name, size in table.items() if name.endswith("_size"))
    check_run_layout(run, model, ParallelDims.of(table, ranks))


def test_parallelize_says_what_a_run_says_of_shards_and_schedules(ranks_of: Callable[[int], None]) -> None:
    ranks_of(4)
    dims, model = ParallelDims(ranks=4, **STAGES, **SHARDS), GPTModel(tiny(num_layers=4), device="meta")
    says = "parallel.pipeline_schedule is 'InterleavedZeroBubble'; allowed with data_parallel_shard_size: 1F1B, GPipe"
    mesh, stages = dims.build_mesh("cpu"), StageLayout(2, "InterleavedZeroBubble")
    assert says in str(refused(lambda: parallelize(model, mesh, device="cpu", stages=stages)))


def test_a_file_names_the_table_of_its_key_or_the_model(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text(as_toml(tiny_run(tmp_path)))
    for (option, *value), says in (
        (["cpu-offload"], "--parallel.cpu-offload is True; allowed: False with data_parallel_shard_size = 1"),
        (
            ["context-parallel-size", "3"],
            f"{file}: [data] sequence_length is 32; allowed with parallel.context_parallel",
        ),
        (["tensor-model-parallel-size", "3"], f"{file}: vocab_size is 2; allowed: a word or more for each of 3 ranks"),
    ):
        file.write_text(file.read_text().replace("vocab_size = 257", "vocab_size = 2"))
        assert str(refused(lambda: load_config(file, [f"--parallel.{option}", *value]))).startswith(says)  # noqa: B023
