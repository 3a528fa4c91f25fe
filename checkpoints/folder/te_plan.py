"""The plan that moves what a checkpoint holds to a folder of ours."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..mapping.param_shapes import ExpertLayout
from ..mapping.plan import ConversionPlan, make_plan
from ..mapping.te_namespace import Formats, te_namespace
from .checkpoint import Checkpoint
from .passthrough import our_names

if TYPE_CHECKING:
    import torch


def plan_te_folder(
    ckpt: Checkpoint, layout: ExpertLayout, formats: Formats | None = None, dtype: torch.dtype | None = None
) -> ConversionPlan:
    """Return the plan that moves what `ckpt` holds to the tensors of an expert layout, passthrough tensors included.

    formats: grouped-layout names of the parameters that are in fields on both sides. dtype: see `make_plan`.
    """
    return make_plan(
        ckpt.tensors,
        ckpt.namespace,
        te_namespace(ckpt.config, layout, formats),
        where=str(ckpt.path),
        dtype=dtype,
        unused=ckpt.unused,
        passthrough=our_names(ckpt.passthrough),
    )
