"""The definition of compressed keys, in plain torch operations that a compiler fuses.

B batch, S queries, L keys (cached ones included), W compressed keys, m tokens from one to the next, D channels.

A compressed key is made of the m tokens of a text that end where a multiple of m is reached; with two series of m more
before them. texts: int64 [B, L], the number of each token's text, negative where it is no token; None: every row is
one text of tokens only.
"""

import torch
from torch import Tensor

from ..documents import first_positions
from ..rope import apply_rope


def last_tokens(length: int, rate: int, texts: Tensor | None, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the last token of each compressed key, int64 [B or 1, W], in order, and how many tokens of its text are
    before it, [B or 1, W]; the first is `length` or more where a row has fewer of them."""
    keys, place = length // rate, torch.arange(length, device=device)
    if texts is None:
        ends = torch.arange(1, keys + 1, device=device)[None] * rate - 1
        return ends, ends
    within = place - first_positions(texts)
    closes = (texts >= 0) & ((within + 1) % rate == 0)
    ends = torch.where(closes, place, length).sort(dim=1).values[:, :keys]
    return ends, within.gather(1, ends.clamp(max=length - 1))


def compress(rows: Tensor, bias: Tensor, ends: Tensor, before: Tensor, rate: int, series: int) -> Tensor:
    """rows: [B, L, 2 C], keys and gates of each token, C = series * D, the first series of the tokens before; bias:
    [m, C], added to gates; ends, before: of `last_tokens` -> [B, W, D], without norm and rope. Softmax in float32."""
    keys, gates = rows.chunk(2, -1)
    batch, length, channels = keys.shape
    size, width = channels // series, rate * series
    ends = ends.expand(batch, -1)
    tokens = ends[..., None] - torch.arange(width - 1, -1, -1, device=rows.device)  # [B, W, series * m]
    exists = before[..., None] >= torch.arange(width - 1, -1, -1, device=rows.device)
    index = tokens.clamp(0, length - 1).flatten(1)[..., None].expand(-1, -1, channels)
    keys, gates = (t.gather(1, index).unflatten(1, (-1, series, rate)) for t in (keys, gates))
    gates = gates + bias.to(gates.dtype)
    # of tokens in the first half the first series, of those in the second half the second one
    keys, gates = (
        torch.cat([t[:, :, n, :, n * size : (n + 1) * size] for n in range(series)], dim=2) for t in (keys, gates)
    )
    gates = gates.float().masked_fill(~exists[..., None], -torch.inf)
    return (keys * gates.softmax(dim=2).to(keys.dtype)).sum(2)


def roped_last(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the last channels of x [B, S, N, D], neighbours together, by the tables' angles, [B or 1, S, R/2]."""
    plain = x.shape[-1] - 2 * cos.shape[-1]
    return torch.cat((x[..., :plain], apply_rope(x[..., plain:], cos, sin, "interleaved")), dim=-1)


def visible_compressed_keys(places: Tensor, ends: Tensor, texts: Tensor | None) -> Tensor:
    """Return which compressed keys a query sees, those that end at it or before it in its text: bool [B or 1, S, W].
    places: [B or 1, S], where the queries are among the keys."""
    sees = ends[:, None] <= places[..., None]
    if texts is not None:
        own, theirs = (
            texts.gather(1, places.expand(len(texts), -1)),
            texts.gather(1, ends.clamp(max=texts.shape[1] - 1)),
        )
        sees = sees & (own[..., None] == theirs[:, None])
    return sees


def window_hides(places: Tensor, length: int, window: int, texts: Tensor | None) -> Tensor:
    """Return which of `length` keys a query does not see: bool [B or 1, S, L]."""
    keys = torch.arange(length, device=places.device)
    hides = (keys > places[..., None]) | (keys <= places[..., None] - window)
    if texts is not None:
        own = texts.gather(1, places.expand(len(texts), -1))
        hides = hides | (own[..., None] != texts[:, None]) | (texts < 0)[:, None]
    return hides
