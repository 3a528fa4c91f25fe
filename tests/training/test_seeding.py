"""Derived seeds and saved random states."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from te_models.layers import Linear, set_rounding_seed
from te_models.parallel import ParallelDims
from te_models.training import train
from te_models.training.checkpoints.checkpoint import TrainingState
from te_models.training.checkpoints.start import restore_generators
from te_models.training.ranks.data_parallel import Ranks
from te_models.training.seeding import derive_seed, random_state, restore_random_state, rounding_seed, seed_all
from tests.training.runs import tiny_run


def test_derived_seeds_differ_by_every_label() -> None:
    seeds = {derive_seed(s, name, step, rank) for s in (0, 1) for name in "ab" for step in range(20) for rank in (0, 1)}
    assert len(seeds) == 160 and derive_seed(1, 23) != derive_seed(12, 3)
    assert all(0 <= seed < 2**63 for seed in seeds) and derive_seed(3, "x") == derive_seed(3, "x")


def test_every_seed_trains_on_every_rank(tmp_path: Path) -> None:
    """Streams of stochastic rounding take 42 bits."""
    layer = Linear(16, 16)
    seeds = {rounding_seed(seed, rank) for seed in (*range(50), 2**62, 2**80) for rank in range(8)}
    assert len(seeds) == 52 * 8
    for seed in seeds:
        set_rounding_seed(layer, seed)
    assert train(tiny_run(tmp_path, seed=1, steps=1)).step == 1


@pytest.mark.parametrize("gaussians", [0, 1])
def test_states_continue_where_they_were_saved(gaussians: int) -> None:
    seed_all(7)
    for _ in range(gaussians):
        random.gauss(0, 1)  # leaves a spare number behind, which is part of the state
    torch.randn(3)
    saved = random_state()
    assert {(s.dtype, s.dim()) for s in saved.values()} == {(torch.uint8, 1)}

    def draw() -> list[float]:
        return [random.gauss(0, 1), random.random(), random.gauss(0, 1), *torch.randn(5).tolist()]

    expected = draw()
    seed_all(8)
    assert draw() != expected
    restore_random_state(saved)
    assert draw() == expected


def test_states_have_one_size() -> None:
    sizes = set()
    for seed in range(5):
        seed_all(seed)
        sizes.add(tuple(state.numel() for state in random_state().values()))
    assert len(sizes) == 1


def test_a_run_that_continues_has_the_random_states_of_its_checkpoint() -> None:
    """Each step seeds the generators again, so that no number of a run tells."""
    model: Any = torch.nn.Linear(1, 1)
    seed_all(7)
    torch.randn(3)
    saved = random_state()
    tensors = {f"rng.{rank}.{name}": state for rank in (0, 1) for name, state in saved.items()}
    start = TrainingState(4, 16, 2, {}, tensors)
    for rank in (0, 1):
        seed_all(8)
        restore_generators(start, Ranks(rank, 2), model, ParallelDims(ranks=2), {})
        assert all(torch.equal(state, saved[name]) for name, state in random_state().items())
    seed_all(8)
    own = random_state()
    restore_generators(start, Ranks(2, 3), model, ParallelDims(ranks=3), {})  # which the checkpoint does not know
    assert all(torch.equal(state, own[name]) for name, state in random_state().items())
