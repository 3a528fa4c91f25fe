"""Folders that must be refused: one clear sentence that names the problem, and nothing written."""

import json
import os
import pickle
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import te_models.checkpoints as checkpoints
from te_models.checkpoints import (
    CheckpointError,
    dequantize,
    export_hf,
    import_hf,
    inspect,
    open_checkpoint,
    quantize,
    relayout,
    verify,
)
from te_models.layers import MXFP8Quantizer
from tests.checkpoints.hf_cases import HFFolder, refused, stored
from tests.checkpoints.hostile_cases import (
    HF_DEFECTS,
    INDEX_DEFECTS,
    QUANTIZED_DEFECTS,
    SINGLE,
    TE_DEFECTS,
    Edit,
    edit_tensors,
    forget_digests,
)
from tests.checkpoints.quantized.test_quantized_defects import DEFECTS
from tests.checkpoints.quantized_cases import CASES, make
from tests.covering import BUDGET_FACTOR
from tests.fork_server import ROOT


def status(key: str) -> int:
    """Return an entry of /proc/self/status in KiB."""
    found = re.search(rf"{key}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(found[1])


def attempt(verb: str, folder: str) -> dict[str, Any]:
    """Convert the folder and describe the failure."""
    Path("/proc/self/clear_refs").write_text("5")
    before, start = status("VmRSS"), time.process_time()
    error, text = "", ""
    try:
        getattr(checkpoints, verb)(folder, Path(folder).parent / "new" / "out")
    except Exception as caught:
        error, text = type(caught).__name__, str(caught)
    seconds = time.process_time() - start
    return {"error": error, "text": text, "seconds": seconds, "mib": (status("VmHWM") - before) / 1024}


LARGE = ("header of 125,000 strangers", "large header of another form", "large metadata")
"""Defects of many megabytes; smaller ones of their kinds stay."""


@pytest.mark.matrix
@pytest.mark.parametrize("defect", [pytest.param(d, marks=pytest.mark.slow if d in LARGE else ()) for d in HF_DEFECTS])
def test_hf_folder_is_refused(llama: Path, tmp_path: Path, defect: str) -> None:
    edit, message = HF_DEFECTS[defect]
    edit(llama)
    with refused(message, tmp_path):
        import_hf(llama, tmp_path / "new" / "ours")


@pytest.mark.parametrize("defect", INDEX_DEFECTS)
def test_sharded_folder_is_refused(hf_folder: HFFolder, tmp_path: Path, defect: str) -> None:
    folder = hf_folder("llama", max_shard_size="20KB")
    edit, message = INDEX_DEFECTS[defect]
    edit(folder)
    with refused(message, tmp_path):
        import_hf(folder, tmp_path / "ours")


@pytest.mark.parametrize("defect", TE_DEFECTS)
def test_our_folder_is_refused(hf_folder: HFFolder, tmp_path: Path, defect: str) -> None:
    import_hf(hf_folder("mixtral"), tmp_path / "ours")
    edit, message = TE_DEFECTS[defect]
    edit(tmp_path / "ours")
    for read in (open_checkpoint, inspect, lambda f: verify(f, f), lambda f: export_hf(f, tmp_path / "out")):
        with refused(message, tmp_path):
            read(tmp_path / "ours")


@pytest.mark.parametrize("defect", QUANTIZED_DEFECTS)
def test_quantized_folder_is_refused(llama: Path, tmp_path: Path, defect: str) -> None:
    recipe, edit, message = QUANTIZED_DEFECTS[defect]
    quantize(llama, tmp_path / "quantized", recipe)
    edit(tmp_path / "quantized")
    forget_digests(tmp_path / "quantized")
    for convert in (dequantize, lambda a, b: relayout(a, b, "per-gemm")):
        with refused(message, tmp_path):
            convert(tmp_path / "quantized", tmp_path / "out")


@pytest.mark.slow
def test_each_is_refused_soon_and_in_little_memory(hf_folder: HFFolder, tmp_path: Path) -> None:
    """All of them in a process that can count: 200 MiB above what it had before, each, and under `make test-budget`
    1 s of its time."""
    # beside another worker a process has a hyperthread, half a core: its seconds are as long as two
    limit = BUDGET_FACTOR[0] * (2 if "PYTEST_XDIST_WORKER" in os.environ else 1)
    work: dict[str, tuple[str, str]] = {}

    def prepare(name: str, verb: str, good: Path, edit: Edit) -> None:
        folder = tmp_path / "corpus" / str(len(work)) / "model"
        shutil.copytree(good, folder)
        edit(folder)
        work[name] = (verb, str(folder))

    llama, sharded = tmp_path / "llama", tmp_path / "sharded"
    hf_folder("llama", max_shard_size="20KB").rename(sharded)
    hf_folder("llama").rename(llama)
    import_hf(hf_folder("mixtral"), tmp_path / "ours")
    for name, (edit, _) in HF_DEFECTS.items():
        prepare(f"hf {name}", "import_hf", llama, edit)
    for name, (edit, _) in INDEX_DEFECTS.items():
        prepare(f"index {name}", "import_hf", sharded, edit)
    for name, (edit, _) in TE_DEFECTS.items():
        prepare(f"ours {name}", "export_hf", tmp_path / "ours", edit)
    for name, (recipe, edit, _) in QUANTIZED_DEFECTS.items():
        if not (tmp_path / recipe).exists():
            quantize(llama, tmp_path / recipe, recipe)
        prepare(f"quantized {name}", "dequantize", tmp_path / recipe, lambda f, edit=edit: (edit(f), forget_digests(f)))
    for name, (case, edit, _) in DEFECTS.items():
        if not (tmp_path / case).exists():
            make(CASES[case], tmp_path / case)
        prepare(f"declared {name}", "import_hf", tmp_path / case / "quantized", edit)
    assert len(work) > 170
    before = sorted(tmp_path.rglob("*"))
    command = [sys.executable, "-m", "tests.checkpoints.folder.test_hostile_folders"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    result = subprocess.run(
        command, input=json.dumps(work), capture_output=True, text=True, env=environment, cwd=ROOT, check=False
    )
    assert result.returncode == 0, result.stderr
    reports = json.loads(result.stdout)
    assert reports.keys() == work.keys()
    for name, report in reports.items():
        assert report["error"] == "CheckpointError", (name, report)
        sentence = report["text"].replace(work[name][1], "")  # as long as the temporary folder's name is
        assert "\n" not in sentence and len(sentence) < 700, (name, report)
        assert report["seconds"] < limit and report["mib"] < 200, (name, report)
    assert sorted(tmp_path.rglob("*")) == before, "something was written"


def test_pickles_are_not_loaded(llama: Path, tmp_path: Path) -> None:
    """A pickle beside good weights is ignored; alone it is refused; in neither case is it executed."""

    class Bomb:
        def __reduce__(self) -> tuple[Any, ...]:
            return (os.mkdir, (str(tmp_path / "exploded"),))

    for name in ("pytorch_model.bin", "training_args.bin", "tokenizer.pkl"):
        (llama / name).write_bytes(pickle.dumps(Bomb()))
    import_hf(llama, tmp_path / "ours")
    assert not (tmp_path / "exploded").exists() and not list((tmp_path / "ours").glob("*.bin"))
    (llama / SINGLE).unlink()
    with pytest.raises(CheckpointError, match="pickled"):
        open_checkpoint(llama)
    assert not (tmp_path / "exploded").exists()


def test_a_true_copy_of_the_tied_embedding_is_ignored(hf_folder: HFFolder, tmp_path: Path) -> None:
    folder = hf_folder("qwen2-tied")
    assert "lm_head.weight" not in stored(folder)
    edit_tensors(lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))(folder)
    assert import_hf(folder, tmp_path / "ours").ignored == ("lm_head.weight",)


def test_a_hub_cache_snapshot_is_read_through_its_links(llama: Path, tmp_path: Path) -> None:
    snapshot, blobs = tmp_path / "models--a--b/snapshots/123", tmp_path / "models--a--b/blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for number, file in enumerate(sorted(llama.iterdir())):
        shutil.copy(file, blobs / str(number))
        (snapshot / file.name).symlink_to(f"../../blobs/{number}")
    import_hf(snapshot, tmp_path / "ours")
    assert verify(llama, tmp_path / "ours").equal
    (snapshot / SINGLE).unlink()
    (snapshot / SINGLE).symlink_to(llama / SINGLE)
    with pytest.raises(CheckpointError, match="leaves the folder"):
        open_checkpoint(snapshot)


def test_not_a_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    for name in ("file", "absent", "org/name"):
        with pytest.raises(CheckpointError, match="is not a folder"):
            open_checkpoint(tmp_path / name)


if __name__ == "__main__":
    # torch loads its formulas for the meta device (1 s, 40 MiB) when the first of them is asked for
    MXFP8Quantizer().quantize_fields(torch.empty(1, 1, device="meta"))
    print(json.dumps({name: attempt(*work) for name, work in json.load(sys.stdin).items()}))
