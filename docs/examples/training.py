"""Examples of the names of `te_models.training`. A cell begins with the names that it shows; each runs by itself."""

# %% write_dataset, TokenDataset, Windows, DataError
from pathlib import Path

from te_models.training import DataError, TokenDataset, Windows, write_dataset

data = write_dataset("data/counts", ([list(range(100))] for _ in range(10)), vocab_size=256)
assert isinstance(data, TokenDataset) and data.vocab_size == 256
windows = Windows(data, sequence_length=16, split="train", validation_fraction=0.1, seed=0)
print(len(windows), windows.batch(0, 2).shape)  # two windows of 16 tokens, and the token after each
try:
    TokenDataset.open(Path("data/missing"))
except DataError as error:
    print(error)

# %% build_dataset, DocumentOptions
from pathlib import Path

from te_models.training import DocumentOptions, build_dataset

Path("hello.txt").write_text("hello, world\n" * 50)
data = build_dataset("data/hello", ["*.txt"], "bytes")
print(data.vocab_size)
Path("pairs.jsonl").write_text('{"question": "2 + 2 = ", "answer": "4"}\n' * 50)
options = DocumentOptions(format="prompt_completion", fields=("prompt=question", "completion=answer"))
print(build_dataset("data/pairs", ["pairs.jsonl"], "bytes", options=options).loss_mask)  # the answers alone count

# %% DiLoCoConfig
from te_models.training import DiLoCoConfig

local = DiLoCoConfig(inner_steps=500, outer_lr=0.7, outer_momentum=0.9)  # [diloco] of a run's TOML file
assert DiLoCoConfig.from_dict(local.to_dict()) == local and DiLoCoConfig().inner_steps == 0

# %% load_config, TrainConfig, ModelSource, DataConfig, OptimizerConfig, LoRAConfig, ScheduleConfig, PrecisionConfig
from te_models import AttentionConfig, MLPConfig, ModelConfig
from te_models.training import (
    DataConfig,
    LoRAConfig,
    ModelSource,
    OptimizerConfig,
    PrecisionConfig,
    ScheduleConfig,
    TrainConfig,
)

model = ModelConfig(
    vocab_size=257,
    hidden_size=32,
    num_layers=1,
    max_position_embeddings=64,
    attention=AttentionConfig(num_attention_heads=2),
    mlp=MLPConfig(ffn_hidden_size=48),
)
config = TrainConfig(
    output_dir="runs/example",
    steps=4,
    model=ModelSource(config=model),
    data=DataConfig(path="data/bytes", text=("*.txt",), tokenizer="bytes", sequence_length=16),
    optimizer=OptimizerConfig(lr=1e-3, weight_decay=0.0),
    lora=LoRAConfig(rank=8),  # adapters are trained in place of the weights
    schedule=ScheduleConfig(kind="constant"),
    precision=PrecisionConfig(dtype="fp32"),
)
assert TrainConfig.from_json(config.to_json()) == config
# from a file: load_config("run.toml", ["--steps", "4"])

# %% train, TrainResult, read_metrics, list_checkpoints, latest_checkpoint, CheckpointConfig, EvaluationConfig, LogConfig, ProfileConfig  # noqa: E501
from pathlib import Path

from te_models import AttentionConfig, MLPConfig, ModelConfig
from te_models.training import (
    CheckpointConfig,
    DataConfig,
    EvaluationConfig,
    LogConfig,
    ProfileConfig,
    ModelSource,
    TrainConfig,
    TrainResult,
    latest_checkpoint,
    list_checkpoints,
    read_metrics,
    train,
)

Path("numbers.txt").write_text("one two three four\n" * 200)
model = ModelConfig(
    vocab_size=257,
    hidden_size=32,
    num_layers=1,
    max_position_embeddings=64,
    attention=AttentionConfig(num_attention_heads=2),
    mlp=MLPConfig(ffn_hidden_size=48),
)
result = train(
    TrainConfig(
        output_dir="runs/numbers",
        steps=4,
        compile=False,
        model=ModelSource(config=model),
        data=DataConfig(
            path="data/numbers", text=("numbers.txt",), tokenizer="bytes", sequence_length=16, validation_fraction=0.1
        ),
        checkpoint=CheckpointConfig(every=2),
        evaluation=EvaluationConfig(every=2, batches=1),
        log=LogConfig(progress=False),
        profile=ProfileConfig(num_steps=0),
    )
)
assert isinstance(result, TrainResult) and result.step == 4
print([row["loss"] for row in read_metrics(result.metrics_file)])
assert latest_checkpoint(Path("runs/numbers")) == list_checkpoints(Path("runs/numbers"))[-1]

# %% lr_at
from te_models.training import ScheduleConfig, lr_at

schedule = ScheduleConfig(kind="wsd", warmup_steps=10, decay_steps=20)
print([lr_at(step, peak=3e-4, steps=100, schedule=schedule) for step in (0, 50, 99)])

# %% plot_loss
import json
from pathlib import Path

from te_models.training import plot_loss

rows = [json.dumps({"step": step, "loss": 5.0 / step}) for step in range(1, 20)]
Path("metrics.jsonl").write_text("\n".join(rows) + "\n")
plot_loss({"run": Path("metrics.jsonl")}, Path("loss.png"))  # needs the extra `plot`

# %% ParallelConfig
from te_models.parallel import ParallelDims
from te_models.training import ParallelConfig

table = ParallelConfig(data_parallel_shard_size=-1, expert_model_parallel_size=4)
print(ParallelDims.of(table.to_dict(), ranks=8))

# %% PosttrainingConfig
from te_models.training import PosttrainingConfig

pairs = PosttrainingConfig(method="dpo", beta=0.1)
print(pairs.loss_type)

# %% Callback, CallbackError, RunView, HubConfig, PushToHub, model_card, push_to_hub
from pathlib import Path

from te_models import AttentionConfig, MLPConfig, ModelConfig
from te_models.training import (
    Callback,
    CallbackError,
    DataConfig,
    HubConfig,
    LogConfig,
    ModelSource,
    RunView,
    TrainConfig,
    model_card,
    train,
)


class StopEarly(Callback):
    def on_step(self, run: RunView, loss: float) -> None:
        if run.step == 2:
            raise RuntimeError("that is enough")


Path("letters.txt").write_text("a b c d e f g\n" * 200)
model = ModelConfig(
    vocab_size=257,
    hidden_size=32,
    num_layers=1,
    max_position_embeddings=64,
    attention=AttentionConfig(num_attention_heads=2),
    mlp=MLPConfig(ffn_hidden_size=48),
)
config = TrainConfig(
    output_dir="runs/letters",
    steps=4,
    compile=False,
    model=ModelSource(config=model),
    data=DataConfig(path="data/letters", text=("letters.txt",), tokenizer="bytes", sequence_length=16),
    log=LogConfig(progress=False),
    hub=HubConfig(repo_id=None),  # "organisation/name": PushToHub uploads the result, as push_to_hub does later
)
try:
    train(config, callbacks=[StopEarly()])
except CallbackError as error:
    print(error)  # names the callback, the event, the step, and the checkpoint that was saved
train(config)
print(model_card("runs/letters")[:200])
