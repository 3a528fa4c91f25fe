"""QK-clip: the largest logit of each head, and weights with which it is the threshold; other heads are as they were."""

from pathlib import Path
from typing import Any

import pytest
import torch

from te_models.config import AttentionConfig, ConfigError, MLAConfig, ModelConfig
from te_models.config.mixers import Mamba2Config
from te_models.model import GPTModel
from te_models.training import LoRAConfig, ModelSource, OptimizerConfig, train
from te_models.training.optimizer.adamw import Optimizer
from te_models.training.optimizer.qk_clip import QKClip, check_qk_clip
from te_models.training.ranks.data_parallel import Ranks
from tests.training.processes import train_as_one_and_two
from tests.training.runs import curve, rows_of, tiny_model, tiny_run

LATENT = MLAConfig(q_lora_rank=12, kv_lora_rank=10, qk_head_dim=8, qk_pos_emb_head_dim=4, v_head_dim=6)
ATTENTIONS = {
    "grouped": AttentionConfig(num_attention_heads=4, num_query_groups=2),
    "biased": AttentionConfig(num_attention_heads=4, num_query_groups=2, add_qkv_bias=True),
    "apart": AttentionConfig(num_attention_heads=4, v_head_dim=8),
    "latent": AttentionConfig(num_attention_heads=4, mla=LATENT),
    "latent, plain queries": AttentionConfig(num_attention_heads=4, mla=LATENT.replace(q_lora_rank=None)),
}


def model_with(attention: AttentionConfig) -> ModelConfig:
    return tiny_model(layers=1).replace(attention=attention, init_method_std=0.3)


def logits_of(model: GPTModel, ids: torch.Tensor) -> torch.Tensor:
    """The largest logit of each head of a model of one layer, from q and k as the attention gets them, float64."""
    core = model.decoder.layers[0].self_attention.core_attention
    seen = {}
    handle = core.register_forward_pre_hook(lambda module, inputs: seen.update(q=inputs[0], k=inputs[1]))
    noted, core.max_logits = core.max_logits, None
    model(ids)
    handle.remove()
    core.max_logits = noted
    q, k = (seen[name].detach().double() for name in "qk")
    k = k.repeat_interleave(q.shape[2] // k.shape[2], 2)
    return (torch.einsum("bind,bjnd->bnij", q, k) * core.softmax_scale).amax((0, 2, 3))


@pytest.mark.parametrize("name", ATTENTIONS)
@pytest.mark.parametrize("kind", ["adamw", "schedule_free"])
def test_a_head_that_is_too_large_has_the_threshold_afterwards(name: str, kind: str) -> None:
    model = GPTModel(model_with(ATTENTIONS[name]), dtype=torch.float32).train()
    ids = torch.randint(0, 257, (2, 17))
    before = logits_of(model, ids)
    threshold = float(before.sort().values[1:3].mean())  # between two heads
    clip = QKClip(model, threshold, Ranks(), Ranks())
    optimizer = Optimizer(model.named_parameters(), OptimizerConfig(kind=kind))
    model(ids)
    found = clip.step(optimizer, skipped=True)
    assert found["max_attention_logit"] == pytest.approx(float(before.max()), rel=1e-5)
    assert found["clipped_heads"] == int((before > threshold).sum()) == 2
    torch.testing.assert_close(logits_of(model, ids), before)
    model(ids)
    clip.step(optimizer, skipped=False)
    torch.testing.assert_close(logits_of(model, ids), before.clamp(max=threshold), rtol=1e-4, atol=1e-4)
    with optimizer.averaged():  # before its first step, the average is the weights
        torch.testing.assert_close(logits_of(model, ids), before.clamp(max=threshold), rtol=1e-4, atol=1e-4)
    model(ids)
    assert clip.step(optimizer, skipped=False)["clipped_heads"] <= 2, "of rounding, at most"


def test_values_and_other_rows_stay_as_they_are() -> None:
    model = GPTModel(model_with(ATTENTIONS["grouped"]), dtype=torch.float32).train()
    weight = model.decoder.layers[0].self_attention.linear_qkv.weight
    before = weight.detach().clone()
    clip = QKClip(model, 1e-3, Ranks(), Ranks())
    model(torch.randint(0, 257, (2, 17)))
    clip.step(Optimizer(model.named_parameters(), OptimizerConfig()), skipped=False)
    attention = model.decoder.layers[0].self_attention
    assert torch.equal(weight[attention.v_begin :], before[attention.v_begin :])
    assert not torch.equal(weight[: attention.v_begin], before[: attention.v_begin])


def test_masters_are_scaled_and_not_rounded_twice() -> None:
    model = GPTModel(model_with(ATTENTIONS["grouped"]), dtype=torch.bfloat16).train()
    optimizer = Optimizer(model.named_parameters(), OptimizerConfig(master_weights=True))
    name = "decoder.layers.0.self_attention.linear_qkv.weight"
    before = optimizer.masters[name].clone()
    clip = QKClip(model, 1e-3, Ranks(), Ranks())
    model(torch.randint(0, 257, (2, 17)))
    clip.step(optimizer, skipped=False)
    master = optimizer.masters[name]
    assert not torch.equal(master, before)
    assert torch.equal(dict(model.named_parameters())[name], master.bfloat16())


def clipped_run(tmp_path: Path, name: str = "run", **changes: Any) -> Any:
    optimizer = OptimizerConfig(lr=3e-3, qk_clip_threshold=changes.pop("threshold", 0.05))
    values = {"steps": 4, "optimizer": optimizer, "model": ModelSource(config=tiny_model())}
    return tiny_run(tmp_path, name, **(values | changes))


def test_a_run_tells_and_limits_its_largest_logit(tmp_path: Path) -> None:
    runs = {threshold: clipped_run(tmp_path, f"at-{threshold}", threshold=threshold) for threshold in (0.05, 1e9)}
    for run in runs.values():
        train(run)
    rows = {threshold: rows_of(run) for threshold, run in runs.items()}
    assert all(row["clipped_heads"] == 0 for row in rows[1e9]) and rows[0.05][0]["clipped_heads"] > 0
    assert rows[0.05][0]["max_attention_logit"] == rows[1e9][0]["max_attention_logit"]
    assert rows[0.05][-1]["max_attention_logit"] < rows[1e9][-1]["max_attention_logit"]
    plain = runs[1e9].replace(output_dir=str(tmp_path / "plain"), optimizer=OptimizerConfig(lr=3e-3))
    train(plain)
    assert curve(plain) == curve(runs[1e9]), "what is noted changes nothing"


@pytest.mark.sentinels("fsdp2")
@pytest.mark.parametrize("layout", ["fsdp2", "tp2", "pp2"])
def test_ranks_clip_what_one_rank_clips(layout: str, tmp_path: Path) -> None:
    one = clipped_run(tmp_path, "one")
    two = train_as_one_and_two(one, tmp_path, layout)
    ours, theirs = (rows_of(run) for run in (two, one))
    for left, right in zip(ours, theirs, strict=True):
        assert left["loss"] == pytest.approx(right["loss"], rel=1e-5)
        assert left["max_attention_logit"] == pytest.approx(right["max_attention_logit"], rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("recomputed", [False, True])
def test_a_compiled_run_clips_what_an_eager_one_clips(recomputed: bool, tmp_path: Path) -> None:
    model = ModelSource(config=tiny_model(), activation_checkpointing=recomputed)
    rows = []
    for compiled in (False, True):
        run = clipped_run(tmp_path, f"run{compiled}", model=model, compile=compiled)
        train(run)
        rows.append(rows_of(run))
    for eager, compiled in zip(*rows, strict=True):
        assert compiled["max_attention_logit"] == pytest.approx(eager["max_attention_logit"], rel=1e-4)
        assert compiled["loss"] == pytest.approx(eager["loss"], rel=1e-4)


def test_mixers_without_logits_are_refused_by_name(tmp_path: Path) -> None:
    mixers = {"scan": Mamba2Config(num_heads=4, head_dim=16)}
    sparse = tiny_model().replace(mixers=mixers, layer_mixers=("scan", "attention"))
    with pytest.raises(ConfigError, match=r"layer 0 has the mixer Mamba2, which has no attention logits"):
        check_qk_clip(sparse)
    normed = tiny_model().replace(attention=AttentionConfig(num_attention_heads=4, qk_layernorm="head"))
    with pytest.raises(ConfigError, match=r"layer 0 has attention.qk_layernorm, with which rows"):
        check_qk_clip(normed)
    with pytest.raises(ConfigError, match=r"qk_clip_threshold is 0.05; allowed: null with lora.rank"):
        clipped_run(tmp_path, lora=LoRAConfig(rank=2))
    with pytest.raises(ConfigError, match=r"qk_clip_threshold is 0.05; allowed: null with compile_mode = 'block'"):
        clipped_run(tmp_path, compile=True, compile_mode="block")
