"""What each of the two processes of test_expert_bias does:
`python -m tests.te_models.expert_bias_ranks RESULTS FOLDER`.

In every case two steps of two micro-batches of the model in FOLDER move its biases as in one process that sees all
tokens, to the same bits on both ranks.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import checkpoint
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from te_models import GPTModel, update_expert_bias
from te_models.model.moe.expert_bias import biases_and_counts
from tests.ranks import report_cases
from tests.te_models.configs import token_ids

RATE = 0.1


def own(ids: Tensor) -> Tensor:
    """This rank's sequences."""
    return ids.chunk(2)[dist.get_rank()]


def everything(ids: Tensor) -> Tensor:
    return ids


def two_steps(
    model: nn.Module,
    part: Callable[[Tensor], Tensor],
    group: Any = None,
    around: Callable[[int], Any] = contextlib.nullcontext,
    steps: Iterable[int] = range(2),
) -> tuple[list[Tensor], list[Tensor]]:
    """Return the counts and the biases of each step. part: what of a micro-batch is seen; around: its context."""
    counts, biases = [], []
    for step in steps:
        for i in range(2):
            ids = part(token_ids(4, 9, seed=2 * step + i))
            with around(i):
                model(ids, labels=ids, return_logits=False).loss.backward()
        counts.append(update_expert_bias(model, RATE, process_group=group))
        biases.append(torch.stack([bias for bias, _ in biases_and_counts(model)]))
    return counts, biases


def as_in_one_process(folder: Path, got: tuple[list[Tensor], list[Tensor]], times: int = 1) -> None:
    """times: how often each token was counted."""
    alone, _ = dist.new_subgroups(1)
    counts, biases = two_steps(GPTModel.from_pretrained(folder), everything, alone)
    for step in range(2):
        assert torch.equal(got[0][step], times * counts[step]), (step, got[0], counts)
        assert torch.equal(got[1][step], biases[step])
    assert biases[0].abs().max() == torch.tensor(RATE) and not torch.equal(*biases)


def data_parallel(folder: Path) -> None:
    as_in_one_process(folder, two_steps(GPTModel.from_pretrained(folder), own))


def distributed_data_parallel(folder: Path) -> None:
    """Which copies the first rank's buffers to the others, but not between the micro-batches of a step."""
    model = DistributedDataParallel(GPTModel.from_pretrained(folder))
    got = two_steps(model, own, around=lambda i: model.no_sync() if i == 0 else contextlib.nullcontext())
    as_in_one_process(folder, got)


def shard(folder: Path) -> nn.Module:
    model, mesh = GPTModel.from_pretrained(folder), init_device_mesh("cpu", (2,))
    for layer in model.decoder.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def sharded(folder: Path) -> None:
    as_in_one_process(folder, two_steps(shard(folder), own))


def sharded_and_continued(folder: Path) -> None:
    """The second step begins from a checkpoint of the first."""
    first, again = shard(folder), shard(folder)
    counts, biases = two_steps(first, own, steps=[0])
    checkpoint.save(first.state_dict(), checkpoint_id=f"{folder}-sharded")
    state = again.state_dict()
    checkpoint.load(state, checkpoint_id=f"{folder}-sharded")
    again.load_state_dict(state)
    more = two_steps(again, own, steps=[1])
    as_in_one_process(folder, (counts + more[0], biases + more[1]))


def distributed_experts(folder: Path) -> None:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("ep",))
    as_in_one_process(folder, two_steps(GPTModel.from_pretrained(folder, device_mesh=mesh), own))


def split_layers(folder: Path) -> None:
    """Both ranks see the same tokens: they are counted twice, and every bias moves as if once."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    as_in_one_process(folder, two_steps(GPTModel.from_pretrained(folder, device_mesh=mesh), everything), times=2)


CASES = (
    data_parallel,
    distributed_data_parallel,
    sharded,
    sharded_and_continued,
    distributed_experts,
    split_layers,
)

if __name__ == "__main__":
    report_cases({case.__name__: functools.partial(case, Path(sys.argv[2])) for case in CASES}, sys.argv[1])
