"""The files beside the weights: all that a tokenizer needs travels along, and what does not is named."""

import json
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from te_models.checkpoints import CheckpointError, check_manifest, export_hf, import_hf, relayout, reshard, toy
from te_models.hf import TEModelForCausalLM
from tests.checkpoints.hf_cases import HFFolder, refused
from tests.fork_server import run_python

TRAVELS = {
    "tiktoken.model": b"YQ== 0\n",
    "qwen.tiktoken": b"YQ== 0\n",
    "tekken.json": b"{}",
    "additional_chat_templates/rag.jinja": b"rag",
    "tokenization_x.py": b"from .tools import f\nfrom . import x\nimport .more\nraise SystemExit('this was run')\n",
    "tools.py": b"from .tokenization_x import T\nfrom .absent import y\n",
    "more.py": b"",
    "modeling_x.py": b"import torch\n",
    "LICENSE-MODEL": b"as you like",
}
STAYS = {"unused.py": b"", "bench.py": b"", "vocab.bpe": b"", "x\x1b[2J.txt": b""}
NOT_MENTIONED = {"README.md": b"", "logo.png": b"", ".gitattributes": b"", "pytorch_model.bin": b""}

Convert = Callable[..., Any]


@pytest.fixture
def source(hf_folder: HFFolder) -> Path:
    folder = hf_folder("mixtral")
    (folder / "additional_chat_templates").mkdir()
    for name, data in (TRAVELS | STAYS | NOT_MENTIONED).items():
        (folder / name).write_bytes(data)
    edit(folder / "config.json", auto_map={"AutoModel": "modeling_x.M", "AutoConfig": "org/other--unused.C"})
    (folder / "tokenizer_config.json").write_text("{}")
    edit(folder / "tokenizer_config.json", auto_map={"AutoTokenizer": ["tokenization_x.T", None]})
    return folder


def edit(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def assert_all_there(folder: Path) -> None:
    for name, data in TRAVELS.items():
        assert (folder / name).read_bytes() == data, name
    assert not [name for name in STAYS | NOT_MENTIONED if (folder / name).exists()]
    assert check_manifest(folder) > len(TRAVELS)


def test_in_both_directions(source: Path, tmp_path: Path) -> None:
    plan = import_hf(source, tmp_path / "ours")
    (note,) = plan.notes
    assert note == rf"files of {source} that are left behind: 'bench.py', 'unused.py', 'vocab.bpe', 'x\x1b[2J.txt'"
    assert import_hf(source, tmp_path / "dry", dry_run=True).notes == plan.notes
    relayout(tmp_path / "ours", tmp_path / "per-gemm", "per-gemm")
    assert not export_hf(tmp_path / "per-gemm", tmp_path / "back").notes
    for folder in ("ours", "per-gemm", "back"):
        assert_all_there(tmp_path / folder)


def test_a_saved_model_replaces_them(source: Path, tmp_path: Path) -> None:
    model = TEModelForCausalLM.from_pretrained(source)
    for _ in range(2):
        model.save_pretrained(tmp_path / "out")
    assert (tmp_path / "out/additional_chat_templates/rag.jinja").read_bytes() == b"rag"
    assert (tmp_path / "out/tokenization_x.py").is_file()


@pytest.mark.parametrize("convert", [toy, reshard])
def test_between_hugging_face_folders(source: Path, tmp_path: Path, convert: Convert) -> None:
    assert "'unused.py'" in convert(source, tmp_path / "out").notes[0]
    assert_all_there(tmp_path / "out")


@pytest.mark.parametrize(
    "name", ["../../outside.X", "/etc/hostname.X", "a/b.X", "..X", "x\0.X", "", 3, {}, ["a.b.c", [1]]]
)
def test_a_name_that_is_no_file_of_the_folder_is_not_followed(source: Path, tmp_path: Path, name: Any) -> None:
    (tmp_path / "outside.py").write_text("secret")
    edit(source / "config.json", auto_map={"AutoModel": name})
    edit(source / "tokenizer_config.json", auto_map=[name])
    import_hf(source, tmp_path / "ours")
    assert not list((tmp_path / "ours").rglob("*.py"))


def test_links_that_leave_the_folder_are_refused(source: Path, tmp_path: Path) -> None:
    (source / "modeling_x.py").unlink()
    (source / "modeling_x.py").symlink_to("/etc/hostname")
    with refused("modeling_x.py of .* is a symbolic link that leaves the folder", tmp_path):
        import_hf(source, tmp_path / "ours")
    edit(source / "config.json", auto_map={})
    shutil.copytree(source / "additional_chat_templates", tmp_path / "elsewhere")
    shutil.rmtree(source / "additional_chat_templates")
    (source / "additional_chat_templates").symlink_to("../elsewhere")
    with refused("additional_chat_templates of .* is a symbolic link, not a folder", tmp_path):
        import_hf(source, tmp_path / "ours")


def test_a_manifest_names_no_other_folder(source: Path, tmp_path: Path) -> None:
    import_hf(source, tmp_path / "ours")
    manifest = json.loads((tmp_path / "ours/manifest.json").read_text())
    manifest["files"]["additional_chat_templates/../config.json"] = manifest["files"].pop("config.json")
    (tmp_path / "ours/manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError, match="not a plain file name"):
        check_manifest(tmp_path / "ours")


def test_a_run_that_was_killed_among_them_goes_on(source: Path, tmp_path: Path) -> None:
    code = """if True:
        import os, signal, sys
        from te_models.checkpoints import import_hf
        from te_models.checkpoints.write import output_folder
        output_folder.manifest_bytes = lambda records: os.kill(os.getpid(), signal.SIGKILL)
        import_hf(*sys.argv[1:])
    """
    paths = [str(source), str(tmp_path / "ours")]
    child = run_python(["-c", code, *paths])
    assert child.returncode == -signal.SIGKILL, child.stderr
    assert (tmp_path / ".ours.partial/content/additional_chat_templates/rag.jinja").is_file()
    import_hf(*paths)
    assert_all_there(tmp_path / "ours")
