"""A transformer layer of attention and MLP, with cross attention for decoders.

S length, B batch, H hidden.
"""

from collections.abc import Mapping
from typing import Any, Literal, Unpack

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from te_models.suggestions import check_choice

from ...attention.mask import AttentionMask, Window
from ...distributed.tensor_parallel import InitMethod
from ..arguments import SHAPES, takes_parallel_options, takes_without_effect
from ..module.layernorm_mlp import LayerNormMLP
from ..module.norm import NORMS
from .dot_product_attention import CoreOptions
from .multihead_attention import MultiheadAttention, RotaryAngles
from .qkv import QkNorm
from .qkv_format import QkvFormat

_LENGTHS = ("cu_seqlens_q", "cu_seqlens_kv")
_OF_BOTH = ("checkpoint_core_attention", "core_attention_bias_type", "core_attention_bias", "alibi_slopes")


class TransformerLayer(nn.Module):
    """One layer of an encoder or a decoder. Transformer Engine: `te.pytorch.TransformerLayer`.

        x = x + attention(norm(x));  x = x + cross_attention(norm(x), encoder);  x = x + mlp(norm(x))

    with dropout of what is added; the second only with layer_type "decoder". Parts: `self_attention`,
    `inter_attention`, `layernorm_mlp`, `layernorm`. apply_residual_connection_post_layernorm: x on the right is
    norm(x). output_layernorm: no norm ahead of self attention, and one behind everything. parallel_attention_mlp:
    `x + attention(norm(x)) + mlp(norm(x))`, each with its norm. drop_path_rate: how often attention and MLP are left
    out for a sequence. attn_input_format: see `QkvFormat`. seq_length and micro_batch_size change nothing. The other
    options: see `MultiheadAttention` and
    `LayerNormMLP`. (`te_models.DecoderLayer` is the layer of a configured model.)
    """

    @takes_parallel_options
    @takes_without_effect(*SHAPES)
    def __init__(
        self,
        hidden_size: int,
        ffn_hidden_size: int,
        num_attention_heads: int,
        num_gqa_groups: int | None = None,
        layernorm_epsilon: float = 1e-5,
        hidden_dropout: float = 0.1,
        attention_dropout: float = 0.1,
        init_method: InitMethod | None = None,
        output_layer_init_method: InitMethod | None = None,
        layer_number: int | None = None,
        kv_channels: int | None = None,
        self_attn_mask_type: str = "causal",
        window_size: Window | None = None,
        *,
        enc_dec_attn_mask_type: str = "no_mask",
        enc_dec_window_size: Window | None = None,
        tp_group: dist.ProcessGroup | None = None,
        tp_size: int = 1,
        params_dtype: torch.dtype | None = None,
        fuse_wgrad_accumulation: bool = False,
        sequence_parallel: bool = False,
        apply_residual_connection_post_layernorm: bool = False,
        output_layernorm: bool = False,
        parallel_attention_mlp: bool = False,
        layer_type: Literal["encoder", "decoder"] = "encoder",
        drop_path_rate: float = 0.0,
        set_parallel_mode: bool = False,
        fuse_qkv_params: bool = False,
        rotary_pos_interleaved: bool = False,
        zero_centered_gamma: bool = False,
        qkv_weight_interleaved: bool = True,
        bias: bool = True,
        activation: str = "gelu",
        activation_params: Mapping[str, float] | None = None,
        normalization: str = "LayerNorm",
        device: torch.device | str | None = None,
        attn_input_format: QkvFormat = "sbhd",
        name: str | None = None,
        qk_norm_type: QkNorm | None = None,
        qk_norm_eps: float = 1e-6,
        qk_norm_before_rope: bool = False,
        softmax_type: str = "vanilla",
    ) -> None:
        super().__init__()
        check_choice("layer_type", layer_type, ("encoder", "decoder"))
        of_norm, decoder = apply_residual_connection_post_layernorm, layer_type == "decoder"
        if parallel_attention_mlp and (decoder or of_norm or output_layernorm):
            raise ValueError(
                "parallel_attention_mlp is for layer_type 'encoder', without apply_residual_connection_post_layernorm "
                "and output_layernorm"
            )
        if attn_input_format == "thd" and (decoder or drop_path_rate):
            raise ValueError("attn_input_format 'thd' is for layer_type 'encoder' without drop_path_rate")
        self.layer_type, self.attn_input_format = layer_type, attn_input_format
        self.hidden_dropout, self.drop_path_rate = hidden_dropout, drop_path_rate
        self.parallel_attention_mlp = parallel_attention_mlp
        common: dict[str, Any] = {
            "init_method": init_method,
            "tp_group": tp_group,
            "tp_size": tp_size,
            "fuse_wgrad_accumulation": fuse_wgrad_accumulation,
            "sequence_parallel": sequence_parallel,
            "params_dtype": params_dtype,
            "set_parallel_mode": set_parallel_mode,
            "zero_centered_gamma": zero_centered_gamma,
            "bias": bias,
            "normalization": normalization,
            "device": device,
            "return_bias": not parallel_attention_mlp,  # added together with the residual
        }
        attention: dict[str, Any] = {
            "attention_dropout": attention_dropout,
            "layernorm_epsilon": layernorm_epsilon,
            "layer_number": layer_number,
            "num_gqa_groups": num_gqa_groups,
            "fuse_qkv_params": fuse_qkv_params,
            "qkv_weight_interleaved": qkv_weight_interleaved,
            "rotary_pos_interleaved": rotary_pos_interleaved,
            "qkv_format": attn_input_format,
            "qk_norm_type": qk_norm_type,
            "qk_norm_eps": qk_norm_eps,
            "qk_norm_before_rope": qk_norm_before_rope,
            "softmax_type": softmax_type,
        }
        attention |= common | {"output_layer_init_method": output_layer_init_method}
        self.self_attention = MultiheadAttention(
            hidden_size,
            num_attention_heads,
            kv_channels,
            **attention,
            attn_mask_type=self_attn_mask_type,
            window_size=window_size,
            input_layernorm=not output_layernorm,
            return_layernorm_output=of_norm and not output_layernorm,
            name=f"{name}.self_attention" if name else None,
        )
        self.inter_attention = None
        if decoder:
            self.inter_attention = MultiheadAttention(
                hidden_size,
                num_attention_heads,
                kv_channels,
                **attention,
                attn_mask_type=enc_dec_attn_mask_type,
                window_size=enc_dec_window_size,
                input_layernorm=True,
                return_layernorm_output=of_norm,
                attention_type="cross",
                name=f"{name}.inter_attention" if name else None,
            )
        self.layernorm_mlp = LayerNormMLP(
            hidden_size,
            ffn_hidden_size,
            layernorm_epsilon,
            **common,
            output_layer_init_method=output_layer_init_method,
            activation=activation,
            activation_params=activation_params,
            return_layernorm_output=of_norm,
            name=f"{name}.layernorm_mlp" if name else "",
        )
        self.layernorm = None
        if output_layernorm:
            self.layernorm = NORMS[normalization](
                hidden_size,
                layernorm_epsilon,
                zero_centered_gamma=zero_centered_gamma,
                params_dtype=params_dtype,
                device=device,
            )

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: AttentionMask | None = None,
        self_attn_mask_type: str | None = None,
        window_size: Window | None = None,
        encoder_output: Tensor | None = None,
        enc_dec_attn_mask: AttentionMask | None = None,
        *,
        enc_dec_attn_mask_type: str | None = None,
        enc_dec_window_size: Window | None = None,
        is_first_microbatch: bool | None = None,
        rotary_pos_emb: RotaryAngles | None = None,
        **options: Unpack[CoreOptions],
    ) -> Tensor:
        """hidden_states: [S, B, H] ("bshd": [B, S, H]; "thd": [T, H]) -> alike.

        attention_mask, self_attn_mask_type, window_size, rotary_pos_emb, options: of self attention, see
        `MultiheadAttention.forward`. encoder_output: what a decoder looks at, in the same layout; enc_dec_*: of its
        cross attention; that takes a bias of scores, too. is_first_microbatch: as for `Linear`. ValueError where they
        do not fit together.
        """
        if self.inter_attention is None and not (encoder_output is None and enc_dec_attn_mask is None):
            raise ValueError("encoder_output and enc_dec_attn_mask are for layer_type 'decoder'")
        if self.inter_attention is not None and any(options.get(name) is not None for name in _LENGTHS):
            raise ValueError(f"{_LENGTHS[0]} is for layer_type 'encoder'; give attention_mask and enc_dec_attn_mask")
        attended = self.self_attention(
            hidden_states,
            attention_mask,
            is_first_microbatch=is_first_microbatch,
            rotary_pos_emb=rotary_pos_emb,
            attn_mask_type=self_attn_mask_type,
            window_size=window_size,
            **options,
        )
        if self.parallel_attention_mlp:
            added = self.layernorm_mlp(hidden_states, is_first_microbatch)
            return self._sum(hidden_states, attended, added)
        x = self._added_to(hidden_states, attended)
        if self.inter_attention is not None:
            cross: dict[str, Any] = {"attn_mask_type": enc_dec_attn_mask_type, "window_size": enc_dec_window_size}
            cross |= {name: value for name, value in options.items() if name in _OF_BOTH}
            crossed = self.inter_attention(
                x, enc_dec_attn_mask, encoder_output, is_first_microbatch=is_first_microbatch, **cross
            )
            x = self._added_to(x, crossed, whole=True)
        x = self._added_to(x, self.layernorm_mlp(x, is_first_microbatch))
        return x if self.layernorm is None else self.layernorm(x)

    def set_context_parallel_group(
        self,
        cp_group: dist.ProcessGroup | None,
        cp_global_ranks: list[int] | None = None,
        cp_stream: Any = None,
        cp_comm_type: str = "p2p",
    ) -> None:
        """Share each sequence among these ranks: hidden_states are of a rank's own positions, see
        `DotProductAttention.set_context_parallel_group`. ValueError for a decoder with cross attention."""
        if cp_group is not None and self.inter_attention is not None:
            raise ValueError("cp_group is given with layer_type 'decoder'; allowed: 'encoder'")
        self.self_attention.set_context_parallel_group(cp_group, cp_global_ranks, cp_stream, cp_comm_type)

    def _added_to(self, x: Tensor, results: tuple[Tensor | None, ...], *, whole: bool = False) -> Tensor:
        """Return x, or the norm of it that comes with the results of a sublayer, plus these: (y, its bias). whole: they
        are never left out."""
        y, bias, *normed = results
        assert y is not None
        residual = normed[0] if normed and normed[0] is not None else x
        return self._sum(residual, y, bias, whole=whole)

    def _sum(self, residual: Tensor, y: Tensor, bias: Tensor | None, *, whole: bool = False) -> Tensor:
        y = y if bias is None else y + bias
        y = F.dropout(y, self.hidden_dropout, self.training)
        if self.drop_path_rate and self.training and not whole:
            shape = [1] * y.dim()
            batch = 1 if self.attn_input_format == "sbhd" else 0
            shape[batch] = y.shape[batch]
            probability = 1 - self.drop_path_rate
            y = y * (torch.rand(shape, dtype=torch.float32, device=y.device) < probability).to(y.dtype) / probability
        return residual + y
