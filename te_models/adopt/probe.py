"""What transformers says of a model type: small models of it, with random weights, as tensors, names and logits.

transformers' code is imported from the installed package alone, by the type's name: nothing in a folder is run.
"""

import contextlib
import functools
import json
import logging
import re
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from te_models.checkpoints.io.store import read_tensors

from ..extras import require

Values = dict[str, Any]
LENGTHS = (1, 4, 23)
"""Tokens of a row: one, fewer than a small window, and more than any window or original length."""
WINDOW = 5
MOST_NUMBERS = 64_000_000
"""Parameters of a small model."""

# What a size is called -> what small models have; no two differ only by chance, so that shapes tell sizes apart.
_SMALL: tuple[tuple[str, int], ...] = (
    (r"vocab_size.*", 67),
    (r"hidden_size|n_embd|d_model|dim|hidden_dim|embed_dim|model_dim", 48),
    (r"(moe|expert).*intermediate_size|moe_ffn.*|expert_ffn.*|ffn_dim_exps", 28),
    (r"shared.*(intermediate_size|dim)|intermediate_size_mlp|.*_intermediate_size", 36),
    (r"intermediate_size|n_inner|ffn_dim|ffn_hidden.*|dff|inner_dim|d_ff|d_inner|dim_ff|decoder_ffn_dim", 56),
    (r"num_hidden_layers|n_layers?|num_layers|decoder_layers", 2),
    (r"num_attention_heads|n_heads?|num_heads|decoder_attention_heads|mamba_n_heads|mamba_num_heads", 6),
    (r"num_key_value_heads|n_head_kv|num_kv_heads|multi_query_group_num", 2),
    (r"head_dim|kv_channels|global_head_dim|mamba_d_head|mamba_head_dim", 16),
    (r"n_groups|mamba_n_groups", 2),
    (r"mamba_d_state|ssm_state_size|state_size", 8),
    (r"max_position_embeddings|n_positions|n_ctx|max_seq_len|max_sequence_length|seq_length", 64),
    (r"(num|n)_(local_|routed_)?experts|moe_num_experts|num_moe_experts", 8),
    (r"num_experts_per_tok|moe_k|moe_topk|moe_router_topk|top_k_experts|num_selected_experts", 3),
    (r"q_lora_rank", 20),
    (r"kv_lora_rank", 12),
    (r"qk_nope_head_dim", 10),
    (r"qk_rope_head_dim", 4),
    (r"v_head_dim", 6),
    (r"sliding_window|attention_window_size|window_size|attention_chunk_size", WINDOW),
    (r"first_k_dense_replace", 1),
    (r"original_max_position_embeddings", 16),
    (r"rotary_dim", 4),
    (r"pad_token_id|bos_token_id|eos_token_id|.*_token_id|.*_token_index", 0),
)


class AdoptError(ValueError):
    """What cannot be adopted: an unknown type, a folder without a configuration, a model that cannot be made small."""


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Leave out what transformers says while models are made."""
    from transformers.utils import logging as theirs

    level, bars = logging.root.manager.disable, theirs.is_progress_bar_enabled()
    logging.disable(logging.ERROR)
    theirs.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(level)
        if bars:
            theirs.enable_progress_bar()


@dataclass(frozen=True)
class Built:
    """A small model of random weights: its configuration as files have it, its tensors as files have them
    (`published`) and as transformers holds them (`memory`), and the logits of `tokens` by their length."""

    values: Values
    published: dict[str, Tensor]
    memory: dict[str, Tensor]
    logits: dict[int, Tensor]
    without: dict[str, tuple[dict[str, Tensor], dict[int, Tensor]]] = field(default_factory=dict)
    whole: Values = field(default_factory=dict)
    """All of config.json, where the decoder is a part of the model."""
    others: set[str] = field(default_factory=set)
    """Names of tensors of other parts, which the others here leave out."""
    remembered: dict[Any, tuple[str, str]] = field(default_factory=dict, compare=False)
    """What was found of a declaration's configuration and names beside this model."""


@dataclass(frozen=True)
class KnownType:
    """A model type that the installed transformers has a decoder of."""

    model_type: str
    config_class: Any
    model_class: Any
    defaults: Values
    """The fields of its configuration class, and what they are where a file leaves them out."""
    remembered: dict[tuple[str, ...], list[tuple[Values, Values]]] = field(default_factory=dict, compare=False)

    @property
    def architecture(self) -> str:
        return self.model_class.__name__

    def small(self, values: Mapping[str, Any] | None = None, layers: int = 2) -> Values:
        """Return the arguments of a small model. values: a config.json whose other fields it has, too."""
        sizes = dict(values or {})
        sizes.pop("model_type", None)
        old_layers = next((v for k, v in {**self.defaults, **sizes}.items() if _is_layers(k) and _whole(v)), None)
        for name, value in {**self.defaults, **sizes}.items():
            small = small_size(name)
            if small is None or isinstance(value, bool) or not (_whole(value) or value is None):
                continue
            if value is None and not re.fullmatch(r"pad_token_id|intermediate_size|n_inner|num_key_value_heads", name):
                continue
            sizes[name] = layers if _is_layers(name) else small
        latent = "kv_lora_rank" in self.defaults and "qk_rope_head_dim" in self.defaults
        if latent and "num_key_value_heads" in sizes:
            sizes["num_key_value_heads"] = sizes.get("num_attention_heads", 6)
        if latent and "head_dim" in sizes:
            del sizes["head_dim"]
        if "bos_token_id" in self.defaults:
            sizes["bos_token_id"] = 1
        if "eos_token_id" in self.defaults:
            sizes["eos_token_id"] = 2
        for name, value in {**(values or {})}.items():
            if isinstance(value, list) and len(value) == old_layers:
                sizes[name] = value[:layers]
        return sizes

    def working(self, values: Mapping[str, Any] | None = None) -> tuple[Values, Built]:
        """Return the arguments of a small model that transformers makes and runs, and the model; AdoptError with
        transformers' first reason where none of the tried sizes gives one."""
        first = ""
        for changes in self.repairs():
            arguments = self.small(values)
            for name, value in changes.items():
                if value is None:
                    arguments.pop(name, None)
                elif name in self.defaults:
                    arguments[name] = value
            try:
                self._check_size(arguments)
                built = self.build(arguments, parts=True)
            except Exception as error:  # transformers checks what it is made with in many ways
                first = first or f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]
                continue
            if all(bool(logits.isfinite().all()) for logits in built.logits.values()):
                return arguments, built
        raise AdoptError(f"transformers makes no small model of {self.model_type!r}: {first}")

    def _check_size(self, arguments: Mapping[str, Any]) -> None:
        """Raise AdoptError for a model that is not small, as where a folder's file has sizes of names nobody knows."""
        config = self.config(arguments)
        with quiet(), torch.device("meta"):
            model = self.model_class._from_config(config, attn_implementation="eager")
        numbers = sum(parameter.numel() for parameter in model.parameters())
        if numbers > MOST_NUMBERS:
            raise AdoptError(
                f"a small model of {self.model_type!r} has {numbers:,} parameters; allowed: {MOST_NUMBERS:,}"
            )

    def repairs(self) -> Iterator[Values]:
        """Yield changes of usual small sizes, for classes that do not take these."""
        absent = {n: s for n, s in ((n, small_size(n)) for n, v in self.defaults.items() if v is None) if s}
        absent = {n: s for n, s in absent.items() if not n.endswith("_token_id")}
        absent |= {n: 1 for n, v in self.defaults.items() if v is None and re.fullmatch("n(um)?_shared_experts", n)}
        heads = {n: 4 for n in self.defaults if small_size(n) == 6}
        groups = {"n_group": 4, "topk_group": 2}
        yield {}
        rope = self.defaults.get("rope_parameters")
        ignored = getattr(self.config_class, "ignore_keys_at_rope_validation", ())
        if isinstance(rope, dict) and "mrope_section" in ignored:  # channels by which of three positions rotates them
            for sections in ([2, 1, 1], [4, 2, 2], [1, 1, 0]):
                yield {"rope_parameters": {**rope, "mrope_section": sections}}
        yield {"head_dim": None}
        yield {"head_dim": 8}
        yield {"head_dim": 16}
        yield {**absent}
        yield {**groups}
        yield {**absent, **groups}
        yield heads
        yield {**heads, "head_dim": 12}
        yield {**heads, **groups}
        for name, value in self.defaults.items():
            if isinstance(value, list) and value and isinstance(value[0], list):
                yield {name: [[kinds, 2 // len(kinds)] for kinds, _ in value]}

    def config(self, arguments: Mapping[str, Any]) -> Any:
        """Return transformers' configuration."""
        with quiet():
            return self.config_class(**arguments)

    def values(self, arguments: Mapping[str, Any]) -> Values:
        """Return the configuration as config.json has it."""
        return self.values_of(self.config(arguments))

    def file_of(self, arguments: Mapping[str, Any]) -> Values:
        """Return all of config.json."""
        found: Values = json.loads(self.config(arguments).to_json_string(use_diff=False))
        return found

    def values_of(self, config: Any) -> Values:
        """Return the fields of a decoder in config.json."""
        found: Values = json.loads(config.to_json_string(use_diff=False))
        found.pop("_attn_implementation", None)
        return found

    def left_out(self, names: tuple[str, ...]) -> list[tuple[Values, Values]]:
        """Return files without some fields, and with what the class makes of them: of its own sizes, of small ones."""
        if names not in self.remembered:
            found = []
            for arguments in ({}, self.small()):
                try:
                    whole = self.values({k: v for k, v in arguments.items() if k not in names})
                except Exception:  # the class may need a field, or not take a size
                    continue
                found.append(({k: v for k, v in whole.items() if k not in names}, whole))
            self.remembered[names] = found
        return self.remembered[names]

    def of_other_parts(self, model: Any, names: Mapping[str, Tensor]) -> set[str]:
        """Return which of these tensors are of no decoder."""
        return set()

    @torch.no_grad()
    def build(
        self, arguments: Mapping[str, Any], *, seed: int = 0, lengths: tuple[int, ...] = LENGTHS, parts: bool = False
    ) -> Built:
        """Return a small model; whatever transformers raises goes through. parts: also, in `without`, the same model
        with attention, the MLPs, or both adding nothing."""
        config = self.config(arguments)
        with quiet(), torch.random.fork_rng():
            torch.manual_seed(seed)
            model = self.model_class._from_config(config, attn_implementation="eager", dtype=torch.float32).eval()
            fill(model)
            vocabulary = config.get_text_config().vocab_size
            logits, published = self._logits(model, vocabulary, lengths, seed), self._published(model)
            memory = {name: tensor.clone() for name, tensor in _own(model).items()}
            others = self.of_other_parts(model, published), self.of_other_parts(model, memory)
            without = {}
            for what, silent in (("mlp", MLP_OUT), ("attention", ATTENTION_OUT), ("both", BOTH_OUT)) if parts else ():
                changed = False
                for name, tensor in _own(model).items():
                    if silent.search(name):
                        tensor.zero_()
                        changed = True
                if changed:
                    its = {n: t for n, t in self._published(model).items() if n not in others[0]}
                    without[what] = its, self._logits(model, vocabulary, lengths, seed)
                for name, tensor in _own(model).items():
                    tensor.copy_(memory[name])
        published, memory = (
            {n: t for n, t in tensors.items() if n not in names} for tensors, names in zip((published, memory), others)
        )
        whole = json.loads(model.config.to_json_string(use_diff=False))
        return Built(self.values_of(model.config), published, memory, logits, without, whole, others[0] | others[1])

    def _logits(self, model: Any, vocabulary: int, lengths: tuple[int, ...], seed: int) -> dict[int, Tensor]:
        return {n: model(input_ids=tokens(n, vocabulary, seed), use_cache=False).logits for n in lengths}

    def _published(self, model: Any) -> dict[str, Tensor]:
        with tempfile.TemporaryDirectory(prefix="adopt-") as folder:
            model.save_pretrained(folder)
            tensors: dict[str, Tensor] = {}
            for file in sorted(Path(folder).glob("*.safetensors")):
                tensors.update(read_tensors(file)[0])
        return tensors


_ATTENTION = r"o_proj|out_proj|dense|c_proj|wo|out_lin|proj|output"
ATTENTION_OUT = re.compile(
    rf"(?<!inter)(attn|attention|mixer|self_attention|norm_attn_norm\.attn)(\.\w+)?\.({_ATTENTION})\.(weight|bias)$"
)
MLP_OUT = re.compile(
    r"(down_proj|fc2|fc_out|dense_4h_to_h|\bw2|v1_w2|output_linear|layers\.\d+\.output|wo|lin2|fc_2|linear2"
    r"|(mlp|ffn|feed_forward)\.(c_proj|proj|down_proj|out_proj))(\.weight|\.bias|_bias)?$"
)
BOTH_OUT = re.compile(f"{ATTENTION_OUT.pattern}|{MLP_OUT.pattern}")


def decoder_type(model_type: str) -> KnownType:
    """Return what the installed transformers has of a model type; AdoptError where it has no decoder of it."""
    transformers = require("transformers", "hf", feature="adopt")
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CLASSES

    if not isinstance(model_type, str) or model_type not in transformers.CONFIG_MAPPING:
        raise AdoptError(
            f"model_type {model_type!r} is unknown to transformers {transformers.__version__}, too; adopt reads the "
            "code of the installed package alone"
        )
    config_class = transformers.CONFIG_MAPPING[model_type]
    name = CLASSES.get(model_type)
    try:
        module = import_module(config_class.__module__.replace("configuration_", "modeling_"))
    except ModuleNotFoundError:  # a configuration alone, for the class of another type
        module = transformers
    name = name if isinstance(name, str) else None
    if name is None:
        stem = config_class.__name__.removesuffix("TextConfig").removesuffix("Config")
        name = next((n for n in (f"{stem}ForCausalLM", f"{stem}LMHeadModel") if hasattr(module, n)), None)
    if name is None:
        raise AdoptError(f"transformers {transformers.__version__} has no decoder for model_type {model_type!r}")
    model_class = getattr(module, name, None) or getattr(transformers, name)
    with quiet():
        defaults = json.loads(config_class().to_json_string(use_diff=False))
    drop = {"transformers_version", "architectures", "model_type", "dtype", "torch_dtype", "id2label", "label2id"}
    return KnownType(model_type, config_class, model_class, {k: v for k, v in defaults.items() if k not in drop | _ANY})


_ANY = {
    *("return_dict", "output_hidden_states", "output_attentions", "chunk_size_feed_forward", "problem_type"),
    *("is_encoder_decoder", "_name_or_path", "use_cache", "tokenizer_class", "prefix", "task_specific_params"),
}
"""Fields of every configuration that say nothing of a decoder."""


@functools.cache
def small_size(name: str) -> int | None:
    """Return the size that small models have for a field of this name; None for other fields."""
    return next((size for pattern, size in _SMALL if re.fullmatch(pattern, name)), None)


def tokens(length: int, vocabulary: int, seed: int = 0) -> Tensor:
    """Return two rows of random tokens, [2, length], without the first ids, because these may be special."""
    generator = torch.Generator().manual_seed(1000 * seed + length)
    return torch.randint(3, vocabulary, (2, length), generator=generator, device="cpu")


@torch.no_grad()
def fill(model: Any) -> None:
    """Draw random weights, large enough that every part matters to the logits; norms and biases near what they are."""
    names = model.state_dict().keys()
    tables = ("slope_rate", "_decay", "inv_freq")
    buffers = [b for n, b in model.named_buffers() if n in names and b.is_floating_point() and not n.endswith(tables)]
    for tensor in (*model.parameters(), *buffers):
        if tensor.dim() <= 1 or tensor.shape[0] == 1:
            tensor.add_(torch.randn_like(tensor) * 0.2)
        else:
            tensor.normal_(std=0.15)


def _own(model: Any) -> dict[str, Tensor]:
    return dict(model.state_dict())


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_layers(name: str) -> bool:
    return re.fullmatch(r"num_hidden_layers|n_layers?|num_layers|decoder_layers", name) is not None
