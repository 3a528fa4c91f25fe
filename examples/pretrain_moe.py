"""Pretrain a small mixture of experts in a loop of your own: data, recipe, optimizer, balance of experts.

python examples/pretrain_moe.py "corpus/**/*.py" --steps 500
"""

import argparse
from pathlib import Path

import torch

import te_models
from te_models.layers import Float8CurrentScaling, FusedAdamW, autocast
from te_models.training import ScheduleConfig, TokenDataset, Windows, build_dataset, lr_at

parser = argparse.ArgumentParser()
parser.add_argument("text", nargs="+", help="files or glob patterns")
parser.add_argument("--output", default="runs/moe")
parser.add_argument("--steps", type=int, default=500)
parser.add_argument("--hidden", type=int, default=256)
parser.add_argument("--length", type=int, default=512)
parser.add_argument("--no-compile", action="store_true")
args = parser.parse_args()

config = te_models.ModelConfig(
    vocab_size=257,
    hidden_size=args.hidden,
    num_layers=4,
    max_position_embeddings=args.length,
    attention=te_models.AttentionConfig(num_attention_heads=8, num_query_groups=4),
    mlp=te_models.MLPConfig(ffn_hidden_size=2 * args.hidden),
    moe=te_models.MoEConfig(
        num_moe_experts=8,
        moe_router_topk=2,
        moe_ffn_hidden_size=args.hidden // 2,
        router=te_models.RouterConfig(
            score="sigmoid", expert_bias=True
        ),  # balanced by a bias, without an auxiliary loss
    ),
)
tokens = Path(f"{args.output}-tokens")
data = TokenDataset.open(tokens) if tokens.exists() else build_dataset(tokens, args.text, "bytes")
windows = Windows(data, args.length, "train", 0.0, seed=0)
torch.manual_seed(0)
gpt = te_models.GPTModel(config, dtype=torch.bfloat16)
model = gpt if args.no_compile else te_models.compile_model(gpt)
optimizer = FusedAdamW(gpt.parameters(), lr=torch.tensor(0.0), master_weights=True)
schedule = ScheduleConfig(kind="cosine", warmup_steps=args.steps // 20)
for step in range(args.steps):
    optimizer.param_groups[0]["lr"].fill_(lr_at(step, peak=1e-3, steps=args.steps, schedule=schedule))
    batch = windows.batch(4 * step, 4)  # the position in the data is a function of the step
    with autocast(recipe=Float8CurrentScaling()):  # the GEMMs of the layers and the experts run in FP8
        loss = model(batch, labels=batch, return_logits=False).loss
    loss.backward()
    torch.nn.utils.clip_grad_norm_(gpt.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    load = te_models.update_expert_bias(gpt, 1e-3)  # [layers, experts]: tokens of each expert
    if step % 10 == 0 or step == args.steps - 1:
        print(f"step {step}  loss {loss.item():.4f}  fullest expert {float(load.max() / load.float().mean()):.2f}")
gpt.save_pretrained(args.output)
