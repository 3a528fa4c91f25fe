"""Turn a dense model into a mixture of experts that computes the same, and train it on.

python examples/upcycle.py models/smollm2 "corpus/**/*.py" --experts 4 --steps 200
"""

import argparse
from pathlib import Path

from te_models.checkpoints import upcycle
from te_models.training import DataConfig, ModelSource, OptimizerConfig, PrecisionConfig, TrainConfig, train

parser = argparse.ArgumentParser()
parser.add_argument("dense", help="folder of the dense model")
parser.add_argument("text", nargs="+", help="files or glob patterns")
parser.add_argument("--experts", type=int, default=4)
parser.add_argument("--output", default="runs/upcycled")
parser.add_argument("--steps", type=int, default=200)
parser.add_argument("--length", type=int, default=512)
parser.add_argument("--no-compile", action="store_true")
args = parser.parse_args()

mixture = Path(f"{args.output}-start")
if not mixture.exists():
    # Every expert is a copy of the dense MLP; the noise makes them differ from the first step on.
    upcycle(args.dense, mixture, args.experts, 2, noise_std=1e-3)
result = train(
    TrainConfig(
        output_dir=args.output,
        steps=args.steps,
        compile=not args.no_compile,
        model=ModelSource(path=str(mixture)),
        data=DataConfig(
            path=f"{args.output}-tokens", text=tuple(args.text), tokenizer=args.dense, sequence_length=args.length
        ),
        # the routers are new, everything else was trained: let them learn faster
        optimizer=OptimizerConfig(lr=5e-5, lr_mult=("*.router.*=10",), master_weights=True),
        precision=PrecisionConfig(dtype="bf16"),
    )
)
print(f"loss {result.loss}, validation loss {result.validation_loss}: {result.model_dir}")
