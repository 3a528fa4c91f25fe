"""What a first configuration is made for: the model, of which only its configuration is read, and the machine."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

import torch

from te_models.checkpoints import CheckpointError, open_checkpoint
from te_models.checkpoints.families import family_of
from te_models.checkpoints.folder.te_folder import CONFIG, MODEL_TYPE
from te_models.checkpoints.formats import declares_quantization, without_quantization
from te_models.checkpoints.io.hub import local_folder
from te_models.checkpoints.io.strict_json import read_object
from te_models.checkpoints.io.weight_files import plain_file

from ..config import ModelConfig
from ..training.build import resolve_device
from ..training.preflight import host_memory

_SHARE = {"cpu": 0.75, "cuda": 0.9}
"""Of a device's memory that a run may plan with: the rest is the system's, other programs' and torch's own."""


@dataclass(frozen=True)
class Base:
    """A model. name: of its folder. asked: what the user named. path: its folder here, None: it is on the hub.
    quantized: whether its weights are stored quantized."""

    name: str
    asked: str
    path: str | None
    config: ModelConfig
    quantized: bool

    @classmethod
    def read(cls, name: str) -> Base:
        """Read config.json of a folder or a hub id. Raises CheckpointError for a model that there is not, or not known
        to any family."""
        folder = local_folder(name, allow_patterns=[CONFIG, "hf_quant_config.json"])
        if not folder.is_dir():
            raise CheckpointError(f"{name} is not a folder, nor a hub id (ORGANISATION/NAME)")
        path = name if Path(name).exists() else None
        values = read_object(plain_file(folder, CONFIG), f"{folder}/{CONFIG}")
        if values.get("model_type") == MODEL_TYPE:
            with open_checkpoint(folder, verify=False) as opened:  # headers say which weights are stored quantized
                config, quantized = opened.config, bool(opened.formats)
        else:
            config = family_of(values.get("model_type")).read_config(without_quantization(values))
            quantized = declares_quantization(values, folder)
        short = Path(name.partition("@")[0]).resolve().name if path is None else folder.resolve().name
        return cls(short, name, path, config, quantized)


@dataclass(frozen=True)
class Machine:
    """What a run has here. memory: bytes that a plan may use; capability: of a GPU; compiles: whether torch.compile
    has what it needs."""

    device: str
    name: str
    memory: int
    capability: tuple[int, int] | None
    compiles: bool

    @classmethod
    def here(cls) -> Machine:
        """Return this machine: its first GPU, or else its processor."""
        device = resolve_device("auto")
        if device == "cuda":
            properties = torch.cuda.get_device_properties(0)
            total, name = properties.total_memory, properties.name
            capability, compiles = (properties.major, properties.minor), True
        else:
            total, name, capability = host_memory(swap=False), "CPU", None
            compiles = any(map(shutil.which, ("g++", "clang++", "c++")))
        return cls(device, name, int(_SHARE[device] * total), capability, compiles)

    def recipe(self) -> tuple[str, str]:
        """Return the recipe that this device runs fastest, and why."""
        if self.capability is None:
            return "none", "a CPU multiplies bf16 fastest; recipes are emulated exactly"
        major, minor = self.capability
        if major >= 10:
            return "mxfp8", f"compute capability {major}.{minor} multiplies MXFP8"
        if (major, minor) >= (8, 9):
            return "current", f"compute capability {major}.{minor} multiplies FP8 with a scale per tensor"
        return "none", f"compute capability {major}.{minor} has no FP8 GEMMs"
