"""Examples of the names of `te_models.layers`. A cell begins with the names that it shows; each runs by itself."""

# %% Linear, LayerNormLinear, LayerNormMLP, RMSNorm, LayerNorm, autocast, current_recipe, recipe_report, RecipeReport
import torch
from te_models.layers import (
    LayerNorm,
    LayerNormLinear,
    LayerNormMLP,
    Linear,
    MXFP8BlockScaling,
    RecipeReport,
    RMSNorm,
    autocast,
    current_recipe,
    recipe_report,
)

model = torch.nn.Sequential(
    RMSNorm(64),
    Linear(64, 128, bias=False),
    LayerNormLinear(128, 64),
    LayerNormMLP(64, 256, normalization="RMSNorm", activation="swiglu"),
    LayerNorm(64),
)
with autocast(recipe=MXFP8BlockScaling()):
    print(current_recipe())
    y = model(torch.randn(32, 64))  # [32, 64]
y.sum().backward()
report = recipe_report(model)
assert isinstance(report, RecipeReport)
print(report.ran)

# %% fp8_autocast, fp8_model_init
import torch
from te_models.layers import Float8BlockScaling, Linear, fp8_autocast, fp8_model_init

with fp8_model_init(recipe=Float8BlockScaling()):
    layer = Linear(128, 128)
with fp8_autocast(fp8_recipe=Float8BlockScaling()):
    print(layer(torch.randn(4, 128)).shape)

# %% GroupedLinear
import torch
from te_models.layers import GroupedLinear, MXFP8BlockScaling, autocast

experts = GroupedLinear(4, 64, 96, bias=False)  # weight [4, 96, 64]
rows, m_splits = torch.randn(10, 64), torch.tensor([3, 0, 5, 2])  # rows sorted by expert
with autocast(recipe=MXFP8BlockScaling()):
    print(experts(rows, m_splits).shape)  # [10, 96]

# %% DotProductAttention
import torch
from te_models.layers import DotProductAttention

attention = DotProductAttention(num_attention_heads=4, kv_channels=16, num_gqa_groups=2, qkv_format="bshd")
query, key, value = torch.randn(2, 8, 4, 16), torch.randn(2, 8, 2, 16), torch.randn(2, 8, 2, 16)
print(attention(query, key, value).shape)  # [2, 8, 64]

# %% MultiheadAttention, TransformerLayer
import torch
from te_models.layers import MultiheadAttention, TransformerLayer

x = torch.randn(8, 2, 64)  # [length, batch, hidden]
print(MultiheadAttention(64, 4, attention_dropout=0.0)(x).shape)
print(TransformerLayer(64, 256, 4, hidden_dropout=0.0, attention_dropout=0.0)(x).shape)

# %% RotaryPositionEmbedding, apply_rotary_pos_emb
import torch
from te_models.layers import RotaryPositionEmbedding, apply_rotary_pos_emb

angles = RotaryPositionEmbedding(16)(8)  # [8, 1, 1, 16]
print(apply_rotary_pos_emb(torch.randn(8, 2, 4, 16), angles).shape)  # [length, batch, heads, channels]

# %% recipe, Recipe, RECIPES, Format
from te_models.layers import RECIPES, Float8CurrentScaling, Format, Recipe, recipe

print(sorted(RECIPES))
made = recipe("current", fp8_format=Format.E4M3)
assert made == Float8CurrentScaling(fp8_format=Format.E4M3) == Recipe.from_json(made.to_json())

# %% Float8CurrentScaling, Float8BlockScaling, MXFP8BlockScaling, NVFP4BlockScaling
import torch
from te_models.layers import (
    Float8BlockScaling,
    Float8CurrentScaling,
    Linear,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    autocast,
)

layer, x = Linear(128, 128, bias=False), torch.randn(128, 128)
plain = layer(x)
for made in (
    Float8CurrentScaling(use_power_2_scales=True),
    Float8BlockScaling(use_f32_scales=True),
    MXFP8BlockScaling(enable_2d_quantization=True),
    NVFP4BlockScaling(disable_rht=True),
):
    with autocast(recipe=made):
        print(made.NAME, ((layer(x) - plain).norm() / plain.norm()).item())

# %% DelayedScaling, update_delayed_scaling
import torch
from te_models.layers import DelayedScaling, Linear, autocast, update_delayed_scaling

layer = Linear(64, 64)
for _ in range(3):
    with autocast(recipe=DelayedScaling(amax_history_len=4)):
        y = layer(torch.randn(32, 64))
    y.sum().backward()
    update_delayed_scaling()  # optional: takes over the gradients' amaxes now instead of at the next region's end
print(layer.fp8_scale)

# %% RecipeState, DelayedScalingRecipeState, FP8GlobalStateManager
import torch
from te_models.layers import (
    DelayedScaling,
    DelayedScalingRecipeState,
    FP8GlobalStateManager,
    Linear,
    RecipeState,
    autocast,
)

layer = Linear(32, 32)
with autocast(recipe=DelayedScaling(amax_history_len=4)):
    assert FP8GlobalStateManager.is_fp8_enabled()
    layer(torch.randn(4, 32)).sum().backward()
state = layer.fp8_meta["scaling_fwd"]
assert isinstance(state, RecipeState) and isinstance(state, DelayedScalingRecipeState)
print(state.amax_history.shape, layer.quantizers["scaling_fwd"][1].scale)  # [4, 3]: input, weight, output

# %% CustomRecipe, QuantizerRole, GemmQuantizers
import torch
from te_models.layers import (
    CustomRecipe,
    Float8CurrentScalingQuantizer,
    GemmQuantizers,
    Linear,
    MXFP8Quantizer,
    QuantizerRole,
    autocast,
)


def quantizer_of(role: QuantizerRole):
    if role.tensor_type == "grad_output":
        return Float8CurrentScalingQuantizer(fp8_dtype=torch.float8_e5m2)
    return MXFP8Quantizer()


made = CustomRecipe(qfactory=quantizer_of)
assert isinstance(made.quantizers("Linear", "layers.0.linear_fc1"), GemmQuantizers)
with autocast(recipe=made):
    Linear(64, 64)(torch.randn(32, 64)).sum().backward()

# %% PerModuleRecipe, first_last_layers_bf16, name_modules
import torch
from te_models.layers import (
    Linear,
    MXFP8BlockScaling,
    PerModuleRecipe,
    autocast,
    first_last_layers_bf16,
    name_modules,
    recipe_report,
)

model = torch.nn.Sequential(Linear(64, 64), Linear(64, 64))
name_modules(model)
with autocast(recipe=PerModuleRecipe(default=MXFP8BlockScaling(), rules=(("1", "bf16"),))):
    model(torch.randn(32, 64))
print(recipe_report(model).ran)  # layer 0 in mxfp8, layer 1 in bf16
print(first_last_layers_bf16(MXFP8BlockScaling(), num_layers=24).rules)

# %% quantized_model_init, storage_recipe, store_weights
import torch
from te_models.layers import (
    Float8BlockScaling,
    Linear,
    MXFP8BlockScaling,
    MXFP8Tensor,
    quantized_model_init,
    storage_recipe,
    store_weights,
)

with quantized_model_init(recipe=MXFP8BlockScaling()):
    assert storage_recipe() == MXFP8BlockScaling()
    layer = Linear(128, 128)
assert isinstance(layer.weight, MXFP8Tensor)
other = Linear(128, 128)
store_weights(other, Float8BlockScaling())  # in place
print(type(other.weight).__name__)

# %% Quantizer, FP8Quantizer, MXFP8Quantizer, MXFP8Tensor, MXFP8TensorStorage
import torch
from te_models.layers import FP8Quantizer, MXFP8Quantizer, MXFP8Tensor, MXFP8TensorStorage, Quantizer

quantizer = MXFP8Quantizer(columnwise=False)
assert isinstance(quantizer, Quantizer) and isinstance(quantizer, FP8Quantizer)
x = quantizer.quantize(torch.randn(32, 64))
assert isinstance(x, MXFP8Tensor)
print(x.rowwise_data.shape, x.rowwise_scale_inv.shape, x.dequantize().shape)  # [32, 64], [32, 2], [32, 64]
storage = MXFP8TensorStorage.quantize(torch.randn(32, 64), quantizer)
print(storage.shape)

# %% Float8CurrentScalingQuantizer, Float8Tensor, Float8TensorStorage
import torch
from te_models.layers import Float8CurrentScalingQuantizer, Float8Tensor, Float8TensorStorage

quantizer = Float8CurrentScalingQuantizer(fp8_dtype=torch.float8_e5m2)
x = quantizer.quantize(torch.randn(32, 64))
assert isinstance(x, Float8Tensor)
fields = Float8TensorStorage.quantize(torch.ones(2, 2), quantizer).fields
print(x.fields["rowwise_scale_inv"])  # one float32 scale

# %% DType
import torch
from te_models.layers import DType, MXFP8Quantizer

quantizer = MXFP8Quantizer(DType.kFloat8E4M3, rowwise=True, columnwise=True)
quantizer.set_usage(columnwise=False)
print(quantizer(torch.randn(2, 16, 64)).fields.keys())  # rowwise ones

# %% Float8Quantizer
import torch
from te_models.layers import Float8Quantizer

amax = torch.zeros(1)
quantizer = Float8Quantizer(torch.full((1,), 2.0), amax, torch.float8_e4m3fn)
x = quantizer(torch.randn(32, 64))
print(x.dequantize().shape, amax)  # amax has the largest magnitude

# %% Float8BlockQuantizer, Float8BlockwiseTensor, Float8BlockwiseTensorStorage
import torch
from te_models.layers import Float8BlockQuantizer, Float8BlockwiseTensor, Float8BlockwiseTensorStorage

quantizer = Float8BlockQuantizer(block_scaling_dim=2)
x = quantizer.quantize(torch.randn(256, 128))
assert isinstance(x, Float8BlockwiseTensor)
storage = Float8BlockwiseTensorStorage.quantize(torch.randn(128, 128), quantizer)
print(x.dequantize().shape)

# %% NVFP4Quantizer, NVFP4Tensor, NVFP4TensorStorage
import torch
from te_models.layers import NVFP4Quantizer, NVFP4Tensor, NVFP4TensorStorage

quantizer = NVFP4Quantizer(columnwise=False, stochastic_rounding=True)
x = quantizer.quantize(torch.randn(32, 64), key=torch.tensor([0, 1]))  # (seed, counter) of the random bits
assert isinstance(x, NVFP4Tensor)
storage = NVFP4TensorStorage.quantize(torch.randn(16, 16), NVFP4Quantizer())

# %% Int4Quantizer, Int4Tensor, Int4TensorStorage, Int8Quantizer, Int8Tensor, Int8TensorStorage
import torch
from torch import nn
from te_models.layers import (
    Int4Quantizer,
    Int4Tensor,
    Int4TensorStorage,
    Int8Quantizer,
    Int8Tensor,
    Int8TensorStorage,
    Linear,
)

quantizer = Int4Quantizer(group_size=64, zero_points=True)  # of weights alone: no recipe computes in integers
layer = Linear(128, 64)
layer.weight = nn.Parameter(quantizer.quantize(layer.weight.detach()), requires_grad=False)
assert isinstance(layer.weight, Int4Tensor)
print(layer.weight.rowwise_data.shape, layer.weight.rowwise_scale_inv.dtype)  # [64, 64], bfloat16
layer(torch.randn(8, 128, requires_grad=True)).sum().backward()  # with the dequantized values
storage = Int4TensorStorage.quantize(torch.randn(8, 64), Int4Quantizer())
assert isinstance(Int8Quantizer().quantize(torch.randn(8, 64)), Int8Tensor)
storage = Int8TensorStorage.quantize(torch.randn(8, 64), Int8Quantizer(group_size=0))  # a scale for each row

# %% HybridQuantizer, HybridTensor, HybridTensorStorage, IdentityQuantizer, IdentityTensor, IdentityTensorStorage
import torch
from te_models.layers import (
    HybridQuantizer,
    HybridTensor,
    HybridTensorStorage,
    IdentityQuantizer,
    IdentityTensor,
    IdentityTensorStorage,
    MXFP8Quantizer,
)

quantizer = HybridQuantizer(rowwise_quantizer=MXFP8Quantizer(), columnwise_quantizer=IdentityQuantizer())
x = quantizer.quantize(torch.randn(32, 64))  # MXFP8 for fprop, high precision for wgrad
assert isinstance(x, HybridTensor)
storage = HybridTensorStorage.quantize(torch.randn(32, 64), quantizer)
plain = IdentityQuantizer()
assert isinstance(plain.quantize(torch.ones(2, 2)), IdentityTensor)
storage = IdentityTensorStorage.quantize(torch.ones(2, 2), plain)

# %% QuantizedTensor, QuantizedStorage
import torch
from te_models.layers import MXFP8Quantizer, QuantizedStorage, QuantizedTensor

x = MXFP8Quantizer().quantize(torch.randn(32, 64))
assert isinstance(x, QuantizedTensor) and x.shape == (32, 64) and x.dtype == torch.float32
x.copy_(torch.ones(32, 64))  # requantizes in place
print(x.dequantize().unique(), (x + 1).dtype)  # any other operation sees the values
storage = QuantizedStorage.quantize(torch.ones(2, 2), MXFP8Quantizer())  # in the class of the quantizer's format

# %% GroupedTensor, GroupedTensorStorage
import torch
from te_models.layers import GroupedLinear, GroupedTensor, GroupedTensorStorage, MXFP8BlockScaling, quantized_model_init

with quantized_model_init(recipe=MXFP8BlockScaling()):
    experts = GroupedLinear(4, 64, 96, bias=False)
assert isinstance(experts.weight, GroupedTensor) and issubclass(GroupedTensor, GroupedTensorStorage) is False
print(experts.weight.shape, experts.weight.member(1).shape)  # [4, 96, 64], [96, 64]: a view

# %% group_quantize, bgrad_group_quantize, MixedShapesStorage
import torch
from te_models.layers import MixedShapesStorage, MXFP8Quantizer, bgrad_group_quantize, group_quantize

dy, rows = torch.randn(96, 64), torch.tensor([32, 64])
grouped, dbias = bgrad_group_quantize(dy, MXFP8Quantizer(), 2, rows)
print(dbias.shape)  # [2, 64]
mixed = group_quantize(dy.view(32, -1), MXFP8Quantizer(), 2, None, torch.tensor([64, 128]))
assert isinstance(mixed, MixedShapesStorage)
print([member.shape for member in mixed.split_into_quantized_tensors()])  # [32, 64], [32, 128]

# %% GroupedRows
import torch
from te_models.layers import GroupedRows, MXFP8Quantizer

rows = GroupedRows.quantize_rows(torch.randn(10, 64), torch.tensor([3, 0, 5, 2]), MXFP8Quantizer())
print(rows.shape, rows.dequantize().shape)

# %% QuantizedResult, quantized_like
import torch
from te_models.kernels.custom_op import caller, operation
from te_models.layers import MXFP8Quantizer, QuantizedResult, QuantizedTensor, Quantizer, quantized_like


def _described(x: torch.Tensor, quantizer: Quantizer) -> QuantizedResult:
    return quantized_like(x, quantizer, as_tensor=True)


@operation("example_quantize", _described)
def example_quantize(x: torch.Tensor, quantizer: Quantizer) -> QuantizedTensor:
    return quantizer.quantize(x)


print(type(caller(example_quantize)(torch.randn(32, 64), MXFP8Quantizer())).__name__)

# %% QuantizedModule
import torch
from te_models.layers import Linear, QuantizedModule

model = torch.nn.Sequential(Linear(64, 64), torch.nn.ReLU(), Linear(64, 64))
print([name for name, module in model.named_modules() if isinstance(module, QuantizedModule)])

# %% FusedAdamW, gradient_of
import torch
from te_models.layers import FusedAdamW, Linear, gradient_of

layer = Linear(64, 64, bias=False, params_dtype=torch.bfloat16, fuse_wgrad_accumulation=True)
layer.weight.main_grad = torch.zeros(64, 64)
optimizer = FusedAdamW(layer.parameters(), lr=1e-3, master_weights=True, moment_dtype="bfloat16")
layer(torch.randn(8, 64, dtype=torch.bfloat16)).sum().backward()
print(gradient_of(layer.weight).dtype, layer.weight.grad)  # float32, None
optimizer.step()

# %% GradScaler
import torch
from te_models.layers import FusedAdamW, GradScaler, Linear

layer = Linear(64, 64)
optimizer, scaler = FusedAdamW(layer.parameters()), GradScaler("cpu", init_scale=2.0**10)
scaler.scale(layer(torch.randn(8, 64)).square().mean()).backward()
scaler.step(optimizer)
scaler.update()

# %% microbatch, cache_weights
import torch
from te_models.layers import Linear, MXFP8BlockScaling, autocast, cache_weights, microbatch

model = torch.nn.Sequential(Linear(64, 64), Linear(64, 64))
for i in range(4):
    with autocast(recipe=MXFP8BlockScaling()), microbatch(first=i == 0):  # quantizes each weight once
        model(torch.randn(32, 64)).sum().backward()
with autocast(recipe=MXFP8BlockScaling()):
    cache_weights(model)  # for compiled micro-batches under microbatch(first=False)

# %% checkpoint, recompute_contexts
import torch
from te_models.layers import Linear, MXFP8BlockScaling, autocast, checkpoint, recompute_contexts

layer, x = Linear(64, 64), torch.randn(32, 64, requires_grad=True)
with autocast(recipe=MXFP8BlockScaling()):
    y = checkpoint(layer, x, use_reentrant=False)
    z = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False, context_fn=recompute_contexts)
(y + z).sum().backward()

# %% collect_statistics, quantization_statistics
import torch
from te_models.layers import (
    Linear,
    MXFP8BlockScaling,
    autocast,
    collect_statistics,
    name_modules,
    quantization_statistics,
)

model = torch.nn.Sequential(Linear(64, 64))
name_modules(model)
with autocast(recipe=MXFP8BlockScaling()), collect_statistics():
    model(torch.randn(32, 64)).sum().backward()
print(quantization_statistics(model)["0.input"])

# %% set_rounding_seed, default_rounding_seed
import torch
from te_models.layers import Linear, NVFP4BlockScaling, autocast, default_rounding_seed, set_rounding_seed

model, x = Linear(64, 64), torch.randn(32, 64)
grads = []
for _ in range(2):
    set_rounding_seed(model, 7)  # equal seeds give equal bits
    model.weight.grad = None
    with autocast(recipe=NVFP4BlockScaling()):
        model(x).square().sum().backward()
    grads.append(model.weight.grad)
assert torch.equal(*grads)
default_rounding_seed(model)  # follows torch.manual_seed again

# %% recipe_state, load_recipe_state, prepare_recipe_state
import torch
from te_models.layers import (
    DelayedScaling,
    Linear,
    autocast,
    load_recipe_state,
    prepare_recipe_state,
    recipe_state,
)

layer, again = Linear(64, 64), Linear(64, 64)
with autocast(recipe=DelayedScaling()):
    layer(torch.randn(32, 64)).sum().backward()
prepare_recipe_state(again, DelayedScaling())  # for loaders that fill an existing state dict
load_recipe_state(again, recipe_state(layer))
assert torch.equal(layer.fp8_scale, again.fp8_scale)

# %% replace_linears, ReplacementReport
import torch
from te_models.layers import ReplacementReport, autocast, recipe, replace_linears

model = torch.nn.Sequential(torch.nn.Linear(64, 96), torch.nn.GELU(), torch.nn.Linear(96, 64))
report: ReplacementReport = replace_linears(model, exclude="2")
assert report.replaced == ("0",) and report.left == {"2": "exclude names it"}
with autocast(recipe=recipe("mxfp8")):
    model(torch.randn(32, 64)).sum().backward()

# %% share_scales
import torch
from te_models.layers import Float8CurrentScaling, Linear, quantized_model_init, share_scales

with quantized_model_init(recipe=Float8CurrentScaling()):
    layer = Linear(64, 64)
share_scales(layer)  # after fully_shard(layer), before values are written into its shards

# %% is_bf16_available, is_fp8_available, is_fp8_block_scaling_available, is_mxfp8_available, is_nvfp4_available
from te_models.layers import (
    is_bf16_available,
    is_fp8_available,
    is_fp8_block_scaling_available,
    is_mxfp8_available,
    is_nvfp4_available,
)

assert is_bf16_available() and is_fp8_available() and is_fp8_block_scaling_available() and is_nvfp4_available()
print(is_mxfp8_available(return_reason=True))  # (True, ""): every recipe runs on every device

# %% moe_permute, moe_unpermute, moe_permute_with_probs
import torch
from te_models.layers import moe_permute, moe_permute_with_probs, moe_unpermute

tokens, experts = torch.randn(4, 8), torch.tensor([[0, 2], [1, 2], [0, 1], [1, 3]])  # two experts for each token
rows, row_id_map = moe_permute(tokens, experts, map_type="index")  # [8, 8], sorted by expert
weights = torch.full((4, 2), 0.5)
assert torch.allclose(moe_unpermute(rows, row_id_map, merging_probs=weights, map_type="index"), tokens)
mask = torch.nn.functional.one_hot(experts, 4).sum(1)
rows, probs, row_id_map = moe_permute_with_probs(tokens, mask * 0.5, mask)
print(rows.shape, probs.shape)  # [8, 8], [8]

# %% moe_permute_and_pad_with_probs, Fp8Padding, Fp8Unpadding
import torch
from te_models.layers import Fp8Padding, Fp8Unpadding, GroupedLinear, moe_permute_and_pad_with_probs, moe_unpermute

tokens, experts = torch.randn(4, 8), torch.tensor([[0, 2], [1, 2], [0, 1], [1, 3]])
mask = torch.nn.functional.one_hot(experts, 4).sum(1)
padded, probs, row_id_map, pad_offsets, m_splits = moe_permute_and_pad_with_probs(
    tokens, mask * 0.5, mask, mask.sum(0), align_size=16
)
y = GroupedLinear(4, 8, 8, bias=False)(padded, m_splits)  # 16 rows for each expert
print(moe_unpermute(y * probs[:, None], row_id_map, restore_shape=tokens.shape, pad_offsets=pad_offsets).shape)
rows, padded_splits = Fp8Padding(2, align_size=16)(torch.randn(5, 8), [2, 3])  # [32, 8], [16, 16]
assert Fp8Unpadding(2, align_size=16)(rows, [2, 3]).shape == (5, 8)

# %% fused_topk_with_score_function, fused_compute_score_for_moe_aux_loss, fused_moe_aux_loss
import torch
from te_models.layers import (
    fused_compute_score_for_moe_aux_loss,
    fused_moe_aux_loss,
    fused_topk_with_score_function,
)

logits = torch.randn(6, 8)
probs, routing_map = fused_topk_with_score_function(logits, 2, False, None, None, None, "softmax", None)
print(probs.sum(1), routing_map.sum(1))  # weights that add up to 1, two experts for each token
_, scores = fused_compute_score_for_moe_aux_loss(logits, 2, "softmax")
loss = fused_moe_aux_loss(scores, routing_map.sum(0), total_num_tokens=6, num_experts=8, topk=2, coeff=0.01)

# %% moe_sort_chunks_by_index, moe_sort_chunks_by_index_with_probs
import torch
from te_models.layers import moe_sort_chunks_by_index, moe_sort_chunks_by_index_with_probs

rows, sizes, order = torch.arange(6.0)[:, None], torch.tensor([1, 2, 3]), torch.tensor([2, 0, 1])
print(moe_sort_chunks_by_index(rows, sizes, order)[:, 0])  # 3, 4, 5, 0, 1, 2
rows, probs = moe_sort_chunks_by_index_with_probs(rows, torch.rand(6), sizes, order)

# %% parallel_cross_entropy
import torch
from te_models.layers import parallel_cross_entropy

logits = torch.randn(2, 8, 64, requires_grad=True)
loss = parallel_cross_entropy(logits, torch.randint(64, (2, 8)), reduce_loss=True)
loss.backward()
