"""What conversions between folders can be asked for, said once: the arguments of the functions here, by the same names.

The sentence below an option is its documentation everywhere: for Python, on the command line and in docs/cli.md. `flag`
is what the command line calls an option that has another name there.
"""

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal, get_args

from te_models.config import ConfigPart

from ..mapping.param_shapes import ExpertLayout

Dtype = Literal["float32", "bfloat16", "float16"]
System = Literal[
    "torchtitan", "torch_dist", "fsdp_dtensor", "te_models", "transformers", "megatron", "transformer_engine"
]
"""Whose names checkpoints have: distributed ones, where torch_dist is Megatron-Core and fsdp_dtensor Megatron-FSDP;
files of Megatron's ranks; state dicts of Transformer Engine's modules."""
Recipe = Literal["delayed", "current", "block", "mxfp8", "nvfp4"]
"""Those that a word says; `te_models.layers`, which knows them, imports torch."""
WeightsAlone = Literal["int4", "int8", "mxfp4"]
"""What weights can be stored as and no run computes in."""
RECIPES = get_args(Recipe)


def option(default: Any = dataclasses.MISSING, flag: str = "", metavar: str | None = None, **more: Any) -> Any:
    """Return a field that the command line calls `flag`. more: least, of a number; is_size, of a size."""
    return dataclasses.field(default=default, metadata={"flag": flag, "metavar": metavar, **more})


@dataclass(frozen=True, kw_only=True)
class ConversionOptions(ConfigPart):
    """Options of every conversion."""

    dry_run: bool = False
    """Check everything, print the plan, write nothing."""
    overwrite: bool = option(False, "--force")
    """Replace an existing model folder at the output, which stays until the new one is complete."""
    verify: bool = True
    """Check what is read against manifest.json, where there is one."""
    file_digests: bool = False
    """List the weight files' digests that sha256sum prints in manifest.json; every byte is hashed twice for it."""


@dataclass(frozen=True, kw_only=True)
class ShardedOptions(ConversionOptions):
    """Options of conversions that write files of a size."""

    max_shard_bytes: str = option("5GB", "--max-shard-size", "SIZE", is_size=True)
    """The most data of a weight file, e.g. 500MB."""


@dataclass(frozen=True, kw_only=True)
class ImportOptions(ShardedOptions):
    """Options of imports; those from `config` on are of training systems' checkpoints."""

    layout: ExpertLayout = "grouped"
    """The experts of a layer as one tensor, or one each."""
    dtype: Dtype | None = None
    """Convert the weights (default: keep the bits)."""
    storage: str | None = None
    """Form of quantized weights where several are exact: mxfp8 for blocks whose scales are powers of two, nvfp4 for
    MXFP4; with --allow-requantize any, float8 and float8_block, too (default: the format's own)."""
    allow_requantize: bool = False
    """Quantize anew what no exact form holds, and the columnwise copies that training needs."""
    dequantize: bool = False
    """Store the values of quantized weights."""
    mtp: bool = False
    """Layers that predict further tokens become parameters, which training trains (default: kept unused)."""
    config: str | None = option(None, metavar="FILE")
    """The model's config.json, ours or Hugging Face's, or the folder that has one, whose tokenizer travels along."""
    run_file: str | None = option(None, "--run", "RUN.toml")
    """Of a checkpoint with AdamW: make OUT the folder of a run that goes on."""
    step: int | None = option(None, metavar="N", least=1)
    """With --run: how many steps are done (default: as counted)."""
    qkv_weight_interleaved: bool = option(True, "--qkv-not-interleaved")
    """Take queries, keys and values of Transformer Engine's modules group by group (qkv_weight_interleaved)."""
    system: System | None = option(None, "--from")  # noqa: RUF009  a field
    """What wrote the checkpoint (default: told by its names)."""


@dataclass(frozen=True, kw_only=True)
class RanksOptions(ConfigPart):
    """How files of Megatron's ranks are split."""

    tensor_model_parallel_size: int = option(1, metavar="N", least=1)
    """Of --to megatron: tensor parallel ranks."""
    pipeline_model_parallel_size: int = option(1, metavar="N", least=1)
    """Of --to megatron: pipeline stages."""
    expert_model_parallel_size: int = option(1, metavar="N", least=1)
    """Of --to megatron: ranks that share the experts."""
    make_vocab_size_divisible_by: int = option(128, metavar="N", least=1)
    """Of --to megatron: rows of the vocabulary's tables are a multiple of N x tensor parallel ranks."""
    local_modules: bool = False
    """Of --to megatron: names of its own modules, not Transformer Engine's."""


@dataclass(frozen=True, kw_only=True)
class ExportOptions(RanksOptions, ShardedOptions):
    """Options of exports."""

    to: Literal["hf", "gguf"] | System = "hf"
    """What to write: a Hugging Face folder (hf), a GGUF file, or the checkpoint of a training system."""
    layout: ExpertLayout | None = None
    """The experts in --to transformer_engine: one weight each (default: per-gemm), or one."""
    adapter: str | None = option(None, metavar="ADAPTER")
    """Write this adapter alone, with the names of transformers' model, for peft."""
    base_model: str | None = option(None, metavar="NAME")
    """With --adapter: transformers' model, folder or hub id (default: DIR)."""
    type: Literal["f32", "f16", "bf16", "q8_0"] | None = None
    """Of the matrices of a GGUF file (default: f16)."""
    family: str | None = None
    """Architecture to write (default: the one that the model came from, or the first that fits it)."""
    recipe: Recipe | WeightsAlone | None = option(None, metavar="RECIPE")  # noqa: RUF009  a field
    """Store the weights of linear layers quantized first, as te-models quantize does."""
    format: str | None = None
    """Format of quantized weights, e.g. fp8 (default: as in the original, or the first that represents them)."""
    allow_requantize: bool = False
    """Quantize anew what the format cannot take over."""
    dequantize: bool = False
    """Write the values of quantized weights."""
    form: str | None = None
    """Kind of file to write, e.g. fused experts (default: as in the original, or the published one)."""
    dtype: Dtype | None = None
    """Convert the weights (default: keep the bits)."""


@dataclass(frozen=True, kw_only=True)
class RelayoutOptions(ShardedOptions):
    """Options of another expert layout."""

    layout: ExpertLayout
    """The layout to write: one tensor [E, out, in] per projection (grouped), or one [out, in] per expert."""


@dataclass(frozen=True, kw_only=True)
class QuantizeOptions(ShardedOptions):
    """Options of storing weights quantized."""

    recipe: Recipe | WeightsAlone = option(metavar="RECIPE")  # noqa: RUF009  a field
    """The recipe delayed, current, block, mxfp8 or nvfp4, or int4, int8 or mxfp4, which no run computes in."""


@dataclass(frozen=True, kw_only=True)
class DequantizeOptions(ShardedOptions):
    """Options of storing quantized weights as plain numbers."""

    dtype: Dtype | None = None
    """Of the weights (default: what they were before)."""


@dataclass(frozen=True, kw_only=True)
class UpcycleOptions(ShardedOptions):
    """Options of making a dense model a mixture."""

    num_experts: int = option(flag="--experts", metavar="E", least=1)
    """Experts in each layer."""
    topk: int = option(metavar="K", least=1)
    """Experts that each token uses."""
    layers: tuple[int, ...] | None = option(None, metavar="I")
    """Layers that get experts (default: all)."""
    noise_std: float = option(0.0, metavar="S")
    """Standard deviation of noise added to each expert's weights; 0 keeps exact copies."""
    seed: int = 0
    """Seed of the router's random weights and of the noise."""
    layout: ExpertLayout = "grouped"
    """The experts of a layer as one tensor, or one each."""


@dataclass(frozen=True, kw_only=True)
class ToyOptions(ShardedOptions):
    """Options of a small part of a model."""

    layers: int | None = option(None, metavar="N", least=1)
    """Layers to keep (default: 2)."""
    experts: int | None = option(None, metavar="E")
    """Experts to keep in each layer (default: all)."""
