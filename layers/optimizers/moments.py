"""The moments of FusedAdamW as entries of its state, and in fewer bits: bfloat16, or FP8 with a scale per 128 values.

A moment is a running average: a step moves it by less than the spacing of its format (beta2 = 0.999 changes it by
0.1 %, bfloat16's spacing is 0.4 %), and rounding to nearest would leave it where it is for ever. Both formats therefore
round stochastically, with counter-based bits, so that the average is right and a run can be repeated and resumed.

FP8 stores the second moment v as sqrt(v): that halves its range in powers of two. It is rounded up with the
probability that keeps the mean of the *square*, v itself: an unbiased root would add its variance to v in every step
and grow without bound. A positive value never rounds to zero, since the update divides by it.
"""

from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from te_models.kernels.quantize import hash_key, hashed_bits, scale_from_amax
from te_models.kernels.quantize.cpu import moments as cpu_moments
from te_models.suggestions import check_choice, shown

from ..tensor.fsdp import largest_part, local_part, rows_like
from .adamw_update import Update, compiled_by_shape
from .master_weights import check_entries, check_state_tensors

MomentDtype = Literal["float32", "bfloat16", "float8"]
MOMENT_DTYPES = ("float32", "bfloat16", "float8")
BLOCK = 128
_FP8 = torch.float8_e4m3fn
_MIN_EXPONENT, _MANTISSA_BITS, _MAX = -6, 3, 448.0


def round_words(raw: Tensor, bits: Tensor) -> Tensor:
    """Round float32 numbers stochastically to ones that bfloat16 holds; both as their int32 words.

    bits: int32, the low 16 of which are used. Infinities and NaN stay. Words in and out, because Inductor's C++ backend
    (torch 2.13) casts bits one element at a time, several times slower than the rounding.
    """
    finite = (raw & 0x7FFFFFFF) < 0x7F800000
    return torch.where(finite, (raw + (bits & 0xFFFF)) & -0x10000, raw)


def _to_blocks(x: Tensor) -> Tensor:
    flat = x.reshape(-1)
    return F.pad(flat, (0, -flat.numel() % BLOCK)).view(-1, BLOCK)


def _uniform(bits: Tensor, like: Tensor) -> Tensor:
    """Return the low 16 bits as numbers in [0, 1), in the blocks of `like`."""
    return _to_blocks((bits & 0xFFFF).float() * 2.0**-16).view_as(like)


def _neighbours(magnitude: Tensor) -> tuple[Tensor, Tensor]:
    """Return the E4M3 numbers at or below and above magnitudes of 0..448, float32."""
    # the exponent is in the float32's own bits; below 2^-6 the spacing stays what it is there
    exponent = (magnitude.clamp(min=2.0**_MIN_EXPONENT).view(torch.int32) >> 23) - _MANTISSA_BITS
    quantum = (exponent << 23).view(torch.float32)
    below = torch.floor(magnitude / quantum) * quantum
    return below, (below + quantum).clamp(max=_MAX)


def encode_first(x: Tensor, bits: Tensor) -> tuple[Tensor, Tensor]:
    """Return (data [ceil(n / 128), 128] E4M3, scale_inv [ceil(n / 128)] float32) of a first moment of n values."""
    blocks = _to_blocks(x)
    scale = scale_from_amax(blocks.abs().amax(1), _FP8)
    scaled = (blocks * scale[:, None]).clamp(-_MAX, _MAX)
    magnitude = scaled.abs()
    below, above = _neighbours(magnitude)
    up = _uniform(bits, blocks) * (above - below) < magnitude - below
    data = torch.copysign(torch.where(up, above, below), scaled)
    return data.to(_FP8), torch.div(torch.ones_like(scale), scale)


def encode_second(v: Tensor, bits: Tensor) -> tuple[Tensor, Tensor]:
    """Return (data, scale_inv) of the square root of a second moment; shapes as for `encode_first`."""
    # by way of float64, because a float32 root is not correctly rounded everywhere (MKL's is one ulp off at times)
    root = _to_blocks(v).double().sqrt().float()
    scale = scale_from_amax(root.amax(1), _FP8)
    scaled = (root * scale[:, None]).clamp(max=_MAX)
    below, above = _neighbours(scaled)
    up = _uniform(bits, root) * (above * above - below * below) < scaled * scaled - below * below
    up = up | ((below == 0) & (scaled > 0))
    return torch.where(up, above, below).to(_FP8), torch.div(torch.ones_like(scale), scale)


def decode_first(data: Tensor, scale_inv: Tensor, shape: torch.Size) -> Tensor:
    """Return the first moment in float32."""
    return (data.float() * scale_inv[..., None]).view(-1)[: shape.numel()].view(shape)


def decode_second(data: Tensor, scale_inv: Tensor, shape: torch.Size) -> Tensor:
    """Return the second moment in float32."""
    return decode_first(data, scale_inv, shape).square_()


MOMENT_KEYS: dict[str, tuple[str, ...]] = {
    "float32": ("exp_avg", "exp_avg_sq"),
    "bfloat16": ("exp_avg", "exp_avg_sq"),
    "float8": ("exp_avg", "exp_avg_scale_inv", "exp_avg_sq", "exp_avg_sq_scale_inv"),
}
"""The entries of a parameter's state that are its moments."""


class MomentStore:
    """Moments of one dtype, rounded with the bits of `hashed_bits` for (seed, step, parameter, element).

    compile: compile what reads and rounds, with the same bits. Raises ValueError for an unknown dtype.
    """

    def __init__(self, dtype: MomentDtype, seed: int, compile: bool) -> None:
        check_choice("moment_dtype", dtype, MOMENT_DTYPES)
        self.dtype: MomentDtype = dtype
        self.seed = seed
        self._round: Callable[..., tuple[Tensor, ...]] = torch.compile(_round, dynamic=True) if compile else _round
        self._compile = compile
        self._encode = _compiled_encode() if compile else _encode
        self._decode: Callable[..., tuple[Tensor, Tensor]] = _compiled_decode() if compile else _decode

    def stored(self, state: dict[str, Tensor]) -> list[Tensor]:
        """Return the entries of a parameter's state that are its moments."""
        return [state[name] for name in MOMENT_KEYS[self.dtype]]

    def zeros(self, parameter: Tensor, local: Tensor) -> dict[str, Tensor]:
        """Return the state of moments that are zero. local: this rank's part of the parameter."""
        if self.dtype != "float8":
            dtypes = {name: dtype for name, (_, dtype) in self.expected(parameter).items()}
            return {n: torch.zeros_like(parameter, dtype=dtype, requires_grad=False) for n, dtype in dtypes.items()}
        blocks = _blocks_of(parameter)
        data = torch.zeros(*blocks, BLOCK, dtype=torch.float32, device=local.device).to(torch.float8_e4m3fn)
        scale_inv = torch.ones(blocks, dtype=torch.float32, device=local.device)
        fields = (rows_like(parameter, field) for field in (data, scale_inv, data.clone(), scale_inv.clone()))
        return dict(zip(MOMENT_KEYS["float8"], fields, strict=True))

    def expected(self, parameter: Tensor) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Return shape and dtype of each entry of a parameter's moments, of this rank's part where it is sharded."""
        local = local_part(parameter)
        if self.dtype != "float8":
            dtype = torch.bfloat16 if self.dtype == "bfloat16" else working_dtype(local)
            return {name: (tuple(local.shape), dtype) for name in MOMENT_KEYS[self.dtype]}
        blocks = _blocks_of(parameter)
        data, scale_inv = ((*blocks, BLOCK), torch.float8_e4m3fn), (blocks, torch.float32)
        return dict(zip(MOMENT_KEYS["float8"], (data, scale_inv, data, scale_inv), strict=True))

    def check(self, parameter: Tensor, state: dict[str, Any]) -> None:
        """Raise ValueError unless `state` is a state of a parameter as this optimizer stores it, complete and in the
        shapes and dtypes it has here: the update reads and writes it element by element, unchecked. A master may be
        missing."""
        check_state_tensors(state)
        saved: MomentDtype = "float32"
        if any(name.endswith("_scale_inv") for name in state):
            saved = "float8"
        elif "exp_avg" in state and state["exp_avg"].dtype is torch.bfloat16:
            saved = "bfloat16"
        if saved != self.dtype:
            raise ValueError(
                f"the state dict holds moments of moment_dtype={shown(saved)}, but this optimizer was made with "
                f"moment_dtype={shown(self.dtype)}; make it with the one that was saved"
            )
        shapes = {"step": ((), torch.float32), "master": (tuple(local_part(parameter).shape), torch.float32)}
        shapes |= self.expected(parameter)
        if "exp_avg_scale_inv" in shapes and "exp_avg_scale_inv" in state:
            found, blocks = tuple(local_part(state["exp_avg_scale_inv"]).shape), shapes["exp_avg_scale_inv"][0]
            if found != blocks:
                raise ValueError(
                    f"the state dict holds FP8 moments in blocks {found} of a parameter of shape "
                    f"{tuple(parameter.shape)}, and here they are {blocks}: it was sharded over another number of "
                    "ranks; allowed: the same number"
                )
        check_entries(parameter, state, shapes, {"master"})

    def read(self, state: dict[str, Tensor], like: Tensor) -> tuple[Tensor, Tensor]:
        """Return both moments in the shape and dtype of `like`; where the state has them so, its very tensors."""
        if self.dtype == "float8":
            first, second = self._decode(*self.stored(state), like.shape)
            return first.to(like.dtype), second.to(like.dtype)
        return state["exp_avg"].to(like.dtype), state["exp_avg_sq"].to(like.dtype)

    def rounded(self, update: Update, in_place: bool = False) -> dict[str, Tensor]:
        """Return the new state of the moments of an update; nothing where it is written already: "float32" always is,
        others may be with `in_place`. Of a shard that is smaller than others it is the first blocks.

        One draw of 32 bits serves both, 16 bits each.
        """
        if self.dtype == "float32":
            return {}
        piece, device = update.piece, update.first.device
        step = piece.state["step"].to(torch.int32)
        draw = (hash_key(self.seed, piece.index, device), step, _word(piece.begin, device))
        first, second = (moment.float().reshape(-1) for moment in (update.first, update.second))
        stored = self.stored(piece.state)
        if in_place and self._compile and _written(first, second, draw, stored):
            return {}
        if self.dtype == "float8":
            encoded = self._encode(first, second, *draw)
        else:
            words = self._round(first.view(torch.int32), second.view(torch.int32), *draw)
            # float32 numbers that bfloat16 holds: the cast is exact
            encoded = [word.view(torch.float32).view_as(update.first) for word in words]
        return dict(zip(MOMENT_KEYS[self.dtype], encoded, strict=True))


def _blocks_of(parameter: Tensor) -> tuple[int, ...]:
    """Return the shape of the scales of this rank's FP8 moments. Shards that end within a block have a dimension more:
    their blocks change with the number of ranks, and a distributed checkpoint then tells by the shape."""
    size = largest_part(parameter)
    blocks = -(-size // BLOCK)
    return (1, blocks) if size % BLOCK and size != parameter.numel() else (blocks,)


def working_dtype(parameter: Tensor) -> torch.dtype:
    """Return the dtype in which a parameter is updated."""
    return torch.float64 if parameter.dtype is torch.float64 else torch.float32


def _round(first: Tensor, second: Tensor, key: Tensor, step: Tensor, begin: Tensor) -> tuple[Tensor, ...]:
    """Round the words of both moments to words of bfloat16 numbers: int32 [n] each."""
    bits = hashed_bits(key, step, begin, first.shape)
    return round_words(first, bits), round_words(second, bits >> 16)


def _encode(first: Tensor, second: Tensor, key: Tensor, step: Tensor, begin: Tensor) -> tuple[Tensor, ...]:
    """Return both moments, float32 [n] each, as FP8 stores them."""
    bits = hashed_bits(key, step, begin, first.shape)
    return *encode_first(first, bits), *encode_second(second, bits >> 16)


def _decode(
    first: Tensor, first_scale_inv: Tensor, second: Tensor, second_scale_inv: Tensor, shape: torch.Size
) -> tuple[Tensor, Tensor]:
    """Return both moments in float32 from what `_encode` returned."""
    decoded = decode_first(first, first_scale_inv, shape)
    return decoded, decode_second(second, second_scale_inv, shape)


def _compiled_encode() -> Callable[..., tuple[Tensor, ...]]:
    """Return `_encode` as one pass in C++ where it can be, else compiled by shape. A NaN is left to the latter."""
    by_shape = compiled_by_shape(_encode)

    def encode(first: Tensor, second: Tensor, key: Tensor, step: Tensor, begin: Tensor) -> tuple[Tensor, ...]:
        if cpu_moments.available(first, second):
            found = cpu_moments.encode_moments(first, second, key, step, begin)
            if found is not None:
                return found
        return by_shape(first, second, key, step, begin)

    return encode


def _written(first: Tensor, second: Tensor, draw: tuple[Tensor, ...], stored: list[Tensor]) -> bool:
    """Round both moments to where they are stored, if one pass in C++ can; whether that is done."""
    if not cpu_moments.available(first, second, *stored):
        return False
    if len(stored) == 2:
        return cpu_moments.round_moments(first, second, *draw, out=stored)
    if stored[1].numel() != -(-first.numel() // BLOCK):  # a shard that is smaller than others
        return False
    return cpu_moments.encode_moments(first, second, *draw, out=stored) is not None


def _compiled_decode() -> Callable[..., tuple[Tensor, Tensor]]:
    """Return `_decode` as one pass in C++ where it can be, else compiled by shape."""
    by_shape = compiled_by_shape(_decode)

    def decode(*stored_and_shape: Any) -> tuple[Tensor, Tensor]:
        if cpu_moments.available(*stored_and_shape[:-1]):
            found = cpu_moments.decode_moments(*stored_and_shape)
            if found is not None:
                return found
        return by_shape(*stored_and_shape)

    return decode


def _word(number: int, device: torch.device) -> Tensor:
    """Return the low 32 bits of a number as an int32 scalar, without the host waiting for the device."""
    return torch.full((), (number + 2**31) % 2**32 - 2**31, dtype=torch.int32, device=device)
