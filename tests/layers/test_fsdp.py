"""FSDP2 over quantized primary weights, on two real processes: see `fsdp_ranks` for what each case does."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch is built without distributed")

if torch.distributed.is_available():
    from tests.layers.fsdp_ranks import cases

    CASES = list(cases())
else:
    CASES = []


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    """What every case came to, on either rank."""
    results = tmp_path_factory.mktemp("fsdp") / "results"
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.layers.fsdp_ranks", str(results)],
            cwd=Path(__file__).parents[2],
            env=os.environ | shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    for rank in ranks:
        _, errors = rank.communicate(timeout=300)
        assert rank.returncode == 0, errors
    return [json.loads(results.with_suffix(f".{rank}").read_text()) for rank in range(2)]


@pytest.mark.parametrize("case", CASES)
def test_two_ranks(case: str, outcomes: list[dict[str, str]]) -> None:
    assert [outcome[case] for outcome in outcomes] == ["ok", "ok"]
