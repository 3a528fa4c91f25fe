"""What a toy model keeps of the tensors that the model does not use: above all layers that predict further tokens.

Such a layer holds one of the model's among other things. So a tensor in it whose name ends as that of a tensor in a
layer with experts is cut as that one is, and all others are whole. Layers are behind the last one of the model, and get
the numbers behind the last one of the toy.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..formats.format import scale_beside
from ..io.boxes import Shape, full
from ..plan.plan import Output
from ..plan.tensor_map import Namespace, Piece

if TYPE_CHECKING:
    from .toy_parts import ToyPart


def unused_outputs(part: ToyPart, target: Namespace) -> Iterator[Output]:
    """Yield what the toy has of the tensors that the model does not use: not those of layers and experts that are not
    taken. target: how the toy is stored."""
    files, layer = part.checkpoint.files.tensors, _layer_with_experts(part, target)
    for name in part.checkpoint.passthrough:
        info, new = files[name], part.renamed(name)
        shape = info.shape if layer is None or part.family.unused.is_beside(name) else layer.cut(name, info.shape)
        if new is not None and shape is not None:
            box = full(shape)
            yield Output(new, info.dtype, shape, (Piece(name, box, box, tuple(range(len(shape)))),))


@dataclass(frozen=True)
class _Layer:
    """The weights of a layer with experts, by their names within it, whole and cut; beside: names of tensors that
    belong to one of these weights -> that weight."""

    whole: Mapping[str, Shape]
    small: Mapping[str, Shape]
    beside: Mapping[str, str]

    def cut(self, name: str, shape: Shape) -> Shape | None:
        """Return the shape of what is taken of a tensor, from its beginning on; None: nothing of it."""
        words = name.split(".")
        for first in range(len(words)):
            tail = ".".join(words[first:])
            weight = self.beside.get(tail, tail)
            if weight not in self.whole:
                continue
            if weight not in self.small:
                return None
            whole, small = self.whole[weight], self.small[weight]
            if shape == whole:
                return small
            leading = len(whole) - 2  # scales have a number, or blocks, per matrix
            return (*small[:leading], *shape[leading:]) if leading > 0 and shape[:leading] == whole[:leading] else shape
        return shape


def _layer_with_experts(part: ToyPart, target: Namespace) -> _Layer | None:
    """Return a layer of the model that has experts and is taken; None where no model has any."""
    config = part.checkpoint.config
    moved = [i for i in part.chosen if config.is_moe_layer(i)]
    if not moved:
        return None
    names = part.family.names if part.form is None else part.family.forms[part.form]
    numbers = (moved[0], part.chosen.index(moved[0]))
    whole, small = (_within(space, f"{names.layer.format(i=i)}.") for space, i in zip((part.whole, target), numbers))
    beside: dict[str, str] = {}
    if part.checkpoint.quantized is not None:
        weight_format = part.checkpoint.quantized.format
        for weight in whole:
            beside |= {weight + scale.suffix: weight for scale in weight_format.parts if scale.suffix}
            beside |= {scale_beside(weight, kind): weight for kind in weight_format.activations}
    return _Layer(whole, small, beside)


def _within(namespace: Namespace, prefix: str) -> dict[str, Shape]:
    """Return the shapes of a layer's stored tensors by their names without the prefix."""
    return {n.removeprefix(prefix): s.shape for n, s in namespace.stored.items() if n.startswith(prefix)}
