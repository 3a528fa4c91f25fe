"""What recurrent mixers share: rows of projections by rank, a short convolution before the rule, parameters by head.

B batch, S sequence, H hidden, D channels, W width of the convolution.
"""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from te_models.kernels.gemm import linear
from te_models.kernels.short_convolution import short_convolution
from te_models.kernels.without_autocast import compute_dtype, without_autocast
from te_models.layers.distributed.context_parallel import ContextShard
from te_models.layers.distributed.sequence_parallel import SequenceShard, gather_tokens_of_ranks

from ...config import ModelConfig
from ..build import Build, init_method
from .base import MixerInputs
from .shared_sequence import shared_convolution


class HighPrecisionLinear(nn.Module):
    """A projection in high precision under every recipe, as a router: its rows are fewer than a block of most formats.

    weight: [rows of a rank, in]; whole: every rank has all rows; joins: how many blocks of equally many rows there are,
    of each of which a rank has its share.
    """

    def __init__(
        self, config: ModelConfig, rows: int, columns: int, build: Build, *, whole: bool = False, joins: int = 1
    ) -> None:
        super().__init__()
        own = rows if whole else rows // build.tp_size
        start = build.starting(init_method(config), (rows // joins,) * joins)
        self.init_method = init_method(config) if whole else build.starting_rows(start, rows)
        self.sequence_shard = build.sequence_shard
        self.weight = build.parameter(own, columns)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Initialise the projection again."""
        self.init_method(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        """x: [B, S, in] -> [B, S, rows]."""
        dtype = compute_dtype(x)
        with without_autocast(x):
            return linear(x.to(dtype), self.weight.to(dtype), None)


class HighPrecisionRowParallel(HighPrecisionLinear):
    """A projection in high precision, as `HighPrecisionLinear`, of a rank's own features: its results are summed over
    the ranks.

    weight: [rows, columns of a rank].
    """

    def __init__(self, config: ModelConfig, rows: int, columns: int, build: Build) -> None:
        nn.Module.__init__(self)
        self.start, self.columns, self.build = init_method(config), columns, build
        self.weight = build.parameter(rows, columns // build.tp_size)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Initialise the projection again."""
        if self.build.tp_group is None:
            self.start(self.weight)
        elif not self.weight.is_meta:
            whole = self.start(self.weight.new_empty(self.weight.shape[0], self.columns))
            self.weight.copy_(whole.chunk(self.build.tp_size, 1)[self.build.tp_group.rank()])


def all_tokens(x: Tensor, inputs: MixerInputs, shard: SequenceShard | None) -> Tensor:
    """Return x [B, S, H] of all tokens, in the dtype of compute. shard: how ranks share tokens, where
    inputs.batch_size says so."""
    if inputs.batch_size is not None and shard is not None:
        x = gather_tokens_of_ranks(x, shard).unflatten(0, (inputs.batch_size, -1))
    return x.to(compute_dtype(x))


def start_convolution(weight: Tensor, bias: Tensor | None, blocks: tuple[int, ...], build: Build) -> None:
    """Fill the taps of a rank, blocks being the channels of the whole convolution, as torch fills convolutions."""
    bound = 1 / math.sqrt(weight.shape[1])
    for x in (weight, bias):
        if x is not None:
            start_rows(x, lambda whole: whole.uniform_(-bound, bound), blocks, build)


def start_rows(x: Tensor, start: Callable[[Tensor], Tensor], blocks: tuple[int, ...], build: Build) -> None:
    """Fill a rank's share of a parameter whose rows are these blocks with what `start` gives it in the whole one."""
    if x.is_meta:
        return
    rows = x if x.dim() == 2 else x[:, None]
    with torch.no_grad():
        build.starting_rows(build.starting(start, blocks), sum(blocks))(rows)


def start_steps(x: Tensor, low: float = 1e-3, high: float = 0.1) -> Tensor:
    """Fill the bias of steps so that softplus gives steps between two numbers, evenly in their logarithms."""
    steps = torch.rand(x.shape, device=x.device, dtype=torch.float32)
    steps = (steps * (math.log(high) - math.log(low)) + math.log(low)).exp().clamp_(min=1e-4)
    return x.copy_(steps + (-torch.expm1(-steps)).log())


def convolved(
    x: Tensor,
    inputs: MixerInputs,
    weight: Tensor,
    bias: Tensor | None,
    activation: str | None,
    rows: Tensor | None,
    shard: ContextShard | None,
) -> tuple[Tensor, Tensor | None]:
    """Return the convolution of x [B, S, D], padding as zeros, and the rows that the next call begins with; None where
    ranks share sequences, of which x has a part."""
    if inputs.token_mask is not None:
        x = x * inputs.token_mask[..., None].to(x.dtype)
    if shard is not None:
        return shared_convolution(x, weight, bias, activation, inputs.documents, shard), None
    return short_convolution(x, weight, bias, activation=activation, initial_state=rows, documents=inputs.documents)


def softplus(x: Tensor) -> Tensor:
    """Return log(1 + exp(x)). torch's function of this name has a gradient that, traced, lies in memory as its input
    does, and run, as the gradient that it was given: a view behind it fails."""
    return torch.logaddexp(x, torch.zeros((), dtype=x.dtype, device=x.device))


def silu_gated(y: Tensor, gate: Tensor, activation: str = "silu") -> Tensor:
    """Return y times the activated gate, computed in float32, in y's dtype."""
    wide = gate.float()
    return (y * (F.silu(wide) if activation == "silu" else wide.sigmoid())).to(y.dtype)
