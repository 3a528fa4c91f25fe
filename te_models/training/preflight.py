"""What a run is refused for at once: before weights are read, text is tokenized or anything is written."""

import contextlib
import math
import os
from pathlib import Path

import torch

from te_models.checkpoints import CheckpointError, expected_tensors, open_checkpoint
from te_models.checkpoints.families.base.text_part import text_family
from te_models.checkpoints.folder.hf_config import choose_family

from ..compile import async_tensor_parallel
from ..config import ConfigError, ModelConfig
from ..extras import require
from ..layouts import Facts, check_layout_rules
from ..lora.export import check_over_peft
from ..model import recompute
from ..model.parallel import check_deepep_device
from ..parallel.dims import ParallelDims
from ..parallel.stage_layout import stages_of
from ..sizes import format_size
from .build import DTYPES, read_model_config
from .checkpoints.checkpoint import TrainingState
from .checkpoints.checks import MODEL
from .config import TrainConfig
from .data.documents import matching_files
from .data.encoder import load_encoder
from .data.errors import DataError
from .log.writers import check_writers
from .lora import ADAPTER_HF
from .optimizer.qk_clip import check_qk_clip
from .posttraining.distillation import check_teacher
from .precision import RecipeSchedule
from .ranks.layout import stages_of_model
from .run_data import open_data, training_windows, validation_windows
from .trained import adapted_layers, check_globs, is_frozen

FINAL, FINAL_EMA = "final", "final-ema"
"""Where in a run's folder the trained model is, and its average."""

_MOMENTS = {"float32": 8, "bfloat16": 4, "float8": 2}
"""Bytes of the two moments of a parameter."""
_FEWEST_BYTES = 0.5
"""Of a weight that is stored quantized, in the smallest format."""


def check_run(
    config: TrainConfig,
    start: TrainingState | None,
    checkpoint: Path | None,
    device: str,
    dims: ParallelDims,
    *,
    reads_text: bool,
) -> tuple[ModelConfig, list[str]]:
    """Check what a configuration names and asks for; return the model's configuration, and notes for the user, a
    sentence each.

    Args:
        start: What was read of the checkpoint that the run continues from.
        checkpoint: Its folder.
        device: "cpu" or "cuda".
        dims: The layout of the ranks.
        reads_text: Whether this rank builds the data set if it does not exist.

    Raises:
        ConfigError, DataError, CheckpointError, MissingExtraError: the run cannot be what is asked for.
    """
    if config.log.plot:
        require("matplotlib.figure", "plot", feature="the loss plot (log.plot)")
    check_writers(config.log)
    model, notes = _read_model(config, start, checkpoint)
    check_model(config, model, device, dims)
    if reads_text:
        check_data(config, model)
    return model, notes


def check_model(config: TrainConfig, model: ModelConfig, device: str, dims: ParallelDims) -> None:
    """Raise ConfigError for a run that this model, device or layout cannot have."""
    if config.posttraining.method == "dpo" and config.model.path is None:
        raise ConfigError(
            "model.path is unset; allowed with posttraining.method = 'dpo': a model folder, whose weights are the "
            "reference"
        )
    if config.posttraining.method == "distill":
        check_teacher(config, model)
    check_globs(config, model)
    check_run_layout(config, model, dims)
    if config.parallel.expert_dispatch == "deepep":
        check_deepep_device(dims.expert_model_parallel_size, device)
    if config.parallel.async_tensor_parallel and device not in async_tensor_parallel.DEVICES:
        raise ConfigError(
            f"parallel.async_tensor_parallel is True; allowed on {device}: False, because ranks exchange rows through "
            f"memory that devices share, which torch has on {' and '.join(async_tensor_parallel.DEVICES)} alone"
        )
    if config.model.activation_offloading and device not in recompute.OFFLOADED:
        raise ConfigError(
            f"model.activation_offloading is True; allowed on {device}: False, because activations are in main memory"
        )
    _check_sizes(config, model, device, dims)
    if config.optimizer.qk_clip_threshold is not None:
        check_qk_clip(model)
    RecipeSchedule(config.precision, config.steps, model.num_layers)


def check_output(folder: Path) -> None:
    """Raise ConfigError where nothing can be written to a run's folder, or `final` there is something else."""
    nearest = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not nearest.is_dir():
        raise ConfigError(f"output_dir is {folder}, but {nearest} is not a folder")
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise ConfigError(f"output_dir is {folder}, but {nearest} cannot be written to")
    final = folder / FINAL
    if final.exists() and not (final / "config.json").is_file() and not (final.is_dir() and not any(final.iterdir())):
        raise ConfigError(f"{final} is not a model folder, and the trained model would take its place; move it away")


def _read_model(
    config: TrainConfig, start: TrainingState | None, checkpoint: Path | None
) -> tuple[ModelConfig, list[str]]:
    """Return the configuration of the model, and a note where no Hugging Face family can store it, or peft none of the
    adapters."""
    path = config.model.path if checkpoint is None else checkpoint / MODEL
    source = None
    if start is not None and start.model_config is not None:
        model = ModelConfig.from_dict(start.model_config)
        if config.model.path is not None:
            return model, []
    elif path is None:
        model = read_model_config(config)
    else:
        with open_checkpoint(path, mtp=config.model.mtp, verify=config.model.verify) as opened:
            model, source = opened.config, opened.source
    try:
        family = choose_family(model, source, None)
    except CheckpointError as error:
        return model, [f"no Hugging Face family stores this model, so it cannot be exported: {error}"]
    try:
        check_over_peft(adapted_layers(config, model), model, text_family(family, model))
    except ValueError as error:
        return model, [f"there will be no {ADAPTER_HF}/ for transformers' model: {error}"]
    return model, []


def check_run_layout(config: TrainConfig, model: ModelConfig, dims: ParallelDims) -> None:
    """Raise ConfigError where a layout cannot have this model, or these formats."""
    facts = Facts.of_run(config, model, dims=dims, stages=stages_of(config.parallel))
    check_layout_rules(facts)
    stages = stages_of_model(config, model)
    for layers in [] if stages is None else stages.layers(model.num_layers):
        check_layout_rules(Facts(model=model, layers=layers))


def _check_sizes(config: TrainConfig, model: ModelConfig, device: str, dims: ParallelDims) -> None:
    """Raise ConfigError where the memory is less than the run needs before its first step."""
    data, size = config.data, dims.expert_model_parallel_size * (dims.expert_tensor_parallel_size or 1)
    ids = 8 * data.sequence_length * data.micro_batch_size * data.gradient_accumulation
    host = host_memory()
    if ids > host:
        raise ConfigError(
            f"data.sequence_length, micro_batch_size and gradient_accumulation make {format_size(ids)} of token ids a "
            f"step, and the machine has {format_size(host)} of memory"
        )
    shared = max(size, dims.data_parallel_shard_size * dims.tensor_model_parallel_size)
    shared *= dims.pipeline_model_parallel_size
    counts = {n: math.prod(shape) for n, shape in expected_tensors(model, config.model.expert_layout).items()}
    parameters = sum(counts.values()) // shared
    trained = 0 if config.lora.rank else sum(c for n, c in counts.items() if not is_frozen(config, n)) // shared
    stored = _FEWEST_BYTES if config.precision.quantized_weights else DTYPES[config.precision.dtype].itemsize
    needed = parameters * stored + trained * _MOMENTS[config.optimizer.moment_dtype]
    memory = host if device == "cpu" else torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
    if needed > memory:
        raise ConfigError(
            f"the model has {parameters:,} parameters, {format_size(needed)} with the moments of {trained:,} that are "
            f"trained, and the device has {format_size(memory)} of memory"
        )


def check_data(config: TrainConfig, model: ModelConfig) -> None:
    """Raise DataError where a data set is missing and cannot be built, or does not fit the model."""
    data = config.data
    if data.path is None or Path(data.path).exists():
        found = open_data(config, vocab_size=model.vocab_size, may_build=False)
        training_windows(config, found)
        validation_windows(config, found)
        return
    if not data.text:
        raise DataError(f"data.path is {data.path}, which does not exist, and there is no data.text to build it from")
    for file in matching_files(data.text):
        if not os.access(file, os.R_OK):
            raise DataError(f"cannot read the text file {file}")
    fields = data.documents.reading(data.text_field, data.messages_field)
    encoder = load_encoder(str(data.tokenizer), format=fields.format, options=data.documents)
    for id in (*encoder.before, *encoder.behind):
        if id >= model.vocab_size:
            raise DataError(
                f"the tokenizer {data.tokenizer} puts the token id {id} beside each document; allowed: below "
                f"{model.vocab_size}, the size of the model's vocabulary"
            )


def host_memory(*, swap: bool = True) -> int:
    """Return the bytes of main memory, no more than this process may use of it, and of swap space."""
    try:
        fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
        total, swapped = (int(fields[name].split()[0]) << 10 for name in ("MemTotal", "SwapTotal"))
    except (OSError, KeyError, ValueError):
        total, swapped = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), 0
    with contextlib.suppress(OSError, ValueError):  # no such limit: "max"
        total = min(total, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    return total + swapped * swap
