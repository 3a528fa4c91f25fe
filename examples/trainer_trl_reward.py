"""TRL's RewardTrainer over a te_models model: texts in small letters get a higher reward than texts in capitals.

    python examples/trainer_trl_reward.py models/smollm2 --steps 30      # needs the extra trl

The reward of a text is the logit of token 0 behind it, so that the model needs no head and stays an ordinary folder.
The score is the share of held-out pairs in the right order.
"""

import argparse
import random
import string

import datasets
import torch
import transformers
import trl

from te_models.hf import TEModelForCausalLM


class RewardModel(TEModelForCausalLM):
    """A model that returns the rewards of texts, [B, 1], as `logits`."""

    def forward(self, input_ids, attention_mask=None, **_):
        logits = super().forward(input_ids, attention_mask=attention_mask, use_cache=False).logits
        last = (torch.arange(input_ids.shape[1], device=input_ids.device) * attention_mask).argmax(-1)
        rewards = logits[torch.arange(len(last), device=last.device), last, 0].float()
        return transformers.modeling_outputs.SequenceClassifierOutput(logits=rewards[:, None])


parser = argparse.ArgumentParser()
parser.add_argument("model", help="te_models or Hugging Face folder, with its tokenizer")
parser.add_argument("--output", default="runs/trl-reward")
parser.add_argument("--steps", type=int, default=30)
parser.add_argument("--lr", type=float, default=1e-4)
args = parser.parse_args()

tokenizer = transformers.AutoTokenizer.from_pretrained(args.model)
tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
model = RewardModel.from_pretrained(args.model, dtype="float32")
model.config.num_labels = 1
draw = random.Random(0)
words = ["".join(draw.choices(string.ascii_lowercase, k=6)) for _ in range(600)]
pairs = [{"chosen": word, "rejected": word[::-1].upper()} for word in words]


@torch.no_grad()
def score() -> float:
    """Return the share of the last 64 pairs that are in the right order."""
    texts = [pair[name] for name in ("chosen", "rejected") for pair in pairs[-64:]]
    rows = tokenizer(texts, return_tensors="pt", padding=True, padding_side="right").to(model.device)
    rewards = model.eval()(rows["input_ids"], rows["attention_mask"]).logits[:, 0]
    return float((rewards[:64] > rewards[64:]).float().mean())


before, data = score(), datasets.Dataset.from_list(pairs[:-64])
options = {"output_dir": args.output, "max_steps": args.steps, "learning_rate": args.lr, "bf16": False, "report_to": []}
options |= {"use_cpu": not torch.cuda.is_available(), "gradient_checkpointing": False}
trl.RewardTrainer(model, args=trl.RewardConfig(**options), train_dataset=data, processing_class=tokenizer).train()
print(f"score {before:.3f} before, {score():.3f} after {args.steps} steps")
model.save_pretrained(f"{args.output}/final")
