"""What a training run takes of each rank, in any layout, without the machines: memory, FLOPs, bytes of collectives."""

from .layouts import Estimated, Refused, plan_layouts
from .process import plan_run
from .result import Hardware, Plan

__all__ = ["Estimated", "Hardware", "Plan", "Refused", "plan_layouts", "plan_run"]
