"""Single-bit flips anywhere in a folder with a manifest: each is noticed when it is read, and said in one sentence."""

import json
import random
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from te_models import GPTModel
from te_models.checkpoints import CheckpointError, export_hf, import_hf, open_checkpoint, quantize, relayout, reshard
from te_models.checkpoints.folder.reading_checks import TensorDigests
from te_models.checkpoints.io.errors import EditedFileWarning
from te_models.checkpoints.io.header import read_header
from te_models.checkpoints.io.manifest import MANIFEST
from tests.checkpoints.aligned_folders import make_earlier
from tests.checkpoints.hf_cases import HFFolder
from tests.compare import refused

FLIPS = 10_000

NOTICED = (CheckpointError, EditedFileWarning)
"""A small file of a Hugging Face folder that decides no number is told in a warning, which is an error here."""


@pytest.fixture
def folders(hf_folder: HFFolder, tmp_path: Path) -> dict[str, Path]:
    """Ours of one file, of several, with digests of whole files, of an earlier release and of quantized weights, and an
    export."""
    import_hf(hf_folder("llama"), tmp_path / "plain")
    import_hf(hf_folder("mixtral"), tmp_path / "shards", max_shard_bytes=40_000)
    reshard(tmp_path / "plain", tmp_path / "whole", file_digests=True)
    reshard(tmp_path / "plain", tmp_path / "earlier")
    make_earlier(tmp_path / "earlier", 2)
    quantize(tmp_path / "plain", tmp_path / "mxfp8", "mxfp8")
    quantize(tmp_path / "plain", tmp_path / "nvfp4", "nvfp4")
    export_hf(tmp_path / "plain", tmp_path / "hf")
    return {name: tmp_path / name for name in ("plain", "shards", "whole", "earlier", "mxfp8", "nvfp4", "hf")}


@contextmanager
def flipped(file: Path, bit: int) -> Iterator[None]:
    """Flip one bit of a file meanwhile."""
    good = file.read_bytes()
    raw = bytearray(good)
    raw[bit // 8] ^= 1 << bit % 8
    file.write_bytes(raw)
    try:
        yield
    finally:
        file.write_bytes(good)


def places(folder: Path, count: int, seed: int) -> Iterator[tuple[Path, int]]:
    """Yield (file, bit): of weights as many as of all the small files together."""
    files = [path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != MANIFEST]
    weights = [path for path in files if path.suffix == ".safetensors"]
    others = [path for path in files if path.suffix != ".safetensors"]
    chosen = random.Random(seed)
    for number in range(count):
        among = weights if number % 2 else others
        file = chosen.choices(among, [path.stat().st_size for path in among])[0]
        yield file, chosen.randrange(8 * file.stat().st_size)


def load(folder: Path, params: dict[str, torch.Tensor]) -> None:
    with open_checkpoint(folder) as checkpoint:
        checkpoint.load_into(params)


def check_flips(folders: dict[str, Path], count: int) -> None:
    for seed, folder in enumerate(folders.values()):
        params = dict(GPTModel.from_pretrained(folder).stored_tensors())
        for file, bit in places(folder, count // len(folders), seed):
            with flipped(file, bit), pytest.raises(NOTICED) as noticed:
                load(folder, params)
            assert "\n" not in str(noticed.value) and len(str(noticed.value)) <= 700, (file, bit)


def test_every_flip_is_noticed(folders: dict[str, Path]) -> None:
    check_flips(folders, 150)


@pytest.mark.slow
def test_every_flip_is_noticed_thoroughly(folders: dict[str, Path]) -> None:
    check_flips(folders, FLIPS)


def check_manifest_flips(folder: Path, count: int) -> None:
    """In the manifest itself a flip is noticed, or changes nothing that is compared: a digest's name, white space."""
    file, chosen = folder / MANIFEST, random.Random(7)
    params = dict(GPTModel.from_pretrained(folder).stored_tensors())
    good = {name: tensor.clone() for name, tensor in params.items()}
    for _ in range(count):
        with flipped(file, chosen.randrange(8 * file.stat().st_size)):
            try:
                load(folder, params)
            except NOTICED as error:
                assert "\n" not in str(error)
            else:
                assert all(torch.equal(params[name], tensor) for name, tensor in good.items())


def test_a_flip_in_the_manifest_is_no_traceback(folders: dict[str, Path]) -> None:
    check_manifest_flips(folders["plain"], 20)
    check_manifest_flips(folders["whole"], 20)


@pytest.mark.slow
def test_a_flip_in_the_manifest_is_no_traceback_thoroughly(folders: dict[str, Path]) -> None:
    check_manifest_flips(folders["plain"], 2_000)
    check_manifest_flips(folders["whole"], 2_000)


def flip_last(file: Path) -> None:
    """Flip a bit of the last byte: of the last tensor's data."""
    raw = bytearray(file.read_bytes())
    raw[-1] ^= 64
    file.write_bytes(raw)


CONVERSIONS: dict[str, Callable[..., object]] = {
    "export": export_hf,
    "relayout": lambda a, b, **how: relayout(a, b, "per-gemm", **how),
    "quantize": lambda a, b, **how: quantize(a, b, "block", **how),
}


def test_tensors_that_are_copied_are_hashed_once(llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The digest of what is written is compared with both manifests; only tensors that are joined or split are hashed
    while they are read."""
    import_hf(llama, tmp_path / "ours")
    hashed: list[str] = []
    real = TensorDigests._check
    monkeypatch.setattr(TensorDigests, "_check", lambda self, name: (hashed.append(name), real(self, name))[1])
    reshard(tmp_path / "ours", tmp_path / "few", max_shard_bytes=40_000)
    assert hashed == []
    export_hf(tmp_path / "ours", tmp_path / "hf")
    assert {name.rsplit(".", 2)[1] for name in hashed} == {"linear_qkv", "linear_fc1"}
    file = tmp_path / "ours/model.safetensors"
    header = read_header(file)
    for info in header.tensors.values():
        with flipped(file, 8 * (header.data_start + info.stop) - 1), pytest.raises(CheckpointError, match="SHA-256"):
            reshard(tmp_path / "ours", tmp_path / "out", max_shard_bytes=40_000)
        assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", CONVERSIONS)
def test_conversions_notice_damage_and_write_nothing(llama: Path, tmp_path: Path, name: str) -> None:
    import_hf(llama, tmp_path / "ours")
    flip_last(tmp_path / "ours/model.safetensors")
    convert = CONVERSIONS[name]
    with pytest.raises(
        CheckpointError, match=r"model.safetensors: tensor '.*' does not have the SHA-256 .*; verify=False, or --no-"
    ):
        convert(tmp_path / "ours", tmp_path / "out")
    assert not (tmp_path / "out").exists() and not list(tmp_path.glob(".out*"))
    convert(tmp_path / "ours", tmp_path / "out", verify=False)
    assert (tmp_path / "out/config.json").is_file()


def test_damage_is_read_where_that_is_asked_for(llama: Path, tmp_path: Path) -> None:
    import_hf(llama, tmp_path / "ours")
    flip_last(tmp_path / "ours/model.safetensors")
    refused(lambda: GPTModel.from_pretrained(tmp_path / "ours"), "does not have the SHA-256", error=CheckpointError)
    GPTModel.from_pretrained(tmp_path / "ours", verify=False)
    (tmp_path / "ours/manifest.json").unlink()
    GPTModel.from_pretrained(tmp_path / "ours")


def test_the_manifest_of_another_program_is_left_alone(llama: Path, tmp_path: Path) -> None:
    for text in ('[{"layers": []}]', '{"name": "model"}', "not JSON"):
        (llama / MANIFEST).write_text(text)
        GPTModel.from_pretrained(llama)
    shutil.rmtree(llama)


def test_a_folder_without_digests_of_headers_is_read(llama: Path, tmp_path: Path) -> None:
    """As earlier releases wrote it: tensors are checked, headers as far as they have to fit the configuration."""
    import_hf(llama, tmp_path / "ours", file_digests=True)
    manifest = tmp_path / "ours" / MANIFEST
    values = json.loads(manifest.read_text())
    assert values["files"]["model.safetensors"].pop("header")
    manifest.write_text(json.dumps(values))
    GPTModel.from_pretrained(tmp_path / "ours")
    flip_last(tmp_path / "ours/model.safetensors")
    refused(lambda: GPTModel.from_pretrained(tmp_path / "ours"), "does not have the SHA-256", error=CheckpointError)


def test_ranks_share_the_checks(llama: Path, tmp_path: Path) -> None:
    """Each of two ranks hashes its share of the tensors, whatever it reads: one of them sees the damage."""
    from te_models.checkpoints import expected_tensors
    from te_models.checkpoints.mapping.rank_shards import ShardPlace, parts

    import_hf(llama, tmp_path / "ours")
    for where in (0, -1):
        good = (tmp_path / "ours/model.safetensors").read_bytes()
        raw = bytearray(good)
        start = 8 + int.from_bytes(raw[:8], "little") if where == 0 else len(raw) - 1
        raw[start] ^= 1
        (tmp_path / "ours/model.safetensors").write_bytes(raw)
        noticed = []
        for rank in range(2):
            with open_checkpoint(tmp_path / "ours") as checkpoint:
                place, shapes = ShardPlace(tp_rank=rank, tp_size=2), expected_tensors(checkpoint.config)
                owned = parts(checkpoint.config, shapes, place)
                params = {name: torch.empty(owned[name].shape(shape)) for name, shape in shapes.items()}
                try:
                    checkpoint.load_into(params, place=place)
                except NOTICED as error:
                    assert "does not have the SHA-256" in str(error)
                    noticed.append(rank)
        assert noticed == [0 if where == 0 else 1]
        (tmp_path / "ours/model.safetensors").write_bytes(good)
