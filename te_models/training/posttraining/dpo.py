"""Direct preference optimization (DPO, arXiv 2305.18290) and IPO (arXiv 2310.12036), with TRL's definitions.

Of a pair, log pi(y) is the sum of the log-probabilities of an answer's tokens given what is before them, the mean for
IPO, and h is (log pi - log ref)(chosen) - (log pi - log ref)(rejected):

    sigmoid   -(1 - label_smoothing) log sigmoid(beta h) - label_smoothing log sigmoid(-beta h)
    ipo       (h - 1 / (2 beta))^2

A reward is beta (log pi - log ref). A batch has the rows chosen, rejected, chosen, rejected and so on.
"""

from collections.abc import Callable
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from te_models.kernels.cross_entropy import IGNORE_INDEX

from ...compile.compile_model import Mode
from ...model import GPTModel
from ..config import PosttrainingConfig
from ..data.windows import Batch
from ..objective import Objective
from .frozen import frozen_runner


def dpo_losses(log_probs: Tensor, reference: Tensor, config: PosttrainingConfig) -> tuple[Tensor, Tensor, Tensor]:
    """Return the loss of each pair, and the rewards of its chosen and its rejected answer, [pairs] each.

    log_probs, reference: of the rows of a batch, [2 pairs]."""
    ratios = log_probs - reference
    chosen, rejected = ratios[0::2], ratios[1::2]
    h, beta, smoothing = chosen - rejected, config.beta, config.label_smoothing
    if config.loss_type == "ipo":
        losses = (h - 1 / (2 * beta)) ** 2
    else:
        losses = -F.logsigmoid(beta * h) * (1 - smoothing) - F.logsigmoid(-beta * h) * smoothing
    return losses, beta * chosen.detach(), beta * rejected.detach()


def row_log_probs(
    model: GPTModel, input_ids: Tensor, labels: Tensor | None, *, mean: bool
) -> tuple[Tensor, Tensor | None]:
    """Return the sum, or the mean, of the log-probabilities of each row's labels, float32 [rows], and the loss of the
    routers where there is one."""
    labels = input_ids if labels is None else labels
    output = model(input_ids, labels, return_logits=False, return_logprobs=True)
    assert output.logprobs is not None
    found = output.logprobs.sum(-1)
    if mean:
        found = found / (labels[:, 1:] != IGNORE_INDEX).sum(-1).clamp(min=1)
    return found, output.aux_loss


class DPO(Objective):
    """The mean loss of preference pairs. reference: returns the log-probabilities of a batch's rows under the starting
    weights; see `reference_of`."""

    metrics: ClassVar[tuple[str, ...]] = (
        "rewards/chosen",
        "rewards/rejected",
        "rewards/margins",
        "rewards/accuracies",
    )
    weighs_tokens = False

    def __init__(self, config: PosttrainingConfig, reference: Callable[[Batch], Tensor]) -> None:
        self._config, self._reference = config, reference

    def inputs(self, batch: Batch) -> dict[str, Tensor]:
        """See `Objective`."""
        return {"reference": self._reference(batch)}

    def loss(self, model: GPTModel, batch: Batch, weight: Tensor | None, **inputs: Tensor) -> tuple[Tensor, Tensor]:
        """See `Objective`."""
        mean = self._config.loss_type == "ipo"
        found, aux_loss = row_log_probs(model, batch.input_ids, batch.labels, mean=mean)
        losses, chosen, rejected = dpo_losses(found, inputs["reference"], self._config)
        loss, none = losses.mean(), torch.zeros_like(losses[0])
        aux_loss = none if aux_loss is None else aux_loss
        numbers = (chosen, rejected, chosen - rejected, (chosen > rejected).float())
        terms = [aux_loss, none, none, *(number.mean() for number in numbers)]
        return loss + aux_loss, torch.stack(terms).detach()


def reference_of(
    model: GPTModel,
    copy: GPTModel | None,
    config: PosttrainingConfig,
    *,
    compiled: bool,
    mode: Mode = "whole",
) -> Callable[[Batch], Tensor]:
    """Return what computes the log-probabilities of the reference: of the starting weights in `copy`, or, where that is
    None, of `model` without its adapters. compiled, mode: as for `make_loss_function`; that compiles the layers of
    `model` with the mode "block"."""
    reference = model if copy is None else copy
    mean = config.loss_type == "ipo"

    def log_probs(input_ids: Tensor, labels: Tensor | None, *_: Tensor | None) -> Tensor:
        return row_log_probs(reference, input_ids, labels, mean=mean)[0]

    return frozen_runner(reference, log_probs, trained=copy is None, compiled=compiled, mode=mode)
