"""Examples of the names of `te_models.checkpoints`. A cell begins with the names that it shows; each runs by itself.

The folder has `SmolLM2-135M` (a Hugging Face folder), `quickstart-out/model` (the same model imported) and
`Qwen3-30B-A3B` (a mixture).
"""

# %% import_hf, export_hf, ConversionPlan
from te_models.checkpoints import ConversionPlan, export_hf, import_hf

plan = import_hf("SmolLM2-135M", "model", dry_run=True)  # checks everything and writes nothing
assert isinstance(plan, ConversionPlan)
print(len(plan.outputs), "tensors")
import_hf("SmolLM2-135M", "model")
export_hf("model", "hf-model")

# %% verify, VerifyReport, check_manifest
from te_models.checkpoints import VerifyReport, check_manifest, verify

report = verify("SmolLM2-135M", "quickstart-out/model")
assert isinstance(report, VerifyReport) and report.equal
print(check_manifest("quickstart-out/model"), "files have the digests that manifest.json lists")

# %% diff, DiffReport
from te_models.checkpoints import DiffReport, diff

report = diff("SmolLM2-135M", "quickstart-out/model")
assert isinstance(report, DiffReport)
print(report.equal_tensors, "equal tensors;", len(report.tensors), "different")

# %% inspect, Inspection
from te_models.checkpoints import Inspection, inspect

found = inspect("SmolLM2-135M")
assert isinstance(found, Inspection)
print(found.family, found.parameters, found.dtypes)

# %% open_checkpoint, Checkpoint
from te_models import GPTModel
from te_models.checkpoints import Checkpoint, open_checkpoint

checkpoint = open_checkpoint("quickstart-out/model")
assert isinstance(checkpoint, Checkpoint)
model = GPTModel(checkpoint.config)
checkpoint.load_into(dict(model.named_parameters()))

# %% quantize, dequantize
from te_models.checkpoints import dequantize, quantize

quantize("quickstart-out/model", "model-mxfp8", "mxfp8")
dequantize("model-mxfp8", "model-plain")

# %% upcycle, relayout, ExpertLayout
from te_models.checkpoints import ExpertLayout, relayout, upcycle

upcycle("quickstart-out/model", "moe", num_experts=4, topk=2)
layout: ExpertLayout = "per-gemm"  # or "grouped"
relayout("moe", "moe-per-gemm", layout)

# %% reshard, toy
from te_models.checkpoints import reshard, toy

reshard("quickstart-out/model", "resharded", max_shard_bytes=50_000_000)
toy("Qwen3-30B-A3B", "tiny-qwen3", layers=1, experts=4)  # a small Hugging Face folder for tests

# %% expected_tensors, FAMILIES
from te_models.checkpoints import FAMILIES, expected_tensors, open_checkpoint

shapes = expected_tensors(open_checkpoint("quickstart-out/model").config)
print(shapes["decoder.final_layernorm.weight"])
print(sorted(FAMILIES))

# %% save_model
from te_models import AttentionConfig, GPTModel, MLPConfig, ModelConfig
from te_models.checkpoints import save_model

config = ModelConfig(
    vocab_size=64,
    hidden_size=32,
    num_layers=1,
    max_position_embeddings=32,
    attention=AttentionConfig(num_attention_heads=2),
    mlp=MLPConfig(ffn_hidden_size=48),
)
save_model(dict(GPTModel(config).named_parameters()), config, "small")  # model.save_pretrained("small") does the same

# %% import_checkpoint, export_checkpoint
from te_models.checkpoints import export_checkpoint, import_checkpoint

export_checkpoint("quickstart-out/model", "saved", to="torchtitan")  # a distributed checkpoint
import_checkpoint("saved", "model-again", config="quickstart-out/model")

# %% import_state_dict, export_state_dict
from te_models import GPTModel
from te_models.checkpoints import export_state_dict, import_state_dict

model = GPTModel.from_pretrained("quickstart-out/model")
state = export_state_dict(model.state_dict(), model.config)  # with the names of Transformer Engine's modules
model.load_state_dict(import_state_dict(state, model.config))

# %% CheckpointError
from te_models.checkpoints import CheckpointError, open_checkpoint

try:
    open_checkpoint("no-such-folder")
except CheckpointError as error:
    print(error)

# %% refit, Refit
import torch
from te_models import AttentionConfig, GPTModel, MLPConfig, ModelConfig
from te_models.checkpoints import Refit, quantize, refit

config = ModelConfig(
    vocab_size=64,
    hidden_size=64,
    num_layers=1,
    max_position_embeddings=32,
    attention=AttentionConfig(num_attention_heads=2),
    mlp=MLPConfig(ffn_hidden_size=64),
)
model = GPTModel(config, dtype=torch.bfloat16)
model.save_pretrained("start")
quantize("start", "served", "mxfp8")  # a folder that is served
with torch.no_grad():
    model.decoder.layers[0].mlp.linear_fc2.weight.mul_(1.5)  # a step of training
done = refit(model, "served", recipe="mxfp8")
assert isinstance(done, Refit)
print(done.replaced, done.tensors)  # files that were written, and whose tensors changed
