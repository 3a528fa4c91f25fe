"""Hub ids where a folder is expected. No network: the client's download is replaced, or told to stay offline."""

import fnmatch
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, ClassVar

import pytest

from te_models import GPTModel
from te_models.checkpoints import CheckpointError, import_hf, inspect, open_checkpoint, verify
from te_models.checkpoints.io.hub import ALLOWED, IGNORED, local_folder
from te_models.extras import MissingExtraError
from tests.checkpoints.hf_cases import HFFolder, assert_same_bits, stored

hub = pytest.importorskip("huggingface_hub", reason="hub ids are resolved by its client")
errors = hub.errors

Calls = list[dict[str, Any]]


@pytest.fixture
def calls(hf_folder: HFFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Calls:
    """A hub with one model, laid out in the cache as the client does; what it was asked for."""
    source, made = hf_folder("llama"), []
    (source / "pytorch_model.bin").write_bytes(b"a pickle")
    (source / "original").mkdir()
    (source / "original/model.safetensors").write_bytes(b"the same once more")
    (source / "additional_chat_templates").mkdir()
    (source / "additional_chat_templates/rag.jinja").write_text("rag")

    def download(
        repo: str, *, revision: str | None, allow_patterns: list[str], ignore_patterns: list[str], **rest: Any
    ):
        made.append({"repo": repo, "revision": revision, **rest})
        snapshot = tmp_path / "cache/models--org--llama/snapshots/0123"
        blobs = snapshot.parent.parent / "blobs"
        for folder in (snapshot, blobs):
            folder.mkdir(parents=True, exist_ok=True)
        for file in (path for path in source.rglob("*") if path.is_file()):
            name = str(file.relative_to(source))
            wanted = any(fnmatch.fnmatch(name, pattern) for pattern in allow_patterns)
            if wanted and not any(fnmatch.fnmatch(name, pattern) for pattern in ignore_patterns):
                (snapshot / name).parent.mkdir(exist_ok=True)
                shutil.copy(file, blobs / file.name)
                if not (snapshot / name).exists():
                    (snapshot / name).symlink_to(os.path.relpath(blobs / file.name, (snapshot / name).parent))
        return str(snapshot)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(hub, "snapshot_download", download)
    return made


def test_a_hub_id_is_downloaded_wherever_a_folder_is_expected(calls: Calls, tmp_path: Path) -> None:
    import_hf("org/llama@v1.0", "ours")
    assert calls == [{"repo": "org/llama", "revision": "v1.0"}]
    assert_same_bits(stored(tmp_path / "cache/models--org--llama/snapshots/0123"), stored(tmp_path / "hf-llama"))
    assert verify("org/llama", "ours").equal and inspect("org/llama").family == "llama"
    GPTModel.from_pretrained("org/llama").save_pretrained("saved")
    for name in ("tokenizer.json", "additional_chat_templates/rag.jinja"):
        assert (tmp_path / "saved" / name).is_file(), "the files of the downloaded folder come along"
    assert {call["repo"] for call in calls} == {"org/llama"} and len(calls) == 4


def test_only_files_that_are_read_are_asked_for(calls: Calls) -> None:
    names = {path.name for path in local_folder("org/llama").rglob("*") if path.is_file()}
    assert names == {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "rag.jinja"}
    for name in ("pytorch_model.bin", "model.pt", "tokenizer.pkl", "consolidated.00.safetensors", "inference/x.py"):
        allowed = any(fnmatch.fnmatch(name, p) for p in ALLOWED)
        assert not allowed or any(fnmatch.fnmatch(name, p) for p in IGNORED), name
    for name in ("tokenization_x.py", "tiktoken.model", "qwen.tiktoken", "tekken.json"):
        assert any(fnmatch.fnmatch(name, p) for p in ALLOWED) and not any(fnmatch.fnmatch(name, p) for p in IGNORED)


def test_a_folder_of_that_name_wins(calls: Calls, hf_folder: HFFolder, tmp_path: Path) -> None:
    shutil.copytree(hf_folder("qwen3"), tmp_path / "org/llama")
    assert inspect("org/llama").family == "qwen3" and calls == []
    (tmp_path / "org/llama/config.json").unlink()
    with pytest.raises(CheckpointError, match=r"it has no config\.json"):
        inspect("org/llama")
    assert calls == []


def test_what_is_no_hub_id_is_never_asked_for(calls: Calls, tmp_path: Path) -> None:
    names = (
        "absent",
        "./org/llama",
        "/org/llama",
        "org/llama/x",
        "../a",
        "org/",
        "~/x",
        "a/b@",
        tmp_path / "org/llama",
    )
    for name in (*names, Path("org/llama")):
        with pytest.raises(CheckpointError, match="is not a folder"):
            open_checkpoint(name)
    assert calls == []


def test_options_and_revisions(calls: Calls) -> None:
    local_folder("org/llama", "main", token="t", cache_dir="c")
    assert calls == [{"repo": "org/llama", "revision": "main", "token": "t", "cache_dir": "c"}]
    with pytest.raises(CheckpointError, match="names a revision, and revision is 'b'; give one of them"):
        local_folder("org/llama@a", "b")


class Response:
    """What errors of huggingface_hub read from an answer, whichever HTTP client it uses."""

    headers: ClassVar[dict[str, str]] = {}
    request = None
    status_code = 404


def response() -> Any:
    return Response()


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (lambda: errors.GatedRepoError("x", response=response()), "only on request"),
        (lambda: errors.RepositoryNotFoundError("x", response=response()), "has no such model"),
        (lambda: errors.RevisionNotFoundError("x", response=response()), "has no revision 'r' of it"),
        (lambda: errors.HfHubHTTPError("server error", response=response()), "downloading it failed: server error"),
        (lambda: OSError("no space left"), "downloading it failed: no space left"),
    ],
)
def test_a_failing_download_is_one_sentence(monkeypatch: pytest.MonkeyPatch, error: Any, says: str) -> None:
    def fail(*args: Any, **kwargs: Any) -> str:
        raise error()

    monkeypatch.setattr(hub, "snapshot_download", fail)
    with pytest.raises(CheckpointError, match=rf"^absent/model@r is not a folder here, and .*{says}"):
        open_checkpoint("absent/model@r")


def test_offline_with_the_real_client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(CheckpointError, match="not in the cache of the hub, which cannot be reached"):
        local_folder("absent/model", cache_dir=tmp_path)
    with pytest.raises(CheckpointError, match="not in the cache of the hub, which cannot be reached"):
        local_folder("absent/model", cache_dir=tmp_path, local_files_only=True)
    with pytest.raises(CheckpointError, match="absent/mo--del is not a folder here, and "):
        local_folder("absent/mo--del", cache_dir=tmp_path)


@pytest.mark.slow
def test_in_a_process_that_imports_nothing_else(llama: Path, tmp_path: Path) -> None:
    """The client loads its own modules lazily, and transformers is not there to have asked for them."""
    model = tmp_path / "hub/models--org--name"
    shutil.copytree(llama, model / "snapshots" / ("0" * 40))
    (model / "refs").mkdir()
    (model / "refs/main").write_text("0" * 40)
    code = """if True:
        from te_models.checkpoints import CheckpointError, inspect
        print(inspect("org/name").family)
        try:
            inspect("org/absent")
        except CheckpointError as error:
            print(error)
    """
    env = os.environ | {"HF_HOME": str(tmp_path), "HF_HUB_CACHE": str(tmp_path / "hub"), "HF_HUB_OFFLINE": "1"}
    child = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=env, capture_output=True, text=True)
    family, refused = child.stdout.splitlines() or [child.stderr, ""]
    assert family == "llama"
    assert refused.endswith("it is not in the cache of the hub, which cannot be reached")


def test_without_the_client(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(MissingExtraError, match=r"'org/llama' \(there is no such folder\) needs .* 'te_models\[hf\]'"):
        open_checkpoint("org/llama")


def test_the_current_folder_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "inside").mkdir()
    monkeypatch.chdir(tmp_path / "inside")
    for folder, named in ((".", tmp_path / "inside"), ("", tmp_path / "inside"), ("..", tmp_path)):
        with pytest.raises(CheckpointError, match=rf"^{re.escape(str(named))} is no model folder"):
            open_checkpoint(folder)
