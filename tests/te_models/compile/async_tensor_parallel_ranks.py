"""What each process of test_async_tensor_parallel does: `python -m tests.te_models.compile.async_tensor_parallel_ranks
RESULTS`. Every case compiles the same layers twice, plain and with async_tensor_parallel, and compares outputs and all
gradients.

There is no memory that CPUs share here: the fused operations do one after the other what they do at once on a GPU.
"""

from __future__ import annotations

import functools
import os
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

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
from te_models.training.step import make_loss_function
from tests.ranks import report_cases
from tests.te_models.configs import one_layer, tiny, tiny_moe, token_ids
from tests.training.runs import curve, tiny_run

HIDDEN, FFN = 64, 128
SHAPES = {"rows": (16, HIDDEN), "batch": (8, 2, HIDDEN)}
"""Of a rank's part of the input of a layer."""
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
FOLDER = Path()
"""Of the test, the same on all ranks."""
CPU = torch.library.Library("symm_mem", "IMPL")
"""Kernels for CPUs, as long as it lives."""


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


def layers(make: Callable[[torch.dtype], nn.Module], kind: str, shape: str, pairs: int) -> None:
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


def model(config: Any, mode: str, least: int) -> None:
    """In every layer all overlaps but what a mixture gathers for its router; the embedding and the loss do not."""
    ids = token_ids(2, 16)
    plain, overlapping, (overlapped, _) = outcome(
        lambda: GPTModel(config, dtype=torch.bfloat16, **split()),
        lambda model: model(ids, labels=ids, return_logits=False).loss,
        lambda model, on: compile_model(model, mode, dynamic=False, async_tensor_parallel=on),
    )
    check(plain, overlapping, torch.bfloat16)
    assert overlapped >= least, overlapped


def training(mode: str) -> None:
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


def run() -> None:
    """A run from its configuration, step by step the same."""
    curves = []
    for overlapping in (False, True):
        torch._dynamo.reset()
        counters.clear()
        parallel = ParallelConfig(
            tensor_model_parallel_size=2, sequence_parallel=True, async_tensor_parallel=overlapping
        )
        config = tiny_run(FOLDER, f"run-{overlapping}", steps=2, compile=True, parallel=parallel)
        train(config)
        dist.barrier()
        # of two layers and the output layer, 17 in training and 9 where the validation loss is measured
        assert counters["inductor"][OVERLAPPED] == (26 if overlapping else 0), counters["inductor"]
        curves.append(curve(config))
    assert len(curves[0]) == 2 and curves[0] == curves[1], curves


def nothing_overlaps() -> None:
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


def kept_on_disk() -> None:
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


def refusals() -> None:
    """What split layers cannot have, in a sentence."""
    apart = pair(torch.float32)
    plain = Linear(4, 4, parallel_mode="column", tp_group=dist.group.WORLD)
    for model, devices, available, expected in (
        (plain, ("cpu",), True, "allowed for a model without sequence_parallel layers: False"),
        (apart, ("cuda",), True, "allowed on cpu: False, or a model on cuda"),
        (apart, ("cpu",), False, "allowed with a torch without NCCL: False"),
    ):
        async_tensor_parallel.DEVICES, dist.is_nccl_available = devices, functools.partial(bool, available)
        try:
            compile_model(model, dynamic=False, async_tensor_parallel=True)
        except ValueError as error:
            assert str(error) == f"async_tensor_parallel is True; {expected}", error
        else:
            raise AssertionError(expected)
        finally:
            stand_in()


def groups_are_enabled() -> None:
    """Really: torch warns that this is deprecated, and its pass asks for it. No warning reaches the user."""
    model = pair(torch.float32)
    before, symmetric_memory._is_test_mode = symmetric_memory._is_test_mode, False
    try:
        group = model[0].tp_group_name
        assert not symmetric_memory.is_symm_mem_enabled_for_group(group)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            share_memory_of_ranks(model)
        assert symmetric_memory.is_symm_mem_enabled_for_group(group)
    finally:
        symmetric_memory._is_test_mode = before


CASES: dict[str, Callable[[], None]] = {
    "refusals": refusals,
    "groups_are_enabled": groups_are_enabled,
    **{
        f"pair-{dtype}-{shape}": functools.partial(layers, pair, dtype, shape, 1)
        for dtype in DTYPES
        for shape in SHAPES
    },
    "layer-bf16": functools.partial(layers, layer, "bf16", "batch", 2),
    "layer-fp32": functools.partial(layers, layer, "fp32", "batch", 2),
    "model-whole": functools.partial(model, tiny(), "whole", 17),
    "model-block": functools.partial(model, tiny(), "block", 9),
    "model-moe": functools.partial(model, one_layer(tiny_moe()), "whole", 5),
    "training-whole": functools.partial(training, "whole"),
    "training-block": functools.partial(training, "block"),
    "run": run,
    "nothing_overlaps": nothing_overlaps,
    "kept_on_disk": kept_on_disk,
}


def stand_in() -> None:
    """Let torch and the library take CPUs for devices with memory that ranks share."""
    async_tensor_parallel.DEVICES = ("cpu",)
    dist.is_nccl_available = lambda: True


def main(results: str) -> None:
    """Run the cases on this rank."""
    global FOLDER
    FOLDER = Path(results).parent
    CPU.impl("fused_all_gather_matmul", symmetric_memory._fused_all_gather_matmul_fallback, "CPU")
    CPU.impl("fused_matmul_reduce_scatter", symmetric_memory._fused_matmul_reduce_scatter_fallback, "CPU")
    stand_in()
    with symmetric_memory._test_mode(), using_cpu_gemm("bf16"):
        report_cases(CASES, results)


if __name__ == "__main__":
    main(*sys.argv[1:])
