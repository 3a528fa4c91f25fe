"""What each of four processes of test_fp8_moments does: this module is run with RESULTS.

Moments of known values, FP8 in the blocks of one layout, are saved by its ranks and read by those of every layout.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from te_models.layers.optimizers.moments import encode_first, encode_second
from te_models.model.gpt import GPTModel
from te_models.parallel.parts import LocalPart, ModelParts
from te_models.parallel.sharding import shards_experts_apart
from te_models.training import ModelSource, OptimizerConfig, ParallelConfig, PrecisionConfig
from te_models.training.build import build_model, build_optimizer
from te_models.training.checkpoints.checks import TrainingCheckpointError
from te_models.training.checkpoints.fp8_moments import (
    FIELDS,
    _decode,
    _encode,
    _states,
    load_pieces,
    load_whole,
    moment_fields,
)
from te_models.training.checkpoints.sharded.checkpoint import save_parts
from te_models.training.optimizer.adamw import Optimizer
from te_models.training.ranks.data_parallel import Ranks
from te_models.training.ranks.layout import rank_layout
from tests.ranks import report_cases
from tests.training.ranks.layouts import LAYOUTS as ALL
from tests.training.runs import tiny_model, tiny_run

RANKS = 4
NAMES = ["fsdp4", "tp2 fsdp2", "pp2 tp2"]
NAMES += ["tp2 ep2 fsdp2", "etp2 fsdp4", "ep2 hsdp 2x2"] if shards_experts_apart() else ["tp2 ep2"]
CASES = [*NAMES, "a few", "whole", "missing", "twice"]


def optimizer_of(name: str) -> tuple[GPTModel, Optimizer, ModelParts]:
    """A model of 40 hidden channels, so that parts end within blocks, in a layout."""
    config = tiny_run(
        Path("unused"),
        model=ModelSource(config=tiny_model(moe=True, layers=4, hidden=40)),
        parallel=ParallelConfig(**ALL[name]),
        precision=PrecisionConfig(dtype="fp32"),
        optimizer=OptimizerConfig(moment_dtype="float8"),
    )
    layout = rank_layout(config.parallel, Ranks(dist.get_rank(), RANKS), "cpu")
    torch.manual_seed(0)
    model = build_model(config, "cpu", None, None, layout)
    return model, build_optimizer(config, model, layout), ModelParts(model)


def whole_moments(own: ModelParts, name: str) -> tuple[Tensor, Tensor]:
    """The moments of a whole parameter, of very different sizes."""
    values = torch.Generator().manual_seed(sum(name.encode()))
    first = torch.randn(own.shape(name), generator=values) * torch.rand(own.shape(name), generator=values) ** 4
    return first, (first * 3).square()


def filled(name: str) -> tuple[GPTModel, Optimizer, ModelParts]:
    model, optimizer, own = optimizer_of(name)
    for parameter, state, part in _states(optimizer, own):
        if part.tensor.numel():
            _encode(state, *(part.of_whole(value) for value in whole_moments(own, parameter)))
    return model, optimizer, own


def wrong(optimizer: Optimizer, own: ModelParts) -> Iterator[str]:
    """Yield the parameters whose moments are further from the true ones than two roundings explain."""
    for name, state, part in _states(optimizer, own):
        if not part.tensor.numel():
            continue
        found = _decode([state[field] for field in FIELDS], part.tensor.shape)
        for value, right, power in zip(found, whole_moments(own, name), (1, 2), strict=True):
            largest, right = right.abs().max() ** (1 / power), part.of_whole(right)
            root, expected = value.abs() ** (1 / power), right.abs() ** (1 / power)
            # of a small number half the smallest one, of a root all of it, because none rounds to zero
            allowed = 2.1 * torch.maximum(expected / 16, power * largest / 448 / 2**10)
            if ((root - expected).abs() > allowed).any() or not torch.equal(value.sign(), right.sign() * value.bool()):
                yield name


def of_all_ranks(problems: Iterator[str]) -> list[str]:
    """The problems of all ranks, so that they fail together."""
    found: list[list[str]] = [[]] * RANKS
    dist.all_gather_object(found, list(problems))
    return [f"rank {rank}: {problem}" for rank, some in enumerate(found) for problem in some]


def save(model: GPTModel, some: dict[str, LocalPart], results: str, step: int) -> Path:
    ranks = Ranks(dist.get_rank(), RANKS)
    return save_parts(Path(f"{results}.run"), model, some, {"step": step}, ranks, keep_last=0)


def every_layout_reads(case: str, results: str) -> None:
    """The same one bit for bit. case: the layout that writes, or "a few": two layouts read what one writes."""
    name, readers = ("fsdp4", ["fsdp4", "pp2 tp2"]) if case == "a few" else (case, NAMES)
    model, optimizer, own = filled(name)
    assert of_all_ranks(wrong(optimizer, own)) == []
    before = {key: part.tensor.clone() for key, part in moment_fields(optimizer, own).items()}
    assert len(before) >= 4 * len(optimizer.parameters) // 2
    folder = save(model, moment_fields(optimizer, own), results, CASES.index(case))
    dist.barrier()
    for other in readers:
        _, optimizer, own = optimizer_of(other)
        load_pieces(folder, optimizer, own)
        assert of_all_ranks(wrong(optimizer, own)) == [], (name, other)
        if other == name:
            found = moment_fields(optimizer, own)
            assert found.keys() == before.keys()
            assert all(torch.equal(found[key].tensor.float(), value.float()) for key, value in before.items())


def of_one_rank() -> None:
    """Every layout reads the state of a whole model; one whose blocks are not of it is refused."""
    for name in NAMES:
        _, optimizer, own = optimizer_of(name)
        tensors: dict[str, Tensor] = {}
        for parameter in own._shapes:
            first, second = (value.flatten() for value in whole_moments(own, parameter))
            bits = torch.full(first.shape, 1 << 15, dtype=torch.int32)
            fields = *encode_first(first, bits), *encode_second(second, bits)
            tensors |= {f"optimizer.{parameter}.{field}": t for field, t in zip(FIELDS, fields, strict=True)}
        load_whole(tensors, optimizer, own)
        assert of_all_ranks(wrong(optimizer, own)) == [], name
        largest = max(optimizer.parameters, key=lambda parameter: optimizer.parameters[parameter].numel())
        one = f"optimizer.{largest}.exp_avg"
        with pytest.raises(TrainingCheckpointError, match=r"the state of the optimizer holds torch\.float8_e4m3fn"):
            load_whole(tensors | {one: tensors[one][:1]}, optimizer, own)


def what_is_missing_is_named(results: str) -> None:
    model, optimizer, own = filled("fsdp4")
    some = {key: part for key, part in moment_fields(optimizer, own).items() if "output_layer.weight." not in key}
    folder = save(model, some, results, CASES.index("missing"))
    dist.barrier()
    with pytest.raises(TrainingCheckpointError, match=r"lacks FP8 moments of [\d,]+ values of 'output_layer\.weight'"):
        load_pieces(folder, optimizer, own)


def what_is_there_twice_is_named(results: str) -> None:
    """The second rank's part is said to begin a row earlier: one row comes twice and one not at all, so that there are
    as many values as there should be."""
    model, optimizer, own = filled("fsdp4")
    some = moment_fields(optimizer, own)
    for key in list(some):
        entry, _, where = key.partition("@0=")
        if "output_layer.weight." in key and dist.get_rank() == 1:
            begin, end = map(int, where.split("-"))
            some[f"{entry}@0={begin - 1}-{end - 1}"] = some.pop(key)
    folder = save(model, some, results, CASES.index("twice"))
    dist.barrier()
    _, optimizer, own = optimizer_of("tp2 fsdp2")
    told = "nothing"
    try:
        load_pieces(folder, optimizer, own)
    except TrainingCheckpointError as error:
        told = str(error)
    found: list[str] = [""] * RANKS
    dist.all_gather_object(found, told)  # a rank whose own part is as it should be has nothing to say
    assert any("FP8 moments of" in text and "output_layer.weight" in text for text in found), found


if __name__ == "__main__":
    results = sys.argv[1]
    cases = {name: functools.partial(every_layout_reads, name, results) for name in (*NAMES, "a few")}
    cases |= {"whole": of_one_rank, "missing": functools.partial(what_is_missing_is_named, results)}
    cases |= {"twice": functools.partial(what_is_there_twice_is_named, results)}
    report_cases(cases, results)
