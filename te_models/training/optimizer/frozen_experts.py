"""Single experts of a stack that are not trained: their gradients are zero, and an optimizer step leaves their weights,
and the float32 masters, as they were. Moments of zero gradients stay zero.

E experts.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from te_models.layers import QuantizedTensor, gradient_of
from te_models.layers.tensor.fsdp import local_part

from ...config import ConfigError
from ..config import OptimizerConfig
from .groups import check_patterns

if TYPE_CHECKING:
    from ...parallel.parts import LocalPart


class FrozenExperts:
    """The experts of `optimizer.freeze_experts` among parameters by name; a stack is a parameter [E, ...] of experts.

    parts: what part of each parameter this rank has, by name; None: it has all of each. everywhere: the names of the
    whole model's parameters; None: these.

    Raises ConfigError for a pattern that matches no stack, for an expert that a stack does not have, and for weights
    that are stored quantized.
    """

    def __init__(
        self,
        config: OptimizerConfig,
        parameters: Mapping[str, nn.Parameter],
        parts: Mapping[str, LocalPart] | None = None,
        everywhere: Iterable[str] | None = None,
    ) -> None:
        self.rows: dict[str, Tensor] = {}
        patterns = config.frozen_experts()
        if not patterns:
            return
        stacks = {name: p for name, p in parameters.items() if _is_stack(name)}
        known = list(stacks if everywhere is None else filter(_is_stack, everywhere))
        check_patterns("optimizer.freeze_experts", patterns, known or parameters)
        for name, parameter in stacks.items():
            experts = sorted({e for pattern, some in patterns.items() if fnmatchcase(name, pattern) for e in some})
            if not experts:
                continue
            part = None if parts is None else parts[name]
            most = (parameter if part is None else part).shape[0] - 1
            if experts[-1] > most:
                raise ConfigError(f"optimizer.freeze_experts has expert {experts[-1]} of {name}; allowed: 0 to {most}")
            if isinstance(local_part(parameter), QuantizedTensor):
                raise ConfigError("optimizer.freeze_experts is set; allowed with precision.quantized_weights: none")
            own = experts if part is None else _own_rows(experts, part)
            self.rows[name] = torch.tensor(own, dtype=torch.int64, device=parameter.device)

    @torch.no_grad()
    def zero_gradients(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Set the gradients of the experts to zero."""
        for name, rows in self.rows.items():
            gradient = gradient_of(parameters[name])
            if gradient is not None:
                local_part(gradient).index_fill_(0, rows, 0.0)

    @contextlib.contextmanager
    def unchanged(self, parameters: Mapping[str, nn.Parameter], masters: Mapping[str, Tensor]) -> Iterator[None]:
        """Give weights and masters of the experts, after what is done within, the values that they have now."""
        both = [(t[name], rows) for name, rows in self.rows.items() for t in (parameters, masters) if name in t]
        tensors = [(local_part(tensor), rows) for tensor, rows in both]
        before = [tensor.detach()[rows] for tensor, rows in tensors]
        yield
        with torch.no_grad():
            for (tensor, rows), values in zip(tensors, before, strict=True):
                tensor.index_copy_(0, rows, values)


def _own_rows(experts: Sequence[int], part: LocalPart) -> list[int]:
    """Return the rows that a rank's part of a stack has of experts."""
    return [offset + e - begin for begin, end, offset in part.ranges(0) for e in experts if begin <= e < end]


def _is_stack(name: str) -> bool:
    return ".mlp.experts." in name and not name[-1].isdigit()
