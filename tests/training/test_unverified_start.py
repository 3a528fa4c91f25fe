"""`model.verify = false`: a run starts from a folder without checking its weights against manifest.json."""

from pathlib import Path

import pytest
import torch

from te_models import GPTModel
from te_models.checkpoints import CheckpointError
from te_models.training import ModelSource, train
from te_models.training.build import build_model
from te_models.training.checkpoints.checkpoint import load_state
from tests.training.runs import tiny_model, tiny_run


def changed_folder(tmp_path: Path) -> tuple[Path, GPTModel]:
    """A folder with one changed bit in the last weight of its file, and the model that was saved there."""
    model = GPTModel(tiny_model(), dtype=torch.float32, device="cpu")
    model.save_pretrained(tmp_path / "model")
    (file,) = (tmp_path / "model").glob("*.safetensors")
    data = bytearray(file.read_bytes())
    data[-4] ^= 1
    file.write_bytes(data)
    return tmp_path / "model", model


def test_weights_are_checked_unless_the_run_says_otherwise(tmp_path: Path) -> None:
    folder, saved = changed_folder(tmp_path)
    config = tiny_run(tmp_path, model=ModelSource(path=str(folder)))
    with pytest.raises(CheckpointError, match="SHA-256"):
        build_model(config, "cpu", None)
    read = build_model(config.replace(model=config.model.replace(verify=False)), "cpu", None).state_dict()
    assert len([n for n, t in saved.state_dict().items() if not torch.equal(t, read[n])]) == 1


def test_a_run_may_go_on_with_another_choice(tmp_path: Path) -> None:
    config = tiny_run(tmp_path, steps=1)
    train(config)
    again = train(config.replace(steps=2, schedule=config.schedule.replace(steps=1, extend="hold"),
                                 model=config.model.replace(verify=False)))  # fmt: skip
    assert again.step == 2
    assert load_state(tmp_path / "run/checkpoints/step-00000002").config["model"]["verify"] is False
