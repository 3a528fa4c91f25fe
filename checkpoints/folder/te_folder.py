"""config.json of our own folders: the model, the expert layout, and where the weights came from.

    {"model_type": "te_models", "format_version": 1, "expert_layout": "grouped",
     "config": {... ModelConfig ...},
     "source": {"family": "llama", "config": {... the Hugging Face config.json, verbatim ...}, "dtype": "BF16",
                "form": "published"}}

`source` is what lets an export restore every Hugging Face field, also those that mean nothing to us; it is null for a
model that was never a Hugging Face one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from te_models.config import ConfigError, ModelConfig

from ..formats.details import check_details
from ..io.dtypes import FLOATS
from ..io.errors import CheckpointError, shown_untrusted
from ..io.strict_json import dump_object, parse_object
from ..mapping.param_shapes import ExpertLayout, check_counts, check_layout

CONFIG = "config.json"
MODEL_TYPE = "te_models"


@dataclass(frozen=True)
class HFSource:
    """The Hugging Face checkpoint that a model comes from: family name, its config.json, the dtype of its files, and
    which of the family's forms they have (None: the published one).

    tied_copies: the tensors of the files that only repeat the embedding; an export writes them again.
    quantization: of weights that are stored as its files quantized them, what config.json does not say; see
    `formats.details`. bias_dtype: the dtype of its files' biases that choose experts; None: float32, as models have
    them.
    """

    family: str | None
    config: Mapping[str, Any]
    dtype: str | None
    form: str | None = None
    quantization: Mapping[str, Any] | None = None
    tied_copies: tuple[str, ...] = ()
    bias_dtype: str | None = None


@dataclass(frozen=True)
class TEFolder:
    """The content of config.json."""

    layout: ExpertLayout
    config: ModelConfig
    source: HFSource | None = None

    def to_bytes(self) -> bytes:
        """Return the file's content; raise CheckpointError for one that could not be read again."""
        data = dump_object(self.to_dict() | {"model_type": MODEL_TYPE})
        self.from_dict(parse_object(data, f"the {CONFIG} that would be written"))
        return data

    def to_dict(self) -> dict[str, Any]:
        """Return the fields of the file, model_type aside, as JSON values."""
        source: dict[str, Any] | None = None
        if self.source is not None:
            source = {name: getattr(self.source, name) for name in ("family", "dtype", "form")}
            source["config"] = dict(self.source.config)
            if self.source.quantization is not None:
                source["quantization"] = dict(self.source.quantization)
            if self.source.tied_copies:
                source["tied_copies"] = list(self.source.tied_copies)
            if self.source.bias_dtype is not None:
                source["bias_dtype"] = self.source.bias_dtype
        return {
            "format_version": 1,
            "expert_layout": self.layout,
            "config": self.config.to_dict(),
            "source": source,
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> TEFolder:
        """Read the parsed file."""
        if values.get("format_version") != 1:
            version = values.get("format_version")
            raise CheckpointError(
                f"{CONFIG} has format_version {shown_untrusted(version)}; this release reads version 1"
            )
        layout = check_layout(values.get("expert_layout", "missing"))
        config = values.get("config")
        if not isinstance(config, dict):
            raise CheckpointError(f"{CONFIG} has no 'config' object")
        moe = config.get("moe")
        check_counts(config.get("num_layers"), moe.get("num_moe_experts") if isinstance(moe, dict) else None)
        try:
            model = ModelConfig.from_dict(config)
        except (ConfigError, OverflowError) as error:  # an integer beyond the range of float
            raise CheckpointError(f"{CONFIG} does not describe a valid model: {error}") from None
        return cls(layout, model, _read_source(values.get("source")))


def _read_source(values: Any) -> HFSource | None:
    if values is None:
        return None
    if not isinstance(values, dict) or not isinstance(values.get("config"), dict):
        raise CheckpointError(f"{CONFIG} has a 'source' that is neither null nor an object with a 'config'")
    family, dtype, form, bias = (values.get(name) for name in ("family", "dtype", "form", "bias_dtype"))
    if not all(value is None or isinstance(value, str) for value in (family, dtype, form)):
        raise CheckpointError(f"{CONFIG} has a 'source' whose family, dtype or form is not a string")
    if bias is not None and bias not in FLOATS:
        raise CheckpointError(f"{CONFIG} has bias_dtype {shown_untrusted(bias)}; allowed: {', '.join(sorted(FLOATS))}")
    quantization = values.get("quantization")
    quantization = None if quantization is None else check_details(quantization)
    copies = values.get("tied_copies", [])
    if not isinstance(copies, list) or not all(isinstance(name, str) for name in copies):
        raise CheckpointError(f"{CONFIG} has a 'source' whose tied_copies are not a list of names")
    return HFSource(family, values["config"], dtype, form, quantization, tuple(copies), bias)
