"""Tensor parallelism: the weights of a layer split over the ranks of a group, and what the ranks tell each other.

    column  each rank has some rows of the weight [out / ranks, in] and gives its part of the output features
    row     each rank has some columns [out, in / ranks], takes its part of the input features, and the sum over ranks
            is the output

One of each in a row, as in attention and MLP, needs one sum over ranks in the forward pass and one in the backward
pass. With sequence parallelism the activations between such pairs are split over the ranks along their first
dimension: the input of a column layer is gathered, the output of a row layer is summed and scattered. What every rank
holds in full but applies to its own rows only, norm weights and row biases, gets a gradient summed over the ranks.
(arXiv 1909.08053; 2205.05198.)
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from te_models.kernels.torch_versions import own_result
from te_models.suggestions import check_choice

from ..collectives import all_gather, all_reduce, check_member, reduce_scatter, resolve_group

InitMethod = Callable[[Tensor], object]
"""What fills a parameter in place."""
ParallelMode = Literal["column", "row"]
_WEIGHT_DIM = {"column": 0, "row": 1}


@dataclass(frozen=True)
class TensorParallelSplit:
    """How the weight of a layer is split over ranks. mode None: it is whole; group None: the default group where `size`
    is its number of ranks; sequence_parallel: the activations between split layers are split over the ranks, too."""

    mode: ParallelMode | None = None
    group: dist.ProcessGroup | None = None
    size: int = 1
    sequence_parallel: bool = False


WHOLE = TensorParallelSplit()


def split_group(mode: str | None, group: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    """Return the group over which an operation of this mode is split: all ranks where it names none; None: one rank."""
    if mode is None or not (dist.is_available() and dist.is_initialized()):
        return None
    return dist.group.WORLD if group is None else group


class TensorParallelModule(nn.Module):
    """Mixin of layers whose weights may be split. `tp_group` is kept by name, so that the layer can be copied and
    saved. Parameters that are split, over one rank or several, carry Megatron's `tensor_model_parallel`,
    `partition_dim` and `partition_stride`."""

    tp_size: int
    tp_rank: int
    tp_group_name: str
    sequence_parallel: bool
    parallel_mode: str | None
    asked_mode: str | None
    """`parallel_mode` as it was asked for, where there is one rank, too."""

    def set_parallel(self, tp_group: dist.ProcessGroup | None, tp_size: int, sequence_parallel: bool) -> None:
        """Take over the arguments of a constructor. tp_group None: the default group where tp_size is its size.

        Raises ValueError where they contradict each other.
        """
        vars(self).update(tp_size=1, tp_rank=0, tp_group_name="", sequence_parallel=False)  # in one go: many are made
        if tp_group is not None or tp_size > 1:
            self.set_tensor_parallel_group(tp_group)
        if self.tp_size != tp_size and tp_size != 1:
            raise ValueError(f"tp_size is {tp_size}, but tp_group has {self.tp_size} ranks; leave tp_size out")
        if sequence_parallel and self.tp_size > 1:
            self.sequence_parallel = True

    def set_tensor_parallel_group(self, tp_group: dist.ProcessGroup | None) -> None:
        """Use this group, None for the default one. After construction: only a group of the same size."""
        if not (dist.is_available() and dist.is_initialized()):
            raise ValueError(
                "tensor parallelism needs a process group: call torch.distributed.init_process_group first"
            )
        group = dist.group.WORLD if tp_group is None else tp_group
        assert group is not None
        check_member("tp_group", group)
        size = dist.get_world_size(group)
        if self.tp_size not in (1, size):
            raise ValueError(f"tp_group has {size} ranks, but the weights are split over {self.tp_size}")
        self.tp_size, self.tp_rank, self.tp_group_name = size, dist.get_rank(group), group.group_name

    @property
    def tp_group(self) -> dist.ProcessGroup | None:
        """The process group; None if the layer is not split."""
        return None if self.tp_size == 1 else resolve_group(self.tp_group_name)

    def split_features(self, split: TensorParallelSplit, in_features: int, out_features: int) -> tuple[int, int]:
        """Take over how a layer with one weight is split, and return this rank's in and out features.

        Sets `parallel_mode`, to None where there is one rank. ValueError for an unknown one.
        """
        parallel_mode = split.mode
        check_choice("parallel_mode", parallel_mode, (None, *_WEIGHT_DIM))
        self.set_parallel(split.group, split.size, split.sequence_parallel)
        vars(self).update(asked_mode=parallel_mode, parallel_mode=parallel_mode if self.tp_size > 1 else None)
        if self.parallel_mode == "column":
            out_features = self.part(out_features, "out_features")
        elif self.parallel_mode == "row":
            in_features = self.part(in_features, "in_features")
        return in_features, out_features

    def split_dim(self, *, bias: bool = False) -> int | None:
        """Return the dimension along which the weight [out, in], or the bias [out], is split, over one rank, too; None:
        not split."""
        if self.asked_mode is None or (bias and self.asked_mode == "row"):
            return None
        return _WEIGHT_DIM[self.asked_mode]

    def part(self, features: int, name: str) -> int:
        """Return this rank's share of `features`."""
        if features % self.tp_size:
            raise ValueError(f"{name} is {features}, which {self.tp_size} ranks cannot share equally")
        return features // self.tp_size

    def fill_part(self, parameter: Tensor, init_method: InitMethod, dim: int | None, stride: int = 1) -> None:
        """Fill a parameter, split along `dim`, with this rank's part of what `init_method` gives the whole.

        With one seed on all ranks the split layer is the unsplit one. dim None: not split; stride: how many equal
        blocks are split."""
        if dim is None or self.tp_size == 1:
            init_method(parameter)
            return
        shape = list(parameter.shape)
        shape[dim] *= self.tp_size
        whole = torch.empty(shape, dtype=parameter.dtype, device=parameter.device)
        init_method(whole)
        parameter.copy_(rank_part(whole, dim, self.tp_rank, self.tp_size, stride))

    def mark_part(self, parameter: nn.Parameter | None, dim: int | None, stride: int = 1) -> None:
        """Note on a parameter how it is split, if it is."""
        if parameter is not None and dim is not None:
            marks: dict[str, Any] = {"tensor_model_parallel": True, "partition_dim": dim, "partition_stride": stride}
            for name, value in marks.items():
                setattr(parameter, name, value)

    def whole_rows(self, x: Tensor) -> Tensor:
        """Return the input of a column layer: all rows, [ranks T, ...] of [T, ...] under sequence parallelism."""
        if self.tp_size == 1:
            return x
        return _collective(x, "gather" if self.sequence_parallel else "same", self)

    def summed(self, y: Tensor, bias: Tensor | None) -> Tensor:
        """Return the output of a row layer from this rank's product: summed over ranks, this rank's rows of it under
        sequence parallelism, plus the bias."""
        if self.tp_size > 1:
            y = _collective(y, "scatter" if self.sequence_parallel else "sum", self)
        return y if bias is None else y + self.for_own_rows(bias).to(y.dtype)

    def rows_gradient(self, dx: Tensor) -> Tensor:
        """Return the gradient of `whole_rows` in its argument, from the gradient of its result."""
        return dx if self.tp_size == 1 else _collective(dx, "scatter" if self.sequence_parallel else "sum", self)

    def summed_gradient(self, dy: Tensor) -> Tensor:
        """Return the gradient of `summed` in its argument, without a bias, from the gradient of its result."""
        return _collective(dy, "gather", self) if self.sequence_parallel else dy

    def summed_for_all(self, x: Tensor) -> Tensor:
        """Return the sum over ranks of what each computed from its own features, for ranks that go on to compute
        different things with the sum: the gradient is summed, too."""
        return x if self.tp_size == 1 else _collective(_collective(x, "sum", self), "same", self)

    def for_own_rows(self, parameter: Tensor) -> Tensor:
        """Return a parameter that every rank has in full; applied to its own rows only, its gradient is summed."""
        return _collective(parameter, "same", self) if self.sequence_parallel else parameter

    def on_first_rank(self, parameter: Tensor) -> Tensor:
        """Return a parameter that every rank has in full, on the other ranks than the first zeros of its shape: what
        each adds to its part of a sum that the caller takes. The gradient is summed."""
        if self.tp_size == 1:
            return parameter
        shared = _collective(parameter, "same", self)
        return shared if self.tp_rank == 0 else shared * 0

    def features_of_ranks(self, x: Tensor, blocks: tuple[int, ...]) -> list[Tensor]:
        """Return the features of all ranks, of each of the blocks that this rank's x [..., sum of blocks] joins, where
        every rank goes on to compute with them something of its own: the gradient is summed."""
        if self.tp_size == 1:
            return list(x.split(blocks, -1))
        every = _collective(x.movedim(-1, 0), "gather", self).unflatten(0, (self.tp_size, -1))
        return [part.flatten(0, 1).movedim(0, -1) for part in every.split(blocks, 1)]

    def for_own_features(self, x: Tensor) -> Tensor:
        """Return what every rank has in full and uses for its own features only: its gradient is summed."""
        return x if self.tp_size == 1 else _collective(x, "same", self)


def with_summed_gradient(x: Tensor, group: str) -> Tensor:
    """Return x, whose gradient is summed over the ranks of a group. group: a name."""
    return _Collective.apply(x, "same", group)


def rank_part(whole: Tensor, dim: int, rank: int, ranks: int, stride: int = 1) -> Tensor:
    """Return one rank's part of a parameter along `dim`, of each of `stride` equal blocks."""
    blocks = whole.chunk(stride, dim)
    return torch.cat([block.chunk(ranks, dim)[rank] for block in blocks], dim)


_BACKWARD = {"gather": "scatter", "scatter": "gather", "sum": "same", "same": "sum"}


def _collective(x: Tensor, kind: str, module: TensorParallelModule) -> Tensor:
    return _Collective.apply(x, kind, module.tp_group_name)


def _run(x: Tensor, kind: str, group: str) -> Tensor:
    if kind == "same":
        return x.view_as(x)
    collective = {"gather": all_gather, "scatter": reduce_scatter, "sum": all_reduce}[kind]
    return collective(x, group)


class _Collective(torch.autograd.Function):
    """gather: [T, ...] of each rank -> [ranks T, ...]; scatter: [ranks T, ...] -> this rank's rows of the sum; sum: the
    sum over ranks; same: x, whose gradient is summed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, kind: str, group: str) -> Tensor:
        ctx.kind, ctx.group = _BACKWARD[kind], group
        return own_result(_run(x, kind, group))

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        return _run(dy, ctx.kind, ctx.group), None, None
