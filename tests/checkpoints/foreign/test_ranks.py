"""Files of Megatron's ranks: written for any numbers of ranks, and read back to the same bits."""

import shutil
from pathlib import Path

import pytest
import torch

from te_models import EmbeddingConfig, GPTModel
from te_models.checkpoints import CheckpointError, export_checkpoint, import_checkpoint
from te_models.cli.main import main
from tests.checkpoints.foreign.test_round_trips import CONFIGS, saved

KINDS = CONFIGS | {
    "tied": CONFIGS["dense"].replace(embedding=EmbeddingConfig(share_embeddings_and_output_weights=True))
}
SPLITS = [
    ("dense", 2, 2, 1),
    ("tied", 2, 2, 1),
    ("moe", 2, 2, 2),
    ("moe", 1, 1, 4),
    *(
        pytest.param(kind, tp, pp, ep, marks=pytest.mark.slow)
        for kind in KINDS
        for tp in (1, 2)
        for pp in (1, 2)
        for ep in ((1, 2, 4) if kind == "moe" else (1,))
    ),
]


def option(tp: int, pp: int, ep: int) -> dict[str, int]:
    return {"tensor_model_parallel_size": tp, "pipeline_model_parallel_size": pp, "expert_model_parallel_size": ep}


def assert_back(model: GPTModel, folder: Path) -> None:
    for (name, a), b in zip(model.named_parameters(), GPTModel.from_pretrained(folder).parameters(), strict=True):
        assert torch.equal(a, b), name


@pytest.mark.parametrize(("kind", "tp", "pp", "ep"), SPLITS)
def test_any_split_comes_back(kind: str, tp: int, pp: int, ep: int, tmp_path: Path) -> None:
    model = saved(KINDS[kind], tmp_path / "model")
    words = [f"--{name.replace('_', '-')}={number}" for name, number in option(tp, pp, ep).items()]
    out, back = str(tmp_path / "out"), str(tmp_path / "back")
    assert main(["export", str(tmp_path / "model"), out, "--to", "megatron", *words]) == 0
    assert (tmp_path / "out" / "latest_checkpointed_iteration.txt").read_text() == "release"
    files = sorted((tmp_path / "out" / "release").glob("*/model_optim_rng.pt"))
    assert len(files) == tp * pp * ep
    for file in files:
        held = torch.load(file, weights_only=True)
        assert held["checkpoint_version"] == 3.0
        table = held["model"].get("embedding.word_embeddings.weight")
        assert table is None or table.shape[0] == 128
    assert main(["import", out, back, "--config", str(tmp_path / "model")]) == 0
    assert_back(model, tmp_path / "back")


def test_a_rank_has_its_part_and_copies_of_the_rest(tmp_path: Path) -> None:
    model = saved(KINDS["tied"], tmp_path / "model")
    export_checkpoint(tmp_path / "model", tmp_path / "out", to="megatron", **option(2, 2, 1))
    held = torch.load(tmp_path / "out/release/mp_rank_01_001/model_optim_rng.pt", weights_only=True)["model"]
    layer = model.decoder.layers[1]
    at = "decoder.layers.0."
    assert torch.equal(held[f"{at}self_attention.linear_proj.weight"], layer.self_attention.linear_proj.weight[:, 16:])
    norm = layer.self_attention.linear_qkv.layer_norm_weight
    assert torch.equal(held[f"{at}self_attention.linear_qkv.layer_norm_weight"], norm)
    gate, up = layer.mlp.linear_fc1.weight.chunk(2)
    assert torch.equal(held[f"{at}mlp.linear_fc1.weight"], torch.cat([gate[24:], up[24:]]))
    # 61 rows over two ranks of 128: the second has none of them. The last stage has a copy of a tied table.
    assert held["output_layer.weight"].shape == (128, 32) and not held["output_layer.weight"].any()
    held = torch.load(tmp_path / "out/release/mp_rank_00_001/model_optim_rng.pt", weights_only=True)["model"]
    table = model.embedding.word_embeddings.weight
    assert torch.equal(held["output_layer.weight"][:61], table) and not held["output_layer.weight"][61:].any()


def test_modules_of_megatron_s_own(tmp_path: Path) -> None:
    model = saved(KINDS["moe"], tmp_path / "model")
    export_checkpoint(tmp_path / "model", tmp_path / "out", to="megatron", local_modules=True, **option(1, 1, 2))
    held = torch.load(tmp_path / "out/release/mp_rank_00_001/model_optim_rng.pt", weights_only=True)["model"]
    name = "decoder.layers.0.mlp.experts.local_experts.1.linear_fc2.weight"
    assert torch.equal(held[name], model.decoder.layers[0].mlp.experts.linear_fc2.weight[3])
    assert "decoder.layers.0.input_layernorm.weight" in held
    import_checkpoint(tmp_path / "out", tmp_path / "back", config=tmp_path / "model")
    assert_back(model, tmp_path / "back")


def test_chunks_of_a_stage_are_read(tmp_path: Path) -> None:
    """As a run with virtual stages writes them: layers 0 and 2 are the first stage's, 1 and 3 the second's."""
    model = saved(KINDS["dense"].replace(num_layers=4), tmp_path / "model")
    export_checkpoint(tmp_path / "model", tmp_path / "out", to="megatron")
    whole = torch.load(tmp_path / "out/release/mp_rank_00/model_optim_rng.pt", weights_only=True)["model"]
    chunks: dict[tuple[int, int], dict[str, torch.Tensor]] = {(s, c): {} for s in (0, 1) for c in (0, 1)}
    for name, value in whole.items():
        layer = int(name.split(".")[2]) if name.startswith("decoder.layers.") else 3 * (not name.startswith("emb"))
        chunks[layer % 2, layer // 2][name.replace(f"layers.{layer}.", "layers.0.")] = value
    for stage in (0, 1):
        folder = tmp_path / "chunks" / f"mp_rank_00_{stage:03d}"
        folder.mkdir(parents=True)
        held = {f"model{chunk}": chunks[stage, chunk] for chunk in (0, 1)}
        torch.save({**held, "iteration": 5}, folder / "model_optim_rng.pt")
    import_checkpoint(tmp_path / "chunks", tmp_path / "back", config=tmp_path / "model")
    assert_back(model, tmp_path / "back")


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--tensor-model-parallel-size=3"], "query heads do not divide over 3 ranks"),
        (["--pipeline-model-parallel-size=3"], "2 layers do not divide over 3 ranks"),
        (["--expert-model-parallel-size=2"], "0 experts do not divide over 2 ranks"),
        (["--tensor-model-parallel-size=4"], "2 key heads do not divide over 4 ranks"),
        (["--layout=grouped"], "--layout is of --to transformer_engine"),
    ],
)
def test_what_cannot_be_split_is_told(
    words: list[str], sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved(KINDS["dense"], tmp_path / "model")
    assert main(["export", str(tmp_path / "model"), str(tmp_path / "out"), "--to", "megatron", *words]) == 2
    assert sentence in capsys.readouterr().err and not (tmp_path / "out").exists()


def test_folders_that_are_not_whole_are_told(tmp_path: Path) -> None:
    saved(KINDS["moe"], tmp_path / "model")
    export_checkpoint(tmp_path / "model", tmp_path / "out", to="megatron", **option(2, 1, 2))
    shutil.rmtree(tmp_path / "out/release/mp_rank_01_001")
    with pytest.raises(CheckpointError, match="no file of tensor parallel rank 1 of 2 in stage 0 of 1, share 1 of 2"):
        import_checkpoint(tmp_path / "out", tmp_path / "back", config=tmp_path / "model")
    (tmp_path / "out" / "latest_checkpointed_iteration.txt").write_text("7")
    with pytest.raises(CheckpointError, match="says '7', and there is no iter_0000007"):
        import_checkpoint(tmp_path / "out", tmp_path / "back", config=tmp_path / "model")
    (tmp_path / "out" / "latest_checkpointed_iteration.txt").write_text("../../x")
    with pytest.raises(CheckpointError, match="allowed: a number of iterations, or 'release'"):
        import_checkpoint(tmp_path / "out", tmp_path / "back", config=tmp_path / "model")
