"""Recipes that go by layers' names, compiled: blocks share graphs, however many layers there are."""

import copy
import pickle

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

import te_models.layers as te
from te_models import GPTModel
from te_models.layers.quantizer import Float8CurrentScalingQuantizer, IdentityQuantizer, MXFP8Quantizer, Quantizer
from tests.build import tiny, token_ids

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # of the compiler
LAYERS = 9  # more than torch compiles of one function before it gives up


def alike(role: te.QuantizerRole) -> Quantizer:
    return MXFP8Quantizer()


def by_name(role: te.QuantizerRole) -> Quantizer:
    return IdentityQuantizer() if ".layers.3." in role.name and role.name.endswith("linear_proj") else MXFP8Quantizer()


CASES = {
    "first_last": (lambda: te.first_last_layers_bf16(te.MXFP8BlockScaling(), LAYERS), 2),
    "rules": (
        lambda: te.PerModuleRecipe(
            default=te.MXFP8BlockScaling(), rules=(("*.linear_fc2", te.Float8CurrentScaling()),)
        ),
        1,
    ),
    "by_name": (lambda: te.CustomRecipe(qfactory=by_name), 2),
}
"""A recipe, and how many different layers a dense model has under it."""


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_layers_that_run_alike_share_a_graph(case: str) -> None:
    make, kinds = CASES[case]
    torch.manual_seed(0)
    model = GPTModel(tiny(num_layers=LAYERS), params_dtype=torch.bfloat16)
    plain, graphs, ids = copy.deepcopy(model), CompileCounterWithBackend("eager"), token_ids(2, 16)
    for layer in model.decoder.layers:
        layer.compile(fullgraph=True, dynamic=True, backend=graphs)
    for tokens in (ids, ids[:, :12]):
        with te.autocast(recipe=make()):  # new and, but for custom recipes, equal: nothing is compiled again
            loss = model(tokens, labels=tokens, return_logits=False).loss
            expected = plain(tokens, labels=tokens, return_logits=False).loss
        loss.backward()
        assert torch.equal(loss, expected)
    assert graphs.frame_count == kinds
    mine, theirs = te.recipe_report(model), te.recipe_report(plain)
    assert str(mine) == str(theirs)


def test_custom_recipes_nested_in_a_region_are_each_in_force() -> None:
    layer, x = te.Linear(32, 32, name="a"), torch.randn(16, 32)
    outer, inner = (
        te.CustomRecipe(qfactory=alike),
        te.CustomRecipe(qfactory=lambda role: Float8CurrentScalingQuantizer()),
    )
    with te.autocast(recipe=outer):
        before = layer(x)
        with te.autocast(recipe=inner):
            within = layer(x)
        assert torch.equal(layer(x), before)
    with te.autocast(recipe=te.MXFP8BlockScaling()):
        assert torch.equal(layer(x), before)
    with te.autocast(recipe=te.Float8CurrentScaling(fp8_format=te.Format.E4M3)):
        assert torch.equal(layer(x), within) and not torch.equal(within, before)


def test_a_name_given_inside_a_region_counts() -> None:
    layer, x = torch.nn.Sequential(te.Linear(32, 32)), torch.randn(16, 32)
    plain = layer(x)
    with te.autocast(recipe=te.PerModuleRecipe(default=te.MXFP8BlockScaling(), rules=(("0", "bf16"),))):
        with pytest.raises(ValueError, match="this layer has none"):
            layer(x)
        te.name_modules(layer)
        assert torch.equal(layer(x), plain)
        built_inside = te.Linear(32, 32, name="1")
        assert not torch.equal(built_inside(x), torch.nn.functional.linear(x, built_inside.weight, built_inside.bias))


def test_a_factory_that_knows_other_layers_only_fails_where_one_runs() -> None:
    def known(role: te.QuantizerRole) -> Quantizer:
        return {"mine": MXFP8Quantizer()}[role.name]

    mine, other, x = te.Linear(32, 32, name="mine"), te.Linear(32, 32, name="other"), torch.randn(16, 32)
    with te.autocast(recipe=te.CustomRecipe(qfactory=known)):
        mine(x)
        with pytest.raises(KeyError, match="other"):
            other(x)
    pickle.loads(pickle.dumps(mine)), copy.deepcopy(mine)  # the recipe, whose function has no pickle, is not in there
