"""What can be known is refused before weights are read, text is tokenized or anything is written."""

import math
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

import te_models.training as training
from te_models.checkpoints import FAMILIES, CheckpointError, expected_tensors
from te_models.checkpoints.mapping.rank_shards import ShardPlace
from te_models.config import ConfigError, IndexerConfig, ModelConfig
from te_models.parallel import ParallelDims
from te_models.training import preflight, run_data, setup
from te_models.training.build import build_model, check_split_weights
from te_models.training.preflight import check_run, check_run_layout
from tests.compare import refused
from tests.training.processes import as_toml
from tests.training.runs import tiny_model, tiny_run


@pytest.fixture(autouse=True)
def nothing_is_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    """No weight is made or read, and no text tokenized, before a configuration is refused."""

    def begun(*_: object, **__: object) -> None:
        raise AssertionError("the run began")

    monkeypatch.setattr(setup, "build_model", begun)
    monkeypatch.setattr(run_data, "build_dataset", begun)


def data(config: training.TrainConfig, **changes: object) -> training.TrainConfig:
    return config.replace(data=config.data.replace(**changes))


def missing_tokenizer(config: training.TrainConfig, tmp_path: Path) -> training.TrainConfig:
    (tmp_path / "model").mkdir()
    return data(config, tokenizer=str(tmp_path / "model"))


def unreadable_output(config: training.TrainConfig, tmp_path: Path) -> training.TrainConfig:
    (tmp_path / "file").touch()
    return config.replace(output_dir=str(tmp_path / "file" / "run"))


def final_of_somebody_else(config: training.TrainConfig, tmp_path: Path) -> training.TrainConfig:
    (tmp_path / "run" / "final").mkdir(parents=True)
    (tmp_path / "run" / "final" / "thesis.tex").touch()
    return config


def small_data(config: training.TrainConfig, tmp_path: Path) -> training.TrainConfig:
    training.write_dataset(config.data.path, [[[1] * 40]], 257)
    return data(config, text=(), tokenizer=None)


def large_vocabulary(config: training.TrainConfig, tmp_path: Path) -> training.TrainConfig:
    training.write_dataset(config.data.path, [[[1, 257] * 2000]], 258)
    return data(config, text=(), tokenizer=None)


def small_vocabulary(config: training.TrainConfig, tmp_path: Path) -> training.TrainConfig:
    return config.replace(model=training.ModelSource(config=replace(tiny_model(), vocab_size=256)))


def damaged_metrics(config: training.TrainConfig, tmp_path: Path) -> training.TrainConfig:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n{"step": 2, "lo\n')
    return config


CASES: dict[str, tuple[Callable[[training.TrainConfig, Path], training.TrainConfig], str]] = {
    "tokenizer": (missing_tokenizer, r"tokenizer folder .*model has no tokenizer.json"),
    "glob": (lambda c, p: data(c, text=("absent/*.txt",)), r"no text file matches 'absent/\*.txt'"),
    "no data": (lambda c, p: data(c, text=(), tokenizer=None), "does not exist, and there is no data.text to build"),
    "positions": (lambda c, p: data(c, sequence_length=65), "sequence_length is 65, but the model has 64 positions"),
    "windows": (small_data, r"has 40 tokens: not one validation window of 32 tokens"),
    "data's vocabulary": (large_vocabulary, "has the token id 257; allowed: below 257, the size of the model's vocab"),
    "tokenizer's vocabulary": (small_vocabulary, "the tokenizer bytes puts the token id 256 beside each document"),
    "no folder": (unreadable_output, r"output_dir is .*, but .*file is not a folder"),
    "final": (final_of_somebody_else, "final is not a model folder, and the trained model would take its place"),
    "metrics": (damaged_metrics, r"metrics.jsonl, line 2 is damaged: .*; move the file away"),
    "layers": (
        lambda c, p: c.replace(precision=training.PrecisionConfig(recipe="mxfp8", first_layers_bf16=3)),
        "precision.first_layers_bf16 .* is 3; allowed: at most the 2 layers",
    ),
    "recipe": (
        lambda c, p: c.replace(precision=training.PrecisionConfig(recipe="mxfp8", recipe_options=("amax=3",))),
        "precision.recipe_options: ",
    ),
    "model": (lambda c, p: c.replace(model=training.ModelSource(path=str(p / "absent"))), "absent"),
    "experts": (
        lambda c, p: c.replace(
            parallel=training.ParallelConfig(expert_model_parallel_size=2),
            model=training.ModelSource(config=tiny_model(moe=True)),
        ),
        "allowed: a divisor of data_parallel_replicate_size, 1",
    ),
    "shards": (
        lambda c, p: c.replace(parallel=training.ParallelConfig(data_parallel_shard_size=2)),
        "data_parallel_shard_size is 2; allowed: a divisor of the number of ranks, 1",
    ),
    "stages": (
        lambda c, p: c.replace(parallel=training.ParallelConfig(pipeline_model_parallel_size=2)),
        "pipeline_model_parallel_size is 2; allowed: a divisor of the number of ranks, 1",
    ),
    "hidden_size": (
        lambda c, p: c.replace(model=training.ModelSource(config=tiny_model(hidden=2**30))),
        r"the model has [\d,]+ parameters, [\d,.]+ GiB with the moments of [\d,]+ that are trained, and the device has",
    ),
    "batch": (lambda c, p: data(c, micro_batch_size=10**12), r"make 476,837.2 GiB of token ids a step"),
    "accumulation": (lambda c, p: data(c, gradient_accumulation=10**12), r"make 476,837.2 GiB of token ids a step"),
}


STAGED: dict[str, tuple[Callable[[training.TrainConfig], training.TrainConfig], str]] = {
    "layers": (
        lambda c: c.replace(model=training.ModelSource(config=tiny_model())),
        "is 2 with 2 stages each, and the model has 2 layers; allowed: at most as many stages",
    ),
    "compiled": (
        lambda c: c.replace(compile=True, compile_mode="block"),
        "compile is True; allowed with parallel.pipeline_schedule = 'ZBVZeroBubble', .*: False",
    ),
    "shards": (
        lambda c: c.replace(parallel=c.parallel.replace(data_parallel_shard_size=2)),
        "pipeline_schedule is 'ZBVZeroBubble'; allowed with data_parallel_shard_size: 1F1B, GPipe",
    ),
}


@pytest.mark.parametrize("case", STAGED)
def test_pipeline_stages_that_cannot_be_are_refused(tmp_path: Path, case: str) -> None:
    change, sentence = STAGED[case]
    parallel = training.ParallelConfig(pipeline_model_parallel_size=2, pipeline_schedule="ZBVZeroBubble")
    with pytest.raises(ConfigError, match=sentence):
        change(tiny_run(tmp_path, parallel=parallel, model=training.ModelSource(config=tiny_model(layers=4))))


def test_async_tensor_parallel_needs_memory_that_devices_share(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parallel = training.ParallelConfig(tensor_model_parallel_size=2, sequence_parallel=True, async_tensor_parallel=True)
    config = tiny_run(tmp_path, parallel=parallel, compile=True)
    dims = ParallelDims.of(config.parallel.to_dict(), 2)
    with pytest.raises(ConfigError, match=r"async_tensor_parallel is True; allowed on cpu: False, because .* on cuda"):
        check_run(config, None, None, "cpu", dims, reads_text=False)
    monkeypatch.setattr("te_models.compile.async_tensor_parallel.DEVICES", ("cpu",))
    check_run(config, None, None, "cpu", dims, reads_text=False)


@pytest.mark.parametrize("case", CASES)
def test_refused_before_anything_begins(tmp_path: Path, case: str) -> None:
    change, sentence = CASES[case]
    run = tiny_run(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises((ConfigError, training.DataError, CheckpointError, ValueError), match=sentence) as raised:
        config = change(run, tmp_path)
        before = sorted(tmp_path.rglob("*"))
        training.train(config)
    assert "\n" not in str(raised.value) and len(str(raised.value)) < 400
    assert sorted(tmp_path.rglob("*")) == before


def test_a_folder_that_may_not_be_written_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight.os, "access", lambda path, mode: not mode & os.W_OK)
    with pytest.raises(ConfigError, match=f"output_dir is .*run, but {tmp_path} cannot be written to"):
        training.train(tiny_run(tmp_path))


def test_a_model_that_no_family_stores_is_noted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As `upcycle` says it; the run is not refused."""
    strange = replace(tiny_model(), residual_multiplier=0.5, block="parallel")
    for model, noted in ((strange, True), (tiny_model(), False)):
        with pytest.raises(AssertionError, match="the run began"):
            training.train(tiny_run(tmp_path, model=training.ModelSource(config=model)))
        told = capsys.readouterr().err
        assert ("te-models: note: no Hugging Face family stores this model, so it cannot be exported" in told) == noted


def test_adapters_that_peft_cannot_have_are_noted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Before they are trained; targets that leave them out say nothing."""
    sizes = {"vocab_size": 257, "hidden_size": 32, "num_hidden_layers": 2, "num_heads": 4, "head_dim": 16}
    model = FAMILIES["mamba2"].read_config({"model_type": "mamba2", "n_groups": 1, **sizes})
    for targets, noted in ((("all-linear",), True), (("linear_in",), False)):
        lora = training.LoRAConfig(rank=2, targets=targets)
        with pytest.raises(AssertionError, match="the run began"):
            training.train(tiny_run(tmp_path, model=training.ModelSource(config=model), lora=lora))
        told = capsys.readouterr().err
        said = "note: there will be no adapter-hf/ for transformers' model: decoder.layers.0.mixer.linear_proj is "
        assert (said in told) == noted and ("linear_proj" in told) == noted


@pytest.mark.parametrize(
    ("key", "value", "sentence"),
    [
        ("num_layers = 2", "num_layers = 1_000_000_000", "num_layers is 1000000000; allowed: at most 2000"),
        ("num_layers = 2", f"num_layers = {10**40}", "allowed: at most 2000"),
        ("steps = 6", f"steps = {10**30}", "allowed: a positive integer up to 1000000000000"),
        ("lr = 0.003", "lr = nan", "lr is nan; allowed: a finite number"),
        ("lr = 0.003", "lr = inf", "lr is inf; allowed: a finite number"),
        ("every_minutes = 10.0", "every_minutes = -1", "every_minutes is -1.0; allowed: zero or a positive number"),
        ("timeout_minutes = 10.0", "timeout_minutes = 0", "distributed_timeout_minutes is 0.0; allowed: up to 10080"),
    ],
)
def test_absurd_numbers_are_answered_at_once(tmp_path: Path, key: str, value: str, sentence: str) -> None:
    text = as_toml(tiny_run(tmp_path))
    assert key in text
    (tmp_path / "train.toml").write_text(text.replace(key, value))
    refused(lambda: training.load_config(tmp_path / "train.toml"), sentence, error=ConfigError)


@pytest.mark.parametrize(
    ("sizes", "changes", "sentence"),
    [
        ({"context_parallel_size": 2}, {"sequence_length": 34}, "sequence_length is 34; .* = 2: a multiple of 4"),
        (
            {"tensor_model_parallel_size": 2, "sequence_parallel": True},
            {"sequence_length": 33, "micro_batch_size": 1},
            "micro_batch_size and sequence_length make 33 tokens; .*: a multiple of tensor_model_parallel_size, 2",
        ),
    ],
)
def test_tokens_that_ranks_cannot_share(tmp_path: Path, sizes: dict, changes: dict, sentence: str) -> None:
    run = tiny_run(tmp_path).replace(parallel=training.ParallelConfig(**sizes))
    with pytest.raises(ConfigError, match=sentence):
        data(run, **changes)


def indexed(model: ModelConfig) -> ModelConfig:
    indexer = IndexerConfig(n_heads=2, head_dim=16, topk=4)
    return model.replace(attention=model.attention.replace(indexer=indexer))


@pytest.mark.parametrize(
    ("sizes", "model", "sentence"),
    [
        ({"context_parallel_size": 8, "cp_comm_type": "a2a"}, tiny_model(), "heads is 4; .* a multiple of the 8 ranks"),
        (
            {"context_parallel_size": 4, "tensor_model_parallel_size": 2, "cp_comm_type": "a2a"},
            tiny_model(),
            "heads is 4, 2 on each of 2 ranks that split layers; allowed with cp_comm_type 'a2a': a multiple of the 4",
        ),
        ({"context_parallel_size": 2, "cp_comm_type": "p2p"}, indexed(tiny_model()), "indexer: .* 'p2p': attention wi"),
    ],
)
def test_keys_that_cannot_be_reached(tmp_path: Path, sizes: dict, model: ModelConfig, sentence: str) -> None:
    run = data(tiny_run(tmp_path))
    with pytest.raises(ConfigError, match=sentence):
        config = run.replace(parallel=training.ParallelConfig(**sizes))
        preflight.check_run_layout(config, model, ParallelDims.of(sizes, 8))


def test_options_of_what_is_not_there_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cp_comm_type is 'p2p'; allowed: 'all_gather' with context_parallel_size"):
        training.ParallelConfig(cp_comm_type="p2p")
    with pytest.raises(ConfigError, match="moe_shared_expert_overlap is True; allowed: False without expert_model_par"):
        training.ParallelConfig(moe_shared_expert_overlap=True)
    sizes = {"expert_model_parallel_size": 2, "moe_shared_expert_overlap": True}
    run = tiny_run(tmp_path, moe=True)
    with pytest.raises(ConfigError, match=r"a model with moe\.shared_expert_intermediate_size, without moe\.own"):
        run.replace(parallel=training.ParallelConfig(**sizes), compile=False)
    with pytest.raises(ConfigError, match="moe_shared_expert_overlap is True; allowed: False with compile = true"):
        run.replace(parallel=training.ParallelConfig(**sizes), compile=True)


DEEPEP = {"expert_model_parallel_size": 2, "expert_dispatch": "deepep"}


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"compile": True}, "compile is True; allowed: False with parallel.expert_dispatch = 'deepep', whose calls"),
        ({"precision": training.PrecisionConfig(dtype="fp32")}, "precision.dtype is 'fp32'; allowed: 'bf16' and 'bf16"),
    ],
)
def test_runs_whose_tokens_cannot_travel_by_deep_ep(tmp_path: Path, changes: dict, sentence: str) -> None:
    values = {"precision": training.PrecisionConfig(), "parallel": training.ParallelConfig(**DEEPEP)}
    refused(lambda: tiny_run(tmp_path, moe=True, **values | changes), sentence, error=ConfigError)
    tiny_run(tmp_path, moe=True, **values | changes | {"parallel": training.ParallelConfig(expert_dispatch="deepep")})


@pytest.mark.parametrize(
    ("sizes", "sentence"),
    [
        ({}, "expert_dispatch is 'deepep' on the device cpu; allowed: a CUDA device, or 'all_to_all'"),
        (
            {"expert_model_parallel_size": 1, "expert_tensor_parallel_size": 2},
            "expert_tensor_parallel_size is 2; allowed with expert_dispatch 'deepep': 1 or tensor_model_parallel_size",
        ),
    ],
)
def test_ranks_among_which_deep_ep_does_not_work(tmp_path: Path, sizes: dict, sentence: str) -> None:
    sizes = DEEPEP | sizes
    parallel = training.ParallelConfig(**sizes)
    del sizes["expert_dispatch"]
    dims = ParallelDims.of(sizes, 2)
    with pytest.raises(ValueError, match=sentence):
        config = tiny_run(tmp_path, moe=True, parallel=parallel, precision=training.PrecisionConfig())
        preflight.check_run(config, None, None, "cpu", dims, reads_text=False)


def test_sequence_parallelism_needs_split_layers() -> None:
    with pytest.raises(ConfigError, match="sequence_parallel is True; allowed: False with tensor_model_p"):
        training.ParallelConfig(sequence_parallel=True)


@pytest.mark.parametrize(
    ("sizes", "changes", "sentence"),
    [
        ({"data_parallel_shard_size": 4}, {}, "reshard_after_forward is 3; allowed: a divisor of the 4 ranks"),
        ({"data_parallel_shard_size": 3, "expert_model_parallel_size": 3}, {}, "distributed experts: default, always"),
        ({"data_parallel_shard_size": 3}, {"recipe": "mxfp8", "quantized_weights": True}, "quantized_weights or dis"),
    ],
)
def test_shards_that_cannot_be_kept_over_some_ranks(tmp_path: Path, sizes: dict, changes: dict, sentence: str) -> None:
    parallel = training.ParallelConfig(**sizes, reshard_after_forward=3)
    experts = tiny_model(moe=True)
    model = experts.replace(moe=replace(experts.moe, num_moe_experts=6))
    options = {"model": training.ModelSource(config=model), "precision": training.PrecisionConfig(**changes)}
    with pytest.raises(ConfigError, match=sentence):
        run = tiny_run(tmp_path, compile=False, parallel=parallel, **options)
        check_run_layout(run, model, ParallelDims.of(sizes, sizes["data_parallel_shard_size"]))
    with pytest.raises(ConfigError, match="reshard_after_forward is 1; allowed: 'default', 'always', 'never' or 2"):
        training.ParallelConfig(data_parallel_shard_size=2, reshard_after_forward=1)
    with pytest.raises(ConfigError, match="reduce_dtype is 'bfloat16'; allowed: 'float32' without shards"):
        training.ParallelConfig(reduce_dtype="bfloat16")


@pytest.mark.parametrize(
    ("recipe", "hidden", "sentence"),
    [
        ("mxfp8", 64, "is quantized in blocks of 32 rows, between which it cannot be split so"),
        ("current", 128, "one scale per matrix; allowed: recipes with scales of blocks alone"),
        ("mxfp8", 128, None),
    ],
)
def test_stored_weights_that_two_ranks_cannot_split(
    recipe: str, hidden: int, sentence: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    precision = training.PrecisionConfig(recipe=recipe, quantized_weights=True)
    run = tiny_run(tmp_path, model=training.ModelSource(config=tiny_model(hidden=hidden)), precision=precision)
    model = build_model(run, "cpu", None)
    monkeypatch.setattr("te_models.parallel.parts.shard_place", lambda model: ShardPlace(tp_rank=0, tp_size=2))
    if sentence is None:
        check_split_weights(model)
        return
    with pytest.raises(ConfigError, match=sentence):
        check_split_weights(model)


def test_memory_counts_the_moments_of_what_is_trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The moments of a base under adapters, or of frozen weights, do not exist."""
    config = tiny_run(tmp_path)
    model = tiny_model()
    parameters = sum(math.prod(shape) for shape in expected_tensors(model, "grouped").values())
    monkeypatch.setattr(preflight, "host_memory", lambda: 6 * parameters)
    one = ParallelDims(ranks=1)
    refused(lambda: preflight.check_model(config, model, "cpu", one), "with the moments of", error=ConfigError)
    for changes in (
        {"lora": training.LoRAConfig(rank=2)},
        {"optimizer": config.optimizer.replace(freeze=("decoder.*", "embedding.*"))},
    ):
        preflight.check_model(config.replace(**changes), model, "cpu", one)
    monkeypatch.setattr(preflight, "host_memory", lambda: parameters)
    stored = config.precision.replace(recipe="block", quantized_weights=True)
    lora = config.replace(lora=training.LoRAConfig(rank=2))
    preflight.check_model(lora.replace(precision=stored), model, "cpu", one)
    with pytest.raises(ConfigError, match="with the moments of 0 that are trained"):
        preflight.check_model(lora, model, "cpu", one)
