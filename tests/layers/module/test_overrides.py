"""Recipes by layer name, custom recipes, and what a layer says it ran under."""

import re

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounter

import te_models.layers as te
from te_models.layers.recipe.per_module import matches_pattern
from te_models.model import GPTModel
from tests.build import VOCAB, tiny
from tests.compare import refused

MIXED = te.PerModuleRecipe(
    default=te.MXFP8BlockScaling(),
    rules=(("*.layers.0.*", "bf16"), ("*linear_proj", te.Float8BlockScaling()), ("*proj", "bf16")),
)


GLOBS: dict[str, tuple[list[str], list[str]]] = {
    "layers.*.fc": (["layers.1.mlp.fc"], ["layers.1.mlp.fc1"]),
    "layers.?.fc": (["layers.1.fc"], ["layers.10.fc", "layers..fc"]),
    "layers.[02].fc": (["layers.2.fc"], ["layers.1.fc"]),
    "layers.[!02].fc": (["layers.1.fc"], []),
    "layers.1[0-2].*": (["layers.11.fc"], ["layers.13.fc"]),
    "Layers.1": ([], ["layers.1"]),
}


@pytest.mark.parametrize("pattern", GLOBS)
def test_patterns_are_globs(pattern: str) -> None:
    for expected, names in zip((True, False), GLOBS[pattern], strict=True):
        assert all(matches_pattern(pattern, name) == expected for name in names)


def bf16_for(*patterns: str) -> te.PerModuleRecipe:
    return te.PerModuleRecipe(default=te.MXFP8BlockScaling(), rules=tuple((pattern, "bf16") for pattern in patterns))


def named_pair() -> nn.Sequential:
    layers = nn.Sequential(te.Linear(32, 32), te.Linear(32, 32))
    te.name_modules(layers)
    return layers


@pytest.mark.slow
def test_a_compiled_model_follows_its_globs() -> None:
    layers, counter = named_pair(), CompileCounter()
    run = torch.compile(layers, fullgraph=True, backend=counter)
    for _ in range(2):  # a new equal recipe costs nothing
        for pattern, graphs in (("[0]", {"0": "bf16", "1": "mxfp8"}), ("[!0]", {"0": "mxfp8", "1": "bf16"})):
            with te.autocast(recipe=bf16_for(pattern)):
                run(torch.randn(2, 32))
                run(torch.randn(2, 32))
            assert te.recipe_report(layers).ran == graphs
    assert counter.frame_count == 2


def test_a_layer_without_a_name_is_refused_where_there_are_rules() -> None:
    layers = nn.Sequential(te.Linear(32, 32), te.Linear(32, 32))
    _alive, rules = named_pair(), bf16_for("0", "1")  # a rule for no layer would warn, where others are alive
    with te.autocast(recipe=rules):
        refused(lambda: layers(torch.randn(2, 32)), "has none: pass name=", " or call name_modules(model)")
    with te.autocast(recipe=bf16_for()):
        layers(torch.randn(2, 32))
    assert te.recipe_report(layers).ran == {"0": "mxfp8", "1": "mxfp8"}
    te.name_modules(layers)
    with te.autocast(recipe=rules):
        layers(torch.randn(2, 32))
    assert te.recipe_report(layers).ran == {"0": "bf16", "1": "bf16"}


@pytest.mark.parametrize("compiled", [False, True])
def test_a_pattern_that_matches_no_layer_warns_once(compiled: bool) -> None:
    layers = nn.ModuleDict({f"test_{i}": te.Linear(32, 32) for i in range(2)})
    te.name_modules(nn.ModuleDict({"warned": layers}))
    typo = f"*.tset_{int(compiled)}"

    def both(x: torch.Tensor) -> torch.Tensor:
        return layers["test_1"](layers["test_0"](x))

    run = torch.compile(both, fullgraph=True, backend="eager") if compiled else both
    with pytest.warns(UserWarning, match=rf"the rule for '{re.escape(typo)}' .* matches none of the \d+ named") as said:
        for _ in range(2):
            with te.autocast(recipe=bf16_for("*.test_0", typo)):
                run(torch.randn(2, 32))
    assert len(said) == 1


def test_a_warning_turned_error_leaves_no_recipe_in_force() -> None:
    layer = te.Linear(16, 16, name="here")
    with pytest.raises(UserWarning, match="matches none of the"), te.autocast(recipe=bf16_for("*.raised")):
        layer(torch.randn(2, 16))  # pytest makes an error of a warning
    assert te.current_recipe() is None


def test_storing_weights_warns_of_a_pattern_that_matches_no_layer() -> None:
    with pytest.warns(UserWarning, match=r"the rule for '\*\.stored' .* none of the 2 named layers, such as '0'"):
        te.store_weights(named_pair(), bf16_for("*.stored"))


def test_the_first_matching_rule_decides() -> None:
    assert MIXED.for_module("decoder.layers.0.attention.linear_proj") is None
    assert MIXED.for_module("decoder.layers.1.attention.linear_proj") == te.Float8BlockScaling()
    assert MIXED.for_module("decoder.layers.1.mlp.linear_fc1") == te.MXFP8BlockScaling()


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_model_runs_and_reports_each_layer_as_asked(compiled: bool) -> None:
    model = GPTModel(tiny(), params_dtype=torch.bfloat16)
    ids = torch.randint(0, VOCAB, (1, 16))

    def loss(ids: torch.Tensor) -> torch.Tensor:
        return model(ids, labels=ids, return_logits=False).loss

    function = torch.compile(loss, fullgraph=True) if compiled else loss
    assert te.recipe_report(model).asked == {}
    with te.autocast(recipe=MIXED):
        function(ids).backward()
    report = te.recipe_report(model)
    assert set(report.asked.values()) == {"per_module"}
    ran = {name: recipe for name, recipe in report.ran.items() if ".layers.1." in name}
    assert {recipe for name, recipe in ran.items() if name.endswith("linear_proj")} == {"block"}
    assert {recipe for name, recipe in ran.items() if not name.endswith("linear_proj")} == {"mxfp8"}
    assert {recipe for name, recipe in report.ran.items() if ".layers.0." in name} == {"bf16"}
    assert report.layers_asked() == {"per_module": 8}
    assert report.layers_run() == {"bf16": 4, "mxfp8": 3, "block": 1}
    function(ids)
    assert te.recipe_report(model).layers_asked() == {"none": 8}


def test_a_layer_named_bf16_computes_as_without_a_recipe() -> None:
    layers = nn.ModuleDict({"kept": te.Linear(64, 32, bias=False), "other": te.Linear(64, 32, bias=False)})
    te.name_modules(layers)
    x = torch.randn(4, 64)
    with te.autocast(recipe=bf16_for("kept")):
        kept, other = layers["kept"](x), layers["other"](x)
    assert torch.equal(kept, layers["kept"](x)) and not torch.equal(other, layers["other"](x))


def test_ends_of_the_decoder_in_high_precision() -> None:
    chosen = te.first_last_layers_bf16(te.MXFP8BlockScaling(), 12, first=1, last=2)
    names = [f"decoder.layers.{i}.mlp.linear_fc1" for i in range(12)]
    assert [i for i, name in enumerate(names) if chosen.for_module(name) is None] == [0, 10, 11]
    with pytest.raises(ValueError, match="first=2 and last=1 layers of a model with 2"):
        te.first_last_layers_bf16(te.MXFP8BlockScaling(), 2, first=2)


def test_weights_are_stored_as_the_names_say() -> None:
    with te.quantized_model_init(recipe=MIXED):
        model = GPTModel(tiny())
        refused(lambda: te.Linear(8, 8), "chooses by name, and this Linear has none")
    kinds = {name: type(module.weight.data) for name, module in model.named_modules() if isinstance(module, te.Linear)}
    assert not issubclass(kinds["decoder.layers.0.mlp.linear_fc2"], te.QuantizedTensor)
    assert kinds["decoder.layers.1.mlp.linear_fc2"] is te.MXFP8Tensor
    layer = te.Linear(32, 32, name="a.proj")
    te.store_weights(layer, te.PerModuleRecipe(default=te.DelayedScaling()))
    assert isinstance(layer.weight.data, te.Float8Tensor)


def test_unusable_rules_are_refused() -> None:
    refused(lambda: bf16_for("layers.{0,1}"), "the pattern 'layers.{0,1}' is not supported")
    with pytest.raises(ValueError, match="the rule for 'a' names 'fp16'; allowed: a recipe, or 'bf16'"):
        te.PerModuleRecipe(default=te.MXFP8BlockScaling(), rules=(("a", "fp16"),))
    refused(lambda: te.PerModuleRecipe(default="mxfp8"), "default is 'mxfp8'; allowed: a recipe")
    refused(lambda: te.PerModuleRecipe(default=MIXED), "cannot contain another one")


def by_role(role: te.QuantizerRole):
    if role.tensor_type == "grad_output":
        return te.HybridQuantizer(
            rowwise_quantizer=te.Float8CurrentScalingQuantizer(fp8_dtype=torch.float8_e5m2),
            columnwise_quantizer=te.MXFP8Quantizer(),
        )
    return te.IdentityQuantizer() if role.tensor_type == "weight" else te.MXFP8Quantizer()


def test_a_custom_recipe_gives_each_operand_its_format() -> None:
    layer = te.Linear(64, 32, bias=False, name="here")
    x, dy = torch.randn(32, 64, requires_grad=True), torch.randn(32, 32)
    seen: list[te.QuantizerRole] = []

    def factory(role: te.QuantizerRole):
        seen.append(role)
        return by_role(role)

    with te.autocast(recipe=te.CustomRecipe(qfactory=factory)):
        y = layer(x)
    y.backward(dy)
    roles = [te.QuantizerRole("linear", tensor, "here", "Linear") for tensor in ("input", "weight", "grad_output")]
    assert [role for role in seen if role.name == "here"] == roles

    def through(quantizer, tensor: torch.Tensor, usage: str) -> torch.Tensor:
        operand = quantizer.rounded(tensor, usage, torch.float32)
        return operand.values if operand.scale is None else operand.values * operand.scale

    w, plain = layer.weight.detach(), x.detach()
    torch.testing.assert_close(y.detach(), through(te.MXFP8Quantizer(), plain, "rowwise") @ w.t())
    e5m2 = te.Float8CurrentScalingQuantizer(fp8_dtype=torch.float8_e5m2)
    torch.testing.assert_close(x.grad, through(e5m2, dy, "rowwise") @ w)
    expected = through(te.MXFP8Quantizer(), dy, "columnwise").t() @ through(te.MXFP8Quantizer(), plain, "columnwise")
    torch.testing.assert_close(layer.weight.grad, expected)


def test_a_factory_must_return_quantizers() -> None:
    with te.autocast(recipe=te.CustomRecipe(qfactory=lambda role: "mxfp8")):
        refused(lambda: te.Linear(8, 8)(torch.randn(2, 8)), "returned 'mxfp8'", error=TypeError)
    refused(lambda: te.CustomRecipe(qfactory=by_role).to_json(), "no JSON form", error=TypeError)
