"""Error messages name a tensor by its shape and dtype, and never print its values."""

import contextlib
import enum
import inspect
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import te_models.layers as te
from te_models.suggestions import shown
from tests.layers.te.test_signatures import ours, theirs

WRONG = torch.arange(24.0).view(2, 3, 4) + 0.5
PRINTED = ("tensor(", "0.5000", "[[")
NEEDED: dict[str, dict[str, Any]] = {
    "DotProductAttention": {"num_attention_heads": 2, "kv_channels": 8},
    "GroupedLinear": {"num_gemms": 2, "in_features": 8, "out_features": 8},
    "LayerNorm": {"normalized_shape": 8},
    "LayerNormLinear": {"in_features": 8, "out_features": 8},
    "LayerNormMLP": {"hidden_size": 8, "ffn_hidden_size": 16},
    "Linear": {"in_features": 8, "out_features": 8},
    "MultiheadAttention": {"hidden_size": 8, "num_attention_heads": 2},
    "RMSNorm": {"normalized_shape": 8},
    "TransformerLayer": {"hidden_size": 8, "ffn_hidden_size": 16, "num_attention_heads": 2},
    "ops.BasicLinear": {"in_features": 8, "out_features": 8},
    "ops.Linear": {"in_features": 8, "out_features": 8},
    "ops.GroupedLinear": {"num_groups": 2, "in_features": 8, "out_features": 8},
    "ops.Bias": {"size": 8},
    "ops.LayerNorm": {"normalized_shape": 8},
    "ops.RMSNorm": {"normalized_shape": 8},
    "ops.ConstantScale": {"scale": 2.0},
    "recipe.CustomRecipe": {"qfactory": lambda role: te.IdentityQuantizer()},
    "optimizers.FusedAdam": {"params": [torch.nn.Parameter(torch.ones(2))]},
    "optimizers.FusedSGD": {"params": [torch.nn.Parameter(torch.ones(2))], "lr": 0.1},
    "moe_permute": {"inp": torch.ones(4, 8), "routing_map": torch.ones(4, 2, dtype=torch.bool)},
    "fused_topk_with_score_function": {
        "logits": torch.ones(4, 8), "topk": 2, "use_pre_softmax": False, "num_groups": None, "group_topk": None,
        "scaling_factor": None, "score_function": "softmax", "expert_bias": None,
    },
}  # fmt: skip


def calls() -> Iterator[tuple[str, Callable[..., Any], dict[str, Any]]]:
    """Yield (what, function, arguments) with a wrong tensor for one argument."""
    for name, methods in theirs().items():
        with contextlib.suppress(ModuleNotFoundError):
            function: Any = ours(name)
        if not callable(function) or (isinstance(function, enum.EnumType)):
            continue
        names = {parameter[0] for parameters in methods.values() for parameter in parameters}
        with contextlib.suppress(ValueError, TypeError):
            names |= inspect.signature(function).parameters.keys()
        for argument in sorted(names - {"self", "args", "kwargs", "arguments", "options"}):
            yield f"{name}({argument})", function, NEEDED.get(name, {}) | {argument: WRONG}


def test_no_message_prints_a_tensor() -> None:
    found, refused = [], 0
    for what, function, arguments in calls():
        try:
            with warnings.catch_warnings(action="ignore"):
                function(**arguments)
        except Exception as error:
            refused += 1
            if any(part in str(error) for part in PRINTED) or len(str(error)) > 1500:
                found.append(f"{what}: {str(error)[:200]}")
    assert found == [] and refused > 300


def test_a_tensor_is_shown_by_its_shape() -> None:
    assert shown(WRONG) == "a Tensor of shape (2, 3, 4) and torch.float32 on cpu"
    assert shown((1, WRONG)) == "(1, a Tensor of shape (2, 3, 4) and torch.float32 on cpu)"
    assert shown("name") == "'name'" and shown("x" * 400) == "'" + "x" * 299 + "..."
    with pytest.raises(ValueError, match=r"^topk_indices is a Tensor of shape \(2, 3, 4\) and torch\.float32 on cpu, "):
        te.fused_topk_with_score_function(
            torch.ones(4, 8), 2, False, None, None, None, "softmax", None, topk_indices=WRONG
        )
