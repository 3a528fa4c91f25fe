"""The table [posttraining]: what a trained model learns from beside text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ...config import ConfigPart, check


@dataclass(frozen=True, kw_only=True)
class PosttrainingConfig(ConfigPart):
    """Learning from preference pairs (direct preference optimization, DPO, arXiv 2305.18290): answers that were chosen
    become likelier than those that were rejected, measured against the starting weights, the reference.

    The reference is a frozen copy of the model in model.path, or with lora.rank the model without its adapters."""

    method: Literal["none", "dpo"] = "none"
    """What is minimised: the cross entropy of the text (none), or the loss of preference pairs (dpo)."""
    beta: float = 0.1
    """How closely the model stays to the reference: a difference of log-probabilities times beta is a reward."""
    loss_type: Literal["sigmoid", "ipo"] = "sigmoid"
    """Loss of a pair: minus the log-sigmoid of the difference of its rewards (sigmoid), or the squared distance of the
    difference of mean log-probabilities from 1 / (2 beta) (ipo, arXiv 2310.12036)."""
    label_smoothing: float = 0.0
    """Probability with which a pair is the wrong way round (conservative DPO), of the loss sigmoid; below 0.5."""

    def _validate(self) -> None:
        check(self.beta > 0, "posttraining.beta", self.beta, "a positive number")
        smoothing, where = self.label_smoothing, "posttraining.label_smoothing"
        check(0 <= smoothing < 0.5, where, smoothing, "0 <= label_smoothing < 0.5")
        check(
            not smoothing or self.loss_type == "sigmoid",
            where,
            smoothing,
            "0 unless posttraining.loss_type is 'sigmoid'",
        )
