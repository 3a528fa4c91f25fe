"""te_models folders to distributed checkpoints of training systems and back, and checkpoints that torch's DCP wrote."""

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from te_models import GPTModel, MLPConfig, ModelConfig
from te_models.checkpoints import CheckpointError, export_checkpoint, import_checkpoint
from te_models.checkpoints.foreign import written
from te_models.checkpoints.foreign.known import SYSTEMS
from te_models.cli.main import main
from tests.build import tiny, tiny_moe

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
CONFIGS = {"dense": tiny(), "moe": tiny_moe(moe_ffn_hidden_size=48).replace(mlp=MLPConfig(ffn_hidden_size=48))}


def saved(config: ModelConfig, folder: Path) -> GPTModel:
    torch.manual_seed(0)
    model = GPTModel(config)
    model.save_pretrained(folder)
    return model


@pytest.mark.sentinels("dense-torchtitan", "moe-torch_dist", "moe-transformers")
@pytest.mark.parametrize("system", SYSTEMS)
@pytest.mark.parametrize("kind", CONFIGS)
def test_there_and_back(kind: str, system: str, tmp_path: Path) -> None:
    model = saved(CONFIGS[kind], tmp_path / "model")
    export_checkpoint(tmp_path / "model", tmp_path / "out", to=system)
    import_checkpoint(tmp_path / "out", tmp_path / "back", config=tmp_path / "model")
    back = GPTModel.from_pretrained(tmp_path / "back")
    for (name, a), b in zip(model.named_parameters(), back.parameters(), strict=True):
        assert torch.equal(a, b), name


def test_chunks_are_joined(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of a tensor in several chunks, as many ranks write it."""
    monkeypatch.setattr(written, "CHUNK", 700)
    test_there_and_back("dense", "torchtitan", tmp_path)


def test_torch_loads_what_is_written(tmp_path: Path) -> None:
    model = saved(CONFIGS["dense"], tmp_path / "model")
    export_checkpoint(tmp_path / "model", tmp_path / "out", to="te_models")
    found = {name: torch.empty_like(p) for name, p in model.named_parameters()}
    dcp.load(found, checkpoint_id=str(tmp_path / "out"))
    for name, parameter in model.named_parameters():
        assert torch.equal(found[name], parameter), name


def test_torchtitan_llama_is_read(tmp_path: Path) -> None:
    """Its channels are rotated in pairs: the rows of q and k are permuted as its own script for llama does it."""
    config = CONFIGS["dense"]
    model = saved(config, tmp_path / "model")
    export_checkpoint(tmp_path / "model", tmp_path / "out", to="torchtitan")
    attention = config.attention
    size = attention.kv_channels
    rows = model.decoder.layers[0].self_attention.linear_qkv.weight[: attention.num_attention_heads * size]
    heads = rows.view(attention.num_attention_heads, 2, size // 2, -1).transpose(1, 2).reshape(rows.shape)
    found = {"layers.0.attention.wq.weight": torch.empty_like(rows)}
    dcp.load(found, checkpoint_id=str(tmp_path / "out"))
    assert torch.equal(found["layers.0.attention.wq.weight"], heads)


def test_a_checkpoint_of_model_and_optimizer_is_read(tmp_path: Path) -> None:
    """Below a name, and beside an optimizer and values that are no tensors."""
    model = saved(CONFIGS["dense"], tmp_path / "model")
    state = {"model": model.state_dict(), "optim": {"state.x.exp_avg": torch.zeros(3)}, "step": 4}
    state["model"] = {name: value for name, value in state["model"].items() if isinstance(value, torch.Tensor)}
    dcp.save(state, checkpoint_id=str(tmp_path / "saved"))
    out = str(tmp_path / "back")
    assert main(["import", str(tmp_path / "saved"), out, "--config", str(tmp_path / "model")]) == 0
    back = GPTModel.from_pretrained(out)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), back.parameters(), strict=True))


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ([], "is no model folder; --config says which model it is of"),
        (["--config", "MODEL", "--mtp"], "--mtp is of Hugging Face folders"),
        (["--config", "MODEL", "--from", "torchtitan"], "do not fit its configuration"),
        (["--config", "/no/such"], "does not exist"),
    ],
)
def test_what_cannot_be_is_told(
    arguments: list[str], sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved(CONFIGS["dense"], tmp_path / "model")
    export_checkpoint(tmp_path / "model", tmp_path / "out", to="torch_dist")
    words = [str(tmp_path / "model") if word == "MODEL" else word for word in arguments]
    assert main(["import", str(tmp_path / "out"), str(tmp_path / "back"), *words]) == 2
    assert sentence in capsys.readouterr().err and not (tmp_path / "back").exists()


def test_a_filled_up_vocabulary_ends_where_the_model_s_does(tmp_path: Path) -> None:
    model = saved(CONFIGS["dense"], tmp_path / "model")
    state = {name: p.detach() for name, p in model.named_parameters()}
    table = "embedding.word_embeddings.weight"
    state[table] = torch.cat([state[table], torch.full((3, state[table].shape[1]), 9.0)])
    dcp.save(state, checkpoint_id=str(tmp_path / "saved"))
    import_checkpoint(tmp_path / "saved", tmp_path / "back", config=tmp_path / "model", system="te_models")
    assert torch.equal(
        GPTModel.from_pretrained(tmp_path / "back").embedding.word_embeddings.weight,
        model.embedding.word_embeddings.weight,
    )


def test_another_model_is_refused(tmp_path: Path) -> None:
    saved(CONFIGS["dense"], tmp_path / "model")
    saved(CONFIGS["dense"].replace(num_layers=1), tmp_path / "other")
    export_checkpoint(tmp_path / "model", tmp_path / "out", to="te_models")
    with pytest.raises(CheckpointError, match="do not fit its configuration"):
        import_checkpoint(tmp_path / "out", tmp_path / "back", config=tmp_path / "other")
