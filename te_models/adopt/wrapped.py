"""Models around a text model: the text part is found as any other decoder is, from the fields of `text_config`."""

import itertools
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from te_models.checkpoints import FAMILIES
from te_models.checkpoints.families.base.family import Family
from te_models.checkpoints.families.base.fields import REQUIRED, Field
from te_models.checkpoints.families.base.text_part import TIED, TextPart, one_position
from te_models.checkpoints.families.base.unused import Unused

from ..extras import require
from .fields import SAME, WRONG, outcome
from .naming import solve
from .pool import Pool
from .probe import Built, KnownType, Values, decoder_type, quiet, small_size

_OF_IMAGES = ("vision", "visual", "image", "audio", "video", "projector", "merger", "multi_modal", "connector")


@dataclass(frozen=True)
class WrappedType(KnownType):
    """A model type whose configuration holds that of a text model in `text_config`. Its fields are those of the text
    model, and its tensors those that the text model has."""

    outer_class: Any = None
    outer: Mapping[str, Any] = field(default_factory=dict)
    """The fields beside `text_config` of a small model."""

    def config(self, arguments: Mapping[str, Any]) -> Any:
        tied = {TIED: arguments.get(TIED, self.defaults[TIED])} if TIED in self.defaults else {}
        text = {"model_type": self.text_type, **tied, **arguments}
        with quiet():
            return self.outer_class(**{**tied, **self.outer, "text_config": text})

    @property
    def text_type(self) -> str:
        """The model type of the text model."""
        return str(self.config_class.model_type)

    def values_of(self, config: Any) -> Values:
        found: Values = json.loads(config.to_json_string(use_diff=False))
        text = dict(one_position(found["text_config"]))  # as the text model's family gets it
        text.pop("_attn_implementation", None)
        return text

    def of_other_parts(self, model: Any, names: Mapping[str, torch.Tensor]) -> set[str]:
        """Return which of these tensors are of the parts that see images: theirs by value, or by name."""
        text = model.get_decoder()
        its = {id(p) for p in (*text.parameters(), *text.buffers())}
        output = model.get_output_embeddings()
        its |= {id(p) for p in (() if output is None else output.parameters())}
        others = [t for t in (*model.parameters(), *model.buffers()) if id(t) not in its]
        by_shape: dict[Any, list[torch.Tensor]] = {}
        for tensor in others:
            by_shape.setdefault(tuple(tensor.shape), []).append(tensor)
        return {
            name
            for name, tensor in names.items()
            if any(torch.equal(tensor, other) for other in by_shape.get(tuple(tensor.shape), ()))
            or any(re.search(word, name) for word in _OF_IMAGES)
        }


def wrapped_type(model_type: str) -> WrappedType | None:
    """Return what transformers has of a model type around a text model; None where it is no such type."""
    transformers = require("transformers", "hf", feature="adopt")
    from transformers.models.auto import modeling_auto as auto

    if not isinstance(model_type, str) or model_type not in transformers.CONFIG_MAPPING:
        return None
    outer = transformers.CONFIG_MAPPING[model_type]
    inner = getattr(outer, "sub_configs", {}).get("text_config")
    if inner is None:
        return None
    tables = (auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES, auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    name = next((table[model_type] for table in tables if model_type in table), None)
    name = name[0] if isinstance(name, tuple) else name
    if name is None or not hasattr(transformers, name):
        return None
    with quiet():
        default = outer()
        whole = json.loads(default.to_json_string(use_diff=False))
        inner = type(default.text_config)
        text = json.loads(inner().to_json_string(use_diff=False))
    drop = {"transformers_version", "architectures", "model_type", "dtype", "torch_dtype", "id2label", "label2id"}
    drop |= {"return_dict", "output_hidden_states", "output_attentions", "chunk_size_feed_forward", "problem_type"}
    drop |= {"is_encoder_decoder", "_name_or_path", "use_cache", "tokenizer_class", "prefix", "task_specific_params"}
    its = {k: v for k, v in text.items() if k not in drop}
    parts = {
        k: _small_part(v)
        for k, v in whole.items()
        if isinstance(v, dict) and k.endswith("_config") and k != "text_config"
    }
    parts |= {k: 0 for k, v in whole.items() if k.endswith(("_token_id", "_token_index")) and isinstance(v, int)}
    return WrappedType(model_type, inner, getattr(transformers, name), its, outer_class=outer, outer=parts)


def _small_part(values: Mapping[str, Any]) -> Values:
    """Return the fields of a small model that sees images."""
    found = {"model_type": values["model_type"]} if "model_type" in values else {}
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int):
            continue
        size = small_size(name)
        if size is not None and not name.endswith(("_token_id", "_token_index")):
            found[name] = {67: 67, 6: 4}.get(size, size)
        elif re.fullmatch(r"depth|num_.*_layers", name):
            found[name] = 1
        elif re.search("out_hidden|output_dim|output_hidden|projection_dim|proj_dim", name):
            found[name] = 48
    return found


def known_type(model_type: str) -> KnownType:
    """Return what the installed transformers has of a model type, of the text model where there is one within;
    AdoptError where it has no decoder of it."""
    return wrapped_type(model_type) or decoder_type(model_type)


def known_texts(known: WrappedType, base: Built, pool: Pool) -> Iterator[Family]:
    """Yield the text models of known families, by the names that the files around them have."""
    shapes = {name: tuple(tensor.shape) for name, tensor in base.published.items()}
    first = FAMILIES[known.text_type] if known.text_type in pool.families else None
    for family in filter(None, (first,)):
        try:
            config = family.read_config(base.values)
        except ValueError:
            continue
        for names, _ in solve(config, shapes, pool, family.names)[:2]:
            if not names.cost:
                yield replace(family, names=names.names, other_names=())


def around(text: Family, known: WrappedType, others: set[str], **tied: bool) -> Family:
    """Return the family of the models around a text model. others: names of the tensors of the other parts; tied: which
    of the fields that tie the embedding's weight count, as `TextPart` has it."""
    plain = replace(text, model_type=known.text_type)
    inner = FAMILIES.get(known.text_type, plain)
    inner = inner if inner.fields == text.fields else plain
    kind = None if inner.model_type == known.text_type else known.text_type
    needed = {e.hf for e in inner.fields if isinstance(e, Field) and e.default is REQUIRED}
    defaults = {name: known.defaults[name] for name in known.defaults if name in needed}
    patterns = sorted({_pattern(name) for name in others})
    return Family(
        model_type=known.model_type,
        architecture=known.architecture,
        fields=(TextPart((inner,), defaults, kind=kind, **tied),),
        names=text.names,
        other_names=text.other_names,
        unused=Unused(inner.unused.patterns, beside=tuple(patterns)),
        keeps_dtype=inner.keeps_dtype,
    )


def _pattern(name: str) -> str:
    """Return what the tensors of one part of a model are called: up to the module that sees images."""
    words = name.split(".")
    upto = next((i for i, word in enumerate(words) if any(w in word for w in _OF_IMAGES)), min(1, len(words) - 1))
    return ".".join(words[: upto + 1]) + ("" if upto + 1 == len(words) else ".*")


_TIED = ({"tied_outside": True}, {"tied_outside": False}, {"tied_outside": True, "tied_either": True})


def wrapped_family(
    text: Family, known: WrappedType, arguments: Values, base: Built, moved: Iterable[Built]
) -> tuple[Family | None, str]:
    """Return the family of the whole models, and "", or None and what of it differs from transformers: `moved` models,
    and those in which the two fields that tie the embedding's weight disagree."""
    whole = [*moved]
    if TIED in known.defaults:
        for outer, inner in itertools.product((False, True), repeat=2):
            other = replace(known, outer={**known.outer, TIED: outer})
            try:
                whole.append(other.build({**arguments, TIED: inner}))
            except Exception:  # transformers may not make it
                continue
    why = ""
    for tied in _TIED:
        family = around(text, known, base.others, **tied)
        outcomes = [outcome(family, built) for built in (base, *whole)]
        left = [name for name in base.others if not family.unused.holds(name, base.whole)]
        wrong = [reason for got, reason in outcomes if got == WRONG] + left
        if not wrong and outcomes[0][0] == SAME:
            return family, ""
        why = why or (wrong[0] if wrong else outcomes[0][1])
    return None, why
