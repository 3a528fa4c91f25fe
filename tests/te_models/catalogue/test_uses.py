"""What the names of the catalogue are good for: configurations, models without data, runs, plans and toys."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from te_models import GPTModel, ModelConfig
from te_models.catalogue import CatalogueError, entry, names
from te_models.catalogue.toy import toy_config
from te_models.checkpoints import CheckpointError, expected_tensors, inspect
from te_models.checkpoints.tools.statistics import count_parameters
from te_models.cli.main import main
from te_models.config import ConfigError
from te_models.init import Machine, sizes, write_config
from te_models.init.tables import changed_keys
from te_models.plan import Hardware, Plan
from te_models.training import TrainConfig
from te_models.training.build import read_model_config
from tests.te_models.test_init import TRAINED, planned

RUN = {"output_dir": "run", "steps": 1, "data": {"path": "tokens"}}


def test_a_model_without_data() -> None:
    model = GPTModel.from_catalogue("llama-3.2-1b", device="meta", dtype=torch.bfloat16)
    assert sum(p.numel() for p in model.parameters()) == entry("llama-3.2-1b").parameters
    assert model.config == ModelConfig.from_catalogue("LLAMA-3.2-1B")
    assert {name: tuple(p.shape) for name, p in model.named_parameters()} == expected_tensors(model.config)
    with pytest.raises(CatalogueError, match=r"did you mean 'llama-3\.2-1b'"):
        ModelConfig.from_catalogue("llama-3.2-1bb")


def test_a_run_takes_a_name() -> None:
    model = read_model_config(TrainConfig.from_dict(RUN | {"model": {"name": "olmoe-1b-7b"}}))
    assert model.moe.aux_loss_coeff == 0.01
    assert model.replace(moe=None) == ModelConfig.from_catalogue("olmoe-1b-7b").replace(moe=None)
    balanced = TrainConfig.from_dict(RUN | {"model": {"name": "deepseek-v3"}})
    assert read_model_config(balanced) == ModelConfig.from_catalogue("deepseek-v3")  # its router's bias balances it
    with pytest.raises(ConfigError, match=r"model\.name: .*'gpt3'"):
        read_model_config(TrainConfig.from_dict(RUN | {"model": {"name": "gpt3"}}))
    with pytest.raises(ConfigError, match="path and name'; allowed: one of path, name, config and config_file"):
        TrainConfig.from_dict(RUN | {"model": {"name": "gpt2", "path": "folder"}})


def test_plan_takes_a_name(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    asked: list[TrainConfig] = []

    def plan_run(config: TrainConfig, ranks: int, hardware: Hardware) -> Plan:
        asked.append(config)
        (found,) = planned([config], ranks, hardware)
        assert isinstance(found, Plan)
        return replace(found, step_s=1.0, ranks=ranks)

    monkeypatch.setattr("te_models.plan.plan_run", plan_run)
    assert main(["plan", "--model", "pythia-70m", "--ranks", "1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["fits"]
    (config,) = asked
    assert read_model_config(config) == ModelConfig.from_catalogue("pythia-70m")
    assert (config.data.sequence_length, config.precision.dtype) == (2048, "bf16")
    assert main(["plan", "--ranks", "1"]) == 2 and "CONFIG.toml, or --model NAME" in capsys.readouterr().err
    assert main(["plan", "--model", "pythia-71m", "--ranks", "1"]) == 2
    assert "did you mean 'pythia-" in capsys.readouterr().err


@pytest.mark.slow
def test_a_plan_by_name_has_the_parameters_of_the_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--model", "pythia-70m", "--ranks", "1", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["parameters"] == pytest.approx(2 * 70_426_624, rel=1e-3)  # in bfloat16


def test_init_takes_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sizes, "plan_each", planned)
    monkeypatch.setattr("te_models.init.write.count_parameters", lambda config: (TRAINED, TRAINED))
    machine = Machine("cpu", "CPU", 64 << 30, None, compiles=True)
    config, _ = write_config(tmp_path / "a.toml", "pythia-70m", "pretrain", tokenizer="bytes", machine=machine)
    assert config.model.name == "pythia-70m" and 'name = "pythia-70m"' in (tmp_path / "a.toml").read_text()
    config, _ = write_config(tmp_path / "b.toml", "pythia-70m", "lora", machine=machine)
    assert config.model.path == "models/pythia-70m"
    assert "te-models import EleutherAI/pythia-70m models/pythia-70m" in (tmp_path / "b.toml").read_text()
    assert main(["init", "--model", "pythia-71m", "--task", "lora"]) == 2
    assert "in the catalogue; did you mean 'pythia-" in capsys.readouterr().err


def test_the_keys_of_every_model_make_it_again() -> None:
    """The first configuration of a run says what a model's defaults do not, whatever follows from other keys."""
    for name in names():
        model = ModelConfig.from_catalogue(name)
        part: Any
        tables: dict[str, Any] = {}
        for table, key, value in changed_keys(model):
            part, place = model, tables
            for inner in table.split(".")[2:]:
                part, place = getattr(part, inner), place.setdefault(inner, {})
            place[key] = None if getattr(part, key) is None else value
        assert ModelConfig.from_dict(tables) == model, name


@pytest.mark.parametrize("name", ["qwen3-30b-a3b", "gemma-3-4b"])
def test_a_toy_of_random_weights(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["toy", name, str(tmp_path / "toy"), *(["--experts", "4"] if "30b" in name else [])]
    assert main([*words, "--dry-run"]) == 0 and not (tmp_path / "toy").exists()
    assert main(words) == 0
    config, family = toy_config(name, experts=4 if "30b" in name else None)
    assert inspect(tmp_path / "toy").config == config.to_dict()
    assert json.loads((tmp_path / "toy/config.json").read_text())["model_type"] == family.model_type
    ids = torch.randint(1024, (1, 8))
    assert GPTModel.from_pretrained(tmp_path / "toy")(ids).logits.isfinite().all()
    capsys.readouterr()
    assert main(["toy", "qwen3-30b-a3c", str(tmp_path / "other")]) == 2
    assert "did you mean 'qwen3-30b-a3b'" in capsys.readouterr().err


def test_too_few_layers_for_a_pattern_are_refused_with_enough() -> None:
    with pytest.raises(CheckpointError, match=r"layers is 4: .* by which gemma4 says layers; allowed: 6, or"):
        toy_config("gemma-4-26b-a4b", layers=4)
    assert toy_config("gemma-4-26b-a4b")[0].num_layers == 6


def test_rows_of_a_toy_s_experts_are_multiples_of_16_bytes() -> None:
    """Others are refused by transformers' grouped products."""
    config, _ = toy_config("qwen3.5-122b-a10b")
    assert config.moe.moe_ffn_hidden_size % 8 == config.hidden_size % 8 == 0


@pytest.mark.slow
def test_every_model_has_a_toy() -> None:
    """... of a size at which a test runs it, mimo_v2_flash's wide experts aside."""
    large = {}
    for name in names():
        config, _ = toy_config(name)
        count, _ = count_parameters(config)
        assert config.moe is None or config.moe.moe_ffn_hidden_size % 8 == 0, name
        if count > 500e6:
            large[name] = f"{count:,}"
    assert large == {}
