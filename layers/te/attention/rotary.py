"""Rotary position embedding with Transformer Engine's names, on `te_models.kernels.rope`.

B batch, S length, T tokens, N heads, D head channels, R rotated channels.
"""

import torch
from torch import Tensor, nn

from te_models.kernels.asserted import asserted
from te_models.kernels.rope import apply_rope

from ...attention.rows import packed_rows
from ...distributed.context_parallel import ContextShard, own_positions
from .qkv_format import QkvFormat, check_qkv_format, from_batch_first, moved_batch_first


class RotaryPositionEmbedding(nn.Module):
    """Angles of rotary position embedding (arXiv 2104.09864). Transformer Engine: `te.pytorch.RotaryPositionEmbedding`.

    dim: channels of a head, of which rotary_percent are rotated. seq_len_interpolation_factor, together with
    pretrained_max_position_embeddings: positions are divided by it (arXiv 2306.15595), and by more if they would exceed
    the pretrained positions. inv_freq [R/2] is a buffer outside of the state dict. Raises ValueError for an odd number
    of rotated channels, and for one of the two interpolation arguments without the other.
    """

    inv_freq: Tensor

    def __init__(
        self,
        dim: int,
        rotary_percent: float = 1.0,
        seq_len_interpolation_factor: int | None = None,
        pretrained_max_position_embeddings: int | None = None,
        rotary_base: float = 10000.0,
        interleaved: bool = False,
    ) -> None:
        super().__init__()
        rotated = int(dim * rotary_percent)
        if rotated < 2 or rotated % 2:
            raise ValueError(f"dim {dim} and rotary_percent {rotary_percent} rotate {rotated} channels; allowed: even")
        if (seq_len_interpolation_factor is None) != (pretrained_max_position_embeddings is None):
            raise ValueError(
                "seq_len_interpolation_factor and pretrained_max_position_embeddings mean nothing without each other; "
                "give both or neither"
            )
        self.seq_len_interpolation_factor = seq_len_interpolation_factor
        self.pretrained_max_position_embeddings = pretrained_max_position_embeddings
        self.interleaved = interleaved
        exponents = torch.arange(0, rotated, 2, dtype=torch.float32, device=torch.get_default_device()) / rotated
        self.register_buffer("inv_freq", rotary_base**-exponents, persistent=False)

    def forward(self, max_seq_len: int, offset: int = 0) -> Tensor:
        """Return the angles of positions offset, ..., offset + max_seq_len - 1, float32 [max_seq_len, 1, 1, R]: both
        channels of a pair have theirs."""
        position = torch.arange(max_seq_len, device=self.inv_freq.device, dtype=torch.float32) + offset
        longest, factor = self.pretrained_max_position_embeddings, self.seq_len_interpolation_factor
        if longest is not None and factor is not None:
            position = position / (factor if max_seq_len <= longest * factor else max_seq_len / longest)
        angles = position[:, None] * self.inv_freq.float()
        angles = angles.repeat_interleave(2, dim=-1) if self.interleaved else torch.cat((angles, angles), dim=-1)
        return angles[:, None, None]


def apply_rotary_pos_emb(
    t: Tensor,
    freqs: Tensor,
    tensor_format: QkvFormat = "sbhd",
    start_positions: Tensor | None = None,
    interleaved: bool = False,
    fused: bool = False,
    cu_seqlens: Tensor | None = None,
    cp_size: int = 1,
    cp_rank: int = 0,
) -> Tensor:
    """Rotate the first R channels of t: [S, B, N, D], [B, S, N, D] or packed [T, N, D]; the others pass through.

    freqs: angles [positions, 1, 1, R] from `RotaryPositionEmbedding`; start_positions: [B] integer, the position of
    each sequence's first row, None: 0; cu_seqlens: [B + 1], where packed sequences begin. cp_size, cp_rank: t has the
    rows of rank cp_rank of cp_size that share each sequence, see `DotProductAttention.set_context_parallel_group`.
    Everything is float32 until the result is rounded to t's dtype, with fused and without. Returns a tensor like t.
    ValueError for a layout that does not exist or has no cu_seqlens, too few positions, and ranks that share packed
    sequences, or sequences that begin elsewhere. RuntimeError where cu_seqlens or start_positions ask for a position
    that freqs does not have: checked on the device (`kernels.asserted`).
    """
    check_qkv_format(tensor_format)
    if not 0 <= cp_rank < cp_size:
        raise ValueError(f"cp_rank is {cp_rank} and cp_size {cp_size}; allowed: a rank from 0 to cp_size - 1")
    if cp_size > 1 and (tensor_format == "thd" or start_positions is not None):
        what = "start_positions" if start_positions is not None else "tensor_format 'thd'"
        raise ValueError(f"cp_size is {cp_size} with {what}; allowed: 1")
    if (cu_seqlens is None) == (tensor_format == "thd"):
        is_given = "missing" if cu_seqlens is None else "given"
        raise ValueError(f"cu_seqlens is {is_given} with tensor_format {tensor_format!r}; it is for 'thd'")
    half = freqs.shape[-1] // 2
    angles = freqs[:, 0, 0, 0::2] if interleaved else freqs[:, 0, 0, :half]
    x = moved_batch_first(t, tensor_format)
    if cu_seqlens is not None:
        rows = packed_rows(x.shape[1], cu_seqlens, None)
        position, real = rows.position[0], rows.real
        if start_positions is not None and rows.sequence is not None:
            position = position + start_positions[rows.sequence[0]]
        known = (position >= 0) & (position < freqs.shape[0])
        _check_positions(known if real is None else known | ~real[0], freqs.shape[0])
        angles = angles[torch.where(known, position, 0)][None]  # rows past the last sequence are of no meaning
    else:
        length = x.shape[1] * cp_size
        if length > freqs.shape[0]:
            raise ValueError(f"freqs has {freqs.shape[0]} positions; allowed: at least {length}")
        if cp_size > 1:
            shard = ContextShard(cp_rank, cp_size, "")
            shard.check(length)
            angles = own_positions(angles[:length], shard, dim=0)
        position = torch.arange(x.shape[1], device=t.device)
        if start_positions is None:
            angles = angles[: x.shape[1]][None]
        else:
            last = freqs.shape[0] - x.shape[1]
            _check_positions((start_positions >= 0) & (start_positions <= last), freqs.shape[0])
            angles = angles[start_positions[:, None] + position]
    style = "interleaved" if interleaved else "half"
    y = apply_rope(x, angles.cos(), angles.sin(), style)
    return from_batch_first(y, tensor_format)


def _check_positions(known: Tensor, count: int) -> None:
    asserted(
        known.all(),
        f"cu_seqlens or start_positions ask for positions that freqs does not have; allowed: 0 to {count - 1}",
    )
