"""The modules that users name, and the layers of the core that they are built on."""

import copy
import inspect
from collections.abc import Callable

import pytest
import torch
from torch import nn

import te_models.layers as te
from te_models.layers.attention.dot_product_attention import DotProductAttention
from te_models.layers.module.grouped_linear import GroupedLinear
from te_models.layers.module.layernorm_linear import LayerNormLinear
from te_models.layers.module.linear import Linear
from te_models.layers.module.norm import LayerNorm, RMSNorm
from te_models.layers.module.options import ParameterOptions, PrecedingNormOptions, WeightGradients

PAIRS: list[tuple[type[nn.Module], type[nn.Module], tuple]] = [
    (Linear, te.Linear, (32, 16)),
    (LayerNormLinear, te.LayerNormLinear, (32, 16)),
    (GroupedLinear, te.GroupedLinear, (2, 32, 16)),
    (RMSNorm, te.RMSNorm, (32,)),
    (LayerNorm, te.LayerNorm, (32,)),
    (DotProductAttention, te.DotProductAttention, (2, 16)),
]
named = pytest.mark.parametrize(("core", "users", "sizes"), PAIRS, ids=lambda value: getattr(value, "__name__", ""))


@named
def test_a_layer_of_the_core_is_an_instance_of_the_class_that_users_name(
    core: type[nn.Module], users: type[nn.Module], sizes: tuple
) -> None:
    class Own(users):
        pass

    assert isinstance(core(*sizes), users) and issubclass(core, users)
    assert isinstance(users(*sizes), core) and not isinstance(nn.Linear(2, 2), users)
    assert isinstance(Own(*sizes), users) and not isinstance(core(*sizes), Own) and not isinstance(users(*sizes), Own)
    assert core.__name__ == users.__name__ and isinstance(copy.deepcopy(users(*sizes)), users)


@named
def test_the_constructor_of_the_core_is_short(core: type[nn.Module], users: type[nn.Module], sizes: tuple) -> None:
    assert len(inspect.signature(core).parameters) <= 10
    with pytest.raises(TypeError, match="sequence_parallel"):
        core(*sizes, sequence_parallel=None)


def run(layer: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    x = x.clone().requires_grad_()
    splits = (torch.tensor([3, 5]),) if isinstance(layer, GroupedLinear) else ()
    with te.autocast(recipe=te.MXFP8BlockScaling()):
        y = layer(x, *splits)
    y.sum().backward()
    assert x.grad is not None
    return [y.detach(), x.grad, *(p.grad for p in layer.parameters() if p.grad is not None)]


BUILT: list[tuple[Callable[[], nn.Module], Callable[[], nn.Module]]] = [
    (
        lambda: Linear(64, 32, False, parameters=ParameterOptions(torch.bfloat16, init_method=nn.init.ones_)),
        lambda: te.Linear(64, 32, False, params_dtype=torch.bfloat16, init_method=nn.init.ones_),
    ),
    (
        lambda: LayerNormLinear(64, 32, norm=PrecedingNormOptions("RMSNorm", 1e-3, True, "weight_first")),
        lambda: te.LayerNormLinear(
            64, 32, 1e-3, normalization="RMSNorm", zero_centered_gamma=True, cast_order="weight_first"
        ),
    ),
    (
        lambda: GroupedLinear(2, 64, 32, single_grouped_weight=False, gradients=WeightGradients(False, False, True)),
        lambda: te.GroupedLinear(2, 64, 32, single_grouped_weight=False, save_original_input=True),
    ),
]


@pytest.mark.parametrize("pair", BUILT, ids=["linear", "norm and linear", "experts"])
def test_both_are_the_same_layer(pair: tuple[Callable[[], nn.Module], Callable[[], nn.Module]]) -> None:
    own, theirs = (build() for build in pair)
    assert own.state_dict().keys() == theirs.state_dict().keys()
    theirs.load_state_dict(own.state_dict())
    x = torch.randn(8, 64, dtype=next(own.parameters()).dtype)
    torch.testing.assert_close(run(own, x), run(theirs, x), rtol=0, atol=0)
    assert theirs.fp8 and theirs.fp8_meta["recipe"] == te.MXFP8BlockScaling()
    assert not hasattr(own, "fp8_meta")
