"""Several matrices quantized at once: each as if alone, bit for bit, whatever their shapes; bias gradients; amaxes."""

import pytest
import torch
from torch import Tensor

import te_models.layers as te
from tests.compare import refused

QUANTIZERS: dict[str, te.Quantizer] = {
    "current": te.Float8CurrentScalingQuantizer(),
    "block": te.Float8BlockQuantizer(block_scaling_dim=1),
    "mxfp8": te.MXFP8Quantizer(),
    "nvfp4": te.NVFP4Quantizer(with_rht=True),
}


def assert_alone(members: list[te.QuantizedTensor], values: list[Tensor], quantizer: te.Quantizer) -> None:
    for member, own in zip(members, values, strict=True):
        alone = quantizer.quantize(own)
        assert member.shape == own.shape and member.dtype == own.dtype
        for name, field in alone.fields.items():
            stored = member.fields[name]
            assert stored.shape == field.shape and stored.dtype == field.dtype, name
            assert torch.equal(stored.reshape(-1).view(torch.uint8), field.reshape(-1).view(torch.uint8)), name


@pytest.mark.parametrize("name", QUANTIZERS)
@pytest.mark.parametrize("case", ["same", "rows", "columns", "both"])
def test_members_are_quantized_alone(name: str, case: str) -> None:
    quantizer = QUANTIZERS[name]
    shapes = {
        "same": [(48, 64)] * 3,
        "rows": [(32, 64), (0, 64), (80, 64)],
        "columns": [(32, 64), (32, 160), (32, 16)],
        "both": [(32, 64), (16, 48), (128, 32)],
    }[case]
    values = [torch.randn(shape).bfloat16() for shape in shapes]
    flat = torch.cat([own.flatten() for own in values])
    first, last = (torch.tensor(dims) for dims in zip(*shapes, strict=True))
    arguments = {"same": (), "rows": (first,), "columns": (None, last), "both": (first, last)}[case]
    tensor = {"same": flat.view(-1, 64), "rows": flat.view(-1, 64), "columns": flat.view(32, -1)}.get(case, flat[None])
    grouped = te.group_quantize(tensor, quantizer, 3, *arguments)
    members = grouped.split_into_quantized_tensors()
    filled = [i for i, own in enumerate(values) if own.numel()]
    assert_alone([members[i] for i in filled], [values[i] for i in filled], quantizer)
    if name == "nvfp4" or (name == "current" and case in ("same", "rows")):
        assert grouped.amax is not None and grouped.columnwise_amax is not None
        amaxes = torch.stack([own.abs().max().float() if own.numel() else torch.zeros(()) for own in values])
        assert torch.equal(grouped.amax, amaxes)
    else:
        assert grouped.amax is None


@pytest.mark.parametrize("name", ["current", "mxfp8"])
def test_bias_gradients_beside_the_quantized_rows(name: str) -> None:
    x, splits = torch.randn(40, 32), [8, 0, 24]
    grouped, dbias = te.bgrad_group_quantize(x, QUANTIZERS[name], 3, torch.tensor(splits))
    expected = torch.stack([part.double().sum(0).float() for part in x.split([*splits, 8])[:3]])
    torch.testing.assert_close(dbias, expected)
    plain = te.group_quantize(x, QUANTIZERS[name], 3, torch.tensor(splits))
    for field, other in zip(grouped.fields.values(), plain.fields.values(), strict=True):
        assert torch.equal(field.view(torch.uint8), other.view(torch.uint8))
    _, dbias = te.bgrad_group_quantize(x.bfloat16(), QUANTIZERS[name], 4)
    assert dbias.dtype == torch.bfloat16
    torch.testing.assert_close(dbias, x.bfloat16().view(4, 10, 32).float().sum(1).bfloat16())
    with pytest.raises(ValueError, match="last_dims are given, so the members' biases have no common size"):
        te.bgrad_group_quantize(x, QUANTIZERS[name], 2, None, torch.tensor([16, 16]))


def test_members_of_mixed_shapes_share_buffers_and_are_written_together() -> None:
    quantizer, shapes = te.MXFP8Quantizer(), [(32, 64), (64, 32)]
    storage = te.MixedShapesStorage(shapes, quantizer, torch.float32, "cpu")
    values = [torch.randn(shape) for shape in shapes]
    members = storage.quantize(values)
    assert_alone(members, values, quantizer)
    assert storage.buffers["rowwise_data"].shape == (2 * 32 * 64,) and storage.num_tensors == 2
    storage.buffers["rowwise_data"].view(torch.uint8).zero_()
    assert not members[1].dequantize().any()
    before = storage.quantize(values)[0].dequantize()
    storage.quantize([2 * own for own in values], noop_flag=torch.ones(()))
    assert torch.equal(storage.dequantize()[0], before)
    refused(lambda: storage.quantize(values[:1]), "tensors has 1 entries; allowed: 2, one per member")
    with pytest.raises(ValueError, match=r"shapes has \(3,\); allowed: \(rows, columns\)"):
        te.MixedShapesStorage([(3,)], quantizer, torch.float32, "cpu")


def test_dimensions_that_do_not_fit_are_refused() -> None:
    x, quantizer = torch.randn(10, 32), te.MXFP8Quantizer()
    refused(lambda: te.group_quantize(x, quantizer, 3), "tensor has 10 rows; allowed: a multiple of num_tensors, 3")
    with pytest.raises(ValueError, match=r"first_dims has shape \(2,\); allowed: \(3,\)"):
        te.group_quantize(x, quantizer, 3, torch.tensor([4, 6]))
    with pytest.raises(ValueError, match=r"say \[\(10, 16\), \(10, 15\)\]; allowed: 2 shapes with 320 values together"):
        te.group_quantize(x, quantizer, 2, None, torch.tensor([16, 15]))
