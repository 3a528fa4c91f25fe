"""async_tensor_parallel: torch finds the gathers and scatters of our graphs and fuses them with matrix products, which
changes no number; where it does not, the user hears of it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from te_models import GPTModel, compile_model
from te_models.compile import async_tensor_parallel
from te_models.layers import Linear
from te_models.training import PrecisionConfig
from te_models.training.config import ParallelConfig
from te_models.training.step import make_loss_function, make_pipeline
from tests.covering import selected
from tests.ranks import outcomes_on_ranks
from tests.te_models.configs import one_layer, tiny
from tests.training.runs import tiny_run

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch is built without distributed")

if torch.distributed.is_available():
    from tests.te_models.compile.async_tensor_parallel_ranks import CASES
else:
    CASES = {"none": None}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> list[dict[str, str]]:
    """What every case came to, on either rank."""
    module = "tests.te_models.compile.async_tensor_parallel_ranks"
    results = tmp_path_factory.mktemp("async") / "results"
    return outcomes_on_ranks(module, results, only=selected(request, "case"), timeout=900)


@pytest.mark.sentinels("refusals", "groups_are_enabled")
@pytest.mark.costs(30)
@pytest.mark.parametrize("case", CASES)
def test_two_ranks(case: str, outcomes: list[dict[str, str]]) -> None:
    assert [outcome[case] for outcome in outcomes] == ["ok", "ok"]


@pytest.mark.parametrize("model", [Linear(4, 4), GPTModel(one_layer(tiny()))])
def test_a_model_on_one_rank_is_refused(model: torch.nn.Module) -> None:
    with pytest.raises(ValueError, match="allowed for a model without sequence_parallel layers: False"):
        compile_model(model, dynamic=False, async_tensor_parallel=True)


@pytest.mark.parametrize("dynamic", [None, True])
def test_sizes_that_change_are_refused(dynamic: bool | None) -> None:
    with pytest.raises(ValueError, match=f"async_tensor_parallel is True and dynamic {dynamic}; allowed: dynamic=F"):
        compile_model(Linear(4, 4), dynamic=dynamic, async_tensor_parallel=True)


def test_another_backend_is_refused() -> None:
    with pytest.raises(ValueError, match="backend 'eager'; allowed: backend='inductor'"):
        compile_model(Linear(4, 4), dynamic=False, backend="eager", async_tensor_parallel=True)


@pytest.mark.parametrize("mode", ["whole", "block"])
def test_training_passes_it_on(mode: str) -> None:
    """Or it would train without a word; how it trains is said by the cases above."""
    with pytest.raises(ValueError, match="async_tensor_parallel is True"):
        make_loss_function(
            GPTModel(one_layer(tiny())), PrecisionConfig(), "cpu", compiled=True, mode=mode, async_tensor_parallel=True
        )


def test_pipeline_stages_pass_it_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class StoppedError(Exception):
        """Ends the test before there is a pipeline."""

    def compiled(model: object, mode: str, *, dynamic: bool, async_tensor_parallel: bool) -> None:
        raise StoppedError(async_tensor_parallel)

    monkeypatch.setattr("te_models.training.step.compile_model", compiled)
    split: dict[str, Any] = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
    layout: Any = SimpleNamespace(stages=object(), mesh=SimpleNamespace(stages=object(), same_layers=None))
    for overlapping in (False, True):
        parallel = ParallelConfig(**split, pipeline_model_parallel_size=2, async_tensor_parallel=overlapping)
        config = tiny_run(tmp_path, compile=True, compile_mode="block", parallel=parallel)
        with pytest.raises(StoppedError, match=str(overlapping)):
            make_pipeline(GPTModel(one_layer(tiny())), config, "cpu", layout)


def test_equal_layers_share_a_backend() -> None:
    """Otherwise torch compiled every layer of a model again."""
    first, second = (async_tensor_parallel.overlapping_backend_for(Linear(4, 4)) for _ in range(2))
    assert first is second


def test_what_is_quantized_warns_though_something_overlaps(monkeypatch: pytest.MonkeyPatch) -> None:
    """On an accelerator the GEMMs of a recipe are an operation of ours, which torch's pass does not know."""
    import torch.distributed._symmetric_memory as symmetric_memory
    from torch._dynamo.utils import counters

    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    gathered = graph.call_function(torch.ops._c10d_functional.all_gather_into_tensor.default, (x, 2, "0"))
    graph.output(graph.call_function(torch.ops.te_models.scaled_gemm.default, (gathered,)))
    counters.clear()
    with symmetric_memory._test_mode():
        async_tensor_parallel.overlap(graph)
    names = (async_tensor_parallel.OVERLAPPED, async_tensor_parallel.ALONE, async_tensor_parallel.QUANTIZED)
    assert [counters["inductor"][name] for name in names] == [0, 1, 1]
    monkeypatch.setattr(async_tensor_parallel, "_warned", set())
    with pytest.warns(UserWarning, match="5 of the 7 gathers .* those of layers under a recipe do not"):
        async_tensor_parallel.warn_of_what_waits(5, 2, 1)
    async_tensor_parallel.warn_of_what_waits(5, 2, 1)  # once
    async_tensor_parallel.warn_of_what_waits(5, 2, 0)
    async_tensor_parallel.warn_of_what_waits(0, 0, 3)
