"""Text generation with a key-value cache: greedy or sampled, batched, streaming, compiled, or with a draft model.

B batch, S prompt length, V vocabulary. Prompts of different lengths are padded on the left, so that every row's next
token comes at the same column.
"""

import contextlib
from collections.abc import Iterable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from te_models.kernels.without_autocast import compute_dtype

from ..eval_mode import in_eval_mode
from ..model import GPTModel, KVCache, StaticKVCache
from ..model.moe import record_call
from ..sizes import plural
from .compiled import decode_step, static_length
from .one_thread import short_steps
from .sampling import Sampler
from .speculative import Draft, DraftModel, speculative_steps


def _check(
    input_ids: Tensor,
    attention_mask: Tensor | None,
    max_new_tokens: int,
    temperature: float,
    top_k: int | None,
    top_p: float | None,
    seed: int | None,
) -> Tensor:
    """Raise ValueError for an impossible argument; return the prompts' mask, [B, S] bool."""
    if input_ids.dim() != 2 or input_ids.shape[1] == 0:
        raise ValueError(f"input_ids has shape {tuple(input_ids.shape)}; allowed: [batch, at least one token]")
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens is {max_new_tokens}; allowed: 1 or more")
    if not temperature >= 0:
        raise ValueError(f"temperature is {temperature}; allowed: 0 (the best token) or more")
    if top_k is not None and top_k < 1:
        raise ValueError(f"top_k is {top_k}; allowed: 1 or more, or None")
    if top_p is not None and not 0 < top_p <= 1:
        raise ValueError(f"top_p is {top_p}; allowed: 0 < top_p <= 1, or None")
    if seed is not None and not -(2**63) <= seed < 2**64:
        raise ValueError(f"seed is {seed}; allowed: -2**63 to 2**64 - 1")
    if attention_mask is None:
        return torch.ones_like(input_ids, dtype=torch.bool)
    if attention_mask.shape != input_ids.shape:
        raise ValueError(f"attention_mask has shape {tuple(attention_mask.shape)}; allowed: {tuple(input_ids.shape)}")
    mask = attention_mask.bool()
    if not mask[:, -1].all():
        raise ValueError("attention_mask ends with padding; pad prompts on the left")
    return mask


def stream(
    model: GPTModel,
    input_ids: Tensor,
    max_new_tokens: int,
    *,
    attention_mask: Tensor | None = None,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int | None = None,
    eos_token_id: int | Sequence[int] | None = None,
    pad_token_id: int | None = None,
    compile: bool = False,
    draft_model: GPTModel | Draft | None = None,
    num_draft_tokens: int = 4,
) -> Iterator[Tensor]:
    """Yield the next token of each row, [B] int64, up to max_new_tokens times; arguments and errors as for `generate`.

    A row that has ended yields the padding token. The iteration stops when all rows have ended, on all ranks of a model
    whose experts are distributed.

    Example:
        for token in stream(model.eval(), input_ids, max_new_tokens=20): ...
    """
    mask = _check(input_ids, attention_mask, max_new_tokens, temperature, top_k, top_p, seed)
    if model.config.embedding.position_embedding_type == "learned_absolute":
        longest, positions = int(mask.sum(dim=1).max()), model.config.max_position_embeddings
        if longest > positions:
            raise ValueError(
                f"a prompt has {plural(longest, 'token')}; allowed: up to {positions}, as many positions are learned"
            )
        if longest + max_new_tokens - 1 > positions:  # the last token is not read
            raise ValueError(
                f"max_new_tokens is {max_new_tokens} after {plural(longest, 'token')}; "
                f"allowed: up to {positions - longest + 1}, "
                f"because the model has learned {plural(positions, 'position')}"
            )
    ends = () if eos_token_id is None else (eos_token_id,) if isinstance(eos_token_id, int) else tuple(eos_token_id)
    if pad_token_id is None:
        pad_token_id = ends[0] if ends else 0
    generator = None if seed is None else torch.Generator(input_ids.device).manual_seed(seed)
    sampler = Sampler(temperature, top_k, top_p, generator)
    shared = model.shares_parameters
    if shared and (compile or draft_model is not None):
        name = "compile" if compile else "draft_model"
        raise ValueError(f"{name} is given for a model that ranks share; allowed: a model that each rank has whole")
    if draft_model is None:
        return _steps(model, input_ids, mask, max_new_tokens, sampler, ends, pad_token_id, compile)
    if compile:
        raise ValueError("compile and draft_model are both given; allowed: one of them")
    if input_ids.shape[0] != 1:
        raise ValueError(f"draft_model is given for {plural(input_ids.shape[0], 'prompt')}; allowed: one prompt")
    if num_draft_tokens < 1:
        raise ValueError(f"num_draft_tokens is {num_draft_tokens}; allowed: 1 or more")
    draft = DraftModel(draft_model) if isinstance(draft_model, GPTModel) else draft_model
    prompt = input_ids[:, int((~mask).sum()) :]
    return speculative_steps(model, draft, prompt, max_new_tokens, num_draft_tokens, sampler, ends)


def _steps(
    model: GPTModel,
    ids: Tensor,
    mask: Tensor,
    max_new_tokens: int,
    sampler: Sampler,
    ends: tuple[int, ...],
    pad_token_id: int,
    compile: bool,
) -> Iterator[Tensor]:
    """The loop behind `stream`, a generator; `stream` itself is not, so that it checks its arguments when called."""
    batch, prompt = ids.shape
    ends_tensor = torch.tensor(ends, dtype=torch.int64, device=ids.device)
    dtype = compute_dtype(model.embedding.word_embeddings.weight)
    room, step = prompt + max_new_tokens, None
    cache: KVCache | StaticKVCache
    if compile:
        cache = StaticKVCache(model.config, batch, static_length(room), dtype=dtype, device=ids.device)
        cache.set_padding(mask)
        step = decode_step(model, cache)
    else:
        cache = KVCache(model.config, batch, room, dtype=dtype, device=ids.device, tp_size=model.tp_size)
    padded = not bool(mask.all())
    position_ids = positions_of(mask)
    running = torch.ones(batch, dtype=torch.bool, device=ids.device)
    # where the rotary frequencies depend on the length, the cache is filled again when they change
    by_length, written = model.decoder.by_length, ids
    longest = int(mask.sum(dim=1).max()) if by_length else 0
    stage = model.decoder.rotary_stage(longest)
    with in_eval_mode(model):
        for _ in range(max_new_tokens):
            compiled = step is not None and cache.length > 0
            with torch.no_grad(), contextlib.nullcontext() if compiled else short_steps(model, ids.numel()):
                if step is not None and isinstance(cache, StaticKVCache) and cache.length:
                    logits, chosen = step(model, ids, position_ids, cache.step)
                    record_call(model, chosen, mask.shape[1] - 1)
                else:
                    logits = model(
                        ids,
                        position_ids=position_ids,
                        attention_mask=mask if padded else None,
                        cache=cache,
                        last_logits_only=True,
                    ).logits[:, -1]
                token = torch.where(running, sampler(logits), pad_token_id)
                if model.tp_group is not None and sampler.temperature > 0:  # whose generators may stand elsewhere
                    dist.broadcast(token, group=model.tp_group, group_src=0)
            yield token
            running = running & ~torch.isin(token, ends_tensor)
            if not _any(running, (model.ep_group, model.etp_group)):
                return
            ids, position_ids = token[:, None], position_ids[:, -1:] + 1
            mask = torch.cat((mask, torch.ones_like(mask[:, :1])), dim=1)
            if by_length:
                written, longest, before = torch.cat((written, ids), dim=1), longest + 1, stage
                stage = model.decoder.rotary_stage(longest)
                if stage != before:
                    cache.reset()
                    ids, position_ids = written, positions_of(mask)


def positions_of(mask: Tensor) -> Tensor:
    """Return the positions of tokens, [B, L] int64; mask: [B, L], 0 or False where a token is padding, on the left."""
    return (mask.long().cumsum(dim=-1) - 1).clamp(min=0)


def _any(running: Tensor, groups: Iterable[dist.ProcessGroup | None]) -> bool:
    """Whether a row runs on, on this rank or another one that has part of the model's experts."""
    left = running.any()
    for group in groups:
        if group is not None:
            left = left.int()
            dist.all_reduce(left, dist.ReduceOp.MAX, group=group)
    return bool(left)


def generate(
    model: GPTModel,
    input_ids: Tensor,
    max_new_tokens: int,
    *,
    attention_mask: Tensor | None = None,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int | None = None,
    eos_token_id: int | Sequence[int] | None = None,
    pad_token_id: int | None = None,
    compile: bool = False,
    draft_model: GPTModel | Draft | None = None,
    num_draft_tokens: int = 4,
) -> Tensor:
    """Return the prompts with their continuations, [B, S + n] with n <= max_new_tokens.

    input_ids: [B, S] int64. attention_mask: [B, S], false where a prompt is padded (on the left only). temperature: 0
    takes the best token; above 0 samples from softmax(logits / temperature), restricted by top_k and top_p, with a
    generator seeded with `seed` (None: torch's global generator). If ranks share split layers, the first rank draws.
    eos_token_id ends a row; the rest of the row is filled with pad_token_id (None: the first eos). compile: decode with
    a `StaticKVCache`, all tokens in one graph; later calls for as many rows and about as many tokens use it again:
    texts of up to 8,192 tokens have one of 15. The cache has up to half as many slots again as the text has tokens. Not
    for models that ranks share. draft_model: a smaller model of the same vocabulary, or a `Draft`, that proposes
    num_draft_tokens tokens at a time for the model to check in one call: the same text for temperature 0, the same
    distribution above; for one prompt. Raises ValueError for an argument out of range, and for options that do not go
    together.

    Example:
        tokens = generate(model.eval(), input_ids, max_new_tokens=20, temperature=0.8, seed=0)
    """
    steps = stream(
        model,
        input_ids,
        max_new_tokens,
        attention_mask=attention_mask,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        seed=seed,
        eos_token_id=eos_token_id,
        pad_token_id=pad_token_id,
        compile=compile,
        draft_model=draft_model,
        num_draft_tokens=num_draft_tokens,
    )
    return torch.cat((input_ids, torch.stack(list(steps), dim=1)), dim=1)
