"""transformers' Trainer over a te_models model, with FP8 GEMMs.

python examples/trainer_transformers.py models/smollm2 notes.txt --steps 100      # needs the extra trainer
"""

import argparse
from pathlib import Path

import torch
import transformers

from te_models.hf import RecipeStateCallback, TEModelForCausalLM
from te_models.layers import DelayedScaling

parser = argparse.ArgumentParser()
parser.add_argument("model", help="te_models or Hugging Face folder, with its tokenizer")
parser.add_argument("text", help="a text file")
parser.add_argument("--output", default="runs/trainer")
parser.add_argument("--steps", type=int, default=100)
parser.add_argument("--length", type=int, default=256)
args = parser.parse_args()

model = TEModelForCausalLM.from_pretrained(args.model, dtype="float32")  # float32 weights, bfloat16 compute below
model.recipe = DelayedScaling()
tokenizer = transformers.AutoTokenizer.from_pretrained(args.model)
ids = torch.tensor(tokenizer(Path(args.text).read_text())["input_ids"])
windows = ids[: len(ids) // args.length * args.length].view(-1, args.length)
trainer = transformers.Trainer(
    model,
    transformers.TrainingArguments(
        output_dir=args.output,
        max_steps=args.steps,
        per_device_train_batch_size=2,
        learning_rate=1e-4,
        bf16=True,
        use_cpu=not torch.cuda.is_available(),
        report_to=[],
        logging_steps=10,
    ),
    train_dataset=[{"input_ids": window, "labels": window} for window in windows],
    callbacks=[RecipeStateCallback()],  # checkpoints then hold the scales of delayed scaling
)
trainer.train()
model.save_pretrained(f"{args.output}/final")  # te-models export writes a Hugging Face folder of it
