"""Training commands one after the other on the same ranks: `python -m tests.training.ranks.several_runs FILE`.

FILE is JSON: a list of {"arguments": of `te-models train`, "output_dir", "start": a checkpoint to continue from}. The
ranks join one process group, as torchrun would have them do for each command; a command that fails ends the process.
"""

import json
import shutil
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from te_models.cli.main import main


def run_all(file: Path) -> None:
    """Run the commands of a file."""
    dist.init_process_group("gloo")
    for run in json.loads(file.read_text()):
        if run["start"] and dist.get_rank() == 0:
            start = Path(run["start"])
            shutil.copytree(start, Path(run["output_dir"]) / "checkpoints" / start.name)
        dist.barrier()
        status = main(["train", *run["arguments"]])
        if status:
            raise SystemExit(f"{run} ended with {status}")
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    run_all(Path(sys.argv[1]))
