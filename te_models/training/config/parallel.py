"""The table [parallel]: how the ranks share a model and its data.

The sentence below a key is its documentation everywhere: on the command line, and in docs/training-keys.md.
"""

from dataclasses import dataclass
from typing import Literal

from ...config import ConfigPart
from ...layouts import ExpertDispatch, Facts, check_layout_rules


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
    expert_dispatch: ExpertDispatch = "all_to_all"
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
        check_layout_rules(Facts.of_table(self))
