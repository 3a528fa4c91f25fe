"""torch.export of whole models: batch and sequence stay dynamic, also in the saved program."""

from pathlib import Path

import pytest
import torch

from te_models import GPTModel, ModelOutput
from te_models.layers import autocast
from tests.build import VARIANTS, one_layer, token_ids
from tests.layers.matrix_recipes import NAMES, build_stored, fresh

SHAPES = ((1, 5), (3, 20), (2, 64))
SLOW = (("dense", False), ("moe", True))


def build(name: str, **options: object) -> GPTModel:
    torch.manual_seed(0)
    return GPTModel(one_layer(VARIANTS[name]), **options).eval()


def export(model: GPTModel, strict: bool = False) -> torch.export.ExportedProgram:
    batch, sequence = torch.export.Dim("batch", min=1, max=64), torch.export.Dim("sequence", min=2, max=64)
    shapes = {"input_ids": {0: batch, 1: sequence}, "labels": {0: batch, 1: sequence}}
    ids = token_ids(2, 9)
    return torch.export.export(model, (ids,), {"labels": ids}, dynamic_shapes=shapes, strict=strict)


@pytest.mark.parametrize(
    ("name", "strict"),
    [("moe", False), *(pytest.param(n, s, marks=pytest.mark.slow) for n, s in [("dense", True), *SLOW])],
)
def test_batch_and_sequence_are_dynamic(name: str, strict: bool, tmp_path: Path) -> None:
    model = build(name)
    program = export(model, strict)
    torch.export.save(program, tmp_path / "model.pt2")
    for run in (program.module(), torch.export.load(tmp_path / "model.pt2").module()):
        for batch, length in SHAPES:
            ids = token_ids(batch, length)
            got, expected = run(ids, labels=ids), model(ids, labels=ids)
            assert isinstance(got, ModelOutput) and torch.equal(got.logits, expected.logits)
            # an eager loss is summed a few rows at a time: at most 128 roundings
            torch.testing.assert_close(got.loss, expected.loss, rtol=128 * 2.0**-24, atol=0)
            if name == "moe":
                assert torch.equal(got.tokens_per_expert, expected.tokens_per_expert)


FAST = {("moe", "mxfp8", True)}
"""(model, recipe, weights stored quantized) that run on every change; the rest is slow."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "name", "stored"),
    [
        pytest.param(kind, name, stored, marks=() if (kind, name, stored) in FAST else pytest.mark.slow)
        for kind in ("dense", "moe")
        for name in NAMES[1:]
        for stored in (False, True)
    ],
)
def test_recipes_are_part_of_the_program(kind: str, name: str, stored: bool) -> None:
    model = build_stored(lambda: build(kind), name) if stored else build(kind)
    with torch.no_grad(), autocast(recipe=fresh(name)):
        program = export(model)
        for batch, length in SHAPES:
            ids = token_ids(batch, length)
            expected = model(ids, labels=ids)
            assert torch.equal(program.module()(ids, labels=ids).logits, expected.logits)
    ids = token_ids(2, 9)
    plain = model(ids, labels=ids).loss
    with torch.no_grad():
        exported = program.module()(ids, labels=ids).loss  # outside of the region: the recipe is in the program
    assert stored or exported != plain
