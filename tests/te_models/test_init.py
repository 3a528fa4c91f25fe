"""`te-models init`: the file fits the machine that it is for, says why, and is refused where nothing fits."""

import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from te_models import GPTModel
from te_models.cli.main import main
from te_models.config import ConfigError
from te_models.init import Machine, sizes, write_config
from te_models.plan import Hardware, Plan
from te_models.training import TrainConfig, load_config
from te_models.training.ranks.data_parallel import Ranks
from te_models.training.run_data import open_data, training_windows, validation_batches, validation_windows
from tests.build import tiny

MIB = 2**20
LAPTOP = Machine("cpu", "CPU", 512 * MIB, None, compiles=True)
NEEDED = (
    "sizes ranks parameters optimizer activations tokens flops traffic compute_s communication_s step_s "
    "waits memory_limit host"
)


def planned(configs: Sequence[TrainConfig], ranks: int, hardware: Hardware) -> list[Plan | ConfigError]:
    """Plans of a model of 10 MiB with masters, whose windows take 64 KiB a token, an eighth with checkpointing."""
    plans: list[Plan | ConfigError] = []
    for config in configs:
        tokens = config.data.micro_batch_size * config.data.sequence_length
        window = tokens * (2**13 if config.model.activation_checkpointing else 2**16)
        moments = {"float32": 8.0, "bfloat16": 4.0, "float8": 2.07}[config.optimizer.moment_dtype]
        values = dict.fromkeys(NEEDED.split(), 0.0) | {
            "peak_flops": 1.0,
            "sizes": {"context_parallel_size": 1},
            "options": {},
            "traffic": [],
            "waits": {},
            "stretches": [],
        }
        values |= {"parameters": 10 * MIB, "optimizer": TRAINED * moments, "activations": window + 20 * MIB}
        plans.append(Plan.from_dict(values | {"memory_limit": hardware.memory_gib * 2**30}))
    return plans


TRAINED = 20 * MIB


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that holds a config.json alone."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sizes, "plan_each", planned)
    monkeypatch.setattr("te_models.init.write.count_parameters", lambda config: (TRAINED, TRAINED))
    folder = tmp_path / "smol"

    folder.mkdir()
    values = {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    values |= {"num_key_value_heads": 2, "intermediate_size": 96, "vocab_size": 300, "max_position_embeddings": 4096}
    values |= {"rms_norm_eps": 1e-5, "hidden_act": "silu", "rope_theta": 1e4, "tie_word_embeddings": False}
    (folder / "config.json").write_text(json.dumps(values))
    return folder


def decided(model: Path, task: Any = "sft", **machine: Any) -> tuple[TrainConfig, str]:
    file = model.parent / "run.toml"
    write_config(file, str(model), task, machine=replace(LAPTOP, **machine), force=True)
    return load_config(file), file.read_text()


@pytest.mark.parametrize(
    ("memory", "expected"),
    [  # windows of 1024 tokens take 64 MiB, 8 with checkpointing; what stays 190, 110 or 71.4 by the moments
        (512, (4, 4, 1024, False, "float32")),
        (330, (2, 8, 1024, False, "float32")),
        (260, (1, 16, 1024, False, "float32")),
        (230, (1, 16, 1024, False, "bfloat16")),
        (145, (4, 4, 1024, True, "bfloat16")),
        (119, (1, 16, 1024, True, "bfloat16")),
        (81, (1, 16, 1024, True, "float8")),
        (76, (1, 16, 512, True, "float8")),
    ],
)
def test_memory_decides_sizes(model: Path, memory: int, expected: tuple) -> None:
    config, text = decided(model, memory=memory * MIB)
    data = config.data
    found = data.micro_batch_size, data.gradient_accumulation, data.sequence_length
    assert (*found, config.model.activation_checkpointing, config.optimizer.moment_dtype) == expected
    assert f"planned of {memory}.0 MiB" in text
    assert ("longer windows do not fit" in text) == (expected[2] < 1024)


def test_a_run_that_cannot_fit_is_refused_and_leaves_no_file(model: Path) -> None:
    with pytest.raises(ConfigError, match=r"takes 72\.4 MiB, and may take 16.0 MiB .* --task lora or qlora"):
        decided(model, memory=16 * MIB)
    assert [path.name for path in model.parent.iterdir()] == ["smol"]


@pytest.mark.parametrize(
    ("device", "capability", "recipe"),
    [
        ("cpu", None, "none"),
        ("cuda", (8, 0), "none"),
        ("cuda", (8, 9), "current"),
        ("cuda", (9, 0), "current"),
        ("cuda", (10, 0), "mxfp8"),
        ("cuda", (12, 0), "mxfp8"),
    ],
)
def test_the_recipe_is_what_the_device_multiplies(device: str, capability: tuple[int, int] | None, recipe: str) -> None:
    assert replace(LAPTOP, device=device, capability=capability).recipe()[0] == recipe


def test_each_task_has_its_keys_and_reasons(model: Path) -> None:
    config, text = decided(model, "pretrain")
    assert config.model.config.vocab_size == 300
    assert "[model.config.attention]\nnum_attention_heads = 4\nnum_query_groups = 2\n" in text
    config, text = decided(model, "sft")
    assert (config.model.path, config.data.messages_field, config.data.pack_documents) == (str(model), "messages", True)
    config, text = decided(model, "lora")
    assert (config.lora.rank, config.precision.quantized_weights, config.optimizer.moment_dtype) == (
        16,
        False,
        "float32",
    )
    assert "moments" not in text and 'recipe = "none"' in text
    config, text = decided(model, "qlora", compiles=False)
    assert (config.precision.recipe, config.precision.quantized_weights, config.compile) == ("current", True, False)
    for line in text.splitlines():
        if line.split(" ")[0] in ("compile", "activation_checkpointing", "micro_batch_size", "quantized_weights"):
            assert "  # " in line or " # " in line, line


def test_data_says_what_it_is(model: Path, tmp_path: Path) -> None:
    (tmp_path / "corpus").mkdir()
    (tmp_path / "corpus/a.txt").write_text("some text")
    (tmp_path / "chats.jsonl").write_text('{"messages": []}\n')
    file = tmp_path / "run.toml"

    def written(task: Any, *data: str, tokenizer: str = "bytes") -> TrainConfig:
        write_config(file, str(model), task, data=data, tokenizer=tokenizer, machine=LAPTOP, force=True)
        return load_config(file)

    (tmp_path / "pairs.jsonl").write_text('{"prompt": "a", "chosen": "b", "rejected": "c"}\n' * 40)
    config = written("dpo", "pairs.jsonl")
    assert (config.data.format, config.data.skip_bad_rows, config.data.pack_documents) == (
        "preference_pairs",
        True,
        False,
    )
    assert (config.posttraining.method, config.lora.rank) == ("dpo", 16)
    with pytest.raises(ConfigError, match="--data has rows in the format text; allowed with --task dpo: preference"):
        written("dpo", "corpus")
    config = written("lora", "corpus").data
    assert (config.text, config.messages_field) == (("corpus",), None)
    with pytest.raises(ValueError, match="the tokenizer 'bytes' has no chat template"):
        written("lora", "chats.jsonl")
    with pytest.raises(ValueError, match=r"no text file matches 'absent/\*'"):
        written("lora", "absent/*")
    with pytest.raises(ValueError, match=r"smol has no tokenizer\.json"):
        written("sft", "chats.jsonl", tokenizer=str(model))


def test_the_verb_says_what_it_wrote_and_what_it_refuses(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Machine, "here", classmethod(lambda cls: LAPTOP))
    words = ["init", "--model", "smol", "--tokenizer", "bytes"]
    assert main([*words, "--task", "pretrain"]) == 0
    assert "of 512.0 MiB on CPU; train it: te-models train pretrain.toml" in capsys.readouterr().out
    assert main(["train", "pretrain.toml", "--dry-run"]) == 0
    Path("pairs.jsonl").write_text('{"prompt": "a", "chosen": "b", "rejected": "c"}\n' * 40)
    assert main([*words, "--task", "dpo", "--data", "pairs.jsonl"]) == 0
    assert 'format = "preference_pairs"' in Path("dpo.toml").read_text()
    assert main([*words, "--task", "pretrain", "--json", "--force"]) == 0
    written = capsys.readouterr().out
    assert json.loads(written[written.rindex('{\n  "output"') :])["config"]["data"]["tokenizer"] == "bytes"
    for refused, sentence in (
        (["--task", "pretrain"], "pretrain.toml exists; --force replaces it"),
        (["--task", "qlora", "--recipe", "none"], "allowed with --task qlora: the recipe whose format stores weights"),
        (["--task", "lora", "--output", "absent/a.toml"], "there is no folder absent"),
        (["--task", "lora", "--model", "absent"], "absent is not a folder, nor a hub id"),
        (["--task", "lora", "--output", "."], "--output is ., a folder; allowed: a file"),
    ):
        assert main([*words, *refused]) == 2 and sentence in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("task", ["pretrain", "sft", "lora", "qlora", "dpo"])
def test_what_is_written_trains(task: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the plan's own numbers: the file passes two steps of a run."""
    monkeypatch.chdir(tmp_path)
    GPTModel(tiny(vocab_size=300)).save_pretrained(tmp_path / "small")
    (tmp_path / "a.txt").write_text("some text. " * 3000)
    file = tmp_path / "run.toml"
    (tmp_path / "a.jsonl").write_text('{"prompt": "a", "chosen": "b", "rejected": "c"}\n' * 200)
    task_data = {} if task == "sft" else {"data": ["a.jsonl" if task == "dpo" else "a.txt"]}
    write_config(file, "small", task, tokenizer="bytes", machine=replace(LAPTOP, memory=2**33), **task_data)
    if task == "sft":
        file.write_text(file.read_text().replace('messages_field = "messages"', "").replace("chats.jsonl", "a.txt"))
    small = ["--steps", "2", "--no-compile", "--data.sequence-length", "16", "--schedule.warmup-steps", "1"]
    assert main(["train", str(file), *small, "--data.validation-fraction", "0.1"]) == 0


@pytest.mark.sentinels("sft", "dpo")
@pytest.mark.parametrize("task", ["pretrain", "sft", "lora", "qlora", "dpo"])
def test_a_run_takes_what_is_written_for_little_text(task: Any, model: Path, tmp_path: Path) -> None:
    """As many documents as there are: windows to train on, and full batches to validate with or none asked for."""
    for count in (1, 3, 30, 300, 1500):
        row = {"prompt": "how are you", "completion": "well"} if task == "sft" else {"text": "the sun shines and birds"}
        row = {"prompt": "how ", "chosen": "well", "rejected": "badly"} if task == "dpo" else row
        (tmp_path / "rows.jsonl").write_text((json.dumps(row) + "\n") * count)
        shutil.rmtree(tmp_path / "data", ignore_errors=True)
        write_config(
            file := tmp_path / "run.toml",
            str(model),
            task,
            data=["rows.jsonl"],
            tokenizer="bytes",
            machine=LAPTOP,
            force=True,
        )
        config = load_config(file)
        assert config.data.format == {"sft": "prompt_completion", "dpo": "preference_pairs"}.get(task)
        data = open_data(config, vocab_size=300, may_build=True)
        assert training_windows(config, data).parts
        windows = validation_windows(config, data)
        assert bool(windows) == bool(config.evaluation.every)
        for name, parts in windows.items():
            assert validation_batches(config, parts, Ranks(), name)


def test_a_row_that_a_run_would_refuse_is_refused(model: Path, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"text": "one"}\n{"text": 2}\n')
    with pytest.raises(ValueError, match=r"rows.jsonl, line 2: text is a int"):
        write_config(tmp_path / "a.toml", str(model), "lora", data=["rows.jsonl"], tokenizer="bytes", machine=LAPTOP)
    assert not (tmp_path / "a.toml").exists()
