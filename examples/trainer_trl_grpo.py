"""TRL's GRPOTrainer over a te_models model, whose own `generate` samples: small letters are rewarded.

    python examples/trainer_trl_grpo.py models/smollm2 --steps 60      # needs the extra trl

The score is the share of small letters in sampled text.
"""

import argparse
import string

import datasets
import torch
import transformers
import trl

from te_models import generate, logprobs
from te_models.hf import TEModelForCausalLM

parser = argparse.ArgumentParser()
parser.add_argument("model", help="te_models or Hugging Face folder, with its tokenizer")
parser.add_argument("--output", default="runs/trl-grpo")
parser.add_argument("--steps", type=int, default=60)
parser.add_argument("--lr", type=float, default=1e-4)
args = parser.parse_args()

tokenizer = transformers.AutoTokenizer.from_pretrained(args.model)
tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
model = TEModelForCausalLM.from_pretrained(args.model, dtype="float32")


def small_letters(completions: list[str], **_: object) -> list[float]:
    """Return the reward of each text: its share of small letters."""
    return [sum(c in string.ascii_lowercase for c in text) / max(len(text), 1) for text in completions]


@torch.no_grad()
def rollout(prompts: list[str], trainer: object) -> dict[str, list]:
    """Return prompts, 8 sampled tokens behind each, and their log-probabilities, as TRL takes them."""
    rows = tokenizer(prompts, return_tensors="pt", padding=True, padding_side="left").to(model.device)
    ids, mask = rows["input_ids"], rows["attention_mask"]
    tokens = generate(model.gpt, ids, 8, attention_mask=mask, temperature=1.0)
    scores = logprobs(model, tokens, attention_mask=torch.nn.functional.pad(mask, (0, 8), value=1))[:, -9:-1]
    prompt_ids = [row[kept.bool()].tolist() for row, kept in zip(ids, mask, strict=True)]
    return {"prompt_ids": prompt_ids, "completion_ids": tokens[:, -8:].tolist(), "logprobs": scores.tolist()}


def score() -> float:
    """Return the mean reward of 128 samples."""
    texts = tokenizer.batch_decode(rollout(["word: "] * 128, None)["completion_ids"], skip_special_tokens=True)
    return sum(small_letters(texts)) / len(texts)


before, data = score(), datasets.Dataset.from_list([{"prompt": "word: "}] * 64)
options = {"output_dir": args.output, "max_steps": args.steps, "learning_rate": args.lr, "bf16": False, "report_to": []}
options |= {"use_cpu": not torch.cuda.is_available(), "gradient_checkpointing": False, "beta": 0.0}
config = trl.GRPOConfig(per_device_train_batch_size=32, num_generations=16, max_completion_length=8, **options)
shared = {"args": config, "train_dataset": data, "processing_class": tokenizer}
trl.GRPOTrainer(model, reward_funcs=small_letters, rollout_func=rollout, **shared).train()
print(f"score {before:.3f} before, {score():.3f} after {args.steps} steps")
model.save_pretrained(f"{args.output}/final")
