"""Any value anywhere in a description of quantized weights, or in the config.json of a folder of ours: read, or refused
by CheckpointError; lists where a name is expected and integers beyond 64 bits among them."""

import json
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from te_models.checkpoints import CheckpointError, from_plain_state_dict, open_checkpoint, quantize, reshard
from te_models.checkpoints.quantized.plain_state_dicts import plain_state_dict
from te_models.layers import Linear, quantized_model_init, recipe
from tests.checkpoints.hf_cases import HFFolder
from tests.checkpoints.hostile_cases import forget_digests, pack

VALUES = [[], {}, 2**64, 2**63, -1, 0, 1e308, None, True, "x", [[]], [2**64], [{}], {"a": []}, 10**30, "\0", 1.5]


def places(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield where in a JSON value another one may be."""
    yield at
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, part in inner:
        yield from places(part, (*at, key))


def replaced(value: Any, at: tuple[Any, ...], new: Any) -> Any:
    """Return a copy with another value at a place."""
    if not at:
        return new
    copy = json.loads(json.dumps(value))
    owner = copy
    for key in at[:-1]:
        owner = owner[key]
    owner[at[-1]] = new
    return copy


def of_first(values: dict[str, Any]) -> list[tuple[Any, ...]]:
    """Return the places outside of descriptions, and those in the first of them."""
    first = next(iter(values["tensors"]))
    return [at for at in places(values) if len(at) < 2 or at[0] != "tensors" or at[1] == first]


def check_folder(folder: Path, out: Path, step: int) -> None:
    file = folder / "model.safetensors"
    raw = file.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header, data = json.loads(raw[8 : 8 + length]), raw[8 + length :]
    described = json.loads(header["__metadata__"]["te_models"])
    for at in of_first(described)[::step]:
        for value in VALUES:
            header["__metadata__"]["te_models"] = json.dumps(replaced(described, at, value))
            file.write_bytes(pack(json.dumps(header).encode(), data))
            with suppress(CheckpointError):
                open_checkpoint(folder).close()
            with suppress(CheckpointError):
                reshard(folder, out, dry_run=True)


def check_config(folder: Path, step: int) -> None:
    config = json.loads((folder / "config.json").read_text())
    for at in list(places(config))[::step]:
        for value in VALUES:
            (folder / "config.json").write_text(json.dumps(replaced(config, at, value)))
            try:
                open_checkpoint(folder).close()
            except CheckpointError as error:
                assert "\n" not in str(error) and len(str(error)) <= 700


def check_state_dict(name: str) -> None:
    with quantized_model_init(recipe=recipe(name)):
        layer = Linear(64, 64, params_dtype=torch.bfloat16)
    tensors, metadata = plain_state_dict(layer.state_dict())
    described = json.loads(metadata["te_models"])
    for at in places(described):
        for value in VALUES:
            with suppress(CheckpointError):
                from_plain_state_dict(tensors, metadata | {"te_models": json.dumps(replaced(described, at, value))})


@pytest.fixture
def folder(hf_folder: HFFolder, tmp_path: Path) -> Path:
    quantize(hf_folder("llama"), tmp_path / "ours", "block")
    forget_digests(tmp_path / "ours")
    return tmp_path / "ours"


def test_descriptions_in_a_folder(folder: Path, tmp_path: Path) -> None:
    check_folder(folder, tmp_path / "out", 4)


def test_the_configuration_of_a_folder(folder: Path) -> None:
    check_config(folder, 12)


@pytest.mark.parametrize("field", ["hidden_size", "ffn_hidden_size"])
def test_sizes_that_no_tensor_has(folder: Path, field: str) -> None:
    config = json.loads((folder / "config.json").read_text())
    model = config["config"]
    part = model if field in model else model["mlp"]
    part[field] = 2**70
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="has more elements than a tensor can"):
        open_checkpoint(folder)


@pytest.mark.parametrize("name", ["block", "nvfp4"])
def test_descriptions_in_a_state_dict(name: str) -> None:
    check_state_dict(name)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["current", "block", "mxfp8", "nvfp4"])
def test_descriptions_thoroughly(llama: Path, tmp_path: Path, name: str) -> None:
    quantize(llama, tmp_path / "ours", name)
    forget_digests(tmp_path / "ours")
    check_folder(tmp_path / "ours", tmp_path / "out", 1)


@pytest.mark.slow
def test_the_configuration_of_a_folder_thoroughly(folder: Path) -> None:
    check_config(folder, 1)
