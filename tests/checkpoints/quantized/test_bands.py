"""Bands of rows: quantized and dequantized piece by piece, the numbers are those of the whole matrix."""

from pathlib import Path

import pytest
import torch

from te_models.checkpoints import dequantize, import_hf, quantize
from te_models.checkpoints.io.boxes import full
from te_models.checkpoints.io.store import MemoryStore
from te_models.checkpoints.mapping.plan import OutputTensor
from te_models.checkpoints.mapping.quantized_format import SUFFIXES, quantized_metadata
from te_models.checkpoints.mapping.stream import read_rows
from te_models.checkpoints.mapping.tensor_map import Piece
from te_models.checkpoints.quantized import requantize
from te_models.checkpoints.quantized import row_blocks as bands
from te_models.checkpoints.quantized.dequantized_store import ValueStore
from te_models.layers import Float8CurrentScalingQuantizer, HybridQuantizer, MXFP8Quantizer, NVFP4Quantizer, Quantizer
from te_models.layers import recipe as recipe_by_name
from te_models.layers.quantizer.schema import empty_fields
from tests.checkpoints.hf_cases import HFFolder

NAMES = ("delayed", "current", "block", "mxfp8", "nvfp4")
QUANTIZERS: dict[str, Quantizer] = {name: recipe_by_name(name).weight_quantizer() for name in NAMES} | {
    "mxfp8 columnwise": MXFP8Quantizer(rowwise=False),
    "block 1-D": recipe_by_name("block", w_block_scaling_dim=1).weight_quantizer(),
    "nvfp4 1-D": NVFP4Quantizer(),
    "current, both copies": Float8CurrentScalingQuantizer(),
    "hybrid": HybridQuantizer(rowwise_quantizer=Float8CurrentScalingQuantizer(), columnwise_quantizer=MXFP8Quantizer()),
}


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


@pytest.mark.matrix
@pytest.mark.parametrize("shape", [(1, 40), (127, 16), (300, 48), (513, 33)])
@pytest.mark.parametrize("name", QUANTIZERS)
def test_bands_are_parts_of_the_whole(monkeypatch: pytest.MonkeyPatch, name: str, shape: tuple[int, int]) -> None:
    quantizer = QUANTIZERS[name]
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    x[-1, -1] = 300.0  # the largest value is in the last band
    whole = quantizer.quantize_fields(x)
    values = quantizer.dequantize_fields(whole, torch.float32, shape)

    monkeypatch.setattr(bands, "BAND_ELEMENTS", 1)
    parts = bands.bands(quantizer, shape)
    assert [r for part in parts for r in range(*part)] == list(range(shape[0]))
    assert len(parts) > 1 or shape[0] < 300
    fields = empty_fields(quantizer, torch.Size(shape), "cpu")
    for field in fields.values():
        bits(field).fill_(0x7F)
    matrix = bands.Matrix(lambda begin, end: x[begin:end], fields)
    assert list(bands.quantize_bands([matrix], quantizer, shape, measure=True)) == []
    copies = (copy.dequantize_fields(whole, torch.float32, shape) for copy in bands.by_usage(quantizer))
    assert matrix.error == max(float((copy - x).abs().max()) for copy in copies)
    assert fields.keys() == whole.keys()
    for field, value in whole.items():
        assert torch.equal(bits(fields[field]), bits(value)), field

    store = MemoryStore({"w" + SUFFIXES[field]: value for field, value in whole.items()})
    stored = ValueStore(store, {"w": (shape, quantized_metadata(quantizer, torch.bfloat16))}, torch.float32)
    parts = list(stored.bands("w"))
    assert len(parts) > 1 or shape[0] < 300
    assert torch.equal(bits(torch.cat(parts)), bits(values))


def test_both_copies_are_made_of_values_that_are_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """And once before for the amax. A copy that can be written as it is made, MXFP8's columnwise one, is read for by
    itself, so that it need not be in memory."""
    shape = (300, 48)
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    box, rows_read = full(shape), 0
    weight = OutputTensor("w", "BF16", shape, (Piece("w", box, box, (0, 1)),))

    def counted(store: MemoryStore, field: OutputTensor, begin: int, end: int) -> torch.Tensor:
        nonlocal rows_read
        rows_read += end - begin
        return read_rows(store, field, begin, end)

    monkeypatch.setattr(requantize, "read_rows", counted)
    monkeypatch.setattr(bands, "BAND_ELEMENTS", 1)
    for quantizer, passes in ((NVFP4Quantizer(), 2), (Float8CurrentScalingQuantizer(), 2), (MXFP8Quantizer(), 2)):
        rows_read = 0
        entries = requantize.field_entries("w", shape, quantized_metadata(quantizer, torch.bfloat16))
        outputs = requantize.requantized_outputs(MemoryStore({"w": x}), weight, quantizer, entries, lambda: None)
        whole = {"w" + SUFFIXES[field]: value for field, value in quantizer.quantize_fields(x).items()}
        for output in outputs:
            found = torch.cat([bits(part) for part in output.compute()])
            assert torch.equal(found, bits(whole.pop(output.name))), output.name
        assert whole == {} and rows_read == passes * shape[0], quantizer


@pytest.mark.sentinels("nvfp4")
@pytest.mark.parametrize("name", NAMES)
def test_folders_do_not_depend_on_the_bands(
    monkeypatch: pytest.MonkeyPatch, hf_folder: HFFolder, tmp_path: Path, name: str
) -> None:
    """A grouped-query model, whose q, k and v rows are interleaved in the source, and experts."""
    import_hf(hf_folder("mixtral"), tmp_path / "ours")
    for what, elements in (("wide", 1 << 30), ("narrow", 1)):
        monkeypatch.setattr(bands, "BAND_ELEMENTS", elements)
        quantize(tmp_path / "ours", tmp_path / f"{what}-q", name)
        dequantize(tmp_path / f"{what}-q", tmp_path / f"{what}-d")
    for kind in ("q", "d"):
        wide, narrow = (tmp_path / f"{what}-{kind}" / "model.safetensors" for what in ("wide", "narrow"))
        assert wide.read_bytes() == narrow.read_bytes()
