"""Torch's default device is where a user makes tensors without saying where: files are converted and weights read in
main memory under any, and models that have weights decode with them."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import te_models.layers as te
from te_models import GPTModel, generate
from te_models.checkpoints import dequantize, diff, export_hf, import_hf, quantize, relayout, reshard, upcycle, verify
from tests.build import tiny, tiny_moe, token_ids
from tests.default_device import defaulting

NAMES = ("delayed", "current", "block", "mxfp8", "nvfp4")


def contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in sorted(folder.iterdir())}


CONVERSIONS: dict[str, Callable[[Path, Path], object]] = {
    "import": import_hf,
    "export": lambda src, dst: export_hf(src.with_name("ours"), dst, family="llama"),
    "relayout": lambda src, dst: relayout(src.with_name("ours"), dst, "per-gemm"),
    "reshard": lambda src, dst: reshard(src, dst, max_shard_bytes=20_000),
    "upcycle": lambda src, dst: upcycle(src, dst, 4, 2, noise_std=0.1),
    **{name: lambda src, dst, name=name: quantize(src.with_name("ours"), dst, name) for name in NAMES},
    "dequantize": lambda src, dst: dequantize(src.with_name("quantized"), dst),
    "save": lambda src, dst: GPTModel.from_pretrained(src, dtype=torch.float32).save_pretrained(dst),
    "compressed-tensors": lambda src, dst: export_hf(src.with_name("quantized"), dst, family="llama"),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of Hugging Face's, with ours and a quantized one of ours beside it."""
    root = tmp_path_factory.mktemp("folders")
    torch.manual_seed(0)
    GPTModel(tiny()).save_pretrained(root / "ours")
    export_hf(root / "ours", root / "hf", family="llama")
    quantize(root / "ours", root / "quantized", "mxfp8")
    return root / "hf"


@pytest.mark.sentinels("import", "upcycle", "mxfp8", "dequantize", "save")
@pytest.mark.parametrize("name", CONVERSIONS)
def test_folders_are_converted_in_main_memory(name: str, folders: Path, tmp_path: Path) -> None:
    CONVERSIONS[name](folders, tmp_path / "expected")
    for default in (torch.device("meta"), torch.bfloat16):
        found = tmp_path / str(default)
        with defaulting(default):
            CONVERSIONS[name](folders, found)
            assert verify(tmp_path / "expected", found).equal and diff(tmp_path / "expected", found).equal
        assert contents(found) == contents(tmp_path / "expected")


def test_weights_that_are_read_have_memory(folders: Path) -> None:
    expected = GPTModel.from_pretrained(folders)
    with torch.device("meta"):
        found = [GPTModel.from_pretrained(folders), GPTModel.from_pretrained(folders, recipe=te.recipe("mxfp8"))]
        assert GPTModel(tiny()).embedding.word_embeddings.weight.is_meta
    assert all(torch.equal(p, q) for p, q in zip(found[0].parameters(), expected.parameters(), strict=True))
    assert not any(p.is_meta for p in found[1].parameters())
    with pytest.raises(ValueError, match="device is 'meta', which holds no values; allowed: a device with memory"):
        GPTModel.from_pretrained(folders, device="meta")


def test_models_decode_where_their_weights_are() -> None:
    models, ids = [GPTModel(tiny()).eval(), GPTModel(tiny_moe(), dtype=torch.bfloat16).eval()], token_ids(2, 5)
    for temperature in (0.0, 1.0):
        for model in models:
            expected = generate(model, ids, 8, temperature=temperature, seed=1)
            with torch.device("meta"):
                assert torch.equal(generate(model, ids, 8, temperature=temperature, seed=1), expected)
