"""Models whose residual stream has several lanes."""

import pytest
import torch
from torch import Tensor

from te_models import GPTModel, KVCache, ModelConfig
from te_models.checkpoints import expected_tensors
from te_models.config import ConfigError, HyperConnectionConfig
from te_models.kernels import hyper_connections as definition
from te_models.layouts import Facts, check_layout_rules
from te_models.model.mixers import MixerInputs
from tests.build import tiny, tiny_moe, token_ids

LANES = HyperConnectionConfig(lanes=3, sinkhorn_iterations=4, epsilon=1e-4)
CONFIGS = {
    "dense": tiny(hyper_connections=LANES),
    "mean": tiny(hyper_connections=LANES.replace(output="mean"), block="sandwich"),
    "experts": tiny_moe(layers=(1,)).replace(hyper_connections=LANES),
}


def model_of(config: ModelConfig) -> GPTModel:
    torch.manual_seed(0)
    model = GPTModel(config).eval()
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "hyper" in name and p.dim() == 1:
                p.add_(0.3 * torch.randn_like(p))
    return model


def close(a: Tensor, b: Tensor) -> None:
    assert (a - b).abs().max() <= 1e-5 * b.abs().max()


def by_definition(model: GPTModel, ids: Tensor) -> Tensor:
    """The lanes of each token in a dimension of their own, sublayer by sublayer."""
    config, inputs = model.config, model.decoder.layer_inputs(None, torch.arange(ids.shape[1])[None], None)
    lanes = model.embedding(ids, torch.arange(ids.shape[1])[None], None)[:, :, None].repeat(1, 1, 3, 1)
    options = {"eps": 1e-4, "norm_eps": config.norm.layernorm_epsilon}

    def sublayer(lanes: Tensor, connection, run) -> Tensor:
        numbers = connection.weight, connection.bias, connection.scale
        mixing = definition.mixing_of(lanes, *numbers, iterations=4, **options)
        y = run((mixing.read[..., None] * lanes).sum(-2))
        return mixing.write[..., None] * y[..., None, :] + torch.einsum("bsij,bsih->bsjh", mixing.carry, lanes)

    for layer in model.decoder.layers:

        def attention(u: Tensor, layer=layer) -> Tensor:
            y = layer.self_attention(u, MixerInputs(inputs.tables[0]))
            return y if layer.post_self_attn_layernorm is None else layer.post_self_attn_layernorm(y)

        def mlp(u: Tensor, layer=layer) -> Tensor:
            y = layer._mlp(u, None, None)[0]
            return y if layer.post_mlp_layernorm is None else layer.post_mlp_layernorm(y)

        lanes = sublayer(lanes, layer.self_attention_hyper_connection, attention)
        lanes = sublayer(lanes, layer.mlp_hyper_connection, mlp)
    last = model.decoder.final_hyper_connection
    x = lanes.mean(-2)
    if last is not None:
        weights = definition.read_weights(lanes, last.weight, last.bias, last.scale, **options)
        x = definition.collapsed(lanes, weights)
    return model.output_layer(model.decoder.final_layernorm(x), model.shared_output_weight, None, return_logits=True)[0]


@pytest.mark.parametrize("name", CONFIGS)
def test_a_model_is_its_sublayers_around_lanes(name: str) -> None:
    config, ids = CONFIGS[name], token_ids(2, 11)
    model = model_of(config)
    assert {name: tuple(p.shape) for name, p in model.named_parameters()} == expected_tensors(config)
    assert ModelConfig.from_json(config.to_json()) == config
    logits = model(ids).logits
    close(logits, by_definition(model, ids))
    cache = KVCache(config, 2, 11)
    with torch.no_grad():
        close(torch.cat([model(part, cache=cache).logits for part in ids.split([7, 1, 3], 1)], 1), logits)
    stages = [model.stage(0, 1), model.stage(1, 2)]
    x = stages[0](ids, return_hidden_states=True).hidden_states[-1]
    assert x.shape == (2, 11, 96)
    close(stages[1](inputs_embeds=x).logits, logits)


def test_gradients_are_the_same_when_layers_are_computed_again() -> None:
    ids, found = token_ids(2, 11), []
    for again in (False, True):
        model = model_of(CONFIGS["dense"]).train()
        model.decoder.activation_checkpointing = again
        model(ids, labels=ids).loss.backward()
        assert all(p.grad is not None and p.grad.any() for p in model.parameters())
        found.append([p.grad for p in model.parameters()])
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"block": "parallel"}, "hyper_connections is .*; allowed: null with block 'post' or 'parallel"),
        ({"residual_multiplier": 0.5}, "hyper_connections is .*; allowed: null with block"),
        ({"mtp_num_layers": 1}, "hyper_connections is .*; allowed: null with block"),
    ],
)
def test_what_cannot_be_is_named(changes: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        tiny(hyper_connections=LANES, **changes)
    with pytest.raises(ConfigError, match=r"hyper_connections\.lanes is 0; allowed: a positive integer"):
        LANES.replace(lanes=0)
    with pytest.raises(ConfigError, match="hyper_connections: a model with them cannot have sequence_parallel"):
        check_layout_rules(Facts(model=CONFIGS["dense"], tp=2, sequence_parallel=True))
