"""Hugging Face folders made by transformers itself: tiny random models of every family, with the flags that matter."""

import json
import shutil
import warnings
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoints.hf_cases import CASES, SMALL, HFFolder, randomise, transformers


@pytest.fixture(scope="session")
def _hf_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Path]]:
    cache: dict[str, Path] = {"root": tmp_path_factory.mktemp("hf")}
    yield cache


@pytest.fixture
def hf_folder(_hf_cache: dict[str, Path], tmp_path: Path) -> HFFolder:
    """Return a function (case name) -> a fresh folder that transformers saved; max_shard_size shards it."""

    def make(case: str = "llama", dtype: torch.dtype = torch.bfloat16, max_shard_size: str | None = None) -> Path:
        key = f"{case}-{dtype}-{max_shard_size}"
        if key not in _hf_cache:
            config_class, options = CASES[case]
            config = getattr(transformers, config_class)(**(SMALL | options))
            torch.manual_seed(zlib.crc32(case.encode()))
            with warnings.catch_warnings(action="ignore"):
                model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
                randomise(model)
                folder = _hf_cache["root"] / key
                model.save_pretrained(folder, **({"max_shard_size": max_shard_size} if max_shard_size else {}))
            (folder / "tokenizer.json").write_text('{"version": "1.0"}')
            _hf_cache[key] = folder
        target = tmp_path / f"hf-{case}"
        shutil.copytree(_hf_cache[key], target)
        return target

    return make


@pytest.fixture
def llama(hf_folder: HFFolder) -> Path:
    """The folder of a tiny Llama, for tests of what any folder goes through."""
    return hf_folder("llama")


@pytest.fixture
def edit_json() -> Callable[..., None]:
    """Return a function that changes fields of a JSON file; None-valued keyword `drop` names fields to remove."""

    def edit(path: Path, drop: tuple[str, ...] = (), **changes: Any) -> None:
        values = json.loads(path.read_text())
        values |= changes
        for name in drop:
            values.pop(name)
        path.write_text(json.dumps(values))

    return edit
