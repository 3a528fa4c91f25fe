"""Layers split over two ranks are the whole layers, outputs and gradients; compiled: test_compile_tensor_parallel."""

import warnings
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import te_models.layers as te
from te_models import GPTModel
from te_models.layers.collectives import all_gather, reduce_scatter
from te_models.layers.distributed.tensor_parallel import rank_part
from tests.build import tiny, tiny_moe
from tests.compare import refused
from tests.ranks import on_ranks

RANKS, ROWS, HIDDEN, FFN, EXPERTS = 2, 64, 128, 256, 3


class Attentionish(nn.Module):
    """A column layer and a row layer with elementwise work between them, as in attention."""

    def __init__(self, normed: bool, **split: object) -> None:
        super().__init__()
        column = split and {"parallel_mode": "column"}
        self.first = (te.LayerNormLinear if normed else te.Linear)(HIDDEN, FFN, **split, **column)
        self.second = te.Linear(FFN, HIDDEN, **split, **(split and {"parallel_mode": "row"}))

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)))


class OneSequence(nn.Module):
    """A transformer layer on rows that are one sequence."""

    def __init__(self, **split: object) -> None:
        super().__init__()
        options = {"hidden_dropout": 0.0, "attention_dropout": 0.0, "fuse_qkv_params": True, **split}
        self.layer = te.TransformerLayer(HIDDEN, FFN, 4, 2, **options, **(split and {"set_parallel_mode": True}))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x[:, None])[:, 0]


KINDS: dict[str, Callable[..., nn.Module]] = {
    "pair": lambda **split: Attentionish(False, **split),
    "normed_pair": lambda **split: Attentionish(True, **split),
    "mlp": lambda **split: te.LayerNormMLP(HIDDEN, FFN, **split, **(split and {"set_parallel_mode": True})),
    "gated_mlp": lambda **split: te.LayerNormMLP(
        HIDDEN, FFN, normalization="RMSNorm", activation="swiglu", **split, **(split and {"set_parallel_mode": True})
    ),
    "transformer_layer": OneSequence,
}


def build(kind: str, **split: object) -> nn.Module:
    """The layers, with values that a wrong sum or order would show in."""
    torch.manual_seed(1)
    module = KINDS[kind](**split)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if parameter.dim() == 1:  # norms and biases start as constants
                dim, ranks = getattr(parameter, "partition_dim", None), dist.get_world_size()
                whole = parameter.numel() * (1 if dim is None else ranks)
                values = torch.rand(whole, generator=generator) + ("norm" in name)
                stride = getattr(parameter, "partition_stride", 1)
                parameter.copy_(values if dim is None else rank_part(values, dim, dist.get_rank(), ranks, stride))
    return module


def close(a: Tensor, b: Tensor, bound: float, what: str = "") -> None:
    """Largest difference against the largest entry."""
    error = (a - b).abs().max() / b.abs().max()
    assert error <= bound, f"{what} relative error {error:.2e}, allowed {bound:.2e}"


@on_ranks(2)
@pytest.mark.sentinels(
    *("pair-plain-None", "pair-sequence-mxfp8", "normed_pair-plain-delayed", "mlp-plain-current"),
    *("mlp-sequence-None", "gated_mlp-plain-mxfp8", "transformer_layer-plain-None"),
    "transformer_layer-sequence-delayed",
)
@pytest.mark.parametrize("name", [None, "current", "mxfp8", "delayed"])
@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["plain", "sequence"])
@pytest.mark.parametrize("kind", KINDS)
def test_split_layers_are_the_whole_ones(kind: str, sequence_parallel: bool, name: str | None) -> None:
    rank = dist.get_rank()
    group = dist.new_group([0, 1])
    whole, split = build(kind), build(kind, tp_group=group, tp_size=RANKS, sequence_parallel=sequence_parallel)
    torch.manual_seed(3)
    x, dy = torch.randn(ROWS, HIDDEN), torch.randn(ROWS, HIDDEN)
    mine = (lambda t: t.chunk(RANKS)[rank]) if sequence_parallel else (lambda t: t)
    inputs = x.clone().requires_grad_(), mine(x).clone().requires_grad_()
    # scaling by blocks of 32 is that of the parts; one scale per tensor is not, and differs by a step of E4M3 or E5M2
    bound = {None: 2e-6, "mxfp8": 2e-2}.get(name, 0.3)
    options = {"enabled": name is not None} | ({} if name is None else {"recipe": te.recipe(name)})
    if name == "delayed":
        options["amax_reduction_group"] = group
    for _ in range(2):
        for parameter in (*whole.parameters(), *split.parameters(), *inputs):
            parameter.grad = None
        with te.autocast(**options):
            y = whole(inputs[0])
        with te.autocast(**options):
            z = split(inputs[1])
        y.backward(dy)
        z.backward(mine(dy))
    close(z, mine(y), bound)
    close(inputs[1].grad, mine(inputs[0].grad), bound)
    for (key, full), part in zip(whole.named_parameters(), split.parameters(), strict=True):
        expected = full.grad
        if hasattr(part, "partition_dim"):
            expected = rank_part(expected, part.partition_dim, rank, RANKS, part.partition_stride)
            if name is None:
                values = rank_part(full.detach(), part.partition_dim, rank, RANKS, part.partition_stride)
                assert torch.equal(part, values), f"{key} does not start as the whole one's part"
        close(part.grad, expected, bound, f"gradient of {key}:")


@on_ranks(2)
@pytest.mark.parametrize(("grouped", "grouped_bias"), [(True, True), (False, False), (True, False)])
def test_grouped_members_are_split(grouped: bool, grouped_bias: bool) -> None:
    rank, group = dist.get_rank(), dist.new_group([0, 1])
    layout = {"single_grouped_weight": grouped, "single_grouped_bias": grouped_bias}
    torch.manual_seed(1)
    sizes = ((HIDDEN, FFN), (FFN, HIDDEN))
    whole = [te.GroupedLinear(EXPERTS, *size, True, **layout) for size in sizes]
    torch.manual_seed(1)
    column = te.GroupedLinear(EXPERTS, HIDDEN, FFN, True, tp_group=group, parallel_mode="column", **layout)
    row = te.GroupedLinear(EXPERTS, FFN, HIDDEN, True, tp_group=group, parallel_mode="row", **layout)
    weight_dims = {True: (1, 2), False: (0, 1)}[grouped]
    bias_dims = {True: (1, None), False: (0, None)}[grouped_bias]
    for layer, part, *dims in zip(whole, (column, row), weight_dims, bias_dims, strict=True):
        for (name, full), mine in zip(layer.named_parameters(), part.parameters(), strict=True):
            dim = dims[name.startswith("bias")]
            assert getattr(mine, "partition_dim", None) == dim
            if name.startswith("bias"):
                full.data.normal_()
                mine.data.copy_(full if dim is None else rank_part(full, dim, rank, RANKS))
            assert torch.equal(mine, full if dim is None else rank_part(full, dim, rank, RANKS))
    x, splits = torch.randn(ROWS, HIDDEN), torch.tensor([30, 0, 30])  # four rows of no group, which get no bias
    y = row(column(x, splits), splits)
    dist.all_reduce(y)
    y = row.with_bias(y, splits)
    expected = whole[1](whole[0](x, splits), splits)
    close(y, expected, 2e-6)
    assert not y[60:].any()
    y.backward(torch.ones_like(y))
    expected.backward(torch.ones_like(expected))
    for kept, full in zip(row.members()[1], whole[1].members()[1], strict=True):
        assert torch.equal(kept.grad, full.grad)  # whole numbers of rows


@on_ranks(2)
def test_a_row_of_a_pipeline_has_no_bias() -> None:
    """A fusible operation ends where the sum over ranks begins."""
    layer = te.ops.GroupedLinear(EXPERTS, FFN, HIDDEN, True, tp_size=RANKS, parallel_mode="row")
    with pytest.raises(ValueError, match=r"a row-parallel ops\.GroupedLinear has no bias"):
        te.ops.Sequential(layer)(torch.randn(ROWS, FFN // RANKS), torch.tensor([30, 0, 34]))


@on_ranks(2)
def test_quantized_weights_are_marked() -> None:
    with te.quantized_model_init(recipe=te.recipe("mxfp8")):
        layer = te.Linear(HIDDEN, FFN, tp_size=RANKS, parallel_mode="column")
    assert layer.weight.shape == (FFN // RANKS, HIDDEN) and layer.weight.partition_dim == 0
    assert layer.tp_group is dist.group.WORLD


@on_ranks(2)
def test_a_group_of_other_ranks_is_refused() -> None:
    group = dist.new_group([0])
    builders = {
        "tp_group": (
            lambda: te.Linear(HIDDEN, FFN, tp_group=group, parallel_mode="column"),
            lambda: GPTModel(tiny(), tp_group=group),
        ),
        "ep_group": (lambda: GPTModel(tiny_moe(), ep_group=group),),
    }
    for name, build_one in ((name, one) for name, several in builders.items() for one in several):
        if dist.get_rank() == 0:
            build_one()
        else:
            refused(build_one, f"{name} does not contain this rank, 1; allowed: a group that does")


@on_ranks(2)
@pytest.mark.sentinels("smoothed")
@pytest.mark.parametrize(
    ("smoothing", "dtype", "compiled"),
    [(0.0, torch.bfloat16, False), (0.1, torch.float32, False), (0.1, torch.float32, True)],
    ids=["bfloat16", "smoothed", "compiled"],
)
def test_a_vocabulary_is_split(smoothing: float, dtype: torch.dtype, compiled: bool) -> None:
    """Both ranks have the loss of the whole vocabulary, each the gradient of its own words, of which there are 37."""
    rank, group = dist.get_rank(), dist.new_group([0, 1])
    torch.manual_seed(3)
    words, weights = 2 * 37, torch.rand(6, 3)
    logits, target = (8 * torch.randn(6, 3, words)).to(dtype), torch.randint(words, (6, 3))
    target[0, 1] = target[4] = -1
    whole, mine = logits.clone().requires_grad_(), logits.chunk(RANKS, -1)[rank].clone().requires_grad_()
    expected = te.parallel_cross_entropy(whole, target, smoothing, ignore_idx=-1)
    (expected * weights).sum().backward()

    def run(mine: Tensor, target: Tensor, reduce: bool) -> Tensor:
        return te.parallel_cross_entropy(mine, target, smoothing, reduce, group, -1)

    split = torch.compile(run, fullgraph=True, backend="aot_eager") if compiled else run
    loss = split(mine, target, False)
    (loss * weights).sum().backward()
    close(loss, expected, 4e-6)
    close(mine.grad, whole.grad.chunk(RANKS, -1)[rank], {torch.float32: 4e-6, torch.bfloat16: 2.0**-7}[dtype])
    close(split(mine, target, True), te.parallel_cross_entropy(whole, target, smoothing, True, None, -1), 4e-6)
    assert torch.equal(*all_gather(loss.detach(), group).chunk(RANKS))


@on_ranks(2)
def test_torch_has_nothing_to_warn_of() -> None:
    x = torch.arange(4.0)
    with warnings.catch_warnings(action="error"):
        assert torch.equal(all_gather(x, dist.group.WORLD), torch.cat((x, x)))
        assert torch.equal(reduce_scatter(x, dist.group.WORLD), 2 * x.chunk(2)[dist.get_rank()])


def test_what_cannot_be_split_is_refused() -> None:
    refused(lambda: te.Linear(4, 4, parallel_mode="both"), "parallel_mode is 'both'; allowed: None, 'column', 'row'")
    refused(lambda: te.LayerNormLinear(4, 4, parallel_mode="row"), "parallel_mode is 'row'; allowed: None, 'column'")
    refused(lambda: te.Linear(4, 4, tp_size=2, parallel_mode="column"), "init_process_group")


def test_one_rank_is_not_split() -> None:
    """The arguments may stay in place when there is one rank."""
    layer = te.GroupedLinear(2, 4, 6, bias=True, parallel_mode="column", tp_size=1)
    assert layer.weight.shape == (2, 6, 4) and layer.tp_group is None


def test_parameters_say_how_they_are_split_on_one_rank_too() -> None:
    """As far as a mode was asked for, in Megatron's words."""

    def marks(parameter: torch.nn.Parameter) -> tuple[object, ...]:
        names = ("tensor_model_parallel", "partition_dim", "partition_stride")
        return tuple(getattr(parameter, name, None) for name in names)

    nothing = (None, None, None)
    column, row = (te.Linear(4, 6, parallel_mode=mode, tp_size=1) for mode in ("column", "row"))
    assert (marks(column.weight), marks(column.bias)) == ((True, 0, 1), (True, 0, 1))
    assert (marks(row.weight), marks(row.bias)) == ((True, 1, 1), nothing)
    assert marks(te.Linear(4, 6).weight) == nothing
    normed = te.LayerNormLinear(4, 6, parallel_mode="column")
    assert marks(normed.weight) == (True, 0, 1) and marks(normed.layer_norm_weight) == nothing
    grouped = te.GroupedLinear(2, 4, 6, bias=True, parallel_mode="row")
    apart = te.GroupedLinear(2, 4, 6, bias=True, parallel_mode="row", single_grouped_weight=False)
    assert (marks(grouped.weight), marks(grouped.bias), marks(apart.weight1)) == ((True, 2, 1), nothing, (True, 1, 1))
    mlp = te.LayerNormMLP(4, 8, activation="swiglu", set_parallel_mode=True)
    assert (marks(mlp.fc1_weight), marks(mlp.fc1_bias)) == ((True, 0, 2), (True, 0, 2))
    assert (marks(mlp.fc2_weight), marks(mlp.fc2_bias)) == ((True, 1, 1), nothing)
    with te.quantized_model_init(recipe=te.recipe("mxfp8")):
        assert marks(te.Linear(32, 32, parallel_mode="column").weight) == (True, 0, 1)
