"""Rotary embedding: frequencies bit for bit as published, rotation against complex numbers in float64."""

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from te_models.kernels.rope import apply_rope, rope_frequencies, rope_tables
from tests.compare import refused

pytestmark = pytest.mark.usefixtures("each_backend")

UNIT = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8}

LONG = {"scaling": "longrope", "factor": 1.0, "original_max_position_embeddings": 8}
SCALINGS = {
    "none": {},
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 3.0},
    "llama3": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 16},
    "yarn_options": {"factor": 40.0, "original_max_position_embeddings": 32, "beta_fast": 16.0, "beta_slow": 2.0}
    | {"mscale": 0.7, "mscale_all_dim": 1.0, "truncate": False},
    "yarn_attention_factor": {"factor": 4.0, "original_max_position_embeddings": 16, "attention_factor": 1.25},
    "proportional": {"factor": 2.0},
}


def their_frequencies(scaling: str, head_dim: int, base: float, options: dict, length: int | None = None):
    """Frequencies and attention factor of transformers, for a model of 64 positions."""
    parameters = {"rope_type": "default" if scaling == "none" else scaling, "rope_theta": base, **options}
    sizes = {"hidden_size": 2 * head_dim, "num_attention_heads": 2, "head_dim": head_dim}
    config = LlamaConfig(max_position_embeddings=64, rope_parameters=parameters, **sizes)
    if scaling == "none":
        return LlamaRotaryEmbedding.compute_default_rope_parameters(config)
    return ROPE_INIT_FUNCTIONS[scaling](config, torch.device("cpu"), seq_len=length)


@pytest.mark.parametrize("head_dim", [8, 64, 80, 128])
@pytest.mark.parametrize("base", [10000.0, 500000.0])
@pytest.mark.parametrize("name", SCALINGS)
def test_frequencies_equal_transformers(name: str, base: float, head_dim: int) -> None:
    scaling = name.split("_")[0]
    expected, factor = their_frequencies(scaling, head_dim, base, SCALINGS[name])
    got, got_factor = rope_frequencies(head_dim, base, scaling=scaling, max_position_embeddings=64, **SCALINGS[name])
    assert torch.equal(got, expected) and got_factor == factor


@pytest.mark.parametrize("length", [1, 64, 65, 1000])
def test_dynamic_frequencies_follow_the_sequence(length: int) -> None:
    expected, _ = their_frequencies("dynamic", 64, 10000.0, {"factor": 3.0}, length)
    options = {"scaling": "dynamic", "factor": 3.0, "max_position_embeddings": 64}
    got, _ = rope_frequencies(64, 10000.0, sequence_length=torch.tensor(length), **options)
    # A power with a tensor base differs from one with a scalar base by a last bit.
    assert torch.allclose(got, expected, rtol=4 * UNIT[torch.float32], atol=0)


def test_dynamic_alpha_raises_the_base_once() -> None:
    got, _ = rope_frequencies(64, 10000.0, scaling="dynamic", alpha=1000.0)
    expected, _ = rope_frequencies(64, 10000.0 * 1000.0 ** (64 / 62))
    assert torch.equal(got, expected)


@pytest.mark.parametrize("length", [64, 65])
def test_longrope_frequencies_choose_the_list_by_length(length: int) -> None:
    options = {
        "short_factor": [1.0 + i / 10 for i in range(8)],
        "long_factor": [2.0 + i for i in range(8)],
        "original_max_position_embeddings": 64,
        "factor": 4.0,
    }
    expected, factor = their_frequencies("longrope", 16, 10000.0, options, length)
    got, got_factor = rope_frequencies(16, 10000.0, scaling="longrope", sequence_length=torch.tensor(length), **options)
    assert torch.equal(got, expected) and got_factor == factor


def test_partial_rotation_has_the_frequencies_of_a_smaller_head() -> None:
    got, _ = rope_frequencies(128, 10000.0, rotary_percent=0.25)
    assert torch.equal(got, rope_frequencies(32, 10000.0)[0])


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"scaling": "ntk"}, "scaling is 'ntk'"),
        ({"scaling": "linear"}, "needs factor"),
        ({"scaling": "yarn", "factor": 2.0}, "needs original_max_position_embeddings"),
        ({"rotary_percent": 0.2}, "rotary_percent is 0.2"),
        ({**LONG, "short_factor": [1.0], "long_factor": [1.0]}, "short_factor has 1 entries"),
    ],
)
def test_impossible_frequencies_are_refused(arguments: dict, says: str) -> None:
    refused(lambda: rope_frequencies(16, 10000.0, **arguments), says)


def tables(length: int, channels: int, begin: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    frequencies, _ = rope_frequencies(channels, 10000.0)
    return rope_tables(torch.arange(begin, begin + length)[None], frequencies)


def rotated_exactly(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, style: str) -> torch.Tensor:
    """Multiply channel pairs by complex numbers, in float64."""
    turn = torch.complex(cos.double(), sin.double())[:, :, None]
    rotated = 2 * cos.shape[-1]
    head = x[..., :rotated].double()
    if style == "half":
        z = torch.complex(head[..., : rotated // 2], head[..., rotated // 2 :]) * turn
        head = torch.cat((z.real, z.imag), dim=-1)
    else:
        z = torch.view_as_complex(head.unflatten(-1, (-1, 2)).contiguous()) * turn
        head = torch.view_as_real(z).flatten(-2)
    return torch.cat((head, x[..., rotated:].double()), dim=-1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("style", ["half", "interleaved"])
@pytest.mark.parametrize(("length", "channels", "rotated"), [(1, 8, 8), (63, 64, 64), (7, 64, 16), (0, 8, 8)])
def test_rotation_and_gradient(length: int, channels: int, rotated: int, style: str, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(length)
    wide = torch.randn(2, length, 3, 2 * channels, generator=generator).to(dtype)
    x = wide[..., ::2].detach().requires_grad_()  # not contiguous
    cos, sin = tables(length, rotated, begin=5)
    y = apply_rope(x, cos, sin, style)
    assert y.dtype == dtype and y.shape == x.shape
    # Two products and a sum in float32, then one rounding to dtype; |a| + |b| bounds each output.
    size = 2 * x.detach().double().abs().amax() if length else 0.0
    bound = (UNIT[dtype] + 4 * UNIT[torch.float32]) * size
    exact = rotated_exactly(x.detach(), cos, sin, style)
    assert ((y.double() - exact).abs() <= bound).all() and torch.equal(y[..., rotated:], x[..., rotated:])
    grad = torch.randn(y.shape, generator=generator).to(dtype)
    y.backward(grad)
    size = 2 * grad.double().abs().amax() if length else 0.0
    back = rotated_exactly(grad, cos, -sin, style)
    assert ((x.grad.double() - back).abs() <= (UNIT[dtype] + 4 * UNIT[torch.float32]) * size).all()


def test_float32_rotation_equals_transformers() -> None:
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(2, 33, heads, 16, generator=generator) for heads in (4, 2))
    config = LlamaConfig(hidden_size=64, num_attention_heads=4, max_position_embeddings=64)
    positions = torch.arange(33)[None]
    cos, sin = LlamaRotaryEmbedding(config)(q, positions)
    expected = apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=2)
    ours = rope_tables(positions, rope_frequencies(16, 10000.0)[0])
    assert torch.equal(apply_rope(q, *ours), expected[0]) and torch.equal(apply_rope(k, *ours), expected[1])


def test_bfloat16_rotation_is_no_further_from_exact_than_transformers() -> None:
    q = torch.randn(2, 64, 4, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    cos, sin = tables(64, 64)
    full = [torch.cat((t, t), dim=-1).bfloat16() for t in (cos, sin)]
    theirs, _ = apply_rotary_pos_emb(q, q, *full, unsqueeze_dim=2)
    exact = rotated_exactly(q, cos, sin, "half")
    ours = (apply_rope(q, cos, sin).double() - exact).abs()
    assert ours.mean() < (theirs.double() - exact).abs().mean()


def test_scores_depend_on_the_distance_only() -> None:
    q, k = torch.randn(2, 1, 1, 1, 64, generator=torch.Generator().manual_seed(0))
    scores = [
        (apply_rope(q, *tables(1, 64, begin)) * apply_rope(k, *tables(1, 64, begin + 3))).sum() for begin in (0, 9)
    ]
    assert torch.allclose(scores[0], scores[1], rtol=0, atol=64 * 16 * UNIT[torch.float32])


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compiled_rotation_equals_eager(backend: str) -> None:
    x = torch.randn(2, 33, 3, 32, generator=torch.Generator().manual_seed(0)).bfloat16()
    cos, sin = tables(33, 16)

    def both(x: torch.Tensor) -> list[torch.Tensor]:
        return [apply_rope(x, cos, sin, style) for style in ("half", "interleaved")]

    torch.testing.assert_close(torch.compile(both, fullgraph=True, backend=backend)(x), both(x), rtol=0, atol=0)


def test_wrong_arguments_are_refused() -> None:
    x = torch.zeros(1, 2, 1, 8)
    refused(lambda: apply_rope(x, *tables(2, 8), "neox"), "style is 'neox'")
    refused(lambda: apply_rope(x, *tables(2, 16)), "rotate 16 channels, but x has 8")
