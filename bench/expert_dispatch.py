"""What distributed experts send and hold: rows exchanged by all-to-all beside tokens gathered from all ranks.

    python -m bench.expert_dispatch [--tokens 256]

A layer of 64 experts, 4 for each token, in bfloat16, and under MXFP8 with rows that travel so: forward and backward
pass of one micro-batch, on 2 and 4 gloo ranks with choices that are drawn at random, and on 64 ranks that do not exist,
as a plan supposes them: balanced. Of the first rank: the rows that its experts multiply (`rows`, room for those that
there may be by all-gather), the bytes that it sends to the ranks that share the experts (`sent`), and the highest point
of its tensors beyond parameters and optimizer (`peak`). Nothing is timed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from bench.common import versions, write_result
from te_models import AttentionConfig, MLPConfig, ModelConfig, MoEConfig
from te_models.model.moe import MoELayer
from te_models.model.moe import layer as moe
from te_models.plan.micro_batch import record_layers
from te_models.plan.simulation import fake_ranks, fake_tensors
from te_models.training import DataConfig, ModelSource, ParallelConfig, PrecisionConfig, TrainConfig
from te_models.training.ranks.data_parallel import Ranks
from te_models.training.ranks.layout import rank_layout

REAL, SUPPOSED = (2, 4), 64
CASES = {
    "all_to_all": ("all_to_all", "none"),
    "all_gather": ("all_gather", "none"),
    "all_to_all, mxfp8": ("all_to_all", "mxfp8"),
    "all_to_all_quantized, mxfp8": ("all_to_all_quantized", "mxfp8"),
}
"""The way of the rows, and the recipe."""
RATIOS = {"all_gather": "all_to_all", "all_to_all_quantized, mxfp8": "all_to_all, mxfp8"}
HIDDEN, EXPERTS, TOPK = 128, 64, 4


def run_of(dispatch: Any, recipe: Any, ranks: int, tokens: int) -> TrainConfig:
    """Return a run of one layer whose experts all ranks share."""
    model = ModelConfig(
        vocab_size=256,
        hidden_size=HIDDEN,
        num_layers=1,
        max_position_embeddings=tokens,
        attention=AttentionConfig(num_attention_heads=4),
        mlp=MLPConfig(ffn_hidden_size=HIDDEN),
        moe=MoEConfig(num_moe_experts=EXPERTS, moe_router_topk=TOPK, moe_ffn_hidden_size=HIDDEN // 2),
    )
    return TrainConfig(
        output_dir="unused",
        steps=1,
        device="cpu",
        compile=False,
        model=ModelSource(config=model),
        data=DataConfig(path="unused", sequence_length=tokens),
        precision=PrecisionConfig(dtype="bf16", recipe=recipe),
        parallel=ParallelConfig(expert_model_parallel_size=ranks, expert_dispatch=dispatch),
    )


def random_topk(logits: torch.Tensor, topk: int, **_: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return softmax weights, and different experts for each token, each as likely as the others."""
    indices = torch.rand(logits.shape).topk(topk).indices
    return torch.softmax(logits.float(), -1).gather(1, indices), indices


def measure(dispatch: str, recipe: str, ranks: int, tokens: int, *, supposed: bool) -> dict[str, int]:
    """Record a step of this rank. supposed: of tensors without values."""
    config, rows = run_of(dispatch, recipe, ranks, tokens), []
    model = config.model.config
    assert model is not None
    layout = rank_layout(config.parallel, Ranks(dist.get_rank(), ranks), "cpu")
    forward, chosen = MoELayer.forward, moe.router_topk

    def noted(layer: MoELayer, *arguments: Any) -> Any:
        fc2 = layer.experts.linear_fc2
        handle = fc2.register_forward_pre_hook(lambda _module, given: rows.append(given[0].shape[0]))
        try:
            return forward(layer, *arguments)
        finally:
            handle.remove()

    MoELayer.forward = noted
    try:
        moe.router_topk = random_topk
        torch.manual_seed(0)
        with fake_tensors() if supposed else contextlib.nullcontext():
            found = record_layers(config, model, layout, [0])
    finally:
        MoELayer.forward, moe.router_topk = forward, chosen
    sent = sum(traffic.sent for traffic in found.each.values())  # gradients move once, at the end of a step
    activations = found.peak - found.parameters - found.optimizer
    return {"rows": rows[0], "sent": round(sent), "peak": round(activations)}


def of_this_rank(ranks: int, tokens: int, supposed: bool) -> None:
    """Print what the first rank takes, as JSON; this process is one of `ranks`."""
    torch.set_num_threads(1)
    with fake_ranks(ranks) if supposed else joined():
        found = {name: measure(*case, ranks, tokens, supposed=supposed) for name, case in CASES.items()}
        if dist.get_rank() == 0:
            print(json.dumps(found))


@contextlib.contextmanager
def joined() -> Iterator[None]:
    """Inside, this process belongs to the group that the environment describes."""
    dist.init_process_group("gloo")
    yield
    dist.barrier()
    dist.destroy_process_group()


def on_ranks(ranks: int, tokens: int, *, supposed: bool) -> dict[str, Any]:
    """Start the processes and return what the first one printed."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = str(listener.getsockname()[1])
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(ranks), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "bench.expert_dispatch", "--ranks", str(ranks), "--tokens", str(tokens)]
    command += ["--supposed"] if supposed else []
    processes = [
        subprocess.Popen(
            command,
            env=os.environ | shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parents[1],
        )
        for rank in range(1 if supposed else ranks)
    ]
    printed = [process.communicate()[0] for process in processes]
    if any(process.returncode for process in processes):
        raise RuntimeError(f"a process of {ranks} ranks failed")
    return json.loads(printed[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=256, help="tokens of each rank")
    parser.add_argument("--ranks", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--supposed", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.ranks is not None:
        of_this_rank(options.ranks, options.tokens, options.supposed)
        return
    results = {}
    for ranks in (*REAL, SUPPOSED):
        found = on_ranks(ranks, options.tokens, supposed=ranks == SUPPOSED)
        for name, beside in RATIOS.items():
            ratios = {figure: round(found[name][figure] / found[beside][figure], 2) for figure in found[name]}
            found[f"{name} over {beside}"] = ratios
        results[str(ranks)] = found
        print(ranks, found, flush=True)
    shape = {"tokens": options.tokens, "hidden": HIDDEN, "experts": EXPERTS, "topk": TOPK, "supposed": [SUPPOSED]}
    details = {"versions": versions("torch"), "shape": shape, "results": results}
    print(f"wrote {write_result('expert_dispatch', details)}")


if __name__ == "__main__":
    main()
