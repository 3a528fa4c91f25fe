"""Which keys a query sees in softmax attention, by mask type, window and lengths, and what is added to its scores: a
given bias, or ALiBi's (arXiv 2108.12409).

B batch, S queries, L keys, N heads, G key/value heads, D head channels.
"""

from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from te_models.suggestions import check_choice, shown

from .rows import SequenceRows, packed_rows, padded_rows, rows_not_hidden, whole_rows

BiasType = Literal["no_bias", "pre_scale_bias", "post_scale_bias", "alibi"]


class ScoreBias(NamedTuple):
    """kind: whether `bias`, broadcastable to [B, N, S, L], is added to the scores before or after they are scaled, or
    minus the distance times `slopes`, [N] or [B, N]; None: the usual ones."""

    kind: BiasType = "no_bias"
    bias: Tensor | None = None
    slopes: Tensor | None = None

    def check(self) -> None:
        """Raise ValueError where something is missing, or given and would not be looked at."""
        check_choice("core_attention_bias_type", self.kind, get_args(BiasType))
        if (self.bias is not None) != (self.kind in ("pre_scale_bias", "post_scale_bias")):
            is_given = "missing" if self.bias is None else "given"
            raise ValueError(f"core_attention_bias is {is_given} with core_attention_bias_type {shown(self.kind)}")
        if self.slopes is not None and self.kind != "alibi":
            raise ValueError(f"alibi_slopes are given with core_attention_bias_type {self.kind!r}; allowed: 'alibi'")

    def values(self, distance: Tensor, heads: int, scale: float | Tensor, device: torch.device) -> Tensor | None:
        """Return what is added to the scaled scores, broadcastable to [B, N, S, L]. distance: [B or 1, 1, S, L]."""
        self.check()
        if self.kind == "alibi":
            slopes = usual_slopes(heads, device) if self.slopes is None else self.slopes
            return -distance.abs() * slopes.float().unflatten(-1, (-1, 1, 1))
        return self.bias * scale if self.kind == "pre_scale_bias" and self.bias is not None else self.bias


NO_BIAS = ScoreBias()


def usual_slopes(heads: int, device: torch.device) -> Tensor:
    """Return ALiBi's slope of each head, float32 [N]: the powers of 2^(-8/n), n the largest power of two up to `heads`,
    and for the heads beyond n every other power of 2^(-4/n)."""
    n = 1 << (int(heads).bit_length() - 1)
    # computed on the device: given a list, it makes the host wait in every call, and no CUDA graph takes that
    number = torch.arange(heads, dtype=torch.float32, device=device)
    return torch.exp2(torch.where(number < n, (number + 1) * (-8 / n), ((number - n) * 2 + 1) * (-4 / n)))


MaskType = Literal[
    "no_mask",
    "padding",
    "causal",
    "padding_causal",
    "causal_bottom_right",
    "padding_causal_bottom_right",
    "arbitrary",
]
"""What is hidden. "causal": query i sees keys up to i; "bottom_right": the last query sees all keys; "padding": rows of
padding are hidden and get zeros; "arbitrary": what `attention_mask` says."""
Window = int | tuple[int, int]
AttentionMask = Tensor | tuple[Tensor, Tensor]
_UNLIMITED = (-1, -1)


def mask_type_of(name: str) -> str:
    """Return the mask type of this name, of which "padding" and "causal" may be joined by a comma. ValueError."""
    kind = "padding_causal" if set(name.split(",")) == {"padding", "causal"} else name
    if kind not in get_args(MaskType):
        raise ValueError(f"attn_mask_type is {shown(name)}; allowed: {', '.join(map(repr, get_args(MaskType)))}")
    return kind


def window_of(window: Window | None, mask_type: str) -> tuple[int, int]:
    """Return how many keys are visible before and behind a query's own place, -1: all. ValueError."""
    if window is None:
        return _UNLIMITED
    causal = "causal" in mask_type
    if isinstance(window, int) and not isinstance(window, bool):
        if window < 1:
            raise ValueError(f"window_size is {window}; allowed: a positive number of positions, a pair, or None")
        if not causal:
            raise ValueError(f"window_size is {window} with attn_mask_type {shown(mask_type)}; allowed: a causal type")
        return window - 1, 0
    if not (isinstance(window, (tuple, list)) and len(window) == 2 and all(type(n) is int and n >= -1 for n in window)):
        raise ValueError(
            f"window_size is {shown(window)}; allowed: a positive number of positions, (before, behind) of at least "
            "-1, or None"
        )
    if not causal and (window[0] < 0) != (window[1] < 0):
        raise ValueError(
            f"window_size is {shown(window)} with attn_mask_type {mask_type!r}; allowed: two numbers from 0 on, "
            "(-1, -1), or a causal type"
        )
    return window[0], window[1]


class Masking(NamedTuple):
    """What a call says about who sees whom; the names are `DotProductAttention.forward`'s."""

    mask_type: str
    window_size: Window | None
    bottom_right_diagonal: bool | None
    attention_mask: AttentionMask | None
    cu_seqlens: tuple[Tensor | None, Tensor | None]
    cu_seqlens_padded: tuple[Tensor | None, Tensor | None]
    bias: ScoreBias
    packed: bool

    def causal_window(self, queries: int, keys: int) -> int | None:
        """Return how many positions a query sees, counting itself, if only that window and `hidden_keys` hide keys from
        these queries of the last positions; None where there is no window, or more is hidden."""
        mask = self.attention_mask
        if not self._hides_later_keys(queries, keys) or isinstance(mask, tuple):
            return None
        if mask is not None and (mask.dim() != 4 or tuple(mask.shape[1:]) != (1, 1, keys)):
            return None
        before = window_of(self.window_size, self.mask_type)[0]
        return None if before < 0 else before + 1

    def hides_later_keys_alone(self, queries: int, keys: int) -> bool:
        """Whether plain causal attention applies: more than one query, and each sees exactly the keys up to its
        position."""
        alone = queries > 1 and self.attention_mask is None and self._hides_later_keys(queries, keys)
        return alone and window_of(self.window_size, self.mask_type)[0] < 0

    def _hides_later_keys(self, queries: int, keys: int) -> bool:
        """Whether queries of the last positions do not see keys behind their own, and nothing is added to scores."""
        causal = self.mask_type in ("causal", "causal_bottom_right") and self.bias == ScoreBias()
        return causal and (keys == queries or (keys > queries and self.counts_from_end))

    @property
    def counts_from_end(self) -> bool:
        """Whether distances count from the ends of the two sequences."""
        at_end = self.bottom_right_diagonal
        return self.mask_type not in ("causal", "padding_causal") if at_end is None else at_end

    @property
    def hidden_keys(self) -> Tensor | None:
        """The keys that `attention_mask` hides from all queries, bool [B, L]; None without a mask."""
        return None if self.attention_mask is None else self.attention_mask[:, 0, 0]  # type: ignore[call-overload]

    def check(self) -> None:
        """Raise ValueError where something is missing, or given and would not be looked at."""
        kind, mask, (q, kv) = self.mask_type, self.attention_mask, self.cu_seqlens
        padding = "padding" in kind
        if self.packed and (not padding or mask is not None):
            raise ValueError(
                f"attn_mask_type is {shown(kind)}{'' if mask is None else ' with an attention_mask'}; allowed with "
                "qkv_format 'thd': a padding type without an attention_mask"
            )
        if (q is None) != (kv is None) or (self.packed and q is None):
            raise ValueError(f"cu_seqlens_{'q' if q is None else 'kv'} is missing; give cu_seqlens_q and cu_seqlens_kv")
        if not self.packed and self.cu_seqlens_padded != (None, None):
            raise ValueError("cu_seqlens_q_padded and cu_seqlens_kv_padded are for qkv_format 'thd'")
        if q is not None and not padding:
            raise ValueError(f"cu_seqlens_q is given with attn_mask_type {shown(kind)}; allowed: a padding type")
        if q is not None and mask is not None:
            raise ValueError("attention_mask and cu_seqlens_q are both given; allowed: one of the two")
        if mask is None and (kind == "arbitrary" or (padding and q is None)):
            lengths = ", or cu_seqlens_q and cu_seqlens_kv" if padding else ""
            raise ValueError(f"attn_mask_type is {shown(kind)}: give attention_mask{lengths}")
        if isinstance(mask, tuple) and not padding:
            raise ValueError(f"attention_mask is a pair with attn_mask_type {shown(kind)}; allowed: one tensor")
        for hidden in () if mask is None else (mask if isinstance(mask, tuple) else (mask,)):
            if hidden.dtype is not torch.bool:
                raise ValueError(f"attention_mask has dtype {hidden.dtype}; allowed: torch.bool, True is hidden")


def masks_of(
    masking: Masking, query: Tensor, key: Tensor, scale: float | Tensor, *, plain: bool
) -> tuple[Tensor | None, Tensor | None, bool]:
    """Return (visible, bias, causal) for `attend` of query [B, S, N, D] and key [B, L, G, D]. plain: its softmax takes
    `causal` in place of a mask. ValueError as `Masking.check` and `window_of`."""
    masking.check()
    kind, mask, bias = masking.mask_type, masking.attention_mask, masking.bias
    window, causal = window_of(masking.window_size, kind), "causal" in kind
    length, keys = query.shape[1], key.shape[1]
    padding = "padding" in kind
    bottom_right = masking.counts_from_end
    if length == 1 and bottom_right and causal and not padding:
        # the last query, one token with a cache, looks at all keys, or at as many as its window reaches
        causal, window = False, _UNLIMITED if 0 <= keys - 1 <= window[0] else (window[0], -1)
    if bias.kind == "no_bias" and window == _UNLIMITED and not padding:
        bias.check()
        if not causal:
            return None if mask is None else ~mask, None, False  # type: ignore[operator]
        if mask is None and plain and length == keys:
            return None, None, True
    rows = _rows(masking, length, keys, query.device)
    distance = distances(*rows, bottom_right=bottom_right)
    visible = visible_keys(*rows, distance, causal=causal, window=window, hidden=None if padding else mask)  # type: ignore[arg-type]
    return visible, bias.values(distance, query.shape[2], scale, query.device), False


def _rows(masking: Masking, length: int, keys: int, device: torch.device) -> tuple[SequenceRows, SequenceRows]:
    """Return where queries and keys stand."""
    (q, kv), (q_begins, kv_begins), mask = masking.cu_seqlens, masking.cu_seqlens_padded, masking.attention_mask
    if "padding" not in masking.mask_type:
        return whole_rows(length, device), whole_rows(keys, device)
    if q is not None and kv is not None:
        if masking.packed:
            return packed_rows(length, q, q_begins), packed_rows(keys, kv, kv_begins)
        return padded_rows(length, q), padded_rows(keys, kv)
    assert mask is not None, "checked"
    both = mask if isinstance(mask, tuple) else (mask, mask)
    for hidden, rows in zip(both, (length, keys), strict=True):
        if hidden.dim() != 4 or tuple(hidden.shape[1:]) != (1, 1, rows):
            raise ValueError(
                f"attention_mask has shape {tuple(hidden.shape)}; allowed with attn_mask_type {masking.mask_type!r}: "
                f"[batch, 1, 1, {rows}], or a pair of them, of queries and of keys"
            )
    return rows_not_hidden(both[0]), rows_not_hidden(both[1])


def distances(queries: SequenceRows, keys: SequenceRows, *, bottom_right: bool) -> Tensor:
    """Return how far each key is before each query, [B or 1, 1, S, L]: negative behind it. bottom_right: counted from
    the ends of the two sequences."""
    before, place = queries.places(from_end=bottom_right), keys.places(from_end=bottom_right)
    return (before[:, :, None] - place[:, None, :])[:, None]


def visible_keys(
    queries: SequenceRows,
    keys: SequenceRows,
    distance: Tensor,
    *,
    causal: bool,
    window: tuple[int, int],
    hidden: Tensor | None,
) -> Tensor | None:
    """Return the bool mask, True where a query may look, broadcastable to [B, N, S, L]; None: everywhere."""
    conditions = [distance >= 0] if causal else []
    if window[0] >= 0:
        conditions.append(distance <= window[0])
    if window[1] >= 0 and not causal:
        conditions.append(distance >= -window[1])
    if queries.real is not None:
        conditions.append(queries.real[:, None, :, None])
    if keys.real is not None:
        conditions.append(keys.real[:, None, None, :])
    if queries.sequence is not None and keys.sequence is not None:
        conditions.append((queries.sequence[:, :, None] == keys.sequence[:, None, :])[:, None])
    if hidden is not None:
        conditions.append(~hidden)
    visible = None
    for condition in conditions:
        visible = condition if visible is None else visible & condition
    return visible
