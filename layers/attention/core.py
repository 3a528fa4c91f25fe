"""Softmax attention: our kernel on a CPU, torch's scaled_dot_product_attention where that does not serve, or written
out where scores are changed in a way that neither has.

B batch, S query length, L key length, N query heads, G key/value heads (query groups), D head channels.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from te_models.kernels import flash_attention
from te_models.kernels.chunks import wide
from te_models.kernels.decode_attention import attend_one, uses_decode_attention
from te_models.kernels.gemm import matmul
from te_models.kernels.gemm.cpu import in_float32
from te_models.kernels.without_autocast import without_autocast


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    visible: Tensor | None,
    bias: Tensor | None,
    sink: Tensor | None,
    *,
    causal: bool,
    scale: float,
    softcap: float | None,
    dropout: float,
) -> Tensor:
    """Return attention of query [B, N, S, D] over key [B, G, L, D] and value [B, G, L, Dv]: [B, N, S, Dv].

    visible: bool, broadcastable to [B, N, S, L], None: everything; bias: likewise, added to the scaled scores in
    float32; sink: one extra logit per head [N]; causal: of equally many queries and keys, in place of `visible`. A
    query that sees no key gets zeros.
    """
    if softcap is not None or sink is not None or (bias is not None and bias.dtype != query.dtype):
        return _explicit(query, key, value, visible, bias, sink, scale, softcap, dropout)
    mask = visible
    if bias is not None:
        mask = bias if visible is None else torch.where(visible, bias, float("-inf"))
    if bias is None and not dropout and query.shape[-2] == 1 and uses_decode_attention(query, key, value, mask):
        return attend_one(query, key, value, mask, scale)
    shared = query.shape[1] != key.shape[1]
    if shared and (not key.shape[1] or value.shape[1] != key.shape[1]):  # by which torch divides
        raise ValueError(
            f"query, key and value have {query.shape[1]}, {key.shape[1]} and {value.shape[1]} heads; allowed: as many "
            "values as keys, at least one, and queries a multiple of them"
        )
    if shared and query.shape[2] == 1 and not causal and (mask is None or (mask.dim() == 4 and mask.shape[1] == 1)):
        # One token of each head: heads that share keys are as many queries of one head, and no keys are copied. On CPU
        # in bfloat16 5 times as fast (550 keys, 9 heads, 3 groups).
        found = F.scaled_dot_product_attention(_folded(query, key), key, value, mask, dropout, scale=scale)
        return found.reshape(query.shape[0], query.shape[1], 1, value.shape[-1])
    late = not causal or query.shape[2] <= key.shape[2]  # queries of the last keys
    if mask is None and not dropout and late and flash_attention.uses_flash_attention(query, key, value, scale):
        return flash_attention.flash_attention(query, key, value, scale=scale, causal=causal)
    options = {"dropout_p": dropout, "is_causal": causal, "scale": scale, "enable_gqa": shared}
    if query.shape[2] != 1 and in_float32(query):  # one token: reading the cache is what takes the time
        floats = [x.float() for x in (query, key, value)]
        if mask is not None and mask.is_floating_point():
            mask = mask.float()
        with without_autocast(floats[0]):
            return F.scaled_dot_product_attention(*floats, attn_mask=mask, **options).to(query.dtype)
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, **options)


def _folded(query: Tensor, key: Tensor) -> Tensor:
    """Return query [B, N, S, D] as [B, G, N/G * S, D]: heads that share a head of key [B, G, L, D] together."""
    together = query.shape[1] // key.shape[1] * query.shape[2]
    return query.reshape(query.shape[0], key.shape[1], together, query.shape[3])


def _explicit(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    visible: Tensor | None,
    bias: Tensor | None,
    sink: Tensor | None,
    scale: float,
    softcap: float | None,
    dropout: float,
) -> Tensor:
    """Attention with soft-capped scores or a sink logit, softmax in float32, or float64 of float64."""
    scores = matmul(_folded(query, key), key.transpose(2, 3))
    scores = scores.to(wide(scores)) * scale
    scores = scores.view(*query.shape[:3], key.shape[2])
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if bias is not None:
        scores = scores + bias.to(scores.dtype)
    if visible is not None:
        scores = scores.masked_fill(~visible, float("-inf"))
    if sink is not None:
        logit = sink.to(scores.dtype)[None, :, None, None].expand(*scores.shape[:3], 1)
        probabilities = torch.softmax(torch.cat([scores, logit], dim=-1), dim=-1)[..., :-1]
    else:
        probabilities = torch.softmax(scores, dim=-1)
        if visible is not None:
            probabilities = probabilities.masked_fill(~visible, 0.0)
    probabilities = F.dropout(probabilities.to(value.dtype), dropout)
    return matmul(_folded(probabilities, value), value).view(*query.shape[:3], value.shape[-1])
