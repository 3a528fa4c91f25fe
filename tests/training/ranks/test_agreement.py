"""Ranks with other settings, data or versions end at once, all of them, with one sentence that says what differs."""

import json
from pathlib import Path

from te_models.training.data.writer import write_dataset
from tests.ranks import run_on_ranks
from tests.training.runs import tiny_run

RANKS = """
import json, sys
from pathlib import Path
import torch
import torch.distributed as dist
import te_models
from te_models.training import TrainConfig, train

folder = Path(sys.argv[1])
config = TrainConfig.from_json((folder / "config.json").read_text())
dist.init_process_group("gloo")
rank, found = dist.get_rank(), {}

def attempt(name, config):
    try:
        train(config)
    except ValueError as error:
        found[name] = f"{type(error).__name__}: {error}"

attempt("settings", config.replace(optimizer=config.optimizer.replace(lr=(rank + 1) * 1e-3)))
attempt("sizes", config.replace(parallel=config.parallel.replace(tensor_model_parallel_size=rank + 1)))
attempt("tokens", config.replace(data=config.data.replace(path="data", text=(), tokenizer=None)))
version, te_models.__version__ = te_models.__version__, f"0.{rank}.0"
attempt("version", config)
te_models.__version__ = version
print(json.dumps(found))
dist.destroy_process_group()
"""


def test_ranks_that_do_not_agree_end_with_what_differs(tmp_path: Path) -> None:
    """Where each rank has a folder of its own, a relative path names other tokens."""
    (tmp_path / "config.json").write_text(tiny_run(tmp_path).to_json())
    for rank in range(2):
        write_dataset(tmp_path / str(rank) / "data", [[[i % 200 + rank for i in range(4000)]]], 257)
    code = RANKS.replace("rank, found =", "import os; os.chdir(folder / str(dist.get_rank()))\nrank, found =")
    first, second = (json.loads(text) for text in run_on_ranks(["-c", code, str(tmp_path)], timeout=120))
    assert first == second
    same = "allowed: the same on all ranks"
    begin = "ConfigError: rank 1 and rank 0 do not agree: "
    assert first["settings"] == f"{begin}optimizer.lr is 0.002 on rank 1 and 0.001 on rank 0; {same}"
    where = "parallel.tensor_model_parallel_size"
    assert first["sizes"] == f"{begin}{where} is 2 on rank 1 and 1 on rank 0; {same}"
    assert first["version"] == f"{begin}the version of te_models is 0.1.0 on rank 1 and 0.0.0 on rank 0; {same}"
    assert "DataError: rank 1 and rank 0 do not agree: digest of data.path data is " in first["tokens"]
    assert not (tmp_path / "run").exists()
