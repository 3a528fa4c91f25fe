"""Attention of one query of each head to the keys of a cache: what it computes, where it runs."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from te_models import GPTModel, generate
from te_models.kernels.decode_attention import attend_one, op, uses_decode_attention
from te_models.layers.attention import core
from tests.build import tiny
from tests.kernels.fewer_instructions import compiled_quickly
from tests.kernels.gemm.test_few_rows import BF16, F32, INSTRUCTIONS

pytestmark = pytest.mark.skipif(not torch.cpu._is_avx2_supported(), reason="the kernel is for x86 CPUs with AVX2")
SHAPES = (  # batch, heads, groups, keys, channels of keys and of values
    (1, 8, 4, 300, 64, 64),
    (2, 9, 3, 257, 48, 80),
    (3, 4, 4, 1, 16, 16),
    (2, 8, 1, 519, 112, 16),
    (1, 6, 2, 1030, 32, 256),
)


@pytest.fixture(params=INSTRUCTIONS)
def instructions(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The library of this CPU's widest vectors, and that of AVX2's."""
    if request.param == "avx2":
        function = op._function
        monkeypatch.setattr(op, "_function", lambda dtype: compiled_quickly(function, dtype, True))


def inputs(shape: tuple[int, ...], dtype: torch.dtype, magnitude: float = 1.0) -> tuple[Tensor, Tensor, Tensor]:
    """Return a query, and keys and values as a part of a cache's buffer."""
    batch, heads, groups, keys, channels, width = shape
    generator = torch.Generator().manual_seed(keys)
    query = torch.randn(batch, heads, 1, channels, generator=generator) * magnitude
    cached = (torch.randn(batch, keys + 7, groups, size, generator=generator) for size in (channels, width))
    key, value = (buffer.to(dtype)[:, :keys].transpose(1, 2) for buffer in cached)
    return query.to(dtype), key, value


def definition(query: Tensor, key: Tensor, value: Tensor, visible: Tensor | None, scale: float) -> Tensor:
    """Return attention in float64."""
    shared = query.shape[1] // key.shape[1]
    key, value = (x.double().repeat_interleave(shared, 1) for x in (key, value))
    scores = query.double() @ key.transpose(2, 3) * scale
    if visible is None:
        return torch.softmax(scores, -1) @ value
    return torch.softmax(scores.masked_fill(~visible, -torch.inf), -1).masked_fill(~visible, 0.0) @ value


def assert_close(found: Tensor, expected: Tensor, magnitude: float = 1.0) -> None:
    """magnitude: of the scores, whose roundings in float32 are multiplied by the exponential."""
    tolerance = 6e-6 * magnitude if found.dtype == F32 else 2.0**-8
    torch.testing.assert_close(found.double(), expected, rtol=tolerance, atol=tolerance / 2)


@pytest.mark.parametrize("dtype", (BF16, F32))
def test_it_is_softmax_attention(instructions: None, dtype: torch.dtype) -> None:
    for shape in SHAPES:
        for magnitude in (1.0, 30.0):
            query, key, value = inputs(shape, dtype, magnitude)
            scale = 1 / math.sqrt(shape[4])
            found = attend_one(query, key, value, None, scale)
            assert found.shape == (*query.shape[:3], shape[5]) and found.dtype == dtype
            assert_close(found, definition(query, key, value, None, scale), magnitude)


@pytest.mark.parametrize("dtype", (BF16, F32))
def test_hidden_keys_take_no_part(instructions: None, dtype: torch.dtype) -> None:
    query, key, value = inputs((3, 8, 4, 600, 64, 32), dtype)
    visible = torch.rand(3, 1, 1, 600, generator=torch.Generator().manual_seed(0)) > 0.5
    visible[0, ..., :400] = False  # more than are computed together
    visible[1] = False
    found = attend_one(query, key, value, visible, 0.125)
    assert_close(found, definition(query, key, value, visible, 0.125))
    assert (found[1] == 0).all()
    one = attend_one(query, key, value, visible[2:], 0.125)
    assert_close(one, definition(query, key, value, visible[2:], 0.125))
    assert torch.equal(one[2], found[2])


def test_slots_behind_the_last_visible_key_are_not_read(instructions: None) -> None:
    query, key, value = inputs((1, 8, 4, 900, 64, 32), F32)
    visible = (torch.arange(900) < 290).view(1, 1, 1, -1)
    expected = attend_one(query, key, value, visible, 0.125)
    for slots in (key, value):
        slots[:, :, 290:] = math.nan
    assert torch.equal(attend_one(query, key, value, visible, 0.125), expected)
    assert torch.equal(attend_one(query, key[:, :, :290], value[:, :, :290], None, 0.125), expected)


@pytest.mark.parametrize("value", (math.nan, math.inf))
def test_what_is_no_number_shows(instructions: None, value: float) -> None:
    for which in (0, 1, 2):
        tensors = inputs((1, 4, 2, 600, 32, 32), F32)
        tensors[which][0, 0, -1, 3] = value
        found, expected = attend_one(*tensors, None, 0.2), definition(*tensors, None, 0.2)
        assert torch.equal(found.isnan(), expected.isnan())
        assert math.isinf(value) or found.isnan().any()


def test_threads_and_other_rows_change_no_bit(instructions: None) -> None:
    query, key, value = inputs((2, 12, 3, 700, 64, 64), BF16)
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found.append(attend_one(query, key, value, None, 0.125))
            rows = [attend_one(*(x[i : i + 1] for x in (query, key, value)), None, 0.125) for i in (0, 1)]
            found.append(torch.cat(rows))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(found[0], other) for other in found[1:])


def test_it_serves_one_query_of_plain_tensors() -> None:
    query, key, value = inputs((2, 8, 4, 300, 64, 64), F32)
    visible = torch.ones(2, 1, 1, 300, dtype=torch.bool)
    assert all(uses_decode_attention(query, key, value, sees) for sees in (None, visible, visible[:1]))
    assert not uses_decode_attention(query.expand(-1, -1, 2, -1), key, value, None)
    assert not uses_decode_attention(query, key, value, visible.float()) and not uses_decode_attention(
        query, key, value, visible.expand(-1, 8, -1, -1)
    )
    assert not uses_decode_attention(query.double(), key.double(), value.double(), None) and not uses_decode_attention(
        query, key.bfloat16(), value, None
    )
    assert not uses_decode_attention(query, key[..., :8], value, None)
    assert not uses_decode_attention(query, key[:, :, :3], value[:, :, :3], None)
    assert not uses_decode_attention(query.repeat(1, 8, 1, 1), key, value, None), "a matrix product is faster"
    assert not uses_decode_attention(query, key, value.clone().requires_grad_(), None)
    with torch.no_grad():
        assert uses_decode_attention(query, key, value.clone().requires_grad_(), None)
    with torch.autocast("cpu", dtype=BF16):
        assert not uses_decode_attention(query, key, value, None)
        assert uses_decode_attention(query.bfloat16(), key.bfloat16(), value.bfloat16(), None)
    each = torch.func.vmap(lambda q: torch.tensor(float(uses_decode_attention(q, key, value, None))))
    assert not each(query[None]).any()


@pytest.mark.parametrize("mask", (False, True))
def test_attention_calls_it(monkeypatch: pytest.MonkeyPatch, mask: bool) -> None:
    calls: list[Any] = []
    monkeypatch.setattr(core, "attend_one", lambda *arguments: calls.append(arguments) or attend_one(*arguments))
    query, key, value = inputs((2, 8, 4, 300, 64, 64), F32)
    visible = torch.rand(2, 1, 1, 300) > 0.3 if mask else None
    options: dict[str, Any] = {"causal": False, "scale": 0.125, "softcap": None, "dropout": 0.0}
    found = core.attend(query, key, value, visible, None, None, **options)
    assert len(calls) == 1
    assert_close(found, definition(query, key, value, visible, 0.125))
    for other in ({"softcap": 5.0}, {"dropout": 0.5}):
        core.attend(query, key, value, visible, None, None, **options | other)
    core.attend(query, key, value, visible, torch.zeros(8, 1, 300), None, **options)
    core.attend(query, key, value, visible, None, torch.zeros(8), **options)
    assert len(calls) == 1


def test_graphs_hold_it() -> None:
    query, key, value = inputs((2, 8, 4, 300, 64, 64), F32)
    visible = torch.arange(300).expand(2, 1, 1, 300) < 200
    options: dict[str, Any] = {"causal": False, "scale": 0.125, "softcap": None, "dropout": 0.0}
    graphs: list[Any] = []
    call = torch.compile(core.attend, backend=lambda graph, _: graphs.append(graph) or graph, fullgraph=True)
    for wanted, tensors in enumerate(((query, key, value.clone().requires_grad_()), (query, key, value))):
        found = call(*tensors, visible, None, None, **options)
        assert_close(found.detach(), definition(query, key, value, visible, 0.125))
        held = [n for n in graphs[-1].graph.nodes if n.target is torch.ops.te_models.decode_attention.default]
        assert len(held) == wanted


def test_the_text_of_a_model_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    model = GPTModel(tiny(hidden_size=64)).eval()
    ids = torch.randint(0, 60, (2, 24))
    mask = torch.ones_like(ids).bool()
    mask[0, :5] = False
    monkeypatch.setattr(op, "LEAST", 0)
    calls: list[Any] = []
    monkeypatch.setattr(core, "attend_one", lambda *arguments: calls.append(arguments) or attend_one(*arguments))
    found = generate(model, ids, 8, attention_mask=mask)
    assert len(calls) == 7 * model.config.num_layers
    monkeypatch.setattr(core, "uses_decode_attention", lambda *_: False)
    assert torch.equal(found, generate(model, ids, 8, attention_mask=mask))
