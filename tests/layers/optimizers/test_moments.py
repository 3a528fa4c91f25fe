"""Optimizer moments in few bits: exact neighbours, unbiased rounding, running averages that arrive where they must."""

import math

import pytest
import torch

from te_models.kernels.quantize import hash_key, hashed_bits
from te_models.kernels.quantize.cpu import moments as cpu_moments
from te_models.layers import FusedAdamW
from te_models.layers.optimizers import adamw_update, moments

E4M3 = sorted({float(v) for v in torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()})
WAYS = ((moments.encode_first, moments.decode_first), (moments.encode_second, moments.decode_second))


def encode_bfloat16(x: torch.Tensor, bits: torch.Tensor) -> torch.Tensor:
    """Round float32 x stochastically to bfloat16. bits: int32, the low 16 of which are used."""
    return moments.round_words(x.view(torch.int32), bits).view(torch.float32).to(torch.bfloat16)


def draw(seed: int, shape: torch.Size, step: int = 1) -> torch.Tensor:
    zero = torch.zeros((), dtype=torch.int32)
    return hashed_bits(hash_key(seed, 1), zero + step, zero, shape)


def test_bfloat16_rounds_to_a_neighbour_with_the_right_probability() -> None:
    x = torch.tensor([1.0 + 2.0**-9, -3.3, 1e-30, 0.0]).repeat_interleave(20000)
    rounded = encode_bfloat16(x, draw(0, x.shape))
    truncated = (x.view(torch.int32) & -0x10000).view(torch.float32)
    step = torch.nextafter(truncated.bfloat16(), truncated.bfloat16() * 2).float() - truncated
    assert (((rounded.float() - truncated) == 0) | ((rounded.float() - truncated) == step)).all()
    for part, spacing in zip((rounded.float() - x).view(4, -1), step.abs().view(4, -1), strict=True):
        assert abs(part.mean()) <= 4 * spacing[0] / math.sqrt(len(part))
    specials = torch.tensor([float("inf"), float("-inf"), float("nan")])
    found = encode_bfloat16(specials, torch.full((3,), -1, dtype=torch.int32)).float()
    assert torch.equal(found[:2], specials[:2]) and found[2].isnan()


def test_neighbours_are_the_adjacent_e4m3_numbers() -> None:
    values = torch.tensor(E4M3)
    between = torch.cat([values, (values[:-1] + values[1:]) / 2, values[1:] * (1 - 2.0**-20)])
    below, above = moments._neighbours(between)
    assert torch.equal(below, values[torch.searchsorted(values, between, right=True) - 1])
    following = values[torch.searchsorted(values, between, right=True).clamp(max=len(values) - 1)]
    assert torch.equal(above, following)


@pytest.mark.parametrize("size", [1, 127, 128, 129, 1000])
def test_fp8_shapes_and_errors(size: int) -> None:
    torch.manual_seed(size)
    x = torch.randn(size)
    data, scale_inv = moments.encode_first(x, draw(1, x.shape))
    assert data.shape == (-(-size // 128), 128) and data.dtype is torch.float8_e4m3fn
    assert scale_inv.shape == (len(data),)
    error = (moments.decode_first(data, scale_inv, x.shape) - x).abs()
    floor = scale_inv.repeat_interleave(128)[:size] * 2.0**-9
    assert (error <= torch.maximum(x.abs() / 8, floor)).all()
    data, scale_inv = moments.encode_second(x.square(), draw(2, x.shape))
    root = moments.decode_second(data, scale_inv, x.shape).sqrt()
    floor = scale_inv.repeat_interleave(128)[:size] * 2.0**-9
    assert ((root - x.abs()).abs() <= torch.maximum(x.abs() / 8, floor)).all() and (root > 0).all()


def test_one_pass_in_cpp_has_the_same_bits() -> None:
    """Of both moments, with random bits, zeros, infinities and subnormals; a NaN is left to the definition."""
    step, begin = torch.tensor(7, dtype=torch.int32), torch.tensor(-77, dtype=torch.int32)
    for size in (1, 130, 4096):
        first = torch.randn(size) * torch.exp(4 * torch.randn(size))
        second = (torch.randn(size) * torch.exp(4 * torch.randn(size))).square()
        if size > 1000:
            first[:128], second[:256], first[300], second[400], first[600] = 0.0, 0.0, math.inf, math.inf, -0.0
            first[700], second[800] = 1e-41, 1e-41
        draw = (hash_key(5, 3), step, begin)
        found, wanted = cpu_moments.encode_moments(first, second, *draw), moments._encode(first, second, *draw)
        assert found is not None
        for ours, definition in zip(found, wanted, strict=True):
            assert torch.equal(ours.view(torch.uint8), definition.view(torch.uint8))
        for ours, definition in zip(
            cpu_moments.decode_moments(*found, first.shape), moments._decode(*wanted, first.shape), strict=True
        ):
            assert torch.equal(ours, definition)
        out = [torch.zeros_like(field) for field in found]
        cpu_moments.encode_moments(first, second, *draw, out=out)
        assert all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(out, found, strict=True))
        rounded = torch.zeros(2, size, dtype=torch.bfloat16)
        assert cpu_moments.round_moments(first, second, *draw, out=rounded.unbind())
        words = moments._round(first.view(torch.int32), second.view(torch.int32), *draw)
        for ours, definition in zip(rounded, words, strict=True):
            assert torch.equal(ours, definition.view(torch.float32).bfloat16())
        second[0] = math.nan
        assert cpu_moments.encode_moments(first, second, *draw) is None
        assert not cpu_moments.round_moments(first, second, *draw, out=rounded.unbind())
    for wrong in (out[:2], [t.view(torch.uint8)[:1] for t in out]):
        with pytest.raises(ValueError, match=r"out (is|has) .*; allowed: "):
            cpu_moments.encode_moments(first, second, *draw, out=wrong)
    with pytest.raises(ValueError, match=r"out is .*; allowed: bfloat16, 4096 each"):
        cpu_moments.round_moments(first, second, *draw, out=[rounded[0], rounded[1, :5]])


@pytest.mark.parametrize("dtype", ("bfloat16", "float8"))
def test_moments_written_in_place_are_those_of_the_eager_step(dtype: moments.MomentDtype) -> None:
    """Over several steps, with a last block that is not whole, and with a NaN, which the definition rounds."""

    def trained(compile: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        parameter = torch.nn.Parameter(torch.randn(37, 5))
        optimizer = FusedAdamW([parameter], lr=0.1, moment_dtype=dtype, compile=compile)
        store = optimizer._moments  # what rounds after a NaN need not be compiled here
        store._round, store._encode = moments._round, moments._encode
        for step in range(4):
            parameter.grad = torch.randn(37, 5)
            if step == 3:
                parameter.grad[3, 2] = math.nan
            optimizer.step()
        return [parameter.detach(), *(optimizer.state[parameter][name] for name in moments.MOMENT_KEYS[dtype])]

    for eager, compiled in zip(trained(False), trained(True), strict=True):
        torch.testing.assert_close(eager.float(), compiled.float(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("limit", [256, 1 << 20])
def test_pieces_with_scales_of_blocks(limit: int) -> None:
    """Pieces have the blocks of their elements; together they are the parameter."""
    parameter = torch.nn.Parameter(torch.randn(8, 128))
    state = moments.MomentStore("float8", 0, False).zeros(parameter, parameter)
    state |= {"step": torch.zeros(())}
    state["exp_avg_scale_inv"].copy_(torch.arange(8))
    piece = adamw_update.whole_piece(parameter.detach(), parameter.detach(), state, 1)
    cut = list(adamw_update.parameter_slices(piece, limit))
    assert [piece.begin for piece in cut] == list(range(0, 1024, limit))
    assert torch.equal(torch.cat([piece.state["exp_avg_scale_inv"] for piece in cut]), torch.arange(8.0))
    for piece in cut:
        first, _ = moments.MomentStore("float8", 0, False).read(piece.state, piece.parameter)
        assert first.shape == piece.parameter.shape


@pytest.mark.slow
@pytest.mark.parametrize("size", [75, 1000])
def test_compiled_encoding_has_the_same_bits(size: int) -> None:
    """Random bits included."""
    torch.manual_seed(size)
    x = torch.randn(size)

    def encode(x: torch.Tensor, key: torch.Tensor, zero: torch.Tensor) -> tuple[torch.Tensor, ...]:
        bits = hashed_bits(key, zero, zero, x.shape)
        return bits, *moments.encode_first(x, bits), *moments.encode_second(x.square(), bits >> 16)

    arguments = (x, hash_key(5, 6), torch.zeros((), dtype=torch.int32))
    for eager, compiled in zip(encode(*arguments), torch.compile(encode, fullgraph=True)(*arguments), strict=True):
        assert torch.equal(eager.view(torch.uint8), compiled.view(torch.uint8))


def test_zero_moments_stay_zero() -> None:
    zero = torch.zeros(200)
    for encode, decode in WAYS:
        assert torch.equal(decode(*encode(zero, draw(3, zero.shape)), zero.shape), zero)


def test_fp8_rounding_is_unbiased_in_the_moment_itself() -> None:
    row = torch.rand(128) + 0.01
    x = row.repeat(4000)
    for encode, decode in WAYS:
        mean = decode(*encode(x, draw(4, x.shape)), x.shape).view(-1, 128).mean(0)
        # one rounding is off by less than a quarter of v (an eighth of its root, twice)
        assert ((mean - row).abs() <= 4 * 0.25 * row / math.sqrt(4000)).all()
        # the standard deviation is at most half of that; unbiased roots would be 0.1 to 0.2 % too large in v
        assert abs((mean / row - 1).mean()) <= 4 * 0.125 / math.sqrt(x.numel())


def test_a_positive_second_moment_never_becomes_zero() -> None:
    v = torch.full((128,), 1e-12)
    v[0], v[1] = 1.0, 0.0
    for seed in range(5):
        found = moments.decode_second(*moments.encode_second(v, draw(seed, v.shape)), v.shape)
        assert (found[2:] > 0).all() and found[1] == 0


@pytest.mark.sentinels("bfloat16")
@pytest.mark.parametrize("kind", ["bfloat16", "float8"])
def test_a_running_average_follows_a_change_that_rounding_to_nearest_would_not(kind: str) -> None:
    """v starts at 1 and its input drops to 0.25: after 3000 steps of beta2 = 0.999 it is 0.25 + 0.75 * 0.999^3000."""
    v = torch.ones(4096)
    for step in range(3000):
        v = 0.999 * v + 0.001 * 0.25
        bits = draw(5, v.shape, step)
        if kind == "bfloat16":
            v = encode_bfloat16(v, bits).float()
        else:
            v = moments.decode_second(*moments.encode_second(v, bits), v.shape)
    assert v.mean().item() == pytest.approx(0.25 + 0.75 * 0.999**3000, rel=0.03)
    nearest = torch.ones(1, dtype=torch.bfloat16)
    for _ in range(3000):
        nearest = (0.999 * nearest.float() + 0.001 * 0.25).to(torch.bfloat16)
    assert nearest.item() == 1.0
