"""Which process group a run under torchrun joins."""

import os

import pytest
import torch

from te_models.training.ranks import data_parallel as distributed
from tests.fork_server import Python

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch is built without distributed")


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_its_ranks_can_exchange_what_is_on_the_host(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Losses and random states are there, whatever the device of the model."""
    asked: list[str] = []
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(distributed.dist, "is_initialized", lambda: False)
    monkeypatch.setattr(distributed.dist, "init_process_group", lambda backend, timeout: asked.append(backend))
    monkeypatch.setattr(distributed.dist, "get_rank", lambda: 1)
    monkeypatch.setattr(distributed.dist, "get_world_size", lambda: 2)
    assert distributed.ranks_from_environment(device).world_size == 2
    backends = torch.distributed.distributed_c10d.BackendConfig(torch.distributed.Backend(asked[0]))
    serves = backends.get_device_backend_map()
    assert serves["cpu"] == "gloo" and serves[device] == {"cpu": "gloo", "cuda": "nccl"}[device]


JOIN = """
import os, time
from datetime import timedelta
import torch.distributed as dist
from te_models.training.ranks.data_parallel import ranks_from_environment
time.sleep(float(os.environ["LATE"]))
assert ranks_from_environment("cpu", timedelta(seconds=30)).world_size == 2
dist.barrier()
os._exit(0)  # as a killed rank, it leaves behind what it wrote in the store
"""


def test_ranks_that_are_started_again_meet_in_the_store_of_the_first_start() -> None:
    """Rank 1 is there first, and finds the address of the rank 0 of the start before, which is gone."""
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "WORLD_SIZE": "2"}
    address["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    for late in ("0", "0.5"):
        environments = ({"RANK": "0", "LATE": late}, {"RANK": "1", "LATE": "0"})
        ranks = [Python(["-c", JOIN], env=os.environ | address | its) for its in environments]
        done = [rank.finish(60) for rank in ranks]
        assert [its.returncode for its in done] == [0, 0], done
