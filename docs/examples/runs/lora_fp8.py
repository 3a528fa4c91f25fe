"""LoRA over weights that are stored in FP8: the base stays quantized, adapters are trained, and merged in the end.

    python docs/examples/runs/lora_fp8.py models/smollm2 notes.txt --steps 100     # needs the extra peft

The folder that `save_pretrained` writes is an adapter of peft, which `TEModelForCausalLM.from_pretrained` reads.
"""

import argparse
from pathlib import Path

import peft
import torch
import transformers

from te_models.hf import TEModelForCausalLM
from te_models.layers import Float8CurrentScaling

parser = argparse.ArgumentParser()
parser.add_argument("model", help="folder of the base model, with its tokenizer")
parser.add_argument("text", help="a text file")
parser.add_argument("--output", default="runs/lora")
parser.add_argument("--steps", type=int, default=100)
parser.add_argument("--length", type=int, default=256)
args = parser.parse_args()

torch.manual_seed(0)
model = TEModelForCausalLM.from_pretrained(args.model, dtype="bfloat16", recipe=Float8CurrentScaling())
# Every GEMM layer, experts included; routers, embedding and output layer stay as they are.
config = peft.LoraConfig(target_modules="all-linear", r=8, lora_alpha=16, task_type="CAUSAL_LM")
adapted = peft.get_peft_model(model, config)
model.recipe = Float8CurrentScaling()  # the GEMMs with the base weights run in FP8
adapted.print_trainable_parameters()

tokenizer = transformers.AutoTokenizer.from_pretrained(args.model)
ids = torch.tensor(tokenizer(Path(args.text).read_text())["input_ids"])
windows = ids[: len(ids) // args.length * args.length].view(-1, args.length)
trained = [p for p in adapted.parameters() if p.requires_grad]
optimizer = torch.optim.AdamW(trained, lr=2e-4, weight_decay=0.0)
adapted.train()
for step in range(args.steps):
    batch = windows[step % len(windows)][None]
    loss = adapted(input_ids=batch, labels=batch).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if step % 10 == 0 or step == args.steps - 1:
        print(f"step {step}  loss {loss.item():.4f}")

adapted.eval()
adapted.save_pretrained(args.output)  # the adapter alone
merged = adapted.merge_and_unload()  # base weights become their values plus the adapter, in bfloat16
merged.save_pretrained(f"{args.output}-merged")
