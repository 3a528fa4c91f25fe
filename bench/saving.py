"""Saving a sharded checkpoint over gloo ranks: time of the first rank, and what it reads of what others wrote.

    python -m bench.saving [--rounds 3]

Every rank has as many bytes, whatever their number, so that a save which costs a rank only its own part takes as long
on four ranks as on one. Processor time is the first rank's, of the whole save: planning, writing and hashing its file,
joining the index and the digests. `read_of_others` counts the bytes of other ranks' files that the first rank opens;
`bytes_of_rank` is what each rank writes.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from bench.common import versions, write_result
from te_models import GPTModel
from te_models.parallel.parts import LocalPart
from te_models.training.checkpoints.sharded.checkpoint import save_parts
from te_models.training.checkpoints.sharded.index import file_of
from te_models.training.ranks.data_parallel import Ranks
from te_models.training.seeding import random_state
from tests.training.runs import tiny_model

TENSORS, ROWS, COLUMNS = 24, 1024, 1024
"""What each rank has of each tensor, in float32: 96 MiB in all."""


def rank_main(folder: Path, rounds: int) -> None:
    """Save `rounds` times; the first rank prints its figures."""
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    own = {0: ((rank * ROWS, (rank + 1) * ROWS),)}
    whole = ROWS * world, COLUMNS
    parts = {f"model.weight{i}": LocalPart(torch.randn(ROWS, COLUMNS), whole, own) for i in range(TENSORS)}
    parts |= {f"rng.{rank}.{name}": LocalPart.undivided(state) for name, state in random_state().items()}
    model = GPTModel(tiny_model())
    opened: list[str] = []
    sys.addaudithook(lambda event, arguments: opened.append(str(arguments[0])) if event == "open" else None)
    figures = []
    for step in range(1, rounds + 2):
        dist.barrier()
        cpu, wall = time.process_time(), time.perf_counter()
        saved = save_parts(folder, model, parts, {"step": step}, Ranks(rank, world), keep_last=1)
        figures.append((time.process_time() - cpu, time.perf_counter() - wall))
    others = {file_of(other) for other in range(1, world)}
    read = sum((saved / "parts" / Path(name).name).stat().st_size for name in opened if Path(name).name in others)
    if rank == 0:
        cpu, wall = (statistics.median(values) for values in zip(*figures[1:], strict=True))
        size = (saved / "parts" / file_of(0)).stat().st_size
        print(
            json.dumps(
                {"cpu_s": round(cpu, 3), "wall_s": round(wall, 3), "read_of_others": read, "bytes_of_rank": size}
            )
        )
    dist.destroy_process_group()


def measure(ranks: int, rounds: int) -> dict[str, Any]:
    """Return the first rank's figures."""
    with socket.socket() as found, tempfile.TemporaryDirectory() as folder:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
        found.close()
        shared = {
            "WORLD_SIZE": str(ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "OMP_NUM_THREADS": "1",
        }
        command = [sys.executable, "-m", "bench.saving", "--folder", folder, "--rounds", str(rounds)]
        processes = [
            subprocess.Popen(command, env=os.environ | shared | {"RANK": str(rank)}, stdout=subprocess.PIPE, text=True)
            for rank in range(ranks)
        ]
        printed = [process.communicate()[0] for process in processes]
    return json.loads(printed[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    if asked.folder is not None:
        rank_main(asked.folder, asked.rounds)
        return
    cases = {str(ranks): measure(ranks, asked.rounds) for ranks in (1, 2, 4)}
    details = {"versions": versions("torch"), "load_average": [round(load, 1) for load in os.getloadavg()]}
    write_result("saving", details | {"rounds": asked.rounds, "ranks": cases})
    print(json.dumps(cases, indent=2))


if __name__ == "__main__":
    main()
