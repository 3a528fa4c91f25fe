"""Models that also see images, read as the text model within: gemma3, llama4 and mistral3 as they are published.

config.json holds the text model's in `text_config`, and its tensors' names have a prefix. The tensors of the other
parts are passthrough tensors: an import keeps them byte for byte, and an export to the same family writes them again.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from te_models.config import ModelConfig

from ...io.errors import CheckpointError
from .family import Family, first_that_expresses
from .fields import HFConfig, Values, read_typed, shorten_value
from .names import Names
from .unused import Unused

TIED = "tie_word_embeddings"
TEXT = "language_model."
"""What the names of the text model begin with in files."""
OTHER_PARTS = ("vision_tower.*", "vision_model.*", "multi_modal_projector.*", "mm_projector.*", "visual.*")
MROPE = ("mrope_section", "mrope_interleaved")
"""Rope parameters that say which channels rotate by which of three positions: in a text all three are the same."""


@dataclass(frozen=True)
class TextPart:
    """`text_config`, the configuration of a text model.

    Arguments:
        families: those that it may be of; the first is meant where it has no `model_type`.
        defaults: what transformers' class fills in where `text_config` leaves it out, as published files do.
        tied_outside: `tie_word_embeddings` beside `text_config` overrules the one within.
        tied_either: it ties as soon as one of the two says so.
        kind: the `model_type` within, where transformers has one for the text part alone; it means the first family.
        flat: where a file has no `text_config`, the fields of the text model stand beside the fields of the whole.
    """

    families: tuple[Family, ...]
    defaults: Mapping[str, Any] = field(default_factory=dict)
    tied_outside: bool = True
    tied_either: bool = False
    kind: str | None = None
    flat: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        within = self.known if self.flat else ()
        return ("text_config", *within, *((TIED,) if self.tied_outside else ()))

    @property
    def known(self) -> tuple[str, ...]:
        """The fields that the text families understand."""
        return tuple(name for family in self.families for name in sorted(family.known))

    def _is_flat(self, hf: HFConfig) -> bool:
        return self.flat and hf.get("text_config") is None

    def read(self, hf: HFConfig) -> Values:
        text = {k: v for k, v in hf.items() if k != "model_type"} if self._is_flat(hf) else hf.get("text_config")
        if not isinstance(text, dict):
            raise CheckpointError(f"config.json has text_config = {shorten_value(text)}, which is not an object")
        kind = text.get("model_type", self.families[0].model_type)
        kind = self.families[0].model_type if kind == self.kind else kind
        family = next((family for family in self.families if family.model_type == kind), None)
        if family is None:
            known = ", ".join(family.model_type for family in self.families)
            raise CheckpointError(f"config.json has a text_config of {shorten_value(kind)}; supported: {known}")
        tied = read_typed(hf, TIED, bool, None) if self.tied_outside else None
        if self.tied_either and not tied:
            tied = read_typed(text, TIED, bool, None)
        text = {**self.defaults, **one_position(text)} | ({} if tied is None else {TIED: tied})
        return family.read_config(text).to_dict()

    def write(self, config: ModelConfig) -> Values:
        family = self.family_of(config)
        kind = self.kind if self.kind and family is self.families[0] else family.model_type
        values: Values = {"text_config": family.write_config(config) | {"model_type": kind}}
        return values | ({TIED: config.embedding.share_embeddings_and_output_weights} if self.tied_outside else {})

    def family_of(self, config: ModelConfig) -> Family:
        """Return the first of the families that can express the model, or raise CheckpointError with their reasons."""
        return first_that_expresses(self.families, config)

    def rewritten(self, original: Mapping[str, Any], config: ModelConfig) -> Values:
        """Return `write`, with the fields of the original `text_config` that mean nothing to the family kept."""
        values = self.write(config)
        flat = self._is_flat(original)
        text = original if flat else original.get("text_config")
        if not isinstance(text, dict):
            return values
        for name in ("rope_scaling", "rope_parameters"):
            if isinstance(text.get(name), dict) and "rope_parameters" in values["text_config"]:
                sections = {k: v for k, v in text[name].items() if k in MROPE}
                values["text_config"]["rope_parameters"] |= sections
        if flat:
            return values.pop("text_config") | values
        values["text_config"] = {k: v for k, v in text.items() if k not in self.known} | values["text_config"]
        return values


def text_part(family: Family) -> TextPart | None:
    """Return where a family has its text model; None for a family that is one."""
    return next((entry for entry in family.fields if isinstance(entry, TextPart)), None)


def text_family(family: Family, config: ModelConfig) -> Family:
    """Return the family of the model without the parts that see images."""
    part = text_part(family)
    return family if part is None else part.family_of(config)


def with_images(
    model_type: str, architecture: str, part: TextPart, *, in_memory: bool = True, prefix: str | None = TEXT
) -> Family:
    """Return the family of models around a text model.

    in_memory: transformers holds the text model under other names than it writes.
    prefix: what the names of the text model begin with in files; None: files have the names of `in_memory`.
    """
    text = part.families[0]
    at = "model.language_model"
    moved = {"embedding": f"{at}.embed_tokens", "final_norm": f"{at}.norm", "layer": f"{at}.layers.{{i}}"}
    if prefix is None:
        forms = [replace(names, **moved) for names in (text.names, *text.other_names)]
    else:
        forms = [_prefixed(names, prefix) for names in (text.names, *text.other_names)]
    if in_memory and prefix is not None:
        forms.append(replace((text.names, *text.other_names)[-1], form="in-memory", **moved))
    return Family(
        model_type=model_type,
        architecture=architecture,
        fields=(part,),
        names=forms[0],
        other_names=tuple(forms[1:]),
        unused=Unused(text.unused.patterns, beside=(*OTHER_PARTS, *(f"model.{name}" for name in OTHER_PARTS))),
        keeps_dtype=text.keeps_dtype,
    )


def one_position(text: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the fields of a text model without what tells three positions of a token apart."""
    found = dict(text)
    for name in ("rope_parameters", "rope_scaling"):
        values = found.get(name)
        if isinstance(values, dict) and any(key in values for key in MROPE):
            values = {k: v for k, v in values.items() if k not in MROPE}
            found[name] = {
                k: "default" if v == "mrope" and k in ("type", "rope_type") else v for k, v in values.items()
            }
    return found


def _prefixed(names: Names, prefix: str) -> Names:
    moved = ("embedding", "positions", "final_norm", "output", "layer")
    return replace(names, **{name: prefix + getattr(names, name) for name in moved})
