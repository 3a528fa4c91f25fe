"""`FP8GlobalStateManager`: what is in force, under the names by which programs of Transformer Engine ask."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..module.delayed_scaling import update_delayed_scaling
from ..recipe.base import Recipe
from ..recipe.context import state
from ..recipe.recipes import Float8CurrentScaling

if TYPE_CHECKING:
    import torch.distributed as dist


class FP8GlobalStateManager:
    """Questions about the regions of this thread, and the update of delayed scaling. What is in force is changed by
    `autocast`, `quantized_model_init` and `microbatch`, and by nothing else."""

    @classmethod
    def is_fp8_enabled(cls) -> bool:
        """Whether layers run under a recipe now."""
        return state().compute is not None and not state().calibrating

    @classmethod
    def is_fp8_calibration(cls) -> bool:
        """Whether layers are calibrated now."""
        return state().calibrating

    @classmethod
    def with_fp8_parameters(cls) -> bool:
        """Whether new layers store their weights quantized now."""
        return state().storage is not None

    @classmethod
    def with_high_precision_init_val(cls) -> bool:
        """Whether new layers preserve the initial values of weights that they store quantized now."""
        return state().preserve_init_val

    @classmethod
    def get_fp8_recipe(cls) -> Recipe:
        """Return the recipe in force, for what layers compute or else for what they store, or else the default one."""
        return state().compute or state().storage or Float8CurrentScaling()

    @classmethod
    def get_fp8_group(cls) -> dist.ProcessGroup | None:
        """Return the amax reduction group of the region."""
        return state().amax_reduction_group

    @classmethod
    def fp8_graph_capturing(cls) -> bool:
        """Return False: graphs are `torch.compile`'s."""
        return False

    @classmethod
    def reset(cls) -> None:
        """Do nothing outside of regions, after which nothing is in force; RuntimeError inside of one."""
        if state().depth or state().entered:
            raise RuntimeError("reset() inside of a region; leave autocast and quantized_model_init before")

    @classmethod
    def reduce_and_update_fp8_tensors(cls, forward: bool = True) -> None:
        """Update delayed scaling of all layers now, see `update_delayed_scaling`; both directions at once."""
        update_delayed_scaling(group=cls.get_fp8_group())

    @classmethod
    def is_fp8_available(cls) -> tuple[bool, str]:
        """Return (True, ""): every recipe runs on every device."""
        return True, ""

    is_mxfp8_available = is_fp8_block_scaling_available = is_nvfp4_available = is_fp8_available

    @staticmethod
    def get_meta_tensor_key(forward: bool = True) -> str:
        """Return the key of a direction in `fp8_meta`."""
        return "scaling_fwd" if forward else "scaling_bwd"

    @staticmethod
    def get_fwd_bwd_key(forward: bool = True) -> str:
        """Return the name of a direction."""
        return "forward" if forward else "backward"
