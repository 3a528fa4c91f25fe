"""Training over two gloo ranks against one: memory of each rank beside the plan's figure, and processor time per token.

    python -m bench.ranks [--rounds 3]

A mixture of experts in float32 takes steps of four micro-batches in each layout, eager, one thread a rank. Memory is
what the resident set of a rank grows by, at its highest, from before the model is built (weights, gradients, moments,
activations, buffers of collectives and of libraries), in runs whose allocator returns freed memory at once. glibc's
keeps it, and takes 1.1 (one rank) to twice (FSDP2) as much. The plan's figure counts tensors alone.
Processor time is the sum over the ranks, of the steps after the first, per token that is trained on; `of_one` is what a
layout takes over what one rank takes, in rounds by turns.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from bench.common import RETURNS_MEMORY, ratio, versions, write_result
from te_models.config import AttentionConfig, ConfigError, MLPConfig, ModelConfig, MoEConfig
from te_models.plan import plan_run
from te_models.training import (
    CheckpointConfig,
    DataConfig,
    LogConfig,
    ModelSource,
    ParallelConfig,
    PrecisionConfig,
    TrainConfig,
    write_dataset,
)

LAYOUTS: dict[str, dict[str, int]] = {
    "one": {},
    "fsdp2": {"data_parallel_shard_size": 2},
    "tp2": {"tensor_model_parallel_size": 2},
    "ep2": {"expert_model_parallel_size": 2},
    "pp2": {"pipeline_model_parallel_size": 2},
}
MICRO_BATCHES = 4
MODEL = ModelConfig(
    vocab_size=8192,
    hidden_size=256,
    num_layers=2,
    max_position_embeddings=256,
    attention=AttentionConfig(num_attention_heads=4, num_query_groups=2),
    mlp=MLPConfig(ffn_hidden_size=1024),
    moe=MoEConfig(num_moe_experts=4, moe_router_topk=2, moe_ffn_hidden_size=1024, aux_loss_coeff=0.01),
)
MIB = 2**20


def config_of(layout: str, folder: Path, steps: int) -> TrainConfig:
    """Return the run of a layout: the same windows in each step of every one."""
    share = MICRO_BATCHES // 2 if layout in ("fsdp2", "ep2") else MICRO_BATCHES
    return TrainConfig(
        output_dir=str(folder / "run"),
        steps=steps,
        device="cpu",
        compile=False,
        model=ModelSource(config=MODEL),
        data=DataConfig(
            path=str(folder / "data"),
            sequence_length=64,
            micro_batch_size=2,
            gradient_accumulation=share,
            validation_fraction=0.0,
        ),
        parallel=ParallelConfig(**LAYOUTS[layout]),
        precision=PrecisionConfig(dtype="fp32"),
        checkpoint=CheckpointConfig(every_minutes=0.0),
        log=LogConfig(progress=False),
    )


def rank_of_a_run(folder: Path) -> None:
    """On a rank: train, and print [bytes at the highest beyond those before, processor seconds of each step]."""
    import torch.distributed.fsdp
    import torch.distributed.pipelining
    import torch.distributed.tensor

    from te_models.training import loop, setup

    torch.set_num_threads(1)
    seconds: list[float] = []
    before = highest = 0
    build, step = setup.build_model, loop.train_step

    def building(*arguments: Any) -> Any:
        nonlocal before
        before = _resident()
        return build(*arguments)

    def stepping(*arguments: Any, **options: Any) -> Any:
        nonlocal highest
        begun = time.process_time()
        result = step(*arguments, **options)
        seconds.append(time.process_time() - begun)
        highest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        return result

    setup.build_model, loop.train_step = building, stepping
    loop.train(TrainConfig.from_json((folder / "config.json").read_text()))
    print(json.dumps([highest - before, seconds]))


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def run(layout: str, steps: int, environment: dict[str, str]) -> tuple[list[float], float]:
    """Return (MiB of each rank, processor seconds per token) of one run."""
    ranks = 1 if layout == "one" else 2
    with tempfile.TemporaryDirectory() as name, socket.socket() as listener:
        folder = Path(name)
        generator = torch.Generator().manual_seed(0)
        write_dataset(folder / "data", [[torch.randint(0, 8192, (100_000,), generator=generator).tolist()]], 8192)
        config = config_of(layout, folder, steps)
        (folder / "config.json").write_text(config.to_json())
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
        listener.close()
        shared = (
            os.environ | environment | {"OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        )
        command = [sys.executable, "-m", "bench.ranks", "--rank-of", str(folder)]
        processes = []
        for rank in range(ranks):
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)} if ranks > 1 else {}
            processes.append(subprocess.Popen(command, env=shared | own, stdout=subprocess.PIPE, text=True))
        printed = [process.communicate()[0] for process in processes]
    if any(process.returncode for process in processes):
        raise RuntimeError(f"{layout}: a rank failed")
    found = [json.loads(text.splitlines()[-1]) for text in printed]
    tokens = MICRO_BATCHES * config.data.micro_batch_size * config.data.sequence_length * (steps - 1)
    return [round(grown / MIB, 1) for grown, _ in found], sum(sum(own[1:]) for _, own in found) / tokens


def planned(layout: str) -> dict[str, Any]:
    """Return the plan's MiB of the first rank, or why there is none."""
    try:
        plan = plan_run(config_of(layout, Path("unused"), 1), 1 if layout == "one" else 2)
    except ConfigError as error:
        return {"plan_mib": None, "plan_refused": str(error)}
    return {"plan_mib": round(plan.memory / MIB, 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--rank-of", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank_of is not None:
        rank_of_a_run(Path(options.rank_of))
        return
    torch.set_num_threads(1)
    memory: dict[str, list[list[float]]] = {layout: [] for layout in LAYOUTS}
    seconds: dict[str, list[float]] = {layout: [] for layout in LAYOUTS}
    for _ in range(options.rounds):
        for layout in LAYOUTS:
            memory[layout].append(run(layout, options.steps, RETURNS_MEMORY)[0])
            seconds[layout].append(run(layout, options.steps, {})[1])
    results: dict[str, Any] = {}
    for layout in LAYOUTS:
        largest = [max(own) for own in memory[layout]]
        results[layout] = {
            "memory_mib": [statistics.median(column) for column in zip(*memory[layout], strict=True)],
            "memory_of_one": ratio(largest, [own[0] for own in memory["one"]]),
            **planned(layout),
            "cpu_us_per_token": round(1e6 * statistics.median(seconds[layout]), 1),
            "cpu_of_one": ratio(seconds[layout], seconds["one"]),
        }
        print(layout, results[layout], flush=True)
    details = {"versions": versions("torch"), "load_average": [round(load, 1) for load in os.getloadavg()]}
    details |= {"rounds": options.rounds, "steps": options.steps, "micro_batches": MICRO_BATCHES}
    print(f"wrote {write_result('ranks', details | {'model': MODEL.to_dict(), 'results': results})}")


if __name__ == "__main__":
    main()
