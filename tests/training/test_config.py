"""TrainConfig: what TOML and the command line may say, and how wrong input is named."""

import tomllib
from pathlib import Path

import pytest

from te_models.config import ConfigError
from te_models.training import TrainConfig, load_config
from tests.training.runs import tiny_model, tiny_run

TOML = """
output_dir = "runs/a"
steps = 100

[model]
path = "models/smollm2"

[data]
path = "data/text"
sequence_length = 256

[optimizer]
lr = 1e-3

[schedule]
kind = "wsd"
warmup_steps = 10

[precision]
dtype = "bf16-mixed"
recipe = "mxfp8"
"""


@pytest.fixture
def toml(tmp_path: Path) -> Path:
    file = tmp_path / "run.toml"
    file.write_text(TOML)
    return file


def test_toml_fills_the_tree_and_leaves_defaults(toml: Path) -> None:
    config = load_config(toml)
    assert (config.steps, config.optimizer.lr, config.schedule.kind) == (100, 1e-3, "wsd")
    assert (config.precision.recipe, config.data.sequence_length, config.data.micro_batch_size) == ("mxfp8", 256, 1)
    assert config.optimizer.betas == (0.9, 0.95)


def test_model_may_be_a_toml_table(tmp_path: Path, toml: Path) -> None:
    table = """
[model.config]
vocab_size = 257
hidden_size = 64
num_layers = 2
max_position_embeddings = 64
attention = { num_attention_heads = 4, num_query_groups = 2 }
mlp = { ffn_hidden_size = 128 }
"""
    toml.write_text(TOML.replace('[model]\npath = "models/smollm2"\n', table))
    assert load_config(toml).model.config == tiny_model()
    changed = load_config(toml, ["--steps", "70"])
    assert (changed.steps, changed.model.config) == (70, tiny_model())


def test_json_round_trip_is_exact(tmp_path: Path) -> None:
    config = tiny_run(tmp_path, moe=True)
    assert TrainConfig.from_json(config.to_json()) == config


@pytest.mark.parametrize(
    ("old", "new", "named"),
    [
        ("steps = 100", "steps = 100\nstep = 3", "'step'"),
        ("lr = 1e-3", "learning_rate = 1e-3", "'learning_rate'"),
        ("lr = 1e-3", 'lr = "fast"', "OptimizerConfig.lr is 'fast'"),
        ('kind = "wsd"', 'kind = "linear"', "ScheduleConfig.kind is 'linear'"),
        ("warmup_steps = 10", "warmup_steps = 101", "warmup_steps is 101"),
        ('recipe = "mxfp8"', "quantized_weights = true", "quantized_weights is True"),
        ('path = "models/smollm2"', "", "one of path, config and config_file"),
        ('path = "data/text"', 'path = "data/text"\ntext = ["a.txt"]', "tokenizer is None"),
        ('path = "data/text"', "", "needs the field 'path'"),
        ("[schedule]", "[scheduler]", "'scheduler'"),
    ],
)
def test_wrong_toml_is_refused_by_name(toml: Path, old: str, new: str, named: str) -> None:
    toml.write_text(TOML.replace(old, new))
    with pytest.raises(ConfigError) as error:
        load_config(toml)
    assert named in str(error.value)
    assert str(toml) in str(error.value)


def test_missing_or_malformed_files_are_one_sentence(tmp_path: Path, toml: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read .*absent\.toml: No such file"):
        load_config(tmp_path / "absent.toml")
    toml.write_text("steps = = 3")
    with pytest.raises(ConfigError, match="not valid TOML"):
        load_config(toml)


def test_command_line_overrides(toml: Path) -> None:
    arguments = [
        "--optimizer.lr",
        "2e-4",
        "--data.micro-batch-size",
        "4",
        "--no-compile",
        "--optimizer.clip-grad-norm",
        "None",
    ]
    config = load_config(toml, arguments)
    assert (config.optimizer.lr, config.data.micro_batch_size) == (2e-4, 4)
    assert (config.compile, config.optimizer.clip_grad_norm) == (False, None)
    assert config.schedule == load_config(toml).schedule


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--optimizer.lrr", "3"], "--optimizer.lrr"),
        (["--steps", "1.5"], "--steps"),
        (["--schedule.kind", "linear"], "linear"),
        (["--optimizer.lr", "-1"], "optimizer.lr is -1.0"),
        (["stray"], "stray"),
    ],
)
def test_wrong_overrides_are_refused_by_name(toml: Path, arguments: list[str], named: str) -> None:
    with pytest.raises(ConfigError) as error:
        load_config(toml, arguments)
    assert named in str(error.value)
    assert "\n" not in str(error.value)


def test_help_lists_the_options(toml: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        load_config(toml, ["--help"])
    assert stop.value.code == 0
    assert "--optimizer.weight-decay" in capsys.readouterr().out


def test_the_documented_configuration_is_valid() -> None:
    """The TOML of docs/training.md, with its [model.config] table and its path in turn."""
    text = (Path(__file__).parents[2] / "docs" / "training.md").read_text(encoding="utf-8")
    run, table = (block.split("```", 1)[0] for block in text.split("```toml\n")[1:])
    config = TrainConfig.from_dict(tomllib.loads(run))
    assert (config.precision.recipe, config.schedule.kind) == ("mxfp8", "wsd")
    values = tomllib.loads(run) | tomllib.loads(table)
    model = TrainConfig.from_dict(values).model.config
    assert model is not None and model.moe is not None and model.moe.num_moe_experts == 8
