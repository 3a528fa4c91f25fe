"""Grouped storages of Transformer Engine's flat buffers: the members that quantizing makes."""

from typing import Any

import pytest
import torch
from torch import Tensor

import te_models.layers as te
from te_models.layers import GroupedTensorStorage
from tests.layers.te.test_group_quantize import assert_alone

QUANTIZERS: dict[str, Any] = {
    "current": te.Float8CurrentScalingQuantizer(),
    "block": te.Float8BlockQuantizer(block_scaling_dim=1),
    "square": te.Float8BlockQuantizer(block_scaling_dim=2),
    "mxfp8": te.MXFP8Quantizer(),
    "nvfp4": te.NVFP4Quantizer(),
    "identity": te.IdentityQuantizer(),
}


def padded(scales: Tensor, rows: int, columns: int) -> Tensor:
    """Scales [R, C] as a buffer has them: filled up with a number that is no scale."""
    whole = torch.full((-(-scales.shape[0] // rows) * rows, -(-scales.shape[1] // columns) * columns), 77)
    whole = whole.to(scales.dtype)
    whole[: scales.shape[0], : scales.shape[1]] = scales
    return whole.flatten()


def buffers(name: str, values: list[Tensor]) -> dict[str, Tensor]:
    """The flat buffers in which Transformer Engine keeps members that were quantized one by one."""
    found: dict[str, list[Tensor]] = {}
    for own in values:
        for field, stored in QUANTIZERS[name].quantize(own).fields.items():
            usage, _, part = field.partition("_")
            target = {"rowwise_data": "data"}.get(field, part if usage == "rowwise" else field)
            if part == "scale_inv" and stored.dim() == 2:
                shape = (128, 4)
                if name in ("block", "square"):
                    stored, shape = stored.mT if name == "block" else stored, (1, 4)
                elif name == "mxfp8" and usage == "columnwise":
                    shape = (4, 128)
                stored = padded(stored, *shape)
            raw = stored.contiguous().flatten()
            found.setdefault(target, []).append(raw.view(torch.uint8) if part == "data" and name != "identity" else raw)
    return {target: torch.cat(parts) for target, parts in found.items()}


@pytest.mark.parametrize("shape", [(128, 128), (48, 64)])
@pytest.mark.parametrize("name", QUANTIZERS)
def test_members_of_one_shape(name: str, shape: tuple[int, int]) -> None:
    values = [torch.randn(shape).bfloat16() for _ in range(3)]
    quantizer = None if name == "identity" else QUANTIZERS[name]
    flat = buffers(name, values)
    size, matrix = (3 * shape[0], shape[1]), {"num_tensors": 3, "shapes": [shape] * 3, "quantizer": quantizer}
    offsets = [i * shape[0] * shape[1] for i in range(4)]
    grouped = GroupedTensorStorage(size, torch.bfloat16, offsets=offsets, **matrix, **flat)
    assert grouped.num_tensors == 3 and grouped.first_dims is None and grouped.dtype == torch.bfloat16
    assert_alone(grouped.split_into_quantized_tensors(), values, QUANTIZERS[name])
    assert grouped.rowwise_data.data_ptr() == flat["data"].data_ptr()  # a view of the buffer
    if name == "current":
        transposed = torch.cat([member.mT.flatten() for member in flat["data"].view(3, *shape)])
        columns = {"columnwise_data": transposed, "columnwise_scale_inv": flat["scale_inv"]}
        again = GroupedTensorStorage(size, dtype=torch.bfloat16, num_tensors=3, quantizer=quantizer, **columns)
        assert torch.equal(again.dequantize(), grouped.dequantize())


@pytest.mark.parametrize("name", ["current", "mxfp8", "nvfp4", "identity"])
def test_members_of_different_rows(name: str) -> None:
    values = [torch.randn(rows, 128) for rows in (128, 256, 128)]
    quantizer = QUANTIZERS[name].with_usage(rowwise=True, columnwise=False)
    flat = {key: buffer for key, buffer in buffers(name, values).items() if not key.startswith("columnwise")}
    first_dims = torch.tensor([128, 256, 128])
    options = {"num_tensors": 3, "quantizer": quantizer, "first_dims": first_dims}
    grouped = GroupedTensorStorage((512, 128), torch.float32, **options, **flat)
    assert grouped.first_dims is first_dims
    assert_alone(grouped.split_into_quantized_tensors(), values, quantizer)


DATA = torch.zeros(4 * 64, dtype=torch.uint8)
SCALES = torch.zeros(2 * 128 * 4, dtype=torch.uint8)
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "nothing": ({"data": None}, "data and columnwise_data are None; allowed: a buffer for at least one"),
    "scales": ({"scale_inv": None}, "scale_inv is None; allowed: a buffer, which a mxfp8 copy needs"),
    "size": ({"scale_inv": SCALES[1:]}, r"scale_inv has 1023 entries; allowed: 1024, \[2, 128, 4\]"),
    "dtype": ({"data": DATA.float()}, "data has torch.float32; allowed: torch.float8_e4m3fn or its bytes"),
    "rows": ({"num_tensors": 3}, r"shape is \(4, 64\); allowed: a multiple of num_tensors, 3, rows"),
    "swizzled": ({"with_gemm_swizzled_scales": True}, "with_gemm_swizzled_scales is True, which this library"),
    "columns": ({"last_dims": torch.tensor([32, 32])}, "last_dims are given; allowed: None, or te_models.layers.Mixed"),
    "offsets": ({"offsets": [0, 64]}, r"offsets is \[0, 64\]; allowed: \[0, 128, 256\]"),
    "splits": ({"first_dims": torch.ones(3)}, r"first_dims is a Tensor of shape \(3,\) and torch.float32 on cpu; all"),
    "option": ({"nvfp4_use_4over6": True}, "nvfp4_use_4over6 is True and the quantizer's False; allowed: the same"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_fit_is_refused(case: str) -> None:
    changes, sentence = REFUSED[case]
    arguments = {"num_tensors": 2, "quantizer": te.MXFP8Quantizer(), "data": DATA, "scale_inv": SCALES} | changes
    with pytest.raises(ValueError, match=sentence):
        GroupedTensorStorage((4, 64), torch.float32, **arguments)
