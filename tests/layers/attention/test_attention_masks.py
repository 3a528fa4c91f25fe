"""DotProductAttention under Transformer Engine's layouts, mask types, windows and biases, against a formula by rows."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from te_models.layers import DotProductAttention
from te_models.layers.attention.mask import ScoreBias, usual_slopes

B, N, G, D = 3, 4, 2, 8
Sees = Callable[[int, int, int], bool]  # (sequence, query, key) -> bool


def inputs(length: int, keys: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((B, length, N, D), (B, keys, G, D), (B, keys, G, D))
    q, k, v = (torch.randn(shape, generator=generator) for shape in shapes)
    return q, k, v


def expected(
    query: Tensor, key: Tensor, value: Tensor, sees: Sees, bias: Tensor | None = None, sink: bool = False
) -> Tensor:
    """bias: [B, N, S, L], added to scaled scores; sink: an extra logit 0."""
    out = torch.zeros(B, query.shape[1], N, D, dtype=torch.float64)
    for b in range(B):
        for i in range(query.shape[1]):
            seen = [j for j in range(key.shape[1]) if sees(b, i, j)]
            for n in range(N) if seen else ():
                g = n // (N // G)
                scores = key[b, seen, g].double() @ query[b, i, n].double() / math.sqrt(D)
                weights = (scores if bias is None else scores + bias[b, n, i, seen].double()).exp()
                out[b, i, n] = weights @ value[b, seen, g].double() / (weights.sum() + sink)
    return out.flatten(2)


def close(ours: Tensor, theirs: Tensor) -> None:
    torch.testing.assert_close(ours.double(), theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("qkv_format", ["sbhd", "bshd"])
@pytest.mark.parametrize("softmax_type", ["vanilla", "off-by-one"])
def test_layouts(qkv_format: str, softmax_type: str) -> None:
    """[length, batch, ...] unless told otherwise, as in Transformer Engine; it computed attention over the batch."""
    q, k, v = inputs(5, 5)
    theirs = expected(q, k, v, lambda b, i, j: j <= i, sink=softmax_type == "off-by-one")
    layer = DotProductAttention(N, (D, D), G, softmax_type=softmax_type)
    if qkv_format == "sbhd":
        close(layer(*(t.transpose(0, 1) for t in (q, k, v))).transpose(0, 1), theirs)
    else:
        close(layer(q, k, v, qkv_format="bshd"), theirs)
        close(DotProductAttention(N, D, G, softmax_type=softmax_type, qkv_format="bshd")(q, k, v), theirs)


@pytest.mark.parametrize(("length", "keys"), [(5, 5), (3, 6), (6, 3)])
@pytest.mark.parametrize("softmax_type", ["vanilla", "off-by-one"])
@pytest.mark.parametrize(
    ("kind", "window", "end"),
    [
        *(("causal", None, False), ("causal", (2, 0), False), ("causal", 2, False)),
        *(("causal_bottom_right", None, True), ("causal_bottom_right", (1, 0), True), ("no_mask", None, True)),
        *(("no_mask", (1, 2), True), ("arbitrary", None, True)),
    ],
)
def test_mask_types_and_windows(kind: str, window: Any, end: bool, softmax_type: str, length: int, keys: int) -> None:
    """Of unequally many, "causal" counts from the first, "bottom_right" and a window of no causal type from the end."""
    q, k, v = inputs(length, keys)
    hidden = torch.rand(B, 1, length, keys, generator=torch.Generator().manual_seed(1)) < 0.4
    before, behind = (window - 1, 0) if isinstance(window, int) else window or (9, 9)

    def sees(b: int, i: int, j: int) -> bool:
        distance = i - j + (keys - length if end else 0)
        seen = -behind <= distance <= before and not ("causal" in kind and distance < 0)
        return seen and not (kind == "arbitrary" and bool(hidden[b, 0, i, j]))

    layer = DotProductAttention(N, D, G, qkv_format="bshd", attn_mask_type="no_mask", softmax_type=softmax_type)
    y = layer(q, k, v, hidden if kind == "arbitrary" else None, attn_mask_type=kind, window_size=window)
    close(y, expected(q, k, v, sees, sink=softmax_type == "off-by-one"))


LENGTHS = ([3, 0, 5], [4, 2, 6])


def prefix(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


@pytest.mark.parametrize("kind", ["padding", "padding_causal", "causal,padding", "padding_causal_bottom_right"])
@pytest.mark.parametrize("how", ["masks", "lengths", "packed", "packed with gaps"])
def test_sequences_of_several_lengths(kind: str, how: str) -> None:
    """Padded ones, told by masks or by lengths, and packed ones give the same; rows of padding give zeros."""
    q, k, v = inputs(6, 7)
    counts, key_counts = LENGTHS

    def sees(b: int, i: int, j: int) -> bool:
        shift = key_counts[b] - counts[b] if "bottom_right" in kind else 0
        return i < counts[b] and j < key_counts[b] and ("causal" not in kind or j <= i + shift)

    theirs = expected(q, k, v, sees)
    layer = DotProductAttention(N, D, G, qkv_format="bshd", attn_mask_type=kind, attention_type="cross")
    cu: dict[str, Any] = {"cu_seqlens_q": prefix(counts), "cu_seqlens_kv": prefix(key_counts)}
    if how == "masks":
        hidden = [torch.arange(s)[None] >= torch.tensor(n)[:, None] for s, n in ((6, counts), (7, key_counts))]
        close(layer(q, k, v, (hidden[0][:, None, None], hidden[1][:, None, None])), theirs)
    elif how == "lengths":
        close(layer(q, k, v, **cu, max_seqlen_q=6, max_seqlen_kv=7), theirs)
    elif how == "packed":
        rows = [torch.cat([t[b, : n[b]] for b in range(B)]) for t, n in ((q, counts), (k, key_counts), (v, key_counts))]
        close(layer(*rows, qkv_format="thd", **cu), torch.cat([theirs[b, : counts[b]] for b in range(B)]))
    else:
        cu |= {"cu_seqlens_q_padded": prefix([6] * B), "cu_seqlens_kv_padded": prefix([7] * B)}
        close(layer(*(t.flatten(0, 1) for t in (q, k, v)), qkv_format="thd", **cu), theirs.flatten(0, 1))


@pytest.mark.parametrize("kind", ["pre_scale_bias", "post_scale_bias", "alibi", "own slopes"])
@pytest.mark.parametrize("softmax_type", ["vanilla", "off-by-one"])
def test_biases(kind: str, softmax_type: str) -> None:
    q, k, v = inputs(5, 5)
    bias = torch.randn(1, N, 5, 5, generator=torch.Generator().manual_seed(2))
    distance = (torch.arange(5)[:, None] - torch.arange(5)).abs()
    slopes = torch.tensor([0.5, 0.1, 0.7, 0.2]) if kind == "own slopes" else torch.tensor([2**-2, 2**-4, 2**-6, 2**-8])
    added = {"pre_scale_bias": bias / math.sqrt(D), "post_scale_bias": bias}.get(
        kind, -distance * slopes[:, None, None]
    )
    layer = DotProductAttention(N, D, G, qkv_format="bshd", softmax_type=softmax_type)
    given: dict[str, Any] = {"core_attention_bias": bias, "core_attention_bias_type": kind}
    if "bias" not in kind:
        given = {"alibi_slopes": slopes if kind == "own slopes" else None, "core_attention_bias_type": "alibi"}
    theirs = expected(q, k, v, lambda b, i, j: j <= i, added.expand(B, N, 5, 5), softmax_type == "off-by-one")
    close(layer(q, k, v, **given), theirs)
    layer.softmax_scale = 1 / math.sqrt(D)  # as data
    close(layer(q, k, v, **given), theirs)


@pytest.mark.parametrize("heads", [1, 4, 6, 12, 16, 40, 64])
def test_slopes_of_alibi(heads: int) -> None:
    """Made on the device: for a list from the host it would wait in every call, and no CUDA graph takes that."""
    n = 2 ** math.floor(math.log2(heads))
    theirs = [2 ** (-8 * i / n) for i in range(1, n + 1)] + [2 ** (-4 * i / n) for i in range(1, 2 * (heads - n), 2)]
    torch.testing.assert_close(usual_slopes(heads, torch.device("cpu")), torch.tensor(theirs), rtol=2**-22, atol=0)
    bias = ScoreBias("alibi").values(torch.zeros(1, 1, 2, 3, device="meta"), heads, 1.0, torch.device("meta"))
    assert bias.shape == (1, heads, 2, 3)
    traced = make_fx(lambda d: ScoreBias("alibi").values(d, heads, 1.0, d.device))(torch.zeros(1, 1, 2, 3))
    assert [node.target for node in traced.graph.nodes if node.op == "get_attr"] == []


def test_recomputed_attention_has_the_same_gradients() -> None:
    layer = DotProductAttention(N, D, G, qkv_format="bshd", attn_mask_type="padding_causal")
    cu = {"cu_seqlens_q": prefix([3, 2, 5]), "cu_seqlens_kv": prefix([3, 2, 5])}
    gradients = []
    for again in (False, True):
        tensors = [t.requires_grad_() for t in inputs(5, 5)]
        y = layer(*tensors, **cu, checkpoint_core_attention=again)
        gradients.append(torch.autograd.grad(y.square().sum(), tensors))
    torch.testing.assert_close(*gradients, rtol=0, atol=0)


def test_packed_sequences_are_one_graph() -> None:
    """The lengths stay on the device: other ones compile nothing anew."""
    layer = DotProductAttention(N, D, G, qkv_format="thd", attn_mask_type="padding_causal")
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    q, k, v = (t.flatten(0, 1) for t in inputs(5, 5))
    with torch.compiler.set_stance("default"):
        for lengths in ([5, 5, 5], [1, 9, 5]):
            cu = {"cu_seqlens_q": prefix(lengths), "cu_seqlens_kv": prefix(lengths)}
            torch.testing.assert_close(compiled(q, k, v, **cu), layer(q, k, v, **cu))
            torch.compiler.set_stance("fail_on_recompile")
    torch.compiler.set_stance("default")


CU = {"cu_seqlens_q": prefix([5] * B), "cu_seqlens_kv": prefix([5] * B)}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"inference_params": object()}, "inference_params is <object .*, which this library does not have"),
        ({"fp8_output": True}, "fp8_output is True, which this library does not have; allowed: False"),
        ({"attn_mask_type": "padding"}, "is 'padding': give attention_mask, or cu_seqlens_q and cu_seqlens_kv"),
        ({"attn_mask_type": "arbitrary"}, "attn_mask_type is 'arbitrary': give attention_mask$"),
        (CU, "cu_seqlens_q is given with attn_mask_type 'causal'; allowed: a padding type"),
        ({"cu_seqlens_q": CU["cu_seqlens_q"], "attn_mask_type": "padding"}, "cu_seqlens_kv is missing"),
        (CU | {"attn_mask_type": "padding", "cu_seqlens_q_padded": CU["cu_seqlens_q"]}, "are for qkv_format 'thd'"),
        ({"attention_mask": torch.zeros(B, 1, 1, 5)}, "attention_mask has dtype torch.float32; allowed: torch.bool"),
        (
            {"attention_mask": torch.zeros(B, 1, 5, 5, dtype=torch.bool), "attn_mask_type": "padding"},
            r"attention_mask has shape \(3, 1, 5, 5\); allowed with attn_mask_type 'padding': \[batch, 1, 1, 5\]",
        ),
        ({"core_attention_bias": torch.zeros(1, N, 5, 5)}, "core_attention_bias is given with .*type 'no_bias'"),
        ({"core_attention_bias_type": "post_scale_bias"}, "core_attention_bias is missing with"),
        ({"core_attention_bias_type": "t5"}, "core_attention_bias_type is 't5'; allowed: 'no_bias'"),
        ({"alibi_slopes": torch.ones(N)}, "alibi_slopes are given with core_attention_bias_type 'no_bias'"),
    ],
)
def test_what_would_not_be_looked_at_is_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DotProductAttention(N, D, G, qkv_format="bshd")(*inputs(5, 5), **given)
    with pytest.raises(ValueError, match="allowed with qkv_format 'thd': a padding type"):
        DotProductAttention(N, D, G, qkv_format="thd")(*(t[0] for t in inputs(5, 5)))


@pytest.mark.parametrize(("dtype", "near"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("hide", [False, True])
@pytest.mark.parametrize("window", [None, 9, 4])
def test_one_token_with_a_cache_has_no_mask_and_copies_no_keys(
    window: int | None, hide: bool, dtype: torch.dtype, near: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It looks at all keys, unless some are padding or beyond its window; heads that share keys are one head."""
    seen: dict[str, Any] = {}
    attend = torch.nn.functional.scaled_dot_product_attention

    def noted(
        query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, *rest: Any, **how: Any
    ) -> Tensor:
        seen.update(query=query.shape, mask=attn_mask, gqa=how.get("enable_gqa", False))
        return attend(query, key, value, attn_mask, *rest, **how)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", noted)
    q, k, v = (t.to(dtype) for t in inputs(1, 9))
    hidden = torch.zeros(B, 1, 1, 9, dtype=torch.bool)
    hidden[1, ..., :3] = hide
    options = {"qkv_format": "bshd", "attn_mask_type": "causal_bottom_right", "window_size": window}
    module = DotProductAttention(N, D, G, **options).eval()
    got = module(q, k, v, hidden if hide else None)
    reached = 9 if window is None else window
    found = expected(q, k, v, lambda b, i, j: j >= 9 - reached and not hidden[b, 0, 0, j])
    torch.testing.assert_close(got.double(), found, rtol=near, atol=near)
    assert (seen["query"], seen["gqa"]) == ((B, G, N // G, D), False)
    assert (seen["mask"] is None) == (not hide and reached == 9)
