"""Single experts that are not trained: their weights keep every bit, the others are trained."""

import pytest
import torch

from te_models import ConfigError, GPTModel
from te_models.training import OptimizerConfig
from te_models.training.optimizer.adamw import Optimizer
from tests.build import token_ids
from tests.training.runs import tiny_model

FC1, FC2 = (f"decoder.layers.0.mlp.experts.{name}.weight" for name in ("linear_fc1", "linear_fc2"))


@pytest.mark.parametrize("kind", ["adamw", "muon"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_frozen_experts_keep_their_bits(kind: str, dtype: torch.dtype) -> None:
    model, ids = GPTModel(tiny_model(moe=True, hidden=32), dtype=dtype), token_ids(2, 16)
    patterns = ("decoder.layers.0.mlp.experts.*=1,3", "*.linear_fc2.weight=0")
    config = OptimizerConfig(kind=kind, freeze_experts=patterns, weight_decay=0.5, master_weights=True)
    optimizer = Optimizer(model.named_parameters(), config, main_grads=dtype == torch.bfloat16)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    for _ in range(3):
        optimizer.zero_grad()
        model(ids, labels=ids, return_logits=False).loss.backward()
        optimizer.accumulate_gradients()
        optimizer.clip_gradients()
        optimizer.step(1e-2)
    for name, frozen in {FC1: {1, 3}, FC2: {0, 1, 3}, FC2.replace("0", "1", 1): {0}}.items():
        now, was = model.get_parameter(name), before[name]
        assert {e for e in range(4) if torch.equal(now[e], was[e])} == frozen, name
        for key, tensor in optimizer.entries(name).items():
            if key == "master":
                assert all(torch.equal(tensor[e].to(dtype), was[e]) for e in frozen), name
            elif tensor.shape == was.shape:
                assert all(not tensor[e].any() for e in frozen), key


def test_what_is_refused() -> None:
    parameters = dict(GPTModel(tiny_model(moe=True, hidden=32)).named_parameters())
    for text, message in {
        "*.experts.*=4": "has expert 4 of decoder.layers.0.mlp.experts.linear_fc1.weight; allowed: 0 to 3",
        "embedding.*=1": "'embedding.*', which matches no parameter; they are called decoder.layers.0.mlp.experts",
    }.items():
        with pytest.raises(ConfigError, match=message.replace("*", r"\*")):
            Optimizer(parameters.items(), OptimizerConfig(freeze_experts=(text,)))
    with pytest.raises(ConfigError, match="freeze_experts is '\\*=x'; allowed: \"pattern=numbers\""):
        OptimizerConfig(freeze_experts=("*=x",))
