"""Every number and flag of config.json moved by itself, also those that a family does not have: the model is that of
transformers, or the field is refused."""

import copy
import itertools
import json
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from te_models import GPTModel
from te_models.checkpoints import FAMILIES, CheckpointError
from tests.checkpoints.families.test_families import with_infinities
from tests.checkpoints.family_cases import CASES, make
from tests.checkpoints.hf_cases import transformers

FIRST_CASES = {family: case for case, (family, _) in reversed(CASES.items())}
SIZES = {"vocab_size", "num_hidden_layers", "n_layer", "hidden_size", "n_embd", "num_nextn_predict_layers"}
"""Fields that change the tensors. Others that do are skipped as the weights do not fit."""
KNOWN = sorted({name for family in FAMILIES.values() for name in family.known} - SIZES)
IN_ROPE = ("factor", "alpha", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "attention_factor")
BOUND = 1e-4
"""Of the largest logit: some of these models have scores 256 times as large, in which rounding grows."""


def moved(name: str, value: Any) -> Iterator[Any]:
    """Yield other values of a field; some of any kind, of one that is not there."""
    if isinstance(value, bool):
        yield not value
    elif isinstance(value, int):
        yield from (value + 1, value * 2)
    elif isinstance(value, float):
        yield 0.07 if "eps" in name else value * 1.37 or 0.37
    elif value is None:
        yield from (1, 16, 0.5, True)


def changes(values: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the name of a field, and config.json with another value of it."""
    places = [(name,) for name in dict.fromkeys((*values, *KNOWN)) if name not in SIZES]
    rope = values.get("rope_parameters")
    if isinstance(rope, dict) and "rope_type" in rope:
        places += [("rope_parameters", name) for name in dict.fromkeys((*rope, *IN_ROPE))]
    for *outer, name in places:
        for value in moved(name, (values[outer[0]] if outer else values).get(name)):
            changed = copy.deepcopy(values)
            (changed[outer[0]] if outer else changed)[name] = value
            yield name, changed


def theirs_changed(theirs: transformers.PreTrainedModel, values: dict[str, Any]) -> transformers.PreTrainedModel | None:
    """Return transformers' model of a changed config.json with the same weights; None: it makes none, or no numbers."""
    try:
        config = transformers.AutoConfig.for_model(**with_infinities(values))
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
        model.load_state_dict(theirs.state_dict())
        return model if model(TOKENS).logits.isfinite().all() else None
    except Exception:  # of any kind: its validation is of many
        return None


TOKENS = torch.randint(3, 61, (2, 41), generator=torch.Generator().manual_seed(41))


@pytest.mark.parametrize(
    ("family", "every"),
    [pytest.param(family, 1, marks=pytest.mark.slow) for family in FIRST_CASES] + [("gpt_neox", 10)],
)
@torch.no_grad()
def test_every_key_is_followed_or_refused(family: str, every: int) -> None:
    """every: which of the changes are tried; 10: each tenth."""
    theirs = make(FIRST_CASES[family])
    values = json.loads(theirs.config.to_json_string())
    before, plain, followed = FAMILIES[family].read_config(values), theirs(TOKENS).logits, 0
    for name, changed in itertools.islice(changes(values), 0, None, every):
        other = theirs_changed(theirs, changed)
        if other is None:
            continue
        expected = other(TOKENS).logits
        try:
            config = FAMILIES[family].read_config(changed)
        except CheckpointError as error:
            assert "\n" not in str(error)
            continue
        got = plain if config == before else GPTModel.from_hf(other).eval()(TOKENS).logits
        assert (got - expected).abs().max() <= BOUND * expected.abs().max(), name
        followed += 1
    assert followed > 20 / every
