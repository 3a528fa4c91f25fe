"""A run that goes on from what torchtitan's or Megatron-Core's checkpoint holds of weights and moments."""

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict

from te_models import GPTModel
from te_models.checkpoints import CheckpointError
from te_models.cli.main import main
from te_models.config import ConfigError
from te_models.training import CheckpointConfig, ModelSource, OptimizerConfig, PrecisionConfig, train
from te_models.training.checkpoints.checkpoint import load_state
from te_models.training.exchange import export_run, import_run
from tests.training.processes import as_toml
from tests.training.runs import curve, tiny_model, tiny_run

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.mark.sentinels("torch_dist")
@pytest.mark.parametrize("system", ["te_models", "torchtitan", "torch_dist"])
def test_a_run_goes_on_from_another_system(system: str, tmp_path: Path) -> None:
    """A step that torch's AdamW took, saved as DCP; five more here, and from what we export of them."""
    config = tiny_run(
        tmp_path,
        "run",
        steps=6,
        precision=PrecisionConfig(dtype="fp32"),
        optimizer=OptimizerConfig(lr=1e-3, clip_grad_norm=None),
        checkpoint=CheckpointConfig(every=1, keep_last=0),
    )
    model = GPTModel(tiny_model())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    ids = torch.randint(0, 250, (2, 16), generator=torch.Generator().manual_seed(0))
    model(ids, labels=ids).loss.backward()
    optimizer.step()
    weights = {name: p.detach() for name, p in model.named_parameters()}
    state = get_optimizer_state_dict(model, optimizer, options=StateDictOptions(flatten_optimizer_state_dict=True))
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=str(tmp_path / "saved"))
    (tmp_path / "config.json").write_text(tiny_model().to_json())
    folder = import_run(tmp_path / "saved", config, model=tmp_path / "config.json")
    assert folder.name == "step-00000001" and load_state(folder).step == 1
    train(config)
    first = curve(config)
    assert len(first) == 5

    export_run(folder, tmp_path / "out", to=system)
    again = config.replace(output_dir=str(tmp_path / "again"))
    import_run(tmp_path / "out", again, model=tmp_path / "config.json")
    train(again)
    assert curve(again) == first


@pytest.mark.sentinels("torchtitan")
@pytest.mark.parametrize("system", ["torchtitan", "torch_dist", "fsdp_dtensor"])
def test_a_run_of_ours_comes_back_with_its_losses(system: str, tmp_path: Path) -> None:
    """Out and in again after two steps: the five that follow have the same bits."""
    config = tiny_run(
        tmp_path,
        "whole",
        steps=7,
        model=ModelSource(config=tiny_model(moe=True)),
        precision=PrecisionConfig(dtype="fp32"),
        checkpoint=CheckpointConfig(every=2, keep_last=0),
    )
    train(config)
    before = tmp_path / "whole" / "checkpoints" / "step-00000002"
    out, again = str(tmp_path / "out"), config.replace(output_dir=str(tmp_path / "again"))
    assert main(["export", str(before), out, "--to", system]) == 0
    (tmp_path / "run.toml").write_text(as_toml(config))
    words = ["--config", str(before / "model"), "--run", str(tmp_path / "run.toml")]
    assert main(["import", out, again.output_dir, *words]) == 0
    train(again)
    assert curve(again) == curve(config)[2:]


def test_what_does_not_travel_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(tiny_model().to_json())
    weights = {name: p.detach() for name, p in GPTModel(tiny_model()).named_parameters()}
    dcp.save(weights, checkpoint_id=str(tmp_path / "saved"))
    config = tiny_run(tmp_path, "run", precision=PrecisionConfig(dtype="fp32"))
    with pytest.raises(CheckpointError, match="which moments are called that travel by parameter"):
        import_run(tmp_path / "saved", config, model=tmp_path / "config.json")
    other = config.replace(optimizer=OptimizerConfig(kind="muon"))
    with pytest.raises(ConfigError, match=r"optimizer\.kind is 'muon', of which"):
        import_run(tmp_path / "saved", other, model=tmp_path / "config.json")
