"""The short convolution of all tokens at once: one product for each tap; the compiler fuses them.

B batch, T tokens, D channels, W width, M documents.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from ..chunks import wide


def short_convolution(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    documents: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """As the public function."""
    dtype, tokens, width = wide(x), x.shape[1], weight.shape[1]
    before = None
    if cu_seqlens is not None:
        documents = torch.searchsorted(cu_seqlens[1:].long(), torch.arange(tokens, device=x.device), right=True)[None]
        before, initial_state = initial_state, None
    rows = x.new_zeros(x.shape[0], width - 1, x.shape[2]) if initial_state is None else initial_state.mT.to(x.dtype)
    whole, taps = torch.cat([rows, x], 1), weight.to(dtype).unbind(1)
    numbers = None if documents is None else torch.cat([documents[:, :1].expand(-1, width - 1), documents], 1)
    y: Tensor = x.to(dtype) * taps[-1]
    for back in range(1, width):
        first = width - 1 - back
        value = whole[:, first : first + tokens].to(dtype)
        if numbers is not None:
            same = numbers[:, first : first + tokens] == numbers[:, width - 1 :]
            value = torch.where(same[..., None], value, 0)
        y = y + value * taps[-1 - back]
    if cu_seqlens is not None and before is not None and documents is not None:
        y = y + _from_states(before.to(dtype), taps, cu_seqlens, documents[0])
    y = y if bias is None else y + bias.to(dtype)
    y = (F.silu(y) if activation == "silu" else y).to(x.dtype)
    if cu_seqlens is None:
        last = whole[:, tokens:]
        if numbers is not None:
            last = torch.where((numbers[:, tokens:] == numbers[:, -1:])[..., None], last, 0)
        return y, last.mT
    return y, _last_of_documents(x[0], before, cu_seqlens, width)


def _from_states(before: Tensor, taps: tuple[Tensor, ...], cu_seqlens: Tensor, documents: Tensor) -> Tensor:
    """Return what tokens get of the values before their document, [1, T, D]. before: [M, D, W - 1]."""
    place = torch.arange(len(documents), device=before.device) - cu_seqlens[:-1].long()[documents]
    width, y = len(taps), before.new_zeros(1, len(documents), before.shape[1])
    for back in range(1, width):
        at = (width - 1 + place - back).clamp(max=width - 2)
        value = before[documents, :, at]
        y = y + torch.where((place < back)[:, None], value, 0) * taps[-1 - back]
    return y


def _last_of_documents(x: Tensor, before: Tensor | None, cu_seqlens: Tensor, width: int) -> Tensor:
    """Return the last W - 1 values of each document and of what is before it, [M, D, W - 1]."""
    begin, end = cu_seqlens[:-1].long()[:, None], cu_seqlens[1:].long()[:, None]
    token = end - width + 1 + torch.arange(width - 1, device=x.device)
    values = x[token.clamp(0, max(len(x) - 1, 0))]
    older = torch.zeros_like(values)
    if before is not None:
        at = (token - begin + width - 1).clamp(0, width - 2)
        older = before.to(x.dtype).transpose(1, 2).gather(1, at[..., None].expand_as(values))
    return torch.where((token >= begin)[..., None], values, older).mT
