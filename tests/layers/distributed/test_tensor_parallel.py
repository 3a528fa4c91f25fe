"""Layers split over two ranks are the whole layers: outputs and all gradients. Compiled they compute the same bits, see
test_compile_tensor_parallel."""

from __future__ import annotations

import pytest
import torch

from te_models.layers import GroupedLinear, LayerNormLinear, LayerNormMLP, Linear, quantized_model_init, recipe
from tests.covering import selected
from tests.ranks import outcomes_on_ranks

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch is built without distributed")

if torch.distributed.is_available():
    from tests.layers.tensor_parallel_ranks import CASES
else:
    CASES = {"none": None}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> list[dict[str, str]]:
    """What every case came to, on either rank."""
    results = tmp_path_factory.mktemp("tensor_parallel") / "results"
    return outcomes_on_ranks("tests.layers.tensor_parallel_ranks", results, only=selected(request, "case"), timeout=400)


@pytest.mark.sentinels(
    "pair-plain-None",
    "pair-sequence-mxfp8",
    "normed_pair-plain-delayed",
    "mlp-plain-current",
    "mlp-sequence-None",
    "gated_mlp-plain-mxfp8",
    "transformer_layer-plain-None",
    "transformer_layer-sequence-delayed",
    "grouped_members_are_split-per_gemm_bias",
    "grouped_members_are_split-grouped",
    "a_row_of_a_pipeline_has_no_bias",
    "quantized_weights_are_marked",
    "a_group_of_other_ranks_is_refused",
    "a_vocabulary_is_split-smoothed",
    "torch_has_nothing_to_warn_of",
)
@pytest.mark.parametrize("case", CASES)
def test_two_ranks(case: str, outcomes: list[dict[str, str]]) -> None:
    assert [outcome[case] for outcome in outcomes] == ["ok", "ok"]


def test_what_cannot_be_split_is_refused() -> None:
    with pytest.raises(ValueError, match="parallel_mode is 'both'; allowed: None, 'column', 'row'"):
        Linear(4, 4, parallel_mode="both")
    with pytest.raises(ValueError, match="parallel_mode is 'row'; allowed: None, 'column'"):
        LayerNormLinear(4, 4, parallel_mode="row")
    with pytest.raises(ValueError, match="init_process_group"):
        Linear(4, 4, tp_size=2, parallel_mode="column")


def test_one_rank_is_not_split() -> None:
    """The arguments may stay in place when there is one rank."""
    layer = GroupedLinear(2, 4, 6, bias=True, parallel_mode="column", tp_size=1)
    assert layer.weight.shape == (2, 6, 4) and layer.tp_group is None


def test_parameters_say_how_they_are_split_on_one_rank_too() -> None:
    """As far as a mode was asked for, in Megatron's words."""

    def marks(parameter: torch.nn.Parameter) -> tuple[object, ...]:
        names = ("tensor_model_parallel", "partition_dim", "partition_stride")
        return tuple(getattr(parameter, name, None) for name in names)

    nothing = (None, None, None)
    column, row = (Linear(4, 6, parallel_mode=mode, tp_size=1) for mode in ("column", "row"))
    assert (marks(column.weight), marks(column.bias)) == ((True, 0, 1), (True, 0, 1))
    assert (marks(row.weight), marks(row.bias)) == ((True, 1, 1), nothing)
    assert marks(Linear(4, 6).weight) == nothing
    normed = LayerNormLinear(4, 6, parallel_mode="column")
    assert marks(normed.weight) == (True, 0, 1) and marks(normed.layer_norm_weight) == nothing
    grouped = GroupedLinear(2, 4, 6, bias=True, parallel_mode="row")
    apart = GroupedLinear(2, 4, 6, bias=True, parallel_mode="row", single_grouped_weight=False)
    assert (marks(grouped.weight), marks(grouped.bias), marks(apart.weight1)) == ((True, 2, 1), nothing, (True, 1, 1))
    mlp = LayerNormMLP(4, 8, activation="swiglu", set_parallel_mode=True)
    assert (marks(mlp.fc1_weight), marks(mlp.fc1_bias)) == ((True, 0, 2), (True, 0, 2))
    assert (marks(mlp.fc2_weight), marks(mlp.fc2_bias)) == ((True, 1, 1), nothing)
    with quantized_model_init(recipe=recipe("mxfp8")):
        assert marks(Linear(32, 32, parallel_mode="column").weight) == (True, 0, 1)
