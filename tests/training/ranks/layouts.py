"""What the tests of layouts share: one TOML file, the options of each layout, and runs compared with those of one rank.

A step is as many micro-batches in every layout, so that all of them take the same windows."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from te_models import training
from te_models.cli.main import main
from te_models.config import EmbeddingConfig, Mamba2Config, ModelConfig, SharedBlocksConfig
from tests.build import SIZES, parallel
from tests.covering import EVERYDAY
from tests.ranks import run_on_ranks
from tests.training.processes import as_toml
from tests.training.runs import balanced_model, tiny_model, tiny_run

MICRO_BATCHES = 2 if EVERYDAY[0] else 4
"""Everyday tests have layouts of two ranks alone."""


def _balanced(kind: str) -> ModelConfig:
    model = tiny_model(moe=True)
    return model.replace(moe=model.moe.replace(moe_router_load_balancing_type=kind, aux_loss_coeff=0.1))


MODELS: dict[str, ModelConfig] = {
    "dense": tiny_model(),
    "moe": tiny_model(moe=True),
    "seq_moe": _balanced("seq_aux_loss"),
    "global_moe": _balanced("global_aux_loss").replace(num_layers=4),
    "mla_moe": balanced_model(),
    "wide": tiny_model(hidden=128),
    "deep": tiny_model(moe=True, layers=4),
    "uneven": tiny_model(layers=3),
    "learned": tiny_model(layers=3).replace(
        embedding=EmbeddingConfig(share_embeddings_and_output_weights=True, position_embedding_type="learned_absolute")
    ),
    "ahead": tiny_model(moe=True, layers=4).replace(mtp_num_layers=2),
    "deep_mla": balanced_model().replace(num_layers=5),
    "tied ahead": balanced_model().replace(
        mtp_num_layers=1, embedding=EmbeddingConfig(share_embeddings_and_output_weights=True)
    ),
    "zamba": tiny_model(layers=4).replace(
        mixers={"recurrent": Mamba2Config(num_heads=4, head_dim=8, state_size=8)},
        layer_mixers=("recurrent", *("attention+recurrent",) * 3),
        mlp_layers=(),
        shared_blocks=SharedBlocksConfig(num_blocks=2, layers=(1, 2, 3), lora_rank=3, attention_lora=True),
    ),
    "tied": tiny_model(layers=4).replace(embedding=EmbeddingConfig(share_embeddings_and_output_weights=True)),
}
"""Kind -> its model; mla_moe has latent attention, groups of experts, a shared one and a bias that balances them;
two ranks cut "wide" between blocks of 32 rows, "uneven" and "learned" (positions) into stages of one layer and of two;
"tied" trains with a z-loss of the logits, "ahead" predicts two further tokens, "tied ahead" one; layers of "zamba"
share blocks, which stages have, too, and Mamba-2 has one group."""
OF_TWO = (
    *("one", "dp2", "fsdp2", "tp2", "ep2", "ep2 fsdp2", "tp2 sp", "cp2", "cp2 p2p", "cp2 a2a", "pp2", "etp2"),
    "tp2 etp1 ep2",
)
OF_FOUR = (
    *("fsdp4", "fsdp4 kept over 2", "hsdp 2x2", "tp2 dp2", "tp2 fsdp2", "tp2 ep2", "ep2 fsdp4", "ep2 hsdp 2x2"),
    *("cp2 fsdp2", "cp4 p2p", "cp4 a2a", "cp2 p2p fsdp2", "pp2 cp2 a2a", "tp4", "tp4 sp", "cp2 ep2", "cp2 tp2 sp"),
    *("tp2 ep2 fsdp2", "pp2 fsdp2", "pp2 dp2", "pp2 tp2", "pp2 cp2", "pp2 tp2 sp", "pp2 tp2 sp ZBVZeroBubble"),
    *("pp2 cp2 Interleaved1F1B", "pp2 ep2", "ep2 etp2", "etp2 fsdp4", "tp2 sp etp1 ep2 fsdp2", "pp2 etp2", "cp2 etp2"),
)
LAYOUTS = {name: parallel(name) for name in (*OF_TWO, *OF_FOUR)} | {
    "fsdp4": {"data_parallel_shard_size": -1},
    "fsdp4 kept over 2": {"data_parallel_shard_size": 4, "reshard_after_forward": 2},
    "hsdp 2x2": {"data_parallel_replicate_size": 2, "data_parallel_shard_size": 2},
    "ep2 hsdp 2x2": {"expert_model_parallel_size": 2, "data_parallel_shard_size": 2},
}
"""Layout -> its sizes, those of two ranks first."""
SCHEDULES = {
    f"pp2 {schedule}": parallel(f"pp2 {schedule}")
    for schedule in ("GPipe", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")
}
"""Layouts of two pipeline stages under other schedules than 1F1B; most of them have two stages a rank."""
ZERO = ("zero", "pp2 ZBVZeroBubble zero", "pp2 ep2 ZBVZeroBubble zero", "pp2 cp2 DualPipeV zero", "zero4")
OPTIONS = {
    name: parallel(name) | options
    for name, options in {
        "fsdp2 offloaded": {"cpu_offload": True},
        "pp2 split": {"pipeline_split": (3, 1)},
        "pp2 ZBVZeroBubble balanced": {"pipeline_balance": True},
        "ep2 beside": {"moe_shared_expert_overlap": True},
        **{name: {"use_distributed_optimizer": True} for name in ZERO},
        "ep2 quantized": {"expert_dispatch": "all_to_all_quantized"},
    }.items()
}
"""Layouts with options that do not go with every model, recipe and optimizer."""


def data_ranks(layout: str) -> int:
    """How many ranks have data of their own."""
    sizes = (LAYOUTS | SCHEDULES | OPTIONS)[layout]
    return ranks_of(layout) // math.prod(sizes.get(SIZES[kind], 1) for kind in ("tp", "cp", "pp"))


def ranks_of(layout: str) -> int:
    """How many ranks a layout is made for."""
    of_four = (*OF_FOUR, "pp2 ZBVZeroBubble zero", "pp2 ep2 ZBVZeroBubble zero", "pp2 cp2 DualPipeV zero", "zero4")
    return 1 if layout == "one" else 4 if layout in of_four else 2


PRECISIONS: dict[str, dict[str, Any]] = {
    "fp32": {"dtype": "fp32"},
    "bf16": {"dtype": "bf16"},
    "bf16-mixed": {"dtype": "bf16-mixed"},
    "mxfp8": {"dtype": "bf16", "recipe": "mxfp8"},
    "delayed": {"dtype": "bf16", "recipe": "delayed"},
    "cached mxfp8": {"dtype": "bf16", "recipe": "mxfp8", "cache_weights": True},
    "cached delayed": {"dtype": "bf16", "recipe": "delayed", "cache_weights": True},
    "nvfp4": {"dtype": "bf16", "recipe": "nvfp4"},
    "stored mxfp8": {"dtype": "bf16", "recipe": "mxfp8", "quantized_weights": True},
    "stored current": {"dtype": "bf16", "recipe": "current", "quantized_weights": True},
}
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "muon": {
        "precision.dtype": "fp32",
        "optimizer.kind": "muon",
        "optimizer.ema_decay": "0.5",
        "optimizer.freeze": "embedding.*",
        "optimizer.freeze_experts": "decoder.layers.1.mlp.experts.*=0,3",
        "model.logits_z_loss_coeff": "0.1",
    },
    "documents": {
        "precision.dtype": "fp32",
        "data.reset_position_ids": True,  # tokens see other documents, or positions of each would change nothing
        "data.eod_mask_loss": True,
    },
    "packed": {"precision.dtype": "fp32", "data.pack_documents": True},
    "growing": {"precision.dtype": "fp32", "data.rampup_batch_size": (4, 4, 12)},
    "frozen": {"precision.dtype": "fp32", "optimizer.freeze": "embedding.*"},
    "frozen bf16": {"precision.dtype": "bf16", "optimizer.freeze": "embedding.*"},
    "bf16 moments": {"precision.dtype": "fp32", "optimizer.moment_dtype": "bfloat16"},
    "fp8 moments": {"precision.dtype": "fp32", "optimizer.moment_dtype": "float8"},
    "lora": {"precision.dtype": "fp32", "lora.rank": 4, "optimizer.lr": "1e-2"},
    "dora": {"precision.dtype": "fp32", "lora.rank": 4, "lora.use_dora": True, "optimizer.lr": "1e-2"},
    "lora over stored mxfp8": {
        "precision.dtype": "bf16",
        "precision.recipe": "mxfp8",
        "precision.quantized_weights": True,
        "lora.rank": 4,
        # at 1e-2, GEMMs in another dtype alone change gradient norms by 16 % in three steps; at this by 0.2 %
        "optimizer.lr": "1e-3",
    },
}
"""What else a case's `precision` can be: another optimizer, in float32, with averages, frozen parameters and a z-loss;
adapters in place of the weights."""
OPTIMIZERS["dora over stored mxfp8"] = OPTIMIZERS["lora over stored mxfp8"] | {"lora.use_dora": True}
SPREAD = dict.fromkeys(("fp32", "documents", "packed", "growing", "frozen"), (1e-5, 1e-5))
SPREAD |= dict.fromkeys(("muon", "lora", "dora"), (1e-5, 1e-4))
SPREAD |= dict.fromkeys(("delayed", "cached delayed"), (3e-3, 3e-2))
SPREAD |= dict.fromkeys(("bf16 moments", "fp8 moments"), (2e-4, 2e-3))
"""Relative distances of losses and of gradient norms; (1e-3, 5e-3) where it is not said. A sum of float32 numbers in
another order differs by 1e-7, of which Muon's steps in bfloat16 make more, one of bf16 numbers or their FP8 by what a
step of rounding moves; the scales of delayed scaling follow the largest amax of all ranks, once a step, where one rank
has four updates: gradient norms of ten steps differ by up to 2.2 %, by 0.8 % of one rank's with GEMMs in another
dtype."""


@dataclass(frozen=True)
class Case:
    """A run: model, number formats, layout. start: the run whose checkpoint of step 2 it continues from."""

    kind: str
    precision: str
    layout: str
    start: str | None = None

    @property
    def name(self) -> str:
        """The name of its folder."""
        after = f" after {self.start}" if self.start else ""
        return f"{self.kind} {self.precision} {self.layout}{after}".replace(" ", "_")

    def reference(self) -> Case:
        """The same on one rank."""
        return Case(self.kind, self.precision, "one")

    def before(self) -> list[Case]:
        """The run that it continues, if it continues one."""
        return [] if self.start is None else [Case(self.kind, self.precision, self.start)]


LR = 1e-3


class Runs:
    """Runs of one folder, from one TOML file for each model."""

    def __init__(self, folder: Path, steps: int) -> None:
        self.folder, self.steps = folder, steps

    def output_dir(self, case: Case) -> Path:
        """Return the folder of a run."""
        return self.folder / case.name

    def arguments(self, case: Case) -> list[str]:
        """Return the arguments of `te-models train`: the TOML file, and the layout as options."""
        file = self.folder / f"{case.kind}.toml"
        if not file.exists():
            config = tiny_run(
                self.folder,
                "run",
                model=training.ModelSource(
                    config=MODELS[case.kind], logits_z_loss_coeff=0.1 if case.kind == "tied" else 0.0
                ),
                steps=self.steps,
                optimizer=training.OptimizerConfig(lr=LR, clip_grad_norm=0.5),
                precision=training.PrecisionConfig(),
                evaluation=training.EvaluationConfig(every=2, batches=3),  # which no number of ranks divides
                checkpoint=training.CheckpointConfig(every=2, keep_last=0),
            )
            file.write_text(as_toml(config))
        share = str(MICRO_BATCHES // data_ranks(case.layout))
        options = {f"parallel.{name}": size for name, size in (LAYOUTS | SCHEDULES | OPTIONS)[case.layout].items()}
        options |= {"data.gradient_accumulation": share}
        options |= {f"precision.{name}": value for name, value in PRECISIONS.get(case.precision, {}).items()}
        options |= OPTIMIZERS.get(case.precision, {})
        if case.precision in ("documents", "packed"):
            options |= {"data.path": str(self.folder / "short"), "data.text": str(self._short_documents())}
        words = [str(file), "--output-dir", str(self.output_dir(case))]
        for name, value in options.items():
            option = f"--{name.replace('_', '-')}"
            values = value if isinstance(value, tuple) else () if value is True else (value,)
            words += [option, *map(str, values)]
        return words

    def _short_documents(self) -> Path:
        """Return a file of documents of which a window has several."""
        file = self.folder / "short.jsonl"
        if not file.exists():
            texts = ["to be or not to be, that is the question"[: 3 + 7 * i % 23] for i in range(4000)]
            file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        return file

    def on_one_rank(self, cases: Sequence[Case]) -> None:
        """Run cases in this process."""
        for case in cases:
            assert main(["train", *self.arguments(case)]) == 0

    def on_ranks(self, cases: Sequence[Case], ranks: int, timeout: float = 300) -> None:
        """Run cases on so many ranks, one after the other. timeout: seconds, of all."""
        runs = []
        for case in cases:
            start = None
            if case.start is not None:
                before = Case(case.kind, case.precision, case.start)
                start = str(self.output_dir(before) / "checkpoints" / "step-00000002")
            output_dir = str(self.output_dir(case))
            runs.append({"arguments": self.arguments(case), "output_dir": output_dir, "start": start})
        file = self.folder / f"runs-{ranks}.json"
        file.write_text(json.dumps(runs))
        run_on_ranks(["-m", "tests.training.ranks.several_runs", str(file)], ranks=ranks, timeout=timeout)

    def curve(self, case: Case) -> list[dict[str, Any]]:
        """Return the metrics of a run."""
        return training.read_metrics(self.output_dir(case) / "metrics.jsonl")

    def differences(self, case: Case) -> list[str]:
        """Return where a run is further from that of one rank than the order of sums explains, a line each."""
        loss, norm = SPREAD.get(case.precision, (1e-3, 5e-3))
        validation = 2e-7 if case.precision in ("fp32", "documents", "packed") else loss
        limits = {
            "loss": loss,
            "validation_loss": validation,
            "mtp_loss": loss,
            "logits_z_loss": loss,
            "grad_norm": norm,
        }
        found, expected = self.curve(case), self.curve(case.reference())
        expected = expected[len(expected) - len(found) :]
        problems = [] if found and found[-1]["step"] == self.steps else [f"{case.name} has {len(found)} steps"]
        for row, right in zip(found, expected, strict=True):
            if (row["step"], row["tokens"], row["lr"]) != (right["step"], right["tokens"], right["lr"]):
                problems.append(f"{case.name}: step {row['step']} is of other tokens")
            for name in limits.keys() & right.keys():
                distance = abs(row[name] - right[name]) / abs(right[name])
                if not distance <= limits[name]:
                    problems.append(f"{case.name}: step {row['step']} {name} {row[name]} and {right[name]}")
        return problems
