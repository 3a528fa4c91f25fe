"""What adopt is made of: names by shapes, defaults as the class has them, models around a text model."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from te_models.adopt import adopt, known_type, outcome, write_adopted
from te_models.adopt.adopting import proofs, with_output
from te_models.adopt.fields import FamilyDraft, following, neutral, refusing, with_required
from te_models.adopt.moves import Move, changed_model
from te_models.adopt.naming import split_names
from te_models.adopt.near import adapted, agrees, elements, with_defaults
from te_models.adopt.pool import pool_of
from te_models.adopt.probe import Built
from te_models.adopt.solve import SolverState, layers_with_experts, ordered_as
from te_models.adopt.toggles import options
from te_models.adopt.wrapped import wrapped_type
from te_models.checkpoints import FAMILIES, CheckpointError
from te_models.checkpoints.families.base.common import HeadDim, KeyValueHeads
from te_models.checkpoints.families.base.fields import REQUIRED, Field, Filled, Fixed, Only, OwnEntry, SameAs
from te_models.checkpoints.families.base.layer_fields import LayerPattern, OnlyInEachLayer
from te_models.checkpoints.families.base.names import Names
from te_models.checkpoints.families.base.nested import TimesHidden
from te_models.checkpoints.families.base.rope import Rope
from te_models.checkpoints.families.base.text_part import text_part
from tests.compare import refused
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
    assert with_defaults(Rope(), cwm).read({}) == FAMILIES["cwm"].fields[-1].read({})
    kinds = with_defaults(LayerPattern(4096, None), cwm)
    refused(lambda: kinds.read({"num_hidden_layers": 2}), "has no 'layer_types'", error=CheckpointError)


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
    assert known.text_type == "gemma3_text" and "num_hidden_layers" in known.defaults
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


def test_a_part_that_is_taken_away_goes_with_all_that_is_said_of_it() -> None:
    state = SolverState({"hidden_size": 8, "attention.indexer.topk": 4, "attention.indexer.n_heads": 2}, Names())
    assert state.with_paths({"attention.indexer": None}).paths == {"hidden_size": 8, "attention.indexer": None}


def test_a_weight_map_for_another_configuration_keeps_the_order_of_names() -> None:
    """... of what shapes do not tell apart, as logits had shown it."""
    before = Names(embedding="b", output="a", fc1=("up", "gate"), halves_swapped=True)
    found = ordered_as(Names(embedding="a", output="b", fc1=("gate", "up"), fc2="down"), before)
    assert (found.embedding, found.output, found.fc1, found.fc2) == ("b", "a", ("up", "gate"), "down")
    assert found.halves_swapped
    assert ordered_as(Names(embedding="a", output="c", fc1=("both",)), before).embedding == "a"


def test_an_output_layer_of_the_files_stays_what_it_is() -> None:
    """... where memory calls it otherwise, and shapes took it for the embedding."""
    one, two = torch.zeros(3, 2), torch.ones(3, 2)
    base = Built({}, {"head.weight": one, "words.weight": two}, {"lm_head.weight": one, "words.weight": two}, {})
    state = SolverState({}, Names(embedding="head", output="words"))
    assert with_output(state, base, []) is state


def test_layers_with_experts_are_seen_by_the_names_of_their_tensors() -> None:
    names = ("m.layers.0.mlp.shared_experts.up.weight", "m.layers.1.mlp.experts.0.up", "m.layers.3.mlp.experts.up")
    assert layers_with_experts(dict.fromkeys(names)) == [1, 3]


def test_a_word_that_holds_for_all_sizes_comes_before_the_number_that_it_gives() -> None:
    """The embedding of gemma is multiplied by the root of its width, whatever the width is."""
    values = dict(options({"hidden_size:x ** 0.5": 48**0.5}))["embedding.multiplier"]
    assert values.index("sqrt_hidden_in_weight_dtype") < values.index(48**0.5)


def test_files_must_have_the_fields_without_which_another_model_is_read() -> None:
    known = known_type("llama")
    family = replace(FAMILIES["llama"], fields=(*FAMILIES["llama"].fields, HeadDim(128)))
    sizes = {"vocab_size": 8, "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    file = known.values({**sizes, "intermediate_size": 8})
    without = {name: value for name, value in file.items() if name != "head_dim"}
    assert family.read_config(without) != family.read_config(file)
    careful = with_required(family, known, sizes, [])
    assert careful.read_config(file) == family.read_config(file)
    refused(lambda: careful.read_config(without), "has no 'head_dim'", error=CheckpointError)


def test_a_list_with_one_value_in_each_layer_may_have_any_length() -> None:
    base = Built({"num_hidden_layers": 2, "kinds": ["full", "full"], "ids": [3, 4]}, {}, {}, {})
    llama = FAMILIES["llama"]
    entries = [refusing(llama, name, base).fields[-1] for name in ("kinds", "ids")]
    assert entries == [OnlyInEachLayer("kinds", "full"), Only("ids", [3, 4])]
    assert entries[0].read({"kinds": ["full"] * 5}) == entries[0].read({}) == {}
    with pytest.raises(CheckpointError, match="'other' in kinds; supported: 'full' in each layer"):
        entries[0].read({"kinds": ["full", "other"]})
    sizes = {"vocab_size": 8, "hidden_size": 8, "num_hidden_layers": 3, "num_attention_heads": 2}
    assert entries[0].write(llama.read_config({**sizes, "intermediate_size": 8})) == {"kinds": ["full"] * 3}


def test_a_family_that_reads_more_of_a_field_is_tried() -> None:
    """mistral4 reads of `rope_parameters` how queries grow with their position, which llama's entry does not."""
    known, pool = known_type("ministral3"), pool_of({"ministral3"})
    base = Built(known.values(known.small()), {}, {}, {})
    found = elements(adapted(FAMILIES["mistral"], pool, known, base), pool, known, base)
    assert any("attention.temperature_tuning.attn_scale" in said for said in found)


def test_the_channels_of_three_positions_fit_small_heads() -> None:
    sections = [changes["rope_parameters"]["mrope_section"] for changes in _ropes("qwen2_5_vl")]
    assert [2, 1, 1] in sections and not _ropes("llama")


def test_the_text_model_does_not_see_which_channels_rotate_by_which_position() -> None:
    """... as its family, which refuses what it does not know."""
    known = wrapped_type("qwen2_5_vl")
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
    assert "mrope_section" not in known.values({**known.small(), "rope_parameters": rope})["rope_parameters"]


def _ropes(model_type: str) -> list[dict[str, Any]]:
    return [changes for changes in known_type(model_type).repairs() if "rope_parameters" in changes]


@pytest.mark.slow
@pytest.mark.parametrize("model_type", ["gpt_neox", "gemma", "qwen2_5_vl", "gpt_bigcode"])
def test_a_hidden_family_whose_names_or_factors_are_told_by_logits_alone_is_found(model_type: str) -> None:
    found = adopt(model_type)
    assert found.report.verdict == "declared", (found.report.lacking, found.report.missing)


def test_sizes_that_follow_from_the_hidden_size_are_read_so() -> None:
    """... those that the class works out, and the width of an MLP that has no field."""
    known = known_type("opt")
    base = Built({"hidden_size": 48, "word_embed_proj_dim": 48, "ffn_dim": 56}, {}, {}, {})
    moved = Built({"hidden_size": 60, "word_embed_proj_dim": 60, "ffn_dim": 56}, {}, {}, {})
    hidden, width = Field("hidden_size", "hidden_size", int), Fixed("mlp.ffn_hidden_size", 192)
    family = replace(FAMILIES["llama"], fields=(hidden, width, Only("word_embed_proj_dim", 48)))
    move = Move("hidden_size", {"hidden_size": 60}, moved)
    found = list(following(move, known, base, family, ("word_embed_proj_dim", "ffn_dim", "hidden_size")))
    same = SameAs("word_embed_proj_dim", "hidden_size", "hidden_size", 768)
    assert found == [same, TimesHidden(None, ("hidden_size",), 4, 768)]
    meant = replace(family, fields=(hidden, width, Field("word_embed_proj_dim", "mlp.ffn_hidden_size", int)))
    assert same not in following(move, known, base, meant, ("word_embed_proj_dim",))
    assert same.read(base.values) == same.read({"hidden_size": 60}) == same.read({"word_embed_proj_dim": 768}) == {}
    with pytest.raises(CheckpointError, match="word_embed_proj_dim = 48; supported: null or 60, hidden_size"):
        same.read({**moved.values, "word_embed_proj_dim": 48})


def test_two_moves_whose_labels_are_cut_alike_are_told_apart() -> None:
    """The second is refused by name, so that nothing is asked of files without its defaults."""
    known, family = known_type("gemma3_text"), FAMILIES["gemma3_text"]
    arguments, base = known.working()
    rope = base.values["rope_parameters"]
    found = [
        changed_model(
            known,
            arguments,
            {"rope_parameters": {**rope, "sliding_attention": rope["sliding_attention"] | change}},
            base,
        )
        for change in ({"rope_theta": 3e3}, {"partial_rotary_factor": 0.5})
    ]
    assert found[0].label == found[1].label
    rows, culprit = proofs(family, FamilyDraft(family), known, arguments, base, found)
    assert [got for label, got, _ in rows if label == found[0].label] == ["same", "refused"] and not culprit


def test_a_class_without_numbers_of_experts_gets_small_ones() -> None:
    arguments, _ = known_type("dots1").working()
    assert (arguments["n_routed_experts"], arguments["n_shared_experts"]) == (8, 1)


def test_an_entry_that_misses_what_another_one_said_makes_no_family() -> None:
    """Recurrent mixers take the width of the model out of what the entries before said."""

    class Missing(OwnEntry):
        names = ("n",)

        def read(self, hf: Any) -> dict[str, Any]:
            raise KeyError("hidden_size")

    family = replace(FAMILIES["llama"], fields=(Missing(),))
    base = Built({"n": 1}, {}, {}, {})
    assert neutral(family, base) is family and outcome(family, base)[0] == "wrong"
