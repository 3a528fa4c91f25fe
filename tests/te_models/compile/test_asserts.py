"""What a graph is given wrong, it says when it runs: compiled and exported."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from te_models import GPTModel
from te_models.layers import GroupedLinear, autocast, recipe
from tests.build import one_layer, tiny, token_ids

WRONG = ([20, 13, 0], [40, -8, 0])
"""Rows per group of 32 rows: more than there are, and a negative number."""


def compiled(module: nn.Module, *example: Tensor) -> Callable:
    return torch.compile(module, fullgraph=True, backend="aot_eager")


def exported(module: nn.Module, *example: Tensor) -> Callable:
    with torch.no_grad():
        return torch.export.export(module, example, strict=False).module()


@pytest.mark.sentinels("exported-mxfp8", "compiled-None", "exported-None")
@pytest.mark.parametrize("name", [None, "mxfp8"])
@pytest.mark.parametrize("make", [compiled, exported])
def test_splits(make: Callable, name: str | None) -> None:
    x, right = torch.randn(32, 64), torch.tensor([20, 0, 12])
    layer = GroupedLinear(3, 64, 64)
    with torch.no_grad(), autocast(enabled=name is not None, recipe=name and recipe(name)):
        run = make(layer, x, right)
        torch.testing.assert_close(run(x, right), layer(x, right))
        run(x, torch.tensor([0, 0, 3]))  # rows of no group
        for splits in WRONG:
            with pytest.raises(RuntimeError, match="m_splits are wrong; allowed: numbers from 0 on that add up to at"):
                run(x, torch.tensor(splits))


@pytest.mark.parametrize("splits", WRONG)
def test_splits_eagerly(splits: list[int]) -> None:
    with pytest.raises(ValueError, match=r"m_splits is \[.*\]; allowed: numbers from 0 on that add up to at most 32"):
        GroupedLinear(3, 64, 64)(torch.randn(32, 64), splits)


@pytest.mark.parametrize("make", [compiled, exported])
def test_token_ids(make: Callable) -> None:
    model = GPTModel(one_layer(tiny())).eval()
    ids = token_ids(2, 9)
    with torch.no_grad():
        run = make(model, ids)
        run(ids)
        for wrong in (-1, model.config.vocab_size):
            ids[1, 3] = wrong
            with pytest.raises(RuntimeError, match="a token id or position is outside of its table"):
                run(ids)


def test_a_batch_that_was_not_exported() -> None:
    model = GPTModel(one_layer(tiny())).eval()
    shapes = ({0: torch.export.Dim("batch", min=1, max=4)},)
    with torch.no_grad():
        run = torch.export.export(model, (token_ids(2, 9),), dynamic_shapes=shapes, strict=False).module()
        run(token_ids(4, 9))
        with pytest.raises(Exception, match=r"input_ids.*\[0\] <= 4"):
            run(token_ids(5, 9))
