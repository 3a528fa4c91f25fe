"""The random Hadamard transform of NVFP4's weight-gradient operands (arXiv 2509.25149, section 4.2).

Groups of 16 values along the contracted dimension are multiplied by diag(signs) H / 4, H the Sylvester Hadamard matrix:
an orthogonal matrix that spreads an outlier over its group and cancels between the two operands of a product.
"""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import statically_known_true

from ..without_autocast import without_autocast
from .eager import eager_on_cpu
from .fp8.blocks import once_per_block

SIZE = 16
SIGNS = (1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1)
_FACTORS = torch.tensor([sign * 0.25 for sign in SIGNS], dtype=torch.float32, device="cpu")


def _groups(x: Tensor, dim: int) -> list[Tensor]:
    """Return a quarter of the i-th members of all groups, for i = 0..15, in float32; a ragged end is padded with zeros.

    The factor 1/4 is exact for bfloat16; coming first, it keeps sums of large values finite.
    """
    assert dim in (-1, -2)
    if not statically_known_true(x.shape[dim] % SIZE == 0):
        missing = -x.shape[dim] % SIZE
        x = F.pad(x, (0, missing) if dim == -1 else (0, 0, 0, missing))
    return [member.float() * 0.25 for member in x.unflatten(dim, (-1, SIZE)).unbind(dim)]


def _transform(members: list[Tensor]) -> list[Tensor]:
    """Multiply by H: in stage h = 1, 2, 4, 8 members i and i + h become their sum and their difference."""
    members = list(members)
    for h in (1, 2, 4, 8):
        for i in range(SIZE):
            if not i & h:
                a, b = members[i], members[i | h]
                members[i], members[i | h] = a + b, a - b
    return members


def _signed(members: list[Tensor]) -> list[Tensor]:
    return [member if sign > 0 else -member for member, sign in zip(members, SIGNS, strict=True)]


def check_hadamard_dtype(x: Tensor) -> None:
    """Raise ValueError for a dtype that is not transformed."""
    if x.dtype != torch.bfloat16:
        raise ValueError(f"the random Hadamard transform takes bfloat16; got {x.dtype}")


def random_hadamard(x: Tensor, dim: int = -1) -> Tensor:
    """As the public function, sums in the order of the stages."""
    check_hadamard_dtype(x)
    if eager_on_cpu(x):
        return _by_stages(x, dim)
    members = [m.to(torch.bfloat16) for m in _transform(_signed(_groups(once_per_block(x), dim)))]
    # buffers: Inductor drops a rounding to bfloat16 that is between two operations of one kernel (torch 2.13)
    with without_autocast(x):  # which refuses to stack values of another 16-bit dtype than its own
        return once_per_block(torch.stack(members, dim).flatten(dim - 1, dim))


def _by_stages(x: Tensor, dim: int) -> Tensor:
    """`random_hadamard` eagerly: each stage is one sum and one difference of all groups, in the order of the
    definition."""
    if x.shape[dim] % SIZE:
        missing = -x.shape[dim] % SIZE
        x = F.pad(x, (0, missing) if dim == -1 else (0, 0, 0, missing))
    axis = x.dim() + dim + 1  # of the members of a group
    values = x.unflatten(dim, (-1, SIZE)).float() * (_FACTORS if dim == -1 else _FACTORS[:, None])
    for h in (1, 2, 4, 8):
        pairs = values.unflatten(axis, (SIZE // (2 * h), 2, h))
        a, b = pairs.unbind(axis + 1)
        into = torch.empty_like(pairs)
        torch.add(a, b, out=into.select(axis + 1, 0))
        torch.sub(a, b, out=into.select(axis + 1, 1))
        values = into.flatten(axis, axis + 2)
    return values.to(torch.bfloat16, memory_format=torch.contiguous_format).flatten(axis - 1, axis)


def flip_signs(x: Tensor, position: Tensor) -> Tensor:
    """Return x [..., R, C] with the signs of the transform, by which row i is multiplied where position[i] in its group
    of 16 has a minus: exact. Flipped before it, the transform is the one without random signs; and likewise undone."""
    signs = torch.tensor(SIGNS, dtype=x.dtype, device=x.device)[position % SIZE]
    return x * signs[:, None]


def inverse_random_hadamard(y: Tensor, dim: int = -1) -> Tensor:
    """Undo `random_hadamard`, in float32 and without rounding its result; y: a multiple of 16 along `dim`."""
    return torch.stack(_signed(_transform(_groups(y, dim))), dim).flatten(dim - 1, dim)
