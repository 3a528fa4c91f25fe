"""The plan of a run: what each rank holds, computes and sends, whether it fits, and how long a step takes at best."""

from typing import Any

from ..config import ConfigError
from ..training.config import TrainConfig
from ..training.data.batch_size import with_global_batch
from ..training.preflight import check_run_layout
from ..training.ranks.data_parallel import Ranks
from ..training.ranks.layout import balanced, rank_layout
from ..training.trained import check_globs, step_flops_per_token
from .cost import FILLS, traffic_of, waits_of
from .micro_batch import record_step
from .process import model_of
from .result import Hardware, Plan
from .simulation import fake_ranks, fake_tensors
from .stage_cost import Known
from .stages import record_stages
from .stretches import StretchRecipes

OPTIONS = (
    *("pipeline_schedule", "virtual_pipeline_model_parallel_size", "use_distributed_optimizer"),
    *("cp_comm_type", "reduce_gradients", "expert_dispatch", "reshard_after_forward", "cpu_offload"),
)
"""Keys of [parallel] that are no sizes and that a plan depends on."""
OF_MODEL = ("activation_checkpointing", "recompute_modules", "recompute_save_ops")
"""Keys of [model] likewise."""


def options_of(config: TrainConfig) -> dict[str, Any]:
    """Return the choices of a run beside the sizes of its layout, as JSON values."""
    own = config.model.to_dict()
    return {name: getattr(config.parallel, name) for name in OPTIONS} | {name: own[name] for name in OF_MODEL}


def plan_here(
    config: TrainConfig,
    ranks: int,
    hardware: Hardware,
    pipeline_rank: int = 0,
    stretch: int = 0,
    known: Known | None = None,
) -> Plan:
    """Return the plan of a stretch of a run on this many ranks, in a process that belongs to no process group and plans
    no other run: torch keeps meshes of equal shape, with the groups that they had.

    One micro-batch and the end of a step, of a pipeline all that its schedule does, run on tensors without values, as a
    rank of the layout would run them on CPU: the first of those that have the stages of `pipeline_rank`. Layers of a
    kind count as often as the model has them. known: what stages of pipelines cost in this and other plans; what this
    one finds is added. Raises ConfigError for what `te-models train` refuses in this layout.
    """
    if config.posttraining.method == "distill":
        raise ConfigError("posttraining.method is 'distill'; allowed in a plan: others, because it counts no teacher")
    model, pipeline = model_of(config), config.parallel.pipeline_model_parallel_size
    rank = pipeline_rank * (ranks // pipeline)
    with fake_ranks(ranks, rank):
        layout = rank_layout(config.parallel, Ranks(rank, ranks), "cpu")
        config = with_global_batch(config, layout.data.world_size)
        check_run_layout(config, model, layout.dims)
        check_globs(config, model)
        layout = balanced(layout, config, model)
        recipes = StretchRecipes.at(config, model, stretch)
        with fake_tensors():
            if layout.stages is None:
                found = record_step(config, model, layout, recipes)
            else:
                found = record_stages(config, model, layout, recipes, known)
        dims, micro_batches = layout.dims, config.data.gradient_accumulation
    tokens = config.micro_batch_tokens * micro_batches
    flops = step_flops_per_token(config, model) * tokens
    flops /= dims.tensor_model_parallel_size * dims.context_parallel_size * pipeline
    waits, communication = waits_of(config, model, layout, found, flops, hardware, recipes)
    return Plan(
        sizes={**dims.sizes(), "sequence_parallel": config.parallel.sequence_parallel},
        options=options_of(config),
        ranks=ranks,
        parameters=round(found.parameters),
        optimizer=round(found.optimizer),
        activations=round(found.peak - found.parameters - found.optimizer),
        host=round(found.host),
        tokens=tokens * dims.data_ranks,
        flops=flops,
        traffic=traffic_of(found, micro_batches),
        compute_s=waits["compute"] + waits.get(FILLS, 0.0),
        communication_s=communication,
        step_s=sum(waits.values()),
        waits={name: s for name, s in waits.items() if s},
        memory_limit=hardware.memory_gib * 2**30,
        peak_flops=hardware.tflops * 1e12,
    )
