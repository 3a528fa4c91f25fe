"""The mixture-of-experts router: which experts each token uses, how much, and the losses that keep the choice even."""

from .op import router_topk
from .reference import (
    joint_shares,
    load_balancing_loss,
    mean_probabilities,
    router_probabilities,
    router_z_loss,
    weights_of,
)

__all__ = [
    "joint_shares",
    "load_balancing_loss",
    "mean_probabilities",
    "router_probabilities",
    "router_topk",
    "router_z_loss",
    "weights_of",
]
