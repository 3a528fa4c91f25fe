"""Where a conversion may write is known before it starts, and a dry run refuses all that the run would."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from te_models.checkpoints import import_hf, reshard, toy, verify
from te_models.cli.main import main
from tests.checkpoints.hf_cases import HFFolder, refused, stored

Run = Callable[..., Any]


@pytest.fixture(params=[False, True], ids=["run", "dry run"])
def dry_run(request: pytest.FixtureRequest) -> bool:
    return request.param


def test_a_mount_point(llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dry_run: bool) -> None:
    (tmp_path / "disk").mkdir()
    monkeypatch.setattr(os.path, "ismount", lambda path: Path(path) == tmp_path / "disk")
    for overwrite in (False, True):
        with refused("disk is a mount point, which cannot be replaced; choose a folder inside it", tmp_path):
            import_hf(llama, tmp_path / "disk", overwrite=overwrite, dry_run=dry_run)
    import_hf(llama, tmp_path / "disk/ours", dry_run=dry_run)


@pytest.mark.parametrize("name", [".", "..", "../here", "../../here/deep/.."])
@pytest.mark.parametrize("overwrite", [False, True])
def test_the_current_directory(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, overwrite: bool, dry_run: bool
) -> None:
    (tmp_path / "here/deep").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "here" if name != "../../here/deep/.." else tmp_path / "here/deep")
    with refused(f"^{name} is the current directory, or contains it, and cannot be replaced", tmp_path):
        import_hf(llama, name, overwrite=overwrite, dry_run=dry_run)


def test_the_verb_does_not_advise_to_replace_it(
    llama: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(llama)
    assert main(["import", str(llama), "."]) == 2
    assert ". is the current directory" in capsys.readouterr().err


def test_a_folder_named_by_dots_is_worked_on_beside_it(llama: Path, tmp_path: Path) -> None:
    (tmp_path / "ours/x").mkdir(parents=True)
    import_hf(llama, tmp_path / "ours/x/..", overwrite=True)
    assert verify(llama, tmp_path / "ours").equal and not (tmp_path / "ours/x").exists()


def test_the_space_is_that_of_the_folder_around(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dry_run: bool
) -> None:
    (tmp_path / "small").mkdir()
    (tmp_path / "small/empty").mkdir()
    free = {tmp_path / "small": 1000}
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=free.get(Path(path), usage.free)))
    with refused(r"small/empty needs \d+\.\d KiB and its disk has 1000 bytes free", tmp_path):
        import_hf(llama, tmp_path / "small/empty", dry_run=dry_run)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("a" * 300, "File name too long"),
        ("a" * 250, "File name too long"),
        ("z\0", "null"),
        ("file/x", "Not a directory"),
    ],
)
def test_a_name_that_no_folder_can_have(llama: Path, tmp_path: Path, name: str, says: str, dry_run: bool) -> None:
    (tmp_path / "file").write_text("")
    for convert in (import_hf, reshard):
        with refused(f"cannot be written: .*{says}", tmp_path):
            convert(llama, tmp_path / name, dry_run=dry_run)


def test_a_dry_run_checks_what_the_run_does(hf_folder: HFFolder, tmp_path: Path, dry_run: bool) -> None:
    source = hf_folder("qwen2-tied")
    (tmp_path / "full").mkdir()
    (tmp_path / "full/file").write_text("precious")
    runs: tuple[Run, ...] = (import_hf, reshard, toy)
    for convert in runs:
        with refused("full exists; choose another destination or pass overwrite", tmp_path):
            convert(source, tmp_path / "full", dry_run=dry_run)
        for size in (0, "5GB", 1e9):
            with refused(f"max_shard_bytes is {size!r}; allowed: a positive number of bytes", tmp_path):
                convert(source, tmp_path / "out", max_shard_bytes=size, dry_run=dry_run)
    shutil.copytree(source, tmp_path / "full/sub")
    with refused("contains the folder that is read", tmp_path):
        reshard(tmp_path / "full/sub", tmp_path / "full", overwrite=True, dry_run=dry_run)
    (source / "tokenizer.model").symlink_to("/etc/hostname")
    for convert in runs:
        with refused("is a symbolic link that leaves the folder", tmp_path):
            convert(source, tmp_path / "out", dry_run=dry_run)
    (source / "tokenizer.model").unlink()
    tensors = stored(source)
    copy = torch.zeros_like(tensors["model.embed_tokens.weight"])
    save_file({**tensors, "lm_head.weight": copy}, source / "model.safetensors", metadata={"format": "pt"})
    with refused("tie_word_embeddings is true, but 'lm_head.weight' differs", tmp_path):
        import_hf(source, tmp_path / "out", dry_run=dry_run)


@pytest.mark.parametrize("name", ["a" * 5000, Path("a" * 300)])
def test_a_source_that_is_no_path(tmp_path: Path, name: str | Path) -> None:
    for convert in (import_hf, reshard):
        with refused("^'a+'.* cannot be read: File name too long", tmp_path):
            convert(name, tmp_path / "ours")


@pytest.mark.parametrize("lost", ["README.md", "pytorch_model.bin", "original/params.json", ".git/HEAD"])
def test_what_lies_beside_a_model_is_not_lost_in_place(llama: Path, tmp_path: Path, dry_run: bool, lost: str) -> None:
    folder = tmp_path / "model"
    shutil.copytree(llama, folder)
    (folder / "LICENSE").write_text("free")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates/tools.jinja").write_text("{}")
    reshard(folder, folder, overwrite=True, max_shard_bytes=10_000)
    (folder / lost).parent.mkdir(exist_ok=True)
    (folder / lost).write_text("mine")
    first = lost.partition("/")[0]
    with refused(f"model is the folder that is read, and replacing it would remove '{first}'; choose", tmp_path):
        reshard(folder, folder, overwrite=True, dry_run=dry_run)
    reshard(folder, tmp_path / "other", overwrite=True, dry_run=dry_run)
    assert (folder / lost).read_text() == "mine"
