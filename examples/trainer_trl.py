"""TRL's SFTTrainer over a te_models model, on chats, with FP8 GEMMs.

    python examples/trainer_trl.py models/smollm2-instruct chats.jsonl --steps 100      # needs the extra trl

chats.jsonl has lines such as {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", ...}]}.
"""

import argparse
import json
from pathlib import Path

import datasets
import torch
import transformers
import trl

from te_models.hf import RecipeStateCallback, TEModelForCausalLM
from te_models.layers import Float8CurrentScaling

parser = argparse.ArgumentParser()
parser.add_argument("model", help="te_models or Hugging Face folder, with its tokenizer and a chat template")
parser.add_argument("chats", help="JSON lines")
parser.add_argument("--output", default="runs/trl")
parser.add_argument("--steps", type=int, default=100)
parser.add_argument("--length", type=int, default=512)
args = parser.parse_args()

model = TEModelForCausalLM.from_pretrained(args.model, dtype="float32")  # float32 weights, bfloat16 compute below
model.recipe = Float8CurrentScaling()
tokenizer = transformers.AutoTokenizer.from_pretrained(args.model)

chats = [json.loads(line) for line in Path(args.chats).read_text(encoding="utf-8").splitlines()]
trainer = trl.SFTTrainer(
    model,
    args=trl.SFTConfig(
        output_dir=args.output,
        max_steps=args.steps,
        max_length=args.length,
        per_device_train_batch_size=2,
        learning_rate=2e-5,
        bf16=True,
        use_cpu=not torch.cuda.is_available(),
        gradient_checkpointing=False,
        report_to=[],
        logging_steps=10,
    ),
    train_dataset=datasets.Dataset.from_list(chats),
    processing_class=tokenizer,
    callbacks=[RecipeStateCallback()],  # checkpoints then hold the state of recipes that have one
)
result = trainer.train()
print(f"loss {result.training_loss:.4f}")
model.save_pretrained(f"{args.output}/final")  # te-models export writes a Hugging Face folder of it
