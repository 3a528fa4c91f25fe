"""Layers split over two ranks compile to one graph, collectives included, and compute the same bits as eagerly."""

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from te_models.layers import GroupedLinear, LayerNormLinear, LayerNormMLP, Linear, autocast, set_rounding_seed
from tests.layers.matrix_recipes import build_stored, fresh, graphs
from tests.ranks import on_ranks

HIDDEN, FFN, EXPERTS = 128, 192, 3
NEW = {"params_dtype": torch.bfloat16}
COLUMN, ROW = {"parallel_mode": "column", **NEW}, {"parallel_mode": "row", **NEW}

KINDS: dict[str, Callable[..., nn.Module]] = {
    "linear_column": lambda **split: Linear(HIDDEN, FFN, **COLUMN, **split),
    "linear_row": lambda **split: Linear(FFN, HIDDEN, **ROW, **split),
    "layernorm_linear": lambda **split: LayerNormLinear(HIDDEN, FFN, **COLUMN, **split),
    "mlp": lambda **split: LayerNormMLP(
        HIDDEN, FFN, normalization="RMSNorm", activation="swiglu", set_parallel_mode=True, **NEW, **split
    ),
    "grouped_column": lambda **split: GroupedLinear(EXPERTS, HIDDEN, FFN, **COLUMN, **split),
    # the bias of this one is not its own to add
    "grouped_row": lambda **split: GroupedLinear(EXPERTS, FFN, HIDDEN, False, **ROW, **split),
}
RECIPES = (None, "delayed", "mxfp8", "block", "nvfp4")


def is_grouped(kind: str) -> bool:
    """Whether rows come in groups; such a layer does not itself communicate."""
    return kind.startswith("grouped")


def step(layer: nn.Module, run: Callable, name: str | None, x: Tensor, splits: tuple[Tensor, ...]) -> list[Tensor]:
    """Return output, gradients and live state of a step under a new but equal recipe, from equal live state."""
    layer.zero_grad()
    set_rounding_seed(layer, 1)
    layer.fp8_scale = torch.full_like(layer.fp8_scale, 8.0)
    layer.fp8_grad_amax.zero_()
    if layer.fp8_history is not None:
        layer.fp8_history.zero_()
    x = x.clone().requires_grad_()
    options = {"amax_reduction_group": layer.tp_group} if name == "delayed" else {}
    with autocast(enabled=name is not None, recipe=fresh(name), **options):
        y = run(x, *splits)
    y.backward(torch.linspace(-1, 1, y.numel()).view(y.shape).to(y.dtype))
    live = [layer.fp8_scale, layer.fp8_grad_amax, layer.fp8_rng_state]
    return [y.detach(), x.grad, *(p.grad for p in layer.parameters()), *(t.clone() for t in live)]


def cases() -> list[tuple[str, bool, str | None, bool, str]]:
    """Every kind plain and with sequence parallelism under every recipe; with stored weights, and by Inductor."""
    found = [
        (kind, sequence, name, False, "aot_eager")
        for kind in KINDS
        for sequence in (False, True)
        for name in RECIPES
        if not (sequence and is_grouped(kind))
    ]
    found += [(kind, not is_grouped(kind), "nvfp4", True, "aot_eager") for kind in KINDS]
    # by Inductor what has no norm or activation, whose last bits are its own
    found += [("linear_row", True, "block", False, "inductor"), ("grouped_row", False, "nvfp4", False, "inductor")]
    return [*found, ("linear_row", False, "delayed", False, "eager")]  # for every run


@on_ranks(2, timeout=600)
@pytest.mark.sentinels("linear_row-False-delayed-False-eager")  # collectives of sums, with scales of earlier calls
@pytest.mark.parametrize(("kind", "sequence", "name", "stored", "backend"), cases())
def test_a_compiled_layer_computes_the_bits_of_the_eager_one(
    kind: str, sequence: bool, name: str | None, stored: bool, backend: str
) -> None:
    """One graph of layer and collectives, for other numbers of rows, too, computes the same bits."""
    split = {"tp_group": dist.group.WORLD} | ({"sequence_parallel": True} if sequence else {})
    torch.manual_seed(1)
    layer = build_stored(lambda: KINDS[kind](**split), name) if stored else KINDS[kind](**split)
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend=backend)
    generator = torch.Generator().manual_seed(dist.get_rank())
    for rows in (40, 33):
        splits = (torch.tensor([rows - 3, 0, 3]),) if is_grouped(kind) else ()
        x = torch.randn(rows * (2 if sequence and kind == "linear_row" else 1), width(layer), generator=generator)
        x = x.bfloat16()
        eager, got = (step(layer, run, name, x, splits) for run in (layer, compiled))
        for index, (a, b) in enumerate(zip(eager, got, strict=True)):
            assert torch.equal(a, b), f"value {index} of {len(eager)}, {rows} rows: differs by {(a - b).abs().max()}"
    assert graphs() == 1


def width(layer: nn.Module) -> int:
    """The features of this rank's input."""
    return HIDDEN if isinstance(layer, LayerNormMLP) else layer.in_features
