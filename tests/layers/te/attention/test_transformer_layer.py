"""TransformerLayer and MultiheadAttention as in Transformer Engine's examples, against the same in plain torch."""

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import te_models.layers as te
from tests.compare import refused

S, B, H, N, FFN = 6, 2, 32, 4, 64
D = H // N


def layer(**options: Any) -> te.TransformerLayer:
    """Without dropout, and with values in which a lost bias or gamma shows."""
    torch.manual_seed(0)
    made = te.TransformerLayer(H, FFN, N, **{"hidden_dropout": 0.0, "attention_dropout": 0.0} | options)
    for name, parameter in made.named_parameters():
        if parameter.dim() == 1:
            torch.nn.init.normal_(parameter, mean=0.0 if "bias" in name else 1.0, std=0.5)
        else:
            torch.nn.init.normal_(parameter, std=0.2)
    return made


def heads(x: Tensor) -> Tensor:
    """[S, B, n D] -> [B, n, S, D]"""
    return x.unflatten(-1, (-1, D)).permute(1, 2, 0, 3)


def core(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    """q, k, v: [S, B, n D]"""
    q, k, v = heads(q), heads(k), heads(v)
    k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for t in (k, v))
    scores = q @ k.transpose(2, 3) / math.sqrt(D)
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:]).triu(1).bool(), float("-inf"))
    return (scores.softmax(-1) @ v).permute(2, 0, 1, 3).flatten(2)


def norm(x: Tensor, module: Any) -> Tensor:
    return F.layer_norm(x, (H,), module.layer_norm_weight, module.layer_norm_bias, 1e-5)


def self_attention(x: Tensor, m: te.MultiheadAttention, groups: int, interleaved: bool, causal: bool = True) -> Tensor:
    p = m.layernorm_qkv
    w, b = p.weight, p.bias
    if interleaved:  # sort the rows [group][queries, key, value][channel] into queries, keys, values
        rows = torch.arange(w.shape[0]).view(groups, -1, D)
        order = torch.cat([rows[:, :-2].flatten(), rows[:, -2].flatten(), rows[:, -1].flatten()])
        w, b = w[order], b[order]
    q, k, v = F.linear(norm(x, p), w, b).split([N * D, groups * D, groups * D], dim=-1)
    return F.linear(core(q, k, v, causal), m.proj.weight, m.proj.bias)


def mlp(x: Tensor, m: te.LayerNormMLP) -> Tensor:
    hidden = F.gelu(F.linear(norm(x, m), m.fc1_weight, m.fc1_bias), approximate="tanh")
    return F.linear(hidden, m.fc2_weight, m.fc2_bias)


@pytest.mark.parametrize("groups", [N, 2])
@pytest.mark.parametrize("fused", [True, False])
def test_an_encoder_layer(groups: int, fused: bool) -> None:
    block = layer(num_gqa_groups=groups, fuse_qkv_params=fused)
    x = torch.randn(S, B, H, requires_grad=True)
    expected = x + self_attention(x, block.self_attention, groups, interleaved=fused)
    expected = expected + mlp(expected, block.layernorm_mlp)
    torch.testing.assert_close(block(x), expected)
    batch_first = layer(num_gqa_groups=groups, fuse_qkv_params=fused, attn_input_format="bshd")
    torch.testing.assert_close(batch_first(x.transpose(0, 1)).transpose(0, 1), expected)
    whole = block(x, self_attn_mask_type="no_mask")
    attended = x + self_attention(x, block.self_attention, groups, interleaved=fused, causal=False)
    torch.testing.assert_close(whole, attended + mlp(attended, block.layernorm_mlp))


@pytest.mark.parametrize("fused", [True, False])
def test_a_decoder_layer_with_cross_attention(fused: bool) -> None:
    block = layer(layer_type="decoder", fuse_qkv_params=fused)
    x, encoded = torch.randn(S, B, H), torch.randn(S + 3, B, H)
    cross = block.inter_attention
    expected = x + self_attention(x, block.self_attention, N, interleaved=fused)
    q = F.linear(norm(expected, cross.layernorm_query), cross.layernorm_query.weight, cross.layernorm_query.bias)
    kv = F.linear(encoded, cross.key_value.weight, cross.key_value.bias)
    k, v = (t.flatten(2) for t in kv.unflatten(-1, (N, 2, D)).unbind(-2)) if fused else kv.chunk(2, dim=-1)
    expected = expected + F.linear(core(q, k, v, False), cross.proj.weight, cross.proj.bias)
    expected = expected + mlp(expected, block.layernorm_mlp)
    torch.testing.assert_close(block(x, encoder_output=encoded), expected)
    padded = torch.zeros(B, 1, 1, S + 3, dtype=torch.bool)
    padded[1, ..., -3:] = True
    masks = (torch.zeros(B, 1, 1, S, dtype=torch.bool), padded)
    y = block(x, encoder_output=encoded, enc_dec_attn_mask=masks, enc_dec_attn_mask_type="padding")
    torch.testing.assert_close(y[:, 0], expected[:, 0])
    torch.testing.assert_close(y[:, 1:], block(x[:, 1:], encoder_output=encoded[:-3, 1:]))


def test_where_norms_and_residuals_are() -> None:
    x = torch.randn(S, B, H)
    post = layer(apply_residual_connection_post_layernorm=True)
    expected = norm(x, post.self_attention.layernorm_qkv) + self_attention(x, post.self_attention, N, False)
    torch.testing.assert_close(post(x), norm(expected, post.layernorm_mlp) + mlp(expected, post.layernorm_mlp))
    parallel = layer(parallel_attention_mlp=True)
    expected = x + self_attention(x, parallel.self_attention, N, False) + mlp(x, parallel.layernorm_mlp)
    torch.testing.assert_close(parallel(x), expected)
    bert = layer(output_layernorm=True)
    attention, qkv = bert.self_attention, bert.self_attention.qkv
    q, k, v = F.linear(x, qkv.weight, qkv.bias).chunk(3, dim=-1)
    expected = x + F.linear(core(q, k, v, True), attention.proj.weight, attention.proj.bias)
    expected = expected + mlp(expected, bert.layernorm_mlp)
    torch.testing.assert_close(bert(x), F.layer_norm(expected, (H,), bert.layernorm.weight, bert.layernorm.bias, 1e-5))


@pytest.mark.parametrize("interleaved", [True, False])
def test_rotary_angles_are_those_of_the_kernels(interleaved: bool) -> None:
    from te_models.kernels.rope import apply_rope, rope_tables

    made = te.RotaryPositionEmbedding(D, rotary_percent=0.5, interleaved=interleaved)
    angles = made(S + 2)
    assert angles.shape == (S + 2, 1, 1, D // 2) and torch.equal(made(S, offset=2), angles[2:])
    t = torch.randn(B, S, N, D)
    starts = torch.tensor([0, 2])
    tables = rope_tables(starts[:, None] + torch.arange(S), made.inv_freq)
    expected = apply_rope(t, *tables, "interleaved" if interleaved else "half")
    how: dict[str, Any] = {"interleaved": interleaved, "start_positions": starts}
    torch.testing.assert_close(te.apply_rotary_pos_emb(t, angles, "bshd", **how), expected)
    sbhd = te.apply_rotary_pos_emb(t.transpose(0, 1), angles, **how)
    torch.testing.assert_close(sbhd.transpose(0, 1), expected)
    packed = te.apply_rotary_pos_emb(t.flatten(0, 1), angles, "thd", cu_seqlens=torch.tensor([0, S, 2 * S]), **how)
    torch.testing.assert_close(packed, expected.flatten(0, 1))
    longer = te.RotaryPositionEmbedding(D, seq_len_interpolation_factor=2, pretrained_max_position_embeddings=4)
    torch.testing.assert_close(longer(8)[2], te.RotaryPositionEmbedding(D)(8)[1])
    torch.testing.assert_close(longer(16)[4], te.RotaryPositionEmbedding(D)(8)[1])  # further: all into 4 positions


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("kind", ["RMSNorm", "LayerNorm", "L2Normalization"])
def test_norms_of_queries_and_keys_lie_before_or_behind_the_rotation(kind: Any, before: bool) -> None:
    m = te.MultiheadAttention(H, N, attention_dropout=0.0, qk_norm_type=kind, qk_norm_before_rope=before)
    if kind != "L2Normalization":
        torch.nn.init.normal_(m.q_norm.weight, 1.0, 0.3)
    angles = te.RotaryPositionEmbedding(D)(S)
    x = torch.randn(S, B, H)
    q, k, v = m.qkv(x).unflatten(-1, (3, N, D)).unbind(2)

    def turned(t: Tensor) -> Tensor:
        return te.apply_rotary_pos_emb(t, angles)

    q, k = (turned(m.q_norm(q)), turned(m.k_norm(k))) if before else (m.q_norm(turned(q)), m.k_norm(turned(k)))
    expected = m.proj(core(q.flatten(2), k.flatten(2), v.flatten(2), True))
    torch.testing.assert_close(m(x, rotary_pos_emb=angles), expected)


@pytest.mark.parametrize("compiled", [True, False])
def test_packed_sequences_are_those_of_each_sequence(compiled: bool) -> None:
    """Compiled as one graph; and in MXFP8, where a row's numbers do not depend on its neighbours."""
    block = layer(attn_input_format="thd", self_attn_mask_type="padding_causal", normalization="RMSNorm", bias=False)
    angles = te.RotaryPositionEmbedding(D)(S)
    cu = torch.tensor([0, 2, 6], dtype=torch.int32)
    lengths: Any = {"cu_seqlens_q": cu, "cu_seqlens_kv": cu, "max_seqlen_q": 4, "max_seqlen_kv": 4}
    run = torch.compile(block, fullgraph=True, backend="eager") if compiled else block
    alone = layer(normalization="RMSNorm", bias=False)
    x = torch.randn(6, H)
    with te.autocast(enabled=not compiled, recipe=te.MXFP8BlockScaling()):
        y = run(x, rotary_pos_emb=angles, **lengths)
        parts = [alone(x[a:b, None], rotary_pos_emb=angles)[:, 0] for a, b in ((0, 2), (2, 6))]
    torch.testing.assert_close(y, torch.cat(parts), rtol=1e-4, atol=1e-4)


def test_split_parameters_of_queries_keys_and_values_are_loaded() -> None:
    """As Transformer Engine saves them without fuse_qkv_params."""
    state = layer(layer_type="decoder").state_dict()
    split = dict(state)
    for name, parts in {
        "self_attention.layernorm_qkv": ("query", "key", "value"),
        "inter_attention.layernorm_query": ("query",),
        "inter_attention.key_value": ("key", "value"),
    }.items():
        for kind in ("weight", "bias"):
            values = split.pop(f"{name}.{kind}").chunk(len(parts))
            split |= {f"{name}.{part}_{kind}": value for part, value in zip(parts, values, strict=True)}
    split["self_attention.core_attention._extra_state"] = torch.empty(0, dtype=torch.uint8)
    other = te.TransformerLayer(H, FFN, N, layer_type="decoder")
    other.load_state_dict(split)
    assert all(torch.equal(value, state[name]) for name, value in other.state_dict().items())


def test_dropouts_are_for_training() -> None:
    x = torch.randn(S, 64, H)
    for options in ({"hidden_dropout": 0.5}, {"attention_dropout": 0.5}, {"drop_path_rate": 0.5}):
        block = layer(**options)
        kept = layer()(x)
        dropped = block(x)
        assert not torch.allclose(dropped, kept)
        torch.testing.assert_close(block.eval()(x), kept)
    unchanged = (dropped == x).all(dim=2).all(dim=0)  # neither attention nor MLP: a quarter of the sequences
    assert 4 <= unchanged.sum() <= 32


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layer_type": "both"}, "layer_type is 'both'; allowed: 'encoder', 'decoder'"),
        ({"parallel_attention_mlp": True, "output_layernorm": True}, "parallel_attention_mlp is for layer_type 'enc"),
        ({"attn_input_format": "thd", "layer_type": "decoder"}, "attn_input_format 'thd' is for layer_type 'encoder'"),
        ({"ub_tp_comm_overlap": True, "tp_size": 2}, "ub_tp_comm_overlap is True, which this library does not have"),
        ({"qk_norm_type": "L1"}, "qk_norm_type is 'L1'; allowed: None, 'RMSNorm', 'LayerNorm', 'L2Normalization'"),
        ({"kv_channels": None, "num_gqa_groups": 3}, "num_gqa_groups is 3; allowed: a divisor of 4 heads"),
    ],
)
def test_options_that_it_does_not_have_are_refused(options: dict[str, Any], message: str) -> None:
    refused(lambda: layer(**options), message)


def test_calls_that_do_not_fit_are_refused() -> None:
    x = torch.randn(S, B, H)
    refused(lambda: layer(layer_type="decoder")(x), "encoder_output is missing with attention_type 'cross'")
    refused(lambda: layer()(x, encoder_output=x), "are for layer_type 'decoder'")
    with pytest.raises(ValueError, match="cu_seqlens_q is for layer_type 'encoder'"):
        layer(layer_type="decoder")(x, encoder_output=x, cu_seqlens_q=torch.tensor([0, 1]))
    with pytest.raises(ValueError, match=r"inference_params is .*, which this library"):
        layer()(x, inference_params=object())
    with pytest.raises(TypeError, match="multiple values for keyword argument 'attn_mask_type'"):
        layer()(x, attn_mask_type="no_mask")
    with pytest.raises(ValueError, match="seq_len_interpolation_factor and pretrained_max_position_embeddings mean"):
        te.RotaryPositionEmbedding(D, seq_len_interpolation_factor=2)
