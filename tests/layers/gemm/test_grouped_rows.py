"""Rows of groups: each group is what quantizing its rows by themselves gives, and the splits are never read."""

import copy
import io

import pytest
import torch
from torch import nn

import te_models.layers as te
from te_models.kernels.grouped_gemm import grouped_gemm
from te_models.layers.quantizer.group_offsets import GroupOffsets
from tests.compare import raw, refused, same_bits

FORMATS: dict[str, te.Quantizer] = {
    "float8": te.Float8CurrentScalingQuantizer(),
    "float8_e5m2": te.Float8CurrentScalingQuantizer(fp8_dtype=torch.float8_e5m2, force_pow_2_scales=True),
    "float8_block_1d": te.Float8BlockQuantizer(block_scaling_dim=1),
    "float8_block_f32": te.Float8BlockQuantizer(block_scaling_dim=1, force_pow_2_scales=False, amax_epsilon=0.25),
    "float8_block_2d": te.Float8BlockQuantizer(),
    "mxfp8": te.MXFP8Quantizer(),
    "mxfp8_2d": te.MXFP8Quantizer(two_dimensional=True),
    "nvfp4": te.NVFP4Quantizer(),
    "nvfp4_rht": te.NVFP4Quantizer(with_rht=True),
    "identity": te.IdentityQuantizer(),
    "hybrid": te.HybridQuantizer(rowwise_quantizer=te.MXFP8Quantizer(), columnwise_quantizer=te.Float8BlockQuantizer()),
    "hybrid_fp8": te.HybridQuantizer(
        rowwise_quantizer=te.Float8CurrentScalingQuantizer(), columnwise_quantizer=te.NVFP4Quantizer(with_rht=True)
    ),
}
# rows per group and rows: ragged, empty groups, rows past the last group, one group only, none
SPLITS = [([5, 0, 37, 128], 170), ([33, 1, 0, 17], 60), ([64], 64), ([0, 0], 9), ([0, 3], 3)]
COLUMNS = 150


def rows_of(splits: list[int], rows: int, columns: int = COLUMNS) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(sum(splits) + rows)
    x = torch.randn(rows, columns) * torch.exp(torch.randn(rows, 1))
    x[sum(splits) :] = float("nan")  # what is past the last group has no part in anything
    return x, torch.tensor(splits)


def make(name: str, splits: list[int] = SPLITS[0][0], rows: int = SPLITS[0][1]) -> te.GroupedRows:
    return te.GroupedRows.quantize_rows(*rows_of(splits, rows), FORMATS[name])


def same_rows(a: te.GroupedRows, b: te.GroupedRows) -> bool:
    return type(a) is type(b) and same_bits(a, b) and torch.equal(a.m_splits, b.m_splits)


def usages(quantizer: te.Quantizer) -> list[te.Quantizer]:
    return [quantizer, *[quantizer.with_usage(rowwise=r, columnwise=not r) for r in (True, False)]]


@pytest.mark.parametrize(("splits", "rows"), SPLITS, ids=str)
@pytest.mark.parametrize("name", FORMATS)
def test_every_group_is_its_rows_quantized_by_themselves(name: str, splits: list[int], rows: int) -> None:
    x, m_splits = rows_of(splits, rows)
    for quantizer in usages(FORMATS[name]):
        grouped = te.GroupedRows.quantize_rows(x, m_splits, quantizer)
        assert grouped.shape == x.shape and grouped.num_gemms == len(splits)
        values, begin = grouped.dequantize(), 0
        for member, part in zip(grouped.members(), x[: sum(splits)].split(splits), strict=True):
            assert isinstance(member, te.QuantizedTensor) and member.shape == part.shape
            if len(part):
                assert same_bits(member, quantizer.quantize(part)), (quantizer, part.shape)
            torch.testing.assert_close(values[begin : begin + len(part)], member.dequantize(), rtol=0, atol=0)
            for field, own in member.fields.items():
                assert own.untyped_storage().data_ptr() == grouped.fields[field].untyped_storage().data_ptr()
            begin += len(part)
        assert not values[begin:].any()


def test_a_live_quantizer_has_a_scale_and_an_amax_for_each_group() -> None:
    x, m_splits = rows_of([5, 0, 37, 128], 170)
    scale, amax = torch.tensor([2.0, 3.0, 0.5, 100.0]), torch.zeros(4)
    live = te.Float8Quantizer(scale, amax, torch.float8_e4m3fn)
    for made in (te.GroupedRows.quantize_rows(x, m_splits, live), te.GroupedTensorStorage.quantize(x, live, m_splits)):
        assert made.quantizer == te.Float8CurrentScalingQuantizer()
        values, begin = made.dequantize(), 0
        for i, rows in enumerate(m_splits.tolist()):
            part = x[begin : begin + rows]
            own = te.Float8Quantizer(scale[i], None, torch.float8_e4m3fn).quantize(part)
            assert torch.equal(raw(made.rowwise_data[begin : begin + rows]), raw(own.rowwise_data))
            assert torch.equal(values[begin : begin + rows], own.dequantize())
            assert amax[i] == (part.abs().max() if rows else 0)
            begin += rows
        assert not values[begin:].any()
    with pytest.raises(ValueError, match=r"allowed: \(4,\), one per group"):
        te.GroupedRows.quantize_rows(x, m_splits, te.Float8Quantizer(scale[0], None, torch.float8_e4m3fn))


def test_a_live_quantizer_makes_every_kind_of_tensor() -> None:
    live = te.Float8Quantizer(torch.tensor(2.0), torch.zeros(()), torch.float8_e5m2)
    x = torch.randn(4, 32)
    expected = live.quantize(x)
    for made in (te.Float8Tensor.quantize(x, live), te.QuantizedStorage.quantize(x, live)):
        assert same_bits(expected, made.fields) and made.quantizer == expected.quantizer


@pytest.mark.parametrize("name", FORMATS)
def test_splits_are_never_read(name: str) -> None:
    """On the meta device there is nothing to read."""
    x, m_splits = rows_of(*SPLITS[0])
    grouped = te.GroupedRows.quantize_rows(x.to("meta"), m_splits.to("meta"), FORMATS[name])
    assert grouped.dequantize().shape == x.shape
    grouped.quantize_(x.to("meta"), m_splits=m_splits.to("meta"), noop=torch.empty((), device="meta"))
    expected = make(name)
    found, wanted = ({n: (f.shape, f.dtype) for n, f in its.fields.items()} for its in (grouped, expected))
    assert found == wanted


@pytest.mark.parametrize("name", FORMATS)
def test_rows_are_quantized_in_place_under_new_splits(name: str) -> None:
    grouped, (x, _) = make(name), rows_of(*SPLITS[0])
    x = torch.nan_to_num(x) * 2
    places = [f.data_ptr() for f in (*grouped.fields.values(), grouped.m_splits)]
    new = torch.tensor([100, 1, 40, 29])
    before = grouped.clone()
    grouped.quantize_(x, m_splits=new, noop=torch.tensor(1))
    assert same_rows(grouped, before)
    grouped.quantize_(x, m_splits=new, noop=torch.tensor(0))
    assert same_rows(grouped, te.GroupedRows.quantize_rows(x, new, FORMATS[name]))
    grouped.copy_(before)
    assert same_rows(grouped, before)
    grouped.mul_(2.0)
    values = before.dequantize() * 2
    assert same_rows(grouped, te.GroupedRows.quantize_rows(values, before.m_splits, FORMATS[name]))
    assert [f.data_ptr() for f in (*grouped.fields.values(), grouped.m_splits)] == places


@pytest.mark.parametrize("name", FORMATS)
def test_copies_moves_and_files(name: str) -> None:
    grouped = make(name)
    for new in (grouped.clone(), grouped.detach(), copy.deepcopy(grouped), copy.deepcopy(nn.Parameter(grouped))):
        assert same_rows(new, grouped)
    assert grouped.detach().rowwise_data.data_ptr() == grouped.rowwise_data.data_ptr()
    assert grouped.clone().m_splits.data_ptr() != grouped.m_splits.data_ptr()
    half = grouped.to(torch.bfloat16)
    assert type(half) is torch.Tensor and torch.equal(half, grouped.dequantize().to(torch.bfloat16))
    meta = grouped.to("meta")
    assert {f.device.type for f in (*meta.fields.values(), meta.m_splits)} == {"meta"}
    empty = torch.empty_like(grouped)
    assert torch.equal(empty.m_splits, grouped.m_splits) and empty.m_splits is not grouped.m_splits
    assert not empty.zero_().dequantize().any()
    zeros = grouped.new_zeros((70, 20))
    assert type(zeros) is te.GroupedRows and zeros.num_gemms == grouped.num_gemms and not zeros.m_splits.any()
    assert type(torch.zeros_like(grouped)) is torch.Tensor
    file = io.BytesIO()
    torch.save(grouped, file)
    file.seek(0)
    assert same_rows(torch.load(file, weights_only=True), grouped)
    assert "GroupedRows(shape=(170, 150)" in repr(grouped)


@pytest.mark.parametrize("name", FORMATS)
def test_storages_flatten_and_come_back(name: str) -> None:
    x, m_splits = rows_of(*SPLITS[0])
    storage = te.GroupedTensorStorage.quantize(x, FORMATS[name], m_splits)
    assert same_bits(make(name), storage.fields) and storage.num_gemms == 4
    tensors, meta = storage.flatten()
    again = te.GroupedTensorStorage.unflatten(tensors, meta)
    assert again.m_splits is m_splits and all(again.fields[n] is f for n, f in storage.fields.items())
    assert torch.equal(again.dequantize(), make(name).dequantize())
    shared = make(name).to_storage()
    assert type(shared) is te.GroupedTensorStorage and "GroupedTensorStorage(shape=(170, 150)" in repr(shared)
    empty = te.GroupedTensorStorage.empty(x.shape, FORMATS[name], x.dtype, "cpu", groups=4)
    assert [f.shape for f in empty.fields.values()] == [f.shape for f in storage.fields.values()]
    stacked = te.GroupedTensorStorage.quantize(x[:60].view(3, 20, COLUMNS), FORMATS[name])
    tensor = FORMATS[name].quantize_grouped(x[:60].view(3, 20, COLUMNS))
    assert same_bits(tensor, stacked.fields) and stacked.num_gemms == 3
    assert type(tensor.to_storage()) is te.GroupedTensorStorage
    assert torch.equal(te.GroupedTensorStorage.unflatten(*stacked.flatten()).dequantize(), tensor.dequantize())
    with pytest.raises(ValueError, match="beside m_splits"):
        te.GroupedTensorStorage(stacked.fields, FORMATS[name], stacked.shape, x.dtype, m_splits)


@pytest.mark.parametrize("name", [name for name in FORMATS if name != "identity"])
def test_operands_of_grouped_gemms(name: str) -> None:
    """What a copy stands for, group by group, whichever rows it is in; and fprop from it, against its own values."""
    splits, _ = SPLITS[0]
    quantizer, grouped = FORMATS[name], make(name)
    for usage in ("rowwise", "columnwise"):
        operand, groups = grouped.operand(usage, torch.float32), grouped.operand_groups(usage)
        begins = (groups.ends - groups.m_splits).tolist()
        for i, member in enumerate(grouped.members()):
            own = member.operand(usage, torch.float32)
            assert torch.equal(operand.values[begins[i] : begins[i] + splits[i]], own.values[: splits[i]])
            assert (own.scale is None) == (operand.scale is None)
            assert own.scale is None or torch.equal(operand.scale[i], own.scale)
    weights = torch.randn(4, 24, COLUMNS)
    operand, groups = grouped.operand("rowwise", torch.float32), grouped.operand_groups("rowwise")
    y = grouped_gemm(operand.values, weights, groups.m_splits)
    if operand.scale is not None:
        y = y * groups.per_row(operand.scale)[:, None]
    begins = (groups.ends - groups.m_splits).tolist()
    for i, member in enumerate(grouped.members()):
        expected = member.dequantize() @ weights[i].t() if quantizer.rowwise else None
        torch.testing.assert_close(y[begins[i] : begins[i] + splits[i]], expected, rtol=1e-5, atol=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mxfp8", "nvfp4_rht"])
def test_compiled_functions_take_and_return_rows_of_any_splits(name: str) -> None:

    def double(grouped: te.GroupedRows) -> tuple[te.GroupedRows, torch.Tensor]:
        values = grouped.dequantize()
        return te.GroupedRows.quantize_rows(values * 2, grouped.m_splits, grouped.quantizer), values

    compiled = torch.compile(double, fullgraph=True)
    for splits in ([5, 0, 37, 128], [0, 0, 0, 170], [1, 100, 2, 3]):
        grouped = make(name, splits, 170)
        found, values = compiled(grouped)
        assert torch.equal(values, grouped.dequantize()) and same_rows(found, double(grouped)[0])
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def test_stochastic_rounding_draws_from_its_key() -> None:
    quantizer = te.NVFP4Quantizer(stochastic_rounding=True)
    x, m_splits = rows_of([20, 12], 32)
    keys = (torch.tensor([5, counter]) for counter in (0, 0, 1))
    one, two, three = (te.GroupedRows.quantize_rows(x, m_splits, quantizer, key=key) for key in keys)
    assert same_bits(one, two) and not same_bits(one, three)
    refused(lambda: te.GroupedRows.quantize_rows(x, m_splits, quantizer), "draws from a key")


def test_usages_can_be_dropped() -> None:
    grouped = make("mxfp8")
    grouped.update_usage(columnwise=False)
    assert same_rows(grouped, te.GroupedRows.quantize_rows(*rows_of(*SPLITS[0]), te.MXFP8Quantizer(columnwise=False)))
    refused(lambda: grouped.operand("columnwise", torch.float32), "no columnwise copy")


def test_what_the_layout_does_not_allow_is_refused() -> None:
    grouped = make("mxfp8")
    square = te.GroupedRows.quantize_rows(
        torch.randn(32, 32), torch.tensor([20, 12]), te.Float8CurrentScalingQuantizer()
    )
    views = [lambda: grouped.view(-1), lambda: grouped[:32], lambda: grouped.split(10), lambda: square.t()]
    views += [lambda: grouped[3], lambda: grouped.transpose(0, 1), lambda: grouped[:, :32]]
    for view in views:
        refused(view, "because only the device knows where its groups begin; call members")
    x, m_splits = rows_of(*SPLITS[0])
    with pytest.raises(ValueError, match="with_2d_quantization is of weights"):
        te.GroupedRows.quantize_rows(x, m_splits, te.NVFP4Quantizer(with_2d_quantization=True))
    refused(lambda: te.GroupedRows.quantize(x, te.MXFP8Quantizer()), "call GroupedRows.quantize_rows")
    for wrong in (m_splits.float(), m_splits[None], m_splits[:0]):
        with pytest.raises(ValueError, match="allowed: a one-dimensional integer tensor"):
            te.GroupedRows.quantize_rows(x, wrong, te.MXFP8Quantizer())
    for wrong in ([171, 0], [-1, 3]):
        with pytest.raises(ValueError, match="that add up to at most 170"):
            te.GroupedRows.quantize_rows(x, torch.tensor(wrong), te.MXFP8Quantizer())
    refused(lambda: grouped.members([1, 2]), "one per group")
    refused(lambda: grouped.to("meta").members(), "need their splits from the host")
    refused(lambda: grouped.quantize_(torch.ones(3, 3)), "cannot quantize shape")
    refused(lambda: grouped.quantize_(x, m_splits=torch.tensor([1, 2])), "m_splits has shape (2,)")
    refused(lambda: te.GroupedRows.quantize_rows(torch.randn(3), m_splits, te.MXFP8Quantizer()), "2-D")
    with pytest.raises(ValueError, match="floating-point"):
        te.GroupedRows.quantize_rows(torch.ones(170, 3, dtype=torch.int64), m_splits, te.MXFP8Quantizer())


def test_a_file_with_wrong_splits_is_refused() -> None:
    from te_models.layers.tensor.formats import rebuild_quantized

    _, (name, quantizer, shape, dtype, fields, flags) = make("mxfp8").__reduce_ex__(2)
    for wrong, message in ((torch.tensor([200, 0, 0, 0]), "add up to at most 170"), (None, "m_splits is None")):
        with pytest.raises(ValueError, match=message):
            rebuild_quantized(name, quantizer, shape, dtype, fields | {"m_splits": wrong}, flags)
    assert raw(fields["m_splits"]).numel() == 32


def test_a_grouped_weight_is_no_rows_of_groups() -> None:
    weight = te.MXFP8Quantizer().quantize_grouped(torch.randn(2, 32, 32))
    assert isinstance(weight, te.GroupedTensor) and not isinstance(weight, te.GroupedRows)
    assert GroupOffsets.of(torch.tensor([3, 2]), 6).group.tolist() == [0, 0, 0, 1, 1, 2]
