"""Which matrices a weight joins: those of the projections that its family stores one by one."""

import itertools
from collections import defaultdict

import pytest

from te_models.checkpoints import CheckpointError
from te_models.checkpoints.families import FAMILIES
from te_models.checkpoints.families.base.text_part import text_part
from te_models.checkpoints.mapping.blocks import joined, joined_blocks
from te_models.checkpoints.mapping.layout_ops import At
from te_models.config import ModelConfig
from tests.checkpoints import family_cases, hf_cases
from tests.checkpoints.hf_cases import transformers

CASES = {**family_cases.CASES, **hf_cases.CASES}


def read(case: str) -> tuple[str, ModelConfig]:
    family, options = CASES[case]
    if case in hf_cases.CASES:
        config = getattr(transformers, family)(**{**hf_cases.SMALL, **options})
    else:
        sizes = family_cases.GPT2_SIZES if family == "gpt2" else family_cases.SIZES
        config = transformers.AutoConfig.for_model(family, **{**sizes, **options})
    return config.model_type, FAMILIES[config.model_type].read_config(config.to_dict())


def test_files_store_whole_matrices_of_the_declaration() -> None:
    """In every form of every family: the rows below a name are of whole matrices that the weight joins, and a weight
    that joins none has one name."""
    seen, apart = set(), set()
    for case in CASES:
        family, config = read(case)
        seen.add(family)
        for form in FAMILIES[family].forms:
            namespace = FAMILIES[family].namespace(config, form)
            rows = defaultdict(set)
            for link in namespace.links:
                if len(link.box) > 1 and not link.name.endswith(("bias", "conv_weight")):  # no matrices
                    its = link.box[-2]
                    rows[link.name, link.box[:-2], link.stored].update(range(its.start, its.stop))
            for (name, _, stored), its in rows.items():
                shape = namespace.canonical[name]
                blocks = tuple(joined_blocks(config, name, shape).values()) or (shape[-2],)
                edges = (0, *itertools.accumulate(blocks))
                inside = [len(its.intersection(range(*edge))) for edge in itertools.pairwise(edges)]
                assert all(n in (0, size) for n, size in zip(inside, blocks, strict=True)), (case, form, stored, inside)
                if 0 in inside:
                    apart.add(name.partition("layers.")[2].partition(".")[2])
    unseen = {name for name, family in FAMILIES.items() if text_part(family) is None} - seen
    assert unseen <= {"kimi_k2", "glm5_next"}, sorted(unseen)  # with the names of deepseek_v3, and of a test of its own
    assert apart >= {"self_attention.linear_qkv.weight", "self_attention.linear_qkv_down.weight"}
    assert apart >= {"mlp.linear_fc1.weight", "mlp.experts.linear_fc1.weight", "mixer.linear_in.weight"}


def test_a_weight_map_with_another_number_of_parts() -> None:
    _, config = read("gemma")
    with pytest.raises(
        CheckpointError, match=r"linear_fc1.weight joins matrices of \[48, 48\] rows; the weight map has 3"
    ):
        joined(config, "decoder.layers.0.mlp.linear_fc1.weight", *map(At, "abc"))
    with pytest.raises(CheckpointError, match=r"this model has no parameter decoder.layers.9.mlp.linear_fc1.weight"):
        joined(config, "decoder.layers.9.mlp.linear_fc1.weight", At("a"))
