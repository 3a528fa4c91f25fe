"""What `store_weights` leaves as it was: frozen weights, their attributes, weights that layers share."""

import pytest
import torch
from torch import nn

import te_models.layers as te
from tests.compare import refused


def test_frozen_weights_and_attributes_stay() -> None:
    model = nn.Sequential(te.Linear(64, 64), te.Linear(64, 64), te.GroupedLinear(2, 64, 64))
    model[0].weight.requires_grad_(False)
    model[1].weight.tensor_model_parallel = True
    model[2].weight.main_grad = main_grad = torch.zeros(2, 64, 64)
    te.store_weights(model, te.MXFP8BlockScaling())
    weights = [layer.weight for layer in model]
    assert all(isinstance(weight, nn.Parameter) for weight in weights)
    assert [weight.requires_grad for weight in weights] == [False, True, True]
    assert weights[1].tensor_model_parallel and weights[2].main_grad is main_grad


@pytest.mark.parametrize("preserve", [False, True])
def test_shared_weights_stay_shared(preserve: bool) -> None:
    model = nn.Sequential(te.Linear(64, 64), te.Linear(64, 64), te.Linear(64, 64))
    model[2].weight = model[0].weight
    te.store_weights(model, te.MXFP8BlockScaling(), preserve_high_precision_init_val=preserve)
    assert model[2].weight is model[0].weight is not model[1].weight and len(list(model.parameters())) == 5
    if preserve:
        assert model[2].weight.get_high_precision_init_val().shape == (64, 64)


def test_shared_weights_in_two_formats_are_refused() -> None:
    model = nn.Sequential(te.Linear(64, 64), te.Linear(64, 64))
    model[1].weight = model[0].weight
    te.name_modules(model)
    chosen = te.PerModuleRecipe(rules=(("0", te.MXFP8BlockScaling()),), default=te.NVFP4BlockScaling())
    refused(lambda: te.store_weights(model, chosen), "share a weight need one format")
