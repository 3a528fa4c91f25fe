"""What each of the two processes of test_delayed_ranks does: `python -m tests.layers.delayed_ranks RESULTS CASES...`.

Each rank trains weights of its own on inputs of its own scale, eagerly and compiled, with and without the reduction of
amaxes, and writes the histories and scales of its layers as safetensors to RESULTS.<rank>.
"""

from __future__ import annotations

import io
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from safetensors.torch import load, save, save_file
from torch import Tensor, nn

from te_models.layers import DelayedScaling, GroupedLinear, Linear, autocast

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

    The compiled run stops in the middle and goes on from what it saved.
    """
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


def main(results: str, *names: str) -> None:
    """Run the cases of these names on this rank."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=480))
    rank = dist.get_rank()
    alone = [dist.new_group([r]) for r in range(2)][rank]
    cases = {
        "eager": (False, DelayedScaling(amax_history_len=4), None),
        "compiled": (True, DelayedScaling(amax_history_len=4), None),
        "own group": (False, DelayedScaling(amax_history_len=4), alone),
        "no reduction": (False, DelayedScaling(amax_history_len=4, reduce_amax=False), None),
    }
    found = {}
    for name in names:
        compiled, recipe, group = cases[name]
        for key, value in run(rank, compiled=compiled, recipe=recipe, group=group).items():
            found[f"{name}/{key}"] = value.contiguous()
    save_file(found, f"{results}.{rank}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
