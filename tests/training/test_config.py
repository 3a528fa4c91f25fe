"""TrainConfig: what TOML and the command line may say, and how wrong input is named."""

import tomllib
from pathlib import Path

import pytest

from te_models.config import ConfigError
from te_models.parallel import ParallelDims
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
    toml.write_text(TOML.replace('[model]\npath = "models/smollm2"\n', TABLE.partition("moe = ")[0]))
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
        ("steps = 100", 'steps = "many"', ": steps is 'many'; allowed: an integer"),
        ("steps = 100", "", " needs the key 'steps'"),
        ("lr = 1e-3", 'lr = "fast"', ": [optimizer] lr is 'fast'; allowed: a number"),
        ("lr = 1e-3", "lr = -1", ": [optimizer] lr is -1.0; allowed: a positive number"),
        ("lr = 1e-3", "clip_grad_norm = 0", ": [optimizer] clip_grad_norm is 0.0; allowed: a positive number or unset"),
        ("lr = 1e-3", "leraning_rate = 1e-3", ": [optimizer] has no key 'leraning_rate'; allowed: kind, lr, "),
        ("lr = 1e-3", "weight_deacy = 1e-3", "; did you mean 'weight_decay'?"),
        ("steps = 100", "steps = 100\nlearning_rate = 1e-3", "; did you mean [optimizer] lr?"),
        ("steps = 100", "steps = 100\nsequence_length = 3", "; did you mean [data] sequence_length?"),
        ("sequence_length = 256", "device = 'cpu'", "; did you mean device before the first table?"),
        ("[optimizer]", "[moe]", "; did you mean [model.config.moe]?"),
        ('kind = "wsd"', 'kind = "step"', ": [schedule] kind is 'step'; allowed: 'constant', 'linear', "),
        ("warmup_steps = 10", "warmup_steps = 101", ": [schedule] warmup_steps is 101; allowed: warm-up"),
        ('recipe = "mxfp8"', "quantized_weights = true", ": [precision] quantized_weights is True"),
        ('recipe = "mxfp8"', 'recipe = "mxpf8"', "'nvfp4'; did you mean 'mxfp8'?"),
        (
            'recipe = "mxfp8"',
            'recipe = "current"\n[parallel]\nexpert_dispatch = "all_to_all_quantized"',
            ": [parallel] expert_dispatch is 'all_to_all_quantized'; allowed: another way with precision.recipe",
        ),
        ("[data]", "[parallel]\ncpu_offload = true\n[data]", ": [parallel] cpu_offload is True; allowed: False with d"),
        ('recipe = "mxfp8"', "cache_weights = 1", ": [precision] cache_weights is 1; allowed: true or false"),
        ('path = "models/smollm2"', "", ": [model] is 'empty'; allowed: one of path, name, config and config_file"),
        ('path = "data/text"', 'path = "data/text"\ntext = ["a.txt"]', ": [data] tokenizer is None"),
        ('path = "data/text"', 'path = "data/text"\ntext = "a.txt"', ": [data] text is 'a.txt'; allowed: a list"),
        ('path = "data/text"', 'path = "data/text"\ntext = [3]', ": [data] text[0] is 3; allowed: a string"),
        ('path = "data/text"', "", ": [data] path is None; allowed: a folder, or data.blend"),
        ("[data]", "[dataset]", " has no key 'dataset'; allowed: output_dir, "),
        ("[schedule]", "[scheduler]", "; did you mean 'schedule'?"),
        ("steps = 100", "steps = 100\nlog = 3", ": log is 3; allowed: a table of keys"),
    ],
)
def test_wrong_toml_is_refused_by_file_table_and_key(toml: Path, old: str, new: str, named: str) -> None:
    toml.write_text(TOML.replace(old, new))
    with pytest.raises(ConfigError) as error:
        load_config(toml)
    assert str(error.value).startswith(str(toml)) and named in str(error.value)
    assert "Config" not in str(error.value)


TABLE = """
[model.config]
vocab_size = 257
hidden_size = 64
num_layers = 2
max_position_embeddings = 64
attention = { num_attention_heads = 4, num_query_groups = 2 }
mlp = { ffn_hidden_size = 128 }
moe = { num_moe_experts = 4, moe_router_topk = 2, moe_ffn_hidden_size = 64, router = { score = "sigmoid" } }
"""


@pytest.mark.parametrize(
    ("old", "new", "named"),
    [
        ("num_layers = 2", "num_layers = 0", "[model.config] num_layers is 0; allowed: a positive integer"),
        ("num_layers = 2", "num_layer = 2", "[model.config] has no key 'num_layer'; allowed: vocab_size, "),
        ("num_query_groups = 2", "num_query_groups = 3", "[model.config.attention] num_query_groups is 3; allowed: a"),
        ("hidden_size = 64", "hidden_size = 63", "[model.config.attention] kv_channels is None; allowed: a number"),
        ("moe_router_topk = 2", "moe_router_topk = 5", "[model.config.moe] moe_router_topk is 5; allowed: 1..num_moe"),
        (
            '"sigmoid"',
            '"sigmoidal"',
            "[model.config.moe.router] score is 'sigmoidal'; allowed: 'softmax', 'sigmoid', 'sqrtsoftplus'; did",
        ),
        ('"sigmoid"', '"sigmoid", num_groups = 3, topk_groups = 1', "[model.config.moe.router] num_groups is 3; allo"),
        ("mlp = { ffn_hidden_size = 128 }", "", "[model.config] needs the table [model.config.mlp]"),
        ("mlp = { ffn_hidden_size = 128 }", "mlp = 128", "[model.config] mlp is 128; allowed: a table of keys"),
    ],
)
def test_wrong_keys_of_the_model_are_refused_by_their_table(toml: Path, old: str, new: str, named: str) -> None:
    assert old in TABLE
    text = TOML.replace('[model]\npath = "models/smollm2"\n', TABLE)
    toml.write_text(text)
    load_config(toml)
    toml.write_text(text.replace(old, new))
    with pytest.raises(ConfigError) as error:
        load_config(toml)
    assert str(error.value).startswith(f"{toml}: {named}")


def test_a_file_can_leave_a_key_unset_that_has_a_default(toml: Path) -> None:
    toml.write_text(TOML.replace("lr = 1e-3", 'clip_grad_norm = "none"'))
    assert load_config(toml).optimizer.clip_grad_norm is None


def test_missing_or_malformed_files_are_one_sentence(tmp_path: Path, toml: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read .*absent\.toml: No such file"):
        load_config(tmp_path / "absent.toml")
    toml.write_text("steps = = 3")
    with pytest.raises(ConfigError, match="not valid TOML"):
        load_config(toml)


def test_command_line_overrides(toml: Path) -> None:
    arguments = ["--optimizer.lr", "2e-4", "--data.micro-batch-size", "4", "--no-compile"]
    arguments += ["--optimizer.clip-grad-norm", "None"]
    config = load_config(toml, arguments)
    assert (config.optimizer.lr, config.data.micro_batch_size) == (2e-4, 4)
    assert (config.compile, config.optimizer.clip_grad_norm) == (False, None)
    assert config.schedule == load_config(toml).schedule
    lists = ["--data.text", "a", "b", "--data.tokenizer=bytes", "--optimizer.betas", "0.8", "0.9", "--no-compile"]
    config = load_config(toml, [*lists, "--optimizer.master-weights", "--compile"])
    assert (config.data.text, config.optimizer.betas) == (("a", "b"), (0.8, 0.9))
    assert (config.optimizer.master_weights, config.compile) == (True, True)
    assert load_config(toml, ["--data.micro_batch_size", "3"]).data.micro_batch_size == 3


def test_options_may_give_what_the_file_lacks(toml: Path) -> None:
    toml.write_text(TOML.replace("steps = 100", "").replace('path = "data/text"', ""))
    config = load_config(toml, ["--steps", "70", "--data.path", "data/other"])
    assert (config.steps, config.data.path) == (70, "data/other")


def test_options_change_the_model_and_what_is_derived_from_it(toml: Path) -> None:
    toml.write_text(TOML.replace('[model]\npath = "models/smollm2"\n', TABLE))
    model = load_config(toml, ["--model.config.num-layers", "3", "--model.config.moe.router.score", "softmax"]).model
    assert (len(model.config.layer_types or ()), model.config.moe.layers) == (3, (0, 1, 2))
    assert model.config.moe.router.score == "softmax"


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--optimizer.lrr", "3"], "'--optimizer.lrr' is no option; did you mean '--optimizer.lr'?"),
        (["--lr", "3"], "'--lr' is no option; did you mean '--optimizer.lr'?"),
        (["--learning-rate", "3"], "'--learning-rate' is no option; did you mean '--optimizer.lr'?"),
        (["--optimizer.max_grad_norm", "3"], "'--optimizer.max_grad_norm' is no option; did you mean '--optimizer."),
        (["--steps", "1.5"], "--steps is '1.5'; allowed: an integer"),
        (["--steps"], "--steps: a value is missing"),
        (["--schedule.kind", "step"], "--schedule.kind is 'step'; allowed: 'constant', 'linear', 'cosine', "),
        (["--optimizer.lr", "-1"], "--optimizer.lr is -1.0; allowed: a positive number"),
        (["--schedule.warmup-steps", "500"], "--schedule.warmup-steps is 500; allowed: warm-up and decay within"),
        (["stray"], "'stray' belongs to no option"),
        (["--data.text", "['a']"], "--data.text is \"['a']\"; allowed: no value, or several, as in --data.text A B"),
    ],
)
def test_wrong_overrides_are_refused_by_name(toml: Path, arguments: list[str], named: str) -> None:
    with pytest.raises(ConfigError) as error:
        load_config(toml, arguments)
    assert str(error.value).startswith(named) and "\n" not in str(error.value)


def test_the_optimizer_of_parameters_in_main_memory_is_one_that_steps_there(toml: Path) -> None:
    options = ["--parallel.data-parallel-shard-size", "2", "--parallel.cpu-offload", "--compile-mode", "block"]
    assert load_config(toml, options).parallel.cpu_offload
    with pytest.raises(ConfigError, match=r"--optimizer.kind is 'muon'; allowed: another one with parallel.cpu_off"):
        load_config(toml, [*options, "--optimizer.kind", "muon"])


def test_the_documented_configuration_is_valid() -> None:
    """The TOML of docs/training.md, with its [model.config] table and its path in turn."""
    text = (Path(__file__).parents[2] / "docs" / "training.md").read_text(encoding="utf-8")
    run, table, *_, layout = (block.split("```", 1)[0] for block in text.split("```toml\n")[1:])
    config = TrainConfig.from_dict(tomllib.loads(run))
    assert (config.precision.recipe, config.schedule.kind) == ("mxfp8", "wsd")
    values = tomllib.loads(run) | tomllib.loads(table)
    model = TrainConfig.from_dict(values).model.config
    assert model is not None and model.moe is not None and model.moe.num_moe_experts == 8
    sizes = TrainConfig.from_dict(values | {"compile_mode": "block"} | tomllib.loads(layout)).parallel
    assert ParallelDims.of(sizes.to_dict(), 16).data_ranks == 8


@pytest.mark.parametrize(
    ("changes", "parallel", "named"),
    [
        ({}, {"tensor_model_parallel_size": 2}, "False without sequence_parallel"),
        ({}, {}, "False without sequence_parallel"),
        ({"compile": False}, None, "False with compile = false"),
        ({"precision": {"recipe": "mxfp8"}}, None, "False with precision.recipe = 'mxfp8', because the gathered rows"),
        ({"precision": {"dtype": "bf16-mixed"}}, None, "False with precision.dtype = 'bf16-mixed', because"),
    ],
)
def test_async_tensor_parallel_is_refused_where_nothing_or_half_would_overlap(
    changes: dict, parallel: dict | None, named: str
) -> None:
    split = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
    values = tomllib.loads(TOML) | {"precision": {}}
    overlapping = {"parallel": split | {"async_tensor_parallel": True}}
    assert TrainConfig.from_dict(values | overlapping).parallel.async_tensor_parallel
    if parallel is not None:
        overlapping = {"parallel": parallel | {"async_tensor_parallel": True}}
    with pytest.raises(ConfigError) as error:
        TrainConfig.from_dict(values | overlapping | changes)
    assert f"async_tensor_parallel is True; allowed: {named}" in str(error.value)
