"""Log-probabilities of given tokens under a model: what preference losses, policy gradients and scores are made of."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from te_models.kernels.cross_entropy import IGNORE_INDEX
from te_models.kernels.packed_attention import first_positions

if TYPE_CHECKING:
    from .gpt import GPTModel


def logprobs(
    model: Any,
    tokens: Tensor,
    labels: Tensor | None = None,
    *,
    attention_mask: Tensor | None = None,
    document_ids: Tensor | None = None,
    position_ids: Tensor | None = None,
    inputs_embeds: Tensor | None = None,
) -> Tensor:
    """Return the log-probability of each label, float32 [B, S]: at position s that of labels[s + 1] given the tokens up
    to s; 0 where a label does not count, and at the last position.

    model: a `GPTModel`, whole or divided among ranks, its last pipeline stage, or a `TEModelForCausalLM`. tokens:
    [B, S] int64. labels: [B, S] int64, -100 where a token does not count (None: the tokens). attention_mask: [B, S],
    0 where a row is padded, on either side; document_ids: [B, S] int64 in its place, of packed rows: neighbours with
    the same number are a document, negative numbers padding. Padding counts nothing, nor does the first token of a row
    or document, because nothing predicts it. position_ids: [B or 1, S] (None: counting on in each row or document).
    inputs_embeds: [B, S, H], what the stage before a last stage returned.

    Logits exist of `loss_chunk_tokens` tokens of the output layer (None: 1024) and 32,768 words at a time, in both
    passes. Differentiable once; in float64 of a float64 model. Where ranks split layers or share sequences, all of them
    get the result of all tokens; with a pipeline, the ranks of the last stage. Raises ValueError for shapes that do not
    fit, and for a stage that is not the last one.

    Example:
        logprobs(model, tokens, labels).sum(-1)  # of each row
    """
    gpt: GPTModel = getattr(model, "gpt", model)
    if not gpt.post_process:
        raise ValueError("logprobs is asked of a pipeline stage without the output layer; allowed: the last stage")
    labels = tokens if labels is None else labels
    for name, value in {"labels": labels, "attention_mask": attention_mask, "document_ids": document_ids}.items():
        if value is not None and value.shape != tokens.shape:
            raise ValueError(f"{name} has shape {list(value.shape)}; allowed: {list(tokens.shape)}, as tokens")
    if attention_mask is not None and document_ids is not None:
        raise ValueError("attention_mask and document_ids are both given; allowed: one of them")
    numbers = document_ids
    if attention_mask is not None:
        real = attention_mask.bool()
        numbers = torch.where(real, 0, -1)
    if numbers is not None:
        within = torch.arange(tokens.shape[1], device=tokens.device) - first_positions(numbers)
        labels = torch.where((within == 0) | (numbers < 0), IGNORE_INDEX, labels)
        position_ids = within if position_ids is None else position_ids
    found = gpt(
        tokens if inputs_embeds is None else None,
        labels,
        inputs_embeds=inputs_embeds,
        position_ids=position_ids,
        attention_mask=attention_mask,
        document_ids=document_ids,
        return_logits=False,
        return_logprobs=True,
    ).logprobs
    return found
