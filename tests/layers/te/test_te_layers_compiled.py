"""Transformer Engine's larger layers, compiled: one graph for all lengths, with the bits of eager."""

from collections.abc import Callable, Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.utils import counters

import te_models.layers as te
from tests.layers.te.ops.steps import assert_equal, step

HIDDEN = 64


def layer(**options: object) -> te.TransformerLayer:
    return te.TransformerLayer(HIDDEN, 128, 4, 2, hidden_dropout=0.0, attention_dropout=0.0, **options)


class Recomputing(nn.Module):
    """An encoder layer that computes its attention twice."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = layer()

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x, checkpoint_core_attention=True)


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = layer(layer_type="decoder")

    def forward(self, x: Tensor, encoded: Tensor) -> Tensor:
        return self.layer(x, encoder_output=encoded)


class Experts(nn.Module):
    """Two of four experts for each token, by the functions of Transformer Engine."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(HIDDEN, 4)
        self.up, self.down = te.GroupedLinear(4, HIDDEN, 128), te.GroupedLinear(4, 128, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        best, chosen = self.router(tokens).softmax(-1).topk(2, dim=-1)
        probs = torch.zeros(len(tokens), 4).scatter(1, chosen, best)
        mask = probs > 0
        rows, of_rows, places = te.moe_permute_with_probs(tokens, probs, mask, num_out_tokens=2 * len(tokens))
        splits = mask.sum(0)
        y = self.down(F.silu(self.up(rows, splits)), splits) * of_rows[:, None]
        return te.moe_unpermute(y, places, restore_shape=tokens.shape, map_type="mask")


PARALLEL = {"normalization": "RMSNorm", "activation": "swiglu", "bias": False}
KINDS: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "encoder": (layer, 1),
    "recomputing": (Recomputing, 1),
    "parallel": (lambda: layer(parallel_attention_mlp=True, qk_norm_type="RMSNorm", **PARALLEL), 1),
    "post_norm": (lambda: layer(output_layernorm=True, apply_residual_connection_post_layernorm=True), 1),
    "decoder": (Decoder, 2),
    "experts": (Experts, 1),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", [None, "delayed", "mxfp8"])
@pytest.mark.parametrize("kind", KINDS)
def test_one_graph_for_all_lengths(kind: str, name: str | None) -> None:
    build, inputs = KINDS[kind]
    model = build()
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend="aot_eager")
    for length in (40, 33, 64):
        x: Sequence[Tensor] = [torch.randn(length + 7 * i, 3, HIDDEN) for i in range(inputs)]
        assert_equal(step(model, name, x), step(model, name, x, run=compiled))
        assert not counters["graph_break"], dict(counters["graph_break"])
        assert counters["stats"]["unique_graphs"] == 1
