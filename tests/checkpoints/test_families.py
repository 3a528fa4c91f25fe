"""Every family beyond the first six, against transformers: weights and configuration there and back, and the logits."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from te_models import GPTModel
from te_models.checkpoints import FAMILIES, export_hf, import_hf
from tests.checkpoints.family_cases import CASES, make
from tests.checkpoints.hf_cases import assert_same_bits, stored, transformers

BOUND = 1e-5


def save(model: transformers.PreTrainedModel, folder: Path, **options: Any) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.save_pretrained(folder, **options)
    return folder


def tokens(length: int) -> torch.Tensor:
    return torch.randint(3, 61, (2, length), generator=torch.Generator().manual_seed(length))


@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_weights_config_and_logits(tmp_path: Path, case: str) -> None:
    theirs = make(case)
    source = save(theirs, tmp_path / "hf")
    import_hf(source, tmp_path / "ours")
    export_hf(tmp_path / "ours", tmp_path / "back")
    assert_same_bits(stored(source), stored(tmp_path / "back"))
    original = json.loads((source / "config.json").read_text())
    assert json.loads((tmp_path / "back/config.json").read_text()) == original
    check_config(original)
    ours = GPTModel.from_pretrained(tmp_path / "ours").eval()
    # One token, an odd length within a window, and one beyond every window and original length of the cases.
    for length in (1, 5, 41):
        expected, got = theirs(tokens(length)).logits, ours(tokens(length)).logits
        assert expected.std() > 0.02
        assert (got - expected).abs().max() <= BOUND * expected.abs().max()


def check_config(original: dict[str, Any]) -> None:
    """What the family writes for the model means the same to us, and to transformers in every field that it knows."""
    family = FAMILIES[original["model_type"]]
    config = family.read_config(original)
    written = json.loads(json.dumps(family.write_config(config)))
    assert family.read_config(written) == config
    config_class = type(transformers.AutoConfig.for_model(original["model_type"]))
    before = config_class.from_dict(original).to_dict()
    after = config_class.from_dict({**written, "model_type": original["model_type"]}).to_dict()
    for name in {name for entry in family.fields for name in entry.names} & before.keys():
        if name in NOT_COMPARED or (name == "head_dim" and before[name] is None):
            continue
        assert plain(after[name]) == plain(before[name]), name


NOT_COMPARED = {
    "first_k_dense_replace",  # mlp_layer_types says it, where there is one; else layers are compared
    "moe_layer_start_index",  # several ranges give the same layers
    "moe_layer_end_index",
    "moe_layer_interval",
    "sliding_window_pattern",  # layer_types says it
    "max_window_layers",
    "interleave_moe_layer_step",  # moe_layers says it
    "no_rope_layer_interval",  # no_rope_layers says it
    "router_aux_loss_coef",  # counts only with output_router_logits
}


def plain(value: Any) -> Any:
    """Rotary parameters without those that have defaults or follow from others."""
    if not isinstance(value, dict):
        return value
    implied = {"type", "max_position_embeddings", "beta_fast", "beta_slow", "truncate"}
    if value.get("rope_type") == "longrope":
        implied.add("factor")
    return {k: plain(v) for k, v in value.items() if k not in implied}
