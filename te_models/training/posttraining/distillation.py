"""Distillation (arXiv 1503.02531): a model learns what a teacher says of every next token, beside the text itself.

    loss = alpha tau^2 KL(teacher || student) + (1 - alpha) cross entropy

with both distributions at the temperature tau, whose square keeps the gradients' size (section 2 there). The mean is
over the predictions that the loss of the text counts. The teacher is frozen, computes without the run's recipe, and may
have quantized weights.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from te_models.checkpoints import open_checkpoint
from te_models.kernels.cross_entropy import IGNORE_INDEX, linear_kl, shift_labels

from ...compile.compile_model import Mode
from ...config import ConfigError, ModelConfig
from ...model import GPTModel
from ..build import DTYPES
from ..config import TrainConfig
from ..data.windows import Batch
from ..objective import TERMS, Objective, terms_of
from .frozen import frozen_runner

_TOKENIZER = "tokenizer.json"


def check_teacher(config: TrainConfig, model: ModelConfig) -> None:
    """Raise ConfigError where the teacher has another vocabulary than the student, or fewer positions than a window.

    Token ids are compared where both folders, or `data.tokenizer`, have a tokenizer.json."""
    folder = Path(str(config.posttraining.teacher))
    where = f"posttraining.teacher is {folder}"
    if not folder.is_dir():
        raise ConfigError(
            f"{where}: there is no such folder; allowed: a te_models or Hugging Face folder, such as "
            "`te-models import` makes of a hub id"
        )
    with open_checkpoint(folder, verify=False) as opened:
        teacher = opened.config
    if teacher.vocab_size != model.vocab_size:
        raise ConfigError(
            f"{where}, which has {teacher.vocab_size:,} words; allowed: a teacher with the {model.vocab_size:,} of the "
            "model"
        )
    if teacher.max_position_embeddings < config.data.sequence_length:
        raise ConfigError(
            f"{where}, which has {teacher.max_position_embeddings} positions; allowed: as many as "
            f"data.sequence_length, {config.data.sequence_length}, or more"
        )
    for own in (config.data.tokenizer, config.model.path):
        files = (folder / _TOKENIZER, Path(str(own)) / _TOKENIZER)
        if own is None or not all(file.is_file() for file in files):
            continue
        theirs, ours = map(_words, files)
        other = next((word for word in sorted(theirs.keys() | ours.keys()) if theirs.get(word) != ours.get(word)), None)
        if other is not None:
            raise ConfigError(
                f"{where}, whose tokenizer has {other!r} as {theirs.get(other)}, and {own} as {ours.get(other)}; "
                "allowed: a teacher of the same tokenizer"
            )
        return


def _words(file: Path) -> dict[str, Any]:
    """Return the ids of a tokenizer.json by word."""
    try:
        read = json.loads(file.read_text(encoding="utf-8"))
        vocabulary = read["model"]["vocab"]
        if isinstance(vocabulary, list):  # Unigram: words with their scores
            vocabulary = {word: number for number, (word, _) in enumerate(vocabulary)}
        return {**vocabulary, **{token["content"]: token["id"] for token in read.get("added_tokens") or ()}}
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise ConfigError(f"{file} is no tokenizer: {error}") from None


def load_teacher(config: TrainConfig, device: str) -> GPTModel:
    """Return the frozen teacher of a run, its weights as the folder stores them."""
    folder, dtype = str(config.posttraining.teacher), DTYPES[config.precision.dtype]
    teacher = GPTModel.from_pretrained(folder, dtype=dtype, device=device, verify=config.model.verify)
    return teacher.eval().requires_grad_(False)


class Distillation(Objective):
    """The loss of a student beside a teacher; see the module."""

    metrics: ClassVar[tuple[str, ...]] = ("distillation/kl", "distillation/cross_entropy")

    def __init__(self, config: TrainConfig, teacher: GPTModel, *, compiled: bool, mode: Mode = "whole") -> None:
        self._temperature, self._alpha = config.posttraining.temperature, config.posttraining.alpha
        self._teacher = teacher
        self._hidden: Callable[[Batch], Tensor] = frozen_runner(
            teacher, self._last_hidden, trained=False, compiled=compiled, mode=mode, with_recipe=False
        )

    def _last_hidden(self, *fields: Tensor) -> Tensor:
        batch, returned = Batch(*fields), {"return_logits": False, "return_hidden_states": True}
        states = self._teacher(batch.input_ids, **returned, **batch.places).hidden_states
        assert states is not None
        return states[-1]

    def inputs(self, batch: Batch) -> dict[str, Tensor]:
        """See `Objective`: what the output layer of the teacher reads, [B, S, H]."""
        return {"teacher": self._hidden(batch)}

    def loss(self, model: GPTModel, batch: Batch, weight: Tensor | None, **inputs: Tensor) -> tuple[Tensor, Tensor]:
        """See `Objective`."""
        labels, returned = batch.scored_labels, {"return_logits": False, "return_hidden_states": True}
        output = model(batch.input_ids, labels=labels, **returned, **batch.places)
        assert output.hidden_states is not None
        aux_loss, mtp_loss, z_loss = terms_of(model, output)
        cross_entropy = output.loss - aux_loss - mtp_loss - z_loss
        counts = (shift_labels(labels) != IGNORE_INDEX).flatten()
        each = self._divergence(model, output.hidden_states[-1], inputs["teacher"])
        kl = torch.where(counts, each, 0.0).sum() / counts.sum().clamp(min=1)
        mixed = self._alpha * self._temperature**2 * kl + (1 - self._alpha) * cross_entropy
        of_tokens = torch.stack([mtp_loss, z_loss, kl, cross_entropy])
        if weight is not None:
            of_tokens = of_tokens * weight
        loss = mixed + mtp_loss + z_loss
        loss = (loss if weight is None else loss * weight) + aux_loss
        terms = torch.cat([aux_loss[None], of_tokens]).detach()
        assert len(terms) == TERMS + len(self.metrics)
        return loss, terms

    def _divergence(self, model: GPTModel, hidden: Tensor, teacher_hidden: Tensor) -> Tensor:
        """Return the KL of each token, [B S]."""
        operands: list[Any] = []
        for one, states in ((model, hidden), (self._teacher, teacher_hidden)):
            operands += one.output_layer.operands(states, one.shared_output_weight)
        heads = model.config.embedding, self._teacher.config.embedding
        return linear_kl(
            *operands,
            temperature=self._temperature,
            multipliers=(heads[0].logits_multiplier, heads[1].logits_multiplier),
            softcaps=(heads[0].logits_softcap, heads[1].logits_softcap),
            chunk_tokens=model.output_layer.loss_chunk_tokens,
        )
