"""A model over many ranks: sizes of a layout, the device mesh that they make, and the model sharded over it.

dims       the sizes, checked and completed            mesh         the DeviceMesh and its views
sharding   FSDP2 and HSDP of a model (`parallelize`)   parts        which part of each tensor a rank has
load       a rank's own parts of a folder

`GPTModel` imports none of it. May import: everything but training and the command line. Names are imported on first
use: sizes can be checked without torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .dims import ParallelDims
    from .mesh import ParallelMesh
    from .sharding import parallelize

_MODULE_OF = {"ParallelDims": "dims", "ParallelMesh": "mesh", "parallelize": "sharding"}

__all__ = ["ParallelDims", "ParallelMesh", "parallelize"]


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'te_models.parallel' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
