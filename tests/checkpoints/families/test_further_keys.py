"""What config.json may say beyond its plain fields: objects and lists within it, rotations of other kinds, activations,
and fields that transformers reads though it writes none of that name. Moved, each is followed, or refused."""

import copy
import inspect
import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from te_models import GPTModel
from te_models.checkpoints import FAMILIES, CheckpointError
from tests.checkpoints.families.test_every_key import BOUND, FIRST_CASES, KNOWN, SIZES, TOKENS, moved, theirs_changed
from tests.checkpoints.family_cases import make
from tests.checkpoints.hf_cases import transformers

LENGTH = {"original_max_position_embeddings": 16}
ROPES: tuple[dict[str, Any], ...] = (
    {"partial_rotary_factor": 0.5},
    {"rope_type": "linear", "factor": 3.0},
    {"rope_type": "dynamic", "factor": 3.0},
    {"rope_type": "yarn", "factor": 3.0, **LENGTH},
    {"rope_type": "yarn", "factor": 3.0, "mscale": 0.7, "mscale_all_dim": 1.3, "truncate": False, **LENGTH},
    {"rope_type": "yarn", "factor": 3.0, "attention_factor": 1.3, "beta_fast": 20.0, "beta_slow": 2.0, **LENGTH},
    {"rope_type": "llama3", "factor": 3.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, **LENGTH},
    {"rope_type": "proportional", "partial_rotary_factor": 0.5},
    {"rope_type": "linear", "factor": 3.0, "partial_rotary_factor": 0.5},
)
OTHER_CODE = {"pad_token_id", "chunk_size_feed_forward"}
"""Read by classes, but of no meaning to a text without padding."""
Path = tuple[str | int, ...]


def at(values: Any, path: Path) -> Any:
    for name in path:
        values = values[name]
    return values


def places(values: Any, path: Path = ()) -> Iterator[Path]:
    """Yield where there are numbers and flags within objects and lists: the first and last of a list, as all are of a
    kind."""
    value = at(values, path)
    if isinstance(value, dict):
        for name in value:
            yield from places(values, (*path, name))
    elif isinstance(value, list):
        for index in sorted({0, len(value) - 1} if value else ()):
            yield from places(values, (*path, index))
    elif len(path) > 1 or (isinstance(value, str) and "act" in str(path[0])):
        yield path


def read_names(theirs: transformers.PreTrainedModel) -> dict[str, Any]:
    """Return the fields that transformers reads to make and run the model, also those that nobody has set."""
    config, names = theirs.config, set()
    kind, original = type(config), type(config).__getattribute__

    def recorded(self: Any, name: str) -> Any:
        names.add(name)
        return original(self, name)

    kind.__getattribute__ = recorded
    try:
        transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()(TOKENS)
    finally:
        kind.__getattribute__ = original
    names |= set(re.findall(r'kwargs\.(?:pop|get)\(\s*"(\w+)"', inspect.getsource(kind)))
    plain = {name: vars(config).get(name) for name in sorted(names) if not name.startswith("_")}
    return {name: value for name, value in plain.items() if value is None or isinstance(value, int | float | list)}


def further_changes(theirs: transformers.PreTrainedModel) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield what is moved, in words, and config.json with it."""
    values = json.loads(theirs.config.to_json_string())
    for path in places(values, ()):
        old = at(values, path)
        if path[0] in SIZES or path[0] in ("architectures", "layer_types", "mlp_layer_types", "quantization_config"):
            continue
        for value in ("gelu", "relu2", "gelu_pytorch_tanh") if isinstance(old, str) else moved(str(path[-1]), old):
            changed = copy.deepcopy(values)
            at(changed, path[:-1])[path[-1]] = value
            yield f"{path} = {value}", changed
    for name, old in read_names(theirs).items():
        if name not in values and name not in KNOWN and name not in OTHER_CODE | SIZES:
            for value in moved(name, old):
                yield f"{name} = {value}", {**values, name: value}
    rope = values.get("rope_parameters")
    if isinstance(rope, dict):
        for kind in [kind for kind in rope if isinstance(rope[kind], dict)] or [None]:
            for other in ROPES:
                changed = copy.deepcopy(values)
                inner = changed["rope_parameters"] if kind is None else changed["rope_parameters"][kind]
                inner |= {"rope_type": "default", **other}
                yield f"rope of {kind}: {other}", changed


@pytest.mark.parametrize(
    "family",
    [family if family == "minimax" else pytest.param(family, marks=pytest.mark.slow) for family in FIRST_CASES],
)
@torch.no_grad()
def test_every_further_key_is_followed_or_refused(family: str) -> None:
    theirs = make(FIRST_CASES[family])
    plain, wrong, moves = theirs(TOKENS).logits, [], 0
    before = FAMILIES[family].read_config(json.loads(theirs.config.to_json_string()))
    for what, changed in further_changes(theirs):
        moves += 1
        try:
            config = FAMILIES[family].read_config(changed)
        except CheckpointError as error:
            assert "\n" not in str(error)
            continue
        other = theirs_changed(theirs, changed)
        if other is None:
            continue
        expected = other(TOKENS).logits
        got = plain if config == before else GPTModel.from_hf(other).eval()(TOKENS).logits
        if not (got - expected).abs().max() <= BOUND * expected.abs().max():
            wrong.append(what)
    assert moves and not wrong, wrong
