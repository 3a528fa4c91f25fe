"""The rules that carry a state: the chunked form is the definition, whatever the length, states and documents."""

import itertools
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from te_models.kernels.gated_delta import gated_delta_rule, l2_normed, reference
from te_models.kernels.gated_delta import reference as delta
from te_models.kernels.linear_attention import linear_attention
from te_models.kernels.linear_attention import reference as linear
from te_models.kernels.recurrent import library, step
from te_models.kernels.short_convolution import reference as convolution
from te_models.kernels.short_convolution import short_convolution
from te_models.kernels.state_space import reference as spaces
from te_models.kernels.state_space import selective_scan, state_space_scan
from tests.kernels.fewer_instructions import compiled_quickly

Tensors = dict[str, Tensor]
K, V, WIDTH = 8, 12, 4
LENGTHS = (1, 2, 16, 17, 63, 64, 65, 193)
"""Up to three chunks and a token, around the sizes of chunks and blocks."""


class Rule(NamedTuple):
    """state: the shape of one initial state."""

    make: Callable[[int, int], Tensors]
    run: Callable[..., tuple[Tensor, Tensor]]
    define: Callable[..., tuple[Tensor, Tensor]]
    rows: tuple[str, ...]
    state: tuple[int, ...]


def _randn(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def _decay(*shape: int) -> Tensor:
    return -3 * torch.rand(*shape, dtype=torch.float64)


def _delta(batch: int, tokens: int, *, by_channel: bool, keys: int = K, values: int = V) -> Tensors:
    heads = 4
    q, k = (l2_normed(_randn(batch, tokens, 2, keys)) for _ in "qk")
    g = _decay(batch, tokens, heads, *((keys,) if by_channel else ()))
    v, beta = _randn(batch, tokens, heads, values), torch.rand(batch, tokens, heads, dtype=torch.float64)
    return {"q": q, "k": k, "v": v, "g": g, "beta": beta}


def _linear(batch: int, tokens: int) -> Tensors:
    q, k = (_randn(batch, tokens, 2, K) for _ in "qk")
    return {"q": q, "k": k, "v": _randn(batch, tokens, 4, V), "g": _decay(batch, tokens, 4)}


def _scan(batch: int, tokens: int) -> Tensors:
    steps = F.softplus(_randn(batch, tokens, 4))
    b, c = (_randn(batch, tokens, 2, K) for _ in "BC")
    return {"x": _randn(batch, tokens, 4, V), "dt": steps, "A": _decay(4), "B": b, "C": c, "D": _randn(4)}


def _selective(batch: int, tokens: int) -> Tensors:
    steps = F.softplus(_randn(batch, tokens, V))
    b, c = (_randn(batch, tokens, K) for _ in "BC")
    return {"x": _randn(batch, tokens, V), "dt": steps, "A": _decay(V, K), "B": b, "C": c, "D": _randn(V)}


def _convolution(batch: int, tokens: int) -> Tensors:
    return {"x": _randn(batch, tokens, V), "weight": _randn(V, WIDTH), "bias": _randn(V)}


def _called(function: Callable[..., Any], **given: Any) -> Callable[..., Any]:
    return lambda tensors, **options: function(**tensors, **given, **options)


def _defined(function: Callable[..., Any], *given: Any) -> Callable[..., Any]:
    return lambda tensors, state: function(*tensors.values(), *given, state)


_DELTA = {
    "run": _called(gated_delta_rule),
    "define": _defined(delta.gated_delta_rule, K**-0.5),
    "rows": ("q", "k", "v", "g", "beta"),
    "state": (4, K, V),
}
RULES: dict[str, Rule] = {
    "gated_delta": Rule(make=lambda b, t: _delta(b, t, by_channel=False), **_DELTA),
    "gated_delta_by_channel": Rule(make=lambda b, t: _delta(b, t, by_channel=True), **_DELTA),
    "linear_attention": Rule(
        _linear, _called(linear_attention), _defined(linear.linear_attention, 1.0), ("q", "k", "v", "g"), (4, K, V)
    ),
    "state_space": Rule(
        _scan, _called(state_space_scan), _defined(spaces.state_space_scan), ("x", "dt", "B", "C"), (4, V, K)
    ),
    "selective_scan": Rule(
        _selective, _called(selective_scan), _defined(spaces.selective_scan), ("x", "dt", "B", "C"), (V, K)
    ),
    "short_convolution": Rule(
        _convolution,
        _called(short_convolution, activation="silu"),
        _defined(convolution.short_convolution, "silu"),
        ("x",),
        (V, WIDTH - 1),
    ),
}


def part(rule: Rule, tensors: Tensors, begin: int, end: int) -> Tensors:
    """Return the tensors of the tokens from begin to end."""
    return {name: x[:, begin:end] if name in rule.rows else x for name, x in tensors.items()}


def cast(tensors: Tensors, rows: tuple[str, ...], dtype: torch.dtype) -> Tensors:
    """Return leaves that want gradients: those along tokens in a dtype, the others in it or float32, if it is lower."""
    other = torch.float32 if dtype == torch.bfloat16 else dtype
    return {
        name: x.to(dtype if name in rows and name not in ("g", "dt") else other).requires_grad_()
        for name, x in tensors.items()
    }


EPS = {torch.float64: 2.0**-53, torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8}


def close(found: Sequence[Tensor], wanted: Sequence[Tensor], dtype: torch.dtype, tokens: int) -> None:
    """Compare to what sums in float32 (float64) differ by in another order, and one rounding to the dtype of a result.

    A sum of n products errs by up to about sqrt(n) u of its size; sums are nested twice (system and output), of up to T
    + K terms, and the solution of the system multiplies errors by its condition, for which 64 stands."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    for x, y in zip(found, wanted, strict=True):
        assert x.dtype == y.dtype and x.shape == y.shape
        rounding = 2 * EPS[x.dtype] if x.dtype in EPS else 0.0
        size = max(y.abs().max().item(), 1.0) if y.numel() else 1.0
        bound = (64 * EPS[wide] * (tokens + 16) ** 0.5 + rounding) * size
        assert (x.double() - y.double()).abs().max().item() <= bound if y.numel() else True


def both(rule: Rule, tensors: Tensors, state: Tensor | None) -> tuple[list[Tensor], list[Tensor]]:
    """Return results and gradients of the rule, and of the definition."""
    leaves = [*tensors.values(), *([] if state is None else [state])]
    found = []
    for results in (rule.run(tensors, initial_state=state), rule.define(tensors, state)):
        torch.manual_seed(1)
        grads = [torch.randn(x.shape).to(x.dtype) for x in results]
        found.append([*results, *torch.autograd.grad(results, leaves, grads, materialize_grads=True)])
    return found[0], found[1]


@pytest.mark.matrix
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "tokens", [pytest.param(n, marks=() if n in (1, 17, 65) else pytest.mark.slow) for n in LENGTHS]
)
@pytest.mark.parametrize("name", RULES)
def test_chunks_are_the_definition(name: str, tokens: int, dtype: torch.dtype) -> None:
    rule = RULES[name]
    tensors = cast(rule.make(2, tokens), rule.rows, dtype)
    close(*both(rule, tensors, None), dtype, tokens)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    state = torch.randn(2, *rule.state, dtype=dtype if name == "short_convolution" else wide, requires_grad=True)
    close(*both(rule, tensors, state), dtype, tokens)


@pytest.fixture
def avx2_alone(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The C++ of AVX2's vectors in place of the widest of this CPU, and the functions that were called."""
    called: list[str] = []
    for module in (library, step):

        def narrow(name: str, function: Any = module._function) -> Any:
            called.append(name)
            if not torch.cpu._is_avx512_supported():  # the library is that
                return function(name)
            return compiled_quickly(function, name, True)

        monkeypatch.setattr(module, "_function", narrow)
    return called


@pytest.mark.skipif(not torch.cpu._is_avx2_supported(), reason="the kernel is for x86 CPUs with AVX2")
@pytest.mark.parametrize("name", ["gated_delta", "gated_delta_by_channel", "linear_attention", "state_space"])
def test_avx2_alone_computes_the_definition(name: str, avx2_alone: list[str]) -> None:
    rule = RULES[name]
    for tokens in (65, 193):
        tensors, state = cast(rule.make(2, tokens), rule.rows, torch.float32), torch.randn(2, *rule.state)
        close(*both(rule, tensors, state.requires_grad_()), torch.float32, tokens)
    assert {"te_recurrent_forward", "te_recurrent_backward"} == set(avx2_alone)


@pytest.mark.parametrize("by_channel", [False, True])
def test_channels_of_several_vectors(by_channel: bool) -> None:
    torch.manual_seed(0)
    rule = RULES["gated_delta"]._replace(define=_defined(delta.gated_delta_rule, 40**-0.5))
    tensors = cast(_delta(2, 130, by_channel=by_channel, keys=40, values=72), rule.rows, torch.float32)
    close(*both(rule, tensors, torch.randn(2, 4, 40, 72, requires_grad=True)), torch.float32, 130)


@pytest.mark.matrix
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("with_states", [False, True])
@pytest.mark.parametrize("name", RULES)
def test_packed_documents_are_rows(name: str, with_states: bool, dtype: torch.dtype) -> None:
    """An empty document, one of a token, those that begin within a chunk and at its border."""
    rule, ends = RULES[name], [0, 5, 5, 6, 64, 150, 193]
    tensors = cast(rule.make(1, 193), rule.rows, dtype)
    state = torch.randn(6, *rule.state, dtype=dtype, requires_grad=True) if with_states else None
    leaves = [*tensors.values(), *([] if state is None else [state])]
    rows = [
        rule.define(part(rule, tensors, b, e), None if state is None else state[i : i + 1])
        for i, (b, e) in enumerate(itertools.pairwise(ends))
    ]
    wanted = [torch.cat([y for y, _ in rows], 1), torch.cat([s for _, s in rows])]
    found = list(rule.run(tensors, initial_state=state, cu_seqlens=torch.tensor(ends, dtype=torch.int32)))
    grads = [torch.randn_like(x) for x in wanted]
    wanted += torch.autograd.grad(wanted, leaves, grads, materialize_grads=True)
    found += torch.autograd.grad(found, leaves, grads, materialize_grads=True)
    close(found, wanted, dtype, 193)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("name", RULES)
def test_numbered_documents_are_rows(name: str, dtype: torch.dtype) -> None:
    """The first document of a row goes on from its initial state, the others begin with zeros."""
    rule, tokens = RULES[name], 150
    tensors = cast(rule.make(2, tokens), rule.rows, dtype)
    state = torch.randn(2, *rule.state, dtype=dtype, requires_grad=True)
    leaves = [*tensors.values(), state]
    ends = [[0, 64, 65, 130, tokens], [0, 3, 64, 149, tokens]]
    documents = torch.stack([torch.bucketize(torch.arange(tokens), torch.tensor(e[1:]), right=True) for e in ends])
    whole = []
    for row, bounds in enumerate(ends):
        own = {name: x[row : row + 1] if name in rule.rows else x for name, x in tensors.items()}
        pieces = [
            rule.define(part(rule, own, b, e), state[row : row + 1] if b == 0 else None)
            for b, e in itertools.pairwise(bounds)
        ]
        whole.append((torch.cat([y for y, _ in pieces], 1), pieces[-1][1]))
    wanted = [torch.cat([y for y, _ in whole]), torch.cat([s for _, s in whole])]
    found = list(rule.run(tensors, initial_state=state, documents=documents))
    grads = [torch.randn_like(x) for x in wanted]
    wanted += torch.autograd.grad(wanted, leaves, grads, materialize_grads=True)
    found += torch.autograd.grad(found, leaves, grads, materialize_grads=True)
    close(found, wanted, dtype, tokens)


@pytest.mark.parametrize("name", RULES)
def test_prefill_and_steps_are_the_whole(name: str) -> None:
    """Relative 1e-5 in float32: a prompt, then a token at a time, then several."""
    rule, tokens = RULES[name], 80
    tensors = {n: x.float() for n, x in rule.make(2, tokens).items()}
    whole, last = rule.run(tensors)
    y, state = rule.run(part(rule, tensors, 0, 66))
    pieces = [y]
    for begin, end in ((66, 67), (67, 68), (68, 69), (69, 80)):
        y, state = rule.run(part(rule, tensors, begin, end), initial_state=state)
        pieces.append(y)
    for found, wanted in ((torch.cat(pieces, 1), whole), (state, last)):
        assert (found - wanted).norm() <= 1e-5 * wanted.norm()


@pytest.mark.parametrize("name", RULES)
def test_no_tokens(name: str) -> None:
    rule = RULES[name]
    tensors, state = rule.make(2, 0), torch.randn(2, *rule.state, dtype=torch.float64)
    y, after = rule.run(tensors, initial_state=state)
    assert y.shape[1] == 0 and torch.equal(after, state)


@pytest.mark.parametrize("by_channel", [False, True])
def test_decays_do_not_overflow(by_channel: bool) -> None:
    """exp(-G) of a chunk alone is more than float32 holds; only the quotients that the rule needs are computed."""
    rule = RULES["gated_delta_by_channel" if by_channel else "gated_delta"]
    torch.manual_seed(0)
    tensors = cast({n: 10 * x if n == "g" else x for n, x in rule.make(1, 130).items()}, rule.rows, torch.float32)
    found, wanted = both(rule, tensors, None)
    assert all(x.isfinite().all() for x in found)
    close(found, wanted, torch.float32, 130)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("name", ["gated_delta", "gated_delta_by_channel", "linear_attention"])
def test_a_decay_of_zero_forgets(name: str, dtype: torch.dtype) -> None:
    rule = RULES[name]
    torch.manual_seed(0)
    tensors = rule.make(1, 70)
    tensors["g"][:, [20, 21, 65], 1:] = float("-inf")
    state = torch.randn(1, *rule.state, dtype=dtype, requires_grad=True)
    close(*both(rule, cast(tensors, rule.rows, dtype), state), dtype, 70)


def test_refused() -> None:
    def sentence(function, *arguments: Tensor, **options: Tensor) -> str:
        with pytest.raises(ValueError) as caught:
            function(*arguments, **options)
        assert "allowed: " in str(caught.value)
        return str(caught.value)

    q, v, g = torch.randn(1, 6, 2, 4), torch.randn(1, 6, 4, 4), torch.zeros(1, 6, 4)
    ends, numbers = torch.tensor([0, 6]), torch.zeros(1, 6, dtype=torch.int64)
    assert "g [1, 6, 2]" in sentence(gated_delta_rule, q, q, v, g[..., :2], g)
    assert "g [1, 6, 2]" in sentence(linear_attention, q, q, v, g[..., :2])
    assert "x [1, 6, 4, 4]" in sentence(state_space_scan, v, g, torch.ones(3), q, q)
    assert "A [3, 2]" in sentence(selective_scan, g, g, torch.ones(3, 2), g[..., :2], g[..., :2])
    assert "[3, 2]" in sentence(short_convolution, g, torch.ones(3, 2))
    assert "'relu'" in sentence(short_convolution, g, torch.ones(4, 2), activation="relu")
    state = torch.zeros(2, 4, 4, 4)
    for function, given in ((gated_delta_rule, (q, q, v, g, g)), (linear_attention, (q, q, v, g))):
        assert "[2, 4, 4, 4]" in sentence(function, *given, initial_state=state)
        assert re.search("one of them", sentence(function, *given, cu_seqlens=ends, documents=numbers))
        assert "with 2 rows" in sentence(function, *(torch.cat([x, x]) for x in given), cu_seqlens=ends)


@pytest.mark.parametrize("with_state", [False, True])
def test_one_token_is_the_definition(with_state: bool) -> None:
    q, k, v = torch.randn(2, 1, 2, 16), torch.randn(2, 1, 2, 16), torch.randn(2, 1, 4, 48)
    g, beta = -torch.rand(2, 1, 4), torch.rand(2, 1, 4)
    state = torch.randn(2, 4, 16, 48) if with_state else None
    for decay in (g, g[..., None] * torch.rand(16)):
        found = gated_delta_rule(q, k, v, decay, beta, initial_state=state)
        close(found, reference.gated_delta_rule(q, k, v, decay, beta, 16**-0.5, state), torch.float32, 1)


@pytest.mark.skipif(not torch.cpu._is_avx2_supported(), reason="the kernel is for x86 CPUs with AVX2")
def test_avx2_alone_computes_one_token(avx2_alone: list[str]) -> None:
    test_one_token_is_the_definition(with_state=True)
    assert set(avx2_alone) == {"te_delta_step"}
