"""Balance of experts without an auxiliary loss, in training with transformers' Trainer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from ..extras import require
from ..model.expert_bias import UPDATE_RATE, biases_and_counts, check_rate, update_expert_bias

if TYPE_CHECKING:
    import transformers
else:
    transformers = require("transformers", "hf", feature="te_models.hf")


class ExpertBiasCallback(transformers.TrainerCallback):
    """Calls `te_models.update_expert_bias` after each optimizer step of Trainer, on all of its processes.

    A step that the gradient scaler of float16 skips moves nothing. The biases are part of Trainer's checkpoints, as all
    weights are.

    rate: by how much each step moves each bias.

    Example:
        transformers.Trainer(model, arguments, train_dataset=data, callbacks=[ExpertBiasCallback(1e-3)])

    Raises ValueError for a negative or infinite rate, and when training begins, for a model without expert bias.
    """

    def __init__(self, rate: float = UPDATE_RATE) -> None:
        check_rate(rate)
        self.rate = rate

    def on_train_begin(self, args: Any, state: Any, control: Any, *, model: torch.nn.Module, **_: Any) -> None:
        """Look for the biases now, and not after the first step."""
        biases_and_counts(model)

    def on_optimizer_step(
        self, args: Any, state: Any, control: Any, *, model: torch.nn.Module, optimizer: Any, **_: Any
    ) -> None:
        """Update the biases."""
        skipped = getattr(optimizer, "step_was_skipped", False)  # accelerate's wrapper knows
        update_expert_bias(model, 0.0 if skipped else self.rate)
