"""Examples of the names of `te_models.parallel`. A cell begins with the names that it shows; each runs by itself."""

# %% ParallelDims
from te_models import ConfigError
from te_models.parallel import ParallelDims

dims = ParallelDims(ranks=16, data_parallel_shard_size=-1, tensor_model_parallel_size=2)
assert (dims.data_parallel_replicate_size, dims.data_parallel_shard_size) == (1, 8)
print(dims.data_ranks)  # of 16 ranks, 8 have data of their own
try:
    ParallelDims(ranks=16, data_parallel_shard_size=3)
except ConfigError as error:
    print(error)

# %% parallelize, ParallelMesh
import torch
import torch.distributed as dist

from te_models import AttentionConfig, GPTModel, MLPConfig, ModelConfig
from te_models.parallel import ParallelDims, ParallelMesh, parallelize

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # under torchrun: no arguments but "gloo"
mesh = ParallelDims(ranks=dist.get_world_size(), data_parallel_shard_size=-1).build_mesh("cpu")
assert isinstance(mesh, ParallelMesh) and mesh.layers.mesh_dim_names == ("pp", "dp_replicate", "dp_shard", "cp", "tp")
config = ModelConfig(
    vocab_size=64,
    hidden_size=32,
    num_layers=1,
    max_position_embeddings=64,
    attention=AttentionConfig(num_attention_heads=2),
    mlp=MLPConfig(ffn_hidden_size=48),
)
torch.manual_seed(0)
model = parallelize(GPTModel(config, device="meta"), mesh, device="cpu")
tokens = torch.arange(16)[None]
print(model(tokens, labels=tokens, return_logits=False).loss)
dist.destroy_process_group()

# %% StageLayout
# Which layers of ten each of two ranks has, under a schedule of two stages a rank.
from te_models.parallel import StageLayout

stages = StageLayout(2, "Interleaved1F1B")
for rank in range(2):
    print(rank, [stages.layers(10)[number] for number in stages.of_rank(rank)])
