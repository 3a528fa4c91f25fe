"""Hyper-connections equal transformers' in values and gradients; the mixing matrix adds up to one both ways."""

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from te_models.kernels.hyper_connections import add_to_lanes, collapsed, mixing_of, read_weights

M, H, EPS, NORM_EPS, ITERATIONS = 4, 24, 1e-6, 1e-5, 20


def parts(rows: int, scales: int) -> list[Tensor]:
    torch.manual_seed(0)
    lanes, weight, bias = torch.randn(2, 5, M, H), 0.2 * torch.randn(rows, M * H), torch.randn(rows)
    return [t.requires_grad_() for t in (lanes, weight, bias, 1 + torch.rand(scales))]


def sublayer(x: Tensor) -> Tensor:
    return torch.tanh(x) * 3


def ours(lanes: Tensor, weight: Tensor, bias: Tensor, scale: Tensor) -> Tensor:
    mixing = mixing_of(lanes, weight, bias, scale, iterations=ITERATIONS, eps=EPS, norm_eps=NORM_EPS)
    return add_to_lanes(lanes, sublayer(collapsed(lanes, mixing.read)), mixing)


def test_a_sublayer_is_that_of_transformers() -> None:
    pytest.importorskip("transformers")
    from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4HyperConnection, DeepseekV4HyperHead

    config = SimpleNamespace(hc_mult=M, hc_sinkhorn_iters=ITERATIONS, hc_eps=EPS, rms_norm_eps=NORM_EPS, hidden_size=H)
    theirs, head = DeepseekV4HyperConnection(config), DeepseekV4HyperHead(config)
    inputs = parts(M * (2 + M), 3)
    theirs.fn, theirs.base, theirs.scale = (torch.nn.Parameter(t.detach().clone()) for t in inputs[1:])
    lanes = inputs[0].detach().clone().requires_grad_()
    write, carry, x = theirs(lanes)
    wanted = write[..., None] * sublayer(x)[..., None, :] + carry.mT @ lanes
    found = ours(*inputs)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)
    dy = torch.randn_like(found)
    of_theirs = torch.autograd.grad(wanted, [lanes, theirs.fn, theirs.base, theirs.scale], dy)
    torch.testing.assert_close(torch.autograd.grad(found, inputs, dy), of_theirs, rtol=1e-4, atol=1e-5)
    lanes, *rest = parts(M, 1)
    head.hc_fn, head.hc_base, head.hc_scale = (torch.nn.Parameter(t.detach().clone()) for t in rest)
    one = collapsed(lanes, read_weights(lanes, *rest, eps=EPS, norm_eps=NORM_EPS))
    torch.testing.assert_close(one, head(lanes), rtol=1e-5, atol=1e-6)


def test_lanes_carry_on_what_they_are_together() -> None:
    lanes, *rest = parts(M * (2 + M), 3)
    mixing = mixing_of(lanes, *rest, iterations=200, eps=EPS, norm_eps=NORM_EPS)
    ones = torch.ones(2, 5, M)
    torch.testing.assert_close(mixing.carry.sum(-1), ones, rtol=0, atol=1e-3)
    torch.testing.assert_close(mixing.carry.sum(-2), ones, rtol=0, atol=1e-5)
    silent = add_to_lanes(lanes, torch.zeros(2, 5, H), mixing)
    torch.testing.assert_close(silent.sum(-2), lanes.sum(-2), rtol=1e-2, atol=1e-2)


def test_low_precision_lanes_are_mixed_by_float32_numbers() -> None:
    lanes, *rest = parts(M * (2 + M), 3)
    low = ours(lanes.bfloat16(), *(t.bfloat16() for t in rest))
    assert low.dtype == torch.bfloat16
    torch.testing.assert_close(low.float(), ours(lanes, *rest), rtol=5e-2, atol=8e-2)
    exact = [t.detach().double().requires_grad_() for t in parts(M * (2 + M), 3)]
    assert torch.autograd.gradcheck(ours, exact, fast_mode=True)


@pytest.mark.slow
def test_a_graph_computes_the_same() -> None:
    inputs = parts(M * (2 + M), 3)
    graph = torch.compile(ours, fullgraph=True, backend="aot_eager")
    found, wanted = (torch.autograd.grad(f(*inputs).square().sum(), inputs) for f in (graph, ours))
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)
