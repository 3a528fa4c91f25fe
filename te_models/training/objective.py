"""What a run minimises. A step, a validation and the compiler know no more of a loss than what is declared here.

`Objective` is the cross entropy of next tokens. Another objective is a subclass: it says what it computes before the
graph of the model runs (`inputs`, of another model, say), the loss, and which numbers of it the metrics show.
"""

from typing import ClassVar

import torch
from torch import Tensor

from ..model import GPTModel, ModelOutput
from .data.windows import Batch

TERMS = 3
"""What a loss adds to the number that is reported: the terms of routers, of further tokens, and of the logits."""


class Objective:
    """The mean cross entropy of the labels."""

    metrics: ClassVar[tuple[str, ...]] = ()
    """Names of the numbers that `loss` returns behind its terms."""
    weighs_tokens: ClassVar[bool] = True
    """Whether the loss of a step is the mean over its scored tokens; false: over its windows."""

    def inputs(self, batch: Batch) -> dict[str, Tensor]:
        """Return what `loss` takes of a batch beside its fields, computed without gradients."""
        return {}

    def loss(self, model: GPTModel, batch: Batch, weight: Tensor | None, **inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Return the loss to minimise, a float32 scalar, and float32 [TERMS + metrics]: the terms in it, then the
        metrics. weight: a float32 scalar that everything but the term of the routers is multiplied by; None: 1."""
        output = model(batch.input_ids, labels=batch.scored_labels, return_logits=False, **batch.places)
        aux_loss, mtp_loss, z_loss = terms_of(model, output)
        further = torch.stack([mtp_loss, z_loss])
        loss = output.loss if weight is None else (output.loss - aux_loss) * weight + aux_loss
        return loss, torch.cat([aux_loss[None], further if weight is None else further * weight]).detach()


def terms_of(model: GPTModel, output: ModelOutput) -> tuple[Tensor, Tensor, Tensor]:
    """Return what is in a model's loss beside the cross entropy, zero where there is none: the terms of routers, of
    further tokens, and of the logits."""
    assert output.loss is not None, "labels have been there"
    none = torch.zeros_like(output.loss)
    aux_loss = none if output.aux_loss is None else output.aux_loss
    mtp_loss = none if output.mtp_loss is None else output.mtp_loss * model.config.mtp_loss_scaling_factor
    return aux_loss, mtp_loss, none if output.logits_z_loss is None else output.logits_z_loss
