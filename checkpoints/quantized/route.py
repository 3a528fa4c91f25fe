"""The way that each quantized parameter takes through a conversion, and the tensors that are written of it.

    move         source and target have the same fields, byte for byte
    re-encode    other bytes that stand for the same numbers
    requantize   quantized from values: the source's own, or those that its numbers stand for
    dequantize   the values
    refuse       its numbers cannot be taken over, and nothing else is allowed

Import, export and `quantize` differ in what their sides store, which `StoredForm` says for each parameter, and in what
the tensors of the target are called and hold, which `WriteTarget` says.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from te_models.layers.quantizer import Quantizer

from ..io.store import Store
from ..io.threads import cores, start_threads
from ..mapping.param_shapes import is_linear_weight
from ..mapping.plan import OutputTensor
from ..mapping.report import Measure
from .requantize import AmaxesOf, WrittenTensor, requantized_outputs

MAX_THREADS = 4
"""Threads that quantize one parameter; each has working copies of a band of rows."""

Way = Literal["move", "re-encode", "requantize", "dequantize", "refuse"]
Allowed = Collection[Literal["requantize", "dequantize"]]
"""What may be done with numbers that cannot be taken over."""


@dataclass(frozen=True)
class StoredForm:
    """What one side of a conversion stores a parameter as.

    quantizer: describes its fields; None: values, or (`inexact`) numbers that no fields hold. encoded: whether the
    tensors have other bytes than the fields. inexact: why the numbers cannot be taken over; None: they can.
    """

    quantizer: Quantizer | None = None
    encoded: bool = False
    inexact: str | None = None


VALUES = StoredForm()


@dataclass(frozen=True)
class Route:
    """The way of one parameter, by its grouped name.

    quantizer: of the fields that are written; None: values are. why: the reason why it is not moved or re-encoded.
    """

    parameter: str
    way: Way
    quantizer: Quantizer | None = None
    why: str = ""

    @property
    def is_exact(self) -> bool:
        """Whether source and target hold the same numbers."""
        return self.quantizer is not None and self.way != "requantize"


def choose_route(parameter: str, source: StoredForm, target: StoredForm, allowed: Allowed = ()) -> Route:
    """Return the way of a parameter: the first that loses nothing, else the first of those that are allowed.

    Only the weights of linear layers are stored quantized, so others are never requantized.
    """
    why = source.inexact if source.inexact is not None else target.inexact
    if why is None and target.quantizer is None:
        return Route(parameter, "move" if source.quantizer is None else "dequantize")
    if why is None and source.quantizer is not None and target.quantizer is not None:
        same = source.quantizer.FORMAT == target.quantizer.FORMAT and not (source.encoded or target.encoded)
        return Route(parameter, "move" if same else "re-encode", target.quantizer)
    if why is None or ("requantize" in allowed and is_linear_weight(parameter)):
        return Route(parameter, "requantize", target.quantizer, why or "")
    return Route(parameter, "dequantize" if "dequantize" in allowed else "refuse", None, why)


class WriteTarget(ABC):
    """The side that is written. moved: by name, what the plan moves: fields of the parameters that are taken over, and
    values of the others."""

    def __init__(self, moved: Iterable[OutputTensor]) -> None:
        self.moved = {output.name: output for output in moved}

    @abstractmethod
    def weights(self, parameter: str) -> list[str]:
        """Return what the tensors that hold a parameter are called in high precision."""

    @abstractmethod
    def fields(self, weight: str) -> list[OutputTensor]:
        """Return the tensors of a weight whose numbers are taken over."""

    @abstractmethod
    def entries(self, weight: str, quantizer: Quantizer) -> list[WrittenTensor]:
        """Return the tensors of a weight whose fields are computed."""

    @abstractmethod
    def values(self, weight: str) -> tuple[Store, OutputTensor]:
        """Return the values of a weight that is quantized from them, and what they are read from."""

    def finish(self, weight: str, outputs: list[OutputTensor]) -> list[OutputTensor]:
        """Return the quantized tensors of a weight as they lie in the files."""
        return outputs

    def amaxes_of(self, weight: str) -> AmaxesOf | None:
        """Return where the matrices of a weight get their amaxes, if they share them with other matrices."""
        return None

    @cached_property
    def threads(self) -> Executor:
        """Threads to quantize with; the same ones throughout, because each keeps memory for reuse."""
        return start_threads(min(cores(), MAX_THREADS))

    def outputs(self, route: Route, measure: Callable[[str], Measure] | None = None) -> dict[str, list[OutputTensor]]:
        """Return what is written of a parameter, by weight.

        measure: called with the name of a weight that is requantized; returns what gets the largest error of each of
        its matrices, and of each usage.
        """
        if route.quantizer is None:
            return {weight: [self.moved[weight]] for weight in self.weights(route.parameter)}
        make = self._requantized if route.way == "requantize" else lambda weight, *_: self.fields(weight)
        computed = {weight: make(weight, route.quantizer, measure) for weight in self.weights(route.parameter)}
        return {weight: self.finish(weight, outputs) for weight, outputs in computed.items()}

    def _requantized(
        self, weight: str, quantizer: Quantizer, measure: Callable[[str], Measure] | None
    ) -> list[OutputTensor]:
        return requantized_outputs(
            *self.values(weight),
            quantizer,
            self.entries(weight, quantizer),
            lambda: self.threads,
            None if measure is None else measure(weight),
            self.amaxes_of(weight),
        )
