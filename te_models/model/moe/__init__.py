"""A mixture of experts, one idea per file.

layer     MoELayer: route, dispatch, compute, combine; the router's losses     experts      MLPs, one grouped GEMM each
router    the router, what it decided, and its counts                          dispatch     how tokens reach experts
expert_bias  balance of experts over the global batch          replay       the choices of sampling, again in training
"""

from .dispatch import DeepEPDispatcher, Dispatcher
from .expert_bias import ExpertLoad, take_expert_load, update_expert_bias
from .experts import Experts
from .layer import MoELayer
from .replay import RouterRecord, record_call
from .router import Router, RouterOutput, load_balancing_losses

__all__ = [
    "DeepEPDispatcher",
    "Dispatcher",
    "ExpertLoad",
    "Experts",
    "MoELayer",
    "Router",
    "RouterOutput",
    "RouterRecord",
    "load_balancing_losses",
    "record_call",
    "take_expert_load",
    "update_expert_bias",
]
