"""A script written for Transformer Engine, of which two lines changed: the imports (docs/porting.md).

    python examples/port_of_a_transformer_engine_script.py --hidden 256 --steps 20

Before:    import transformer_engine.pytorch as te
           from transformer_engine.common.recipe import DelayedScaling, Format
"""

import argparse

import torch

import te_models.layers as te
from te_models.layers.recipe import DelayedScaling, Format

parser = argparse.ArgumentParser()
parser.add_argument("--hidden", type=int, default=256)
parser.add_argument("--heads", type=int, default=4)
parser.add_argument("--layers", type=int, default=2)
parser.add_argument("--length", type=int, default=64)
parser.add_argument("--steps", type=int, default=20)
args = parser.parse_args()

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
blocks = [
    te.TransformerLayer(
        args.hidden,
        4 * args.hidden,
        args.heads,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        self_attn_mask_type="causal",
        params_dtype=torch.bfloat16,
    )
    for _ in range(args.layers)
]
model = torch.nn.Sequential(*blocks).to(device)
fp8 = DelayedScaling(fp8_format=Format.HYBRID, amax_history_len=16, amax_compute_algo="max")
optimizer = te.optimizers.FusedAdam(model.parameters(), lr=1e-3)

x = torch.randn(args.length, 4, args.hidden, device=device, dtype=torch.bfloat16)  # [sequence, batch, hidden]
target = x.roll(1, dims=0)  # every position predicts the one before it
for step in range(args.steps):
    with te.fp8_autocast(enabled=True, fp8_recipe=fp8):
        y = model(x)
    loss = torch.nn.functional.mse_loss(y.float(), target.float())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if step % 5 == 0 or step == args.steps - 1:
        print(f"step {step}  loss {loss.item():.4f}")
