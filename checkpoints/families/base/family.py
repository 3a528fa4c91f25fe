"""What a family is, and how its maps are applied to a whole configuration."""

import fnmatch
import itertools
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from te_models.config import ConfigError, ModelConfig

from ...io.boxes import Shape
from ...io.errors import CheckpointError, shorten
from ...mapping.param_shapes import check_counts, expected_tensors, holds_experts, is_table
from ...mapping.tensor_map import TABLE, Link, Namespace, TensorSpec
from .attentions import MixerEntry
from .fields import Entry, HFConfig, Values, get_path, shorten_value
from .names import COMMON, Names
from .unused import CONSTANTS, COUNTS, Unused, layers_behind

_NEUTRAL: dict[str, tuple[Any, ...]] = {
    # Fields of some family that change the mathematics -> the values with which they do not. A family that has the
    # field names it in its map; in any other it must be neutral; this also catches wrongly labelled folders.
    **dict.fromkeys(
        (
            *("attention_chunk_size", "attention_multiplier", "attn_logit_softcapping", "clip_qkv"),
            *("final_logit_softcapping", "gating", "index_topk", "kv_lora_rank", "layer_rope_theta", "layer_types"),
            *("no_rope_layers", "num_attention_heads_per_layer", "q_lora_rank", "quantization_config"),
            *("query_pre_attn_scalar", "rotary_dim", "sliding_window", "swiglu_alpha", "swiglu_limit", "v_head_dim"),
        ),
        (None,),
    ),
    **dict.fromkeys(
        (
            *("add_cross_attention", "alibi", "attention_bias", "attention_out_bias", "is_encoder_decoder"),
            *("mlp_bias", "mup_enabled", "parallel_attn", "qk_layernorm", "rope_interleaved"),
            *("scale_attn_by_inverse_layer_idx", "scale_embeddings", "use_bias", "use_mrope", "use_parallel_residual"),
            *("use_qk_norm", "use_sliding_window"),
        ),
        (None, False),
    ),
    **dict.fromkeys(
        (
            *("first_k_dense_replace", "hidden_size_per_layer_input", "moe_router_logit_softcapping"),
            *("n_routed_experts", "n_shared_experts", "num_kv_shared_layers", "num_local_experts"),
            *("num_shared_experts", "router_jitter_noise", "shared_expert_intermediate_size"),
            "shared_intermediate_size",
        ),
        (None, 0),
    ),
    **dict.fromkeys(
        (
            *("attention_value_scale", "embedding_multiplier", "hc_mult", "logit_scale", "logits_scaling"),
            *("moe_layer_freq", "n_group", "residual_multiplier", "routed_scaling_factor"),
        ),
        (None, 1),
    ),
    "scale_attn_weights": (None, True),
    "num_experts": (None, 0, 1),  # Hunyuan's dense models say 1
    "use_bidirectional_attention": (None, False, "vision"),  # which concerns images alone
}

_OLDER_WORDS = {
    "mamba": "linear_attention",
    "attention": "full_attention",
    "deepseek_sparse_attention": "indexed_attention",
}
"""Older words in `layer_types` -> transformers 5's."""
_EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")

_TRAINING_ONLY = (
    "hidden_dropout",
    "init_method_std",
    "mtp_loss_scaling_factor",
    "moe.aux_loss_coeff",
    "moe.z_loss_coeff",
    "moe.moe_router_load_balancing_type",
    "attention.attention_dropout",
    "attention.indexer.loss_coeff",
    "attention.indexer.warmup",
    "embedding.embedding_dropout",
    "embedding.padding_idx",
)

_FAR = 100
"""A distance larger than any between families that differ in single fields."""

_NEAREST = 3
"""How many families give their reasons where none fits."""


class HasShape(Protocol):
    """A tensor, or what is known of one in a file."""

    @property
    def shape(self) -> Sequence[int]: ...


@dataclass(frozen=True)
class Family:
    """One Hugging Face architecture.

    Arguments:
        model_type: the `model_type` of its config.json; also the family's name.
        architecture: the transformers class, written to `architectures`; by default the words of the model_type:
            Qwen3MoeForCausalLM for qwen3_moe.
        fields: the configuration map.
        mixers: what says that layers have other mixers than `attention`; read after `fields`.
        names: the weight map; an export writes it.
        other_names: further forms in which its files exist; which one a folder has is told by its tensors' names.
        unused: tensors that files may hold and the model does not use; an import keeps them for the export.
        keeps_dtype: patterns of parameters that files hold in another precision.
    """

    model_type: str
    architecture: str = ""
    fields: tuple[Entry, ...] = ()
    mixers: MixerEntry | None = None
    names: Names = COMMON
    other_names: tuple[Names, ...] = ()
    unused: Unused = CONSTANTS
    keeps_dtype: tuple[str, ...] = ("*.router.expert_bias",)

    def __post_init__(self) -> None:
        words = (word[:1].upper() + word[1:] for word in self.model_type.split("_"))
        object.__setattr__(self, "architecture", self.architecture or f"{''.join(words)}ForCausalLM")

    def read_config(self, hf: HFConfig, *, mtp: bool = False) -> ModelConfig:
        """Translate config.json; a flag that changes the mathematics and cannot be expressed raises CheckpointError.
        mtp: layers that predict further tokens are a part of the model."""
        for layers, experts in itertools.product(("num_hidden_layers", "n_layer"), _EXPERT_COUNTS):
            check_counts(hf.get(layers), hf.get(experts))
        for name, neutral in _NEUTRAL.items():
            if name in hf and name not in self.known and not any(hf[name] == value for value in neutral):
                allowed = " or ".join(map(json.dumps, neutral))
                raise CheckpointError(
                    f"config.json has {name} = {shorten_value(hf[name])}, which changes the model in a way that "
                    f"the family {self.model_type!r} cannot express; allowed: {allowed}"
                )
        if isinstance(hf.get("layer_types"), list):
            words = [_OLDER_WORDS.get(w, w) if isinstance(w, str) else w for w in hf["layer_types"]]
            hf = {**hf, "layer_types": words}
        nested: dict[str, Any] = {}
        for entry in self.fields:
            for path, value in entry.read(hf).items():
                _set(nested, path, value)
        if self.mixers is not None:
            nested |= self.mixers.read(hf, nested)
        if mtp:
            nested["mtp_num_layers"] = self._read_mtp(hf)
        try:
            return ModelConfig.from_dict(nested)
        except ConfigError as error:
            raise CheckpointError(f"config.json does not describe a valid {self.model_type} model: {error}") from None

    @property
    def known(self) -> frozenset[str]:
        """The fields of config.json that the family understands."""
        return frozenset(name for entry in (*self.fields, *filter(None, [self.mixers])) for name in entry.names)

    def _read_mtp(self, hf: HFConfig) -> int:
        if self.names.mtp is None:
            raise CheckpointError(
                f"the family {self.model_type!r} has no layers that predict further tokens as parameters; without mtp "
                "they are kept as they are"
            )
        found = layers_behind(hf)
        if found < 1:
            raise CheckpointError("config.json says that there are no layers that predict further tokens")
        return found

    def write_config(self, config: ModelConfig) -> Values:
        """Translate back; a configuration that this family cannot express raises CheckpointError naming a field."""
        hf, obstacles = self._translate(config)
        if obstacles:
            raise CheckpointError(f"the family {self.model_type!r} cannot express {next(iter(obstacles.values()))}")
        return hf

    def _translate(self, config: ModelConfig) -> tuple[Values, dict[str, str]]:
        """Return the fields of config.json, and the fields of the model that they do not say, with their values in
        words; "" is the field where they say nothing that can be read."""
        hf: Values = {}
        for entry in self.fields:
            hf.update(entry.write(config))
        if self.mixers is not None:
            hf |= self.mixers.write(config)
        try:
            mtp = config.mtp_num_layers > 0 and self.names.mtp is not None
            hf |= {COUNTS[0]: config.mtp_num_layers} if mtp else {}
            again = self.read_config(hf, mtp=mtp)
        except CheckpointError as error:
            return hf, {"": f"this model: {error}"}
        paths = (path for path in differing_fields(again.to_dict(), config.to_dict()) if path not in _TRAINING_ONLY)
        return hf, {path: f"{path} = {shorten_value(get_path(config, path))}" for path in paths}

    def distance(self, config: ModelConfig) -> tuple[int, str]:
        """Return how far the family is from expressing a model, and all that it cannot express, in words."""
        try:
            _, obstacles = self._translate(config)
        except CheckpointError as error:
            return 2 * _FAR, f"{self.model_type}: {error}"
        far = sum(1 if "." in path else _FAR if path else 2 * _FAR for path in obstacles)  # a whole part is much
        named, more = list(obstacles.values())[:4], len(obstacles) - 4
        return far, f"{self.model_type} cannot express {', '.join(named)}" + (f" and {more} more" if more > 0 else "")

    @property
    def forms(self) -> dict[str, Names]:
        """The forms in which files of this family exist, by name; the first is the published one."""
        return {names.form: names for names in (self.names, *self.other_names)}

    def best_form(self, config: ModelConfig, found: Mapping[str, HasShape]) -> tuple[str, Namespace]:
        """Return the form that has most of the tensors in `found`, by names and, where these are the same, by shapes,
        and how it stores the model."""
        best, most = None, -1
        for form, names in self.forms.items():
            if not self.other_names or not names.experts_apart or holds_experts(config, len(found)):
                namespace = self.namespace(config, form)
                both = ((namespace.stored[name], its) for name, its in found.items() if name in namespace.stored)
                count = sum(2 if stored.shape == tuple(its.shape) else 1 for stored, its in both)
                if count > most:
                    best, most = (form, namespace), count
                if count == 2 * len(found):  # no other form can have more, and a mixture has many names
                    break
        assert best is not None, "the first form has each expert's weights, or needs none"
        return best

    def namespace(self, config: ModelConfig, form: str | None = None) -> Namespace:
        """Return how files of this family store the model; None means the published form."""
        forms = self.forms
        if form is not None and form not in forms:
            raise CheckpointError(f"the family {self.model_type!r} has no form {form!r}; its forms: {', '.join(forms)}")
        return self._namespace(config, self.names if form is None else forms[form])

    def _namespace(self, config: ModelConfig, names: Names) -> Namespace:
        canonical = expected_tensors(config)
        stored: dict[str, TensorSpec] = {}
        specs: dict[tuple[Shape, bool, bool], TensorSpec] = {}
        links: list[Link] = []
        for name, layout in names.weights(config):
            if name not in canonical:
                raise CheckpointError(f"the family {self.model_type!r} has {name}, which this model does not have")
            convertible = not any(fnmatch.fnmatchcase(name, pattern) for pattern in self.keeps_dtype)
            for p in layout.place(canonical[name]):
                key = p.stored_shape, convertible
                spec = TABLE(p.stored_shape) if is_table(name) else TensorSpec(p.stored_shape, convertible=convertible)
                stored[p.stored] = specs.setdefault((*key, is_table(name)), spec)
                links.append(Link(name, p.box, p.stored, p.stored_box, p.axes))
        absent = set(canonical) - {link.name for link in links}
        if absent:
            raise CheckpointError(f"the family {self.model_type!r} cannot store {shorten(sorted(absent))}")
        return Namespace(canonical, stored, tuple(links))


def first_that_expresses(families: Iterable[Family], config: ModelConfig) -> Family:
    """Return the first family that can express a model, or raise CheckpointError with the reasons of the nearest."""
    reasons = []
    for family in families:
        reason = family.distance(config)
        if not reason[0]:
            return family
        reasons.append(reason)
    nearest = sorted(reasons, key=lambda reason: reason[0])[:_NEAREST]
    raise CheckpointError("; ".join(reason for _, reason in nearest))


def _set(nested: dict[str, Any], path: str, value: Any) -> None:
    *parents, leaf = path.split(".")
    for name in parents:
        nested = nested.setdefault(name, {})
    nested[leaf] = value


def differing_fields(a: Any, b: Any, path: str = "") -> list[str]:
    """Return the dotted paths at which two nested dictionaries differ."""
    if isinstance(a, dict) and isinstance(b, dict):
        names = {**a, **b}
        return [p for n in names for p in differing_fields(a.get(n), b.get(n), f"{path}.{n}" if path else n)]
    return [] if a == b else [path]


def differing_values(a: dict[str, Any], b: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return dotted path -> both values, None for a missing one, for all that differs in two nested dictionaries."""
    return {path: (_at(a, path), _at(b, path)) for path in differing_fields(a, b)}


def _at(values: Any, path: str) -> Any:
    for name in path.split("."):
        values = values.get(name) if isinstance(values, dict) else None
    return values
