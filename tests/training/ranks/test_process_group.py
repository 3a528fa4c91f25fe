"""Which process group a run under torchrun joins."""

import pytest
import torch

from te_models.training.ranks import data_parallel as distributed

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
