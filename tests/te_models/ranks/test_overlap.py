"""Shared experts that compute while rows of the others travel: each collective is waited for once, and the numbers are
those without."""

from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from te_models import GPTModel, ModelConfig
from te_models.model.mlp import SharedExperts
from te_models.model.moe import MoELayer
from tests.build import VARIANTS, token_ids
from tests.ranks import on_ranks

PADDED = VARIANTS["moe_shared"].moe.replace(
    moe_expert_capacity_factor=1.0, moe_pad_expert_input_to_capacity=True, shared_expert_gate=False
)
MODELS = {"moe_shared": VARIANTS["moe_shared"], "padded": VARIANTS["moe_shared"].replace(moe=PADDED)}


def travelling() -> int:
    """Return how many collectives have been started and not waited for."""
    return torch._C._distributed_c10d._get_work_registry_size()


def beside(config: ModelConfig, checkpointed: bool, overlaps: bool) -> tuple[GPTModel, Tensor]:
    """Return the model of this rank behind a backward pass, and its loss."""
    torch.manual_seed(0)
    model = GPTModel(config, ep_group=dist.group.WORLD, activation_checkpointing=checkpointed)
    for layer in model.modules():
        if isinstance(layer, MoELayer):
            layer.moe_shared_expert_overlap = overlaps
    ids = token_ids(2, 12, seed=dist.get_rank())
    loss = model(ids, labels=ids, return_logits=False).loss
    assert travelling() == 0
    loss.backward()
    assert travelling() == 0
    return model, loss.detach()


def as_without(config: ModelConfig) -> None:
    """The bits of a forward pass; gradients to the order of sums."""
    for checkpointed in (False, True):
        (model, loss), (plain, expected) = (beside(config, checkpointed, overlaps) for overlaps in (True, False))
        assert torch.equal(loss, expected)
        for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
            error = (p.grad - q.grad).abs().max() / q.grad.abs().max().clamp(min=1e-3)
            assert error <= 1e-6, (name, float(error))


def computes_meanwhile() -> None:
    """The shared expert runs, forward and backward, while a collective is on its way; one that fails leaves none."""
    seen, forward = [], SharedExperts.forward

    def noted(self: SharedExperts, x: Tensor) -> Tensor:
        y = forward(self, x)
        seen.append(travelling())
        y.register_hook(lambda _: seen.append(travelling()))
        return y

    with mock.patch.object(SharedExperts, "forward", noted):
        beside(MODELS["moe_shared"], False, True)
    assert seen and min(seen) == 1, seen
    failing = mock.patch.object(SharedExperts, "forward", side_effect=RuntimeError("no memory"))
    with failing, pytest.raises(RuntimeError, match="no memory"):
        beside(MODELS["moe_shared"], False, True)
    assert travelling() == 0


@on_ranks(2)
@pytest.mark.parametrize("name", MODELS)
def test_two_ranks_have_the_numbers_without(name: str) -> None:
    as_without(MODELS[name])


@on_ranks(4)
@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_four_ranks_have_the_numbers_without(name: str) -> None:
    as_without(MODELS[name])


@on_ranks(2)
def test_a_shared_expert_computes_meanwhile() -> None:
    computes_meanwhile()
