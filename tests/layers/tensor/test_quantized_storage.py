"""One declaration per format: what the schema says is what the quantizer makes, in storages and tensors alike."""

import io

import pytest
import torch

import te_models.layers as te
from te_models.checkpoints.mapping.quantized_format import SUFFIXES
from te_models.layers.quantizer import QUANTIZERS
from te_models.layers.quantizer.schema import empty_fields, field_layouts
from te_models.layers.tensor.formats import TENSOR_CLASSES
from te_models.layers.tensor.storage import STORAGE_CLASSES
from tests.build import weight_quantizers
from tests.compare import raw, refused, same_bits

FORMATS = weight_quantizers()


def ceil(a: int, b: int) -> int:
    return -(-a // b)


def test_every_format_has_its_classes() -> None:
    assert STORAGE_CLASSES.keys() == TENSOR_CLASSES.keys() == QUANTIZERS.keys()
    named = {"float8": (te.Float8Tensor, te.Float8TensorStorage), "mxfp8": (te.MXFP8Tensor, te.MXFP8TensorStorage)}
    named |= {"float8_block": (te.Float8BlockwiseTensor, te.Float8BlockwiseTensorStorage)}
    named |= {"nvfp4": (te.NVFP4Tensor, te.NVFP4TensorStorage)}
    for name, (tensor, storage) in named.items():
        assert (TENSOR_CLASSES[name], STORAGE_CLASSES[name]) == (tensor, storage)
        x = torch.randn(16, 16)
        assert type(FORMATS[name].quantize(x)) is tensor
        assert type(te.QuantizedStorage.quantize(x, FORMATS[name])) is storage


@pytest.mark.parametrize("shape", [(1, 1), (40, 70), (128, 256), (3, 33, 130)])
@pytest.mark.parametrize("name", FORMATS)
def test_layouts_give_the_shapes_of_the_fields(name: str, shape: tuple[int, ...]) -> None:
    quantizer = FORMATS[name]
    fields = quantizer.quantize_fields(torch.randn(shape))
    layouts = field_layouts(quantizer)
    assert [layout.name for layout in layouts] == list(fields)
    for layout in layouts:
        expected = shape[:-2]
        if layout.block is not None:
            entries = [ceil(shape[dim], layout.block[dim]) for dim in (-2, -1)]
            expected += tuple(reversed(entries) if layout.transposed else entries)
        assert fields[layout.name].shape == expected, layout


def test_empty_fields_are_those_that_a_quantizer_makes() -> None:
    """Strides, too: a graph compiled for one kind takes the other."""
    quantizers = [*FORMATS.values(), te.Float8BlockQuantizer(block_scaling_dim=1, force_pow_2_scales=False)]
    quantizers += [te.NVFP4Quantizer(with_rht=True), te.NVFP4Quantizer(with_2d_quantization=True)]
    quantizers += [te.MXFP8Quantizer(two_dimensional=True), te.MXFP8Quantizer(fp8_dtype=torch.float8_e5m2)]
    quantizers += [q.with_usage(rowwise=r, columnwise=not r) for q in quantizers for r in (True, False)]
    for shape in ((1, 1), (40, 70), (128, 256), (300, 70), (3, 33, 130), (3, 257, 129), (1, 300), (0, 64), (64, 0)):
        for quantizer in quantizers:
            fields = quantizer.quantize_fields(torch.ones(shape, dtype=torch.bfloat16))
            empty = empty_fields(quantizer, torch.Size(shape), "cpu", torch.bfloat16)
            found, expected = ({n: (f.shape, f.dtype, f.stride()) for n, f in each.items()} for each in (empty, fields))
            assert found == expected, (quantizer, shape)


def test_checkpoint_names_of_fields() -> None:
    names = ("rowwise_data", "rowwise_scale_inv", "rowwise_amax")
    assert [SUFFIXES[name] for name in names] == ["", "_scale_inv", "_amax"]
    names = ("columnwise_data", "columnwise_scale_inv", "columnwise_amax")
    assert [SUFFIXES[name] for name in names] == ["_columnwise", "_columnwise_scale_inv", "_columnwise_amax"]


@pytest.mark.parametrize("name", FORMATS)
def test_storages_flatten_and_come_back(name: str) -> None:
    x = torch.randn(48, 80).to(torch.bfloat16)
    storage = te.QuantizedStorage.quantize(x, FORMATS[name])
    assert (storage.shape, storage.dtype, storage.device) == (x.shape, x.dtype, x.device)
    assert type(storage).__name__ in repr(storage)
    tensors, meta = storage.flatten()
    assert all(type(t) is torch.Tensor for t in tensors)
    again = te.QuantizedStorage.unflatten(tensors, meta)
    assert type(again) is type(storage)
    for field, value in again.fields.items():
        assert value is storage.fields[field]
    tensor = FORMATS[name].quantize(x)
    assert same_bits(tensor, storage.fields) and torch.equal(storage.dequantize(), tensor.dequantize())
    assert storage.dequantize(torch.float32).dtype is torch.float32
    shared = tensor.to_storage()
    assert all(value is tensor.fields[field] for field, value in shared.fields.items())
    empty = te.QuantizedStorage.empty(x.shape, FORMATS[name], x.dtype, "cpu")
    assert {n: f.shape for n, f in empty.fields.items()} == {n: f.shape for n, f in storage.fields.items()}


@pytest.mark.parametrize("usage", ["rowwise", "columnwise"])
@pytest.mark.parametrize("name", FORMATS)
def test_storage_and_tensor_give_the_same_operand(name: str, usage: str) -> None:
    x = torch.randn(32, 64)
    quantizer = FORMATS[name]
    expected = quantizer.rounded(x, usage, torch.bfloat16)
    for holder in (te.QuantizedStorage.quantize(x, quantizer), quantizer.quantize(x)):
        found = holder.operand(usage, torch.bfloat16)
        assert torch.equal(found.values, expected.values)
        assert (found.scale is None) == (expected.scale is None)
        assert found.scale is None or torch.equal(found.scale, expected.scale)


# --- update_usage -----------------------------------------------------------------------------------------------------

TWO_COPIES = [name for name, quantizer in FORMATS.items() if len(quantizer.stored_usages()) == 2]


@pytest.mark.parametrize("kind", [te.QuantizedStorage, te.QuantizedTensor])
@pytest.mark.parametrize("name", TWO_COPIES)
def test_a_copy_can_be_dropped_and_not_be_conjured(name: str, kind: type) -> None:
    quantizer, x = FORMATS[name], torch.randn(64, 64)
    value = quantizer.quantize(x) if kind is te.QuantizedTensor else te.QuantizedStorage.quantize(x, quantizer)
    before = {field: raw(tensor) for field, tensor in value.fields.items()}
    value.update_usage(columnwise=False)
    assert all(field.startswith("rowwise") for field in value.fields)
    assert not hasattr(value, "columnwise_data")
    assert all(torch.equal(raw(tensor), before[field]) for field, tensor in value.fields.items())
    refused(lambda: value.operand("columnwise", torch.float32), "columnwise")
    with pytest.raises(ValueError, match="no columnwise copy, and its other copy does not determine one"):
        value.update_usage(columnwise=True)
    refused(lambda: value.update_usage(rowwise=False), "at least one usage")
    other = quantizer.quantize(x)
    other.update_usage(rowwise=False)
    assert all(field.startswith("columnwise") for field in other.fields)


@pytest.mark.parametrize("name", sorted(FORMATS.keys() - set(TWO_COPIES)))
def test_symmetric_formats_serve_both_usages_from_one_copy(name: str) -> None:
    value = FORMATS[name].with_usage(rowwise=True, columnwise=False).quantize(torch.randn(32, 32))
    fields = value.fields
    value.update_usage(columnwise=True)
    assert all(value.fields[field] is tensor for field, tensor in fields.items())
    value.operand("columnwise", torch.float32)


def test_a_usage_change_acts_on_a_copy_of_the_shared_quantizer() -> None:
    quantizer = te.MXFP8Quantizer()
    one, two = quantizer.quantize(torch.randn(32, 32)), quantizer.quantize(torch.randn(32, 32))
    one.update_usage(columnwise=False)
    assert quantizer == te.MXFP8Quantizer() and two.quantizer is quantizer
    assert one.quantizer == quantizer.with_usage(rowwise=True, columnwise=False)
    two.operand("columnwise", torch.float32)


def test_a_dropped_copy_is_not_missed_by_later_updates() -> None:
    x = torch.randn(128, 128)
    value = te.Float8BlockQuantizer(block_scaling_dim=1).quantize(x)
    value.update_usage(columnwise=False)
    value.mul_(2.0)
    value.quantize_(x)
    expected: te.Quantizer = te.Float8BlockQuantizer(block_scaling_dim=1, columnwise=False)
    assert same_bits(value, expected.quantize_fields(x))
    value.quantize_(te.Float8BlockQuantizer(block_scaling_dim=1).quantize(3 * x))
    assert same_bits(value, expected.quantize_fields(3 * x))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    "quantizer", [te.IdentityQuantizer(), te.NVFP4Quantizer(stochastic_rounding=True)], ids=["identity", "stochastic"]
)
def test_empty_fields_have_the_logical_dtype_and_need_no_key(quantizer: te.Quantizer, dtype: torch.dtype) -> None:
    x = torch.randn(32, 48, dtype=dtype)
    fields = quantizer.quantize_fields(x, torch.tensor([1, 2]))
    described = {n: (f.shape, f.dtype) for n, f in fields.items()}
    for empty in (
        empty_fields(quantizer, x.shape, "cpu", dtype),
        te.QuantizedStorage.empty(x.shape, quantizer, dtype, "cpu").fields,
        {n: f[0] for n, f in te.GroupedTensor.empty(torch.Size((2, 32, 48)), quantizer, dtype).fields.items()},
    ):
        assert {n: (f.shape, f.dtype) for n, f in empty.items()} == described
    file = io.BytesIO()
    torch.save(TENSOR_CLASSES[quantizer.FORMAT](fields, quantizer, x.shape, dtype), file)
    file.seek(0)
    again = torch.load(file, weights_only=True)
    assert again.dtype is dtype
    assert all(torch.equal(raw(again.fields[n]), raw(f)) for n, f in fields.items())
