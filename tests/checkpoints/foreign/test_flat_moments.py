"""Moments that Megatron's distributed optimizer flattened: real files of Megatron-Core's, and small ones as it lays
them out, where it is not installed."""

import argparse
import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from te_models import GPTModel
from te_models.checkpoints import CheckpointError
from te_models.checkpoints.foreign.dcp import DCPStore
from te_models.checkpoints.foreign.flat_moments import MODULES, sort_key
from te_models.checkpoints.foreign.known import SYSTEMS
from te_models.checkpoints.foreign.ranks import ParallelSizes, RankFiles, RankPlace
from te_models.checkpoints.foreign.system import MOMENTS
from te_models.checkpoints.io.boxes import Range, full
from te_models.checkpoints.io.store import MemoryStore
from te_models.checkpoints.mapping.plan import make_plan
from te_models.checkpoints.mapping.stream import carry_out, read_rows
from te_models.checkpoints.mapping.tensor_map import identity_namespace
from te_models.checkpoints.tools.foreign import open_states
from te_models.cli.main import main
from te_models.config import ModelConfig
from te_models.training import CheckpointConfig, OptimizerConfig, PrecisionConfig, ScheduleConfig, train
from te_models.training.checkpoints.checkpoint import load_state
from te_models.training.exchange import import_run
from tests.checkpoints.foreign.megatron_training import BEFORE, LR
from tests.ranks import run_on_ranks
from tests.training.processes import as_toml
from tests.training.runs import curve, tiny_model, tiny_run

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
with_megatron = pytest.mark.skipif(
    importlib.util.find_spec("megatron") is None or importlib.util.find_spec("megatron.core") is None,
    reason="megatron-core is not installed",
)
STEPS = BEFORE + 5
SMALL = tiny_model(hidden=16).replace(vocab_size=64)


def states_of(folder: Path, config: ModelConfig) -> dict[str, torch.Tensor]:
    """Weights and moments as our parameters; a weight's state is "None"."""
    found = {}
    with DCPStore(folder) as store:
        for state, tensors, namespace in open_states(store, config, None)[1]:
            ours = identity_namespace(namespace.canonical)
            for output in make_plan(tensors.tensors, namespace, ours, where="it").outputs:
                rows = output.shape[0]
                found[f"{output.name}:{state}"] = read_rows(tensors, output, 0, rows)
    return found


@with_megatron
@pytest.mark.parametrize("tp", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_megatron_s_vectors_are_its_tensors(tp: int, tmp_path: Path) -> None:
    """It wrote the same state in both ways."""
    ids = torch.randint(0, 250, (BEFORE + 1, 1, 2, 16), generator=torch.Generator().manual_seed(0))
    torch.save({"ids": ids, "vocabulary": 258}, tmp_path / "batches.pt")
    words = ["-m", "tests.checkpoints.foreign.megatron_training", str(tmp_path), str(tp)]
    run_on_ranks(words, ranks=tp, timeout=200, fresh=True)
    config = tiny_model()
    flat, whole = (states_of(tmp_path / kind, config) for kind in ("dp_reshardable", "fully_reshardable"))
    assert flat.keys() == whole.keys() and len(flat) == 3 * len(dict(GPTModel(config).named_parameters()))
    for name, value in whole.items():
        assert torch.equal(flat[name], value), name


@with_megatron
@pytest.mark.parametrize("kind", ["dp_reshardable", pytest.param("fully_reshardable", marks=pytest.mark.slow)])
def test_a_run_of_megatron_s_goes_on(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Five steps after the checkpoint, on the same windows, with the losses of Megatron's own."""
    options: dict[str, Any] = {"lr": LR, "clip_grad_norm": 1e9, "weight_decay": 0.0, "betas": (0.9, 0.95)}
    config = tiny_run(
        tmp_path,
        "windows",
        steps=STEPS,
        precision=PrecisionConfig(dtype="fp32"),
        optimizer=OptimizerConfig(**options, eps=1e-8),
        schedule=ScheduleConfig(kind="constant"),
        checkpoint=CheckpointConfig(every=1, keep_last=0),
    )
    windows: list[torch.Tensor] = []
    forward = GPTModel.forward

    def noting(self: GPTModel, input_ids: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled():  # not of an evaluation
            windows.append(input_ids.clone())
        return forward(self, input_ids, *args, **kwargs)

    with monkeypatch.context() as patched:
        patched.setattr(GPTModel, "forward", noting)
        train(config)
    ids = torch.stack(windows).view(STEPS, -1, *windows[0].shape)
    torch.save({"ids": ids, "vocabulary": 257}, tmp_path / "batches.pt")
    words = ["-m", "tests.checkpoints.foreign.megatron_training", str(tmp_path), "1"]
    run_on_ranks(words, ranks=1, timeout=200, fresh=True)
    (tmp_path / "config.json").write_text(tiny_model().to_json())
    again = config.replace(output_dir=str(tmp_path / "again"))
    (tmp_path / "run.toml").write_text(as_toml(again))
    out = ["--config", str(tmp_path / "config.json"), "--run", str(tmp_path / "run.toml")]
    assert main(["import", str(tmp_path / kind), again.output_dir, *out]) == 0
    assert load_state(tmp_path / "again/checkpoints" / f"step-{BEFORE:08d}").step == BEFORE
    train(again)
    expected = torch.load(tmp_path / "losses.pt", weights_only=True)[BEFORE:]
    found = torch.tensor([row[1] for row in curve(again)])
    assert len(found) == 5 and (found - expected).abs().max() < 1e-6 * expected.abs().max()


def written_as_vectors(folder: Path, *, tp: int, buckets: int, low: bool = False) -> dict[str, torch.Tensor]:
    """Write weights and moments as Megatron-Core's `dp_reshardable` lays them out; return the states by parameter."""
    torch.manual_seed(0)
    weights = {name: p.detach() for name, p in GPTModel(SMALL).named_parameters()}
    states = {"param": weights} | {s: {n: torch.rand_like(v) for n, v in weights.items()} for s in MOMENTS}
    ranks, modules = RankFiles(SMALL, ParallelSizes(tp=tp), SMALL.vocab_size), MODULES["Transformer Engine's"]
    ours = identity_namespace({name: tuple(v.shape) for name, v in weights.items()})

    def carried(values: dict[str, torch.Tensor], namespace: Any) -> dict[str, torch.Tensor]:
        memory = MemoryStore(values)
        return carry_out(make_plan(memory.tensors, ours, namespace, where="it"), memory)

    held = carried(weights, SYSTEMS["torch_dist"].namespace(SMALL))
    held = {name: v.bfloat16() if low else v for name, v in held.items()}
    for state, values in states.items():
        parts = carried(values, ranks.namespace())
        parts |= {copy: parts[its] for copy, its in ranks.copies(parts).items()}
        for rank in range(tp):
            at = str(RankPlace(rank, 0))
            own = [name.removeprefix(at) for name in parts if name.startswith(at)]
            own.sort(key=lambda name: sort_key(name, modules), reverse=True)
            for number in range(buckets):
                vector = torch.empty(0)
                for name in own[number * len(own) // buckets : (number + 1) * len(own) // buckets]:
                    vector = torch.cat([vector, torch.full((-len(vector) % 64,), 9.0), parts[at + name].flatten()])
                key = f"optimizer.distributed.dp_group_idx_{rank}.gbuf_idx_0.dtype_(x, y).bucket_idx_{number}"
                held[f"{key}.{state}"] = vector
    dcp.save(held, checkpoint_id=str(folder))
    args = argparse.Namespace(tensor_model_parallel_size=tp, pipeline_model_parallel_size=1)
    torch.save({"args": args, "iteration": 3}, folder / "common.pt")
    return {f"{name}:{None if s == 'param' else s}": v for s, values in states.items() for name, v in values.items()}


@pytest.mark.parametrize(("tp", "buckets", "low"), [(1, 1, False), (2, 3, True)])
def test_vectors_are_read_as_parameters(tp: int, buckets: int, low: bool, tmp_path: Path) -> None:
    """Weights in fewer bits are the optimizer's own, in float32."""
    states = written_as_vectors(tmp_path / "saved", tp=tp, buckets=buckets, low=low)
    found = states_of(tmp_path / "saved", SMALL)
    assert found.keys() == states.keys()
    for name, value in found.items():
        assert torch.equal(value, states[name]), name


def test_an_order_that_is_not_proven_is_refused(tmp_path: Path) -> None:
    written_as_vectors(tmp_path / "saved", tp=1, buckets=1)
    config = tiny_run(tmp_path, precision=PrecisionConfig(dtype="fp32"))
    (tmp_path / "config.json").write_text(SMALL.to_json())
    with DCPStore(tmp_path / "saved") as store:
        held = {name: torch.empty(info.shape) for name, info in store.tensors.items()}
    dcp.load(held, checkpoint_id=str(tmp_path / "saved"))
    next(value for name, value in held.items() if name.endswith(".param"))[5] += 1
    dcp.save(held, checkpoint_id=str(tmp_path / "changed"))
    (tmp_path / "saved" / "common.pt").rename(tmp_path / "changed" / "common.pt")
    with pytest.raises(CheckpointError, match="in an order of parameters that is not Megatron-Core's"):
        import_run(tmp_path / "changed", config, model=tmp_path / "config.json")
    torch.save({}, tmp_path / "changed" / "common.pt")
    with pytest.raises(CheckpointError, match=r"common\.pt does not say how many tensor and pipeline parallel ranks"):
        import_run(tmp_path / "changed", config, model=tmp_path / "config.json")


def test_flattened_parts_are_put_together(tmp_path: Path) -> None:
    """`fully_sharded_model_space`: [X, Y] that ranks split into parts [x, y] is [X / x, Y / y, x * y]."""
    weights = {name: p.detach() for name, p in GPTModel(SMALL).named_parameters()}
    stored = carry_out(
        make_plan(
            MemoryStore(weights).tensors,
            identity_namespace({name: tuple(v.shape) for name, v in weights.items()}),
            SYSTEMS["torch_dist"].namespace(SMALL),
            where="it",
        ),
        MemoryStore(weights),
    )
    held: dict[str, Any] = dict(stored)
    for state in MOMENTS:
        for number, (name, value) in enumerate(stored.items()):
            tiles = [2 if value.dim() > 1 and number % 2 == d else 1 for d in range(value.dim())]
            split = [size for n, c in zip(value.shape, tiles) for size in (c, n // c)]
            order = [*range(0, 2 * value.dim(), 2), *range(1, 2 * value.dim(), 2)]
            held[f"optimizer.state.{state}.{name}"] = value.reshape(split).permute(order).reshape(*tiles, -1)
    dcp.save(held, checkpoint_id=str(tmp_path / "saved"))
    torch.save({}, tmp_path / "saved" / "common.pt")
    found = states_of(tmp_path / "saved", SMALL)
    for name, value in found.items():
        assert torch.equal(value, weights[name.rpartition(":")[0]]), name
    with DCPStore(tmp_path / "saved") as store:
        _, tensors, _ = open_states(store, SMALL, None)[1][1]
        for name, value in stored.items():
            box = (*full(value.shape)[:-1], Range(1, value.shape[-1] + 1, 2))
            assert torch.equal(tensors.read(f"optimizer.state.exp_avg.{name}", box), value[..., 1::2]), name
