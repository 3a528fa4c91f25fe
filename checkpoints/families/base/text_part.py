"""Models that also see images, read as the text model within: gemma3, llama4 and mistral3 as they are published.

config.json holds the text model's in `text_config`, and its tensors' names have a prefix. The tensors of the other
parts are passthrough tensors: an import keeps them byte for byte, and an export to the same family writes them again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from te_models.config import ModelConfig

from ...io.errors import CheckpointError
from .family import Family, first_that_expresses
from .fields import Values, read_typed, shorten_value
from .names import Names
from .unused import Unused

TIED = "tie_word_embeddings"
TEXT = "language_model."
"""What the names of the text model begin with in files."""
OTHER_PARTS = ("vision_tower.*", "vision_model.*", "multi_modal_projector.*")


@dataclass(frozen=True)
class TextPart:
    """`text_config`, the configuration of a text model.

    Arguments:
        families: those that it may be of; the first is meant where it has no `model_type`.
        defaults: what transformers' class fills in where `text_config` leaves it out, as published files do.
        tied_outside: `tie_word_embeddings` beside `text_config` overrules the one within.
    """

    families: tuple[Family, ...]
    defaults: Mapping[str, Any] = field(default_factory=dict)
    tied_outside: bool = True

    @property
    def names(self) -> tuple[str, ...]:
        return ("text_config", TIED) if self.tied_outside else ("text_config",)

    def read(self, hf: Mapping[str, Any]) -> Values:
        text = hf.get("text_config")
        if not isinstance(text, dict):
            raise CheckpointError(f"config.json has text_config = {shorten_value(text)}, which is not an object")
        kind = text.get("model_type", self.families[0].model_type)
        family = next((family for family in self.families if family.model_type == kind), None)
        if family is None:
            known = ", ".join(family.model_type for family in self.families)
            raise CheckpointError(f"config.json has a text_config of {shorten_value(kind)}; supported: {known}")
        tied = read_typed(hf, TIED, bool, None) if self.tied_outside else None
        text = {**self.defaults, **text} | ({} if tied is None else {TIED: tied})
        return family.read_config(text).to_dict()

    def write(self, config: ModelConfig) -> Values:
        family = self.family_of(config)
        values: Values = {"text_config": family.write_config(config) | {"model_type": family.model_type}}
        return values | ({TIED: config.embedding.share_embeddings_and_output_weights} if self.tied_outside else {})

    def family_of(self, config: ModelConfig) -> Family:
        """Return the first of the families that can express the model, or raise CheckpointError with their reasons."""
        return first_that_expresses(self.families, config)

    def rewritten(self, original: Mapping[str, Any], config: ModelConfig) -> Values:
        """Return `write`, with the fields of the original `text_config` that mean nothing to the family kept."""
        values = self.write(config)
        text = original.get("text_config")
        if isinstance(text, dict):
            known = {name for family in self.families for name in family.known}
            values["text_config"] = {k: v for k, v in text.items() if k not in known} | values["text_config"]
        return values


def text_part(family: Family) -> TextPart | None:
    """Return where a family has its text model; None for a family that is one."""
    return next((entry for entry in family.fields if isinstance(entry, TextPart)), None)


def text_family(family: Family, config: ModelConfig) -> Family:
    """Return the family of the model without the parts that see images."""
    part = text_part(family)
    return family if part is None else part.family_of(config)


def with_images(model_type: str, architecture: str, part: TextPart, *, in_memory: bool = True) -> Family:
    """Return the family of models around a text model.

    in_memory: transformers holds the text model under other names than it writes.
    """
    text = part.families[0]
    forms = [_prefixed(names, TEXT) for names in (text.names, *text.other_names)]
    if in_memory:
        at = "model.language_model"
        moved = {"embedding": f"{at}.embed_tokens", "final_norm": f"{at}.norm", "layer": f"{at}.layers.{{i}}"}
        forms.append(replace(text.names, form="in-memory", **moved))
    return Family(
        model_type=model_type,
        architecture=architecture,
        fields=(part,),
        names=forms[0],
        other_names=tuple(forms[1:]),
        unused=Unused(text.unused.patterns, beside=(*OTHER_PARTS, *(f"model.{name}" for name in OTHER_PARTS))),
        keeps_dtype=text.keeps_dtype,
    )


def _prefixed(names: Names, prefix: str) -> Names:
    moved = ("embedding", "positions", "final_norm", "output", "layer")
    return replace(names, **{name: prefix + getattr(names, name) for name in moved})
