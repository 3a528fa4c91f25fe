"""Our flash attention on a CPU: within derived bounds of float64, forward and backward, and only where it can be."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.testing import EagerAndRecordGraphs
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from te_models.kernels.flash_attention import flash_attention, library, op, uses_flash_attention
from te_models.kernels.gemm.cpu import using_cpu_gemm
from te_models.kernels.packed_attention import packed_attention, sees_own_document
from te_models.kernels.quantize.cpu import rounding as shared
from te_models.layers import DotProductAttention
from te_models.layers.attention import core, dot_product_attention
from tests.kernels.fewer_instructions import compiled_quickly
from tests.kernels.gemm.test_few_rows import BF16, F32, INSTRUCTIONS
from tests.patches import without_compiler

pytestmark = pytest.mark.skipif(not torch.cpu._is_avx2_supported(), reason="the kernel is for x86 CPUs with AVX2")

forward, backward = op.flash_attention_fwd._init_fn, op.flash_attention_bwd._init_fn

# batch, query heads, key heads, queries, keys, channels of keys, of values, causal
SHAPES = [
    *((1, 9, 3, 200, 200, 64, 64, True), (2, 4, 4, 131, 131, 32, 16, True), (2, 4, 1, 77, 77, 128, 48, True)),
    *((1, 4, 2, 70, 301, 48, 80, True), (1, 2, 2, 65, 33, 16, 256, False), (2, 6, 2, 3, 257, 256, 32, False)),
    (1, 32, 8, 1, 1, 64, 64, True),
]


@pytest.fixture(params=(*INSTRUCTIONS, "floats"))
def instructions(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The library of this CPU's widest vectors, that of AVX2's, and that of a CPU that multiplies in float32."""
    if request.param != INSTRUCTIONS[0]:
        function = library._function

        def fewer(name: str, dtype: torch.dtype, floats: bool) -> Any:
            if request.param == "floats" and (not floats or not torch.cpu._is_avx512_bf16_supported()):
                return function(name, dtype, floats)  # this processor's own
            return compiled_quickly(function, name, dtype, floats, request.param == "avx2")

        monkeypatch.setattr(library, "_function", fewer)
    with using_cpu_gemm("float32" if request.param == "floats" else "bf16"):
        yield request.param


def case(shape: tuple[int, ...], dtype: torch.dtype = F32) -> list[Tensor]:
    """Return q, k and v, [B, S, heads, channels]."""
    torch.manual_seed(0)
    batch, heads, groups, queries, keys, channels, values = shape[:7]
    sizes = ((queries, heads, channels), (keys, groups, channels), (keys, groups, values))
    return [torch.randn(batch, *size).to(dtype) for size in sizes]


def probabilities(q: Tensor, k: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    """Return them in float64 [B, N, S, L], and the log of each sum of exponentials [B, S, N]."""
    q, k = (x.double().transpose(1, 2) for x in (q, k))
    scores = scale * q @ k.repeat_interleave(q.shape[1] // k.shape[1], 1).mT
    if causal:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu_(1 + k.shape[2] - q.shape[2])
        scores = scores.masked_fill(later, float("-inf"))
    return torch.softmax(scores, -1), scores.logsumexp(-1).transpose(1, 2)


def assert_within(found: Tensor, exact: Tensor, bound: Tensor) -> None:
    """bound: of what is computed; the result is rounded once more."""
    bound = bound + torch.finfo(found.dtype).eps / 2 * (exact.abs() + bound)
    excess = (found.double() - exact).abs() / bound.clamp(min=1e-30)
    assert (excess <= 1).all(), excess.max()


def check(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> None:
    """Compare both passes with the definition. Scores and sums are float32, weights P and dS bfloat16 at worst."""
    out, logsumexp = forward(q, k, v, scale, causal)
    p, exact_sum = probabilities(q, k, scale, causal)
    shared_by = q.shape[2] // k.shape[2]
    values, grad = v.double().transpose(1, 2).repeat_interleave(shared_by, 1), torch.randn_like(out)
    exact = p @ values
    scores = scale * q.shape[3] * q.double().abs().amax() * k.double().abs().amax()
    small = (2.0**-24 * (q.shape[3] + scores) + 1e-6).item()  # of scores, which is relative of probabilities
    torch.testing.assert_close(logsumexp.double(), exact_sum, rtol=1e-6, atol=small)
    rounding = torch.finfo(q.dtype).eps / 2 + 2 * small
    of_out = rounding * (p @ values.abs())
    assert_within(out.transpose(1, 2), exact, of_out)

    dq, dk, dv = backward(grad, q, k, v, out, logsumexp, scale, causal)
    assert (dq.shape, dk.shape, dv.shape) == (q.shape, k.shape, v.shape)
    dy, queries = grad.double().transpose(1, 2), q.double().transpose(1, 2)
    keys = k.double().transpose(1, 2).repeat_interleave(shared_by, 1)

    def of_groups(x: Tensor) -> Tensor:
        return x.unflatten(1, (-1, shared_by)).sum(2).transpose(1, 2)

    dp, delta = dy @ values.mT, (dy * exact).sum(-1, keepdim=True)
    ds = scale * p * (dp - delta)
    of_delta = (dy.abs() * (of_out + rounding * exact.abs())).sum(-1, keepdim=True)
    of_ds = rounding * ds.abs() + scale * p * (of_delta + 4 * small * (dy.abs() @ values.abs().mT + delta.abs()))
    assert_within(dv, of_groups(p.mT @ dy), of_groups(rounding * p.mT @ dy.abs()))
    assert_within(dq.transpose(1, 2), ds @ keys, of_ds @ keys.abs())
    assert_within(dk, of_groups(ds.mT @ queries), of_groups(of_ds.mT @ queries.abs()))


@pytest.mark.parametrize("dtype", (BF16, F32))
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_values_and_gradients_are_near_it(instructions: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    check(*case(shape, dtype), scale=shape[5] ** -0.5, causal=bool(shape[7]))


@pytest.mark.parametrize("dtype", (BF16, F32))
def test_large_scores_keep_their_accuracy(dtype: torch.dtype) -> None:
    q, k, v = case((1, 4, 2, 150, 150, 64, 32), dtype)
    check(q, k, v, 20.0, True)
    check(q * 1e-18, k * 1e-18, v * 1e-18, 1.0, True)


def test_values_are_as_near_as_those_of_torch() -> None:
    q, k, v = (x.transpose(1, 2) for x in case((1, 6, 2, 300, 300, 64, 64), BF16))
    options = {"is_causal": True, "enable_gqa": True}
    exact = F.scaled_dot_product_attention(q.double(), k.double(), v.double(), **options)
    found = flash_attention(q, k, v, scale=0.125, causal=True), F.scaled_dot_product_attention(q, k, v, **options)
    errors = [(x.double() - exact).abs().mean().item() for x in found]
    assert errors[0] <= 1.05 * errors[1], errors


@pytest.mark.parametrize("dtype", (BF16, F32))
def test_tensors_need_not_lie_in_order(dtype: torch.dtype) -> None:
    """Heads before positions, all of one projection, and channels that do not lie side by side."""
    q, k, v = torch.randn(2, 90, 6 + 2 + 2, 32).to(dtype).split((6, 2, 2), 2)
    grad = torch.randn(90, 32, dtype=dtype).expand(6, 90, 32)[None].expand(2, -1, -1, -1).transpose(1, 2)
    expected = forward(*(x.contiguous() for x in (q, k, v)), 0.2, True)
    wanted = backward(grad.contiguous(), *(x.contiguous() for x in (q, k, v)), *expected, 0.2, True)
    for lie in (lambda x: x, lambda x: x.transpose(1, 2).contiguous().transpose(1, 2), lambda x: x.mT.contiguous().mT):
        operands = [lie(x) for x in (q, k, v)]
        found = forward(*operands, 0.2, True)
        assert all(map(torch.equal, found, expected))
        assert all(map(torch.equal, backward(grad, *operands, *found, 0.2, True), wanted))


@pytest.mark.parametrize("dtype", (BF16, F32))
@pytest.mark.parametrize("shape", [(1, 2, 1, 400, 400, 32, 32, True), (3, 6, 3, 70, 90, 64, 16, False)], ids=str)
def test_bits_do_not_depend_on_threads(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    q, k, v = case(shape, dtype)
    threads, results = torch.get_num_threads(), []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            found = forward(q, k, v, 0.2, shape[7])
            results.append((*found, *backward(found[0], q, k, v, *found, 0.2, shape[7])))
    finally:
        torch.set_num_threads(threads)
    assert all(map(torch.equal, results[0], results[1])) and all(map(torch.equal, results[0], results[2]))


@pytest.mark.parametrize("value", (torch.inf, torch.nan))
@pytest.mark.parametrize("dtype", (BF16, F32))
def test_infinities_and_nan_show(instructions: str, dtype: torch.dtype, value: float) -> None:
    """Where the definition's result is not finite, and what lies well before is as it would be without."""
    shape = (1, 2, 2, 400, 400, 32, 32, True)
    clean = forward(*case(shape, dtype), 0.2, True)[0]
    for which in range(3):
        operands = case(shape, dtype)
        operands[which][0, 300, 0, 5] = value
        out, logsumexp = forward(*operands, 0.2, True)
        assert torch.equal(out[0, :, 1], clean[0, :, 1]), "another head"
        assert torch.equal(out[0, :200, 0], clean[0, :200, 0])
        gradients = backward(torch.ones_like(out), *operands, out, logsumexp, 0.2, True)
        assert all(x[0, :, 1].isfinite().all() for x in gradients)
        if which == 0:
            assert not out[0, 300, 0].isfinite().any() and torch.equal(out[0, 301:, 0], clean[0, 301:, 0])
            assert not gradients[0][0, 300, 0].isfinite().any() and not gradients[2][0, :301, 0].isfinite().any()
        else:
            p, _ = probabilities(*operands[:2], 0.2, True)
            exact = (p @ operands[2].double().transpose(1, 2))[0, 0, 300:]
            affected = out[0, 300:, 0]
            assert torch.equal(affected.isfinite(), exact.isfinite())
            assert not affected.isfinite().all() and not gradients[0][0, 300:, 0].isfinite().all()


def test_keys_that_are_minus_infinity_get_no_probability(instructions: str) -> None:
    q, k, v = case((1, 1, 1, 300, 300, 16, 16))
    q = q.abs()
    k[0, :140] = -torch.inf
    out, logsumexp = forward(q, k, v, 0.2, True)
    expected = forward(q[:, 140:], k[:, 140:], v[:, 140:], 0.2, True)
    torch.testing.assert_close(out[:, 140:], expected[0], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(logsumexp[:, 140:], expected[1], rtol=1e-5, atol=1e-6)
    assert out[:, :140].isnan().all(), "as a softmax of nothing but minus infinity is"


def test_none_of_something_is_attended_to() -> None:
    for shape in ((0, 4, 2, 70, 70, 16, 16), (1, 4, 2, 0, 70, 16, 16), (1, 4, 2, 70, 0, 16, 16)):
        q, k, v = case(shape)
        out, logsumexp = forward(q, k, v, 0.2, False)
        assert out.shape == q.shape and not out.any() and (logsumexp == -torch.inf).all()
        for x, gradient in zip((q, k, v), backward(out, q, k, v, out, logsumexp, 0.2, False), strict=True):
            assert gradient.shape == x.shape and not gradient.any()


def test_shapes_that_do_not_belong_together_are_named() -> None:
    q, k, v = case((2, 4, 2, 100, 100, 32, 32))
    for wrong in ((q[:1], k, v), (q[:, :, :3], k, v), (q, k[:, 1:], v), (q, k[..., :16], v), (q, k[:, 1:], v[:, 1:])):
        with pytest.raises(ValueError, match=r"; allowed: .*T \[B, L, G, [DV]\]"):
            forward(*wrong, 0.2, True)
    for wrong in ((q[:1], k, v), (q[:, :, :3], k, v), (q, k[:, 1:], v), (q, k[..., :16], v)):
        assert not uses_flash_attention(*(x.transpose(1, 2) for x in wrong), 0.2)


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """[B, S, heads * 32] -> [B, S, N * 32]"""
    operands = (x.unflatten(2, (heads, 32)).transpose(1, 2) for x, heads in ((q, 4), (k, 2), (v, 2)))
    options = {"causal": True, "scale": 0.2, "softcap": None, "dropout": 0.0}
    return core.attend(*operands, None, None, None, **options).transpose(1, 2).flatten(2)


def flat(length: int, dtype: torch.dtype = F32) -> list[Tensor]:
    return [x.flatten(2).requires_grad_() for x in case((2, 4, 2, length, length, 32, 32), dtype)]


@pytest.mark.sentinels("True")
@pytest.mark.parametrize("dynamic", (False, True))
def test_a_graph_has_the_bits_of_eager_code(dynamic: bool) -> None:
    compiled = torch.compile(attend, fullgraph=True, dynamic=dynamic)
    for length in (70, 91, 64) if dynamic else (70,):
        inputs = flat(length, BF16)
        dy = torch.randn(2, length, 128).to(BF16)
        expected, found = attend(*inputs), compiled(*inputs)
        assert torch.equal(found, expected)
        assert all(map(torch.equal, *(torch.autograd.grad(y, inputs, dy) for y in (found, expected))))


def test_graphs_of_enough_queries_have_it() -> None:
    cases = ((64, BF16, False, True), (63, BF16, False, False), (95, F32, False, False), (95, F32, True, True))
    for length, dtype, dynamic, inside in cases:
        torch._dynamo.reset()
        backend = EagerAndRecordGraphs()
        torch.compile(attend, fullgraph=True, backend=backend, dynamic=dynamic)(*flat(length, dtype))
        assert ("te_models.flash_attention_fwd" in backend.graphs[0].code) == inside, (length, dynamic)


def test_an_exported_program_has_torchs() -> None:
    class Attend(torch.nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return attend(q, k, v)

    program = torch.export.export(Attend(), tuple(x.detach() for x in flat(100)))
    assert "flash_attention_fwd" not in program.graph_module.code


class Subclass(Tensor):
    pass


def test_it_serves_plain_tensors_alone() -> None:
    q, k, v = (x.transpose(1, 2) for x in case((1, 4, 2, 96, 96, 32, 32)))
    assert uses_flash_attention(q, k, v, 0.2) and uses_flash_attention(q.bfloat16(), k.bfloat16(), v.bfloat16(), 0.2)
    assert uses_flash_attention(torch.nn.Parameter(q), k, v, 0.2)
    assert not uses_flash_attention(q[:, :, 1:], k, v, 0.2)
    assert not any(uses_flash_attention(q, k, v, scale) for scale in (0.0, -1.0, float("nan")))
    assert not uses_flash_attention(q, k.bfloat16(), v, 0.2)
    assert not uses_flash_attention(q.half(), k.half(), v.half(), 0.2)
    assert not uses_flash_attention(q.double(), k.double(), v.double(), 0.2)
    assert not uses_flash_attention(q[..., :24], k[..., :24], v, 0.2)
    assert not uses_flash_attention(q, k, v[..., :8], 0.2)
    assert not uses_flash_attention(q.repeat(1, 1, 1, 9), k.repeat(1, 1, 1, 9), v, 0.2)
    assert not uses_flash_attention(q, k, v.as_subclass(Subclass), 0.2)
    assert not torch.func.vmap(lambda one: torch.tensor(float(uses_flash_attention(one[None], k, v, 0.2))))(q).any()
    with torch.autocast("cpu", dtype=BF16):
        assert not uses_flash_attention(q, k, v, 0.2)
        assert uses_flash_attention(q.bfloat16(), k.bfloat16(), v.bfloat16(), 0.2)
    with FakeTensorMode():
        assert not uses_flash_attention(*(torch.empty(1, 4, 96, 32) for _ in range(3)), 0.2)


def test_second_derivatives_are_those_of_the_definition() -> None:
    def twice(function, inputs: list[Tensor]) -> tuple[Tensor, ...]:
        first = torch.autograd.grad(function(*inputs).square().sum(), inputs, create_graph=True)
        return torch.autograd.grad(sum(x.square().sum() for x in first), inputs)

    def definition(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.unflatten(2, (-1, 32)) for x in (q, k, v))
        p, _ = probabilities(q, k, 0.2, True)
        return (p @ v.double().transpose(1, 2).repeat_interleave(2, 1)).transpose(1, 2).flatten(2)

    inputs = flat(96)
    for found, wanted in zip(twice(attend, inputs), twice(definition, inputs), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-5 * wanted.abs().max().item())


def test_layers_call_it_where_there_is_neither_mask_nor_dropout(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    run = core.flash_attention.flash_attention
    monkeypatch.setattr(core.flash_attention, "flash_attention", lambda *a, **b: calls.append(b) or run(*a, **b))
    q, k, v = (x.requires_grad_() for x in case((1, 4, 2, 100, 100, 32, 32)))
    layer = DotProductAttention(4, 32, 2, qkv_format="bshd")
    y = layer(q, k, v)
    assert len(calls) == 1 and calls[0]["causal"]
    layer(q, k, v, torch.zeros(1, 1, 1, 100, dtype=torch.bool), attn_mask_type="padding_causal")
    DotProductAttention(4, 32, 2, qkv_format="bshd", attention_dropout=0.1)(q, k, v)
    layer(q[:, :95], k[:, :95], v[:, :95])
    assert len(calls) == 1
    again = layer(q, k, v, checkpoint_core_attention=True)
    found, wanted = (torch.autograd.grad(out.sum(), (q, k, v)) for out in (again, y))
    assert all(map(torch.equal, found, wanted))
    repeated = checkpoint(layer, q, k, v, use_reentrant=False)
    assert all(map(torch.equal, torch.autograd.grad(repeated.sum(), (q, k, v)), wanted))


@pytest.mark.parametrize("causal", (True, False))
@pytest.mark.parametrize("queries", (150, 96))
def test_documents_attend_by_it(queries: int, causal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where queries begin within a document, and with sinks."""
    documents = torch.tensor([[0] * 50 + [1] * 83 + [3] + [-1] * 16, [5] * 150])
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, h, 150, c).requires_grad_() for h, c in ((4, 32), (2, 32), (2, 16)))
    sink = torch.randn(4, requires_grad=True)
    last = q[:, :, -queries:].detach().requires_grad_()
    tensors = (last, k, v, sink)
    results = []
    for fewest in (96, 1000):
        monkeypatch.setitem(op.FEWEST, F32, fewest)
        for optional in (None, sink):
            y = packed_attention(last, k, v, documents, scale=0.2, causal=causal, sink=optional)
            dy = torch.linspace(-1, 1, y.numel()).view(y.shape)
            results.append((y, *torch.autograd.grad(y, tensors[: 3 if optional is None else 4], dy)))
    for found, wanted in ((results[0], results[2]), (results[1], results[3])):
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
    visible = sees_own_document(documents, documents[:, -queries:])[:, None]
    if causal:
        visible = visible & torch.ones(queries, 150, dtype=torch.bool).tril(150 - queries)
    expected = F.scaled_dot_product_attention(last, k, v, visible, scale=0.2, enable_gqa=True)
    torch.testing.assert_close(results[0][0], expected, rtol=1e-5, atol=1e-5)


def assert_near(q: Tensor, k: Tensor, v: Tensor, define: Callable[..., Tensor], near: float, **options: Any) -> None:
    """Assert that causal attention and its gradients are those of what `define` returns for float64 q, k and v."""
    grad = torch.randn(q.shape[0], q.shape[1], q.shape[2], v.shape[-1]).to(q.dtype)
    out, logsumexp = torch.empty_like(grad), torch.empty(q.shape[0], q.shape[1], q.shape[2])
    into = [torch.empty_like(x) for x in (q, k, v)]
    library.attention_forward(q, k, v, out, logsumexp, causal=True, **options)
    library.attention_backward(grad, q, k, v, out, logsumexp, into=into, causal=True, **options)
    inputs = [x.double().transpose(1, 2).requires_grad_() for x in (q, k, v)]
    expected = define(*inputs)
    wanted = torch.autograd.grad(expected, inputs, grad.double().transpose(1, 2))
    for found, exact in zip((out, *into), (expected, *wanted), strict=True):
        assert (found.transpose(1, 2) - exact).abs().max() <= near * exact.abs().max().clamp(min=1)


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("queries", "keys", "window"), [(200, 200, 50), (200, 200, 1), (100, 400, 77), (300, 300, 512)]
)
@pytest.mark.parametrize("dtype", (BF16, F32))
def test_windows_hide_keys_before(instructions: str, queries: int, keys: int, window: int, dtype: torch.dtype) -> None:
    distance = (keys - queries + torch.arange(queries))[:, None] - torch.arange(keys)
    visible = (distance >= 0) & (distance < window)

    def define(*inputs: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(*inputs, visible, scale=0.2, enable_gqa=True)

    near = 2.0**-6 if dtype is BF16 else 1e-5
    assert_near(*case((2, 6, 2, queries, keys, 32, 48), dtype), define, near, scale=0.2, window=window)


@pytest.mark.matrix
@pytest.mark.parametrize("softcap", (2.0, 50.0))
@pytest.mark.parametrize("dtype", (BF16, F32))
def test_scores_are_capped(instructions: str, dtype: torch.dtype, softcap: float) -> None:
    """Of all magnitudes, in a window, and as the explicit computation caps them."""
    distance = (30 + torch.arange(200))[:, None] - torch.arange(230)

    def define(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = softcap * torch.tanh(scale * q @ k.repeat_interleave(3, 1).mT / softcap)
        hidden = scores.masked_fill((distance < 0) | (distance >= 150), -torch.inf)
        return hidden.softmax(-1) @ v.repeat_interleave(3, 1)

    near = 2.0**-6 if dtype is BF16 else 5e-5
    for scale in (0.2, 40.0):
        q, k, v = case((2, 6, 2, 200, 230, 32, 48), dtype)
        assert_near(q, k, v, define, near, scale=scale, window=150, softcap=softcap)


def test_a_cache_is_continued_without_a_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = DotProductAttention(4, 32, 2, qkv_format="bshd", attn_mask_type="causal_bottom_right")
    q, k, v = (x.requires_grad_() for x in case((2, 4, 2, 100, 300, 32, 32)))
    with monkeypatch.context() as patch:
        patch.setattr(dot_product_attention, "masks_of", None)
        y = layer(q, k, v)
    found = torch.autograd.grad(y.square().sum(), (q, k, v))
    monkeypatch.setattr(core.flash_attention, "uses_flash_attention", lambda *_: False)
    expected = layer(q, k, v)
    torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-6)
    wanted = torch.autograd.grad(expected.square().sum(), (q, k, v))
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


def test_without_a_compiler_torchs_kernel_runs(monkeypatch: pytest.MonkeyPatch, asked_anew: None) -> None:
    monkeypatch.setattr(library, "_function", without_compiler)
    q, k, v = case((1, 4, 2, 96, 96, 32, 32))
    y = DotProductAttention(4, 32, 2, qkv_format="bshd")(q, k, v)
    options = {"is_causal": True, "enable_gqa": True}
    expected = F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), **options)
    assert torch.equal(y, expected.transpose(1, 2).flatten(2))
    assert shared.fallbacks == {"there is no C++ compiler": 1}
