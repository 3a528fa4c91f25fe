"""Recipe state through torch.distributed.checkpoint, which loads only what a new model's state dict asks for."""

import copy
from pathlib import Path

import pytest
import torch
from torch import nn

import te_models.layers as te

if not torch.distributed.is_available():
    pytest.skip("this torch is built without distributed", allow_module_level=True)

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict

RECIPES = {
    "delayed": te.DelayedScaling(amax_history_len=3),
    "delayed, no history": te.DelayedScaling(amax_history_len=1),
    "mxfp8": te.MXFP8BlockScaling(),
    "nvfp4": te.NVFP4BlockScaling(),
    "by name": te.PerModuleRecipe(
        default=te.DelayedScaling(amax_history_len=4), rules=(("1", te.NVFP4BlockScaling()),)
    ),
}


def build(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    model = nn.Sequential(te.Linear(32, 32), te.Linear(32, 32))
    te.name_modules(model)
    return model


def step(model: nn.Module, recipe: te.Recipe, seed: int) -> list[torch.Tensor]:
    x = torch.randn(16, 32, generator=torch.Generator().manual_seed(seed)) * (1 + seed)
    model.zero_grad()
    with te.autocast(recipe=recipe):
        y = model(x)
    y.square().sum().backward()
    return [y.detach(), *(p.grad for p in model.parameters())]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
@pytest.mark.parametrize("name", RECIPES)
def test_a_run_goes_on_with_the_same_bits(name: str, tmp_path: Path) -> None:
    recipe, model, fresh = RECIPES[name], build(0), build(1)
    for i in range(2):
        step(model, recipe, i)
    dcp.save(get_model_state_dict(model), checkpoint_id=tmp_path)
    te.prepare_recipe_state(fresh, recipe)
    values = get_model_state_dict(fresh)
    dcp.load(values, checkpoint_id=tmp_path)
    set_model_state_dict(fresh, values)
    state = te.recipe_state(model)
    assert te.recipe_state(fresh).keys() == state.keys()
    assert all(torch.equal(value, state[key]) for key, value in te.recipe_state(fresh).items())
    for i in range(2, 4):
        torch.testing.assert_close(step(fresh, recipe, i), step(model, recipe, i), rtol=0, atol=0)


@pytest.mark.parametrize("name", RECIPES)
def test_preparing_changes_no_number(name: str) -> None:
    recipe, model = RECIPES[name], build(0)
    prepared = copy.deepcopy(model)
    te.prepare_recipe_state(prepared, recipe)
    assert bool(te.recipe_state(prepared)) == (name != "mxfp8")
    for i in range(2):
        torch.testing.assert_close(step(prepared, recipe, i), step(model, recipe, i), rtol=0, atol=0)
    keys = te.recipe_state(prepared).keys()
    te.prepare_recipe_state(prepared, recipe)  # in use already
    assert te.recipe_state(prepared).keys() == keys == te.recipe_state(model).keys()
    assert all(torch.equal(value, te.recipe_state(model)[key]) for key, value in te.recipe_state(prepared).items())
