"""Multi-head attention as one module: projections to queries, keys and values, attention, and the output projection.

S length, B batch, H hidden, N query heads, G key/value heads (query groups), D head channels.
"""

from typing import Any, Literal, Unpack

import torch
import torch.distributed as dist
from torch import Tensor, nn

from te_models.suggestions import shown

from ...attention.mask import AttentionMask, Window
from ...collectives import ranks_of
from ...distributed.tensor_parallel import InitMethod
from ..arguments import SHAPES, takes_parallel_options, takes_without_effect
from ..module.layernorm_linear import LayerNormLinear
from ..module.linear import Linear
from .dot_product_attention import AttentionOptions, DotProductAttention
from .qkv import QkNorm, join_parameters, qk_norm, split_kv, split_qkv
from .qkv_format import QkvFormat
from .rotary import apply_rotary_pos_emb

RotaryAngles = Tensor | tuple[Tensor, Tensor]


class MultiheadAttention(nn.Module):
    """Self attention, or cross attention over the output of an encoder. Transformer Engine:
    `te.pytorch.MultiheadAttention`.

    Parts: `layernorm_qkv` (input_layernorm) or `qkv`, in attention_type "cross" `layernorm_query` or `query_layer`,
    and `key_value`; `core_attention`; `proj`. The rows of a joint projection are `[G, N / G queries, key, value][D]`
    with fuse_qkv_params and qkv_weight_interleaved, else all queries, then all keys, then all values. There is one
    weight either way; a state dict with `query_weight`, `key_weight` and `value_weight` (Transformer Engine's without
    fuse_qkv_params) is loaded, too.

    kv_channels: D, None: H / N. qk_norm_type: norms of q and k by head, with qk_norm_before_rope ahead of the rotation.
    set_parallel_mode: split heads over the ranks of tp_group. return_bias: return (y without the bias of `proj`, that);
    return_layernorm_output: return the normed input, too, behind them. seq_length and
    micro_batch_size change nothing. The other options: see `DotProductAttention`,
    `Linear` and `LayerNormLinear`.
    """

    @takes_parallel_options
    @takes_without_effect(*SHAPES)
    def __init__(
        self,
        hidden_size: int,
        num_attention_heads: int,
        kv_channels: int | None = None,
        attention_dropout: float = 0.1,
        layernorm_epsilon: float = 1e-5,
        init_method: InitMethod | None = None,
        output_layer_init_method: InitMethod | None = None,
        *,
        layer_number: int | None = None,
        attn_mask_type: str = "causal",
        window_size: Window | None = None,
        tp_group: dist.ProcessGroup | None = None,
        tp_size: int = 1,
        num_gqa_groups: int | None = None,
        fuse_wgrad_accumulation: bool = False,
        sequence_parallel: bool = False,
        params_dtype: torch.dtype | None = None,
        return_bias: bool = False,
        return_layernorm_output: bool = False,
        input_layernorm: bool = False,
        attention_type: Literal["self", "cross"] = "self",
        set_parallel_mode: bool = False,
        fuse_qkv_params: bool = False,
        zero_centered_gamma: bool = False,
        qkv_weight_interleaved: bool = True,
        bias: bool = True,
        normalization: str = "LayerNorm",
        device: torch.device | str | None = None,
        qkv_format: QkvFormat = "sbhd",
        name: str | None = None,
        qk_norm_type: QkNorm | None = None,
        qk_norm_eps: float = 1e-6,
        qk_norm_before_rope: bool = False,
        rotary_pos_interleaved: bool = False,
        softmax_type: str = "vanilla",
    ) -> None:
        super().__init__()
        if kv_channels is None and hidden_size % num_attention_heads:
            raise ValueError(f"hidden_size is {hidden_size}; allowed: a multiple of {num_attention_heads} heads")
        if return_layernorm_output and not input_layernorm:
            raise ValueError("return_layernorm_output needs input_layernorm=True")
        self.interleaved = fuse_qkv_params and qkv_weight_interleaved
        ranks = tp_size if tp_group is None else ranks_of("tp_group", tp_group)
        if set_parallel_mode and ranks > 1 and not self.interleaved:
            raise ValueError("set_parallel_mode over several ranks needs fuse_qkv_params=True, whose rows go by head")
        split = {"tp_group": tp_group, "tp_size": tp_size} if set_parallel_mode else {}
        new = {"params_dtype": params_dtype, "device": device}
        self.head_dim = kv_channels or hidden_size // num_attention_heads
        self.core_attention = DotProductAttention(
            num_attention_heads,
            self.head_dim,
            num_gqa_groups,
            attention_dropout,
            qkv_format=qkv_format,
            attn_mask_type=attn_mask_type,
            window_size=window_size,
            layer_number=layer_number,
            attention_type=attention_type,
            softmax_type=softmax_type,
            **split,  # type: ignore[arg-type]
            **new,
        )
        self.attention_type, self.qkv_format = attention_type, qkv_format
        self.rotary_pos_interleaved = rotary_pos_interleaved
        self.return_bias, self.return_layernorm_output = return_bias, return_layernorm_output
        queries, groups = num_attention_heads * self.head_dim, (num_gqa_groups or num_attention_heads) * self.head_dim
        common: dict[str, Any] = {"bias": bias, "fuse_wgrad_accumulation": fuse_wgrad_accumulation, **split, **new}
        common["sequence_parallel"] = sequence_parallel and set_parallel_mode
        column = {**common, "init_method": init_method, "parallel_mode": "column" if set_parallel_mode else None}
        norm = {
            "eps": layernorm_epsilon,
            "normalization": normalization,
            "zero_centered_gamma": zero_centered_gamma,
            "return_layernorm_output": return_layernorm_output,
        }

        def projection(rows: int, part: str, normed: bool) -> nn.Module:
            named: dict[str, Any] = column | {"name": f"{name}.{part}" if name else ""}
            return LayerNormLinear(hidden_size, rows, **named, **norm) if normed else Linear(hidden_size, rows, **named)

        cross = attention_type == "cross"
        plain, normed = ("query_layer", "layernorm_query") if cross else ("qkv", "layernorm_qkv")
        self._first = normed if input_layernorm else plain
        rows = queries if cross else queries + 2 * groups
        self.add_module(self._first, projection(rows, self._first, input_layernorm))
        self.key_value = projection(2 * groups, "key_value", False) if cross else None
        self.q_norm, self.k_norm = (qk_norm(qk_norm_type, self.head_dim, qk_norm_eps, **new) for _ in range(2))
        self.qk_norm_before_rope = qk_norm_before_rope
        self.proj = Linear(
            queries,
            hidden_size,
            **common,
            init_method=output_layer_init_method,
            return_bias=return_bias,
            parallel_mode="row" if set_parallel_mode else None,
            name=f"{name}.proj" if name else "",
        )
        self.register_load_state_dict_pre_hook(_join_split_parameters)

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: AttentionMask | None = None,
        encoder_output: Tensor | None = None,
        *,
        is_first_microbatch: bool | None = None,
        rotary_pos_emb: RotaryAngles | None = None,
        **options: Unpack[AttentionOptions],
    ) -> Tensor | tuple[Tensor | None, ...]:
        """hidden_states: [S, B, H] ("bshd": [B, S, H]; "thd": [T, H]) -> alike, or a tuple as the constructor was told.

        encoder_output: what cross attention takes keys and values from, in the same layout. rotary_pos_emb: angles from
        `RotaryPositionEmbedding`, or a pair, of queries and of keys. is_first_microbatch: as for `Linear`. The others:
        see `DotProductAttention.forward`. ValueError without an encoder_output in cross attention, and for one else.
        """
        if (encoder_output is None) == (self.key_value is not None):
            is_given = "missing" if encoder_output is None else "given"
            raise ValueError(f"encoder_output is {is_given} with attention_type {shown(self.attention_type)}")
        core = self.core_attention
        heads, groups, layout = core.num_attention_heads, core.num_gqa_groups, {"interleaved": self.interleaved}
        first = self.get_submodule(self._first)(hidden_states, is_first_microbatch)
        first, normed = first if self.return_layernorm_output else (first, None)
        if self.key_value is None:
            q, k, v = split_qkv(first, heads, groups, **layout)
        else:
            q = first.unflatten(-1, (heads, -1))
            k, v = split_kv(self.key_value(encoder_output, is_first_microbatch), groups, **layout)
        q, k = self._placed(q, k, rotary_pos_emb, options.get("cu_seqlens_q"), options.get("cu_seqlens_kv"))
        y = self.proj(core(q, k, v, attention_mask, **options), is_first_microbatch)
        if self.return_layernorm_output:
            return (*y, normed) if self.return_bias else (y, normed)
        return y

    def set_context_parallel_group(
        self,
        cp_group: dist.ProcessGroup | None,
        cp_global_ranks: list[int] | None = None,
        cp_stream: Any = None,
        cp_comm_type: str = "p2p",
    ) -> None:
        """Share each sequence among these ranks, see `DotProductAttention.set_context_parallel_group`. rotary_pos_emb
        is then of the whole sequences. ValueError in cross attention, whose queries and keys are of two sequences."""
        if cp_group is not None and self.key_value is not None:
            raise ValueError("cp_group is given with attention_type 'cross'; allowed: 'self'")
        self.core_attention.set_context_parallel_group(cp_group, cp_global_ranks, cp_stream, cp_comm_type)

    def _placed(
        self, q: Tensor, k: Tensor, angles: RotaryAngles | None, cu_q: Tensor | None, cu_kv: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Return q [..., N, D] and k [..., G, D], normed and rotated as told."""
        if self.qk_norm_before_rope:
            q, k = self._normed(q, k)
        if angles is not None:
            of_q, of_k = angles if isinstance(angles, tuple) else (angles, angles)
            cu_q, cu_kv = (cu_q, cu_kv) if self.qkv_format == "thd" else (None, None)
            options: dict[str, Any] = {"tensor_format": self.qkv_format, "interleaved": self.rotary_pos_interleaved}
            shard = self.core_attention.cp_shard
            options |= {} if shard is None else {"cp_size": shard.ranks, "cp_rank": shard.rank}
            q = apply_rotary_pos_emb(q, of_q, cu_seqlens=cu_q, **options)
            k = apply_rotary_pos_emb(k, of_k, cu_seqlens=cu_kv, **options)
        return (q, k) if self.qk_norm_before_rope else self._normed(q, k)

    def _normed(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return (q, k) if self.q_norm is None or self.k_norm is None else (self.q_norm(q), self.k_norm(k))


def _join_split_parameters(module: MultiheadAttention, state: dict[str, Any], prefix: str, *_: object) -> None:
    """Load what Transformer Engine saves without fuse_qkv_params: a parameter for queries, one for keys, ..."""
    if not module.interleaved:
        cross = module.key_value is not None
        join_parameters(state, f"{prefix}{module._first}.", ("query",) if cross else ("query", "key", "value"))
        join_parameters(state, f"{prefix}key_value.", ("key", "value"))
