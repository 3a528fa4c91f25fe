"""The order in which configurations, recipes and options are written down is no reason to compile again."""

from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters
from torch._inductor.utils import fresh_cache

from te_models import GPTModel, ModelConfig
from te_models.layers import MXFP8BlockScaling, PerModuleRecipe, Recipe, autocast, recipe
from tests.build import one_layer, tiny_moe, token_ids

CONFIG = one_layer(tiny_moe(aux_loss_coeff=0.01)).to_dict()
RECIPES = {
    "mxfp8": recipe("mxfp8").to_dict(),
    "delayed": recipe("delayed", amax_history_len=4).to_dict(),
    "per_module": PerModuleRecipe(
        default=MXFP8BlockScaling(), rules=(("*.linear_proj", "bf16"), ("*.linear_qkv", recipe("current")))
    ).to_dict(),
}


def backwards(values: Any) -> Any:
    """The same objects with their keys in the opposite order."""
    if isinstance(values, dict):
        return {key: backwards(values[key]) for key in reversed(values)}
    return [backwards(value) for value in values] if isinstance(values, list) else values


@torch.no_grad()
def call(order: Any, recipe_values: dict[str, Any], backend: Any) -> float:
    """Compile a new model from dictionaries in this order, call it, and return its loss."""
    torch.manual_seed(0)
    model = GPTModel(ModelConfig.from_dict(order(CONFIG)))
    ids = token_ids(2, 20)
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    with autocast(recipe=Recipe.from_dict(order(recipe_values))):
        return compiled(ids, **order({"labels": ids, "return_logits": False})).loss.item()


# the last one has the others' parts
@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "per_module" else pytest.mark.slow) for name in RECIPES]
)
def test_one_graph_serves_every_order(name: str) -> None:
    counter = CompileCounterWithBackend("eager")
    losses = {call(order, RECIPES[name], counter) for order in (dict, backwards)}
    assert len(losses) == 1 and counter.frame_count == 1


@pytest.mark.slow
def test_a_cache_on_disk_finds_every_order() -> None:
    """Of a process that starts anew, but for its cache."""
    with fresh_cache():
        call(dict, RECIPES["mxfp8"], "inductor")
        torch._dynamo.reset()
        counters.clear()
        call(backwards, RECIPES["mxfp8"], "inductor")
    found = counters["inductor"]
    assert (found["fxgraph_cache_hit"], found["fxgraph_cache_miss"]) == (1, 0), dict(found)
