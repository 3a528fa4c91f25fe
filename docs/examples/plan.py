"""Examples of the names of `te_models.plan`. A cell begins with the names that it shows; each runs by itself."""

# %% Hardware
from te_models import ConfigError
from te_models.plan import Hardware

print(Hardware(memory_gib=141.0))
try:
    Hardware(efficiency=2.0)
except ConfigError as error:
    print(error)

# %% plan_run, plan_layouts, Plan, Refused, Estimated
from te_models import AttentionConfig, MLPConfig, ModelConfig
from te_models.plan import Estimated, Hardware, Plan, Refused, plan_layouts, plan_run
from te_models.training import DataConfig, ModelSource, OptimizerConfig, TrainConfig

model = ModelConfig(
    vocab_size=64,
    hidden_size=32,
    num_layers=2,
    max_position_embeddings=64,
    attention=AttentionConfig(num_attention_heads=1),
    mlp=MLPConfig(ffn_hidden_size=48),
)
config = TrainConfig(
    output_dir="planned",
    steps=10,
    compile=False,
    model=ModelSource(config=model),
    data=DataConfig(path="tokens", sequence_length=64),
    optimizer=OptimizerConfig(lr=1e-3),
)
plan = plan_run(config, ranks=2)
assert isinstance(plan, Plan) and plan.fits
print(plan.memory, plan.traffic["all_reduce", "dp"])
whole, *_, split = plan_layouts(config, 2, Hardware())
assert isinstance(whole, Plan) and isinstance(split, Refused)
print(split.reason)  # one head is no work for two ranks
assert not any(isinstance(its, Estimated) for its in (whole, *_))  # so few layouts are all planned
