"""Several texts in one row, as collators that pad nothing make them: told by the positions, as transformers does.

B batch, S sequence, L keys (cached ones included).
"""

import torch
from torch import Tensor

from te_models.kernels.compiling import compiling


def same_text(position_ids: Tensor, batch: int, attention_mask: Tensor | None = None, cached: int = 0) -> Tensor | None:
    """Return [B, S, L] bool, true where a query and a key of its row belong to the same text; None where each row is
    one text, as far as its positions say.

    position_ids: [B or 1, S]. attention_mask: [B, L], 0 where a token is padding; the result hides it, too. cached:
    the tokens before these in a cache, L - S. A text ends where the next position is not one more, and has as many
    cached tokens as its first position here says: position 0 sees none of the cache.

    The positions are looked at on the host, but for compiled code: that always gets the mask. Positions and masks of
    other shapes are left to the model: it refuses them.
    """
    length = position_ids.shape[-1]
    if position_ids.dim() != 2 or position_ids.shape[0] not in (1, batch):
        return None
    if attention_mask is not None and attention_mask.shape != (batch, cached + length):
        return None
    ends = position_ids.diff(dim=-1) != 1
    begin = (cached - position_ids[:, :1]).clamp(min=0)
    if attention_mask is not None:  # positions of padding say nothing
        real = attention_mask.bool()
        ends = ends & real[:, cached + 1 :] & real[:, cached:-1]
        hidden = (~real[:, :cached]).sum(dim=-1, keepdim=True)  # tokens of the cache that positions do not count
        begin = torch.where(real[:, cached : cached + 1], (begin - hidden).clamp(min=0), 0)
    if not compiling() and not ends.any() and not (cached and begin.any()):
        return None
    number = torch.nn.functional.pad(ends.long().cumsum(dim=-1), (1, 0))
    same = number[:, :, None] == number[:, None, :]
    if cached:
        first = number[:, :, None] == 0
        seen = torch.arange(cached, device=position_ids.device) >= begin
        same = torch.cat(((first & seen[:, None, :]).expand(same.shape[0], -1, -1), same), dim=-1)
    same = same.expand(batch, -1, -1)
    return same if attention_mask is None else same & attention_mask.bool()[:, None, :]
