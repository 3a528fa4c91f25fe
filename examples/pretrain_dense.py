"""Pretrain a small dense model on text, from Python: one configuration, one call.

    python examples/pretrain_dense.py "corpus/**/*.py" --steps 500

The same run as a TOML file: docs/training.md. Start the command again and it goes on from its newest checkpoint.
"""

import argparse

import torch

from te_models import AttentionConfig, GPTModel, MLPConfig, ModelConfig, generate
from te_models.training import (
    DataConfig,
    EvaluationConfig,
    ModelSource,
    OptimizerConfig,
    PrecisionConfig,
    ScheduleConfig,
    TrainConfig,
    train,
)

parser = argparse.ArgumentParser()
parser.add_argument("text", nargs="+", help="files or glob patterns")
parser.add_argument("--output", default="runs/dense")
parser.add_argument("--steps", type=int, default=500)
parser.add_argument("--hidden", type=int, default=256)
parser.add_argument("--length", type=int, default=512)
parser.add_argument("--no-compile", action="store_true")
args = parser.parse_args()

# A llama-shaped model over bytes: 256 byte values and the end of a document.
model = ModelConfig(
    vocab_size=257,
    hidden_size=args.hidden,
    num_layers=4,
    max_position_embeddings=args.length,
    attention=AttentionConfig(num_attention_heads=8, num_query_groups=4),
    mlp=MLPConfig(ffn_hidden_size=args.hidden * 11 // 4),
)
result = train(
    TrainConfig(
        output_dir=args.output,
        steps=args.steps,
        compile=not args.no_compile,
        model=ModelSource(config=model),
        data=DataConfig(
            path=f"{args.output}-tokens", text=tuple(args.text), tokenizer="bytes", sequence_length=args.length
        ),
        optimizer=OptimizerConfig(kind="muon", lr=1e-3, master_weights=True),
        schedule=ScheduleConfig(kind="wsd", warmup_steps=args.steps // 20, lr_wsd_decay_style="minus_sqrt"),
        precision=PrecisionConfig(dtype="bf16"),
        evaluation=EvaluationConfig(every=100, batches=4),
    )
)
print(f"validation loss {result.validation_loss}")

trained = GPTModel.from_pretrained(result.model_dir).eval()
prompt = torch.tensor([list(b"def ")])
print(bytes(t for t in generate(trained, prompt, max_new_tokens=16)[0].tolist() if t < 256))
