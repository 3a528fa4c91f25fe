"""Models under torch.compile(fullgraph=True): one graph, forward and backward, and no recompilation as data changes.

A claim about the number of graphs is tested on one layer and with the backend that compiles nothing ("eager") where the
claim does not need more; the backward graph needs "aot_eager". All variants, whole and backward, are in the full run.
"""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters

from te_models import DecoderLayer, GPTModel, RouterConfig, compile_model
from te_models.layers import Linear
from tests.build import VARIANTS, one_layer, tiny_moe, token_ids
from tests.layers.matrix_recipes import compute_the_loss_as_compiled


@pytest.fixture(autouse=True)
def loss_as_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    compute_the_loss_as_compiled(monkeypatch)


def build(name: str, *, shallow: bool = False, **options) -> GPTModel:
    config = VARIANTS[name]
    torch.manual_seed(0)
    return GPTModel(one_layer(config) if shallow else config, **options)


def loss_and_gradients(model: GPTModel, function: Callable, ids: Tensor, **options) -> list[Tensor]:
    model.zero_grad()
    loss = function(ids, labels=ids, return_logits=False, **options).loss
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


def assert_same(got: list[Tensor], expected: list[Tensor]) -> None:
    """Bit for bit: traced programs run the same operations."""
    torch.testing.assert_close(got, expected, rtol=0, atol=0)


def compile_counted(
    model: GPTModel, backend: str = "aot_eager", **options: bool
) -> tuple[Callable, CompileCounterWithBackend]:
    counter = CompileCounterWithBackend(backend)
    return torch.compile(model, fullgraph=True, backend=counter, **options), counter


# Every kind of attention, of positions and of experts, in one layer where the variant has no kinds of layers.
EVERYDAY = {
    "softcaps": "aot_eager",
    "moe_sigmoid_groups": "eager",
    "mixed_layers": "eager",
    "latent": "eager",
    "sinks_clip": "eager",
    "dynamic_rope": "eager",
    "moe_biases": "eager",
    "gated_heads": "eager",
    "several_attentions": "eager",
}
MATRIX = [
    *((name, backend, len(set(VARIANTS[name].layer_types)) == 1) for name, backend in EVERYDAY.items()),
    *(pytest.param(name, "aot_eager", False, marks=pytest.mark.slow) for name in VARIANTS),
]


@pytest.mark.sentinels("moe_biases-eager-True")
@pytest.mark.parametrize(("name", "backend", "shallow"), MATRIX)
def test_every_variant_is_one_graph(name: str, backend: str, shallow: bool) -> None:
    model = build(name, shallow=shallow)
    ids = token_ids(2, 9)
    expected = loss_and_gradients(model, model, ids)
    compiled, counter = compile_counted(model, backend)
    assert_same(loss_and_gradients(model, compiled, ids), expected)
    assert counter.frame_count == 1 and not counters["graph_break"]
    with torch.no_grad():
        assert torch.equal(compiled(ids).logits, model(ids).logits)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qk_head", "moe"])
def test_inductor_agrees_with_eager(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One layer, dynamic at once: a cold C++ compiler takes seconds for each kernel. Compiled sums run in another
    order, in float32, of which 2e-5 are 335 roundings."""
    monkeypatch.undo()  # the loss as it is
    model = build(name, shallow=True)
    compiled = torch.compile(model, fullgraph=True, dynamic=True)
    for length in (9, 17):
        ids = token_ids(2, length)
        got, expected = (loss_and_gradients(model, run, ids) for run in (compiled, model))
        for a, b in zip(got, expected, strict=True):
            assert (a - b).abs().max() <= 2e-5 * b.abs().max().clamp(min=1e-6)


@pytest.mark.slow
@torch.no_grad()
def test_inductor_in_bfloat16_is_as_exact_as_eager() -> None:
    model = build("dense", shallow=True, params_dtype=torch.bfloat16)
    twin = copy.deepcopy(model).float()
    ids = token_ids(4, 17)
    exact = twin(ids, labels=ids).loss.item()
    compiled = torch.compile(model, fullgraph=True)(ids, labels=ids)
    # The mean over 64 tokens of errors of a few roundings (2^-8) of logits of size 4.
    bound = 4 * 4 * 2**-8 / 64**0.5
    assert abs(compiled.loss.item() - exact) < bound
    assert abs(model(ids, labels=ids).loss.item() - exact) < bound
    assert compiled.logits.dtype == torch.bfloat16


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "backend"),
    [
        ("dense", "eager"),
        ("window", "eager"),
        ("learned_positions", "eager"),
        ("dynamic_rope", "eager"),
        ("moe", "aot_eager"),
    ],
)
def test_token_counts_do_not_recompile(name: str, backend: str) -> None:
    """The first shape compiles, the second compiles for all shapes, and that is all: batch, length, beyond the trained
    length, experts without tokens."""
    model = build(name, shallow=True)
    compiled, counter = compile_counted(model, backend)
    lengths = [(2, 9), (3, 17), (5, 33), (2, 12), (7, 5), (2, 3), (3, 64), *([(2, 90)] if "rope" in name else [])]
    for batch, length in lengths:
        ids = token_ids(batch, length, seed=length)
        assert_same(loss_and_gradients(model, compiled, ids), loss_and_gradients(model, model, ids))
    assert counter.frame_count == 2


@pytest.mark.slow
def test_dynamic_from_the_start_compiles_once() -> None:
    model = build("moe")
    compiled, counter = compile_counted(model, "eager", dynamic=True)
    loss_and_gradients(model, compiled, token_ids(2, 9))
    first = counter.frame_count  # the compiler may call its backend again while it decides which floats are dynamic
    for batch, length in ((3, 17), (4, 4), (2, 33)):
        loss_and_gradients(model, compiled, token_ids(batch, length))
    assert counter.frame_count == first


def test_routing_and_loss_weights_do_not_recompile() -> None:
    """All tokens to the same experts, then to others: only data for the graph."""
    model = build("moe", shallow=True)
    compiled, counter = compile_counted(model, "eager")
    ids = token_ids(2, 9)
    loss_and_gradients(model, compiled, ids)
    seen = set()
    for experts in ((0, 1), (2, 3), (1, 3)):
        with torch.no_grad():
            for layer in model.decoder.layers:
                layer.mlp.router.weight.normal_(std=3.0)
                layer.mlp.router.weight[list(experts)] *= 10
        model.set_aux_loss_coeff(0.1 * (1 + experts[0]))
        model.set_z_loss_coeff(0.01 * (1 + experts[1]))
        assert_same(loss_and_gradients(model, compiled, ids), loss_and_gradients(model, model, ids))
        seen.add(tuple(compiled(ids, labels=ids, return_logits=False).tokens_per_expert.flatten().tolist()))
    assert len(seen) == 3 and counter.frame_count == 1


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_an_expert_without_tokens_in_a_compiled_step(backend: str) -> None:
    model = GPTModel(one_layer(tiny_moe(RouterConfig(score="sigmoid", expert_bias=True))))
    for layer in model.decoder.layers:
        layer.mlp.router.expert_bias.copy_(torch.tensor([0.0, 9.0, 9.0, -9.0]))
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    ids = token_ids(2, 9)
    model.zero_grad()
    output = compiled(ids, labels=ids)
    output.loss.backward()
    assert output.tokens_per_expert.tolist() == [[0, 18, 18, 0]]
    for layer in model.decoder.layers:
        gradient = layer.mlp.experts.linear_fc1.weight.grad
        assert gradient[[0, 3]].abs().max() == 0 and gradient[[1, 2]].abs().amax(dim=(1, 2)).min() > 0


def padding_mask(padding: int) -> Tensor:
    mask = torch.ones(2, 9, dtype=torch.int64)
    mask[0, :padding] = 0
    return mask


def texts_mask(length: int) -> Tensor:
    text = (torch.arange(9) // length).expand(2, -1)
    return text[:, :, None] == text[:, None, :]


@pytest.mark.slow
@pytest.mark.parametrize(
    "masks",
    [[padding_mask(n) for n in (0, 3, 8)], [texts_mask(n) for n in (9, 4, 2)]],
    ids=["padding", "several texts"],
)
def test_masks_do_not_recompile(masks: list[Tensor]) -> None:
    model = build("moe", shallow=True)
    compiled, counter = compile_counted(model, "eager")
    ids = token_ids(2, 9)
    for mask in masks:
        expected = loss_and_gradients(model, model, ids, attention_mask=mask)
        assert_same(loss_and_gradients(model, compiled, ids, attention_mask=mask), expected)
    assert counter.frame_count == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "shallow"),
    [("moe", True), *(pytest.param(name, False, marks=pytest.mark.slow) for name in ("dense", "moe"))],
)
def test_activation_checkpointing_is_one_graph(name: str, shallow: bool) -> None:
    model = build(name, shallow=shallow, activation_checkpointing=True)
    ids = token_ids(2, 9)
    expected = loss_and_gradients(model, model, ids)
    compiled, counter = compile_counted(model)
    assert_same(loss_and_gradients(model, compiled, ids), expected)
    assert counter.frame_count == 1


@pytest.mark.slow
def test_torch_autocast_is_one_graph() -> None:
    model = build("moe", shallow=True)
    ids = token_ids(2, 9)
    compiled, counter = compile_counted(model, "eager")
    with torch.amp.autocast("cpu", dtype=torch.bfloat16):
        expected = model(ids, labels=ids).loss
        got = compiled(ids, labels=ids).loss
    assert torch.equal(got, expected) and counter.frame_count == 1


@pytest.mark.sentinels("block")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # from inside the compiler
@pytest.mark.parametrize("mode", ["whole", "block"])
def test_compile_model(mode: str) -> None:
    model = build("moe")
    names = [key for key, _ in model.named_parameters()]
    ids = token_ids(2, 9)
    expected = loss_and_gradients(model, model, ids)
    counter = CompileCounterWithBackend("eager")
    assert compile_model(model, mode, backend=counter) is model
    assert_same(loss_and_gradients(model, model, ids), expected)
    assert counter.frame_count == (1 if mode == "whole" else 2)  # one that both layers share, and the output layer's
    assert [key for key, _ in model.named_parameters()] == names and not counters["graph_break"]


@pytest.mark.slow
@torch.no_grad()
def test_a_model_that_was_compiled_whole_is_compiled_by_block() -> None:
    model, ids = build("moe"), token_ids(2, 9)
    compile_model(model, backend="eager")(ids)
    counter = CompileCounterWithBackend("eager")
    compile_model(model, "block", backend=counter)(ids)
    assert counter.frame_count == 2


@pytest.mark.sentinels("linear-first0")
@pytest.mark.parametrize(("kind", "first"), [("linear", (96,)), ("gpt", (4, 4)), ("gpt", (2, 32))])
def test_equal_sizes_in_the_first_call_are_not_one_size(kind: str, first: tuple[int, ...]) -> None:
    """Rows as many as columns; a batch as large as the length, and as a number of experts; a length as the width."""
    model = Linear(96, 64) if kind == "linear" else build("moe", shallow=True)
    compile_model(model, dynamic=True, backend="eager")
    for sizes in (first, (3, 20)[-len(first) :], (2, 48)[-len(first) :]):
        if kind == "linear":
            model(torch.randn(*sizes, 96))
        else:
            model(token_ids(*sizes), labels=token_ids(*sizes), return_logits=False)
    assert counters["stats"]["unique_graphs"] == 1


def test_compile_model_leaves_the_compiler_as_it_was() -> None:
    import torch.fx.experimental._config as config

    layer = compile_model(Linear(8, 8), backend="eager")
    layer(torch.randn(2, 8))
    assert config.use_duck_shape
    with pytest.raises(RuntimeError, match="7"):  # the product is not defined
        layer(torch.randn(2, 7))
    assert config.use_duck_shape


def test_compile_model_refuses_an_unknown_mode() -> None:
    with pytest.raises(ValueError, match="mode is 'layers'; allowed: 'whole', 'block'"):
        compile_model(build("dense"), "layers")


def test_compile_model_compiles_a_layer_whole() -> None:
    layer = DecoderLayer(VARIANTS["dense"])
    x = torch.randn(2, 9, VARIANTS["dense"].hidden_size)
    expected, _ = layer(x)
    counter = CompileCounterWithBackend("eager")
    assert compile_model(layer, backend=counter) is layer and torch.equal(layer(x)[0], expected)
    assert counter.frame_count == 1


@pytest.mark.slow
@torch.no_grad()
def test_layers_of_many_kinds_have_room_for_their_graphs() -> None:
    """More than torch expects of one function: it was an error in the evaluation, or the generation, of such models."""
    model = compile_model(build("mixed_layers"), "block", dynamic=False, backend="eager")
    with torch._dynamo.config.patch(recompile_limit=1):
        for length in (5, 6, 7):
            model(token_ids(1, length))
        assert torch._dynamo.config.recompile_limit == 1


@pytest.mark.parametrize("dynamic", [None, False])
def test_compile_model_compiles_a_module_of_torch(dynamic: bool | None) -> None:
    model, x = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU()), torch.randn(3, 8)
    expected = model(x)
    counter = CompileCounterWithBackend("eager")
    assert torch.equal(compile_model(model, dynamic=dynamic, backend=counter)(x), expected)
    assert counter.frame_count == 1 and list(model.state_dict()) == ["0.weight", "0.bias"]


def test_blocks_are_those_of_a_model() -> None:
    with pytest.raises(
        ValueError, match='mode is "block" and the model a Linear; allowed: a GPTModel, or mode="whole"'
    ):
        compile_model(Linear(8, 8), "block")
