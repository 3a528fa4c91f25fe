"""How long the way through a layer is: Python calls of one eager forward pass, the files they are in, how deep they go.

Calls into torch are not counted, nor what torch calls; in Python 3.11 every comprehension counts as one call more."""

import contextlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import te_models.kernels
import te_models.layers
from te_models import GPTModel
from te_models.kernels.gemm import using_cpu_gemm
from te_models.kernels.torch_versions import TORCH_2_11
from te_models.layers import GroupedLinear, Linear, autocast, recipe
from te_models.training.config import OptimizerConfig, PrecisionConfig
from te_models.training.optimizer.adamw import Optimizer
from te_models.training.step import make_loss_function
from tests.build import tiny, tiny_moe

FOLDERS = {
    name: f"{Path(package.__file__ or '').parent}/"
    for name, package in (("layers", te_models.layers), ("kernels", te_models.kernels))
}
derived_properties = pytest.mark.skipif(
    TORCH_2_11, reason="torch 2.11 has derived properties of quantizers computed where they are read"
)
# per layer and recipe: Python calls, the files that they are in, how deep they go; of the calls, those in layers/, and
# all calls of a forward and a backward pass
LIMITS = {
    ("linear", None): (9, 7, 5, 5, 18),
    ("linear", "mxfp8"): (23, 10, 9, 14, 74),
    ("linear", "nvfp4"): (65, 19, 15, 26, 161),
    ("grouped", "mxfp8"): (80, 30, 15, 47, 199),
}


class Way(NamedTuple):
    """calls: the file of each, in order; depth: of the deepest one, counted in our calls."""

    calls: list[str]
    depth: int


def way_of(run: Callable[[], Any]) -> Way:
    """Call `run` and return its calls into the two folders."""
    calls: list[str] = []
    ours: list[bool] = []
    depth = 0

    def note(frame: FrameType, event: str, argument: object) -> None:
        nonlocal depth
        if event == "call":
            file = frame.f_code.co_filename
            own = file.startswith(tuple(FOLDERS.values()))
            ours.append(own)
            if own:
                calls.append(file)
                depth = max(depth, sum(ours))
        elif event == "return" and ours:
            ours.pop()

    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(None)
    return Way(calls, depth)


@derived_properties
@pytest.mark.parametrize("gemm", ["bf16", "float32"])
@pytest.mark.parametrize(("kind", "name"), LIMITS, ids=str)
def test_a_forward_pass_is_few_calls_in_few_files(kind: str, name: str | None, gemm: Any) -> None:
    """On every CPU: also where 16-bit matrices are multiplied in float32."""
    x = torch.randn(64, 128, dtype=torch.bfloat16, requires_grad=True)
    options = {"params_dtype": torch.bfloat16}
    if kind == "linear":
        dense = Linear(128, 128, **options)
        run = lambda: dense(x)  # noqa: E731
    else:
        grouped, splits = GroupedLinear(4, 128, 128, bias=False, **options), torch.tensor([16] * 4)
        run = lambda: grouped(x, splits)  # noqa: E731
    with using_cpu_gemm(gemm), autocast(enabled=name is not None, recipe=recipe(name) if name else None):
        run().sum().backward()  # the first call chooses
        way, both = way_of(run), way_of(lambda: run().sum().backward())
    own = [file for file in way.calls if file.startswith(FOLDERS["layers"])]
    found = len(way.calls), len(set(way.calls)), way.depth, len(own), len(both.calls)
    assert all(measured <= limit for measured, limit in zip(found, LIMITS[kind, name], strict=True)), found


def tensors_in(value: object, depth: int = 3) -> Iterator[Tensor]:
    """The tensors of an argument or a result, those in tuples, too."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple) and depth:
        for part in value:
            yield from tensors_in(part, depth - 1)


def test_the_way_of_a_weight_to_its_gemm_is_short() -> None:
    """Functions with the weight, or what one of them made of it, among their arguments; their folders and its names."""
    layer, x = Linear(96, 128, bias=False, params_dtype=torch.bfloat16), torch.randn(64, 96, dtype=torch.bfloat16)
    places, weight = {layer.weight.data_ptr()}, tuple(layer.weight.shape)
    results: list[Tensor] = []  # which hold their memory, so that no other tensor gets the same place
    functions: dict[str, Path] = {}
    names: set[str] = set()

    def named(frame: FrameType) -> list[str]:
        values = frame.f_locals
        return [name for name in values if any(t.data_ptr() in places for t in tensors_in(values[name]))]

    def note(frame: FrameType, event: str, argument: object) -> None:
        code = frame.f_code
        if event not in ("call", "return") or not code.co_filename.startswith(tuple(FOLDERS.values())):
            return
        if event == "call" and (found := named(frame)):
            functions[code.co_qualname] = Path(code.co_filename)
            names.update(found)
        elif event == "return" and code.co_qualname in functions:
            made = [t for t in tensors_in(argument) if tuple(t.shape) in (weight, weight[::-1])]
            results.extend(made)
            places.update(t.data_ptr() for t in made)

    with autocast(recipe=recipe("mxfp8")):
        layer(x)
        sys.setprofile(note)
        try:
            layer(x)
        finally:
            sys.setprofile(None)
    assert "gemm" in functions and len(functions) <= 12, list(functions)
    assert len({file.parent for file in functions.values()}) <= 4, functions
    assert len(names) <= 6, names


def calls_of(run: Callable[[], Any]) -> list[str]:
    """Call `run` and return the functions of te_models that it calls."""
    found: list[str] = []

    def note(frame: FrameType, event: str, argument: object) -> None:
        own = event == "call" and "te_models/" in frame.f_code.co_filename
        if own and "live_modules." not in frame.f_code.co_qualname:  # one for each model that other tests left
            found.append(frame.f_code.co_name)

    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(None)
    return found


@pytest.mark.parametrize(("name", "limit"), [(None, 260), pytest.param("mxfp8", 450, marks=derived_properties)])
def test_a_model_with_experts_is_few_calls(name: str | None, limit: int) -> None:
    """Forward, of one layer, after the first pass."""
    model = GPTModel(tiny_moe().replace(num_layers=1)).bfloat16().train()
    ids = torch.randint(0, 60, (2, 16))

    def run() -> None:
        with contextlib.nullcontext() if name is None else autocast(recipe=recipe(name)):
            model(ids)

    run()
    assert len(found := calls_of(run)) <= limit, len(found)


ASKING = {"choose", "has_library", "compiling", "unobserved", "eager_on_cpu", "plain_on_cpu", "exporting"}
ASKING |= {"quantized_gemms", "in_cpu_graph", "chosen", "fits", "uses_flash_attention", "uses_decode_attention"}
ASKING |= {"uses_gemv", "uses_few_rows"}
"""Functions that only ask what may run."""


@derived_properties
def test_a_train_step_is_few_calls() -> None:
    """Of one dense layer under mxfp8, after warm-up; of all calls, those that only ask what may run."""
    model = GPTModel(tiny(num_layers=1)).bfloat16().train()
    loss_of = make_loss_function(model, PrecisionConfig(dtype="bf16", recipe="mxfp8"), "cpu", compiled=False)
    optimizer, ids = Optimizer(model.named_parameters(), OptimizerConfig()), torch.randint(0, 60, (2, 32))

    def step() -> None:
        optimizer.zero_grad()
        loss, _ = loss_of(ids)
        loss.backward()
        optimizer.step(1e-4)

    for _ in range(3):
        step()
    found = calls_of(step)
    asking = sum(name in ASKING for name in found)
    # 5 % of 1,200 calls are 60: what asks stays below that, and no rarer call is one that asks more often
    assert len(found) <= 930 and asking <= 48, (len(found), asking)
