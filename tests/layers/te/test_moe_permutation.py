"""Transformer Engine's functions of a mixture of experts, as its scripts call them."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import te_models.layers as te
from tests.compare import refused

T, E, K, H = 9, 4, 2, 16


def routed() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return tokens, probabilities [T, E], the experts of each token [T, K] and their mask [T, E]."""
    torch.manual_seed(0)
    x = torch.randn(T, H, requires_grad=True)
    probs, indices = torch.randn(T, E).softmax(-1).topk(K)
    mask = torch.zeros(T, E, dtype=torch.int32).scatter(1, indices, 1)
    return x, torch.zeros(T, E).scatter(1, indices, probs).requires_grad_(), indices, mask


@pytest.mark.parametrize("map_type", ["mask", "index"])
def test_experts_between_permute_and_unpermute(map_type: str) -> None:
    x, probs, indices, mask = routed()
    experts = te.GroupedLinear(E, H, H, bias=False)
    expected = sum((probs * mask)[:, e, None] * F.linear(x, experts.weight[e]) for e in range(E))
    merging = probs if map_type == "mask" else probs.gather(1, indices)
    rows, row_id_map = te.moe_permute(x, mask if map_type == "mask" else indices, T * K, map_type=map_type)
    y = experts(rows, mask.sum(0).tolist())
    y = te.moe_unpermute(y, row_id_map, merging_probs=merging, restore_shape=x.shape, map_type=map_type)
    torch.testing.assert_close(y, expected)
    ours, theirs = (torch.autograd.grad(t.square().sum(), (x, probs, experts.weight)) for t in (y, expected))
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_probabilities_travel_with_the_rows() -> None:
    x, probs, _, mask = routed()
    rows, row_probs, row_id_map = te.moe_permute_with_probs(x, probs, mask)
    assert rows.shape == (T * K, H) and torch.equal(row_probs, probs.t()[mask.t() != 0])
    y = te.moe_unpermute(rows * row_probs[:, None], row_id_map, restore_shape=x.shape)
    torch.testing.assert_close(y, x * probs.sum(1, keepdim=True))
    (gradient,) = torch.autograd.grad(row_probs.sum(), probs)
    assert torch.equal(gradient, mask.float())


@pytest.mark.parametrize("wanted", [T * K - 5, T * K + 3])
def test_another_number_of_rows_drops_the_last_or_adds_zeros(wanted: int) -> None:
    x, probs, _, mask = routed()
    whole, _ = te.moe_permute(x, mask)
    rows, row_id_map = torch.compile(te.moe_permute, fullgraph=True, backend="aot_eager")(x, mask, wanted)
    kept = min(wanted, T * K)
    assert rows.shape == (wanted, H) and torch.equal(rows[:kept], whole[:kept]) and not rows[kept:].any()
    expected = torch.zeros(T, H)
    for t, e in [(t, e) for e in range(E) for t in range(T) if mask[t, e]][:kept]:
        expected[t] += x[t] * probs[t, e]
    torch.testing.assert_close(te.moe_unpermute(rows, row_id_map, probs), expected)


def test_chunks_are_sorted() -> None:
    x, probs = torch.randn(10, H), torch.randn(10)
    sizes, order = torch.tensor([3, 0, 5, 2]), torch.tensor([2, 0, 3, 1])
    chunks = x.split(sizes.tolist())
    expected = torch.cat([chunks[i] for i in order])
    assert torch.equal(te.moe_sort_chunks_by_index(x, sizes, order), expected)
    rows, row_probs = te.moe_sort_chunks_by_index_with_probs(x, probs, sizes, order)
    assert torch.equal(rows, expected) and torch.equal(row_probs, torch.cat([probs[3:8], probs[:3], probs[8:]]))


def test_what_does_not_fit_is_refused() -> None:
    x, probs, _, mask = routed()
    rows, row_id_map = te.moe_permute(x, mask)
    refused(lambda: te.moe_permute(x, mask, map_type="table"), "map_type is 'table'; allowed: 'mask', 'index'")
    refused(lambda: te.moe_permute(x, mask[1:]), "routing_map has shape (8, 4); allowed: 9 tokens by experts")
    with pytest.raises(ValueError, match="needs restore_shape, the shape of the tokens, or merging_probs"):
        te.moe_unpermute(rows, row_id_map)
    refused(lambda: te.moe_unpermute(rows, row_id_map, probs, probs=probs), "probs and merging_probs are both given")


@pytest.mark.parametrize("align", [1, 4, 16])
def test_padded_rows_hold_zeros_between_the_experts(align: int) -> None:
    x, probs, _, mask = routed()
    counts = mask.sum(0)
    rows, row_probs, row_id_map, offsets, splits = te.moe_permute_and_pad_with_probs(x, probs, mask, counts, align)
    assert splits.tolist() == [-(-n // align) * align for n in counts.tolist()] and rows.shape == (splits.sum(), H)
    plain, plain_probs, _ = te.moe_permute_with_probs(x, probs, mask)
    begin, at = 0, 0
    for e, (n, filled) in enumerate(zip(counts.tolist(), splits.tolist(), strict=True)):
        assert torch.equal(rows[begin : begin + n], plain[at : at + n]) and not rows[begin + n : begin + filled].any()
        assert torch.equal(row_probs[begin : begin + n], plain_probs[at : at + n])
        assert not row_probs[begin + n : begin + filled].any()
        assert (0 if offsets is None else offsets[e].item()) == begin - at
        begin, at = begin + filled, at + n
    assert (offsets is None) == (align == 1)
    y = te.moe_unpermute(rows, row_id_map, probs, x.shape, pad_offsets=offsets)
    torch.testing.assert_close(y, x * probs.sum(1, keepdim=True))
    gradients = torch.autograd.grad(y.square().sum() + row_probs.sum(), (x, probs))
    expected = torch.autograd.grad((x * probs.sum(1, keepdim=True)).square().sum() + (probs * mask).sum(), (x, probs))
    for a, b in zip(gradients, expected, strict=True):
        torch.testing.assert_close(a * (mask if a is gradients[1] else 1), b * (mask if b is expected[1] else 1))
    with pytest.raises(ValueError, match=r"tokens_per_expert is \[.*\]; allowed: \[.*\], by the mask"):
        te.moe_permute_and_pad_with_probs(x, probs, mask, counts + 1, align)
    with pytest.raises(ValueError, match="align_size is 0; allowed: a positive number of rows"):
        te.moe_permute_and_pad_with_probs(x, probs, mask, counts, 0)


ROW_QUANTIZERS = {
    "current": te.Float8CurrentScalingQuantizer(),
    "block": te.Float8BlockQuantizer(block_scaling_dim=1),
    "mxfp8": te.MXFP8Quantizer(),
    "nvfp4": te.NVFP4Quantizer(),
    "nvfp4 rht": te.NVFP4Quantizer(with_rht=True),
}


@pytest.mark.parametrize("name", ROW_QUANTIZERS)
def test_quantized_rows_stay_quantized(name: str) -> None:
    """The bits of each row's data and scales; of rows of no token zeros; the gradient is that of plain rows."""
    _, probs, indices, mask = routed()
    x = ROW_QUANTIZERS[name].quantize(torch.randn(T, 128, dtype=torch.bfloat16))
    plain = x.dequantize().requires_grad_()
    x.requires_grad_()
    for routing, map_type, wanted in ((mask, "mask", T * K + 2), (indices, "index", -1)):
        rows, row_id_map = te.moe_permute(x, routing, wanted, map_type=map_type)
        expected, _ = te.moe_permute(plain, routing, wanted, map_type=map_type)
        assert type(rows) is type(x) and rows.shape == expected.shape
        assert torch.equal(rows.dequantize(), expected)
        dy = torch.randn(expected.shape, dtype=torch.bfloat16)
        (ours,), (theirs,) = torch.autograd.grad(rows, x, dy), torch.autograd.grad(expected, plain, dy)
        torch.testing.assert_close(ours, theirs, rtol=2.0**-7, atol=2.0**-7)
    token = row_id_map[0]
    ours, theirs = (t.view(torch.uint8) for t in (rows.rowwise_data, x.rowwise_data))
    assert torch.equal(ours, theirs[token])
    padded, *_ = te.moe_permute_and_pad_with_probs(x, probs, mask, mask.sum(0), 16)
    assert type(padded) is type(x) and torch.isfinite(padded.dequantize()).all()
    sizes, order = torch.tensor([4, 5]), torch.tensor([1, 0])
    sorted_rows = te.moe_sort_chunks_by_index(x, sizes, order)
    assert type(sorted_rows) is type(x)
    assert torch.equal(sorted_rows.dequantize(), torch.cat([plain[4:], plain[:4]]))
    back = te.moe_unpermute(rows, row_id_map, restore_shape=x.shape, map_type="index")
    torch.testing.assert_close(back, K * plain, rtol=2.0**-7, atol=0)


def test_rows_that_share_scales_are_refused() -> None:
    _, _, _, mask = routed()
    for quantizer in (te.Float8BlockQuantizer(), te.MXFP8Quantizer(rowwise=False)):
        with pytest.raises(ValueError, match="cannot be permuted; allowed: a rowwise copy, with blocks of one row"):
            te.moe_permute(quantizer.quantize(torch.randn(T, 128)), mask)


@pytest.mark.parametrize("shape", [(12, H), (3, 4, H)])
def test_padding_and_back(shape: tuple[int, ...]) -> None:
    x = torch.randn(shape, requires_grad=True)
    pad, unpad = te.Fp8Padding(3), te.Fp8Unpadding(3)
    for recipe, align in ((None, 16), (te.Float8CurrentScaling(), 16), (te.MXFP8BlockScaling(), 32)):
        with te.autocast(enabled=recipe is not None, recipe=recipe):
            rows, splits = pad(x, [5, 0, 7])
            back = unpad(rows, [5, 0, 7])
        assert splits == [align, 0, align] and rows.shape == (2 * align, H)
        flat = x.detach().view(-1, H)
        assert torch.equal(rows[:5], flat[:5]) and torch.equal(rows[align : align + 7], flat[5:])
        assert not rows[5:align].any() and not rows[align + 7 :].any()
        assert torch.equal(back, flat)
        (gradient,) = torch.autograd.grad(rows.square().sum(), x)
        assert torch.equal(gradient, 2 * x)
    for made, inp in ((te.Fp8Padding(2, 2), x), (te.Fp8Unpadding(2, 2), x)):
        found = made(inp, [4, 8])
        assert (found[0] if isinstance(found, tuple) else found) is inp  # nothing to do
    refused(lambda: pad(x, [5, 7]), "m_splits is [5, 7]; allowed: 3 numbers from 0 on, one per GEMM")
    refused(lambda: pad(x, [4, 0, 7]), "the input has 12 rows; allowed: 11, which [4, 0, 7] add up to")
    refused(lambda: te.Fp8Padding(2, 0), "num_gemms is 2 and align_size 0; allowed: positive numbers")
