"""Cross entropy with Transformer Engine's name; without logits in memory: `te_models.kernels.cross_entropy`."""

from __future__ import annotations

import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from ..collectives import ranks_of
from ..te_arguments import takes_at_default


@takes_at_default(is_cg_capturable=False, overwrite_input=False)
def parallel_cross_entropy(
    inp: Tensor,
    target: Tensor,
    label_smoothing: float = 0.0,
    reduce_loss: bool = False,
    dist_process_group: dist.ProcessGroup | None = None,
    ignore_idx: int = -100,
) -> Tensor:
    """Return the loss of each token, float32 in target's shape, 0 where target is ignore_idx.

    inp: logits [..., V]; target: [...] integer. reduce_loss: return the mean over the tokens that count. ValueError
    where the vocabulary is split over several ranks of dist_process_group, and for shapes that do not fit.
    """
    if dist_process_group is not None and ranks_of("dist_process_group", dist_process_group) > 1:
        raise ValueError("dist_process_group has several ranks; allowed: one, with logits of the whole vocabulary")
    if inp.shape[:-1] != target.shape:
        raise ValueError(f"target has shape {tuple(target.shape)}; allowed with these logits: {tuple(inp.shape[:-1])}")
    loss = F.cross_entropy(
        inp.float().flatten(0, -2),
        target.long().flatten(),
        ignore_index=ignore_idx,
        label_smoothing=label_smoothing,
        reduction="mean" if reduce_loss else "none",
    )
    return loss if reduce_loss else loss.view(target.shape)
