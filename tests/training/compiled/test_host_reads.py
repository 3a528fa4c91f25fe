"""On an accelerator a step is queued whole before the host reads anything of it, and then it reads once."""

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from te_models.layers import QuantizedTensor
from te_models.training import OptimizerConfig, PrecisionConfig
from te_models.training.build import build_model, build_optimizer
from te_models.training.data.windows import Batch
from te_models.training.optimizer import adamw
from te_models.training.ranks.data_parallel import Ranks
from te_models.training.step import StepResult, TrainingError, make_loss_function, train_step
from tests.training.runs import tiny_run

READS = ("item", "tolist", "cpu", "numpy", "__bool__", "__float__", "__int__", "__index__", "equal", "nonzero")
"""What torch's sync debug mode warns of on CUDA."""
CASES: dict[str, dict[str, Any]] = {
    "fp32": {"precision": PrecisionConfig(dtype="fp32")},
    "mxfp8": {"precision": PrecisionConfig(dtype="bf16", recipe="mxfp8")},
    "delayed": {"precision": PrecisionConfig(dtype="bf16", recipe="delayed")},
    "spikes": {"optimizer": OptimizerConfig(skip_grad_norm_spike=2.0, skip_nonfinite=True, ema_decay=0.9)},
    "muon": {"optimizer": OptimizerConfig(kind="muon", clip_grad_norm=1e-3)},
}


class Reads(TorchFunctionMode):
    """Notes which functions that read a tensor's values on the host are called."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in READS:
            self.found.append(name)
        return func(*args, **(kwargs or {}))


def as_on_an_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let reads cost what they cost where the host is not the device."""
    monkeypatch.setattr("te_models.training.step.reads_are_free", lambda device: False)
    monkeypatch.setattr(adamw, "reads_are_free", lambda device: False)


def steps(tmp_path: Path, changes: dict[str, Any], reads: Reads | None = None) -> tuple[list[StepResult], list[Any]]:
    """Two steps of three micro-batches, of which one has padding; what they return, and the parameters then."""
    config = tiny_run(tmp_path, **changes)
    model = build_model(config, "cpu", None)
    optimizer = build_optimizer(config, model)
    function = make_loss_function(model.train(), config.precision, "cpu", compiled=False)
    ids = torch.randint(257, (6, 32), generator=torch.Generator().manual_seed(0))
    labels = ids.clone()
    labels[:, 20:] = -100
    batches = [Batch(ids[:2], labels[:2]), Batch(ids[2:4]), Batch(ids[4:])]
    results = []
    for step in (1, 2):
        with reads or contextlib.nullcontext():
            results.append(train_step(function, optimizer, batches, 1e-3, step=step, ranks=Ranks()))
    weights = [p.detach() for p in model.parameters()]
    return results, [w.dequantize() if isinstance(w, QuantizedTensor) else w for w in weights]


@pytest.mark.parametrize("case", CASES)
def test_a_step_is_read_once(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, definitions: None) -> None:
    """And gives the bits of one that reads as it goes."""
    expected, weights = steps(tmp_path, CASES[case])
    as_on_an_accelerator(monkeypatch)
    reads = Reads()
    results, found = steps(tmp_path, CASES[case], reads)
    assert reads.found == ["tolist"] * len(results) and results == expected
    assert all(torch.equal(a, b) for a, b in zip(found, weights, strict=True))


@pytest.mark.parametrize("skips", [False, True])
def test_what_is_not_finite_changes_nothing(skips: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Although the update is queued before anybody knows: parameters, moments and step counts are what they were."""
    as_on_an_accelerator(monkeypatch)
    config = tiny_run(tmp_path, optimizer=OptimizerConfig(skip_nonfinite=skips))
    model = build_model(config, "cpu", None)
    optimizer = build_optimizer(config, model)
    function = make_loss_function(model.train(), config.precision, "cpu", compiled=False)
    ids = torch.randint(257, (2, 32), generator=torch.Generator().manual_seed(0))
    train_step(function, optimizer, [ids], 1e-3, step=1, ranks=Ranks())
    state = {name: t.clone() for name, t in optimizer.state_tensors().items()}
    state |= {name: p.detach().clone() for name, p in model.named_parameters()}
    model.decoder.final_layernorm.weight.register_hook(lambda gradient: gradient * float("inf"))
    if skips:
        assert train_step(function, optimizer, [ids], 1e-3, step=2, ranks=Ranks()).skipped
    else:
        with pytest.raises(TrainingError, match=r"step 2: .* gradient norm inf|step 2: .* gradient norm nan"):
            train_step(function, optimizer, [ids], 1e-3, step=2, ranks=Ranks())
    after = optimizer.state_tensors() | {name: p.detach() for name, p in model.named_parameters()}
    assert all(torch.equal(after[name], before) for name, before in state.items())
