"""Whether operations are what a fusion computes in their place."""

from __future__ import annotations

from collections.abc import Sequence

from ..operation import BasicOperation


def begins_with(operations: Sequence[BasicOperation], *kinds: type[BasicOperation], backward: bool = False) -> bool:
    """Whether the first operations are of these kinds, and have their forward (or backward) pass.

    A subclass with a pass of its own is not what the fusion computes, and runs apart.
    """
    if len(operations) < len(kinds):
        return False
    return all(_fits(operation, kind, backward) for operation, kind in zip(operations, kinds, strict=False))


def _fits(operation: BasicOperation, kind: type[BasicOperation], backward: bool) -> bool:
    if not isinstance(operation, kind):
        return False
    cls = type(operation)
    if backward:
        return cls.op_backward is kind.op_backward
    return cls.SPLIT_FORWARD and cls.op_forward_compute is kind.op_forward_compute
