"""The file: what a task trains, with sizes that fit, as TOML whose comments say why."""

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from te_models.checkpoints.io.atomic import replaced_file
from te_models.checkpoints.tools.statistics import count_parameters

from ..config import ConfigError, ModelConfig
from ..parallel.dims import ParallelDims
from ..sizes import format_size, plural
from ..training.build import read_model_config
from ..training.config import TrainConfig
from ..training.config.file import read_config
from ..training.preflight import check_data, check_model, check_output
from .base import HELD_OUT, Amount, Base, Machine, amount_of, data_format
from .sizes import MOST_TOKENS, WINDOWS, RunSizes, first_fitting_sizes
from .tables import Tables, changed_keys

Task = Literal["pretrain", "sft", "lora", "qlora", "dpo"]
TASKS: dict[str, str] = {
    "pretrain": "Pretrain a model with the configuration of {name} from random weights",
    "sft": "Fine-tune {name} on chats; the loss counts what the assistant wrote",
    "lora": "Train LoRA adapters of {name}; its weights stay as they are",
    "qlora": "Train LoRA adapters of {name} over weights that are stored quantized",
    "dpo": "Train LoRA adapters of {name} on preference pairs (DPO); without the adapters it is the reference",
}
_RATES = {"pretrain": 3e-4, "sft": 2e-5, "lora": 2e-4, "qlora": 2e-4, "dpo": 5e-5}
_LENGTHS = {"cpu": 1024, "cuda": 2048}
_SKIPPED = "pairs that are longer than a window are passed over"
_STEPS, _WARMUP = 1000, 50


def write_config(
    output: Path,
    model: str,
    task: Task,
    *,
    recipe: str = "auto",
    data: Sequence[str] = (),
    tokenizer: str | None = None,
    machine: Machine | None = None,
    force: bool = False,
) -> tuple[TrainConfig, RunSizes]:
    """Write the first configuration of a task, checked as a run checks it; return it and its sizes.

    Arguments as `first_config` has them. Raises FileExistsError for a file that is there, without `force`.
    """
    if output.is_dir():
        raise ConfigError(f"--output is {output}, a folder; allowed: a file")
    if output.exists() and not force:
        raise ConfigError(f"{output} exists; --force replaces it")
    if not output.absolute().parent.is_dir():
        raise ConfigError(f"--output is {output}, but there is no folder {output.parent}")
    machine = machine or Machine.here()
    text, sizes, base = first_config(
        model, task, recipe=recipe, data=data, tokenizer=tokenizer, machine=machine, output=output
    )
    with replaced_file(output) as temporary:
        temporary.write_text(text, encoding="utf-8")
        config = read_config(temporary)
        _check(config, base, machine, data_named=bool(data))
    return config, sizes


def first_config(
    model: str,
    task: Task,
    *,
    recipe: str,
    data: Sequence[str],
    tokenizer: str | None,
    machine: Machine,
    output: Path,
) -> tuple[str, RunSizes, Base]:
    """Return the text of the first configuration of a task, what memory decided, and the model.

    Args:
        model: A folder or a hub id, of which only the configuration is read, or a name in the catalogue.
        recipe: A name of `precision.recipe`, or "auto": what the machine runs fastest.
        data: Text, patterns or folders, or one token data set; none: names to fill in.
        tokenizer: A folder, or "bytes"; None: the model's.

    Raises ConfigError where nothing fits, and for what `te-models train` refuses.
    """
    base = Base.read(model)
    path = base.path or f"models/{base.name}"
    tables = Tables()
    tables.add("", "output_dir", f"runs/{output.stem}")
    tables.add("", "steps", _STEPS)
    _add_compile(tables, base.config, machine)
    if task == "pretrain" and base.published is not None:
        tables.add("model", "name", base.published)
    elif task == "pretrain":
        for table, name, value in changed_keys(base.config):
            tables.add(table, name, value)
    else:
        tables.add("model", "path", path)
    _add_data(tables, task, data, tokenizer or path, base)
    if task == "dpo":
        tables.add("posttraining", "method", "dpo")
        tables.add("posttraining", "beta", 0.1, "how closely the model stays to the reference")
    if task in ("lora", "qlora", "dpo"):
        tables.add("lora", "rank", 16)
        tables.add("lora", "alpha", 32.0)
    tables.add("optimizer", "lr", _RATES[task])
    if task in ("pretrain", "sft"):
        tables.add("optimizer", "master_weights", True, "float32 copies: small updates are not rounded away")
    else:
        tables.add("optimizer", "weight_decay", 0.0)
    tables.add("schedule", "warmup_steps", _WARMUP)
    _add_precision(tables, task, recipe, base, machine)

    def planned(sizes: RunSizes) -> TrainConfig:
        values = tables.merged(sizes.values())
        values["model"] = {k: v for k, v in values["model"].items() if k not in ("path", "name", "config")}
        values["model"]["config"] = base.config.to_dict()
        return TrainConfig.from_dict(values | {"compile": False})

    length = min(_LENGTHS[machine.device], base.config.max_position_embeddings)
    amount = None
    if data and (base.path is not None or tokenizer is not None):
        enough = int(MOST_TOKENS[machine.device] / HELD_OUT)
        amount = amount_of(planned(RunSizes(length)).data, enough, base.config.vocab_size)
    longest = length if amount is None else amount.length(length)
    trained = 0
    if task in ("pretrain", "sft"):
        trained, _ = count_parameters(base.config)
    largest = WINDOWS if amount is None else amount.micro_batch(longest, WINDOWS)
    sizes = first_fitting_sizes(planned, longest, trained, machine.device, machine.memory, largest=largest)
    why = f"the text has {plural(amount.tokens, 'token')}" if amount is not None and longest < length else ""
    _add_sizes(tables, sizes, longest, base, machine, bool(trained), 2 if task == "dpo" else 1, why)
    _add_validation(tables, sizes, amount)
    return _heading(task, base, path, output) + tables.text(), sizes, base


def _heading(task: Task, base: Base, path: str, output: Path) -> str:
    lines = [TASKS[task].format(name=base.name) + ":"]
    if base.path is None and task != "pretrain":
        lines.append(f"    te-models import {base.asked} {path}")
    return "".join(f"# {line}\n" for line in [*lines, f"    te-models train {output}"])


def _add_compile(tables: Tables, model: ModelConfig, machine: Machine) -> None:
    if not machine.compiles:
        tables.add("", "compile", False, "torch.compile needs a C++ compiler, and there is none")
    elif machine.device == "cpu" or model.num_layers > 40:
        tables.add("", "compile_mode", "block", "one graph for each kind of layer: the first step comes sooner")


def _add_data(tables: Tables, task: Task, data: Sequence[str], tokenizer: str, base: Base) -> None:
    if len(data) == 1 and (Path(data[0]) / "meta.json").is_file() and (Path(data[0]) / "tokens.bin").is_file():
        tables.add("data", "path", data[0])
        if task == "dpo":
            tables.add("data", "skip_bad_rows", True, _SKIPPED)
        return
    format = data_format(data) if data else "text"
    if task == "sft" and format == "text":
        format = "messages"
    if task == "dpo":
        if data and format != "preference":
            raise ConfigError(
                f"--data has rows in the format {format}; allowed with --task dpo: preference pairs, with the fields "
                "chosen and rejected, and perhaps prompt"
            )
        format = "preference_pairs"
    chats = format != "text"
    kind = "pairs" if task == "dpo" else "chats" if chats else "text"
    text = list(data) or (["corpus/**/*.txt"] if kind == "text" else [f"{kind}.jsonl"])
    tables.add("data", "path", f"data/{base.name}-{kind}", "built from text on the first run")
    tables.add("data", "text", text, "" if data else "yours: files, folders or glob patterns")
    if format == "messages":
        tables.add("data", "messages_field", "messages", 'lines {"messages": [{"role": ..., "content": ...}, ...]}')
    elif chats:
        why = "the fields of the first row are its" + ("; chosen answers alone" if format == "preference" else "")
        tables.add("data", "format", format, why)
    tables.add("data", "tokenizer", tokenizer)
    if task == "dpo":
        tables.add("data", "skip_bad_rows", True, _SKIPPED)
    elif chats:
        tables.add("data", "pack_documents", True, "rows of whole chats that do not see each other")


def _add_precision(tables: Tables, task: Task, recipe: str, base: Base, machine: Machine) -> None:
    name, why = machine.recipe() if recipe == "auto" else (recipe, "")
    stored = task == "qlora" and not base.quantized
    if stored and name == "none":
        if recipe == "none":
            raise ConfigError("--recipe is 'none'; allowed with --task qlora: the recipe whose format stores weights")
        name, why = "current", "the format of the stored weights: FP8 with a scale per tensor"
    tables.add("precision", "dtype", "bf16")
    tables.add("precision", "recipe", name, why)
    if stored:
        tables.add("precision", "quantized_weights", True, "about a byte per weight of the base, in place of two")


def _add_sizes(
    tables: Tables, sizes: RunSizes, length: int, base: Base, machine: Machine, moments: bool, rows: int, shorter: str
) -> None:
    """Add what memory decided. rows: of a window. shorter: why windows are no longer than `length`, where it is for
    another reason."""
    data, positions = sizes.values()["data"], base.config.max_position_embeddings
    budget = f"{format_size(sizes.memory)} planned of {format_size(machine.memory)} for this run"
    if sizes.sequence_length < length:
        why = f"longer windows do not fit into {format_size(machine.memory)}"
    elif shorter:
        why = shorter
    elif length == positions:
        why = "all positions of the model"
    else:
        why = f"the model has {plural(positions, 'position')}; longer windows take more memory and time"
    tables.add("data", "sequence_length", sizes.sequence_length, why)
    tables.add("data", "micro_batch_size", sizes.micro_batch_size, budget)
    tokens = WINDOWS * sizes.sequence_length * rows
    tables.add("data", "gradient_accumulation", data["gradient_accumulation"], f"{plural(tokens, 'token')} make a step")
    why = "layers run again: their activations do not fit" if sizes.checkpointing else "all activations fit"
    tables.add("model", "activation_checkpointing", sizes.checkpointing, why)
    if moments:
        why = "float32 moments fit" if sizes.moments == "float32" else "float32 moments do not fit"
        tables.add("optimizer", "moment_dtype", sizes.moments, why)


def _add_validation(tables: Tables, sizes: RunSizes, amount: Amount | None) -> None:
    """Add what is held out and how often it is measured: nothing of text that is too short."""
    part = None if amount is None else amount.held_out(sizes.sequence_length, sizes.micro_batch_size)
    if amount is not None and part is not None:
        why = f"a micro-batch; the text has {plural(amount.windows(sizes.sequence_length), 'window')}"
        tables.add("data", "validation_fraction", part, why if part else why.replace("a micro-batch", "none"))
    if part != 0:
        tables.add("evaluation", "every", 100)


def _check(config: TrainConfig, base: Base, machine: Machine, *, data_named: bool) -> None:
    """Raise what a run would be refused for, but for a model that is on the hub, and text that is to be named."""
    model = base.config if config.model.config is None and config.model.name is None else read_model_config(config)
    assert model.replace(moe=base.config.moe) == base.config, "balance aside, which a file adds"
    check_model(config, model, machine.device, ParallelDims(ranks=1))
    check_output(Path(config.output_dir))
    if data_named and base.path is not None:
        check_data(config, model)
