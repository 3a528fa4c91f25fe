"""Any index, manifest, description of quantized weights, or damage to a file: read, or refused by CheckpointError.

Headers and configurations are fuzzed beside their other tests. The slow runs try 28,000 inputs here, 20,000 there."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from te_models.checkpoints import CheckpointError, check_manifest, import_hf, open_checkpoint, quantize
from te_models.checkpoints.io.manifest import read_manifest
from te_models.checkpoints.io.weight_files import INDEX, open_weights
from te_models.checkpoints.mapping.quantized_format import (
    METADATA_KEY,
    quantized_metadata,
    quantizer_from_metadata,
    read_metadata,
    write_metadata,
)
from te_models.layers import recipe
from tests.checkpoints.hf_cases import HFFolder
from tests.covering import examples

FIXTURES = [HealthCheck.function_scoped_fixture]  # the folders are only read, or restored from a copy

json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 2**65) | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)
FILES = ("model-1.safetensors", "model-2.safetensors")
file_names = st.sampled_from(
    [*FILES, "absent.safetensors", "../x", "/etc/passwd", ".", "", "a\0b", "\udc80", "config.json", "folder", "link"]
)
maps = st.dictionaries(
    st.sampled_from(["a", "b", "c", "d"]) | st.text(max_size=3), file_names | json_values, max_size=5
)
indexes = st.one_of(
    st.fixed_dictionaries({"metadata": json_values, "weight_map": maps}).map(json.dumps).map(str.encode),
    st.just({"weight_map": {"a": FILES[0], "b": FILES[0], "c": FILES[1]}}).map(json.dumps).map(str.encode),
    json_values.map(json.dumps).map(str.encode),
    st.binary(max_size=60),
)


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sharded")
    save_file({"a": torch.ones(2), "b": torch.ones(3)}, folder / FILES[0])
    save_file({"c": torch.ones(1)}, folder / FILES[1])
    (folder / "config.json").write_text("{}")
    (folder / "folder").mkdir()
    (folder / "link").symlink_to("/etc/passwd")
    return folder


def check_index(folder: Path, content: bytes) -> None:
    (folder / INDEX).write_bytes(content)
    try:
        store = open_weights(folder)
    except CheckpointError as error:
        assert "\n" not in str(error) and len(str(error)) < 1000
        return
    with store:
        assert json.loads(content)["weight_map"] == store.file_of, "what the index says is what the files hold"
        complete = {"a": FILES[0], "b": FILES[0], "c": FILES[1]}
        used = set(store.file_of.values())
        assert store.file_of == {name: file for name, file in complete.items() if file in used} != {}


@settings(max_examples=examples(500), deadline=None, suppress_health_check=FIXTURES)
@given(indexes)
def test_any_index(sharded: Path, content: bytes) -> None:
    check_index(sharded, content)


@pytest.mark.slow
@settings(max_examples=10_000, derandomize=False, deadline=None, suppress_health_check=FIXTURES)
@given(indexes)
def test_any_index_thoroughly(sharded: Path, content: bytes) -> None:
    check_index(sharded, content)


digests = st.sampled_from(["0" * 64, ""]) | json_values
entries = json_values | st.fixed_dictionaries(
    {"bytes": st.sampled_from([8, 0]) | json_values},
    optional={
        "sha256": digests,
        "digest": digests,
        "header": digests,
        "rows_per_part": st.just(64) | json_values,
        "tensors": st.dictionaries(st.sampled_from(["a", "b"]), digests, max_size=3) | json_values,
    },
)
manifests = st.one_of(
    st.fixed_dictionaries(
        {"files": st.dictionaries(file_names, entries, max_size=3) | json_values},
        optional={"format_version": st.sampled_from([1, 2, 3]) | json_values, "partial": json_values},
    ).map(json.dumps),
    json_values.map(json.dumps),
    st.text(max_size=40),
).map(lambda text: text.encode("utf-8", "surrogatepass"))


def check_any_manifest(folder: Path, content: bytes) -> None:
    (folder / "manifest.json").write_bytes(content)
    try:
        records = read_manifest(folder)
        assert json.loads(content)["files"].keys() == records.keys() and records
        check_manifest(folder)
    except CheckpointError as error:
        assert "\n" not in str(error) and len(str(error)) <= 700
    else:
        raise AssertionError("no digest here is that of a file")


@settings(max_examples=examples(300), deadline=None, suppress_health_check=FIXTURES)
@given(manifests)
def test_any_manifest(sharded: Path, content: bytes) -> None:
    check_any_manifest(sharded, content)


@pytest.mark.slow
@settings(max_examples=6_000, derandomize=False, deadline=None, suppress_health_check=FIXTURES)
@given(manifests)
def test_any_manifest_thoroughly(sharded: Path, content: bytes) -> None:
    check_any_manifest(sharded, content)


@pytest.fixture(scope="module")
def described(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    quantizers = {name: recipe(name).weight_quantizer() for name in ("current", "block", "mxfp8", "nvfp4")}
    return {name: dict(quantized_metadata(quantizer, torch.bfloat16)) for name, quantizer in quantizers.items()}


places = st.lists(st.sampled_from([0, 1, 2, 3, 4]), min_size=1, max_size=3)


def check_description(described: dict[str, Any], name: str, path: list[int], value: Any) -> None:
    changed = json.loads(json.dumps(described))
    place = changed[name]
    for number in path[:-1]:
        below = list(place.values())[number % len(place)] if place else None
        place = below if isinstance(below, dict) and below else place
    place[list(place)[path[-1] % len(place)]] = value
    text = json.dumps({"version": 1, "tensors": changed})
    try:
        for entry, meta in read_metadata({METADATA_KEY: text}, "x.safetensors").items():
            quantizer, dtype = quantizer_from_metadata(entry, meta)
            assert write_metadata({entry: meta}) and dtype.is_floating_point and quantizer.field_names()
    except CheckpointError as error:
        assert "\n" not in str(error) and len(str(error)) < 1000


@settings(max_examples=examples(300), deadline=None)
@given(st.sampled_from(["current", "block", "mxfp8", "nvfp4"]), places, json_values)
def test_any_description(described: dict[str, Any], name: str, path: list[int], value: Any) -> None:
    check_description(described, name, path, value)


@pytest.mark.slow
@settings(max_examples=6_000, derandomize=False, deadline=None)
@given(st.sampled_from(["current", "block", "mxfp8", "nvfp4"]), places, json_values)
def test_any_description_thoroughly(described: dict[str, Any], name: str, path: list[int], value: Any) -> None:
    check_description(described, name, path, value)


@pytest.fixture
def folders(hf_folder: HFFolder, tmp_path: Path) -> dict[str, Path]:
    """A folder of Hugging Face's, one of ours, and one with quantized weights."""
    hf = hf_folder("llama")
    import_hf(hf, tmp_path / "ours")
    quantize(hf, tmp_path / "quantized", "block")
    return {"hf": hf, "ours": tmp_path / "ours", "quantized": tmp_path / "quantized"}


def damage(folders: dict[str, Path], count: int) -> None:
    """Change a few bytes of a header or a configuration, wherever that is: both kinds of folder survive or refuse."""

    @settings(max_examples=count, derandomize=count < 1000, deadline=None, suppress_health_check=FIXTURES)
    @given(
        st.sampled_from(sorted(folders)),
        st.sampled_from(["model.safetensors", "config.json"]),
        st.lists(st.tuples(st.integers(0, 6000), st.integers(0, 255), st.integers(0, 2)), min_size=1, max_size=3),
    )
    def run(kind: str, name: str, edits: list[tuple[int, int, int]]) -> None:
        file = folders[kind] / name
        good = file.with_suffix(".good")
        if not good.exists():
            shutil.copy(file, good)
        raw = bytearray(good.read_bytes())
        for place, value, how in edits:
            place %= min(len(raw), 6000)
            raw[place : place + (how > 0)] = bytes([value]) * (how < 2)  # insert, replace, delete
        file.write_bytes(raw)
        try:
            open_checkpoint(folders[kind]).close()
        except CheckpointError as error:
            assert "\n" not in str(error)
        finally:
            shutil.copy(good, file)

    run()


def test_any_damage(folders: dict[str, Path]) -> None:
    damage(folders, 200)


@pytest.mark.slow
def test_any_damage_thoroughly(folders: dict[str, Path]) -> None:
    damage(folders, 6_000)
