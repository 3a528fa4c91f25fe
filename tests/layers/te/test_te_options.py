"""Options of Transformer Engine's layers: what each computes, against the layer without it or the formula."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import te_models.layers as te
from te_models.layers.recipe.recipes import DelayedScaling

PARTS = ("query", "key_", "value")


def joined(kind: type, split: object, chosen: te.Recipe | None, **options: object) -> list[list[Tensor]]:
    """The output and all gradients of a layer with split parameters, and of the same layer with one of each."""
    results = []
    whole = kind(32, 96, **options)
    with torch.no_grad():
        whole.bias.normal_()
    apart = kind(32, 96, parameters_split=split, **options)
    rows = [p.shape[0] for name, p in apart.named_parameters() if name.endswith("_weight") and "norm" not in name]
    state = {name: value for name, value in whole.state_dict().items() if "norm" in name}
    for i, name in enumerate(("query", "key", "value")):
        state |= {f"{name}_{k}": getattr(whole, k).split(rows)[i] for k in ("weight", "bias")}
    assert set(state) == set(apart.state_dict())
    apart.load_state_dict(state)
    for layer in (whole, apart):
        torch.manual_seed(1)
        x = torch.randn(2, 16, 32, requires_grad=True)
        with te.autocast(enabled=chosen is not None, recipe=chosen):
            y = layer(x)
        y.square().sum().backward()
        found = [
            torch.cat([p.grad for name, p in layer.named_parameters() if name.endswith(kind) and "norm" not in name])
            for kind in ("weight", "bias")
        ]
        results.append([y.detach(), x.grad, *found])
    return results


@pytest.mark.parametrize("chosen", [None, te.MXFP8BlockScaling(), DelayedScaling()], ids=["none", "mxfp8", "delayed"])
@pytest.mark.parametrize("kind", [te.Linear, te.LayerNormLinear])
def test_split_parameters_are_one_gemm(kind: type, chosen: te.Recipe | None) -> None:
    """Bit for bit: the scale of a tensor is that of all parameters together."""
    for split in (PARTS, {"query": 64, "key": 16, "value": 16}):
        for a, b in zip(*joined(kind, split, chosen), strict=True):
            assert torch.equal(a, b)


def test_split_parameters_cache_and_compile() -> None:
    layer, x = te.Linear(32, 96, parameters_split=PARTS), torch.randn(4, 32)
    assert layer.weight_names() == ("query_weight", "key_weight", "value_weight")
    with te.autocast(recipe=te.MXFP8BlockScaling()):
        expected = layer(x)
        assert torch.equal(layer(x, is_first_microbatch=True), expected)
        with torch.no_grad():
            layer.key_weight.zero_()
        assert torch.equal(layer(x, is_first_microbatch=False), expected)
        assert torch.equal(torch.compile(layer, fullgraph=True, backend="aot_eager")(x), layer(x))


@pytest.mark.parametrize(
    "split, message",
    [
        ("qkv", "parameters_split is 'qkv'; allowed: names, or rows by name, or None"),
        ((), r"parameters_split is \(\); allowed"),
        (("a", "a_"), "parameters_split has a name twice"),
        (("a", "b", "c", "d", "e"), "parameters_split has 5 names; allowed: a divisor of 96 rows"),
        ({"a": 90, "b": 5}, r"parameters_split has rows \[90, 5\]; allowed: positive numbers that add up to 96"),
    ],
)
def test_rows_of_split_parameters_fit(split: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        te.Linear(32, 96, parameters_split=split)


def test_what_split_parameters_cannot_have() -> None:
    for option in ("fuse_wgrad_accumulation", "delay_wgrad_compute"):
        with pytest.raises(ValueError, match=f"{option} is True beside parameters_split; allowed: one of the two"):
            te.Linear(32, 96, parameters_split=PARTS, **{option: True})
    said = "Linear has parameters_split, and its parameters cannot be stored quantized"
    with te.quantized_model_init(recipe=te.MXFP8BlockScaling()), pytest.raises(ValueError, match=said):
        te.Linear(32, 96, parameters_split=PARTS)


@pytest.mark.parametrize(
    "chosen", [te.MXFP8BlockScaling(), te.Float8CurrentScaling(), te.Float8BlockScaling()], ids=str
)
@pytest.mark.parametrize("kind", [te.Linear, te.LayerNormLinear])
def test_an_output_comes_quantized(kind: type, chosen: te.Recipe) -> None:
    """As the recipe's quantizer of inputs makes it of the plain output, whose gradients it has."""
    layer, x = kind(32, 64, return_bias=True), torch.randn(2, 16, 32, requires_grad=True)
    dy = torch.randn(2, 16, 64)
    found = []
    for fp8_output in (False, True):
        layer.zero_grad()
        with te.autocast(recipe=chosen):
            y, bias = layer(x, None, fp8_output)
        assert bias is not None
        found.append((y, torch.autograd.grad(y, (x, layer.weight), dy)))
    (plain, expected), (y, gradients) = found
    assert isinstance(y, te.QuantizedTensor) and y.shape == plain.shape and y.dtype == plain.dtype
    quantizer = chosen.quantizers("Linear", "").input
    assert torch.equal(y.dequantize(), quantizer.quantize(plain.detach().view(32, 64)).dequantize().view(2, 16, 64))
    torch.testing.assert_close(gradients, expected, rtol=0, atol=0)
    assert type(layer(x, fp8_output=True)[0]) is Tensor  # no recipe is in force


ACTIVATIONS = {
    "gelu": lambda x: F.gelu(x, approximate="tanh"),
    "qgelu": lambda x: x * torch.sigmoid(1.702 * x),
    "relu": F.relu,
    "srelu": lambda x: F.relu(x) ** 2,
    "silu": F.silu,
    "glu": torch.sigmoid,
}
GATED = {"geglu": "gelu", "qgeglu": "qgelu", "reglu": "relu", "sreglu": "srelu", "swiglu": "silu", "glu": "glu"}


@pytest.mark.parametrize("name", [*(name for name in ACTIVATIONS if name != "glu"), *GATED])
def test_activations_of_the_mlp(name: str) -> None:
    mlp, x = te.LayerNormMLP(16, 32, activation=name), torch.randn(4, 16)
    nn.init.normal_(mlp.fc1_weight)
    hidden = F.linear(mlp.normed(x), mlp.fc1_weight, mlp.fc1_bias)
    if name in GATED:
        gate, up = hidden.chunk(2, -1)
        hidden = ACTIVATIONS[GATED[name]](gate) * up
    else:
        hidden = ACTIVATIONS[name](hidden)
    torch.testing.assert_close(mlp(x), F.linear(hidden, mlp.fc2_weight, mlp.fc2_bias))


@pytest.mark.parametrize("chosen", [None, te.MXFP8BlockScaling(), DelayedScaling()], ids=["none", "mxfp8", "delayed"])
def test_a_checkpointed_mlp_saves_its_input_and_changes_no_bit(chosen: te.Recipe | None) -> None:
    runs = []
    for again in (False, True):
        torch.manual_seed(0)
        mlp = te.LayerNormMLP(32, 256, activation="swiglu", checkpoint=again, return_bias=True)
        x, found, saved = torch.randn(8, 32, requires_grad=True), [], 0

        def pack(t: Tensor) -> Tensor:
            nonlocal saved
            saved += 0 if isinstance(t, nn.Parameter) else t.numel()
            return t

        for _ in range(2):
            with (
                torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t),
                te.autocast(enabled=chosen is not None, recipe=chosen),
            ):
                y, _ = mlp(x)
            found += [y.detach(), *torch.autograd.grad(y.square().sum(), (x, *mlp.parameters()), allow_unused=True)]
        runs.append((found, saved))
    (plain, of_plain), (again, of_again) = runs
    assert all(a is b is None or torch.equal(a, b) for a, b in zip(plain, again, strict=True))
    assert of_again < of_plain / 4


@pytest.mark.slow
def test_a_checkpointed_mlp_compiles() -> None:
    mlp, x = te.LayerNormMLP(32, 64, checkpoint=True), torch.randn(8, 32, requires_grad=True)
    compiled = torch.compile(mlp, fullgraph=True, backend="aot_eager")
    with te.autocast(recipe=te.MXFP8BlockScaling()):
        results = [(y.detach(), *torch.autograd.grad(y.sum(), (x, mlp.fc1_weight))) for y in (mlp(x), compiled(x))]
    torch.testing.assert_close(*results, rtol=0, atol=0)
