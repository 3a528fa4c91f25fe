"""LoRA in a run: adapters over the layers of a model (`te_models.lora`), trained alone, saved and merged.

A checkpoint holds the base model as an ordinary folder, with the names that it has without adapters, and the adapters
as `lora.NAME` beside the optimizer's state. At its end a run writes `adapter/`, with the names of our layers,
`adapter-hf/`, with the names of transformers' model of the family, and `final/`, the model with the adapters merged.
"""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from te_models.checkpoints import CheckpointError

from ..config import ConfigError
from ..lora import add_lora, export_adapter, lora_state_dict, merge_lora, save_adapter
from ..lora.adapter import adapters_of
from ..lora.model import base_state_dict, merged_weights
from ..model import GPTModel
from ..parallel.parts import ModelParts
from .checkpoints.checks import TrainingCheckpointError, check_same_layout
from .config import TrainConfig
from .seeding import derive_seed

ADAPTER, ADAPTER_HF = "adapter", "adapter-hf"
"""Where in a run's folder the adapters are."""
ADAPTERS = "lora."
"""How the names of the adapters' tensors begin in a checkpoint."""


class Adapters:
    """The adapters of a model. It has them from here on, and its base weights are not trained. Where ranks share the
    model, this rank's part of them.

    Raises ConfigError for targets that mean no layer, and for layers that cannot be adapted.
    """

    def __init__(self, config: TrainConfig, model: GPTModel) -> None:
        lora = config.lora
        torch.manual_seed(derive_seed(config.seed, "adapters"))
        options = {"alpha": lora.alpha, "dropout": lora.dropout, "use_dora": lora.use_dora}
        try:
            add_lora(model, lora.rank, targets=lora.targets, **options)
        except ValueError as error:
            raise ConfigError(f"lora.targets is {list(lora.targets)!r}: {error}") from None
        if not lora_state_dict(model):
            allowed = "targets that leave something to train, in every pipeline stage"
            raise ConfigError(f"lora.targets is {list(lora.targets)!r}; allowed: {allowed}")
        self._model, self._config = model, config

    def state_tensors(self) -> dict[str, torch.Tensor]:
        """Return what is trained by name, ready for a checkpoint."""
        return {f"{ADAPTERS}{name}": t for name, t in lora_state_dict(self._model).items()}

    @torch.no_grad()
    def load_state_tensors(self, tensors: Mapping[str, torch.Tensor], own: ModelParts) -> None:
        """Take this rank's part of the adapters of a whole model, by the names of `state_tensors`. Raises
        TrainingCheckpointError for the tensors of other adapters."""
        parts, others = own.adapters(), {f"{ADAPTERS}{name}" for name in own.elsewhere()}
        found = {n: value for n, value in tensors.items() if n.startswith(ADAPTERS) and n not in others}
        check_same_layout(found, {f"{ADAPTERS}{n}": (p.shape, p.tensor.dtype) for n, p in parts.items()}, "lora")
        for name, part in parts.items():
            part.tensor.copy_(part.of_whole(found[f"{ADAPTERS}{name}"]))
        for layer, adapter in adapters_of(self._model):
            b = adapter.get_parameter("lora_B.weight")
            others = None if adapter.rows is None else b.masked_fill(adapter.rows, 0)
            if others is not None and bool(others.any()):  # of a release that adapted all rows
                raise TrainingCheckpointError(
                    f"the checkpoint has an adapter of all rows of {layer}, of which lora.targets = "
                    f"{list(self._config.lora.targets)!r} means a part; allowed: targets of the whole layer, such as "
                    f"{layer.rpartition('.')[2]!r}"
                )

    def of_whole_model(self, tensors: Mapping[str, torch.Tensor]) -> Adapters:
        """Return the same adapters, whole, over the whole model without the data of its weights. tensors: by the names
        of `state_tensors`."""
        model = self._model
        whole = GPTModel(model.config, device="meta", expert_layout=model.expert_layout)
        whole.origin, whole.pretrained_folder = model.origin, model.pretrained_folder
        found = Adapters(self._config, whole)
        for name in list(lora_state_dict(whole)):
            module, _, last = name.rpartition(".")
            values = tensors[f"{ADAPTERS}{name}"]
            setattr(whole.get_submodule(module), last, torch.nn.Parameter(values, requires_grad=False))
        return found

    def base_tensors(self) -> dict[str, torch.Tensor]:
        """Return what a folder of the base model holds."""
        return base_state_dict(self._model)

    def save(self, output_dir: Path) -> str | None:
        """Write the adapters in the run's folder. Returns, if no adapter for transformers' model was written, why: a
        model of no family, adapters that peft has no form for, or no transformers."""
        save_adapter(self._model, output_dir / ADAPTER, base_model=self._config.model.path or "")
        shutil.rmtree(output_dir / ADAPTER_HF, ignore_errors=True)
        if importlib.util.find_spec("transformers") is None:
            return "transformers is not installed"
        try:
            export_adapter(self._model, output_dir / ADAPTER_HF, base_model=self._config.model.path or "")
        except (CheckpointError, ValueError) as error:
            return str(error)
        return None

    def merged_weights(self) -> dict[str, Callable[[torch.Tensor], torch.Tensor]]:
        """Return what merges the adapter of each weight, by the weight's name; see `lora.model.merged_weights`."""
        return merged_weights(self._model)

    def merge(self) -> None:
        """Add the adapters to the base weights and remove them from the model; see `merge_lora`."""
        merge_lora(self._model)
