"""A run multiplies in one dtype on all its CPUs: chosen where it begins, recorded, and kept where it continues."""

import json
from pathlib import Path

import pytest

from te_models.kernels.gemm import cpu_gemm
from te_models.training import PrecisionConfig, ScheduleConfig, TrainConfig, train
from te_models.training.precision import cpu_gemm_of_run
from te_models.training.ranks.data_parallel import Ranks
from tests.training.runs import assert_same_bits, tensors_under, tiny_run


def recorded(run: TrainConfig) -> str:
    newest = max(Path(run.output_dir).glob("checkpoints/step-*"))
    return json.loads((newest / "training.json").read_text())["config"]["precision"]["cpu_gemm"]


@pytest.mark.sentinels("float32")
@pytest.mark.parametrize("backend", ["bf16", "float32"])
def test_runs_continue_with_the_gemm_they_began_with(
    backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also on a machine that would choose the other one, and then the result is the uninterrupted run's bit for bit."""
    machine = {"is": backend}
    monkeypatch.setattr("te_models.training.precision.automatic_choice", lambda: (machine["is"], "the test says so"))
    precision, constant = PrecisionConfig(dtype="bf16", recipe="current"), ScheduleConfig(kind="constant")
    whole = tiny_run(tmp_path, "whole", steps=3, precision=precision, schedule=constant)
    parts = tiny_run(tmp_path, "parts", steps=2, precision=precision, schedule=constant)
    before = cpu_gemm()
    train(whole)
    train(parts)
    assert recorded(parts) == backend
    machine["is"] = "float32" if backend == "bf16" else "bf16"
    train(parts.replace(steps=3))
    assert recorded(parts) == backend
    assert_same_bits(*(tensors_under(Path(run.output_dir) / "final") for run in (whole, parts)))
    assert cpu_gemm() == before, "the process has its own setting again"


def test_a_gemm_that_is_named_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("te_models.training.precision.automatic_choice", lambda: ("float32", "the test says so"))
    run = tiny_run(tmp_path, precision=PrecisionConfig(dtype="bf16", cpu_gemm="bf16"))
    with cpu_gemm_of_run(run, None, Ranks(), "cpu") as used:
        assert used == run and cpu_gemm() == "bf16"
    with cpu_gemm_of_run(run.replace(precision=PrecisionConfig()), None, Ranks(), "cuda") as used:
        assert used.precision.cpu_gemm == "auto", "no CPU multiplies"


def test_the_two_differ_by_rounding_alone(tmp_path: Path) -> None:
    finals = []
    for backend in ("bf16", "float32"):
        run = tiny_run(tmp_path, backend, steps=2, precision=PrecisionConfig(dtype="bf16", cpu_gemm=backend))
        train(run)
        finals.append(tensors_under(Path(run.output_dir) / "final"))
    assert finals[0].keys() == finals[1].keys()
    for name, tensor in finals[0].items():
        assert (tensor.float() - finals[1][name].float()).abs().max() <= 0.02 + 0.02 * tensor.float().abs().max(), name
    with pytest.raises(AssertionError):
        assert_same_bits(*finals)
