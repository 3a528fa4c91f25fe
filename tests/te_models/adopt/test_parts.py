"""What adopt is made of: names by shapes, defaults as the class has them, models around a text model."""

from __future__ import annotations

from pathlib import Path

import pytest

from te_models.adopt import adopt, known_type, outcome, write_adopted
from te_models.adopt.naming import split_names
from te_models.adopt.near import agrees, with_defaults
from te_models.adopt.wrapped import wrapped_type
from te_models.checkpoints import FAMILIES, CheckpointError
from te_models.checkpoints.families.base.common import HeadDim, KeyValueHeads
from te_models.checkpoints.families.base.fields import REQUIRED, Field, Filled
from te_models.checkpoints.families.base.layer_fields import LayerPattern
from te_models.checkpoints.families.base.rope import Rope
from te_models.checkpoints.families.base.text_part import text_part
from tests.te_models.adopt.test_adopting import loaded


def test_a_bias_that_selects_experts_is_a_tensor_of_its_own() -> None:
    """... and that of fused experts belongs to their weight."""
    at = "model.layers.0.mlp."
    _, inside = split_names(
        {f"{at}gate.e_score_correction_bias": (8,), f"{at}experts.up": (8, 4, 6), f"{at}experts.up_bias": (8, 6)},
        "model.layers.{i}",
    )
    assert inside["mlp.gate.e_score_correction_bias"] == {(0, ""): (8,)}
    assert inside["mlp.experts.up"] == {(0, ""): (8, 4, 6), (0, "_bias"): (8, 6)}


def test_absent_fields_are_what_the_class_makes_of_them() -> None:
    """llama works head_dim and the number of key heads out of other fields; cwm has a rope of its own."""
    llama, cwm = known_type("llama"), known_type("cwm")
    assert with_defaults(HeadDim(128), llama) == HeadDim(None)
    assert with_defaults(KeyValueHeads(20), llama) == KeyValueHeads(None)
    assert not agrees(HeadDim(128), llama) and agrees(HeadDim(None), llama)
    assert with_defaults(HeadDim(None), cwm) == HeadDim(128)
    rope = with_defaults(Rope(), cwm)
    assert rope.read({}) == FAMILIES["cwm"].fields[-1].read({})
    kinds = with_defaults(LayerPattern(4096, None), cwm)
    with pytest.raises(CheckpointError, match="has no 'layer_types'"):
        kinds.read({"num_hidden_layers": 2})


def test_every_entry_of_a_family_can_be_fitted_to_a_class() -> None:
    """... also those that hold several names, which no default replaces."""
    known = known_type("glm4_moe")
    for name in ("deepseek_v3", "hy_v3", "ernie4_5_moe", "cohere2", "exaone_moe", "smollm3"):
        for entry in FAMILIES[name].fields:
            assert isinstance(with_defaults(entry, known).names, tuple)


def test_fields_that_a_file_leaves_out_are_filled_in() -> None:
    entry = Filled(Field("n", "num_layers", int, 3), {"n": 5})
    assert entry.names == ("n",) and entry.read({}) == {"num_layers": 5} and entry.read({"n": 2}) == {"num_layers": 2}
    with pytest.raises(CheckpointError, match="has no 'n'"):
        Filled(Field("n", "num_layers", int, 3), {"n": REQUIRED}).read({})


def test_a_type_around_a_text_model_has_the_fields_of_the_text_model() -> None:
    known = wrapped_type("gemma3")
    assert known is not None and known.text_type == "gemma3_text" and "num_hidden_layers" in known.defaults
    assert wrapped_type("llama") is None and wrapped_type("nobody") is None
    for tied in (True, False):
        whole = known.config({"num_hidden_layers": 2, "tie_word_embeddings": tied})
        assert whole.text_config.num_hidden_layers == 2
        assert (whole.tie_word_embeddings, whole.text_config.tie_word_embeddings) == (tied, tied)
    whole = known.config({})
    assert whole.tie_word_embeddings == whole.text_config.tie_word_embeddings  # so that the text model's says it


@pytest.mark.slow
def test_a_model_around_a_text_model_is_found(tmp_path: Path) -> None:
    found = adopt("gemma3")
    assert found.family is not None and text_part(found.family) is not None, found.report.missing
    write_adopted(found, tmp_path / "out")
    family = loaded(tmp_path / "out/gemma3.py", "GEMMA3")
    built = known_type("gemma3").build({**found.sizes, "num_hidden_layers": 3}, seed=5)
    assert outcome(family, built, seed=5)[0] == "same", outcome(family, built, seed=5)
    assert family.write_config(family.read_config(built.whole))["text_config"]["num_hidden_layers"] == 3
