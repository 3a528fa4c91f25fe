"""Transformer Engine's cross entropy, of logits of the whole vocabulary or of a rank's part of it.

Our own models use `te_models.kernels.cross_entropy`, without logits in memory.
"""

import torch.distributed as dist
from torch import Tensor

from ..collectives import check_member
from ..distributed.vocab_parallel import VocabShard, vocab_parallel_cross_entropy
from .arguments import takes_also, takes_at_default


@takes_also(input="inp", _input="inp")
@takes_at_default(overwrite_input=False)
def parallel_cross_entropy(
    inp: Tensor,
    target: Tensor,
    label_smoothing: float = 0.0,
    reduce_loss: bool = False,
    dist_process_group: dist.ProcessGroup | None = None,
    ignore_idx: int = -100,
    is_cg_capturable: bool = False,
) -> Tensor:
    """Return the loss of each token, float32 in target's shape, 0 where target is ignore_idx.

    inp: logits [..., V], or with dist_process_group [..., V / ranks], this rank's equal part of the vocabulary, in rank
    order; target: [...] integer, words of the whole vocabulary. The gradient is in inp's dtype. reduce_loss: return the
    mean over the tokens that count, 0 without any. is_cg_capturable changes nothing: nobody waits for the device in
    either case. Collective over dist_process_group. ValueError for shapes that do not fit, a group without this rank,
    and, eagerly on a CPU, a target that is no word (elsewhere NaN).
    """
    shard = VocabShard()
    if dist_process_group is not None:
        check_member("dist_process_group", dist_process_group)
        group = dist_process_group
        shard = VocabShard(dist.get_rank(group), dist.get_world_size(group), group.group_name)
    options = {"label_smoothing": label_smoothing, "ignore_index": ignore_idx}
    loss = vocab_parallel_cross_entropy(inp, target, shard, **options)  # type: ignore[arg-type]
    return loss.sum() / (target != ignore_idx).sum().clamp(min=1) if reduce_loss else loss
