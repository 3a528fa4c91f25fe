"""xIELU: its definition, its gradients, and what it does not go together with."""

from typing import Any

import pytest
import torch

from te_models import GPTModel
from te_models.config import ConfigError, MLPConfig
from te_models.model.build import Build
from te_models.model.xielu import XIELU


def test_it_is_the_definition_of_the_paper() -> None:
    """With its first values, a_p = a_n = 0.8 and b = 0.5; one rounding of the result in bfloat16."""
    x = torch.tensor([-3.0, -0.5, 0.0, 0.5, 3.0])
    expected = torch.where(x > 0, 0.8 * x * x + 0.5 * x, 0.8 * (torch.expm1(x) - x) + 0.5 * x)
    act = XIELU(Build())
    torch.testing.assert_close(act(x), expected, rtol=1e-5, atol=1e-6)
    assert torch.equal(act(x.bfloat16()), act(x.bfloat16().float()).bfloat16())


def test_its_numbers_are_trained_and_stored() -> None:
    act = XIELU(Build(params_dtype=torch.float64))
    act(torch.linspace(-2, 2, 7, dtype=torch.float64)).square().sum().backward()
    assert act.alpha_p.grad.abs() > 0 and act.alpha_n.grad.abs() > 0
    assert set(act.state_dict()) == {"alpha_p", "alpha_n", "beta", "eps"}


@pytest.mark.parametrize("changes", [{"gated": True}, {"gated": False, "clamp": 3.0}])
def test_a_gate_or_a_bound_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"mlp\.activation is 'xielu'; allowed: another one with gated or clamp"):
        MLPConfig(ffn_hidden_size=8, activation="xielu", **changes)


def test_inputs_in_fp8_are_those_of_other_activations() -> None:
    from tests.checkpoints.family_cases import make

    model = GPTModel.from_hf(make("apertus"))
    model.activation_func_fp8_input_store = True
    assert not model.activation_func_fp8_input_store
