"""async_tensor_parallel: torch finds the gathers and scatters of our graphs and fuses them with matrix products, which
changes no number; where it does not, the user hears of it."""

import contextlib
import functools
import os
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric_memory
from torch import Tensor, nn
from torch._dynamo.utils import counters

from te_models import GPTModel, compile_model
from te_models.compile import async_tensor_parallel
from te_models.compile.async_tensor_parallel import ALONE, OVERLAPPED, share_memory_of_ranks
from te_models.kernels.gemm import using_cpu_gemm
from te_models.layers import Linear, TransformerLayer
from te_models.training import PrecisionConfig, train
from te_models.training.config import ParallelConfig
from te_models.training.step import make_loss_function, make_pipeline
from tests.build import one_layer, tiny, tiny_moe, token_ids
from tests.ranks import on_ranks
from tests.training.runs import curve, tiny_run

HIDDEN, FFN = 64, 128
SHAPES = {"rows": (16, HIDDEN), "batch": (8, 2, HIDDEN)}
"""Of a rank's part of the input of a layer."""
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


@contextlib.contextmanager
def with_cpus_that_share_memory() -> Iterator[None]:
    """Let torch and the library take CPUs for devices with memory that ranks share."""
    with (
        torch.library._scoped_library("symm_mem", "IMPL") as library,
        mock.patch.object(async_tensor_parallel, "DEVICES", ("cpu",)),
        mock.patch.object(dist, "is_nccl_available", lambda: True),
        symmetric_memory._test_mode(),
        using_cpu_gemm("bf16"),
    ):
        for name in ("fused_all_gather_matmul", "fused_matmul_reduce_scatter"):
            library.impl(name, getattr(symmetric_memory, f"_{name}_fallback"), "CPU")
        yield


on_two_ranks = on_ranks(2, timeout=900, within=with_cpus_that_share_memory)


def split() -> dict[str, Any]:
    return {"tp_group": dist.group.WORLD, "sequence_parallel": True}


def pair(dtype: torch.dtype) -> nn.Module:
    first = Linear(HIDDEN, FFN, parallel_mode="column", params_dtype=dtype, **split())
    second = Linear(FFN, HIDDEN, parallel_mode="row", params_dtype=dtype, **split())
    return nn.Sequential(first, nn.GELU(), second)


def layer(dtype: torch.dtype) -> nn.Module:
    without = {"hidden_dropout": 0.0, "attention_dropout": 0.0, "fuse_qkv_params": True}
    return TransformerLayer(HIDDEN, FFN, 4, set_parallel_mode=True, params_dtype=dtype, **without, **split())


def outcome(
    make: Callable[[], nn.Module], call: Callable[[nn.Module], Tensor], compiled: Callable[[nn.Module, bool], Any]
) -> tuple[list[Tensor], list[Tensor], tuple[int, int]]:
    """Return outputs and gradients of the plain and the overlapping compilation, and how many gathers and scatters
    overlap in the latter, and do not. The plain one has none that do."""
    both = []
    for overlapping in (False, True):
        torch._dynamo.reset()
        counters.clear()
        torch.manual_seed(0)
        model = make()
        for parameter in model.parameters():  # biases are zero at first
            if parameter.dim() == 1:
                nn.init.normal_(parameter)
        compiled(model, overlapping)
        y = call(model)
        y.float().square().mean().backward()
        both.append([y.detach(), *(p.grad for p in model.parameters())])
        found = counters["inductor"]
        assert overlapping or not (found[OVERLAPPED] or found[ALONE])
    return both[0], both[1], (found[OVERLAPPED], found[ALONE])


def check(plain: list[Tensor], overlapping: list[Tensor], dtype: torch.dtype) -> None:
    """Assert the same bits, and in 16 bits the same up to a product that is rounded before the bias is added."""
    for one, other in zip(plain, overlapping, strict=True):
        bound = 0.0 if dtype == torch.float32 else 2 * torch.finfo(dtype).eps * one.abs().max().item()
        torch.testing.assert_close(other, one, rtol=0, atol=bound)


@on_two_ranks
@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "kind", "shape", "pairs"),
    [*((pair, kind, shape, 1) for kind in DTYPES for shape in SHAPES), *((layer, kind, "batch", 2) for kind in DTYPES)],
)
def test_the_gathers_and_scatters_of_layers_overlap(
    make: Callable[[torch.dtype], nn.Module], kind: str, shape: str, pairs: int
) -> None:
    """Each pair of layers gathers and scatters once forward and once backward, and all of that overlaps."""
    dtype = DTYPES[kind]
    torch.manual_seed(dist.get_rank())
    x = torch.randn(SHAPES[shape], dtype=dtype)
    plain, overlapping, counts = outcome(
        lambda: make(dtype),
        lambda model: model(x.clone().requires_grad_()),
        lambda model, on: compile_model(model, dynamic=False, async_tensor_parallel=on),
    )
    check(plain, overlapping, dtype)
    assert counts == (4 * pairs, 0), counts


@on_two_ranks
@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "mode", "least"), [(tiny(), "whole", 17), (tiny(), "block", 9), (one_layer(tiny_moe()), "whole", 5)]
)
def test_the_gathers_and_scatters_of_a_model_overlap(config: Any, mode: str, least: int) -> None:
    """In every layer all overlaps but what a mixture gathers for its router; the embedding and the loss do not."""
    ids = token_ids(2, 16)
    plain, overlapping, (overlapped, _) = outcome(
        lambda: GPTModel(config, dtype=torch.bfloat16, **split()),
        lambda model: model(ids, labels=ids, return_logits=False).loss,
        lambda model, on: compile_model(model, mode, dynamic=False, async_tensor_parallel=on),
    )
    check(plain, overlapping, torch.bfloat16)
    assert overlapped >= least, overlapped


@on_two_ranks
@pytest.mark.slow
@pytest.mark.parametrize("mode", ["whole", "block"])
def test_a_runs_loss_function_passes_the_option_on(mode: str) -> None:
    """A run's loss function passes the option on."""
    ids, functions = token_ids(2, 16), {}

    def compiled(model: nn.Module, overlapping: bool) -> None:
        functions[model] = make_loss_function(
            model, PrecisionConfig(), "cpu", compiled=True, mode=mode, async_tensor_parallel=overlapping
        )

    plain, overlapping, (overlapped, _) = outcome(
        lambda: GPTModel(one_layer(tiny()), dtype=torch.bfloat16, **split()),
        lambda model: functions[model](ids)[0],
        compiled,
    )
    check(plain, overlapping, torch.bfloat16)
    assert overlapped == 9, overlapped  # two pairs, and the gather of the output layer


@on_two_ranks
@pytest.mark.slow
def test_a_run_is_the_same_step_by_step(tmp_path: Path) -> None:
    """A run from its configuration, step by step the same."""
    curves = []
    for overlapping in (False, True):
        torch._dynamo.reset()
        counters.clear()
        parallel = ParallelConfig(
            tensor_model_parallel_size=2, sequence_parallel=True, async_tensor_parallel=overlapping
        )
        config = tiny_run(tmp_path, f"run-{overlapping}", steps=2, compile=True, parallel=parallel)
        train(config)
        dist.barrier()
        # of two layers and the output layer, 17 in training and 9 where the validation loss is measured
        assert counters["inductor"][OVERLAPPED] == (26 if overlapping else 0), counters["inductor"]
        curves.append(curve(config))
    assert len(curves[0]) == 2 and curves[0] == curves[1], curves


@on_two_ranks
@pytest.mark.slow
def test_nothing_overlaps_with_a_warning() -> None:
    """A warning and no error where torch's pass knows no product: here, of an operation that it cannot look into."""
    with using_cpu_gemm("float32"), warnings.catch_warnings(record=True) as raised:
        warnings.simplefilter("always")
        compile_model(model := pair(torch.bfloat16), dynamic=False, async_tensor_parallel=True)
        y = model(torch.zeros(SHAPES["rows"], dtype=torch.bfloat16, requires_grad=True))
        messages = [str(warning.message) for warning in raised if "async" in str(warning.message)]
        y.sum().backward()
    assert (counters["inductor"][OVERLAPPED], counters["inductor"][ALONE]) == (0, 4), counters["inductor"]
    count = "0 of the 2 gathers and scatters of a graph overlap with a matrix product"
    assert messages == [f"async_tensor_parallel: {count}"], messages


@on_two_ranks
@pytest.mark.slow
def test_what_torch_kept_on_disk_is_not_mistaken() -> None:
    """What torch kept of a plain compilation is not taken for an overlapping one, nor the other way round; what it kept
    of an overlapping one is counted as if it were compiled."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
        for overlapping, hits in ((False, 0), (True, 0), (True, 1), (False, 1)):
            torch._dynamo.reset()
            counters.clear()
            model = compile_model(pair(torch.float32), dynamic=False, async_tensor_parallel=overlapping)
            model(torch.zeros(SHAPES["rows"], requires_grad=True)).sum().backward()
            assert counters["aot_autograd"]["autograd_cache_hit"] == hits, counters
            assert counters["inductor"][OVERLAPPED] == (4 if overlapping else 0), counters
        del os.environ["TORCHINDUCTOR_CACHE_DIR"]


@on_two_ranks
def test_what_split_layers_cannot_have_is_refused() -> None:
    """What split layers cannot have, in a sentence."""
    apart = pair(torch.float32)
    plain = Linear(4, 4, parallel_mode="column", tp_group=dist.group.WORLD)
    for model, devices, available, expected in (
        (plain, ("cpu",), True, "allowed for a model without sequence_parallel layers: False"),
        (apart, ("cuda",), True, "allowed on cpu: False, or a model on cuda"),
        (apart, ("cpu",), False, "allowed with a torch without NCCL: False"),
    ):
        nccl = mock.patch.object(dist, "is_nccl_available", functools.partial(bool, available))
        with mock.patch.object(async_tensor_parallel, "DEVICES", devices), nccl, pytest.raises(ValueError) as error:
            compile_model(model, dynamic=False, async_tensor_parallel=True)
        assert str(error.value) == f"async_tensor_parallel is True; {expected}"


@on_two_ranks
def test_groups_are_enabled_without_a_warning() -> None:
    """Really: torch warns that this is deprecated, and its pass asks for it. No warning reaches the user."""
    model = pair(torch.float32)
    before, symmetric_memory._is_test_mode = symmetric_memory._is_test_mode, False
    try:
        group = model[0].tp_group_name
        assert not symmetric_memory.is_symm_mem_enabled_for_group(group)
        with warnings.catch_warnings(action="error"):
            share_memory_of_ranks(model)
        assert symmetric_memory.is_symm_mem_enabled_for_group(group)
    finally:
        symmetric_memory._is_test_mode = before


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        (Linear(4, 4), {"dynamic": False}, "allowed for a model without sequence_parallel layers: False"),
        (
            GPTModel(one_layer(tiny())),
            {"dynamic": False},
            "allowed for a model without sequence_parallel layers: False",
        ),
        (Linear(4, 4), {"dynamic": None}, "async_tensor_parallel is True and dynamic None; allowed: dynamic=F"),
        (Linear(4, 4), {"dynamic": True}, "async_tensor_parallel is True and dynamic True; allowed: dynamic=F"),
        (Linear(4, 4), {"dynamic": False, "backend": "eager"}, "backend 'eager'; allowed: backend='inductor'"),
    ],
)
def test_what_it_does_not_go_with_is_refused(model: torch.nn.Module, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        compile_model(model, async_tensor_parallel=True, **options)


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
    with symmetric_memory._test_mode():
        async_tensor_parallel.overlap(graph)
    names = (async_tensor_parallel.OVERLAPPED, async_tensor_parallel.ALONE, async_tensor_parallel.QUANTIZED)
    assert [counters["inductor"][name] for name in names] == [0, 1, 1]
    monkeypatch.setattr(async_tensor_parallel, "_warned", set())
    with pytest.warns(UserWarning, match="5 of the 7 gathers .* under a recipe they do not"):
        async_tensor_parallel.warn_of_what_waits(5, 2, 1)
    async_tensor_parallel.warn_of_what_waits(5, 2, 1)  # once
    async_tensor_parallel.warn_of_what_waits(5, 2, 0)
    async_tensor_parallel.warn_of_what_waits(0, 0, 3)
