"""LoRA in a run: adapters over the layers of a model (`te_models.hf.lora`), trained alone, saved and merged.

A checkpoint holds the base model as an ordinary folder, with the names that it has without adapters, and the adapters
as `lora.NAME` beside the optimizer's state. At its end a run writes `adapter/`, a folder of peft, and `final/`, the
model with the adapters merged.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from ..config import ConfigError
from ..extras import require
from ..model import GPTModel
from .checkpoints.checks import check_same_layout
from .config import TrainConfig
from .seeding import derive_seed

ADAPTER = "adapter"
"""Where in a run's folder the adapter is."""
_BASE = ".base_layer."


class Adapters:
    """The adapters of a model, which has them from here on: its base weights are not trained.

    Raises ConfigError for targets that mean no layer, and for layers that cannot be adapted.
    """

    def __init__(self, config: TrainConfig, model: GPTModel) -> None:
        peft: Any = require("peft", "peft", feature="LoRA (lora.rank)")
        from ..hf import TEModelForCausalLM
        from ..hf.config import TEConfig

        wrapper = TEModelForCausalLM(
            TEConfig(config=model.config.to_dict(), expert_layout=model.expert_layout), gpt=model
        )
        wrapper.name_or_path = config.model.path or ""
        lora = config.lora
        targets: Any = lora.targets[0] if lora.targets == ("all-linear",) else list(lora.targets)
        options = {"r": lora.rank, "lora_alpha": lora.alpha, "lora_dropout": lora.dropout, "target_modules": targets}
        torch.manual_seed(derive_seed(config.seed, "adapters"))
        try:
            self._adapted = peft.get_peft_model(wrapper, peft.LoraConfig(**options, task_type="CAUSAL_LM"))
        except ValueError as error:
            raise ConfigError(f"lora.targets is {list(lora.targets)!r}: {' '.join(str(error).split())}") from None
        self._model = model

    def state_tensors(self) -> dict[str, torch.Tensor]:
        """Return the factors by name, ready for a checkpoint."""
        return {f"lora.{name}": p.detach() for name, p in self._model.named_parameters() if ".lora_" in name}

    @torch.no_grad()
    def load_state_tensors(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Undo `state_tensors`. Raises TrainingCheckpointError for the factors of other adapters."""
        own = self.state_tensors()
        found = {name: value for name, value in tensors.items() if name.startswith("lora.")}
        check_same_layout(found, {name: (tuple(t.shape), t.dtype) for name, t in own.items()}, "lora")
        for name, value in own.items():
            value.copy_(found[name])

    def base_tensors(self) -> dict[str, torch.Tensor]:
        """Return what a folder of the base model holds."""
        stored = dict(self._model.stored_tensors())
        return {name.replace(_BASE, "."): t for name, t in stored.items() if ".lora_" not in name}

    def save(self, folder: Path) -> None:
        """Write the adapter as peft reads it."""
        self._adapted.save_pretrained(folder)

    def merge(self) -> None:
        """Add the adapters to the base weights, in float32 with one rounding, and remove them from the model. Weights
        that are stored quantized become their values."""
        self._adapted.merge_and_unload()
