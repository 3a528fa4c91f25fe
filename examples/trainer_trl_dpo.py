"""TRL's DPOTrainer over a te_models model: answers in small letters become likelier than answers in capitals.

    python examples/trainer_trl_dpo.py models/smollm2 --steps 30      # needs the extra trl

The score is the share of held-out pairs whose better answer is the likelier one.
"""

import argparse
import random
import string

import datasets
import torch
import transformers
import trl

from te_models import logprobs
from te_models.hf import TEModelForCausalLM

parser = argparse.ArgumentParser()
parser.add_argument("model", help="te_models or Hugging Face folder, with its tokenizer")
parser.add_argument("--output", default="runs/trl-dpo")
parser.add_argument("--steps", type=int, default=30)
parser.add_argument("--lr", type=float, default=1e-4)
args = parser.parse_args()

tokenizer = transformers.AutoTokenizer.from_pretrained(args.model)
tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
model, reference = (TEModelForCausalLM.from_pretrained(args.model, dtype="float32") for _ in range(2))

draw = random.Random(0)
words = ["".join(draw.choices(string.ascii_lowercase, k=6)) for _ in range(600)]
pairs = [{"prompt": "word: ", "chosen": word, "rejected": word[::-1].upper()} for word in words]


@torch.no_grad()
def score() -> float:
    """Return the share of the last 64 pairs that are in the right order."""
    sums = []
    for name in ("chosen", "rejected"):
        texts = [pair["prompt"] + pair[name] for pair in pairs[-64:]]
        rows = tokenizer(texts, return_tensors="pt", padding=True, padding_side="right").to(model.device)
        sums.append(logprobs(model.eval(), rows["input_ids"], attention_mask=rows["attention_mask"]).sum(-1))
    return float((sums[0] > sums[1]).float().mean())


before = score()
options = trl.DPOConfig(
    output_dir=args.output,
    max_steps=args.steps,
    learning_rate=args.lr,
    use_cpu=not torch.cuda.is_available(),
    bf16=False,
    gradient_checkpointing=False,
    report_to=[],
)
data = datasets.Dataset.from_list(pairs[:-64])
trl.DPOTrainer(model, ref_model=reference, args=options, train_dataset=data, processing_class=tokenizer).train()
print(f"score {before:.3f} before, {score():.3f} after {args.steps} steps")
model.save_pretrained(f"{args.output}/final")
