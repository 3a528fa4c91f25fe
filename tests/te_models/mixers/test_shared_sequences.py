"""Sequences that ranks share: states and the edges of convolutions travel, and every rule and every mixer is that of
one rank."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from te_models.config import LightningConfig
from te_models.kernels.gated_delta import gated_delta_rule, l2_normed
from te_models.kernels.linear_attention import linear_attention
from te_models.kernels.short_convolution import short_convolution
from te_models.kernels.state_space import selective_scan, state_space_scan
from te_models.layers.distributed.context_parallel import context_shard, own_positions
from te_models.model.mixers import shared_sequence
from tests.build import token_ids
from tests.ranks import on_ranks
from tests.te_models.mixers.test_features import MIXERS, model_of

LENGTH = 48


def near(a: torch.Tensor, b: torch.Tensor, bound: float) -> bool:
    return bool((a - b).abs().max() <= bound * b.abs().max())


DOCUMENTS = torch.tensor([[0] * 12 + [1] * 19 + [2] * 17, [3] * 7 + [4] * 1 + [3] * 33 + [-1] * 7])
"""Of which one ends where a chunk does, and one number comes again."""


OF_DECAYS = (".A_log", ".dt_bias", ".decay.weight", ".decay_down.weight")


def size_of(name: str, grads: dict[str, Tensor]) -> Tensor:
    """Return what the rounding of a parameter's gradient is relative to: its largest number; of those that make decays,
    the largest of their mixer.

    What the log of a decay gets is what queries give to the states behind it less what keys give: a difference of sums
    that is hundreds of times smaller than the sums, whose rounding it has. One rank in float32 is as far from float64.
    """
    own = name.rpartition(".mixer.")[0] + ".mixer."
    names = [n for n in grads if n.startswith(own)] if name.endswith(OF_DECAYS) else [name]
    return torch.stack([grads[n].abs().max() for n in names]).max()


def sequences_are_as_on_one_rank(name: str) -> None:
    """Without padding, padded on the left, and with documents, in float32; without padding in float64, too, in which
    models compute all but decays and skips. name: of a model, and perhaps how its attention reaches keys."""
    name, _, way = name.partition(" by ")
    ranks, ids, wrong = dist.get_world_size(), token_ids(2, LENGTH), []
    whole, shared = model_of(name).train(), model_of(name).train()
    shared.set_context_parallel_group(dist.group.WORLD, way or "all_gather")
    padded = torch.ones_like(ids)
    padded[0, :14] = 0
    every = torch.ones(2, LENGTH, dtype=torch.bool)
    for options, seen, bound in (
        ({}, every, 3e-5),
        ({"attention_mask": padded}, padded.bool(), 3e-5),
        ({"document_ids": DOCUMENTS}, DOCUMENTS >= 0, 3e-5),
        ({}, every, 5e-6),
    ):
        if bound == 5e-6:
            whole, shared = whole.double(), shared.double()
        whole.zero_grad()
        shared.zero_grad()
        expected = whole(ids, labels=ids, **options)
        expected.loss.backward()
        found = shared(ids, labels=ids, **options)
        found.loss.backward()
        if not (near(found.loss, expected.loss, 1e-6) and near(found.logits[seen], expected.logits[seen], 1e-5)):
            wrong.append("logits")
        grads = {key: p.grad for key, p in whole.named_parameters()}
        for key, p in shared.named_parameters():
            dist.all_reduce(p.grad)
            error = (p.grad / ranks - grads[key]).abs().max() / size_of(key, grads)
            wrong += [] if error <= bound else [(key, bound, float(error))]
    assert not wrong, wrong
    if ranks == 4 and not isinstance(MIXERS[name], LightningConfig):  # which reads no token before a chunk
        with pytest.raises(ValueError, match="of the 8 chunks of a sequence that ranks share has 1 tokens; allowed"):
            shared(token_ids(1, 8), labels=token_ids(1, 8))


def delta(decays: tuple[int, ...]) -> tuple[Any, Any, list[Tensor], list[Tensor]]:
    q, k = (l2_normed(torch.randn(2, LENGTH, 2, 5)) for _ in "qk")
    v, g = torch.randn(2, LENGTH, 4, 3), -torch.rand(2, LENGTH, 4, *decays)
    each = [q, k, v, g, torch.rand(2, LENGTH, 4)]
    return gated_delta_rule, shared_sequence.shared_delta_rule, each, []


def scan() -> tuple[Any, Any, list[Tensor], list[Tensor]]:
    x, dt, B, C = (torch.randn(2, LENGTH, *n) for n in ((4, 3), (4,), (2, 5), (2, 5)))
    each, whole = [x, dt.abs(), B, C], [-torch.rand(4), torch.randn(4)]

    def ordered(rule: Any) -> Any:
        return lambda x, dt, B, C, A, D, *rest, **named: rule(x, dt, A, B, C, D, *rest, **named)

    return ordered(state_space_scan), ordered(shared_sequence.shared_state_space_scan), each, whole


def lightning() -> tuple[Any, Any, list[Tensor], list[Tensor]]:
    q, k, v = (torch.randn(2, LENGTH, *n) for n in ((2, 5), (2, 5), (4, 3)))
    return linear_attention, shared_sequence.shared_linear_attention, [q, k, v, -torch.rand(2, LENGTH, 4)], []


def selection() -> tuple[Any, Any, list[Tensor], list[Tensor]]:
    x, dt, B, C = (torch.randn(2, LENGTH, n) for n in (4, 4, 3, 3))

    def ordered(rule: Any) -> Any:
        return lambda x, dt, B, C, A, D, *rest, **named: rule(x, dt, A, B, C, D, *rest, **named)

    whole = [-torch.rand(4, 3), torch.randn(4)]
    return ordered(selective_scan), ordered(shared_sequence.shared_selective_scan), [x, dt.abs(), B, C], whole


def convolution() -> tuple[Any, Any, list[Tensor], list[Tensor]]:
    def ordered(rule: Any, **silu: str) -> Any:
        return lambda x, w, b, *rest, **named: rule(x, w, b, *(() if silu else ("silu",)), *rest, **silu, **named)

    whole = [torch.randn(7, 4), torch.randn(7)]
    rules = ordered(short_convolution, activation="silu"), ordered(shared_sequence.shared_convolution)
    return *rules, [torch.randn(2, LENGTH, 7)], whole


RULES: dict[str, Callable[[], tuple[Any, Any, list[Tensor], list[Tensor]]]] = {
    "delta rule": partial(delta, ()),
    "delta rule by channel": partial(delta, (5,)),
    "scan": scan,
    "lightning attention": lightning,
    "selective scan": selection,
    "convolution": convolution,
}


def rules_are_as_on_one_rank(name: str) -> None:
    """Forward and backward, in float32 and float64."""
    shard, wrong = context_shard(dist.group.WORLD), []
    for dtype, bound in ((torch.float32, 1e-6), (torch.float64, 1e-13)):
        for documents in (None, DOCUMENTS):
            torch.manual_seed(0)
            rule, shared, each, whole = RULES[name]()
            inputs = [x.to(dtype).requires_grad_() for x in (*each, *whole)]
            dy = torch.randn(2, LENGTH, *rule(*inputs)[0].shape[2:], dtype=dtype)
            y, _ = rule(*inputs, documents=documents)
            wanted = torch.autograd.grad(y, inputs, dy)
            own = [own_positions(x, shard) for x in inputs[: len(each)]]
            found = shared(*own, *inputs[len(each) :], documents, shard)
            if (found - own_positions(y, shard)).abs().max() > 2 * bound * y.abs().max():
                wrong.append((dtype, documents is None, "y"))
            got = torch.autograd.grad(found, inputs, own_positions(dy, shard))
            for n, (a, b) in enumerate(zip(got, wanted, strict=True)):
                dist.all_reduce(a)
                if not near(a, b, 4 * bound):  # reported below: other ranks wait for this one's sums
                    wrong.append((dtype, documents is None, n, float((a - b).abs().max() / b.abs().max())))
    assert not wrong, wrong


WAYS = [f"{name} by {way}" for name in ("mamba2", "by_channel", "in_shared_blocks") for way in ("p2p", "a2a")]
"""Mixers beside attention that reaches keys in other ways than all-gather."""


@on_ranks(2)
@pytest.mark.sentinels("mamba2", "mamba2 by p2p")
@pytest.mark.parametrize("name", [*MIXERS, *WAYS])
def test_two_ranks_share_the_sequences_of_a_mixer(name: str) -> None:
    sequences_are_as_on_one_rank(name)


@on_ranks(2)
@pytest.mark.sentinels("delta rule", "selective scan")
@pytest.mark.parametrize("name", RULES)
def test_two_ranks_share_the_sequences_of_a_rule(name: str) -> None:
    rules_are_as_on_one_rank(name)


@on_ranks(4)
@pytest.mark.slow
@pytest.mark.parametrize("name", [*MIXERS, *WAYS, *RULES])
def test_four_ranks_share_sequences(name: str) -> None:
    (rules_are_as_on_one_rank if name in RULES else sequences_are_as_on_one_rank)(name)
