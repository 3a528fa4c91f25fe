"""Fields that transformers reads in places where nobody would look, or takes no notice of."""

import json
from typing import Any

import pytest
import torch

from te_models import GPTModel
from te_models.checkpoints import FAMILIES, CheckpointError
from te_models.checkpoints.families.base.rope import Rope
from tests.checkpoints.family_cases import CASES, make
from tests.checkpoints.hf_cases import transformers

DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
FIRST_CASES = {family: case for case, (family, _) in reversed(CASES.items())}


def config_of(case: str, **changes: Any) -> dict[str, Any]:
    return json.loads(make(case).config.to_json_string()) | changes


def test_alpha_beside_dynamic_scaling_is_of_hunyuan() -> None:
    """transformers warns of the key in all others, and computes with the factor."""
    for family in FAMILIES.values():
        plain = [e for e in family.fields if isinstance(e, Rope) and "dynamic" in e.types]
        if not plain or family.model_type not in FIRST_CASES:
            continue
        values = config_of(FIRST_CASES[family.model_type], rope_parameters=DYNAMIC)
        values.pop("rope_scaling", None)
        with_alpha = values | {"rope_parameters": DYNAMIC | {"alpha": 50.0}}
        assert family.read_config(values).rope.scaling == "dynamic"
        if family.model_type in ("hunyuan_v1_moe", "hunyuan_v1_dense"):
            assert family.read_config(with_alpha).rope.alpha == 50.0
            continue
        with pytest.raises(CheckpointError, match="unknown rope parameter 'alpha'"):
            family.read_config(with_alpha)


def test_the_number_of_longrope_factors_is_checked() -> None:
    rope = {"rope_type": "longrope", "short_factor": [1.0] * 3, "long_factor": [2.0] * 4}
    values = config_of("phi3", rope_parameters=rope, original_max_position_embeddings=16)
    with pytest.raises(CheckpointError) as caught:
        FAMILIES["phi3"].read_config(values)
    assert "the number of rope.short_factor is 3; allowed: 4, one for each pair of the 8 channels" in str(caught.value)
    values["rope_parameters"] = rope | {"short_factor": [1.0] * 4, "long_factor": [2.0] * 5}
    with pytest.raises(CheckpointError, match=r"the number of rope\.long_factor is 5; allowed: 4"):
        FAMILIES["phi3"].read_config(values)
    values["rope_parameters"] = {"rope_type": "dynamic", "rope_theta": 1e4}
    with pytest.raises(CheckpointError, match=r"rope\.factor is None; allowed: a value, or one of rope\.alpha"):
        FAMILIES["llama"].read_config(values | {"model_type": "llama"})


def test_head_dim_of_gpt_neox() -> None:
    """It changes the rotation of transformers' model, and not its heads."""
    for size in (None, 8):
        FAMILIES["gpt_neox"].read_config(config_of("gpt_neox", head_dim=size))
    with pytest.raises(CheckpointError, match=r"head_dim = 16, which this family does not have; supported: null or 8"):
        FAMILIES["gpt_neox"].read_config(config_of("gpt_neox", head_dim=16))


@torch.no_grad()
def test_swiglu_of_gpt_oss() -> None:
    """transformers 5.17 computes with 7 and 1.702, whatever these fields say: docs/transformers.md."""
    theirs = make("gpt_oss")
    config = type(theirs.config)(**theirs.config.to_dict() | {"swiglu_alpha": 0.9, "swiglu_limit": 0.2})
    ours = FAMILIES["gpt_oss"].read_config(json.loads(config.to_json_string()))
    assert (ours.mlp.alpha, ours.mlp.clamp) == (0.9, 0.2)
    changed = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    changed.load_state_dict(theirs.state_dict())
    if getattr(changed.model.layers[0].mlp.experts, "alpha", None) != 0.9:
        pytest.skip("this transformers does not read the fields")
    ids = torch.randint(3, 61, (2, 9), generator=torch.Generator().manual_seed(0))
    expected = changed(ids).logits
    assert (expected - theirs(ids).logits).abs().max() > 0.01 * expected.abs().max()
    assert (GPTModel.from_hf(changed).eval()(ids).logits - expected).abs().max() <= 1e-5 * expected.abs().max()
