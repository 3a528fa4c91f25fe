"""Which part of each adapter a rank has, where ranks share the model: what it has of the weight that it adapts.

Of a weight [out, in] that is split by rows a rank has the rows of B, and all of A; of one that is split by columns the
columns of A, and all of B. Of experts it has those that it computes.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn

from te_models.checkpoints.mapping.rank_shards import RankPart

from .adapter import adapters_of, magnitude_name

Shape = tuple[int, ...]


@dataclass(frozen=True)
class AdapterParameter:
    """A parameter of an adapter. weight: the name of the weight, in the model without adapters, that it is of; shape:
    the whole parameter's; follows: the dimension of the weight, from the end, that is its dimension `dim`, from the
    end."""

    weight: str
    shape: Shape
    follows: int
    dim: int


def adapter_parts(
    adapters: Mapping[str, AdapterParameter], shapes: Mapping[str, Shape], owned: Mapping[str, RankPart]
) -> dict[str, RankPart]:
    """Return what a rank has of each parameter of adapters, by name. shapes, owned: of the whole weights, by name, and
    what the rank has of them."""
    found = {}
    for name, its in adapters.items():
        part = owned[its.weight]
        if part.dim is None or part.dim - len(shapes[its.weight]) != its.follows:
            found[name] = RankPart(experts=part.experts)
        else:
            found[name] = RankPart(len(its.shape) + its.dim, part.ranges, part.experts)
    return found


def adapter_parameters(model: nn.Module, shapes: Mapping[str, Shape]) -> dict[str, AdapterParameter]:
    """Return the parameters of the adapters of a model, by name. shapes: of the whole weights, by name."""
    found: dict[str, AdapterParameter] = {}
    for layer, adapter in adapters_of(model):
        for pair, names in zip(adapter.PAIRS, adapter.weights(), strict=True):
            weight = f"{layer}.{names[0]}"
            *lead, rows, columns = shapes[weight]
            if len(names) > 1:  # a member each, whose adapters are a stack
                lead = [len(names)]
            a, b = pair
            found[f"{layer}.{a}.weight"] = AdapterParameter(weight, (*lead, adapter.rank, columns), -1, -1)
            found[f"{layer}.{b}.weight"] = AdapterParameter(weight, (*lead, rows, adapter.rank), -2, -2)
            if adapter.use_dora:
                found[f"{layer}.{magnitude_name(pair)}"] = AdapterParameter(weight, (*lead, rows), -2, -1)
    return found
