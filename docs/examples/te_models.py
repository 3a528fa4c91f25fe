"""Examples of the names of `te_models`. A cell begins with the names that it shows; each runs by itself."""

# %% ModelConfig, AttentionConfig, MLPConfig, NormConfig, RopeConfig, EmbeddingConfig
from te_models import (
    AttentionConfig,
    EmbeddingConfig,
    MLPConfig,
    ModelConfig,
    NormConfig,
    RopeConfig,
)

config = ModelConfig(
    vocab_size=256,
    hidden_size=64,
    num_layers=2,
    max_position_embeddings=128,
    attention=AttentionConfig(num_attention_heads=4, num_query_groups=2),
    mlp=MLPConfig(ffn_hidden_size=176),
    norm=NormConfig(layernorm_epsilon=1e-6),
    rope=RopeConfig(rotary_base=5e5),
    embedding=EmbeddingConfig(share_embeddings_and_output_weights=True),
)
assert ModelConfig.from_json(config.to_json()) == config
print(config.replace(num_layers=4).num_layers)

# %% MoEConfig, RouterConfig, MoELayer
import torch
from te_models import AttentionConfig, MLPConfig, ModelConfig, MoEConfig, MoELayer, RouterConfig

config = ModelConfig(
    vocab_size=256,
    hidden_size=64,
    num_layers=2,
    max_position_embeddings=128,
    attention=AttentionConfig(num_attention_heads=4),
    mlp=MLPConfig(ffn_hidden_size=128),
    moe=MoEConfig(num_moe_experts=8, moe_router_topk=2, moe_ffn_hidden_size=32, router=RouterConfig(score="sigmoid")),
)
y, routed = MoELayer(config)(torch.randn(2, 16, 64))
print(y.shape, routed.tokens_per_expert)  # [2, 16, 64]; [8], the sum is 2 * 16 * 2

# %% MLAConfig, TemperatureConfig
from te_models import AttentionConfig, MLAConfig, TemperatureConfig

latent = MLAConfig(q_lora_rank=None, kv_lora_rank=32, qk_head_dim=16, qk_pos_emb_head_dim=8, v_head_dim=16)
attention = AttentionConfig(
    num_attention_heads=4,
    mla=latent,
    temperature_tuning=TemperatureConfig(floor_scale=8192.0, attn_scale=0.1, layers="all"),
)
print(attention.mla.kv_lora_rank)

# %% ConfigError
from te_models import ConfigError, MLPConfig

try:
    MLPConfig(ffn_hidden_size=0)
except ConfigError as error:
    print(error)  # names the field, the value and what is allowed

# %% GPTModel, ModelOutput, generate, stream, KVCache
import torch
from te_models import AttentionConfig, GPTModel, KVCache, MLPConfig, ModelConfig, ModelOutput, generate, stream

config = ModelConfig(
    vocab_size=256,
    hidden_size=64,
    num_layers=2,
    max_position_embeddings=128,
    attention=AttentionConfig(num_attention_heads=4),
    mlp=MLPConfig(ffn_hidden_size=176),
)
model = GPTModel(config, dtype=torch.bfloat16)
tokens = torch.randint(256, (2, 16))
output = model(tokens, labels=tokens)
assert isinstance(output, ModelOutput) and output.logits.shape == (2, 16, 256)
output.loss.backward()

model.eval()
print(generate(model, tokens, max_new_tokens=4).shape)  # [2, 20]
for token in stream(model, tokens, max_new_tokens=4, temperature=0.8, seed=0):
    print(token)  # [2], the next token of each row
cache = KVCache(config, batch_size=2, max_length=32, dtype=torch.bfloat16)
with torch.no_grad():
    model(tokens, cache=cache)  # fills the cache
    print(model(tokens[:, -1:], cache=cache).logits.shape)  # [2, 1, 256]: position 16

# %% StaticKVCache
import torch
from te_models import AttentionConfig, GPTModel, MLPConfig, ModelConfig, StaticKVCache

config = ModelConfig(
    vocab_size=256,
    hidden_size=64,
    num_layers=2,
    max_position_embeddings=128,
    attention=AttentionConfig(num_attention_heads=4),
    mlp=MLPConfig(ffn_hidden_size=176),
)
model, tokens = GPTModel(config).eval(), torch.randint(256, (2, 16))
cache = StaticKVCache(config, batch_size=2, max_length=32)  # what generate(compile=True) decodes with
with torch.no_grad():
    token = model(tokens, cache=cache).logits[:, -1:].argmax(dim=-1)
    for position in (16, 17):
        logits = model(token, position_ids=torch.tensor([[position]]), cache=cache.step).logits
        cache.step.position.add_(1)
        token = logits.argmax(dim=-1)
print(token.shape)  # [2, 1]

# %% DraftModel, Draft
import torch
from te_models import AttentionConfig, Draft, DraftModel, GPTModel, MLPConfig, ModelConfig, generate

config = ModelConfig(
    vocab_size=256,
    hidden_size=64,
    num_layers=4,
    max_position_embeddings=128,
    attention=AttentionConfig(num_attention_heads=4),
    mlp=MLPConfig(ffn_hidden_size=176),
)
model, small = GPTModel(config).eval(), GPTModel(config.replace(num_layers=1)).eval()
draft = DraftModel(small)
assert isinstance(draft, Draft)  # what proposes tokens in another way is another subclass
tokens = torch.randint(256, (1, 16))
print(generate(model, tokens, max_new_tokens=20, draft_model=draft, num_draft_tokens=4).shape)  # [1, 36]
print(draft.acceptance_rate)

# %% MTPDraft
import torch
from te_models import AttentionConfig, GPTModel, MLPConfig, ModelConfig, MTPDraft, generate

config = ModelConfig(
    vocab_size=256,
    hidden_size=64,
    num_layers=2,
    max_position_embeddings=128,
    attention=AttentionConfig(num_attention_heads=4),
    mlp=MLPConfig(ffn_hidden_size=176),
    mtp_num_layers=1,  # of a folder that has such layers: GPTModel.from_pretrained(folder, mtp=True)
)
model, draft = GPTModel(config).eval(), MTPDraft()
tokens = torch.randint(256, (1, 16))
print(generate(model, tokens, max_new_tokens=20, draft_model=draft, num_draft_tokens=2).shape)  # [1, 36]
print(draft.acceptance_rate)

# %% DecoderLayer
import torch
from te_models import AttentionConfig, GPTModel, MLPConfig, ModelConfig, DecoderLayer

config = ModelConfig(
    vocab_size=256,
    hidden_size=64,
    num_layers=2,
    max_position_embeddings=128,
    attention=AttentionConfig(num_attention_heads=4),
    mlp=MLPConfig(ffn_hidden_size=176),
)
layer = GPTModel(config).decoder.layers[1]
assert isinstance(layer, DecoderLayer)
print(sum(parameter.numel() for parameter in layer.parameters()))

# %% compile_model
import torch
from te_models import AttentionConfig, GPTModel, MLPConfig, ModelConfig, compile_model

config = ModelConfig(
    vocab_size=64,
    hidden_size=32,
    num_layers=1,
    max_position_embeddings=32,
    attention=AttentionConfig(num_attention_heads=2),
    mlp=MLPConfig(ffn_hidden_size=48),
)
model = compile_model(GPTModel(config), mode="block")  # in place; parameter names do not change
print(model(torch.arange(8)[None]).logits.shape)

# %% take_expert_load
import torch
from te_models import AttentionConfig, GPTModel, MLPConfig, ModelConfig, MoEConfig, take_expert_load

config = ModelConfig(
    vocab_size=64,
    hidden_size=32,
    num_layers=2,
    max_position_embeddings=32,
    attention=AttentionConfig(num_attention_heads=2),
    mlp=MLPConfig(ffn_hidden_size=48),
    moe=MoEConfig(num_moe_experts=4, moe_router_topk=2, moe_ffn_hidden_size=16, moe_expert_capacity_factor=1.25),
)
model, tokens = GPTModel(config), torch.arange(16)[None]
model(tokens, labels=tokens).loss.backward()
load = take_expert_load(model)
print(load.tokens)  # [2, 4]: tokens of each expert in each MoE layer
print(load.metrics())  # of each layer: the fullest expert, the entropy of the shares, dropped choices

# %% update_expert_bias
import torch
from te_models import AttentionConfig, GPTModel, MLPConfig, ModelConfig, MoEConfig, RouterConfig, update_expert_bias

config = ModelConfig(
    vocab_size=64,
    hidden_size=32,
    num_layers=2,
    max_position_embeddings=32,
    attention=AttentionConfig(num_attention_heads=2),
    mlp=MLPConfig(ffn_hidden_size=48),
    moe=MoEConfig(
        num_moe_experts=4,
        moe_router_topk=2,
        moe_ffn_hidden_size=16,
        router=RouterConfig(score="sigmoid", expert_bias=True),
    ),
)
model, tokens = GPTModel(config), torch.arange(16)[None]
optimizer = torch.optim.AdamW(model.parameters())
model(tokens, labels=tokens).loss.backward()
optimizer.step()
print(update_expert_bias(model, rate=1e-3))  # [2, 4]: tokens of each expert in each MoE layer

# %% logprobs, RouterRecord
import torch
from te_models import (
    AttentionConfig,
    GPTModel,
    MLPConfig,
    ModelConfig,
    MoEConfig,
    RouterRecord,
    generate,
    logprobs,
)

config = ModelConfig(
    vocab_size=64,
    hidden_size=32,
    num_layers=2,
    max_position_embeddings=64,
    attention=AttentionConfig(num_attention_heads=2),
    mlp=MLPConfig(ffn_hidden_size=48),
    moe=MoEConfig(num_moe_experts=4, moe_router_topk=2, moe_ffn_hidden_size=16),
)
model, prompts = GPTModel(config), torch.randint(64, (2, 8))
record = RouterRecord()
with record.recording(model):  # which experts each token is sent to
    tokens = generate(model, prompts, max_new_tokens=6, temperature=1.0, seed=0)
labels = tokens.clone()
labels[:, :8] = -100  # the answers alone count
with record.replaying(model, length=tokens.shape[1]):  # the same experts while the model learns
    scores = logprobs(model, tokens, labels).sum(-1)
    (-scores.mean()).backward()
print(scores.shape, record.indices.shape)  # [2]; [2, 2, 13, 2]: layers, rows, tokens read, experts of a token

# %% ModelRefit
import torch
from te_models import AttentionConfig, GPTModel, MLPConfig, ModelConfig, ModelRefit
from te_models.layers import MXFP8BlockScaling, quantized_model_init

config = ModelConfig(
    vocab_size=64,
    hidden_size=32,
    num_layers=2,
    max_position_embeddings=64,
    attention=AttentionConfig(num_attention_heads=2),
    mlp=MLPConfig(ffn_hidden_size=64),
)
model = GPTModel(config)
with quantized_model_init(recipe=MXFP8BlockScaling()):
    served = GPTModel(config, dtype=torch.bfloat16)
refit = ModelRefit(served)
print(len(refit.push(model)))  # 15: every parameter
with torch.no_grad():
    model.get_parameter("decoder.final_layernorm.weight").mul_(2)
print(refit.push(model))  # ('decoder.final_layernorm.weight',)
