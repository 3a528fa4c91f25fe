"""Every kind of recurrent mixer in a model: decoding, padding, documents, drafts, recipes, graphs, shares of ranks."""

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from te_models import AttentionConfig, DraftModel, GPTModel, ModelConfig, generate
from te_models.checkpoints import expected_tensors
from te_models.checkpoints.mapping.rank_shards import ShardPlace, parts
from te_models.config import (
    ConfigError,
    DeepNormConfig,
    GatedDeltaConfig,
    LightningConfig,
    Mamba2Config,
    MambaConfig,
    MixerConfig,
    SharedBlocksConfig,
    ShortConvolutionConfig,
)
from te_models.layers import Float8CurrentScaling, MXFP8BlockScaling, NVFP4BlockScaling, Recipe, autocast
from te_models.layouts import Facts, check_layout_rules
from te_models.model.flops import forward_flops_per_token
from te_models.model.parallel import reset_parameters
from te_models.parallel.sharding import sharded_parts
from te_models.training.optimizer.groups import is_decayed
from tests.build import tiny, tiny_moe, token_ids
from tests.compare import assert_decodes

GDN = GatedDeltaConfig(num_key_heads=2, num_value_heads=4, key_head_dim=8, value_head_dim=6)
MIXERS: dict[str, MixerConfig] = {
    "gated_delta": GDN,
    "by_channel": GatedDeltaConfig(
        num_key_heads=2,
        num_value_heads=2,
        key_head_dim=8,
        value_head_dim=8,
        decay_by="channel",
        decay_lora_rank=4,
        gate_lora_rank=4,
        gate_activation="sigmoid",
        decay_lower_bound=-5.0,
        allow_neg_eigval=True,
    ),
    "lightning": LightningConfig(num_heads=4, head_dim=6),
    "mamba": MambaConfig(channels=24, state_size=6, time_step_rank=3),
    "mamba_normed": MambaConfig(
        channels=16, state_size=4, time_step_rank=2, use_bias=True, use_conv_bias=False, selection_norm="with_weight"
    ),
    "mamba2": Mamba2Config(num_heads=4, head_dim=8, state_size=6, num_groups=2, use_bias=True),
    "mamba2_after_norm": Mamba2Config(
        num_heads=2, head_dim=8, use_conv_bias=False, gate="after_norm", time_step_low=0.02, time_step_high=0.04
    ),
    "mamba2_without_norm": Mamba2Config(num_heads=2, head_dim=8, state_size=4, gate="no_norm"),
    "mamba2_multiplied": Mamba2Config(
        num_heads=2,
        head_dim=8,
        use_output_bias=True,
        input_multiplier=0.7,
        row_multipliers=(0.5, 1.5, 0.8, 1.2, 0.6),
        output_multiplier=1.3,
    ),
    "short_convolution": ShortConvolutionConfig(channels=32, use_bias=True),
    "in_shared_blocks": Mamba2Config(num_heads=4, head_dim=8, state_size=6),
    "with_deep_norm": LightningConfig(num_heads=2, head_dim=8),
}
without_chance = partial(NVFP4BlockScaling, disable_stochastic_rounding=True)
"""Eager code and a graph draw other numbers."""
every_mixer = pytest.mark.parametrize("name", MIXERS)


def hybrid(name: str) -> ModelConfig:
    layers, mixers = ("attention", "recurrent", "attention+recurrent"), {"recurrent": MIXERS[name]}
    if name == "in_shared_blocks":
        shared = SharedBlocksConfig(num_blocks=2, layers=(1, 2, 3), lora_rank=3, attention_lora=True)
        layers = ("recurrent", *("attention+recurrent",) * 3)
        return tiny(num_layers=4, mixers=mixers, layer_mixers=layers, mlp_layers=(), shared_blocks=shared)
    if name == "with_deep_norm":
        factors = DeepNormConfig(attention_alpha=1.2, attention_beta=0.6, recurrent_alpha=1.4, mlp_beta=0.7)
        return tiny_moe().replace(num_layers=3, mixers=mixers, layer_mixers=layers, deep_norm=factors)
    return tiny(num_layers=3, mixers=mixers, layer_mixers=layers)


def model_of(name: str, **changes: Any) -> GPTModel:
    torch.manual_seed(0)
    model = GPTModel(hybrid(name).replace(**changes)).eval()
    with torch.no_grad():  # so that states matter to the result
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.normal_(std=0.15)
    return model


def close(a: torch.Tensor, b: torch.Tensor) -> None:
    assert (a - b).abs().max() <= 1e-5 * b.abs().max()


@every_mixer
def test_decoding_goes_on_from_the_states(name: str) -> None:
    model, ids = model_of(name), token_ids(2, 75)
    shapes = expected_tensors(model.config)
    assert {n: tuple(p.shape) for n, p in model.named_parameters()} == shapes
    assert list(shapes) == [n for n, _ in model.named_parameters()]
    assert ModelConfig.from_json(model.config.to_json()) == model.config
    assert_decodes(model, ids, prompt=66)


@every_mixer
@torch.no_grad()
def test_padding_on_the_left_changes_no_state(name: str) -> None:
    model, ids = model_of(name), token_ids(2, 12)
    mask = torch.ones(2, 12, dtype=torch.bool)
    mask[0, :5] = False
    both = generate(model, ids, 6, attention_mask=mask)
    assert torch.equal(both[:1, 5:], generate(model, ids[:1, 5:], 6))
    assert torch.equal(both[1:], generate(model, ids[1:], 6))


@every_mixer
def test_documents_of_a_row_are_apart(name: str) -> None:
    model, ids = model_of(name).train(), token_ids(1, 80)
    texts = torch.tensor([[0] * 4 + [1] * 70 + [-1] * 6])
    positions = torch.tensor([[*range(4), *range(70), *[0] * 6]])
    packed = model(ids, document_ids=texts, position_ids=positions).logits
    close(packed[:, :4], model(ids[:, :4]).logits)
    close(packed[:, 4:74], model(ids[:, 4:74]).logits)
    packed[:, :74].square().mean().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.sentinels("by_channel", "lightning", "mamba", "mamba2", "short_convolution", "in_shared_blocks")
@every_mixer
def test_a_rejected_draft_takes_the_states_back(name: str) -> None:
    model, ids = model_of(name), token_ids(1, 7)
    other = GPTModel(tiny()).eval()
    drafted = generate(model, ids, 16, draft_model=DraftModel(other), num_draft_tokens=3)
    assert torch.equal(drafted, generate(model, ids, 16))


@pytest.mark.slow
@every_mixer
@torch.no_grad()
def test_compiled_decoding_gives_the_same_text(name: str) -> None:
    model, ids = model_of(name), token_ids(1, 7)
    assert torch.equal(generate(model, ids, 12, compile=True), generate(model, ids, 12))


@pytest.mark.sentinels("mamba2-Float8CurrentScaling")
@pytest.mark.parametrize("recipe", [None, Float8CurrentScaling, MXFP8BlockScaling, without_chance])
@every_mixer
def test_one_graph_forward_and_backward(name: str, recipe: Callable[[], Recipe] | None) -> None:
    one: dict[str, Any] = {"num_layers": 1, "layer_mixers": ("attention+recurrent",)}
    if (shared := hybrid(name).shared_blocks) is not None:
        one["shared_blocks"] = shared.replace(num_blocks=1, layers=(0,))
    model, ids, found = model_of(name, **one).train(), token_ids(2, 16), []
    for run in (model, torch.compile(model, fullgraph=True, backend="aot_eager")):
        model.zero_grad()
        with autocast(enabled=recipe is not None, recipe=None if recipe is None else recipe()):
            loss = run(ids, labels=ids, return_logits=False).loss
        loss.backward()
        found.append([loss.detach(), *(p.grad for p in model.parameters())])
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-6)


@every_mixer
def test_folders(name: str, tmp_path: Path) -> None:
    model, ids = model_of(name), token_ids(1, 9)
    model.save_pretrained(tmp_path)
    again = GPTModel.from_pretrained(tmp_path).eval()
    assert again.config == model.config and torch.equal(again(ids).logits, model(ids).logits)


@every_mixer
def test_every_rank_has_its_part_of_a_mixer(name: str) -> None:
    config = hybrid(name)
    shapes = expected_tensors(config)
    halves = [parts(config, shapes, ShardPlace(tp_rank=rank, tp_size=2)) for rank in (0, 1)]
    mixer = [n for n in shapes if ".mixer." in n]
    assert any(halves[0][n].dim is not None for n in mixer)
    for n in mixer:
        if halves[0][n].dim is not None:
            assert sum(half[n].shape(shapes[n])[half[n].dim] for half in halves) == shapes[n][halves[0][n].dim]
    many = AttentionConfig(num_attention_heads=48, kv_channels=2)
    unequal = tiny(attention=many, mixers={"recurrent": MIXERS[name]}, layer_mixers=("attention", "recurrent"))
    with pytest.raises(ConfigError, match=r"mixers.recurrent\.\w+ is \d+, which 48 ranks cannot share equally"):
        check_layout_rules(Facts(model=unequal, tp=48, etp=1))


@every_mixer
def test_what_decays_and_what_a_plan_counts(name: str) -> None:
    model, uses = model_of(name), hybrid(name).shared_blocks
    shapes = expected_tensors(model.config)
    decayed = {n for n, p in model.named_parameters() if is_decayed(n, p)}
    assert not any(n.endswith(("A_log", "D", "bias")) for n in decayed)
    gemms = [n for n in decayed if "embedding" not in n and "norm" not in n]
    counted = {n: 2 if n.startswith("decoder.shared_blocks.0") and uses else 1 for n in gemms}
    experts = [n for n in gemms if ".experts." in n]
    total = sum(2.0 * math.prod(shapes[n]) * times for n, times in counted.items() if n not in experts)
    total += sum(math.prod(shapes[n]) for n in experts)  # two of four for each token
    per_token = [mixer.flops(16) for i in range(model.config.num_layers) if (mixer := model.config.mixer_of(i))]
    per_token += [a.flops(8.5) for i in range(model.config.num_layers) if (a := model.config.attention_of(i))]
    assert forward_flops_per_token(model.config, 16) == pytest.approx(total + sum(per_token))


@every_mixer
def test_parts_that_are_filled_one_by_one_are_a_new_models(name: str) -> None:
    """As FSDP2 and pipeline stages fill them, of a seed."""
    new = GPTModel(hybrid(name))
    with torch.no_grad():
        filled = GPTModel(hybrid(name))
        for parameter in filled.parameters():
            parameter.fill_(9.0)
    torch.manual_seed(0)
    for part in sharded_parts(filled):
        reset_parameters(part)
    for (key, ours), theirs in zip(filled.named_parameters(), new.parameters(), strict=True):
        assert torch.equal(ours, theirs), key


def test_what_cannot_be_split_over_ranks_says_so() -> None:
    shared = hybrid("in_shared_blocks")
    with pytest.raises(ConfigError, match="num_groups is 1, which 4 ranks cannot share equally"):
        check_layout_rules(Facts(model=shared, tp=4, etp=1))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layer_mixers": ("recurrent",) * 4}, "shared_blocks.layers is .* beside another mixer, which 1 is not"),
        ({"block": "post"}, "shared_blocks is .*; allowed: null with block"),
        ({"shared_blocks": {"layers": (3, 2)}}, "shared_blocks.layers is .*; allowed: increasing layer indices"),
        ({"shared_blocks": {"layers": (2,), "num_blocks": 2}}, "shared_blocks.num_blocks is 2; allowed: 1 to 1"),
        ({"shared_blocks": None, "deep_norm": {}, "mlp_layers": None}, "deep_norm is .*; allowed: null with a block"),
    ],
)
def test_what_blocks_cannot_be_is_named(changes: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ModelConfig.from_dict(hybrid("in_shared_blocks").to_dict() | changes)


@pytest.mark.parametrize(
    ("kind", "fields", "message"),
    [
        (GatedDeltaConfig, {"num_value_heads": 3}, "gated_delta.num_value_heads is 3; allowed: a multiple"),
        (GatedDeltaConfig, {"decay_lora_rank": 4}, "gated_delta.decay_lora_rank is 4; allowed: null where decay_by"),
        (GatedDeltaConfig, {"decay_lower_bound": 1.0}, "gated_delta.decay_lower_bound is 1.0; allowed: a negative"),
        (LightningConfig, {"num_heads": 0}, "lightning.num_heads is 0; allowed: a positive number"),
        (MambaConfig, {"time_step_rank": 0}, "mamba.time_step_rank is 0; allowed: a positive integer"),
        (Mamba2Config, {"row_multipliers": (1.0,)}, r"mamba2.row_multipliers is \(1.0,\); allowed: five numbers"),
        (Mamba2Config, {"num_groups": 3}, "mamba2.num_groups is 3; allowed: a divisor of num_heads = 4"),
        (Mamba2Config, {"time_step_low": 1.0, "time_step_high": 0.5}, "mamba2.time_step_high is 0.5; allowed: time_"),
        (ShortConvolutionConfig, {"channels": 0}, "short_convolution.channels is 0; allowed: a positive integer"),
    ],
)
def test_what_cannot_be_is_named(kind: type[MixerConfig], fields: dict, message: str) -> None:
    whole = {
        GatedDeltaConfig: {"num_key_heads": 2, "num_value_heads": 4, "key_head_dim": 8, "value_head_dim": 6},
        Mamba2Config: {"num_heads": 4, "head_dim": 8},
        LightningConfig: {"num_heads": 4, "head_dim": 6},
        MambaConfig: {"channels": 8, "time_step_rank": 1},
        ShortConvolutionConfig: {},
    }
    with pytest.raises(ConfigError, match=message):
        kind(**whole[kind] | fields)
