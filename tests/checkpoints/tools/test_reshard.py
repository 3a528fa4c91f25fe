"""Tensors in files of other sizes: the same bits under the same names, whatever the folder."""

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from te_models.checkpoints import CheckpointError, check_manifest, import_hf, inspect, quantize, reshard, verify
from te_models.checkpoints.io.manifest import read_manifest
from te_models.checkpoints.io.weight_files import INDEX, SINGLE
from te_models.checkpoints.write.shards import MAX_SHARD_TENSORS
from tests.checkpoints.hf_cases import HFFolder, assert_same_bits, stored
from tests.compare import refused


@pytest.mark.parametrize("recipe", [None, "mxfp8", "nvfp4"])
def test_there_and_back(hf_folder: HFFolder, tmp_path: Path, recipe: str | None) -> None:
    source = hf_folder("mixtral", max_shard_size="20KB")
    if recipe is None:
        import_hf(source, tmp_path / "one")
    else:
        quantize(source, tmp_path / "one", recipe)
    assert (tmp_path / "one" / SINGLE).exists()
    plan = reshard(tmp_path / "one", tmp_path / "many", max_shard_bytes=10_000)
    files = sorted((tmp_path / "many").glob("*.safetensors"))
    assert len(files) > 2 and len(plan.outputs) == len(stored(tmp_path / "one"))
    weight_map = json.loads((tmp_path / "many" / INDEX).read_text())["weight_map"]
    assert {name for file in files for name in safe_open(file, "pt").keys()} == weight_map.keys()  # noqa: SIM118
    assert_same_bits(stored(tmp_path / "one"), stored(tmp_path / "many"))
    assert verify(tmp_path / "one", tmp_path / "many").equal
    assert {line.kind for line in plan.report.lines.values()} == {"exact"}
    for folder in ("one", "many"):
        classes = json.loads((tmp_path / folder / "conversion.json").read_text())["classes"]
        assert [(line["tensors"], line["count"], line["target"]) for line in classes] == [
            (line.tensors, line.count, line.target) for line in plan.report.lines.values()
        ]
    reshard(tmp_path / "many", tmp_path / "again")
    assert sorted(p.name for p in (tmp_path / "again").iterdir()) == sorted(
        p.name for p in (tmp_path / "one").iterdir()
    )
    assert_same_bits(stored(tmp_path / "one"), stored(tmp_path / "again"))
    assert inspect(tmp_path / "again").formats == inspect(tmp_path / "one").formats
    assert verify(tmp_path / "one", tmp_path / "again").equal
    digests = [
        {n: d for record in read_manifest(tmp_path / folder).values() for n, d in record.tensors.items()}
        for folder in ("one", "many", "again")
    ]
    assert digests[0] == digests[1] == digests[2]


def test_a_hugging_face_folder_keeps_everything(llama: Path, tmp_path: Path) -> None:
    """Its configuration to the byte, tokenizer files, and tensors that no model needs."""
    tensors = stored(llama) | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}
    save_file(tensors, llama / SINGLE, metadata={"format": "pt", "origin": "somewhere"})
    reshard(llama, tmp_path / "many", max_shard_bytes=20_000)
    assert_same_bits(stored(tmp_path / "many"), tensors)
    for name in ("config.json", "tokenizer.json", "generation_config.json"):
        assert (tmp_path / "many" / name).read_bytes() == (llama / name).read_bytes()
    for file in (tmp_path / "many").glob("*.safetensors"):
        with safe_open(file, "pt") as opened:
            assert opened.metadata() == {"format": "pt", "origin": "somewhere"}
    assert verify(llama, tmp_path / "many").equal and check_manifest(tmp_path / "many") > 4
    classes = json.loads((tmp_path / "many/conversion.json").read_text())["classes"]
    by_name = {line["tensors"]: line for line in classes}
    assert by_name["model.layers.self_attn.q_proj.weight"]["count"] == 2
    assert {line["kind"] for line in classes} == {"exact"} and sum(line["count"] for line in classes) == len(tensors)


def test_a_folder_of_no_known_family(tmp_path: Path) -> None:
    tensors = {"x": torch.arange(6).reshape(2, 3), "y": torch.rand(5).to(torch.float8_e5m2), "z": torch.tensor(True)}
    (tmp_path / "in").mkdir()
    save_file(tensors, tmp_path / "in" / "a.safetensors")
    (tmp_path / "in/config.json").write_text('{"model_type": "of the future"}')
    plan = reshard(tmp_path / "in", tmp_path / "plan", dry_run=True)
    assert {o.name: o.dtype for o in plan.outputs} == {"x": "I64", "y": "F8_E5M2", "z": "BOOL"}
    assert not (tmp_path / "plan").exists()
    reshard(tmp_path / "in", tmp_path / "out", max_shard_bytes=1)
    assert_same_bits(stored(tmp_path / "out"), tensors)
    assert len(list((tmp_path / "out").glob("*.safetensors"))) == 3


@pytest.mark.slow
def test_a_file_has_so_many_tensors_at_most(tmp_path: Path) -> None:
    """Its header stays one that is read: also a merge of many small tensors gives more than one file."""
    (tmp_path / "in").mkdir()
    count = MAX_SHARD_TENSORS + 1
    save_file({f"t{i:05d}": torch.tensor([i]) for i in range(count)}, tmp_path / "in" / SINGLE)
    (tmp_path / "in/config.json").write_text("{}")
    reshard(tmp_path / "in", tmp_path / "out")
    first, second = sorted((tmp_path / "out").glob("*.safetensors"))
    assert (len(safe_open(first, "pt").keys()), len(safe_open(second, "pt").keys())) == (MAX_SHARD_TENSORS, 1)
    assert_same_bits(stored(tmp_path / "out"), stored(tmp_path / "in"))


def test_what_is_refused(hf_folder: HFFolder, tmp_path: Path) -> None:
    source = hf_folder("mixtral", max_shard_size="20KB")
    with pytest.raises(CheckpointError, match="max_shard_bytes is 0; allowed: a positive number"):
        reshard(source, tmp_path / "out", max_shard_bytes=0)
    refused(lambda: reshard(tmp_path / "absent", tmp_path / "out"), "is not a folder", error=CheckpointError)
    file = sorted(source.glob("*.safetensors"))[0]
    tensors = {n: t.clone() for n, t in stored(source).items() if n in safe_open(file, "pt").keys()}  # noqa: SIM118
    save_file(tensors, file, metadata={"format": "np"})
    with pytest.raises(CheckpointError, match="different values of the metadata 'format'"):
        reshard(source, tmp_path / "out")
    described = json.dumps({"version": 1, "tensors": {"ghost": {}}})
    save_file(tensors, file, metadata={"format": "pt", "te_models": described})
    with pytest.raises(CheckpointError, match="describes tensors that are not there: 'ghost'"):
        reshard(source, tmp_path / "out")
    (source / "config.json").write_text("[]")
    refused(lambda: reshard(source, tmp_path / "out"), "holds a JSON list", error=CheckpointError)
    (source / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"is no model folder: it has no config\.json"):
        reshard(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()
