"""A folder that ranks do not share is found before anything is built."""

from pathlib import Path

from tests.ranks import run_on_ranks

CODE = """
import os, sys
from pathlib import Path
import torch.distributed as dist
from te_models.config import ConfigError
from te_models.training.one_run import alone_in
from te_models.training.ranks import agreement
from te_models.training.ranks.data_parallel import Ranks
agreement._PATIENCE = 0.3
dist.init_process_group("gloo")
rank = dist.get_rank()
def check(folder):
    if rank == 0:
        with alone_in(folder):
            dist.barrier()
            agreement.check_folder_is_shared(folder, Ranks(rank, 2))
    else:
        dist.barrier()
        agreement.check_folder_is_shared(folder, Ranks(rank, 2))
base = sys.argv[1]
check(Path(base, "same"))
dist.barrier()
try:
    check(Path(base, f"own-{rank}"))
except ConfigError as error:
    print(error)
dist.destroy_process_group()
"""


def test_every_rank_says_which_one_sees_another_folder(tmp_path: Path) -> None:
    for text in run_on_ranks(["-c", CODE, str(tmp_path)], timeout=60):
        assert "rank 1 does not see what rank 0 writes there; allowed: a folder that all ranks share" in text
