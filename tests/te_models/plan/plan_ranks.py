"""What each process of test_plan does: `python -m tests.te_models.plan.plan_ranks RESULTS real|fake|fake1 LAYOUTS`,
on two ranks, or as the first or second of two that do not exist."""

import contextlib
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from te_models.kernels.gemm import using_cpu_gemm
from te_models.plan.micro_batch import Recorded, as_few_operations, record_layers, record_step, recorder_of
from te_models.plan.process import model_of
from te_models.plan.simulation import fake_ranks, fake_tensors
from te_models.plan.stages import record_stages, stages_of_layers, unrecorded_vote
from te_models.training import LoRAConfig, OptimizerConfig, TrainConfig
from te_models.training.build import build_optimizer
from te_models.training.ranks.data_parallel import Ranks
from te_models.training.ranks.layout import RankLayout, rank_layout
from te_models.training.ranks.reduction import reduce_gradients
from te_models.training.step import make_pipeline
from tests.build import parallel
from tests.training.runs import tiny_model, tiny_run

LAYERS = 6
NAMES = (
    *("dp2", "fsdp2", "fsdp2 once", "tp2", "tp2 sp", "cp2", "cp2 p2p", "cp2 a2a", "ep2", "etp2", "tp2 etp1 ep2"),
    *("ep2 all_gather", "ep2 quantized mxfp8", "fsdp2 mxfp8", "fsdp2 checkpointed", "pp2", "pp2 long"),
    *("pp2 GPipe long", "pp2 Interleaved1F1B", "pp2 ZBVZeroBubble", "fsdp2 ahead", "tp2 sp ahead", "pp2 ahead"),
    *("fsdp2 lora", "tp2 sp lora", "ep2 lora", "pp2 lora", "fsdp2 frozen"),
)
LAYOUTS = {name: parallel(name) for name in NAMES}
LAYOUTS["fsdp2 once"]["reduce_gradients"] = "step"
LAYOUTS["ep2 all_gather"]["expert_dispatch"] = "all_gather"
LAYOUTS["ep2 quantized mxfp8"]["expert_dispatch"] = "all_to_all_quantized"
STAGES = {name: sizes for name, sizes in LAYOUTS.items() if name.startswith("pp")}
DENSE = ("fsdp2 mxfp8", "pp2")
MICRO_BATCHES = {"pp2": 3, "pp2 long": 12, "pp2 GPipe long": 12}
"""Of a step. Models of "ahead" predict a further token. With "lora" one
layer is adapted in other places than the others, and "frozen" is all of one."""


def values_of(found: Recorded) -> dict[str, Any]:
    """Return what was recorded as JSON values, with the traffic of a step as sorted text."""
    traffic = {
        f"{when} {kind} over {over}": asdict(moved)
        for when, of in (("each", found.each), ("once", found.once))
        for (kind, over), moved in sorted(of.items())
    }
    return {"parameters": found.parameters, "optimizer": found.optimizer, "peak": found.peak, "traffic": traffic}


def balanced_topk(logits: torch.Tensor, topk: int, **_: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return softmax weights, and experts one after the other, so that each is chosen equally often."""
    tokens, experts = logits.shape
    indices = torch.arange(tokens * topk).view(tokens, topk) % experts
    return torch.softmax(logits.float(), -1).gather(1, indices), indices


def record_whole_stages(config: TrainConfig, layout: RankLayout) -> Recorded:
    """Return what a rank takes for a step of all layers and micro-batches, which all run."""
    chosen, recorder = [list(span) for span in layout.stages.layers(LAYERS)], recorder_of(layout)
    gpt, config, layout = stages_of_layers(config, model_of(config), layout, chosen)
    recorder.hold([list(gpt.parameters()), list(gpt.buffers())])
    found = Recorded(parameters=recorder.live)
    with as_few_operations(), recorder:
        optimizer = build_optimizer(config, gpt, layout)
        found.optimizer = recorder.live - found.parameters
        pipeline = make_pipeline(gpt.train(), config, "cpu", layout)
        shape = config.data.micro_batch_size, config.data.sequence_length
        micro_batch = {"input_ids": torch.zeros(shape, dtype=torch.int64, device="cpu")}
        with unrecorded_vote():
            pipeline.forward_backward([micro_batch] * pipeline.micro_batches)
        optimizer.accumulate_gradients()
        reduce_gradients(optimizer, layout.gradients)
        pipeline.sum_embedding_gradients()
        found.once, found.peak = recorder.traffic, recorder.peak
    return found


def main(results: str, fake: bool, layouts: list[str], rank: int = 0) -> None:
    found: dict[str, Any] = {}
    with contextlib.ExitStack() as stack:
        # as a plan supposes: equally many tokens for each expert, and products that cast no operand
        stack.enter_context(mock.patch("te_models.model.moe.layer.router_topk", balanced_topk))
        stack.enter_context(mock.patch("te_models.plan.micro_batch.using_cpu_gemm", lambda _: using_cpu_gemm("bf16")))
        if fake:
            stack.enter_context(fake_ranks(2, rank))
        else:
            dist.init_process_group("gloo")
            stack.callback(dist.destroy_process_group)
        for name in layouts:
            sizes = LAYOUTS[name]
            config = tiny_run(Path("unused"), moe=name not in DENSE)
            config = config.replace(
                parallel=config.parallel.replace(**sizes),
                precision=config.precision.replace(dtype="bf16", recipe="mxfp8" if "mxfp8" in name else "none"),
                model=config.model.replace(
                    config=tiny_model(moe=name not in DENSE, layers=LAYERS).replace(
                        mtp_num_layers=int("ahead" in name)
                    ),
                    activation_checkpointing="checkpointed" in name,
                ),
                data=config.data.replace(gradient_accumulation=MICRO_BATCHES.get(name, 8 if name in STAGES else 2)),
            )
            if "lora" in name:
                config = config.replace(
                    lora=LoRAConfig(rank=8, targets=("linear_qkv", "experts.*", "*.4.*.linear_proj"))
                )
            if "frozen" in name:
                config = config.replace(optimizer=OptimizerConfig(freeze=("decoder.layers.4.*", "embedding.*")))
            layout = rank_layout(config.parallel, Ranks(dist.get_rank(), 2), "cpu")
            with fake_tensors() if fake else contextlib.nullcontext():
                if layout.stages is not None:
                    found[name] = values_of(record_whole_stages(config, layout))
                    if fake:
                        found[f"{name} predicted"] = values_of(record_stages(config, model_of(config), layout))
                    continue
                whole = record_layers(config, model_of(config), layout, list(range(LAYERS)))
                found[name] = values_of(whole)
                if fake:
                    found[f"{name} predicted"] = values_of(record_step(config, model_of(config), layout))
        rank = dist.get_rank()
        Path(f"{results}.{rank}").write_text(json.dumps(found))
        if not fake:
            dist.barrier()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(sys.argv[1], sys.argv[2].startswith("fake"), sys.argv[3:], int(sys.argv[2][-1] == "1"))
