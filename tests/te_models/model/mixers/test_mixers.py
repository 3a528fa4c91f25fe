"""Layers that name their mixers: what all recurrent ones have in common, by the smallest of them."""

import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from te_models import AttentionConfig, DraftModel, GPTModel, KVCache, ModelConfig, StaticKVCache, generate
from te_models.checkpoints import expected_tensors
from te_models.checkpoints.mapping.rank_shards import ShardPlace, parts
from te_models.config import KINDS, ConfigError, MixerConfig, RopeConfig
from te_models.config.keys import toml_words
from te_models.config.mixers import Parameter, State
from te_models.layouts import Facts, check_layout_rules
from te_models.model.build import Build, make_input_linear, make_output_linear
from te_models.model.flops import forward_flops_per_token
from te_models.model.mixers import RECURRENT, MixerInputs, RecurrentMixer
from tests.build import VARIANTS, heads, tiny, tiny_moe, token_ids
from tests.compare import assert_decodes


@dataclass(frozen=True, kw_only=True)
class DecayingConfig(MixerConfig):
    """A sum of values that decays."""

    kind: ClassVar[str] = "decaying"

    heads: int
    """Number of heads."""
    channels: int = 4
    """Channels of each head."""
    decay: float = 0.5
    """Factor of the state at each token."""

    def parameters(self, hidden_size: int) -> Iterator[Parameter]:
        size = self.heads * self.channels
        yield Parameter("linear_in.weight", (2 * size, hidden_size), (size, size))
        yield Parameter("linear_proj.weight", (hidden_size, size), (size,), 1)

    def states(self) -> tuple[State, ...]:
        return (State("sum", (self.heads, self.channels)),)

    def flops(self, length: float) -> float:
        return 2.0 * self.heads * self.channels

    def shared_sizes(self) -> dict[str, int]:
        return {"heads": self.heads}


class DecayingMixer(RecurrentMixer):
    def __init__(self, config: ModelConfig, mixer: DecayingConfig, layer: int, build: Build) -> None:
        super().__init__()
        self.mixer = mixer
        size = mixer.heads * mixer.channels
        self.linear_in = make_input_linear(config, (size, size), False, build, normed=False)
        self.linear_proj = make_output_linear(config, size, False, build)

    def forward(self, x: Tensor, inputs: MixerInputs, cache: Any = None) -> Tensor:
        rows = self.linear_in(x)
        rows = rows if inputs.batch_size is None else rows.unflatten(0, (inputs.batch_size, -1))
        v, gate = rows.unflatten(-1, (2, -1, self.mixer.channels)).unbind(2)
        if inputs.token_mask is not None:
            v = v * inputs.token_mask[..., None, None]
        (state,) = (torch.zeros_like(v[:, 0], dtype=torch.float32),) if cache is None else cache.read()
        texts, found = inputs.documents, []
        for t in range(v.shape[1]):
            if texts is not None and t:
                state = state * (texts[:, t] == texts[:, t - 1])[:, None, None]
            state = self.mixer.decay * state + v[:, t]
            found.append(state * gate[:, t])
        if cache is not None:
            cache.write(state)
        y = torch.stack(found, dim=1).flatten(2).to(x.dtype)
        return self.linear_proj(y if inputs.batch_size is None else y.flatten(0, 1))


def register(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the kind known while a test runs."""
    monkeypatch.setitem(KINDS, DecayingConfig.kind, DecayingConfig)
    monkeypatch.setitem(RECURRENT, DecayingConfig.kind, DecayingMixer)


DECAYING = DecayingConfig(heads=2)
FOUR = heads(None)
SLIDING = AttentionConfig(
    num_attention_heads=8,
    num_query_groups=1,
    kv_channels=6,
    v_head_dim=10,
    window_size=5,
    sinks=True,
    rope=RopeConfig(rotary_base=100.0),
)


def hybrid(**changes: object) -> ModelConfig:
    """Attention, a recurrent mixer, both side by side, a mixer alone, an MLP alone."""
    fields = {
        "num_layers": 5,
        "mixers": {"sum": DECAYING},
        "layer_mixers": ("attention", "sum", "attention+sum", "sum", "none"),
        "mlp_layers": (0, 1, 2, 4),
    }
    return tiny(**fields | changes)


def model_of(config: ModelConfig, seed: int = 0) -> GPTModel:
    torch.manual_seed(seed)
    return GPTModel(config).eval()


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    register(monkeypatch)


def close(a: torch.Tensor | None, b: torch.Tensor | None) -> None:
    assert a is not None and b is not None
    assert (a - b).abs().max() <= 1e-5 * b.abs().max()


def test_layers_are_what_the_configuration_names() -> None:
    config = hybrid()
    model, shapes = model_of(config), expected_tensors(config)
    assert {name: tuple(p.shape) for name, p in model.named_parameters()} == shapes
    layers = [{n.split(".")[3] for n in shapes if n.startswith(f"decoder.layers.{i}.")} for i in range(5)]
    assert layers == [
        {"self_attention", "mlp"},
        {"input_layernorm", "mixer", "mlp"},
        {"input_layernorm", "self_attention", "mixer", "mlp"},
        {"input_layernorm", "mixer"},
        {"mlp"},
    ]
    assert ModelConfig.from_json(config.to_json()) == config
    assert hash(ModelConfig.from_json(config.to_json())) == hash(config)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layer_mixers": ("attention",) * 4}, "the number of layer_mixers is 4; allowed: num_layers = 5"),
        (
            {"layer_mixers": ("attention", "sum", "ssm", "sum", "none")},
            "layer_mixers is 'ssm'; allowed: attention, sum",
        ),
        ({"layer_mixers": ("sum+sum", *("sum",) * 4)}, r"layer_mixers is 'sum\+sum'; allowed: one mixer, or"),
        ({"layer_mixers": ("attention",) * 5}, r"mixers is \['sum'\]; allowed: mixers that layer_mixers names"),
        ({"mlp_layers": (0, 1, 2)}, "allowed: a mixer in layer 4, which has no MLP"),
        ({"mixers": {"none": DECAYING}}, "the name of a mixer is 'none'"),
        ({"mixers": {"sum": {"kind": "summing"}}}, "the kind of a mixer is 'summing'; allowed: 'attention', "),
        ({"mixers": {"sum": AttentionConfig(num_attention_heads=3)}}, "mixers.sum.kv_channels is None; allowed: a num"),
    ],
)
def test_what_cannot_be_is_named(changes: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        hybrid(**changes)


def test_a_model_without_attention_needs_none() -> None:
    fields = {name: getattr(hybrid(), name) for name in ("vocab_size", "hidden_size", "max_position_embeddings", "mlp")}
    config = ModelConfig(**fields, num_layers=2, mixers={"sum": DECAYING}, layer_mixers=("sum", "sum"))
    assert "attention" not in config.to_dict() and ModelConfig.from_json(config.to_json()) == config
    assert generate(model_of(config), token_ids(1, 5), 4).shape == (1, 9)
    with pytest.raises(ConfigError, match="attention is None; allowed: an attention, which layers name"):
        ModelConfig(**fields, num_layers=2)


def test_mixers_in_a_file_of_a_run() -> None:
    for config in (hybrid(), VARIANTS["several_attentions"], VARIANTS["keys_of_earlier_layers"]):
        names = ("mixers", "layer_mixers", "kv_source_layers")
        lines = {name: getattr(config, name) for name in names if getattr(config, name) is not None}
        read = tomllib.loads("\n".join(f"{name} = {toml_words(value)}" for name, value in lines.items()))
        assert ModelConfig.from_dict({**config.to_dict(), **read}) == config


def test_decoding_goes_on_from_the_states() -> None:
    assert_decodes(model_of(hybrid()), token_ids(2, 17), prompt=9)


@pytest.mark.slow
@pytest.mark.parametrize("config", [hybrid(), VARIANTS["several_attentions"], VARIANTS["keys_of_earlier_layers"]])
def test_compiled_decoding(config: ModelConfig) -> None:
    model, ids = model_of(config), token_ids(2, 12)
    mask = torch.ones(2, 12, dtype=torch.bool)
    mask[0, :5] = False
    options = {"attention_mask": mask}
    assert torch.equal(generate(model, ids, 6, compile=True, **options), generate(model, ids, 6, **options))


@pytest.mark.slow
@pytest.mark.parametrize("config", [hybrid(), VARIANTS["keys_of_earlier_layers"]], ids=["states", "shared_keys"])
@torch.no_grad()
def test_one_graph_decodes_every_token(config: ModelConfig) -> None:
    model, ids, counter = model_of(config), token_ids(2, 9), CompileCounterWithBackend("eager")
    cache = StaticKVCache(config, 2, 16)
    model(ids[:, :6], cache=cache)
    compiled = torch.compile(model, fullgraph=True, dynamic=False, backend=counter)
    for t in range(6, 9):
        logits = compiled(ids[:, t : t + 1], position_ids=torch.full((2, 1), t), cache=cache.step).logits
        close(logits[:, -1], model(ids[:, : t + 1]).logits[:, -1])
        cache.step.position.add_(1)
    assert counter.frame_count == 1


@torch.no_grad()
def test_documents_of_a_row_are_apart() -> None:
    model, ids = model_of(hybrid()), token_ids(1, 11)
    texts = torch.tensor([[0] * 4 + [1] * 6 + [-1]])
    positions = torch.tensor([[*range(4), *range(6), 0]])
    packed = model(ids, document_ids=texts, position_ids=positions).logits
    close(packed[:, :4], model(ids[:, :4]).logits)
    close(packed[:, 4:10], model(ids[:, 4:10]).logits)
    mask = (texts[:, :, None] == texts[:, None]) & (texts >= 0)[:, None]
    close(model(ids, attention_mask=mask, position_ids=positions).logits[:, :10], packed[:, :10])
    mask[:, 8, 5] = False
    with pytest.raises(RuntimeError, match="hides a part of a text from a recurrent mixer"):
        model(ids, attention_mask=mask)
    cache = KVCache(model.config, 1, 11)
    model(ids[:, :10], cache=cache)
    with pytest.raises(ValueError, match="for a model with recurrent mixers and a cache"):
        model(ids[:, 10:], attention_mask=mask[:, 10:], cache=cache)


def test_a_rejected_draft_takes_the_states_back() -> None:
    model, other = model_of(hybrid()), model_of(hybrid(), seed=1)
    plain = generate(model, token_ids(1, 7), 24)
    for draft, least in ((DraftModel(other), 0.0), (DraftModel(model), 1.0), (DraftModel(model_of(tiny())), 0.0)):
        assert torch.equal(generate(model, token_ids(1, 7), 24, draft_model=draft, num_draft_tokens=3), plain)
        assert draft.proposed > 5 and draft.acceptance_rate >= least
    attention = model_of(tiny())
    drafted = generate(attention, token_ids(1, 7), 24, draft_model=DraftModel(model), num_draft_tokens=3)
    assert torch.equal(drafted, generate(attention, token_ids(1, 7), 24))


@torch.no_grad()
def test_a_cache_goes_back_to_states_that_it_knows() -> None:
    model, ids = model_of(hybrid()), token_ids(1, 12)
    cache = KVCache(model.config, 1, 12, rollback=8)
    for part in ids.split([5, 3, 4], dim=1):
        model(part, cache=cache)
    cache.crop(11)
    assert cache.length == 8  # of the states behind 11 tokens nothing is known
    close(model(ids[:, 8:], cache=cache).logits, model(ids).logits[:, 8:])
    cache.crop(4)
    assert cache.length == 0
    close(model(ids, cache=cache).logits, model(ids).logits)


@torch.no_grad()
def test_attentions_of_several_kinds_in_one_model(tmp_path: Path) -> None:
    kinds = ("attention", "sliding", "sliding", "attention")
    config = tiny(num_layers=4, mixers={"sliding": SLIDING}, layer_mixers=kinds)
    assert config.layer_types == ("full", "sliding", "sliding", "full")
    assert [config.window_size(i) for i in range(4)] == [None, 5, 5, None]
    model, ids = model_of(config), token_ids(2, 14)
    assert {name: tuple(p.shape) for name, p in model.named_parameters()} == expected_tensors(config)
    cache = KVCache(config, 2, 14)
    assert [tuple(layer.key.shape[2:]) for layer in cache.layers] == [(2, 8), (1, 6), (1, 6), (2, 8)]
    steps = [model(part, cache=cache).logits for part in ids.split([9, 1, 4], dim=1)]
    close(torch.cat(steps, dim=1), model(ids).logits)
    model.save_pretrained(tmp_path)
    again = GPTModel.from_pretrained(tmp_path).eval()
    assert again.config == config and torch.equal(again(ids).logits, model(ids).logits)


def test_every_rank_has_its_part_of_a_mixer() -> None:
    config = hybrid()
    owned = parts(config, expected_tensors(config), ShardPlace(tp_rank=1, tp_size=2))
    assert owned["decoder.layers.1.mixer.linear_in.weight"].ranges == ((4, 8), (12, 16))
    assert owned["decoder.layers.3.mixer.linear_proj.weight"].dim == 1
    assert owned["decoder.layers.1.input_layernorm.weight"].dim is None
    with pytest.raises(ConfigError, match=r"mixers.sum.heads is 2, which 4 ranks cannot share equally"):
        check_layout_rules(
            Facts(model=tiny(attention=FOUR, mixers={"sum": DECAYING}, layer_mixers=("attention", "sum")), tp=4, etp=1)
        )


def test_flops_are_of_what_a_layer_has() -> None:
    flops = {
        kind: forward_flops_per_token(tiny(**fields), 9)
        for kind, fields in {
            "attention": {},
            "sum": {"mixers": {"sum": DECAYING}, "layer_mixers": ("attention", "sum")},
            "none": {"layer_mixers": ("attention", "none")},
        }.items()
    }
    attention = 2 * 4 * (8 + 8) * 5  # five keys on average
    weights = 2 * ((32 + 2 * 16) * 32 + 32 * 32)
    assert flops["attention"] - flops["none"] == attention + weights
    assert flops["sum"] - flops["none"] == 2 * 8 + 2 * (16 * 32 + 32 * 8)


def test_experts_beside_layers_of_one_sublayer() -> None:
    config = tiny_moe().replace(num_layers=3, layer_mixers=("attention", "none", "attention"), mlp_layers=(1,))
    assert config.moe.layers == (1,)
    model = model_of(config).train()
    output = model(token_ids(2, 9), labels=token_ids(2, 9))
    output.loss.backward()
    assert output.tokens_per_expert.shape == (1, 4) and all(p.grad is not None for p in model.parameters())


@torch.no_grad()
def test_layers_read_keys_and_values_of_earlier_ones() -> None:
    """Equal to a model in which each layer has the projections of the one whose keys it reads, if its input were that
    one's: here the layers before it add nothing."""
    config = VARIANTS["keys_of_earlier_layers"]
    model, ids = model_of(config), token_ids(2, 12)
    assert {name: tuple(p.shape) for name, p in model.named_parameters()} == expected_tensors(config)
    own, state = model_of(config.replace(kv_source_layers=None)), model.state_dict()
    for name, value in state.items():  # those of the model
        if "linear_proj" in name or "fc2" in name:
            value *= ".3." in name
        if "layer_norm_weight" in name:
            value.fill_(1.0)
    for layer, source in ((2, 0), (3, 1)):
        at, its = (f"decoder.layers.{i}.self_attention." for i in (layer, source))
        state[f"{at}linear_qkv.weight"] = torch.cat(
            (state[f"{at}linear_qkv.weight"], state[f"{its}linear_qkv.weight"][32:])
        )
        state[f"{at}k_layernorm.weight"] = state[f"{its}k_layernorm.weight"]
    own.load_state_dict(state)
    close(model(ids).logits, own(ids).logits)


@torch.no_grad()
def test_decoding_with_keys_of_earlier_layers() -> None:
    model, ids = model_of(VARIANTS["keys_of_earlier_layers"]), token_ids(2, 17)
    cache = KVCache(model.config, 2, 17)
    assert [layer is None for layer in cache.layers] == [False, False, True, True]
    steps = [model(part, cache=cache).logits for part in ids.split([9, 1, 1, 6], dim=1)]
    close(torch.cat(steps, dim=1), model(ids).logits)
    with pytest.raises(ConfigError, match="kv_source_layers has 0, which is in another stage"):
        model.stage(2, 4)
    with pytest.raises(ConfigError, match=r"kv_source_layers\[2\] is 1; allowed: a layer whose attention has the same"):
        model.config.replace(kv_source_layers=(0, 1, 1, 3))
    assert model.config.mixers_of([0, 1])["kv_source_layers"] is None  # each has its own
    assert model.config.mixers_of([0, 2])["kv_source_layers"] == (0, 0)


def test_gradients_reach_keys_of_earlier_layers_through_checkpoints() -> None:
    model, ids, found = model_of(VARIANTS["keys_of_earlier_layers"]).train(), token_ids(2, 12), []
    for recompute in (False, True):
        model.activation_checkpointing = recompute
        model.zero_grad()
        model(ids, labels=ids).loss.backward()
        found.append([p.grad.clone() for p in model.parameters()])
    for a, b in zip(*found, strict=True):
        assert torch.equal(a, b)
