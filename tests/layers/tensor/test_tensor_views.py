"""Views share the stored numbers or are refused: none is a silent copy, none hands out raw bytes as numbers."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import te_models.layers as te
from tests.build import weight_quantizers
from tests.compare import refused, same_bits

FORMATS = weight_quantizers()
ONE_SCALE = ("float8", "nvfp4", "nvfp4_1d")


def make(name: str, *shape: int) -> te.QuantizedTensor:
    torch.manual_seed(0)
    x = torch.randn(shape)
    return FORMATS[name].quantize(x) if len(shape) == 2 else FORMATS[name].quantize_grouped(x)


def shares_storage(view: te.QuantizedTensor, base: te.QuantizedTensor) -> bool:
    mine = {field.untyped_storage().data_ptr() for field in view.fields.values()}
    return mine == {field.untyped_storage().data_ptr() for field in base.fields.values()}


@pytest.mark.parametrize("shape", [(64, 128), (3, 64, 128)])
@pytest.mark.parametrize("name", FORMATS)
def test_a_view_of_another_shape_is_numbers_that_can_be_written(name: str, shape: tuple[int, ...]) -> None:
    base = make(name, *shape)
    values = base.dequantize()
    for new in ((-1,), (-1, 128), (2, -1, 128)):
        view = base.view(new)
        assert type(view) is type(base) and shares_storage(view, base)
        assert view.shape == values.view(new).shape and torch.equal(view.dequantize(), values.view(new))
        assert torch.equal(base.reshape(new).dequantize(), values.view(new))
    assert torch.equal(base.flatten().dequantize(), values.flatten())
    base.view(-1).mul_(2.0)
    assert same_bits(base, base.quantizer.quantize_fields(values * 2))
    flat = base.view(-1)
    assert flat.clone().view(shape).shape == values.shape
    refused(lambda: flat.operand("rowwise", torch.float32), "cannot be the operand")
    refused(lambda: flat[:64], "view of shape")


def test_raw_bytes_are_not_to_be_had() -> None:
    base = make("mxfp8", 32, 32)
    refused(lambda: base.view(torch.uint8), "view")
    refused(lambda: base.as_strided((4,), (1,)), "as_strided")
    assert torch.equal(base.as_strided((32, 32), (32, 1)).dequantize(), base.dequantize())


def test_memory_that_does_not_hold_the_values_is_not_handed_out() -> None:
    """torch read through a null pointer, and numpy read what else lay there."""
    base = make("mxfp8", 32, 32)
    for read in (torch.from_dlpack, np.from_dlpack):
        with pytest.raises(BufferError, match="a MXFP8Tensor has no memory that holds its values; call dequantize"):
            read(base)
    refused(lambda: base.apply_(lambda x: x), "apply_ does not know a MXFP8Tensor", error=TypeError)


@pytest.mark.parametrize(
    "name", ["float8", "float8_block", "float8_block_1d", "mxfp8", "mxfp8_2d", "nvfp4_1d", "identity"]
)
@pytest.mark.parametrize("shape", [(128, 256), (2, 128, 256)])
def test_a_transpose_exchanges_the_copies(name: str, shape: tuple[int, ...]) -> None:
    base = make(name, *shape)
    values = base.dequantize()
    for turned in (base.mT, base.transpose(-1, -2), base.permute(*range(len(shape) - 2), -1, -2)):
        assert type(turned) is type(base) and shares_storage(turned, base)
        for usage, other in (("rowwise", "columnwise"), ("columnwise", "rowwise")):
            expected = base.operand(other, torch.float32).values.mT
            assert torch.equal(turned.operand(usage, torch.float32).values, expected)
        assert same_bits(turned.mT, base)
    if base.quantizer.symmetric:
        assert torch.equal(base.mT.dequantize(), values.mT)


def test_a_rowwise_copy_alone_is_the_columnwise_copy_of_the_transpose() -> None:
    base = te.MXFP8Quantizer(columnwise=False).quantize(torch.randn(64, 32))
    turned = base.t()
    assert (turned.quantizer.rowwise, turned.quantizer.columnwise) == (False, True)
    assert torch.equal(turned.dequantize(), base.dequantize().t())


@pytest.mark.parametrize("name", ["nvfp4", "hybrid"])
def test_a_transpose_that_no_field_can_serve_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=r"transpose|t is a view"):
        make(name, 32, 32).t()


def test_other_orders_of_dimensions_are_refused() -> None:
    refused(lambda: make("mxfp8", 2, 32, 32).transpose(0, 1), "only the last two dimensions")
    refused(lambda: make("mxfp8", 2, 32, 32).permute(1, 2, 0), "only the last two dimensions")


@pytest.mark.parametrize("name", FORMATS)
def test_slices_between_blocks_share_the_fields(name: str) -> None:
    base = make(name, 256, 384)
    values = base.dequantize()
    for index in (np.s_[:128], np.s_[128:], np.s_[:, 128:256], np.s_[128:256, 256:]):
        view = base[index]
        assert type(view) is type(base) and shares_storage(view, base)
        assert torch.equal(view.dequantize(), values[index])
    for found in (base.split(128), base.chunk(2), base.split([128, 128]), torch.tensor_split(base, 2)):
        assert torch.equal(torch.cat([piece.dequantize() for piece in found]), values)
    assert base[:].shape == base.shape and base[128:128].shape == (0, 384)


def test_slices_keep_the_rows_that_a_hadamard_transform_was_rounded_up_to() -> None:
    base = te.NVFP4Quantizer(with_rht=True).quantize(torch.randn(40, 32))
    whole = base.operand("columnwise", torch.float32).values
    for cut in (slice(0, 16), slice(16, 40), slice(32, 40)):
        part = base[cut]
        rows = slice(cut.start, -(-cut.stop // 16) * 16)
        assert torch.equal(part.operand("columnwise", torch.float32).values, whole[rows])
        assert torch.equal(part.dequantize(), base.dequantize()[cut])


@pytest.mark.parametrize(("name", "cut"), [("float8_block", 64), ("mxfp8", 16), ("mxfp8_2d", 48), ("nvfp4", 8)])
def test_a_cut_through_a_block_is_refused(name: str, cut: int) -> None:
    base = make(name, 256, 256)
    for index in ((slice(cut, None),), (slice(None), slice(0, cut))):
        with pytest.raises(ValueError, match=r"its blocks span \d+ (rows|columns), so allowed are multiples"):
            base[index]
    refused(lambda: base[::2], "call dequantize")


@pytest.mark.parametrize("name", sorted(FORMATS.keys() - set(ONE_SCALE)))
def test_writing_to_a_slice_reaches_the_base(name: str) -> None:
    base = make(name, 256, 256)
    expected = base.dequantize()
    expected[128:] *= 4.0
    base[128:].mul_(4.0)
    assert torch.equal(base.dequantize(), expected)


@pytest.mark.parametrize("name", ONE_SCALE)
def test_a_slice_that_shares_its_scale_is_read_only(name: str) -> None:
    base = make(name, 64, 64)
    before = base.clone()
    part = base[:32]
    for write in (lambda: part.mul_(2.0), lambda: part.copy_(torch.ones(32, 64)), lambda: part.view(-1).zero_()):
        refused(write, "shares the one scale")
    assert same_bits(base, before)
    part.clone().mul_(2.0)
    part.to(torch.bfloat16).zero_()
    assert same_bits(base, before)


@pytest.mark.parametrize("name", ONE_SCALE)
def test_views_of_a_slice_that_shares_its_scale_are_read_only(name: str) -> None:
    """A member of it has that scale, too: what is written to one would change the rows outside of the slice."""
    base = make(name, 3, 64, 64)
    before = base.clone()
    part = base[:, :32]
    views = [part[0], part.unbind(0)[1], part.member(2), part[1:], part.detach(), part[0].view(-1)]
    for view in [*views, *([] if name == "nvfp4" else [part.mT, part[0].mT])]:
        refused(lambda view=view: view.mul_(2.0), "shares the one scale")
    assert same_bits(base, before)
    part[0].clone().mul_(2.0)
    base[0].mul_(2.0)


@pytest.mark.parametrize("name", ["mxfp8", "nvfp4"])
def test_views_without_a_meaning_are_refused(name: str) -> None:
    base = make(name, 32, 64)
    for view in (lambda: base[3], lambda: base.unsqueeze(0), lambda: base.diagonal(), lambda: base.expand(2, 32, 64)):
        refused(view, "call dequantize")
    assert torch.equal(base.expand(32, 64).dequantize(), base.dequantize())


@pytest.mark.parametrize("name", ["float8", "float8_block", "mxfp8"])
def test_plain_functions_take_quantized_weights(name: str) -> None:
    weight, x = make(name, 128, 128), torch.randn(5, 128)
    quantized = F.linear(x, weight)
    assert type(quantized) is torch.Tensor
    torch.testing.assert_close(quantized, F.linear(x, weight.dequantize()), rtol=0.1, atol=1.0)
    assert torch.equal(torch.mm(x, weight), torch.mm(x, weight.dequantize()))


# --- members of a grouped tensor -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FORMATS)
def test_members_are_views_without_copies(name: str) -> None:
    base = make(name, 3, 64, 128)
    values = base.dequantize()
    for members in (list(base.unbind(0)), [base[i] for i in range(3)], list(base), base.members()):
        for member, expected in zip(members, values, strict=True):
            assert isinstance(member, te.QuantizedTensor) and not isinstance(member, te.GroupedTensor)
            assert shares_storage(member, base) and torch.equal(member.dequantize(), expected)
    assert torch.equal(base[-1].dequantize(), values[2])
    base[1].mul_(4.0)
    expected = values.clone()
    expected[1] = base.quantizer.quantize(values[1] * 4).dequantize()
    assert torch.equal(base.dequantize(), expected)


@pytest.mark.parametrize("name", FORMATS)
def test_runs_of_members_are_grouped_tensors(name: str) -> None:
    base = make(name, 4, 32, 64)
    for part, expected in zip(base.split([1, 3]), base.dequantize().split([1, 3]), strict=True):
        assert type(part) is te.GroupedTensor and shares_storage(part, base)
        assert torch.equal(part.dequantize(), expected)
    base[2:].zero_()
    assert not base.dequantize()[2:].any() and base.dequantize()[:2].any()


def test_a_grouped_weight_is_cut_along_the_shifted_dimensions() -> None:
    """Tensor parallelism: column-parallel splits dimension 1, row-parallel dimension 2."""
    base = make("mxfp8", 2, 64, 128)
    values = base.dequantize()
    assert torch.equal(base[:, 32:].dequantize(), values[:, 32:])
    assert torch.equal(base[:, :, 64:].dequantize(), values[:, :, 64:])


def test_scales_per_member_are_no_shared_scale() -> None:
    grouped = te.Float8CurrentScalingQuantizer().quantize_grouped(torch.randn(4, 8, 8))
    grouped[:2].mul_(2.0)
    assert grouped[1:].shape == (3, 8, 8)
