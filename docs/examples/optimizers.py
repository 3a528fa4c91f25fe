# %% FusedAdam
import torch
from te_models.layers import Linear
from te_models.layers.optimizers import FusedAdam

layer = Linear(64, 64, params_dtype=torch.bfloat16)
optimizer = FusedAdam(layer.parameters(), lr=1e-3, master_weights=True, store_param_remainders=True)
layer(torch.randn(8, 64, dtype=torch.bfloat16)).sum().backward()
optimizer.step()
print(optimizer.state[layer.weight]["master_param"].dtype, optimizer.param_groups[0]["step"])  # int16, 1

# %% FusedAdamW
import torch
from te_models.layers import Linear, MXFP8BlockScaling, quantized_model_init
from te_models.layers.optimizers import FusedAdamW

with quantized_model_init(recipe=MXFP8BlockScaling()):
    layer = Linear(64, 64)
optimizer = FusedAdamW(layer.parameters(), lr=1e-3, moment_dtype="float8")
layer(torch.randn(8, 64)).sum().backward()
optimizer.step()

# %% FusedSGD
import torch
from te_models.layers import Linear
from te_models.layers.optimizers import FusedSGD

layer = Linear(64, 64)
optimizer = FusedSGD(layer.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4, nesterov=True)
layer(torch.randn(8, 64)).sum().backward()
optimizer.step()

# %% multi_tensor_applier, multi_tensor_l2norm, multi_tensor_scale, MultiTensorApply
import torch
from te_models.layers.optimizers import MultiTensorApply, multi_tensor_applier, multi_tensor_l2norm, multi_tensor_scale

gradients, overflow = [torch.ones(3), torch.ones(6, 1)], torch.zeros(1, dtype=torch.int)
norm, _ = multi_tensor_applier(multi_tensor_l2norm, overflow, [gradients], False)
print(norm, isinstance(multi_tensor_applier, MultiTensorApply))  # tensor([3.]), True
multi_tensor_applier(multi_tensor_scale, overflow, [gradients, gradients], 1.0 / norm)  # clipped to norm 1
