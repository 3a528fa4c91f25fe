"""Every difference between our signatures and Transformer Engine's is listed with its reason, and none that is no more:
docs/te_deviations.json, which docs/porting.md shows."""

from __future__ import annotations

import pytest

import te_models.layers as te
from tests.layers.te.signatures import deviations, listed, theirs


def test_every_difference_is_listed_and_every_listed_one_exists() -> None:
    """Where this fails: python -m tests.layers.te.signatures, a reason for what is new, make docs."""
    found, known = list(deviations()), [line for lines in listed().values() for line in lines]
    assert len(set(known)) == len(known), "one reason each"
    missing, gone = sorted(set(found) - set(known)), sorted(set(known) - set(found))
    assert (missing, gone) == ([], [])


def test_every_reason_is_a_sentence() -> None:
    assert [why for why in listed() if not (why[:1].isupper() or why[:1] in "`t") or not why.endswith(".")] == []


def test_the_list_of_theirs_is_not_empty_by_accident() -> None:
    """Names, order and defaults as they are in the wheel that the list was read from."""
    signatures = theirs()
    assert len(signatures) > 120
    linear = [name for name, _, _ in signatures["Linear"]["__init__"]]
    assert linear[:4] == ["in_features", "out_features", "sequence_parallel", "fuse_wgrad_accumulation"]
    assert ["amax_history_len", "positional", "1024"] in signatures["recipe.DelayedScaling"]["__init__"]
    assert signatures["checkpoint"][""][1:] == [["args", "*", None], ["kwargs", "**", None]]
    assert {"ops.Sequential", "optimizers.FusedAdam", "router.fused_moe_aux_loss"} <= signatures.keys()


def test_names_that_are_not_here_say_what_is() -> None:
    names = [line.partition(":")[0] for lines in listed().values() for line in lines if line.endswith("no such name")]
    silent = []
    for name in names:
        prefix, _, own = name.rpartition(".")
        if prefix == "router":
            assert hasattr(te, own), "they are names of te_models.layers"
            continue
        with pytest.raises(AttributeError) as error:
            getattr(te.ops if prefix == "ops" else te, own)
        if f"{own!r}: " not in str(error.value):
            silent.append(name)
    assert silent == []
