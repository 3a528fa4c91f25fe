"""Collectives over quantized tensors, on two real processes: see `tensor_collective_ranks` for what each case does."""

from __future__ import annotations

import pytest
import torch

from tests.covering import selected
from tests.ranks import outcomes_on_ranks

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch is built without distributed")

if torch.distributed.is_available():
    from tests.layers.tensor_collective_ranks import KINDS, KNOWN, cases, make, operation, operations

    CASES = list(cases())
else:
    CASES = []


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> list[dict[str, str]]:
    """What every case came to, on either rank."""
    results = tmp_path_factory.mktemp("collectives") / "results"
    return outcomes_on_ranks(
        "tests.layers.tensor_collective_ranks", results, only=selected(request, "case"), timeout=300
    )


EVERYDAY = (
    "c10d::allreduce_",
    "c10d::broadcast_",
    "c10d::_allgather_base_",
    "c10d::scatter_",
    "c10d::recv_",
    "_c10d_functional::all_gather_into_tensor",
    "_c10d_functional::all_reduce",
    "_c10d_functional::wait_tensor",
    "_c10d_functional_autograd::reduce_scatter_tensor",
    "symm_mem::one_shot_all_reduce",
    "coalesced_broadcasts_move_fields",
    "lists_of_lists_that_torch_does_not_look_into_are_values_or_refused",
    "views_are_broadcast_as_their_fields",
    "a_tensor_of_another_format_is_not_received",
    "values_for_plain_tensors_of_rank_0_are_asked_for",
    "ddp_with_sharded_optimizer_keeps_ranks_equal, current",
    "ddp_with_sharded_optimizer_keeps_ranks_equal, mxfp8",
)
"""An operation of each namespace and of each way that data goes, and what is no operation."""


@pytest.mark.sentinels(*EVERYDAY)
@pytest.mark.parametrize("case", CASES)
def test_two_ranks(case: str, outcomes: list[dict[str, str]]) -> None:
    assert [outcome[case] for outcome in outcomes] == ["ok", "ok"]


def test_torch_has_the_operations_that_are_known() -> None:
    names = operations()
    assert {name for name in KNOWN if name.startswith("c10d::")} <= {*names} and len(names) > 60 and len(KINDS) > 20


def test_what_works_in_place_without_declaring_it_is_refused() -> None:
    """No dispatch can know what such an operation writes, so that it would write to a copy."""
    names = []
    for name in torch._C._dispatch_get_all_op_names():
        base = name.partition("::")[2].partition(".")[0]
        if not base.endswith("_") or base.endswith("__"):
            continue
        try:
            schema = operation(name)._schema
        except AttributeError:  # of a namespace that Python cannot spell
            continue
        if not schema.is_mutable and schema.name.partition("::")[0] not in ("c10d", "symm_mem"):
            names.append(name)
    assert "inductor::accumulate_grad_" in names
    for kind in ("mxfp8", "3 of float8"):
        x = make(kind, 0)
        for name in names:
            others = [torch.zeros(x.shape) if "Tensor" in str(a.type) else 0 for a in operation(name)._schema.arguments]
            with pytest.raises(ValueError, match="does not declare what it writes"):
                operation(name)(x, *others[1:])


def test_what_exchanges_memory_is_refused() -> None:
    x = make("mxfp8", 0)
    for exchange in (lambda: x.set_(torch.zeros(128, 128)), lambda: x.resize_(3), lambda: x.resize_as_(torch.ones(3))):
        with pytest.raises(ValueError, match="exchanges the memory of a tensor, and a MXFP8Tensor has none"):
            exchange()
    parameter, bucket = torch.nn.Parameter(x), torch.ones(x.numel())
    with pytest.raises(ValueError, match="cannot become a view of other memory"):
        parameter.data = bucket[: x.numel()].view_as(x)
    parameter.data = bucket.view_as(x).clone()
    assert parameter.dequantize().eq(1).all()
