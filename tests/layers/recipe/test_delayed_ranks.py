"""Delayed scaling on two ranks: the amaxes of all GEMMs are reduced over the group, eagerly and compiled, also where
the compiled run goes on from a checkpoint. The ranks train weights of their own, so no amax is equal."""

import functools
import io

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load, save
from torch import Tensor, nn

from te_models.layers import DelayedScaling, GroupedLinear, Linear, autocast
from tests.ranks import everyones, on_ranks

STEPS, RESUME_AT = 50, 23
SPLITS = torch.tensor([5, 0, 11])


class Experts(nn.Module):
    """A dense layer and three experts, of which one gets no rows; what is between them is exact in every order."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.up = Linear(48, 64, bias=False, params_dtype=dtype)
        self.down = GroupedLinear(len(SPLITS), 64, 48, bias=False, params_dtype=dtype)

    def forward(self, x: Tensor, seen: list[Tensor] | None = None) -> Tensor:
        """x: [16, 48]. seen: is given what the layers get, and the output of the first."""
        middle = self.up(x)
        h = torch.relu(middle)
        if seen is not None:
            seen += [x, h, middle]
        return self.down(h, SPLITS)

    def state(self, name: str) -> Tensor:
        """The tensor of this name, of all layers side by side: a column for each of the four GEMMs."""
        return torch.cat([getattr(layer, name) for layer in (self.up, self.down)], -1)


def columns(dense: Tensor, grouped: Tensor) -> Tensor:
    """The amaxes of a tensor of `up` and one of `down`, [4]. grouped: [16, C], or a matrix per expert."""
    parts = grouped if grouped.dim() == 3 else grouped.split(SPLITS.tolist())
    return torch.stack([t.detach().abs().max() if t.numel() else torch.zeros(()) for t in (dense, *parts)])


def resumed(model: Experts, optimizer: torch.optim.Optimizer) -> tuple[Experts, torch.optim.Optimizer]:
    """Return both as another process would read them from files."""
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    other = Experts()
    other.load_state_dict(load(save({name: value.contiguous() for name, value in model.state_dict().items()})))
    again = torch.optim.AdamW(other.parameters(), lr=0.01)
    again.load_state_dict(torch.load(file, weights_only=True))
    return other, again


def run(rank: int, *, compiled: bool, recipe: DelayedScaling, group: dist.ProcessGroup | None) -> dict[str, Tensor]:
    """Return every step's output, scales and histories, and, run eagerly, the amaxes [3 roles, 4] this rank saw.

    The compiled run stops in the middle and goes on from what it saved."""
    torch._dynamo.reset()
    torch.manual_seed(rank)
    model = Experts()
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    function = torch.compile(model, fullgraph=True) if compiled else model
    found: dict[str, list[Tensor]] = {"outputs": [], "scales": [], "histories": [], "amaxes": []}
    for step in range(STEPS):
        if compiled and step == RESUME_AT:
            torch._dynamo.reset()
            model, optimizer = resumed(model, optimizer)
            function = torch.compile(model, fullgraph=True)
        generator = torch.Generator().manual_seed(100 * step + rank)
        x = torch.randn(16, 48, generator=generator) * (1 + (step + 3 * rank) % 5)
        dy = torch.randn(16, 48, generator=generator) * (1 + (step + 2 * rank) % 4)
        seen: list[Tensor] = []
        with autocast(recipe=recipe, amax_reduction_group=group):
            y = function(x) if compiled else function(x, seen)
        if seen:
            seen[2].retain_grad()
        y.backward(dy)
        if seen:
            x, h, middle = seen
            assert middle.grad is not None
            pairs = ((x, h), (model.up.weight, model.down.weight), (middle.grad, dy))
            found["amaxes"].append(torch.stack([columns(*pair) for pair in pairs]))
        optimizer.step()
        optimizer.zero_grad()
        found["outputs"].append(y.detach())
        found["scales"].append(model.state("fp8_scale"))
        found["histories"].append(model.state("fp8_history"))
    return {name: torch.stack(values) for name, values in found.items() if values}


@functools.cache
def found(case: str) -> list[dict[str, Tensor]]:
    """What each rank found in a case."""
    rank, group = dist.get_rank(), None
    if case == "own group":
        group = [dist.new_group([r]) for r in range(2)][rank]
    scaling = DelayedScaling(amax_history_len=4, reduce_amax=case != "no reduction")
    return everyones(run(rank, compiled=case == "compiled", recipe=scaling, group=group))


@pytest.mark.slow
@on_ranks(2)
def test_compiled_steps_with_a_resume_equal_eager_ones_on_each_rank() -> None:
    for compiled, eager in zip(found("compiled"), found("eager"), strict=True):
        for key in ("outputs", "scales", "histories"):
            torch.testing.assert_close(compiled[key], eager[key], rtol=0, atol=0)


@on_ranks(2)
def test_the_ranks_agree_on_the_larger_amax() -> None:
    first, second = ranks = found("eager")
    for key in ("scales", "histories"):
        assert torch.equal(first[key], second[key])
    largest = torch.maximum(first["amaxes"], second["amaxes"])
    for own in ranks:  # of every role and GEMM, each rank has had the larger one in some step; an expert gets no rows
        mine = (own["amaxes"] == largest) & (first["amaxes"] != second["amaxes"])
        assert mine[..., [0, 1, 3]].any(0).all()
    assert (first["amaxes"] != second["amaxes"])[:, 1, 2].all(), "but its weights are different ones, too"
    # [step, role, GEMM]
    newest = first["histories"][:, 0]
    assert torch.equal(newest[:, :2], largest[:, :2])
    # the gradient of a step is seen by the next one's update
    assert torch.equal(newest[1:, 2], largest[:-1, 2])


@pytest.mark.parametrize("case", ["own group", "no reduction"])
@on_ranks(2)
def test_ranks_outside_the_group_do_not_count(case: str) -> None:
    ranks = found(case)
    for own in ranks:
        assert torch.equal(own["histories"][:, 0][:, :2], own["amaxes"][:, :2])
    for role in range(3):
        assert not torch.equal(ranks[0]["scales"][:, role], ranks[1]["scales"][:, role])
