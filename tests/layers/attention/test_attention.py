"""DotProductAttention against the formula in float64, written out row by row."""

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from te_models.layers import DotProductAttention

B, N, D, DV = 2, 4, 8, 6


def attention(*arguments: Any, **options: Any) -> DotProductAttention:
    """The last query sees all keys, as with a cache."""
    return DotProductAttention(*arguments, **{"qkv_format": "bshd", "attn_mask_type": "causal_bottom_right"} | options)


def inputs(length: int, keys: int, groups: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((B, length, N, D), (B, keys, groups, D), (B, keys, groups, DV))
    return tuple(torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in shapes)


def expected(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    causal: bool = True,
    window: int | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sink: Tensor | None = None,
    hidden: Tensor | None = None,
) -> Tensor:
    """One row of one head at a time. hidden: [B, S, L]."""
    length, keys, groups = query.shape[1], key.shape[1], key.shape[2]
    rows = []
    for b in range(B):
        for i in range(length):
            for n in range(N):
                here = keys - length + i
                seen = [j for j in range(keys) if not (causal and j > here)]
                seen = [j for j in seen if window is None or here - j < window]
                seen = [j for j in seen if hidden is None or not hidden[b, i, j]]
                if not seen:
                    rows.append(value.new_zeros(DV, dtype=torch.float64))
                    continue
                g = n * groups // N
                scores = (key[b, seen, g].double() @ query[b, i, n].double()) * (scale or 1 / math.sqrt(D))
                if softcap is not None:
                    scores = softcap * torch.tanh(scores / softcap)
                weights = scores.exp()
                total = weights.sum() + (0 if sink is None else sink[n].double().exp())
                rows.append((weights / total) @ value[b, seen, g].double())
    return torch.stack(rows).view(B, length, N * DV)


OPTIONS: dict[str, dict[str, Any]] = {
    "causal": {},
    "no mask": {"causal": False},
    "window": {"window": 3},
    "window of one": {"window": 1},
    "scale": {"scale": 0.3},
    "softcap": {"softcap": 1.5},
    "softcap without mask": {"softcap": 1.5, "causal": False},
    "sinks": {"sink": True},
    "sinks, window, softcap": {"sink": True, "window": 2, "softcap": 2.0},
}


@pytest.mark.matrix("pairs")
@pytest.mark.parametrize("hide", [False, True])
@pytest.mark.parametrize("groups", [4, 2, 1])
@pytest.mark.parametrize(("length", "keys"), [(7, 7), (3, 7), (1, 5)])
@pytest.mark.parametrize("name", OPTIONS)
def test_values_and_gradients(name: str, length: int, keys: int, groups: int, hide: bool) -> None:
    options = dict(OPTIONS[name])
    mask = "causal_bottom_right" if options.get("causal", True) else "no_mask"
    how = {
        "window_size": options.get("window"),
        "softmax_scale": options.get("scale"),
        "softcap": options.get("softcap"),
    }
    how["softmax_type"] = "learnable" if options.pop("sink", False) else "vanilla"
    layer = attention(N, D, groups, attn_mask_type=mask, **how)
    if layer.softmax_offset is not None:
        with torch.no_grad():
            layer.softmax_offset.copy_(torch.linspace(-1, 1, N))
        options["sink"] = layer.softmax_offset
    hidden = mask = None
    if hide:  # one row sees nothing at all
        hidden = torch.rand(B, length, keys, generator=torch.Generator().manual_seed(1)) < 0.3
        hidden[0, -1] = True
        mask = hidden[:, None]
    tensors = inputs(length, keys, groups)
    parameters = [*tensors, *layer.parameters()]
    y = layer(*tensors, mask)
    y64 = expected(*tensors, hidden=hidden, **options)
    torch.testing.assert_close(y.double(), y64, rtol=1e-5, atol=1e-5)
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(2))
    ours = torch.autograd.grad(y, parameters, dy)
    theirs = torch.autograd.grad(y64, parameters, dy.double())
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_dropout_is_for_training_only() -> None:
    tensors = inputs(6, 6, N)
    for options in ({}, {"softcap": 5.0}):
        layer = attention(N, D, attention_dropout=0.5, **options)
        kept = attention(N, D, **options)(*tensors)
        assert not torch.allclose(layer(*tensors), kept) and torch.equal(layer.eval()(*tensors), kept)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_gqa_groups": 0}, "num_gqa_groups is 0; allowed: a divisor of 4 heads"),
        ({"num_gqa_groups": 3}, "num_gqa_groups is 3; allowed: a divisor of 4 heads"),
        ({"window_size": 0}, "window_size is 0; allowed: a positive number"),
        ({"window_size": (3, -2)}, r"window_size is \(3, -2\); allowed: a positive number"),
        ({"window_size": (3, -1), "attn_mask_type": "no_mask"}, r"window_size is \(3, -1\) with attn_mask_type"),
        ({"window_size": 3, "attn_mask_type": "no_mask"}, "window_size is 3 with attn_mask_type 'no_mask'"),
        ({"softcap": 0.0}, "softcap is 0.0; allowed: a positive number"),
        ({"attn_mask_type": "full"}, "attn_mask_type is 'full'; allowed: 'no_mask', 'padding', 'causal'"),
        ({"softmax_type": "two"}, "softmax_type is 'two'; allowed: 'vanilla', 'off-by-one', 'learnable'"),
        ({"qkv_format": "bhsd"}, "qkv_format is 'bhsd'; allowed: 'sbhd', 'bshd', 'thd'"),
        ({"tp_size": 3}, "tp_size is 3; allowed: a divisor of 4 key/value heads"),
        ({"cp_comm_type": "ring"}, "cp_comm_type is 'ring'; allowed: 'all_gather', 'p2p', 'a2a'"),
        ({"return_max_logit": True}, "return_max_logit is True, which this library does not have; allowed: False"),
    ],
)
def test_options_that_it_does_not_have_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        attention(N, D, **options)


def test_another_layout_is_refused() -> None:
    """Heads before positions, or another number of heads, would be computed with as if they were right."""
    query, key, value = inputs(6, 6, 2)
    layer = attention(N, D, 2)
    with pytest.raises(ValueError, match=r"query has shape \(2, 4, 6, 8\); allowed: \[batch, length, 4, channels\]"):
        layer(query.transpose(1, 2), key, value)
    with pytest.raises(ValueError, match=r"key has shape \(2, 6, 4, 8\); allowed: \[batch, length, 2, channels\]"):
        layer(query, query, value)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"softcap": 5.0}], ids=["plain", "softcap"])
def test_assigning_a_scale_recompiles_once(options: dict[str, Any]) -> None:
    """The first one makes data of a number; the others are data."""
    counter = CompileCounterWithBackend("eager")
    layer = attention(N, D, **options)
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend=counter)
    tensors = inputs(6, 6, N)
    seen = []
    for scale in (None, 0.1, 0.2, 0.4, 0.8):
        if scale is not None:
            layer.softmax_scale = scale
            assert layer.softmax_scale == scale
        built = attention(N, D, softmax_scale=scale, **options)
        torch.testing.assert_close(compiled(*tensors), built(*tensors))
        seen.append(counter.frame_count)
    assert seen[1:] == [seen[0] + 1] * 4


def test_an_assigned_scale_moves_and_stays_exact() -> None:
    layer = attention(N, D)
    layer.softmax_scale = 0.3
    layer.to(torch.bfloat16)
    tensors = [t.detach().bfloat16() for t in inputs(6, 6, N)]
    expected = attention(N, D, softmax_scale=0.3)(*tensors)
    assert (layer(*tensors) - expected).norm() <= 2**-7 * expected.norm()  # the query is rounded once more
    copied = copy.deepcopy(layer)
    copied.softmax_scale = 0.6
    assert layer.softmax_scale == 0.3 and not torch.equal(copied(*tensors), layer(*tensors))
    assert layer.to("meta").to_empty(device="cpu")._assigned_scale == torch.tensor(0.3)
    with pytest.raises(ValueError, match="softmax_scale is 0; allowed: a positive number"):
        layer.softmax_scale = 0
