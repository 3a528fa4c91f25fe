"""Train the same model under several recipes, from the same weights on the same windows, and draw the losses.

    python examples/recipe_comparison.py "corpus/**/*.py" --recipes none current mxfp8 nvfp4 --steps 300

Writes OUTPUT/loss.png (needs the extra plot) and prints how far each recipe's last losses are from the first one's.
"""

import argparse
from pathlib import Path

from te_models import AttentionConfig, MLPConfig, ModelConfig
from te_models.training import (
    DataConfig,
    ModelSource,
    OptimizerConfig,
    PrecisionConfig,
    ScheduleConfig,
    TrainConfig,
    plot_loss,
    read_metrics,
    train,
)

parser = argparse.ArgumentParser()
parser.add_argument("text", nargs="+", help="files or glob patterns")
parser.add_argument("--recipes", nargs="+", default=["none", "current", "block", "mxfp8"])
parser.add_argument("--output", default="runs/recipes")
parser.add_argument("--steps", type=int, default=300)
parser.add_argument("--hidden", type=int, default=256)
parser.add_argument("--length", type=int, default=256)
parser.add_argument("--no-compile", action="store_true")
args = parser.parse_args()

model = ModelConfig(
    vocab_size=257,
    hidden_size=args.hidden,
    num_layers=4,
    max_position_embeddings=args.length,
    attention=AttentionConfig(num_attention_heads=8, num_query_groups=4),
    mlp=MLPConfig(ffn_hidden_size=args.hidden * 11 // 4 // 32 * 32),  # whole blocks of every format
)
data = DataConfig(path=f"{args.output}/tokens", text=tuple(args.text), tokenizer="bytes", sequence_length=args.length)
curves, last = {}, {}
for recipe in args.recipes:
    config = TrainConfig(
        output_dir=f"{args.output}/{recipe}",
        steps=args.steps,
        seed=0,  # the same weights and windows for all
        compile=not args.no_compile,
        model=ModelSource(config=model),
        data=data,
        optimizer=OptimizerConfig(lr=1e-3, master_weights=True),
        schedule=ScheduleConfig(kind="cosine", warmup_steps=args.steps // 20),
        precision=PrecisionConfig(dtype="bf16", recipe=recipe),
    )
    train(config)
    curves[recipe] = Path(config.output_dir) / "metrics.jsonl"
    tail = [row["loss"] for row in read_metrics(curves[recipe])][-max(1, args.steps // 10) :]
    last[recipe] = sum(tail) / len(tail)
plot_loss(curves, Path(args.output) / "loss.png")
first = args.recipes[0]
for recipe, loss in last.items():
    print(f"{recipe:>8}  loss {loss:.4f}  {100 * (loss / last[first] - 1):+.2f} % of the loss of {first}")
