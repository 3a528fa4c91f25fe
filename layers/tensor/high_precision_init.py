"""Values that weights had before they were quantized: preserved on request, for a float32 master to start from.

`parameter.get_high_precision_init_val()` returns the value, on the CPU, and `clear_high_precision_init_val()` frees it.
`fully_shard` makes new parameters, so the layer holds the value, too, until its shards are known; each rank's new
parameter is then given its own part.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from torch import Tensor, nn

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

    from .quantized_tensor import QuantizedTensor

_HELD = "high_precision_init_vals"


class InitialValue:
    """A value on the CPU, until it is freed. A class, and not a closure, so that a deep copy has a separate value."""

    def __init__(self, value: Tensor) -> None:
        self.value: Tensor | None = value

    def get(self) -> Tensor | None:
        """Return the value, or None once it has been freed."""
        return self.value

    def clear(self) -> None:
        """Free the value."""
        self.value = None


def preserve(module: nn.Module, name: str, parameter: nn.Parameter, value: Tensor) -> None:
    """Preserve what the weight `name` of a layer was before it was quantized into `parameter`; nothing on the meta
    device, where values do not exist."""
    if value.is_meta:
        return
    initial = InitialValue(value.to("cpu", copy=True))
    _attach(parameter, initial)
    vars(module).setdefault(_HELD, {})[name] = initial


def hand_to_shards(module: nn.Module, largest_shard: Callable[[Tensor, int, int], int]) -> None:
    """Give each parameter that `fully_shard` has made of this layer's weights its part of the value, and free the rest.
    largest_shard: see the caller, `fsdp`.

    Nothing happens where that was done, or where no values were preserved.
    """
    from torch.distributed.tensor import DTensor

    held: dict[str, InitialValue] = getattr(module, _HELD, {})
    for name in list(held):
        parameter = module._parameters.get(name)
        if not isinstance(parameter, DTensor):
            continue
        initial = held.pop(name)
        if initial.value is not None:
            _attach(parameter, InitialValue(part_of_shard(initial.value, parameter, largest_shard).clone()))
            initial.clear()


def clear_initial_value(parameter: Tensor) -> None:
    """Free what `preserve` holds of a parameter, if anything."""
    initial = _preserved_of(parameter)
    if initial is not None:
        initial.clear()


def take_initial_value(parameter: Tensor, local: QuantizedTensor) -> Tensor | None:
    """Return the value that this rank's part of a parameter was quantized from, on its device, and free it.

    None where none is preserved, or where other values have been written into the parameter since (a loaded checkpoint,
    say): its numbers are no longer the quantization of that value. Collective for shards that share a scale.
    """
    initial = _preserved_of(parameter)
    if initial is None or initial.value is None:
        return None
    value = initial.value.to(local.device)
    initial.clear()
    return value if local.is_quantization_of(value) else None


def _attach(parameter: Tensor, initial: InitialValue) -> None:
    parameter.get_high_precision_init_val = initial.get  # type: ignore[attr-defined]
    parameter.clear_high_precision_init_val = initial.clear  # type: ignore[attr-defined]


def _preserved_of(parameter: Tensor) -> InitialValue | None:
    method = vars(parameter).get("get_high_precision_init_val")
    return None if method is None else method.__self__


def part_of_shard(value: Tensor, parameter: DTensor, largest_shard: Callable[[Tensor, int, int], int]) -> Tensor:
    """Return this rank's rows of a value of the whole parameter."""
    from torch.distributed.tensor import Shard

    mesh = parameter.device_mesh
    for dim, placement in enumerate(parameter.placements):
        if isinstance(placement, Shard):
            size, along = value.shape[placement.dim], placement.dim
            each = largest_shard(parameter, size, mesh.size(dim))
            begin = min(mesh.get_local_rank(dim) * each, size)
            value = value.narrow(along, begin, min(each, size - begin))
    return value
