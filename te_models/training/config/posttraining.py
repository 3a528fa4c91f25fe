"""The table [posttraining]: what a trained model learns from beside text, or in place of it."""

from dataclasses import dataclass
from typing import Literal

from ...config import ConfigPart, check


@dataclass(frozen=True, kw_only=True)
class PosttrainingConfig(ConfigPart):
    """Learning from preference pairs (direct preference optimization, DPO, arXiv 2305.18290): answers that were chosen
    become likelier than those that were rejected, measured against the starting weights, the reference.

    The reference is a frozen copy of the model in model.path, or with lora.rank the model without its adapters. Or
    learning from a teacher (distillation, arXiv 1503.02531): what it says of every next token, beside the text."""

    method: Literal["none", "dpo", "distill"] = "none"
    """What is minimised: the cross entropy of the text (none), the loss of preference pairs (dpo), or the divergence
    from a teacher beside the cross entropy (distill)."""
    teacher: str | None = None
    """Folder of the teacher of distillation, te_models' or Hugging Face's, also with quantized weights: a model of the
    same vocabulary; it is not trained."""
    temperature: float = 1.0
    """Number that the logits of teacher and model are divided by in distillation; the divergence is multiplied by its
    square."""
    alpha: float = 0.5
    """Share of the teacher in the loss of distillation; 1 - alpha is the share of the text."""
    beta: float = 0.1
    """How closely the model stays to the reference: a difference of log-probabilities times beta is a reward."""
    loss_type: Literal["sigmoid", "ipo"] = "sigmoid"
    """Loss of a pair: minus the log-sigmoid of the difference of its rewards (sigmoid), or the squared distance of the
    difference of mean log-probabilities from 1 / (2 beta) (ipo, arXiv 2310.12036)."""
    label_smoothing: float = 0.0
    """Probability with which a pair is the wrong way round (conservative DPO), of the loss sigmoid; below 0.5."""

    def _validate(self) -> None:
        distills, teacher = self.method == "distill", self.teacher
        allowed = "a folder with posttraining.method = 'distill', and unset otherwise"
        check(distills == (teacher is not None), "posttraining.teacher", teacher, allowed)
        check(self.temperature > 0, "posttraining.temperature", self.temperature, "a positive number")
        check(0 <= self.alpha <= 1, "posttraining.alpha", self.alpha, "0 <= alpha <= 1")
        check(self.beta > 0, "posttraining.beta", self.beta, "a positive number")
        smoothing, where = self.label_smoothing, "posttraining.label_smoothing"
        check(0 <= smoothing < 0.5, where, smoothing, "0 <= label_smoothing < 0.5")
        check(
            not smoothing or self.loss_type == "sigmoid",
            where,
            smoothing,
            "0 unless posttraining.loss_type is 'sigmoid'",
        )
