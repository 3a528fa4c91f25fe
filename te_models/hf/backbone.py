"""The model without its output layer, for trainers that apply that layer themselves, as TRL's do."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..extras import require
from .cache import CACHE

if TYPE_CHECKING:
    from transformers import modeling_outputs

    from .model import TEModelForCausalLM
else:
    modeling_outputs = require("transformers", "hf", feature="te_models.hf").modeling_outputs


class Backbone:
    """What `TEModelForCausalLM.base_model` returns: called with the model's arguments but `labels` and those that
    choose what is returned, it returns hidden states in place of logits.

    Not a module, for the model's parameters have one name each.
    """

    _tp_plan: dict[str, str] | None = None
    _pp_plan: dict[str, Any] | None = None
    """transformers asks its base models for plans of transformers' parallelism."""

    def __init__(self, owner: TEModelForCausalLM) -> None:
        self._owner = owner

    def __call__(self, *args: Any, **kwargs: Any) -> modeling_outputs.BaseModelOutputWithPast:
        """Return `last_hidden_state` [B, S, H], the output of the last layer after the final norm, and the cache.

        Raises ValueError in training mode where the model's own loss has terms beside the cross entropy (router losses,
        further predicted tokens, the z-loss of the logits): a loss made of hidden states would leave them out.
        """
        terms = self._further_terms() if self._owner.training and torch.is_grad_enabled() else ()
        if terms:
            raise ValueError(
                f"a loss computed from base_model leaves out {' and '.join(terms)} of this model's loss; allowed: "
                "the loss that the model returns for labels (in a subclass of TRL's SFTTrainer, compute_loss = "
                "transformers.Trainer.compute_loss), or a model without these terms, as "
                "model.gpt.set_aux_loss_coeff(0.0) makes it"
            )
        owner = self._owner
        only = {"labels": None, "logits_to_keep": 1, "output_hidden_states": True, "return_dict": True}
        # of the class: a trainer may have put its own forward in the place of the instance's, and calls this one
        output: Any = type(owner).forward(owner, *args, **kwargs, **only)
        found = {"last_hidden_state": output.hidden_states[-1], CACHE: getattr(output, CACHE)}
        return modeling_outputs.BaseModelOutputWithPast(**found)

    def _further_terms(self) -> list[str]:
        gpt = self._owner.gpt
        weights = gpt.router_loss_weights
        terms = {
            "the router losses": weights is not None and any(weights.values.values()),
            "the loss of further predicted tokens": gpt.mtp is not None,
            "the z-loss of the logits": gpt.output_layer.logits_z_loss_coeff != 0,
        }
        return [term for term, present in terms.items() if present]


def output_embeddings(output_layer: nn.Module, embedding: nn.Module, *, shared: bool) -> nn.Module:
    """Return a module with the `weight` [V, H] and the `bias` of the output layer: the layer itself, or, where it
    shares the embedding's weight, the embedding: a module of the model, as peft's "all-linear" wants it, without a
    bias; only where the output layer has one, a linear layer of both."""
    if not shared:
        return output_layer
    if output_layer.bias is None:
        return embedding
    weight: Any = embedding.weight
    words, hidden = weight.shape
    linear = nn.Linear(hidden, words, bias=False, device="meta")
    linear.weight = weight
    linear.bias = output_layer.bias  # type: ignore[assignment]
    return linear
