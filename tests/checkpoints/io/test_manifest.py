"""manifest.json: digests that other tools reproduce, and what `check_manifest` says about a folder that was changed."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from te_models.checkpoints import (
    CheckpointError,
    check_manifest,
    import_hf,
    open_checkpoint,
    quantize,
    relayout,
    reshard,
)
from te_models.checkpoints.io.header import read_header
from te_models.checkpoints.io.manifest import read_manifest
from te_models.cli.main import main
from tests.checkpoints.aligned_folders import MIXTURE, digest_by_hand, make_earlier, make_folder
from tests.checkpoints.hf_cases import HFFolder
from tests.compare import refused


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@pytest.mark.parametrize("heads", ["cut", "aligned"])
@pytest.mark.parametrize("whole", [False, True])
def test_digests_are_those_of_other_tools(hf_folder: HFFolder, tmp_path: Path, whole: bool, heads: str) -> None:
    """Whatever wrote the tensor: byte ranges, joined and converted parts, bands, computed fields, several files.

    whole: `file_digests`, with which a weight file has the digest that `sha256sum` prints; otherwise it has that of a
    text of digests, one per line: the header's and those of the tensors in the order of their data."""
    source = hf_folder("mixtral") if heads == "cut" else make_folder(tmp_path / "hf", MIXTURE)
    import_hf(source, tmp_path / "plain", max_shard_bytes=20_000, file_digests=whole)
    import_hf(source, tmp_path / "float", dtype="float32", file_digests=whole)
    relayout(tmp_path / "plain", tmp_path / "split", "per-gemm", file_digests=whole)
    quantize(source, tmp_path / "fp8", "mxfp8", max_shard_bytes=30_000, file_digests=whole)
    for name in ("plain", "float", "split", "fp8"):
        folder = tmp_path / name
        records = read_manifest(folder)
        assert {p.name for p in folder.iterdir()} == {*records, "manifest.json"}
        assert json.loads((folder / "manifest.json").read_text())["format_version"] == 3
        tensors = 0
        for file, record in records.items():
            data = (folder / file).read_bytes()
            assert record.size == len(data)
            if file.endswith(".safetensors"):
                expected = {
                    name: digest_by_hand(tensor.flatten().view(torch.uint8).numpy().tobytes(), tuple(tensor.shape))
                    for name, tensor in load_file(folder / file).items()
                }
                header = read_header(folder / file)
                lines = [sha256(data[: header.data_start]), *(expected[name] for name in header.tensors)]
                joint = sha256("".join(f"{line}\n" for line in lines).encode())
                assert (record.sha256, record.digest) == ((sha256(data), "") if whole else ("", joint))
                assert (record.header, record.tensors, record.rows_per_part) == (lines[0], expected, 64)
                tensors += len(expected)
            else:
                assert (record.sha256, record.tensors) == (sha256(data), {})
        assert tensors > 8 and check_manifest(folder) == len(records)


def test_the_command_line_asks_for_digests_of_whole_files(llama: Path, tmp_path: Path) -> None:
    ours, out = tmp_path / "ours", tmp_path / "out"
    import_hf(llama, ours)
    assert main(["merge-shards", str(ours), str(out), "--file-digests"]) == 0
    assert read_manifest(out)["model.safetensors"].sha256 == sha256((out / "model.safetensors").read_bytes())
    assert main(["verify", str(out)]) == 0
    assert main(["merge-shards", str(out), str(tmp_path / "again")]) == 0
    assert (tmp_path / "again/manifest.json").read_bytes() == (ours / "manifest.json").read_bytes()


def test_a_tensor_has_the_same_digest_in_any_file(llama: Path, tmp_path: Path) -> None:
    found = []
    for number, size in enumerate((10**9, 20_000)):
        import_hf(llama, tmp_path / str(number), max_shard_bytes=size)
        records = read_manifest(tmp_path / str(number)).values()
        found.append({name: digest for record in records for name, digest in record.tensors.items()})
    assert found[0] == found[1]


@pytest.mark.parametrize("whole", [False, True])
def test_a_changed_file_is_named_with_its_tensor(llama: Path, tmp_path: Path, whole: bool) -> None:
    import_hf(llama, tmp_path / "ours", file_digests=whole)
    folder = tmp_path / "ours"
    assert check_manifest(folder) == len(list(folder.iterdir())) - 1  # all but itself
    file = folder / "model.safetensors"
    good = file.read_bytes()
    header = read_header(file)
    name = "decoder.layers.1.self_attention.linear_qkv.weight"
    raw = bytearray(good)
    raw[header.data_start + header.tensors[name].stop - 1] ^= 1
    file.write_bytes(raw)
    with pytest.raises(
        CheckpointError, match=rf"model\.safetensors does not have the SHA-256 .*; tensor '{name}' was changed"
    ):
        check_manifest(folder)
    file.write_bytes(good[:-1])
    with pytest.raises(CheckpointError, match=r"model.safetensors has \d+ bytes and manifest.json says"):
        check_manifest(folder)
    file.write_bytes(good.replace(b'"pt"', b'"pq"'))
    refused(lambda: check_manifest(folder), "its header was changed or damaged", error=CheckpointError)
    file.write_bytes(good)
    (folder / "tokenizer.json").write_text('{"version": "2.0"}')
    refused(lambda: check_manifest(folder), "tokenizer.json does not have the SHA-256", error=CheckpointError)


@pytest.mark.parametrize("version", [1, 2])
def test_manifests_of_earlier_releases_are_read_and_checked(tmp_path: Path, version: int) -> None:
    """Their digest of a tensor is of all its bytes; what is written from them has the digests of this release."""
    import_hf(make_folder(tmp_path / "hf", MIXTURE), tmp_path / "new")
    folder = tmp_path / "old"
    import_hf(tmp_path / "hf", folder)
    make_earlier(folder, version)
    listed, before = (read_manifest(tmp_path / name)["model.safetensors"] for name in ("new", "old"))
    assert listed.tensors != before.tensors and before.rows_per_part == 0
    assert before.of_weights and bool(before.sha256) == (version == 1)
    assert check_manifest(folder) == check_manifest(tmp_path / "new")
    reshard(folder, tmp_path / "again")
    assert read_manifest(tmp_path / "again")["model.safetensors"] == listed
    with open_checkpoint(folder) as checkpoint:
        checkpoint.load_into({name: torch.empty(i.shape) for name, i in checkpoint.tensors.items()})
    values = json.loads((folder / "manifest.json").read_text())
    entry = values["files"]["model.safetensors"]
    del entry["header" if version == 1 else "bytes"]
    (folder / "manifest.json").write_text(json.dumps(values))
    if version == 1:  # as the first releases wrote it
        check_manifest(folder)
        reshard(folder, tmp_path / "third")
    file = folder / "model.safetensors"
    raw = bytearray(file.read_bytes())
    raw[-1] ^= 1
    file.write_bytes(raw)
    for read in (check_manifest, lambda folder: reshard(folder, tmp_path / "out")):
        with pytest.raises(CheckpointError):
            read(folder)


def test_a_changed_manifest_is_refused(llama: Path, tmp_path: Path) -> None:
    import_hf(llama, tmp_path / "ours")
    manifest = tmp_path / "ours/manifest.json"
    good = manifest.read_text()
    files = json.loads(good)["files"]
    entry, small = files["model.safetensors"], files["config.json"]
    name, digest = next(iter(entry["tensors"].items()))
    for old, new, message in (
        ("model.safetensors", "../secret", "not a plain file name"),
        (digest, "0" * 64, f"tensor '{name}' was changed"),
        (f'"{digest}"', "7", "does not map the tensors of 'model.safetensors'"),
        (f'"sha256": "{small["sha256"]}"', '"sha256": 1', "'config.json' by something other than sha256 and bytes"),
        (f'"digest": "{entry["digest"]}"', '"digest": 1', "'model.safetensors' by something other than sha256 and"),
        (f'"digest": "{entry["digest"]}"', f'"digest": "{digest}"', "digest of model.safetensors .* is not made of"),
        ('"digest": ', '"sha256": "", "digest": ', "by something other than the digests of its parts"),
        (f'"header": "{entry["header"]}"', '"header": ""', "by something other than the digests of its parts"),
        (entry["header"], entry["header"].upper(), "by something other than the digests of its parts"),
    ):
        assert old in good
        manifest.write_text(good.replace(old, new))
        with pytest.raises(CheckpointError, match=message):
            check_manifest(tmp_path / "ours")


def test_verify_of_one_folder_checks_its_manifest(
    llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import_hf(llama, tmp_path / "ours")
    assert main(["verify", str(tmp_path / "ours")]) == 0
    files = len(list((tmp_path / "ours").iterdir())) - 1  # all but itself
    assert capsys.readouterr().out == f"{tmp_path}/ours: {files} files as manifest.json says\n"
    (tmp_path / "ours/tokenizer.json").write_text('{"version": "2.0"}')
    assert main(["verify", str(tmp_path / "ours"), "--json"]) == 1
    result = json.loads(capsys.readouterr().out)
    assert result["intact"] is False and "tokenizer.json does not have the SHA-256" in result["problem"]
    (tmp_path / "ours/manifest.json").unlink()
    assert main(["verify", str(tmp_path / "ours")]) == 2
    assert "ours has no manifest.json that it could be checked against" in capsys.readouterr().err


def test_what_the_manifest_does_not_list_is_a_failure(
    llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import_hf(llama, tmp_path / "ours")
    folder = tmp_path / "ours"
    (folder / ".gitattributes").write_text("")  # part of no folder
    assert main(["verify", str(folder)]) == 0
    (folder / "extra.safetensors").write_bytes(b"")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates/tool.jinja").write_text("x")
    capsys.readouterr()
    assert main(["verify", str(folder)]) == 1
    text = "holds what manifest.json does not list: 'additional_chat_templates/tool.jinja', 'extra.safetensors'"
    assert text in capsys.readouterr().out


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda values: values.update(format_version=4), "has format_version 4; this release reads versions 1 to 3"),
        (lambda values: values.update(format_version=2), "has rows_per_part, which format_version 2 has not"),
        (lambda values: values["files"]["model.safetensors"].update(rows_per_part=65), "rows_per_part 65 for 'model.s"),
        (lambda values: values["files"]["model.safetensors"].update(rows_per_part=0), "rows_per_part 0 for 'model.s"),
        (lambda values: values["files"]["model.safetensors"].update(rows_per_part=64.0), "rows_per_part 64.0 for"),
        (lambda values: values["files"]["model.safetensors"].update(rows_per_part=True), "rows_per_part True for"),
        (lambda values: values.update(format_version=True), "has format_version True"),
        (lambda values: values.pop("format_version"), "has format_version None"),
        (lambda values: values.update(files={}), "manifest.json has no 'files'"),
        (lambda values: values.pop("files"), "manifest.json has no 'files'"),
        (lambda values: values["files"].pop("model.safetensors"), "not list"),
        (lambda values: values["files"]["model.safetensors"].update(header="0"), "other than the digests of its parts"),
        (lambda values: values["files"]["model.safetensors"].update(header="0" * 64), "header"),
        (
            lambda values: values["files"]["model.safetensors"].update(digest="0" * 64),
            "is not made of the digests of its",
        ),
        (lambda values: values["files"]["model.safetensors"]["tensors"].popitem(), "tensor"),
    ],
)
def test_a_manifest_that_says_too_little(
    llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], edit: Callable[[Any], Any], message: str
) -> None:
    """It is a failure for `verify` and an error for every reader."""
    import_hf(llama, tmp_path / "ours")
    manifest = tmp_path / "ours/manifest.json"
    values = json.loads(manifest.read_text())
    edit(values)
    manifest.write_text(json.dumps(values))
    assert main(["verify", str(tmp_path / "ours")]) == 1 and message in capsys.readouterr().out
    for read in (open_checkpoint, lambda folder: relayout(folder, tmp_path / "out", "per-gemm")):
        with pytest.raises(CheckpointError, match=message):
            read(tmp_path / "ours")


def test_a_changed_small_file_is_noticed_by_readers(llama: Path, tmp_path: Path) -> None:
    import_hf(llama, tmp_path / "ours")
    (tmp_path / "ours/tokenizer.json").write_text('{"version": "2.0"}')
    for read in (open_checkpoint, lambda folder: reshard(folder, tmp_path / "out")):
        with pytest.raises(CheckpointError, match=r"tokenizer\.json does not have the SHA-256"):
            read(tmp_path / "ours")
    reshard(tmp_path / "ours", tmp_path / "out", verify=False)


def test_a_folder_that_is_not_there_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    refused(lambda: check_manifest(tmp_path / "nowhere"), "nowhere is not a folder", error=CheckpointError)
    monkeypatch.setattr("te_models.checkpoints.io.hub._download", lambda repo, *_: tmp_path / repo)
    for name, folder in ((str(tmp_path / "nowhere"), tmp_path / "nowhere"), ("org/name", tmp_path / "org/name")):
        assert main(["verify", name]) == 2
        assert capsys.readouterr().err == f"te-models: {folder} is not a folder\n"
