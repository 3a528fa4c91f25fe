"""Every field of a configuration moved from its default, and the models that this gives."""

import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from te_models.checkpoints.families.base.common import ACTIVATIONS

from .probe import Built, KnownType, Values, small_size

_OTHER_SIZES = {67: 71, 48: 60, 28: 20, 36: 44, 56: 64, 6: 4, 16: 8, 64: 96, 8: 4, 3: 2, 5: 7, 20: 14, 12: 18, 10: 8}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
_ROPES: dict[str, Values] = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 64},
    "yarn": YARN,
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    },
}
LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
"""What configurations call the number of layers."""
OF_TRAINING = ("drop", "initializer", "init_std", "_coef", "jitter", "loss", "router_logits", "z_loss", "aux")


@dataclass(frozen=True)
class Move:
    """A field with another value, or several: what the class is made with, and the model, None where transformers
    itself refuses it, for the reason `refused`."""

    name: str
    values: Values
    built: Built | None
    refused: str = ""
    inert: bool = False
    """Whether tensors and logits are those of the base model."""

    @property
    def label(self) -> str:
        """The change in words."""
        return ", ".join(f"{k} = {_short(v)}" for k, v in self.values.items())


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) < 60 else f"{text[:57]}..."


def moves(known: KnownType, arguments: Values, base: Built, *, seed: int = 0) -> list[Move]:
    """Return the models with each field moved, by itself; where a value is refused another one is tried."""
    found: list[Move] = []
    for name in known.defaults:
        if name in ("architectures", "dtype", "use_cache") or name.endswith(("token_id", "_token_index")):
            continue
        several = name.startswith("rope_") or isinstance(base.values.get(name), dict)
        last = ""
        for value in other_values(known, name, base.values.get(name)):
            changed = {name: value}
            move = changed_model(known, arguments, changed, base, seed=seed)
            if move.built is None:
                last = move.refused
                continue
            found.append(move)
            if not several and not (isinstance(value, str) and name != "hidden_act"):
                break
        if last and not any(move.name == name for move in found):
            found.append(Move(name, {}, None, last))
    return [*found, *_together(known, arguments, base, found, seed)]


def _together(known: KnownType, arguments: Values, base: Built, found: list[Move], seed: int) -> Iterator[Move]:
    """Yield fields moved together with a flag beside which they count, where neither counts alone; and all sizes."""
    silent = [m for m in found if m.inert and not any(word in m.name for word in OF_TRAINING)]
    flags = [m for m in silent if isinstance(m.values[m.name], bool)]
    for flag in flags:
        for other in silent:
            if other.name != flag.name and other.name not in [f.name for f in flags]:
                move = changed_model(known, arguments, {**other.values, **flag.values}, base, seed=seed)
                if move.built is not None and not move.inert:
                    yield move
    sizes = {n: _OTHER_SIZES[v] for n, v in arguments.items() if small_size(n) == v and v in _OTHER_SIZES}
    heads = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    sizes |= {
        n: (4 if n == "num_key_value_heads" and "kv_lora_rank" in sizes else v) for n, v in heads.items() if n in sizes
    }
    sizes |= {n: 3 for n in arguments if n in LAYERS}
    sizes = {n: v for n, v in sizes.items() if "lora" not in n and "qk_" not in n and n != "v_head_dim"}
    layered = {n: v for n, v in arguments.items() if not isinstance(v, list)}
    move = changed_model(known, layered, sizes, base, seed=seed)
    if move.built is not None:
        yield Move("sizes", move.values, move.built)


def changed_model(known: KnownType, arguments: Values, changed: Values, base: Built, *, seed: int = 0) -> Move:
    """Return the model with some fields changed."""
    name = next(iter(changed))
    try:
        values = {**arguments, **changed}
        layers = next((k for k in changed if k in LAYERS), None)
        if layers is not None:
            values = {k: v for k, v in values.items() if not isinstance(v, list)}
        built = known.build(values, seed=seed)
    except Exception as error:  # transformers checks what it is made with in many ways
        return Move(name, changed, None, f"{type(error).__name__}: {' '.join(str(error).split())}"[:200])
    if not all(bool(logits.isfinite().all()) for logits in built.logits.values()):
        return Move(name, changed, None, "its logits are not finite")
    return Move(name, changed, built, inert=same_model(built, base))


def same_model(a: Built, b: Built) -> bool:
    """Whether two models have the same tensors and logits, bit for bit."""
    if a.memory.keys() != b.memory.keys():
        return False
    tensors = all(torch.equal(tensor, b.memory[name]) for name, tensor in a.memory.items())
    return tensors and all(torch.equal(logits, b.logits[n]) for n, logits in a.logits.items())


def other_values(known: KnownType, name: str, value: Any) -> Iterator[Any]:
    """Yield values that a field may have in place of its value, the most telling first."""
    if isinstance(value, bool):
        yield not value
    elif isinstance(value, int):
        if small_size(name) is not None and value in _OTHER_SIZES:
            yield _OTHER_SIZES[value]
        yield from (value + 1, value * 2, max(value // 2, 1))
        if value != 0:
            yield 0
    elif isinstance(value, float):
        if "eps" in name:
            yield 0.07
        elif 0 < value <= 1 and ("partial" in name or "pct" in name):
            yield 0.5 if value != 0.5 else 0.25
        else:
            yield from (value * 1.37 if value else 0.3, value + 1.0)
    elif isinstance(value, str):
        if value in ACTIVATIONS or "act" in name:
            yield from [other for other in ("silu", "gelu", "relu", "gelu_pytorch_tanh", "relu2") if other != value]
        else:
            yield from [other for other in _words(known, name) if other != value]
    elif isinstance(value, list):
        yield from _lists(name, value)
    elif isinstance(value, dict):
        yield from _dicts(name, value)
    elif value is None:
        yield from _present(known, name)


def _words(known: KnownType, name: str) -> list[str]:
    hint = _hint(known, name)
    return [a for a in typing.get_args(hint) if isinstance(a, str)]


def _hint(known: KnownType, name: str) -> Any:
    try:
        return typing.get_type_hints(known.config_class).get(name)
    except Exception:  # annotations that cannot be evaluated here
        return None


def _present(known: KnownType, name: str) -> Iterator[Any]:
    """Yield values for a field that is null."""
    if name in ("rope_scaling", "rope_parameters"):
        return
    if name == "layer_types":
        yield ["sliding_attention", "full_attention"]
        return
    hint = str(_hint(known, name))
    size = small_size(name)
    if size is not None:
        yield size
    if "bool" in hint:
        yield True
    if "float" in hint or "int" in hint or hint == "None":
        yield from (0.7, 2, 4)
    if "bool" not in hint:
        yield True


def _lists(name: str, value: list[Any]) -> Iterator[Any]:
    if value and all(isinstance(v, str) for v in value):
        for other in ("full_attention", "sliding_attention", "dense", "sparse"):
            both = {"full_attention", "sliding_attention"}, {"dense", "sparse"}
            if any(other in pair and set(value) <= pair for pair in both):
                changed = [other, *value[1:]]
                if changed != value:
                    yield changed
                changed = [*value[:-1], other]
                if changed != value:
                    yield changed
    if value[::-1] != value:
        yield value[::-1]
    if value and all(v in (0, 1) for v in value):
        yield [1 - v for v in value[:1]] + value[1:]
    if not value:
        yield [0]


def _dicts(name: str, value: dict[str, Any]) -> Iterator[Any]:
    if not name.startswith("rope"):
        return
    nested = {k: v for k, v in value.items() if isinstance(v, dict)}
    for kind, inner in nested.items():
        for other in _dicts(name, inner):
            yield {**value, kind: other}
    if nested:
        return
    theta = value.get("rope_theta")
    if isinstance(theta, float | int):
        yield {**value, "rope_theta": float(theta) * 0.37}
    if isinstance(value.get("partial_rotary_factor"), float | int):
        yield {**value, "partial_rotary_factor": 0.5 if value["partial_rotary_factor"] != 0.5 else 1.0}
    else:
        yield {**value, "partial_rotary_factor": 0.5}
    for scaling in _ROPES.values():
        same = ("rope_theta", "partial_rotary_factor")
        yield {**{k: v for k, v in value.items() if k in same}, **scaling}


def outside_of(values: Mapping[str, Any], defaults: Mapping[str, Any]) -> Values:
    """Return a configuration without the fields that have the class's defaults, as files of other tools leave out."""
    always = {"model_type", "vocab_size"}
    return {k: v for k, v in values.items() if k in always or k not in defaults or v != defaults[k]}
