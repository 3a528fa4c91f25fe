"""FP8 moments of one layout of four ranks continue in every other: bit for bit in the same, else to FP8's rounding."""

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
    _cuts_of,
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
from tests.ranks import everyones, on_ranks
from tests.training.ranks.layouts import LAYOUTS as ALL
from tests.training.runs import tiny_model, tiny_run

RANKS = 4
NAMES = ["fsdp4", "tp2 fsdp2", "pp2 tp2"]
NAMES += ["tp2 ep2 fsdp2", "etp2 fsdp4", "ep2 hsdp 2x2"] if shards_experts_apart() else ["tp2 ep2"]


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
    return [f"rank {rank}: {one}" for rank, some in enumerate(everyones(list(problems))) for one in some]


def save(model: GPTModel, some: dict[str, LocalPart], folder: Path) -> Path:
    return save_parts(folder / "run", model, some, {"step": 0}, Ranks(dist.get_rank(), RANKS), keep_last=0)


@on_ranks(4)
@pytest.mark.slow
@pytest.mark.parametrize("case", [*NAMES, "a few"])
def test_every_layout_reads_what_one_saved(case: str, tmp_path: Path) -> None:
    """The same one bit for bit. case: the layout that writes, or "a few": two layouts read what one writes."""
    name, readers = ("fsdp4", ["fsdp4", "pp2 tp2"]) if case == "a few" else (case, NAMES)
    model, optimizer, own = filled(name)
    assert of_all_ranks(wrong(optimizer, own)) == []
    before = {key: part.tensor.clone() for key, part in moment_fields(optimizer, own).items()}
    assert len(before) >= 4 * len(optimizer.parameters) // 2
    folder = save(model, moment_fields(optimizer, own), tmp_path)
    dist.barrier()
    for other in readers:
        _, optimizer, own = optimizer_of(other)
        load_pieces(folder, optimizer, own)
        assert of_all_ranks(wrong(optimizer, own)) == [], (name, other)
        if other == name:
            found = moment_fields(optimizer, own)
            assert found.keys() == before.keys()
            assert all(torch.equal(found[key].tensor.float(), value.float()) for key, value in before.items())


@on_ranks(4)
@pytest.mark.slow
def test_every_layout_reads_the_state_of_a_whole_model() -> None:
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


@on_ranks(4)
@pytest.mark.slow
def test_what_is_missing_is_named(tmp_path: Path) -> None:
    model, optimizer, own = filled("fsdp4")
    some = {key: part for key, part in moment_fields(optimizer, own).items() if "output_layer.weight." not in key}
    folder = save(model, some, tmp_path)
    dist.barrier()
    with pytest.raises(TrainingCheckpointError, match=r"lacks FP8 moments of [\d,]+ values of 'output_layer\.weight'"):
        load_pieces(folder, optimizer, own)


@on_ranks(4)
@pytest.mark.slow
def test_what_is_there_twice_is_named(tmp_path: Path) -> None:
    """The second rank's part is said to begin a row earlier: one row comes twice, one never, and the count is right."""
    model, optimizer, own = filled("fsdp4")
    some = moment_fields(optimizer, own)
    for key in list(some):
        entry, _, where = key.partition("@0=")
        if "output_layer.weight." in key and dist.get_rank() == 1:
            begin, end = map(int, where.split("-"))
            some[f"{entry}@0={begin - 1}-{end - 1}"] = some.pop(key)
    folder = save(model, some, tmp_path)
    dist.barrier()
    _, optimizer, own = optimizer_of("tp2 fsdp2")
    told = "nothing"
    try:
        load_pieces(folder, optimizer, own)
    except TrainingCheckpointError as error:
        told = str(error)
    found = everyones(told)  # a rank whose own part is as it should be has nothing to say
    assert any("FP8 moments of" in text and "output_layer.weight" in text for text in found), found


def test_names_say_which_part_it_is() -> None:
    shape = (64, 80)
    assert _cuts_of("", shape) == {}
    assert _cuts_of("0=0-64&1=0-16,64-80", shape) == {0: ((0, 64),), 1: ((0, 16), (64, 80))}
    wrong = ("0", "0=1", "a=0-1", "0=0-1-2", "2=0-1", "-1=0-1", "0=0-65", "0=8-8", "0=9-8", "1=0-16,8-24", "0=0-1\0")
    for text in (*wrong, f"0=0-{10**40}"):
        with pytest.raises(TrainingCheckpointError, match="does not say a part of a parameter, such as '0=0-64'"):
            _cuts_of(text, shape)
