"""config.json of our folders as transformers sees it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from te_models.checkpoints import Checkpoint
from te_models.checkpoints.families import family_of
from te_models.checkpoints.folder.provenance import provenance_source
from te_models.checkpoints.folder.te_folder import MODEL_TYPE, HFSource, TEFolder
from te_models.checkpoints.formats import without_quantization

from ..config import ModelConfig
from ..extras import require

if TYPE_CHECKING:
    import transformers
else:
    transformers = require("transformers", "hf", feature="te_models.hf")


ARCHITECTURE = "TEModelForCausalLM"
"""The class that `transformers serve` makes of a folder of ours, whose config.json does not name it."""


class TEConfig(transformers.PreTrainedConfig):
    """The fields of `TEFolder`, and the names under which transformers looks for sizes.

    config: a `ModelConfig` as a dictionary. source: the Hugging Face checkpoint that the model comes from; the special
    tokens are taken from there where they are not given. use_cache: whether a call of the model that says nothing about
    it returns a cache, as transformers' own models do.

    Example:
        TEConfig(config=ModelConfig(...).to_dict())
    """

    model_type: ClassVar[str] = MODEL_TYPE
    keys_to_ignore_at_inference: ClassVar[list[str]] = ["cache", "past_key_values", "aux_loss"]

    format_version: int = 1
    expert_layout: str = "grouped"
    config: dict[str, Any] | None = None
    source: dict[str, Any] | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    pad_token_id: int | None = None
    use_cache: bool = True

    def __post_init__(self, **kwargs: Any) -> None:
        origin = (self.source or {}).get("config") or {}
        within = origin.get("text_config")
        origin = {**within, **origin} if isinstance(within, dict) else origin
        for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
            if getattr(self, name) is None:
                setattr(self, name, origin.get(name))
        super().__post_init__(**kwargs)
        if self.architectures is None:
            self.architectures = [ARCHITECTURE]

    @classmethod
    def get_config_dict(
        cls, pretrained_model_name_or_path: Any, **kwargs: Any
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """As in transformers; of a folder of a Hugging Face family, the fields of the same model here. Raises
        CheckpointError for a family that is not supported."""
        values, options = super().get_config_dict(pretrained_model_name_or_path, **kwargs)
        if values.get("model_type") in (None, MODEL_TYPE):
            return values, options
        family = family_of(values["model_type"])
        passed_on = {name: values.pop(name) for name in ("_commit_hash",) if name in values}
        passed_on |= {name: values[name] for name in ("dtype", "torch_dtype") if name in values}
        model = family.read_config(without_quantization(values))
        return TEFolder("grouped", model, HFSource(family.model_type, values, None)).to_dict() | passed_on, options

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> TEConfig:
        """Return the configuration of an open folder, ours or Hugging Face's."""
        folder = TEFolder(checkpoint.layout or "grouped", checkpoint.config, provenance_source(checkpoint))
        return cls(**folder.to_dict())

    @property
    def model_config(self) -> ModelConfig:
        """The model. Raises CheckpointError if the fields do not describe one."""
        return TEFolder.from_dict(vars(self)).config

    @property
    def vocab_size(self) -> int:
        """Rows of the embedding."""
        return self._model["vocab_size"]

    @property
    def hidden_size(self) -> int:
        """Channels of the residual stream."""
        return self._model["hidden_size"]

    @property
    def num_hidden_layers(self) -> int:
        """Layers, each with keys and values in the cache."""
        return self._model["num_layers"]

    @property
    def num_attention_heads(self) -> int:
        """Query heads."""
        return self._model["attention"]["num_attention_heads"]

    @property
    def max_position_embeddings(self) -> int:
        """Positions for which the model was made."""
        return self._model["max_position_embeddings"]

    @property
    def logit_scale(self) -> float:
        """What logits are multiplied by, before the cap; for those who apply the output layer themselves."""
        return self._model["embedding"]["logits_multiplier"]

    @property
    def final_logit_softcapping(self) -> float | None:
        """The cap of logits, softcap * tanh(logits / softcap); None: no cap."""
        return self._model["embedding"]["logits_softcap"]

    @property
    def _model(self) -> dict[str, Any]:
        if self.config is None:
            raise AttributeError("this TEConfig describes no model: its config is None")
        return self.config
