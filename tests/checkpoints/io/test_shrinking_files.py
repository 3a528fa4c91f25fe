"""A weight file that becomes shorter while it is read: an error in one sentence, where a memory map would end the
process (SIGBUS)."""

from __future__ import annotations

import json
from pathlib import Path

from te_models.checkpoints import import_hf
from tests.checkpoints.hf_cases import HFFolder
from tests.fork_server import run_python


def test_a_file_that_shrinks_is_named(hf_folder: HFFolder, tmp_path: Path) -> None:
    import_hf(hf_folder("llama"), tmp_path / "ours")
    command = [str(Path(__file__).parents[1].joinpath("shrink_child.py")), str(tmp_path / "ours")]
    result = run_python(command)
    assert result.returncode == 0, result.stderr
    reports = json.loads(result.stdout)
    assert reports.pop("scales") == "nothing", "there are none to read"
    for name, message in reports.items():
        assert message == "model.safetensors became shorter while it was read", name
