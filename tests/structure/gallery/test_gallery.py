"""The configurations of examples/configs/: sizes, tasks and planned memory are right, and small models train."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from te_models.parallel import ParallelDims
from te_models.plan import Hardware, Plan
from te_models.plan.process import plan_each
from te_models.sizes import format_size
from te_models.training import TrainConfig, load_config, read_metrics, train
from te_models.training.precision import build_recipe
from te_models.training.preflight import check_run_layout
from te_models.training.trained import check_globs
from tests.structure.gallery.models import MODELS, model_of

EXAMPLES = Path(__file__).parents[3] / "examples"
GALLERY = sorted(path.stem for path in (EXAMPLES / "configs").iterdir())
ROW = re.compile(r"\| \[(.+)\]\(configs/(.+)\.toml\) \| (.+) \| (.+) \| (\d+) \| ([\d,]+) \| (.+) \|")
ROWS = {found[1]: found for found in map(ROW.fullmatch, (EXAMPLES / "README.md").read_text().splitlines()) if found}


def text_of(name: str) -> str:
    return (EXAMPLES / "configs" / f"{name}.toml").read_text()


def config_of(name: str) -> TrainConfig:
    return load_config(EXAMPLES / "configs" / f"{name}.toml")


def model_name(name: str) -> str:
    return name.rpartition("-")[0]


def with_model(name: str, *, small: bool = False) -> TrainConfig:
    """The run with the sizes of its model, or of a small one, in place of a folder of weights."""
    config = config_of(name)
    sizes = config.model.config
    model = model_of(model_name(name), small=small)
    if sizes is not None and sizes.moe is not None and model.moe is not None:
        model = model.replace(moe=model.moe.replace(aux_loss_coeff=sizes.moe.aux_loss_coeff))
    return config.replace(model=config.model.replace(path=None, config=model), compile=False)


def test_every_family_and_task_is_there_and_in_the_table() -> None:
    assert list(ROWS) == sorted(ROWS, key=list(ROWS).index) and sorted(ROWS) == GALLERY
    assert {model_name(name) for name in GALLERY} == set(MODELS)
    assert {name.rpartition("-")[2] for name in GALLERY} == {"pretrain", "sft", "lora", "qlora"}


@pytest.mark.parametrize("name", GALLERY)
def test_a_configuration_is_of_its_model_and_says_its_memory(name: str) -> None:
    config, model = config_of(name), model_of(model_name(name))
    ranks, length, memory = int(ROWS[name][5]), int(ROWS[name][6].replace(",", "")), ROWS[name][7]
    assert (config.data.sequence_length, config.output_dir) == (length, f"runs/{name}")
    assert f": {memory}." in text_of(name).splitlines()[0]
    task = ROWS[name][4]
    adapted = config.lora.rank > 0, config.precision.quantized_weights
    assert adapted == (task in ("lora", "qlora"), task == "qlora")
    assert (config.data.messages_field is not None) == (task == "sft")
    if config.model.config is not None:
        assert with_model(name).model.config == config.model.config
    check_globs(config, model)
    build_recipe(config.precision, model.num_layers)
    check_run_layout(config, model, ParallelDims.of(vars(config.parallel), ranks))


def planned(names: list[str], ranks: int) -> list[str]:
    found = plan_each([with_model(name) for name in names], ranks, Hardware())
    return [format_size(plan.memory) if isinstance(plan, Plan) else str(plan) for plan in found]


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 8])
def test_the_planned_memory_of_all(ranks: int) -> None:
    names = [name for name in GALLERY if int(ROWS[name][5]) == ranks]
    assert planned(names, ranks) == [ROWS[name][7] for name in names]


@pytest.mark.sentinels("qwen3-8b-lora")
@pytest.mark.parametrize("name", GALLERY)
def test_a_small_model_of_each_trains(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text("A text of a few words. " * 400)
    config = with_model(name, small=True)
    text = {"text": ("text.txt",), "tokenizer": "bytes", "messages_field": None, "sequence_length": 32}
    config = config.replace(
        steps=2,
        device="cpu",
        data=config.data.replace(**text, validation_fraction=0.1),
        parallel=config.parallel.replace(data_parallel_shard_size=1),
        schedule=config.schedule.replace(warmup_steps=1),
        evaluation=config.evaluation.replace(batches=1),
        log=config.log.replace(progress=False),
    )
    train(config)
    assert [row["step"] for row in read_metrics(Path(config.output_dir) / "metrics.jsonl")] == [1, 2]
    assert (Path(config.output_dir) / "final/config.json").is_file()
