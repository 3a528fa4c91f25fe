"""The dense layer as a module of fusible operations."""

from __future__ import annotations

from typing import Any

from .basic import BasicLinear, Bias
from .operation import BasicOperation, FusibleOperation


class Linear(FusibleOperation):
    """`y = x w^T + b`: a BasicLinear `linear` and a Bias `bias`, which a group fuses. Transformer Engine:
    `te.ops.Linear`. The keyword arguments: see `BasicLinear`."""

    def __init__(self, in_features: int, out_features: int, bias: bool = True, **options: Any) -> None:
        super().__init__()
        self.linear = BasicLinear(in_features, out_features, **options)
        new = {name: options[name] for name in ("params_dtype", "device") if name in options}
        self.bias = Bias(out_features, **new) if bias else None

    def basic_operations(self) -> tuple[BasicOperation, ...]:
        return (self.linear,) if self.bias is None else (self.linear, self.bias)
