"""Folders that must be refused: one clear sentence that names the problem, and nothing written."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from te_models.checkpoints import CheckpointError, export_hf, import_hf, inspect, open_checkpoint, verify
from tests.checkpoints.hf_cases import HFFolder, stored

SINGLE, INDEX, CONFIG = "model.safetensors", "model.safetensors.index.json", "config.json"
QKV = "model.layers.0.self_attn.q_proj.weight"
Edit = Callable[[Path], Any]


def edit_tensors(change: Callable[[dict[str, torch.Tensor]], Any]) -> Edit:
    def edit(folder: Path) -> None:
        tensors = load_file(folder / SINGLE)
        change(tensors)
        save_file(tensors, folder / SINGLE, metadata={"format": "pt"})

    return edit


def rename(old: str, new: str) -> Edit:
    return edit_tensors(lambda t: t.update({new: t.pop(old)}))


def edit_config(**changes: Any) -> Edit:
    def edit(folder: Path) -> None:
        values = json.loads((folder / CONFIG).read_text()) | changes
        (folder / CONFIG).write_text(json.dumps({k: v for k, v in values.items() if v != "DROP"}))

    return edit


def write(name: str, content: str | bytes) -> Edit:
    def edit(folder: Path) -> None:
        (folder / name).write_bytes(content.encode() if isinstance(content, str) else content)

    return edit


def edit_raw(change: Callable[[bytes], bytes]) -> Edit:
    return lambda folder: (folder / SINGLE).write_bytes(change((folder / SINGLE).read_bytes()))


def as_pickle(folder: Path) -> None:
    (folder / SINGLE).unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(os.getcwd))


def link_out(folder: Path) -> None:
    shutil.move(folder / SINGLE, folder.parent / "elsewhere.safetensors")
    (folder / SINGLE).symlink_to("../elsewhere.safetensors")


def link_config_out(folder: Path) -> None:
    shutil.move(folder / CONFIG, folder.parent / "elsewhere.json")
    (folder / CONFIG).symlink_to(folder.parent / "elsewhere.json")


def drop_config(folder: Path) -> None:
    (folder / CONFIG).unlink()


def config_is_a_folder(folder: Path) -> None:
    drop_config(folder)
    (folder / CONFIG).mkdir()


def fifo(folder: Path) -> None:
    (folder / SINGLE).unlink()
    os.mkfifo(folder / SINGLE)


def link_to_itself(folder: Path) -> None:
    (folder / SINGLE).unlink()
    (folder / SINGLE).symlink_to(SINGLE)


def both_forms(folder: Path) -> None:
    (folder / INDEX).write_text(json.dumps({"weight_map": {QKV: SINGLE}}))


HF_DEFECTS: dict[str, tuple[Edit, str]] = {
    "missing tensor": (edit_tensors(lambda t: t.pop(QKV)), f"missing: '{QKV}'"),
    "extra tensor": (edit_tensors(lambda t: t.update(extra=torch.ones(3))), "not part of this model: 'extra'"),
    "renamed tensor": (
        rename(QKV, "model.layers.0.self_attn.query.weight"),
        f"renamed: .*query.weight .expected {QKV}",
    ),
    "swapped layers missing": (rename("model.norm.weight", "model.layers.7.norm.weight"), "renamed"),
    "mis-shaped tensor": (
        edit_tensors(lambda t: t.update({QKV: t[QKV].T.contiguous()[:, :-1].contiguous()})),
        rf"'{QKV}' has shape \[32, 31\] where \[32, 32\] is expected",
    ),
    "extra dimension": (edit_tensors(lambda t: t.update({QKV: t[QKV][None].clone()})), r"has shape \[1, 32, 32\]"),
    "integer tensor": (edit_tensors(lambda t: t.update({QKV: t[QKV].to(torch.int64)})), f"'{QKV}' has dtype I64"),
    "fp8 tensor": (edit_tensors(lambda t: t.update({QKV: t[QKV].to(torch.float8_e4m3fn)})), "has dtype F8_E4M3"),
    "one float32 tensor": (
        edit_tensors(lambda t: t.update({QKV: t[QKV].float()})),
        rf"mixes dtypes: most weights are BF16, but not '{QKV} \(F32\)'",
    ),
    "layer too many": (edit_config(num_hidden_layers=1), "not part of this model: 'model.layers.1"),
    "layer too few": (edit_config(num_hidden_layers=3), "missing: 'model.layers.2"),
    "tied but different": (
        edit_config(tie_word_embeddings=True),
        "tie_word_embeddings is true, but 'lm_head.weight' differs",
    ),
    "wrong family": (edit_config(model_type="qwen3", head_dim=8), "missing: .*(q_norm|k_norm)"),
    "wrong family, biases": (edit_config(model_type="qwen2"), "missing: .*bias"),
    "wrong family, experts": (edit_config(model_type="mixtral", num_local_experts=2), "missing: .*block_sparse_moe"),
    "unknown family": (edit_config(model_type="gpt9"), "model_type 'gpt9' is not supported; supported families: llama"),
    "no family": (edit_config(model_type="DROP"), "model_type None is not supported"),
    "family not a string": (edit_config(model_type=["llama"]), "is not supported"),
    "missing field": (edit_config(hidden_size="DROP"), "config.json has no 'hidden_size'"),
    "field of another type": (edit_config(hidden_size="32"), "hidden_size = '32', which is not an integer"),
    "boolean for a number": (edit_config(num_hidden_layers=True), "num_hidden_layers = True, which is not an integer"),
    "zero heads": (edit_config(num_attention_heads=0, head_dim=None), "num_attention_heads = 0"),
    "negative size": (edit_config(vocab_size=-61), "vocab_size is -61"),
    "billion layers": (edit_config(num_hidden_layers=10**9), "claims 1000000000 layers"),
    "quantized": (edit_config(quantization_config={"quant_method": "fp8"}), "quantization_config = .* cannot express"),
    "soft-capping": (edit_config(final_logit_softcapping=30.0), "final_logit_softcapping = 30.0"),
    "window in llama": (edit_config(sliding_window=4096), "sliding_window = 4096"),
    "unknown activation": (edit_config(hidden_act="xielu"), "hidden_act = 'xielu'; supported: silu"),
    "unknown rope": (edit_config(rope_parameters={"rope_type": "spiral"}), "rope type 'spiral'"),
    "unknown rope parameter": (
        edit_config(rope_scaling={"type": "linear", "factor": 2, "twist": 1}),
        "parameter 'twist'",
    ),
    "rope without factor": (edit_config(rope_parameters={"rope_type": "linear"}), "rope.factor"),
    "partial rotation": (edit_config(partial_rotary_factor=0.5), "partial_rotary_factor = 0.5"),
    "no config": (drop_config, "config.json .* does not exist"),
    "config is a folder": (config_is_a_folder, "not a regular file"),
    "config leads out": (link_config_out, "symbolic link that leaves the folder"),
    "config not json": (write(CONFIG, "{'a': 1}"), "config.json is not valid JSON"),
    "config not utf-8": (write(CONFIG, b"\xff\xfe{}"), "config.json is not UTF-8"),
    "config a list": (write(CONFIG, "[]"), "holds a JSON list"),
    "config deep": (write(CONFIG, '{"a":' * 100_000), "nested too deeply|not valid JSON"),
    "config duplicate": (write(CONFIG, '{"model_type": "llama", "model_type": "qwen2"}'), "key 'model_type' twice"),
    "config infinite": (write(CONFIG, '{"model_type": "llama", "rms_norm_eps": Infinity}'), "contains Infinity"),
    "no weights": (lambda folder: (folder / SINGLE).unlink(), f"neither {SINGLE} nor {INDEX}"),
    "pickle only": (as_pickle, r"only pickled weights \('pytorch_model.bin'\), which can run code .* safetensors"),
    "weights lead out": (link_out, "symbolic link that leaves the folder"),
    "weights are a pipe": (fifo, "not a regular file"),
    "weights are a loop": (link_to_itself, "symbolic link to itself|does not exist"),
    "single and index": (both_forms, "holds both"),
    "truncated": (edit_raw(lambda raw: raw[:-10]), "model.safetensors is truncated"),
    "truncated header": (edit_raw(lambda raw: raw[:100]), "truncated: its header ends"),
    "zero length": (edit_raw(lambda raw: b""), "truncated: 0 bytes"),
    "trailing bytes": (edit_raw(lambda raw: raw + b"x"), "has 1 bytes after its last tensor"),
    "not safetensors": (edit_raw(lambda raw: b"PK\x03\x04" + bytes(100)), "claims a header|truncated|does not start"),
    "sidecar leads out": (lambda f: (f / "tokenizer.model").symlink_to("/etc/hostname"), "leaves the folder"),
}


@pytest.mark.parametrize("defect", HF_DEFECTS)
def test_hf_folder_is_refused(hf_folder: HFFolder, tmp_path: Path, defect: str) -> None:
    folder = hf_folder("llama")
    edit, message = HF_DEFECTS[defect]
    edit(folder)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(CheckpointError, match=message) as caught:
        import_hf(folder, tmp_path / "new" / "ours")
    text = str(caught.value)
    assert "\n" not in text and len(text) < 700, text
    assert sorted(tmp_path.rglob("*")) == before, "something was written"


def edit_index(change: Callable[[dict[str, Any]], Any]) -> Edit:
    def edit(folder: Path) -> None:
        values = json.loads((folder / INDEX).read_text())
        change(values)
        (folder / INDEX).write_text(json.dumps(values))

    return edit


def shard(folder: Path) -> Path:
    return sorted(folder.glob("*.safetensors"))[1]


def point_all_to(name: str) -> Edit:
    return edit_index(lambda v: v["weight_map"].update({QKV: name}))


def duplicate_across_shards(folder: Path) -> None:
    first, second = sorted(folder.glob("*.safetensors"))[:2]
    tensors = load_file(first)
    name = next(iter(tensors))
    save_file(load_file(second) | {name: tensors[name]}, second)


def unlisted(folder: Path) -> None:
    save_file(load_file(shard(folder)) | {"stowaway": torch.ones(1)}, shard(folder))


def swap_shards(folder: Path) -> None:
    first, second = sorted(folder.glob("*.safetensors"))[:2]
    first.rename(folder / "x")
    second.rename(first)
    (folder / "x").rename(second)


def shard_leads_out(folder: Path) -> None:
    target = folder.parent / "elsewhere.safetensors"
    shutil.move(shard_path := shard(folder), target)
    shard_path.symlink_to(target)


INDEX_DEFECTS: dict[str, tuple[Edit, str]] = {
    "missing shard": (lambda f: shard(f).unlink(), r"index.json names the file 'model-0.*', which does not exist"),
    "absolute path": (point_all_to("/etc/passwd"), "'/etc/passwd', which is not a plain file name"),
    "parent folder": (point_all_to("../model.safetensors"), "'../model.safetensors', which is not a plain"),
    "sub folder": (point_all_to("a/b.safetensors"), "not a plain file name"),
    "backslash": (point_all_to("..\\x.safetensors"), "not a plain file name"),
    "dot dot": (point_all_to(".."), "not a plain file name"),
    "empty name": (point_all_to(""), "not a plain file name"),
    "nul": (point_all_to("a\0b"), "not a plain file name"),
    "not a name": (edit_index(lambda v: v["weight_map"].update({QKV: 7})), "not a file name"),
    "no map": (edit_index(lambda v: v.pop("weight_map")), "has no weight_map"),
    "empty map": (edit_index(lambda v: v.update(weight_map={})), "has no weight_map"),
    "map is a list": (edit_index(lambda v: v.update(weight_map=[1])), "has no weight_map"),
    "claims an absent tensor": (
        edit_index(lambda v: v["weight_map"].update(ghost=v["weight_map"][QKV])),
        "holds 'ghost'",
    ),
    "forgets a tensor": (edit_index(lambda v: v["weight_map"].pop(QKV)), "does not list: 'model.layers.0"),
    "unlisted tensor": (unlisted, "does not list: 'stowaway'"),
    "tensor in two shards": (duplicate_across_shards, "is in two files"),
    "shards swapped": (swap_shards, "and it does not"),
    "shard truncated": (lambda f: os.truncate(shard(f), shard(f).stat().st_size - 1), "is truncated"),
    "shard leads out": (shard_leads_out, "symbolic link that leaves the folder"),
    "index not json": (write(INDEX, "oops"), "index.json is not valid JSON"),
    "index leads out": (lambda f: ((f / INDEX).unlink(), (f / INDEX).symlink_to("/etc/hostname")), "leaves the folder"),
}


@pytest.mark.parametrize("defect", INDEX_DEFECTS)
def test_sharded_folder_is_refused(hf_folder: HFFolder, tmp_path: Path, defect: str) -> None:
    folder = hf_folder("llama", max_shard_size="20KB")
    edit, message = INDEX_DEFECTS[defect]
    edit(folder)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(CheckpointError, match=message):
        import_hf(folder, tmp_path / "ours")
    assert sorted(tmp_path.rglob("*")) == before


TE_DEFECTS: dict[str, tuple[Edit, str]] = {
    "future version": (edit_config(format_version=2), "format_version 2; this release reads version 1"),
    "unknown layout": (edit_config(expert_layout="diagonal"), "expert layout is 'diagonal'"),
    "other layout": (edit_config(expert_layout="per-gemm"), "missing: .*linear_fc1.weight0"),
    "no layout": (edit_config(expert_layout="DROP"), "expert layout is 'missing'"),
    "unhashable layout": (edit_config(expert_layout=["grouped"]), "expert layout is"),
    "no config": (edit_config(config="DROP"), "no 'config' object"),
    "unknown config field": (edit_config(config={"flux": 1}), "ModelConfig has no field 'flux'"),
    "bad source": (edit_config(source={"family": 3, "config": {}}), "family, dtype or form is not a string"),
    "source is a list": (edit_config(source=[]), "neither null nor an object"),
    "unknown tensor": (edit_tensors(lambda t: t.update(x=torch.ones(1))), "not part of this model: 'x'"),
    "missing tensor": (edit_tensors(lambda t: t.pop("decoder.final_layernorm.weight")), "missing: 'decoder.final"),
    "integer tensor": (
        edit_tensors(lambda t: t.update({"decoder.final_layernorm.weight": torch.ones(32, dtype=torch.int32)})),
        "has dtype I32 where BF16 or F16 or F32 or F64 is expected",
    ),
    "truncated": (edit_raw(lambda raw: raw[:-1]), "is truncated"),
}


@pytest.mark.parametrize("defect", TE_DEFECTS)
def test_our_folder_is_refused(hf_folder: HFFolder, tmp_path: Path, defect: str) -> None:
    import_hf(hf_folder("mixtral"), tmp_path / "ours")
    edit, message = TE_DEFECTS[defect]
    edit(tmp_path / "ours")
    before = sorted(tmp_path.rglob("*"))
    for read in (open_checkpoint, inspect, lambda f: verify(f, f), lambda f: export_hf(f, tmp_path / "out")):
        with pytest.raises(CheckpointError, match=message):
            read(tmp_path / "ours")
    assert sorted(tmp_path.rglob("*")) == before


def test_pickles_are_not_loaded(hf_folder: HFFolder, tmp_path: Path) -> None:
    """A pickle beside good weights is ignored; alone it is refused; in neither case is it executed."""

    class Bomb:
        def __reduce__(self) -> tuple[Any, ...]:
            return (os.mkdir, (str(tmp_path / "exploded"),))

    folder = hf_folder("llama")
    for name in ("pytorch_model.bin", "training_args.bin", "tokenizer.pkl"):
        (folder / name).write_bytes(pickle.dumps(Bomb()))
    import_hf(folder, tmp_path / "ours")
    assert not (tmp_path / "exploded").exists()
    assert not list((tmp_path / "ours").glob("*.bin"))
    (folder / SINGLE).unlink()
    with pytest.raises(CheckpointError, match="pickled"):
        open_checkpoint(folder)
    assert not (tmp_path / "exploded").exists()


def test_a_true_copy_of_the_tied_embedding_is_ignored(hf_folder: HFFolder, tmp_path: Path) -> None:
    folder = hf_folder("qwen2-tied")
    assert "lm_head.weight" not in stored(folder)
    edit_tensors(lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))(folder)
    plan = import_hf(folder, tmp_path / "ours")
    assert plan.ignored == ("lm_head.weight",)


def test_a_hub_cache_snapshot_is_read_through_its_links(hf_folder: HFFolder, tmp_path: Path) -> None:
    source = hf_folder("llama")
    snapshot, blobs = tmp_path / "models--a--b/snapshots/123", tmp_path / "models--a--b/blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for number, file in enumerate(sorted(source.iterdir())):
        shutil.copy(file, blobs / str(number))
        (snapshot / file.name).symlink_to(f"../../blobs/{number}")
    import_hf(snapshot, tmp_path / "ours")
    assert verify(source, tmp_path / "ours").equal
    (snapshot / SINGLE).unlink()
    (snapshot / SINGLE).symlink_to(source / SINGLE)
    with pytest.raises(CheckpointError, match="leaves the folder"):
        open_checkpoint(snapshot)


def test_not_a_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    for name in ("file", "absent", "org/name"):
        with pytest.raises(CheckpointError, match="is not a folder"):
            open_checkpoint(tmp_path / name)
