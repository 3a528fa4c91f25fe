"""Token embedding, with the learned position embedding where the family has one."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from te_models.kernels.compiling import compiling
from te_models.kernels.embedding import embedding
from te_models.layers.distributed.sequence_parallel import norm_own_tokens, own_tokens
from te_models.layers.distributed.tensor_parallel import TensorParallelModule
from te_models.layers.distributed.vocab_parallel import vocab_parallel_embedding
from te_models.layers.gemm.wgrad import main_grad_of
from te_models.layers.tensor.fsdp import sharded

from ..config import ModelConfig, reads_tokens
from .build import Build, WordsOfRank, init_method, make_norm

if TYPE_CHECKING:
    from .gpt import GPTModel


def check_masks(
    attention_mask: Tensor | None, document_ids: Tensor | None, size: tuple[int, int], begin: int, *, cached: bool
) -> None:
    """Raise ValueError for masks and document numbers that do not fit a call of [B, S] = size tokens behind `begin`
    cached ones. cached: whether there is a cache, with which document numbers do not go."""
    batch, length = size
    if attention_mask is not None:
        keys = begin + length
        if tuple(attention_mask.shape) not in ((batch, keys), (batch, length, keys)):
            raise ValueError(
                f"attention_mask has shape {tuple(attention_mask.shape)}; allowed: [{batch}, {keys}] or "
                f"[{batch}, {length}, {keys}]"
            )
    if document_ids is not None:
        if tuple(document_ids.shape) != size:
            raise ValueError(f"document_ids has shape {tuple(document_ids.shape)}; allowed: [{batch}, {length}]")
        if attention_mask is not None or cached:
            raise ValueError("document_ids are given with an attention_mask or a cache; allowed: without")


def input_size(input_ids: Tensor | None, inputs_embeds: Tensor | None) -> tuple[int, int]:
    """Return (B, S) of what a model is to read, input_ids [B, S] or inputs_embeds [B, S, H]. Raises ValueError for none
    of the two, for both, and for another shape."""
    if (input_ids is None) == (inputs_embeds is None):
        state = "None" if input_ids is None else "given"
        raise ValueError(f"input_ids is {state} and inputs_embeds is {state}; allowed: one of the two")
    if input_ids is not None and input_ids.dim() != 2:
        raise ValueError(f"input_ids has shape {tuple(input_ids.shape)}; allowed: [batch, sequence]")
    if inputs_embeds is not None and inputs_embeds.dim() != 3:
        raise ValueError(f"inputs_embeds has shape {tuple(inputs_embeds.shape)}; allowed: [batch, sequence, hidden]")
    tokens = inputs_embeds if input_ids is None else input_ids
    assert tokens is not None
    return tokens.shape[0], tokens.shape[1]


def of_tokens(config: ModelConfig, input_ids: Tensor | None, x: Tensor) -> tuple[Tensor, Tensor] | None:
    """Return the tokens and their embeddings x, [B, S] and [B, S, H], for layers that read them; None for a model
    without. Raises ValueError where the tokens are not known."""
    if not reads_tokens(config):
        return None
    if input_ids is None:
        raise ValueError(
            "inputs_embeds are given to a model whose layers read the tokens (per_layer_embedding, moe.hash_layers); "
            "allowed: input_ids"
        )
    return input_ids, x


class EmbeddingTable(TensorParallelModule):
    """A lookup table: weight [rows, H], of which the ranks that split layers have consecutive rows each.
    padding_idx: a row that gets no gradient. fuse_wgrad_accumulation: see `te_models.layers.Linear`; set it later."""

    parallel_mode = None
    fuse_wgrad_accumulation = False
    bias: None = None
    """None: where the table is the output layer's weight, too, those who ask for both find that it has no other."""

    def __init__(self, rows: int, config: ModelConfig, build: Build, padding_idx: int | None = None) -> None:
        super().__init__()
        self.padding_idx = padding_idx
        self.set_parallel(build.tp_group, 1, build.sequence_parallel)
        self.shard = build.vocab_shard(rows)
        self.init_method = WordsOfRank(init_method(config), self.shard)
        self.weight = build.parameter(build.own_words(rows), config.hidden_size)
        self.mark_part(self.weight, None if self.shard is None else 0)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Initialise the rows again."""
        self.init_method(self.weight)

    def forward(self, ids: Tensor) -> Tensor:
        """ids: [B, S] int64 -> [B, S, H]; of a rank that has a part of the tokens only, [T / ranks, H]."""
        main_grad = main_grad_of(self.weight, self.fuse_wgrad_accumulation)
        if self.shard is None:
            return embedding(ids, self.weight, main_grad, self.padding_idx)
        ids = ids.flatten() if self.sequence_parallel else ids
        return self.summed(vocab_parallel_embedding(ids, self.weight, self.shard, main_grad, self.padding_idx), None)


class Embedding(nn.Module):
    """`word_embeddings[input_ids] * multiplier + position_embeddings[position_ids]`, and its norm where the family
    has one; positions may be computed in place of learned."""

    def __init__(self, config: ModelConfig, build: Build) -> None:
        super().__init__()
        self.config = config.embedding
        self.embedding_dropout = config.embedding_dropout
        self.sequence_shard = build.sequence_shard
        self.word_embeddings = EmbeddingTable(config.vocab_size, config, build, config.embedding.padding_idx)
        self.position_embeddings = None
        if config.embedding.position_embedding_type == "learned_absolute":
            rows = config.max_position_embeddings + config.embedding.position_offset
            self.position_embeddings = EmbeddingTable(rows, config, build.whole)
        self.layernorm = make_norm(config.norm, config.hidden_size, build) if config.embedding.layernorm else None

    def forward(self, input_ids: Tensor | None, position_ids: Tensor, inputs_embeds: Tensor | None = None) -> Tensor:
        """input_ids: [B, S], position_ids: [B or 1, S] -> [B, S, H] in the weight's dtype. inputs_embeds: [B, S, H], in
        place of `word_embeddings[input_ids]`. Under sequence parallelism this rank's tokens, [T / ranks, H]. Raises
        IndexError for an id or a position outside of its table, where that can be seen without waiting for a device."""
        if inputs_embeds is None:
            assert input_ids is not None, "input_size has looked"
            x = self.word_embeddings(input_ids)
        else:
            weight = self.word_embeddings.weight
            if inputs_embeds.shape[-1] != weight.shape[-1]:
                shape = tuple(inputs_embeds.shape)
                raise ValueError(f"inputs_embeds has shape {shape}; allowed: [batch, sequence, {weight.shape[-1]}]")
            x = self._own_tokens(inputs_embeds.to(weight.dtype), inputs_embeds.shape[0])
        multiplier = self.config.multiplier
        if multiplier == "sqrt_hidden_in_weight_dtype":
            # filled on the device: for a number from the host it would make the host wait
            x = x * torch.full((), math.sqrt(x.shape[-1]), dtype=x.dtype, device=x.device)
        elif multiplier != 1.0:
            x = x * multiplier
        if self.config.position_embedding_type in ("learned_absolute", "sinusoidal"):
            batch = (input_ids if inputs_embeds is None else inputs_embeds).shape[0]  # type: ignore[union-attr]
            x = x + self._own_tokens(self._positions(position_ids, x), batch)
        if self.layernorm is not None:
            x = norm_own_tokens(self.layernorm, x, self.sequence_shard)
        return F.dropout(x, self.embedding_dropout, self.training) if self.embedding_dropout > 0 else x

    def _own_tokens(self, x: Tensor, batch: int) -> Tensor:
        """Return x: [B or 1, S, H], or this rank's tokens of it."""
        if self.sequence_shard is None:
            return x
        return own_tokens(x.expand(batch, -1, -1).flatten(0, 1), self.sequence_shard)

    def _positions(self, position_ids: Tensor, x: Tensor) -> Tensor:
        """position_ids: [B or 1, S] -> the vectors of positions, [B or 1, S, H], in the dtype of x."""
        if self.position_embeddings is None:
            return sinusoids(position_ids + self.config.position_offset, x.shape[-1]).to(x.dtype)
        self._check_positions(position_ids, self.position_embeddings.weight.shape[0] - self.config.position_offset)
        return self.position_embeddings(position_ids + self.config.position_offset)

    def _check_positions(self, position_ids: Tensor, learned: int) -> None:
        readable = type(position_ids) is Tensor and position_ids.device.type == "cpu" and position_ids.numel() > 0
        if readable and not compiling() and int(position_ids.max()) >= learned:
            raise IndexError(
                f"a token is at position {int(position_ids.max())}; allowed: up to {learned - 1}, because the model "
                f"has learned {learned} positions"
            )


def sinusoids(positions: Tensor, channels: int) -> Tensor:
    """positions: [...] -> the sines, then the cosines, of `channels // 2` frequencies from 1 down to 1/10000, float32
    [..., channels] (arXiv 1706.03762, section 3.5, in the order of fairseq and tensor2tensor)."""
    half = channels // 2
    number = torch.arange(half, dtype=torch.float32, device=positions.device)
    angles = positions.float()[..., None] * torch.exp(number * (-math.log(10000) / (half - 1)))
    return F.pad(torch.cat([angles.sin(), angles.cos()], dim=-1), (0, channels % 2))


def resize_words(
    model: GPTModel, new_num_tokens: int | None, pad_to_multiple_of: int | None, mean_resizing: bool
) -> nn.Module:
    """Do what `GPTModel.resize_token_embeddings` says."""
    words, tables = _check_words(model.config.vocab_size, new_num_tokens, pad_to_multiple_of), model.embedding
    if words != model.config.vocab_size:
        if model.tp_size > 1 or sharded(model.parameters()) or model.whole is not None or model.pipeline_stages:
            raise ValueError(f"ranks share the model, whose vocabulary cannot be resized to {words} tokens")
        for table in (tables.word_embeddings, model.output_layer):
            _resize_rows(table, words, mean_resizing)
        model.config = _config_of_words(model.config, tables.word_embeddings, words)
    return tables.word_embeddings


def _check_words(words: int, new_num_tokens: int | None, pad_to_multiple_of: int | None) -> int:
    """Return the size that a vocabulary of `words` is to have: new_num_tokens (None: as now), rounded up. Raises
    ValueError for numbers below 1."""
    asked, multiple = words if new_num_tokens is None else new_num_tokens, pad_to_multiple_of or 1
    if asked < 1 or multiple < 1:
        raise ValueError(
            f"new_num_tokens is {new_num_tokens} and pad_to_multiple_of {pad_to_multiple_of}; allowed: 1 or more"
        )
    return asked + -asked % multiple


def _config_of_words(config: ModelConfig, table: EmbeddingTable, words: int) -> ModelConfig:
    """Return the configuration with a vocabulary of so many words, which `table` has now. A padding token that it has
    no more is none, in both."""
    embedding, pad = config.embedding, config.embedding.padding_idx
    if pad is not None and pad >= words:
        embedding, table.padding_idx = embedding.replace(padding_idx=None), None
    return config.replace(vocab_size=words, embedding=embedding)


@torch.no_grad()
def _resize_rows(table: nn.Module, rows: int, mean_resizing: bool) -> None:
    """Give a table, or an output layer, `rows` rows. New ones are the mean of all, taken in float32, or, without
    mean_resizing, initial values: random weights, a bias of zero. Other attributes of parameters stay."""
    for name in ("weight", "bias"):
        old = getattr(table, name, None)
        if old is None:
            continue
        if mean_resizing:
            fresh = old.float().mean(0, keepdim=True).to(old.dtype).expand(rows, *old.shape[1:])
        else:
            fresh = old.new_zeros(rows, *old.shape[1:])
            fresh = fresh if name == "bias" else table.init_method(fresh)  # type: ignore[operator]
        own = old.detach()[:rows]
        new = nn.Parameter(torch.cat([own, fresh[own.shape[0] :]]), requires_grad=old.requires_grad)
        vars(new).update({key: value for key, value in vars(old).items() if key != "main_grad"})
        setattr(table, name, new)
