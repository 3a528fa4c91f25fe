"""What each rank of test_flat_moments does: `python -m tests.checkpoints.foreign.megatron_training FOLDER TP`.

Megatron-Core trains a small model on the CPU, on FOLDER/batches.pt [steps, windows, S]. After two steps it saves model
and distributed optimizer to FOLDER/dp_reshardable and FOLDER/fully_reshardable, then goes on; the losses of further
steps are in FOLDER/losses.pt."""

import argparse
import sys
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.checkpoints.foreign.test_megatron import megatron, without_a_gpu

SIZES = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "num_query_groups": 2, "ffn_hidden_size": 128}
BEFORE, LR = 2, 1e-3


def as_if_on_a_gpu() -> None:
    """The optimizer asks parameters for the name of their type, and makes scalars on the current GPU."""
    without_a_gpu()
    type_of = torch.Tensor.type
    named = {"torch.FloatTensor": "torch.cuda.FloatTensor", "torch.BFloat16Tensor": "torch.cuda.BFloat16Tensor"}

    def of_gpu(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        found = type_of(self, *args, **kwargs)
        return named.get(found, found) if isinstance(found, str) else found

    torch.Tensor.type = of_gpu
    torch.Tensor.cuda = lambda self, *_, **__: self
    for name in ("tensor", "zeros", "empty", "ones"):
        setattr(torch, name, partial(_on_cpu, getattr(torch, name)))


def _on_cpu(make: Any, *args: Any, **kwargs: Any) -> Any:
    return make(*args, **({**kwargs, "device": "cpu"} if "device" in kwargs else kwargs))


def build(tp: int, vocabulary: int) -> Any:
    return megatron(tp, vocabulary, {}, init_method_std=0.1, gradient_accumulation_fusion=False, **SIZES)


def main(folder: Path, tp: int) -> None:
    """Train, save, and train on."""
    warnings.simplefilter("ignore")
    as_if_on_a_gpu()
    dist.init_process_group("gloo")
    from megatron.core import dist_checkpointing, parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    parallel_state.initialize_model_parallel(tensor_model_parallel_size=tp)
    batches = torch.load(folder / "batches.pt", weights_only=True)
    model = build(tp, int(batches["vocabulary"]))
    ddp = DistributedDataParallelConfig(use_distributed_optimizer=True, grad_reduce_in_fp32=True, bucket_size=9000)
    ddp.overlap_grad_reduce = False
    wrapped = DistributedDataParallel(model.config, ddp, model)
    options = {"optimizer": "adam", "lr": LR, "weight_decay": 0.0, "adam_beta1": 0.9, "adam_beta2": 0.95}
    config = OptimizerConfig(**options, adam_eps=1e-8, use_distributed_optimizer=True, clip_grad=0.0)
    optimizer = get_megatron_optimizer(config, [wrapped])
    losses = []
    steps = batches["ids"]
    for number, windows in enumerate(steps):
        if number == BEFORE:
            save(folder, wrapped, optimizer, dist_checkpointing, parallel_state, tp, number)
        wrapped.zero_grad_buffer()
        optimizer.zero_grad()
        total = 0.0
        for ids in windows:
            loss = loss_of(wrapped, ids) / len(windows)
            loss.backward()
            total += loss.item()
        wrapped.finish_grad_sync()
        optimizer.step()
        losses.append(total)
    if dist.get_rank() == 0:
        torch.save(torch.tensor(losses), folder / "losses.pt")
    dist.destroy_process_group()


def loss_of(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """The mean over tokens of one micro-batch [B, S]."""
    batch, length = ids.shape
    mask = torch.triu(torch.ones(1, 1, length, length), 1).bool()
    labels = torch.cat([ids[:, 1:], ids[:, :1]], dim=1)
    return model(ids, torch.arange(length)[None].expand(batch, -1), mask, labels=labels)[:, :-1].mean()


def save(folder: Path, model: Any, optimizer: Any, checkpointing: Any, state: Any, tp: int, number: int) -> None:
    """In both forms that the distributed optimizer has."""
    for kind in ("dp_reshardable", "fully_reshardable"):
        if dist.get_rank() == 0:
            (folder / kind).mkdir()
        dist.barrier()
        metadata = {"distrib_optim_sharding_type": kind, "dp_cp_group": state.get_data_parallel_group()}
        weights = model.module.sharded_state_dict(metadata=metadata)
        of_optimizer = optimizer.sharded_state_dict(weights, metadata=metadata)
        args = argparse.Namespace(tensor_model_parallel_size=tp, pipeline_model_parallel_size=1)
        whole = {"args": args, "iteration": number, "checkpoint_version": 3.0, "optimizer": of_optimizer, **weights}
        checkpointing.save(whole, str(folder / kind))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
