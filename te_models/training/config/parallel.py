"""The table [parallel]: how the ranks share a model and its data.

The sentence below a key is its documentation everywhere: on the command line, and in docs/training-keys.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ...config import ConfigPart, check
from ...parallel.dims import check_sizes


@dataclass(frozen=True, kw_only=True)
class ParallelConfig(ConfigPart):
    """How the ranks share the model and the data; the product of the sizes, without the experts', is the number of
    ranks."""

    data_parallel_replicate_size: int | None = None
    """Copies of the model, whose gradients are averaged; unset means as many as the other sizes leave."""
    data_parallel_shard_size: int = 1
    """Ranks over which FSDP2 shards parameters, gradients and moments of each copy; -1 means all that are left."""
    tensor_model_parallel_size: int = 1
    """Ranks over which each layer is split."""
    sequence_parallel: bool = False
    """Whether ranks that split layers have a part of the tokens each between these layers."""
    pipeline_model_parallel_size: int = 1
    """Ranks over which the layers are distributed, as pipeline stages."""
    virtual_pipeline_model_parallel_size: int | None = None
    """Pipeline stages of each rank; unset means as many as the schedule needs, 1 or 2."""
    pipeline_schedule: str = "1F1B"
    """Schedule of the pipeline, by torch's name: 1F1B, GPipe, Interleaved1F1B, LoopedBFS, InterleavedZeroBubble,
    ZBVZeroBubble, DualPipeV."""
    pipeline_split: tuple[int, ...] = ()
    """Layers of each pipeline stage, in their order; unset means as many each."""
    pipeline_balance: bool = False
    """Whether stages have the layers with which the slowest one takes least: by FLOPs, the output layer and the layers
    that predict further tokens counted, which are the last stage's."""
    context_parallel_size: int = 1
    """Ranks that share each sequence; they read the same windows."""
    cp_comm_type: Literal["all_gather", "p2p", "a2a"] = "all_gather"
    """How attention reaches the keys and values of the ranks that share a sequence: each rank gathers them all
    (all_gather), they go round a ring while each rank attends to what it has (p2p), or each rank gets all positions of
    a part of the heads (a2a)."""
    expert_model_parallel_size: int = 1
    """Data-parallel ranks over which the experts are distributed; each has an equal part, and those that split the
    layers count, too, with another expert_tensor_parallel_size than tensor_model_parallel_size."""
    expert_tensor_parallel_size: int | None = None
    """Ranks over which each expert is split; unset means tensor_model_parallel_size; with another number, ranks that
    split the other layers share the tokens of the experts."""
    expert_dispatch: Literal["all_to_all", "all_to_all_quantized", "all_gather", "deepep"] = "all_to_all"
    """How tokens reach distributed experts: each travels to the rank of each of its experts (all_to_all), as the
    numbers to which the recipe rounds it there (all_to_all_quantized; mxfp8 and block), every rank gets the tokens of
    all (all_gather), or each travels once to each rank of its experts, by the library deep_ep, on CUDA devices, in
    bfloat16 and without compilation (deepep)."""
    moe_shared_expert_overlap: bool = False
    """Whether the shared expert of a layer computes while results of the others travel back, forward and backward, by
    all_to_all and without compilation; gradients of what it reads are added up in another order."""
    reshard_after_forward: int | Literal["default", "always", "never"] = "default"
    """Whether FSDP2 frees gathered parameters between forward and backward pass: of layers (default), of all (always),
    or down to shards over that many ranks, from which the backward pass gathers (a number)."""
    reduce_gradients: Literal["step", "micro_batch"] | None = None
    """How often FSDP2 adds up the gradients of the ranks: once a step, for which each rank holds whole gradients in
    float32 (step), or after each micro-batch (micro_batch); unset means micro_batch, or step with pipeline stages or
    without shards."""
    reduce_dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype in which FSDP2 adds up the gradients of the ranks."""
    use_distributed_optimizer: bool = False
    """Whether ranks that have the same parameters each update a part of them, with its moments and master, and gather
    the others' (ZeRO-1); gradients are summed once a step, under every pipeline schedule."""
    cpu_offload: bool = False
    """Whether parameters that FSDP2 shards, their gradients and moments stay in main memory, where the optimizer steps;
    each pass copies what it needs to the device."""
    async_tensor_parallel: bool = False
    """Whether split layers exchange rows while they multiply: with sequence_parallel, compiled, on CUDA, in the dtypes
    fp32 and bf16 without a recipe."""

    @property
    def reduces_once(self) -> bool:
        """Whether gradients are reduced once a step, whatever its micro-batches."""
        asked, sharded = self.reduce_gradients, self.data_parallel_shard_size != 1
        return not sharded or self.pipeline_model_parallel_size > 1 if asked is None else asked == "step"

    def _validate(self) -> None:
        names = (name for name in self.__dataclass_fields__ if name.endswith("_size"))
        check_sizes({name: getattr(self, name) for name in names}, "parallel.")
        overlaps, dispatch = self.moe_shared_expert_overlap, self.expert_dispatch
        spread = self.expert_model_parallel_size > 1 and dispatch == "all_to_all"
        allowed = "False without expert_model_parallel_size, and with another expert_dispatch than 'all_to_all'"
        check(spread or not overlaps, "parallel.moe_shared_expert_overlap", overlaps, allowed)
        tp = self.tensor_model_parallel_size
        where = "parallel.sequence_parallel"
        check(tp > 1 or not self.sequence_parallel, where, True, "False with tensor_model_parallel_size = 1")
        where = "parallel.async_tensor_parallel"
        check(self.sequence_parallel or not self.async_tensor_parallel, where, True, "False without sequence_parallel")
        comm = self.cp_comm_type
        alone = self.context_parallel_size == 1 and comm != "all_gather"
        check(not alone, "parallel.cp_comm_type", comm, "'all_gather' with context_parallel_size = 1")
        virtual, schedule = self.virtual_pipeline_model_parallel_size, self.pipeline_schedule
        staged = self.pipeline_model_parallel_size > 1
        allowed = "'1F1B' with pipeline_model_parallel_size = 1"
        check(staged or schedule == "1F1B", "parallel.pipeline_schedule", schedule, allowed)
        split, balanced = list(self.pipeline_split), self.pipeline_balance
        check(staged or not split, "parallel.pipeline_split", split, "unset with pipeline_model_parallel_size = 1")
        allowed = "False with pipeline_model_parallel_size = 1, or pipeline_split"
        check((staged and not split) or not balanced, "parallel.pipeline_balance", balanced, allowed)
        where = "parallel.virtual_pipeline_model_parallel_size"
        check(staged or virtual is None, where, virtual, "null with pipeline_model_parallel_size = 1")
        sharded = self.data_parallel_shard_size != 1
        default = self.reshard_after_forward == "default"
        where = "parallel.reshard_after_forward"
        check(sharded or default, where, self.reshard_after_forward, "'default' with data_parallel_shard_size = 1")
        ranks = self.reshard_after_forward
        check(isinstance(ranks, str) or ranks > 1, where, ranks, "'default', 'always', 'never' or 2 and more ranks")
        where = "parallel.use_distributed_optimizer"
        allowed = "False with data_parallel_shard_size, whose shards each rank updates alone"
        check(not (sharded and self.use_distributed_optimizer), where, True, allowed)
        offloaded = self.cpu_offload
        check(sharded or not offloaded, "parallel.cpu_offload", offloaded, "False with data_parallel_shard_size = 1")
        where = "parallel.reduce_dtype"
        check(sharded or self.reduce_dtype == "float32", where, self.reduce_dtype, "'float32' without shards")
        where, often = "parallel.reduce_gradients", self.reduce_gradients
        each = often == "micro_batch"
        check(sharded or not each, where, often, "'step' with data_parallel_shard_size = 1")
        check(not (staged and each), where, often, "'step' with pipeline stages, whose schedule adds gradients up")
        narrow = often == "step" and self.reduce_dtype != "float32"
        why = "in which the gradients of micro-batches would be added up"
        check(not narrow, where, often, f"'micro_batch' with reduce_dtype = {self.reduce_dtype!r}, {why}")
