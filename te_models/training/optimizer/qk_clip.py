"""QK-clip (Kimi K2, arXiv 2507.20534, section 2.1): attention logits that grew too large are taken back in the weights.

A training pass notes the largest logit of each head, max over the queries i and keys j of a row of scale q_i k_j, pairs
that the mask hides included. After the optimizer's step, a head whose largest logit S is above the threshold gets a
factor f = threshold / S on its logits: f^(1/2) on the rows of its queries and of its keys. Of latent attention, f^(1/2)
on the unrotated rows of queries and keys and f on the rotated rows of queries, for the rotated part of the keys
is one for all heads. Heads that share keys get the smallest of their f as f^(1/2) on these, and what is left on their
queries, so that the logits of each head are scaled by its own factor.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from te_models.layers.tensor.fsdp import local_part

from ...config import ConfigError, ModelConfig
from ...model.mixers.attention import SelfAttention
from ...model.mixers.latent_attention import LatentAttention
from ..ranks.data_parallel import Ranks, largest_over_ranks
from .whole_matrix import own_shard

if TYPE_CHECKING:
    from ...model import GPTModel
    from .adamw import Optimizer

_STATE = ("master", "z", "y")
"""Entries of an optimizer's state that are weights, too."""


def check_qk_clip(model: ModelConfig) -> None:
    """Raise ConfigError, naming the layer, for a mixer whose logits no factors on rows of weights scale."""
    for layer in range(model.num_layers):
        mixer, attention = model.mixer_of(layer), model.attention_of(layer)
        why = ""
        if mixer is not None:
            why = f"has the mixer {type(mixer).__name__.removesuffix('Config')}, which has no attention logits"
        elif attention is not None:
            latent = attention.mla is not None
            parts = {
                "attention.qk_layernorm": attention.qk_layernorm != "none" and not latent,
                "attention.indexer": attention.indexer is not None,
                "attention.compressed": getattr(attention, "compressed", None) is not None,
                "attention.key_is_value": attention.key_is_value,
                "attention.clip_qkv": attention.clip_qkv is not None,
                "kv_source_layers": model.kv_source(layer) is not None or model.is_kv_source(layer),
                "embedding.position_embedding_type = 'alibi'": model.embedding.position_embedding_type == "alibi",
            }
            found = [name for name, used in parts.items() if used]
            why = f"has {found[0]}, with which rows of weights do not scale the logits of a head alone" if found else ""
        if why:
            raise ConfigError(
                f"optimizer.qk_clip_threshold is set, and layer {layer} {why}; allowed: attention with projections of "
                "its own, or no threshold"
            )


class QKClip:
    """The attentions of a model, whose logits are noted from now on. ranks: those with other data and the same heads;
    everyone: all of the run."""

    def __init__(self, model: GPTModel, threshold: float, ranks: Ranks, everyone: Ranks) -> None:
        self._threshold, self._ranks, self._everyone = threshold, ranks, everyone
        modules = {m: name for part in (model, *_stages(model)) for name, m in part.named_modules()}
        self._layers = {name: m for m, name in modules.items() if isinstance(m, SelfAttention | LatentAttention)}
        for attention in self._layers.values():
            core, weight = attention.core_attention, next(attention.parameters())
            heads = core.num_attention_heads
            core.max_logits = torch.zeros(heads, dtype=torch.float32, device=weight.device)

    @torch.no_grad()
    def step(self, optimizer: Optimizer, *, skipped: bool) -> dict[str, float | None]:
        """Scale weights after a step, and begin to note again. Collective over the ranks.

        skipped: nothing changes. Returns metrics, the same on all ranks: the largest logit, and how many heads are
        clipped, of the rank with the most.
        """
        noted: list[Any] = [a.core_attention.max_logits for a in self._layers.values()]
        together = torch.cat(noted) if noted else torch.zeros(1, dtype=torch.float32, device="cpu")
        if self._ranks.world_size > 1:
            dist.all_reduce(together, op=dist.ReduceOp.MAX, group=self._ranks.group)
        clips = (together > self._threshold) & torch.isfinite(together)
        factors = torch.where(clips, self._threshold / together, 1.0)
        largest, clipped = largest_over_ranks(torch.stack([together.max(), clips.sum()]), self._everyone).tolist()
        if not skipped and bool(clips.any()):
            names = {p: name for name, p in optimizer.parameters.items()}
            for attention, own in zip(self._layers.values(), factors.split([len(n) for n in noted]), strict=True):
                for parameter, rows in _rows(attention, own):
                    _scale(parameter, rows, optimizer, names)
        for logits in noted:
            logits.zero_()
        return {"max_attention_logit": largest if math.isfinite(largest) else None, "clipped_heads": int(clipped)}


def _stages(model: GPTModel) -> list[nn.Module]:
    return [stage.model for stage in model.pipeline_stages]


def _rows(attention: SelfAttention | LatentAttention, factors: Tensor) -> Iterator[tuple[Any, Tensor]]:
    """Yield the parameters whose rows are scaled, each with the factors of this rank's rows, before FSDP2 cuts them."""
    root = factors.sqrt()
    if isinstance(attention, SelfAttention):
        smallest = factors.view(attention.num_groups, -1).amin(1)
        queries = factors / smallest.sqrt().repeat_interleave(attention.num_heads // attention.num_groups)
        found = [queries, smallest.sqrt()]
        rows = torch.cat([f.repeat_interleave(attention.head_dim) for f in found])
        joined: Any = attention.linear_qkv
        for parameter in (joined.weight, joined.bias, attention.qkv_bias):
            if parameter is not None and parameter.numel():
                yield parameter, torch.cat([rows, rows.new_ones(parameter.shape[0] - len(rows))])
        return
    mla = attention.mla
    of_query = (root[:, None].expand(-1, mla.qk_head_dim), factors[:, None].expand(-1, mla.qk_pos_emb_head_dim))
    queries = torch.cat(of_query, 1).flatten()
    if attention.linear_q_up is not None:
        yield attention.linear_q_up.weight, queries
    else:
        others = queries.new_ones(sum(attention.sizes) - len(queries))
        yield attention.linear_qkv_down.weight, torch.cat([queries, others])
    keys = root[:, None].expand(-1, mla.qk_head_dim)
    yield attention.linear_kv_up.weight, torch.cat([keys, root.new_ones(len(root), mla.v_head_dim)], 1).flatten()


def _scale(parameter: nn.Parameter, rows: Tensor, optimizer: Optimizer, names: dict[nn.Parameter, str]) -> None:
    """Multiply rows of a parameter, and of what the optimizer keeps of its values, by factors."""
    own = own_shard(parameter, rows.view(-1, *[1] * (parameter.dim() - 1)))
    state = optimizer.entries(names[parameter])
    weights = [local_part(state[name]) for name in _STATE if name in state]
    for weight in weights:
        if weight.data_ptr() != local_part(parameter).data_ptr():
            weight.mul_(own)
    if "master" in state:
        local_part(parameter).copy_(local_part(state["master"]))
    else:
        local_part(parameter).copy_(local_part(parameter).float() * own)
