"""Kernels of an accelerator refuse, as their fakes do, what they would read beyond memory or as another dtype."""

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map_only

import te_models.layers  # noqa: F401  # which imports all operations
from te_models.kernels.custom_op import registered

WITHOUT = {
    # of torch's own functions, which look at what they are given
    *("embedding_accumulate_", "embedding_backward", "gemm_float32", "gemm_wgrad_accumulate_"),
    *("label_log_prob_gradients", "label_statistics", "linear_cross_entropy", "linear_kl", "linear_kl_bwd"),
    *("packed_attention_bwd", "packed_attention_fwd", "packed_attention_intervals", "indexer_loss", "select_keys"),
    *("sparse_attention_bwd", "sparse_attention_fwd"),
    # whose operands are checked field by field (`ScaledOperand.check`)
    *("grouped_gemm_wgrad_accumulate_", "scaled_gemm", "scaled_grouped_gemm"),
    "scaled_grouped_gemm_wgrad_accumulate_",
    # of shapes that chunked forms make
    *("decayed_states", "delta_states", "delta_states_bwd"),
    # of other packages' kernels
    *("gated_delta_rule", "gated_delta_rule_bwd", "short_convolution", "short_convolution_bwd", "state_space_scan"),
    "state_space_scan_bwd",
    # of whole layers
    *("linear_layer", "linear_layer_backward"),
}


def test_every_operation_with_a_kernel_of_ours_says_what_it_takes() -> None:
    own = {name: entry for name, entry in registered().items() if not name.startswith("test_")}
    assert {name for name, entry in own.items() if entry.takes is None} - WITHOUT == set()


X, ROWS = torch.ones(4, 8), torch.zeros(4, 2, dtype=torch.int64)
WRONG: list[tuple[str, tuple[Any, ...]]] = [
    ("norm_fwd", (X, torch.ones(1), None, 1e-6, False, False, True)),
    ("norm_fwd", (X.double(), None, None, 1e-6, False, False, True)),
    ("norm_bwd", (X[:3], X, None, torch.empty(0), torch.ones(4), False, False, True, None, None)),
    ("rope", (torch.ones(2, 3, 2, 8), torch.ones(3, 3, 4), torch.ones(3, 3, 4), False, False)),
    ("rope", (torch.ones(2, 3, 2, 8), torch.ones(1, 2, 4), torch.ones(1, 2, 4), False, False)),
    ("activation_fwd", (X, torch.ones(1), "silu", False, None, 1.0, 0.0)),
    ("activation_bwd", (X, X, None, "silu", True, None, 1.0, 0.0, False)),
    ("sum_slots", (X, ROWS.int(), None, torch.float32)),
    ("sum_slots", (X, ROWS, torch.ones(4, 1), torch.float32)),
    ("permute_rows", (X, ROWS.int(), None)),
    ("unpermute_bwd", (X, X[:, :4], torch.ones(4, 2), ROWS, None, True)),
    ("cross_entropy_fwd", (X, torch.zeros(3, dtype=torch.int64))),
    ("cross_entropy_bwd", (X, ROWS[:, 0], torch.ones(1), torch.ones(4))),
    ("scaled", (X, torch.ones(8))),
    ("router_topk_bwd", (torch.ones(4, 3), X, ROWS, False, False, True, 0.0, 1.0)),
    ("quantize_per_tensor", (X, torch.ones(3, 1), torch.float8_e4m3fn)),
    ("quantize_per_tensor", (X, torch.ones((), dtype=torch.float64), torch.float8_e4m3fn)),
    ("grouped_amax", (X, torch.ones(2))),
    ("grouped_gemm", (X, torch.ones(2, 3, 8), torch.tensor([1, 1, 1]), True)),
    ("grouped_gemm", (X, torch.ones(2, 3, 7), torch.tensor([1, 1]), True)),
    ("gemv", (X, torch.ones(3, 7), None)),
    ("gemv", (X, torch.ones(3, 8), torch.ones(1))),
]


@pytest.mark.parametrize(("name", "arguments"), WRONG, ids=[name for name, _ in WRONG])
def test_wrong_arguments_are_one_sentence_for_real_and_on_fakes(name: str, arguments: tuple[Any, ...]) -> None:
    with pytest.raises(ValueError, match=rf"^{name}(: | was called with ).*; allowed: ") as real:
        registered()[name].op(*arguments)
    with FakeTensorMode() as mode:
        fakes = tree_map_only(torch.Tensor, mode.from_tensor, arguments)
        with pytest.raises(ValueError, match=rf"^{name}(: | was called with ).*; allowed: ") as fake:
            registered()[name].op(*fakes)
    assert str(real.value) == str(fake.value)
