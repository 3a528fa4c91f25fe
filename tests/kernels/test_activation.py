"""Activations by name: values, probability weighting, and the names that exist."""

import pytest
import torch

from te_models.kernels.activation import ACTIVATIONS, activation, gated_activation

pytestmark = pytest.mark.usefixtures("each_backend")


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_gated_is_the_activation_times_the_other_half(name: str) -> None:
    x = torch.randn(5, 12, generator=torch.Generator().manual_seed(0))
    gate, up = x.chunk(2, -1)
    assert torch.equal(gated_activation(x, name), activation(gate, name) * up)


def test_known_values() -> None:
    x = torch.tensor([-2.0, 0.0, 3.0])
    expected = {
        "silu": [-0.238405844, 0.0, 2.857722380],
        "gelu": [-0.045500264, 0.0, 2.995950306],
        "gelu_tanh": [-0.045402306, 0.0, 2.996362607],
        "relu": [0.0, 0.0, 3.0],
        "squared_relu": [0.0, 0.0, 9.0],
        "sigmoid": [0.119202922, 0.5, 0.952574127],
        "quick_gelu": [-0.064341377, 0.0, 2.981928690],
    }
    assert set(expected) == set(ACTIVATIONS)
    for name, values in expected.items():
        # gelu: 1 + erf(x / sqrt(2)) cancels, so two last places of erf near 1 are 2 ** -23 times |x| / 2 each
        assert activation(x, name).tolist() == pytest.approx(values, rel=1e-6, abs=2 * 2.0**-23)


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("name", ["sigmoid", "quick_gelu"])
def test_the_formula_and_its_derivative(name: str, gated: bool) -> None:
    """In float64, gradient against differences; in bfloat16 rounded once (and once more by the gate's product)."""
    x = torch.randn(3, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64).requires_grad_()
    function = gated_activation if gated else activation
    act = {"sigmoid": torch.sigmoid, "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x)}[name]
    gate, up = x.chunk(2, -1) if gated else (x, torch.ones((), dtype=torch.float64))
    torch.testing.assert_close(function(x, name), act(gate) * up, rtol=1e-14, atol=0)
    assert torch.autograd.gradcheck(lambda x: function(x, name), x)
    half = x.detach().bfloat16()
    assert torch.equal(activation(half, name), act(half.float()).bfloat16())


def test_clamped_gate() -> None:
    x = torch.tensor([[9.0, -9.0, 1.0, 9.0, -9.0, 0.5]])
    gate, up = torch.tensor([7.0, -9.0, 1.0]), torch.tensor([7.0, -7.0, 0.5])
    got = gated_activation(x, clamp=7.0, alpha=1.702, up_offset=1.0)
    assert torch.allclose(got[0], gate * torch.sigmoid(1.702 * gate) * (up + 1.0), rtol=1e-6)


@pytest.mark.parametrize("backend", [None, "aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_probabilities_weight_rows(backend: str | None) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(4, 3, 10, generator=generator).requires_grad_()
    p = torch.rand(4, 3, generator=generator).requires_grad_()
    for function, plain in ((gated_activation, gated_activation(x, "gelu")), (activation, activation(x, "gelu"))):
        run = torch.compile(function, fullgraph=True, backend=backend) if backend else function
        y = run(x, "gelu", probabilities=p)
        assert torch.allclose(y, plain * p[..., None], rtol=1e-5, atol=1e-7)
        y.sum().backward()
        assert torch.allclose(p.grad, plain.sum(-1), rtol=1e-5, atol=1e-6)
        p.grad = None


def test_weighting_rounds_once_more_and_only_once() -> None:
    x = torch.randn(9, 8, generator=torch.Generator().manual_seed(0)).bfloat16()
    p = torch.rand(9, generator=torch.Generator().manual_seed(1))
    expected = (gated_activation(x).double() * p.double()[:, None]).to(torch.bfloat16)
    assert torch.equal(gated_activation(x, probabilities=p), expected)


def test_an_unknown_name_is_refused() -> None:
    for function in (activation, gated_activation):
        with pytest.raises(ValueError, match="'swish'; allowed: 'silu'"):
            function(torch.zeros(2, 2), "swish")
