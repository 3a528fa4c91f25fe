"""Which matrices a weight joins: those of the projections that its family stores one by one."""

from collections.abc import Callable

import pytest

from te_models.checkpoints import expected_tensors
from te_models.checkpoints.families import FAMILIES
from te_models.checkpoints.mapping.rank_shards import joined_blocks
from tests.checkpoints.family_cases import CASES, make

Rows = dict[str, int]
JOINED: dict[str, dict[str, Callable[[Rows], tuple[int, ...]]]] = {
    "qwen3_next": {
        # q_proj stores q and the gate of each head in turn
        "linear_qkv": lambda r: (r["q_proj"] // 2, r["k_proj"], r["v_proj"], r["q_proj"] // 2),
        "shared_experts.linear_fc1": lambda r: (r["gate_proj"], r["up_proj"]),
        "linear_proj": lambda r: (r["o_proj"],),
    },
    "deepseek_v3": {
        "linear_qkv_down": lambda r: (r["q_a_proj"], r["kv_a_proj_with_mqa"]),
        "linear_q_up": lambda r: (r["q_b_proj"],),
    },
}


@pytest.mark.parametrize("case", JOINED)
def test_rows_are_those_of_the_stored_projections(case: str) -> None:
    model = make(case)
    config = FAMILIES[CASES[case][0]].read_config(model.config.to_dict())
    stored = {name.split(".")[-2]: tensor.shape[0] for name, tensor in model.state_dict().items()}
    shapes = {name: shape for name, shape in expected_tensors(config).items() if len(shape) > 1}
    found = {name: tuple(joined_blocks(config, name, shape).values()) or (shape[-2],) for name, shape in shapes.items()}
    assert all(sum(rows) == shapes[name][-2] for name, rows in found.items())
    for end, expected in JOINED[case].items():
        some = {rows for name, rows in found.items() if name.endswith(f".{end}.weight")}
        assert some == {expected(stored)}, end
