"""What each of two processes does: `python -m tests.te_models.mixers.shard_ranks RESULTS NAMES`."""

from __future__ import annotations

import sys
from functools import partial

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tests.ranks import report_cases
from tests.te_models.configs import token_ids
from tests.te_models.mixers.models import model_of


def sharded_training_is_that_of_one_process(name: str) -> None:
    """The mean over ranks of the gradients is the gradient of the mean loss, but for the order of sums."""
    whole, sharded = model_of(name).train(), model_of(name).train()
    mesh = init_device_mesh("cpu", (2,))
    for layer in sharded.decoder.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(sharded, mesh=mesh)
    for rank in range(2):
        ids = token_ids(2, 12, seed=rank)
        (whole(ids, labels=ids, return_logits=False).loss / 2).backward()
    ids = token_ids(2, 12, seed=dist.get_rank())
    sharded(ids, labels=ids, return_logits=False).loss.backward()
    for (key, ours), expected in zip(sharded.named_parameters(), whole.parameters(), strict=True):
        assert (ours.grad is None) == (expected.grad is None), key
        if expected.grad is not None:
            torch.testing.assert_close(ours.grad.full_tensor(), expected.grad, rtol=1e-4, atol=1e-6, msg=key)


if __name__ == "__main__":
    torch.set_num_threads(1)
    cases = {name: partial(sharded_training_is_that_of_one_process, name) for name in sys.argv[2].split(",")}
    report_cases(cases, sys.argv[1])
