"""Small programs in the style of Transformer Engine's examples, with the import changed."""

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import te_models.layers as te
from te_models.layers.recipe import recipes as recipe

HIDDEN, FFN, HEADS, SEQ, BATCH = 64, 128, 4, 16, 2


def trained(parameters: Iterable[Tensor], loss: Tensor) -> None:
    """Every parameter has a gradient, and no gradient has lost its numbers."""
    loss.backward()
    for parameter in parameters:
        assert bool(parameter.grad.isfinite().all())


def test_digits_with_calibration_and_a_state_dict() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(1, 4, 3)
            self.fc1, self.fc2, self.fc3 = te.Linear(576, 128), te.Linear(128, 16), nn.Linear(16, 10)

        def forward(self, x: Tensor) -> Tensor:
            x = torch.flatten(F.max_pool2d(F.relu(self.conv(x)), 2), 1)
            return F.log_softmax(self.fc3(self.fc2(F.relu(self.fc1(x)))), dim=1)

    net = Net()
    with te.fp8_autocast(enabled=True):
        out = net(torch.randn(32, 1, 26, 26))
    trained(net.parameters(), F.nll_loss(out, torch.randint(10, (32,))))
    with torch.no_grad(), te.fp8_autocast(enabled=False, calibrating=True, fp8_recipe=recipe.DelayedScaling()):
        net.eval()(torch.randn(32, 1, 26, 26))
    Net().load_state_dict(net.state_dict())


def test_layers_put_together_by_hand() -> None:
    qkv = te.LayerNormLinear(HIDDEN, 3 * HIDDEN, eps=1e-5, bias=True)
    attention = te.DotProductAttention(HEADS, HIDDEN // HEADS, attention_dropout=0.1)
    mlp = te.LayerNormMLP(HIDDEN, FFN, eps=1e-5)
    x = torch.randn(SEQ, BATCH, HIDDEN)
    x = x + attention(*qkv(x).view(SEQ, BATCH, HEADS, -1).chunk(3, dim=-1), attention_mask=None)
    trained([*qkv.parameters(), *mlp.parameters()], (x + mlp(x)).sum())


def test_bfloat16_layers_in_fp8_under_checkpoints() -> None:
    layers = nn.ModuleList([te.TransformerLayer(HIDDEN, FFN, HEADS, layer_number=i + 1) for i in range(2)])
    layers.to(dtype=torch.bfloat16)
    fp8 = recipe.DelayedScaling(fp8_format=recipe.Format.HYBRID, amax_history_len=16, amax_compute_algo="max")
    x = torch.rand(SEQ, BATCH, HIDDEN, dtype=torch.bfloat16, requires_grad=True)
    with te.fp8_autocast(enabled=True, fp8_recipe=fp8):
        for layer in layers:
            x = te.checkpoint(layer, x, attention_mask=None, get_rng_state_tracker=None, tp_group=None)
    trained(layers.parameters(), x.float().sum())


def test_an_encoder_and_a_decoder() -> None:
    encoder = te.TransformerLayer(HIDDEN, FFN, HEADS, self_attn_mask_type="padding")
    decoder = te.TransformerLayer(HIDDEN, FFN, HEADS, layer_type="decoder", enc_dec_attn_mask_type="padding")
    padding = torch.zeros(BATCH, 1, 1, SEQ, dtype=torch.bool)
    padding[1, ..., 10:] = True
    none = torch.zeros(BATCH, 1, 1, 8, dtype=torch.bool)
    encoded = encoder(torch.randn(SEQ, BATCH, HIDDEN), attention_mask=padding)
    y = decoder(torch.randn(8, BATCH, HIDDEN), encoder_output=encoded, enc_dec_attn_mask=(none, padding))
    trained([*encoder.parameters(), *decoder.parameters()], y.sum())


def test_packed_sequences_with_rotary_embedding() -> None:
    layer = te.TransformerLayer(HIDDEN, FFN, HEADS, attn_input_format="thd", self_attn_mask_type="padding_causal")
    cu = torch.tensor([0, 5, 16, 20], dtype=torch.int32)
    angles = te.RotaryPositionEmbedding(HIDDEN // HEADS)(32)
    y = layer(torch.randn(20, HIDDEN), cu_seqlens_q=cu, cu_seqlens_kv=cu, max_seqlen_q=11, rotary_pos_emb=angles)
    trained(layer.parameters(), y.sum())


@pytest.mark.parametrize("per_gemm", [True, False])
def test_experts(per_gemm: bool) -> None:
    tokens, experts, topk = 64, 4, 2
    router = nn.Linear(HIDDEN, experts)
    options = {"bias": False, "single_grouped_weight": not per_gemm}
    fc1 = te.GroupedLinear(experts, HIDDEN, 2 * FFN, **options)
    fc2 = te.GroupedLinear(experts, FFN, HIDDEN, **options)
    x = torch.randn(tokens, HIDDEN)
    probs, indices = router(x).softmax(-1).topk(topk)
    routing_map = torch.zeros(tokens, experts, dtype=torch.int32).scatter_(1, indices, 1)
    probs = torch.zeros(tokens, experts).scatter(1, indices, probs)
    rows, row_probs, row_id_map = te.moe_permute_with_probs(x, probs, routing_map, num_out_tokens=tokens * topk)
    splits = routing_map.sum(0).tolist()
    with te.autocast(enabled=True, recipe=recipe.MXFP8BlockScaling()):
        gate, up = fc1(rows, splits).chunk(2, -1)
        y = fc2(F.silu(gate) * up * row_probs[:, None], splits)
    y = te.moe_unpermute(y, row_id_map, restore_shape=x.shape)
    trained([*router.parameters(), *fc1.parameters(), *fc2.parameters()], y.square().sum())


def test_parallel_layers_as_megatron_makes_them() -> None:
    common = {"sequence_parallel": False, "fuse_wgrad_accumulation": False, "tp_group": None, "tp_size": 1}
    common |= {"get_rng_state_tracker": None, "init_method": nn.init.xavier_uniform_, "bias": True}
    common |= {"ub_overlap_ag": False, "ub_name": None}
    normed = {"eps": 1e-5, "normalization": "RMSNorm", "return_bias": False, "parallel_mode": "column"}
    column = te.LayerNormLinear(in_features=HIDDEN, out_features=FFN, **normed, **common)
    row = te.Linear(in_features=FFN, out_features=HIDDEN, return_bias=True, parallel_mode="row", **common)
    y, bias = row(column(torch.randn(SEQ, BATCH, HIDDEN), is_first_microbatch=None))
    trained([*column.parameters(), *row.parameters()], (y + bias).square().sum())


def test_operations() -> None:
    first = te.ops.LayerNorm(HIDDEN), te.ops.Linear(HIDDEN, FFN)
    model = te.ops.Sequential(*first, te.ops.GELU(), te.ops.Linear(FFN, HIDDEN))
    with te.autocast(recipe=recipe.MXFP8BlockScaling()):
        y = model(torch.randn(32, HIDDEN))
    trained(model.parameters(), y.square().sum())


@pytest.mark.parametrize("init", [te.fp8_model_init, te.quantized_model_init])
@pytest.mark.parametrize("grouped", [False, True])
def test_float32_masters_taken_from_quantized_parameters(grouped: bool, init: Callable[..., Any]) -> None:
    """As Megatron's Float16Optimizer: cloned, updated, copied back; the weight is that of an optimizer that does so."""
    weights = []
    for own in (True, False):
        torch.manual_seed(0)
        with init(enabled=True, recipe=recipe.MXFP8BlockScaling()):
            options = {"bias": False, "params_dtype": torch.bfloat16, "fuse_wgrad_accumulation": True}
            layer = te.GroupedLinear(2, HIDDEN, HIDDEN, **options) if grouped else te.Linear(HIDDEN, HIDDEN, **options)
        (weight,) = layer.parameters()
        weight.main_grad = torch.zeros(weight.shape)
        master = weight.detach().clone().float()
        optimizer = te.optimizers.FusedAdam([master] if own else [weight], lr=0.01, use_decoupled_grad=True)
        for i in range(3):
            x = torch.randn(32, HIDDEN, generator=torch.Generator().manual_seed(i)).bfloat16()
            with te.autocast(recipe=recipe.MXFP8BlockScaling()):
                y = layer(x, *([[12, 20]] if grouped else []), is_first_microbatch=True)
            y.float().square().sum().backward()
            (master if own else weight).decoupled_grad = weight.main_grad
            before = master.clone()
            optimizer.step()
            if own:
                assert not torch.equal(master, before)
                weight.data.copy_(master)
        assert type(master) is Tensor and isinstance(weight, te.QuantizedTensor)
        weights.append(weight.detach().dequantize())
    assert torch.equal(*weights)
