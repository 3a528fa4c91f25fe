"""A model over many ranks: sizes of a layout, the device mesh that they make, and the model sharded over it.

dims       the sizes, checked and completed            mesh         the DeviceMesh and its views
sharding   FSDP2 and HSDP of a model (`parallelize`)   parts        which part of each tensor a rank has, and reads
pipeline   pipeline stages and their schedules         stage_layout   which layers each stage has

`GPTModel` imports none of it. May import: everything but training and the command line. Names are imported on first
use: sizes can be checked without torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..lazy import lazy_names

if TYPE_CHECKING:
    from .dims import ParallelDims
    from .mesh import ParallelMesh
    from .sharding import parallelize
    from .stage_layout import StageLayout

__all__ = ["ParallelDims", "ParallelMesh", "StageLayout", "parallelize"]

__getattr__, __dir__ = lazy_names(__name__)
