"""What conversions of the first 42 families write: the same bytes as when this file was made, in every case.

A folder holds config.json and tensors; `converted_bytes.json` has a digest of each. The Hugging Face folders are made
without transformers, from the options of the cases and from values that follow from the tensors' names."""

import hashlib
import json
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from te_models.checkpoints import FAMILIES, import_hf
from tests.checkpoints.family_cases import CASES, GPT2_SIZES, SIZES
from tests.checkpoints.hf_cases import CASES as FIRST
from tests.checkpoints.hf_cases import SMALL, stored, transformers

DIGESTS: dict[str, dict[str, str]] = json.loads(Path(__file__).with_name("converted_bytes.json").read_text())
"""Case -> digests of the configuration and, where a folder is converted, of its tensors."""


def values_of(case: str) -> dict[str, Any]:
    """Return what config.json says in a case."""
    if case in CASES:
        family, options = CASES[case]
        return {"model_type": family, **(GPT2_SIZES if family == "gpt2" else SIZES), **options}
    config_class, options = FIRST[case]
    return {"model_type": getattr(transformers, config_class).model_type, **SMALL, **options}


def numbers(name: str, shape: tuple[int, ...]) -> torch.Tensor:
    """Return values that tell tensors, and places in them, apart."""
    count = torch.Size(shape).numel()
    return ((torch.arange(count) * 7919 + zlib.crc32(name.encode())) % 10007).float().div(5000).sub(1).view(shape)


def folder_of(values: dict[str, Any], folder: Path) -> Path:
    """Write a Hugging Face folder."""
    family = FAMILIES[values["model_type"]]
    names = family.namespace(family.read_config(values)).stored
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(values))
    save_file({n: numbers(n, s.shape) for n, s in names.items()}, folder / "model.safetensors", {"format": "pt"})
    return folder


def digest(*parts: bytes) -> str:
    """Return what tells such bytes from others."""
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:32]


def config_digest(case: str) -> str:
    """Return the digest of the model configuration's JSON."""
    values = values_of(case)
    return digest(FAMILIES[values["model_type"]].read_config(values).to_json().encode())


def folder_digest(folder: Path) -> str:
    """Return the digest of a folder's configuration and tensors, with names, dtypes and shapes."""
    parts = [(folder / "config.json").read_bytes()]
    for name, t in sorted(stored(folder).items()):
        parts += [f"{name} {t.dtype} {tuple(t.shape)}".encode(), t.flatten().view(torch.uint8).numpy().tobytes()]
    return digest(*parts)


def test_configurations_have_the_same_json() -> None:
    found = {case: config_digest(case) for case in DIGESTS}
    assert found == {case: digests["config"] for case, digests in DIGESTS.items()}


@pytest.mark.sentinels("llama", "gemma2", "deepseek_v3", "gpt_oss", "gpt2", "gpt_neox", "llama4", "hy_v3")
@pytest.mark.parametrize("case", [case for case, digests in DIGESTS.items() if "grouped" in digests])
def test_converted_folders_have_the_same_bytes(tmp_path: Path, case: str) -> None:
    source = folder_of(values_of(case), tmp_path / "hf")
    for layout in ("grouped", "per-gemm"):
        import_hf(source, tmp_path / layout, layout=layout)
        assert folder_digest(tmp_path / layout) == DIGESTS[case][layout], layout
