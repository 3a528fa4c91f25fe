"""What scripts for Transformer Engine call: its names, arguments, return values and state dicts."""

import contextlib
import io
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import te_models
import te_models.layers as te
from te_models.layers.recipe.recipes import DelayedScaling, Format
from tests.compare import refused

LAYERS = {
    "Linear": lambda **options: te.Linear(16, 24, **options),
    "LayerNormLinear": lambda **options: te.LayerNormLinear(16, 24, **options),
    "LayerNormMLP": lambda **options: te.LayerNormMLP(16, 32, **options),
}


@pytest.mark.parametrize("chosen", [None, te.MXFP8BlockScaling()], ids=["high precision", "mxfp8"])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("kind", LAYERS)
def test_returned_biases_and_norms_are_what_was_left_out(kind: str, bias: bool, chosen: te.Recipe | None) -> None:
    plain = LAYERS[kind](bias=bias)
    for name, parameter in plain.named_parameters():
        if "bias" in name:
            nn.init.normal_(parameter)
    x = torch.randn(4, 16)
    with te.autocast(enabled=chosen is not None, recipe=chosen):
        y = plain(x)
        apart = LAYERS[kind](bias=bias, return_bias=True)
        apart.load_state_dict(plain.state_dict())
        without, added = apart(x)
        torch.testing.assert_close(without if added is None else without + added, y)
        assert (added is None) == (not bias)
        if kind != "Linear":
            normed = LAYERS[kind](bias=bias, return_layernorm_output=True)
            normed.load_state_dict(plain.state_dict())
            same, norm = normed(x)
            torch.testing.assert_close(same, y)
            torch.testing.assert_close(norm, plain.normed(x))
            assert len(LAYERS[kind](bias=bias, return_bias=True, return_layernorm_output=True)(x)) == 3


@pytest.mark.parametrize("kind", LAYERS)
def test_user_buffers_are_taken_where_there_is_nothing_to_communicate(kind: str) -> None:
    LAYERS[kind](ub_overlap_ag=False, ub_name=None, get_rng_state_tracker=None, symmetric_ar_type=None, name=None)
    options = {"ub_overlap_ag": True, "ub_bulk_wgrad": True, "symmetric_ar_type": "two_shot"}
    LAYERS[kind](ub_name="qkv", **options)
    for name, value in options.items():
        for ranks in ({"tp_size": 2}, {"tp_group": torch.distributed.ProcessGroup(0, 2)}):
            with pytest.raises(ValueError, match=f"{name} is .*, which this library does not have; allowed: "):
                LAYERS[kind](**{name: value}, **ranks)


class Tracker:
    """A tracker of random states in Megatron's form, on the CPU."""

    def __init__(self) -> None:
        self.states = {"model-parallel-rng": torch.Generator().manual_seed(5).get_state()}

    def get_states(self) -> dict[str, torch.Tensor]:
        return dict(self.states)

    def set_states(self, states: dict[str, torch.Tensor]) -> None:
        self.states = states

    @contextlib.contextmanager
    def fork(self, name: str = "model-parallel-rng") -> Iterator[None]:
        outside = torch.get_rng_state()
        torch.set_rng_state(self.states[name])
        try:
            yield
        finally:
            self.states[name] = torch.get_rng_state()
            torch.set_rng_state(outside)


def test_parameters_start_from_the_states_of_a_tracker() -> None:
    tracker = Tracker()
    tracker.states["expert"] = torch.Generator().manual_seed(6).get_state()
    outside = torch.get_rng_state()
    layer = te.Linear(16, 24, get_rng_state_tracker=lambda: tracker)
    expert = te.Linear(16, 24, get_rng_state_tracker=lambda: tracker, rng_tracker_name="expert")
    assert torch.equal(torch.get_rng_state(), outside)
    for weight, seed in ((layer.weight, 5), (expert.weight, 6)):
        assert torch.equal(weight, torch.empty(24, 16).normal_(0, 0.023, generator=torch.Generator().manual_seed(seed)))


@pytest.mark.parametrize("core", [True, False])
def test_a_recomputation_drops_out_what_the_first_run_did(core: bool) -> None:
    """core: of the attention alone. The states go on afterwards where they were."""
    gradients, states = [], []
    for again in (False, True):
        torch.manual_seed(0)
        tracker = Tracker()
        attention = te.MultiheadAttention(16, 2, attention_dropout=0.5, get_rng_state_tracker=lambda: tracker)  # noqa: B023
        x = torch.randn(6, 2, 16).requires_grad_()
        if not again:
            y = attention(x)
        elif core:
            y = attention(x, checkpoint_core_attention=True)
        else:
            y = te.checkpoint(attention, x, get_rng_state_tracker=lambda: tracker, tp_group=None)  # noqa: B023
        later = tracker.get_states()["model-parallel-rng"]
        gradients.append(torch.autograd.grad(y.square().sum(), x)[0])
        assert torch.equal(tracker.get_states()["model-parallel-rng"], later)
        states.append(later)
    assert torch.equal(*gradients) and torch.equal(*states)


def test_arguments_of_the_other_layers() -> None:
    te.GroupedLinear(2, 4, 4, return_bias=False, sequence_parallel=False, ub_overlap_rs=False)
    te.RMSNorm(8, eps=1e-6, sequence_parallel=None)
    te.LayerNorm(hidden_size=8, sequence_parallel=False)


def test_arguments_that_change_nothing() -> None:
    """Shapes to warm kernels up for, names, and hints of how to run."""
    shapes = {"seq_length": 16, "micro_batch_size": 2}
    te.LayerNormMLP(16, 32, **shapes)
    te.MultiheadAttention(16, 2, **shapes)
    layer = te.TransformerLayer(16, 32, 2, **shapes).eval()
    x = torch.randn(4, 1, 16)
    assert torch.equal(layer(x), layer(x, fast_zero_fill=False, max_seqlen_q=4, pad_between_seqs=False))
    attention = te.DotProductAttention(2, 8, name="core")
    heads = [torch.randn(4, 1, 2, 8) for _ in range(3)]
    assert attention.name == "core" and torch.equal(attention(*heads), attention(*heads, num_splits=3))


def test_norms_take_their_shape_under_either_name() -> None:
    for norm in (te.LayerNorm, te.RMSNorm):
        for layer in (norm((8,)), norm(normalized_shape=8), norm(hidden_size=8)):
            assert layer.weight.shape == (8,)
        with pytest.raises(ValueError, match="normalized_shape is empty; allowed: a number, or a sequence of numbers"):
            norm(())


def test_older_names_of_regions() -> None:
    recipe = DelayedScaling(fp8_format=Format.HYBRID, amax_history_len=16, amax_compute_algo="max")
    with te.fp8_model_init(enabled=False):
        layer = te.Linear(32, 32)
    x = torch.randn(32, 32)
    with te.fp8_autocast(enabled=True, fp8_recipe=recipe, fp8_group=None):
        y = layer(x)
        assert te.current_recipe() is recipe
    with te.autocast(recipe=recipe):
        assert not torch.equal(layer(x), y)  # the scales have moved on
    with te.fp8_model_init(recipe=te.MXFP8BlockScaling()):
        assert isinstance(te.Linear(32, 32).weight, te.MXFP8Tensor)

    def step(x: torch.Tensor) -> torch.Tensor:
        with te.fp8_autocast(fp8_recipe=te.Float8CurrentScaling()):
            return layer(x)

    torch.testing.assert_close(torch.compile(step, fullgraph=True, backend="aot_eager")(x), step(x))


def test_every_recipe_is_available() -> None:
    for name in ("fp8", "mxfp8", "fp8_block_scaling", "nvfp4", "bf16"):
        check = getattr(te, f"is_{name}_available")
        assert check() is True and check(return_reason=True) == (True, "")


def test_module_paths_are_transformer_engines() -> None:
    import te_models.layers.ops
    import te_models.layers.optimizers
    import te_models.layers.utils
    from te_models.layers import recipe
    from te_models.layers.recipe import Float8CurrentScaling

    assert te.optimizers is te_models.layers.optimizers and te.optimizers.FusedAdamW is te.FusedAdamW
    assert te.utils is te_models.layers.utils and te.utils.is_bf16_available()
    assert recipe.DelayedScaling is te.DelayedScaling and recipe.Format.HYBRID is Format.HYBRID
    assert Float8CurrentScaling is te.Float8CurrentScaling and recipe("current") == Float8CurrentScaling()
    with pytest.raises(AttributeError, match=r"no attribute 'get_cudnn_version': use torch\.backends\.cudnn\.version"):
        te.utils.get_cudnn_version  # noqa: B018
    refused(lambda: te.utils.Linear, "module 'te_models.layers.utils' has no attribute 'Linear'", error=AttributeError)


def test_names_that_are_elsewhere_say_where() -> None:
    assert te.ops.Linear is te_models.layers.ops.Linear
    with pytest.raises(AttributeError, match=r"has no attribute 'Linear'; the layer set is te_models\.layers"):
        te_models.Linear  # noqa: B018
    refused(lambda: te.InferenceParams, "no attribute 'InferenceParams': te_models.GPT", error=AttributeError)
    refused(lambda: te.ops.L2Normalization, "no attribute 'L2Normalization': it is L2Norm", error=AttributeError)
    with pytest.raises(TypeError, match=r"config is 64; allowed: .* te_models\.layers\.TransformerLayer"):
        te_models.DecoderLayer(64, 128, 4)
    with pytest.raises(ImportError, match="cannot import name 'FusedAdamV'"):
        from te_models.layers import FusedAdamV  # noqa: F401


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpoint_repeats_the_first_run(use_reentrant: bool) -> None:
    """Under delayed scaling, whose scales have moved on when it is recomputed."""
    gradients, seen = [], 0

    def run(x: torch.Tensor, *, factor: float) -> torch.Tensor:
        nonlocal seen
        seen += 1
        return layer(x) * factor

    for again in (False, True):
        torch.manual_seed(0)
        layer = te.LayerNormMLP(32, 64)
        x = torch.randn(32, 32, requires_grad=True)
        for _ in range(3):
            with te.autocast(recipe=DelayedScaling()):
                y = te.checkpoint(run, x, use_reentrant=use_reentrant, factor=2.0) if again else run(x, factor=2.0)
            (gradient,) = torch.autograd.grad(y.square().sum(), x)
        gradients.append(gradient)
    assert torch.equal(*gradients) and seen == 9
    with pytest.raises(ValueError, match="distribute_saved_activations is True, which this library does not have"):
        te.checkpoint(run, x, distribute_saved_activations=True)
    refused(lambda: te.checkpoint(run, x, context_fn=te.recompute_contexts), "context_fn is given")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = te.RMSNorm(16)
        self.attention = te.DotProductAttention(2, 8)
        self.proj = te.Linear(16, 16)
        self.experts = te.GroupedLinear(2, 16, 16)
        self.mlp = te.LayerNormMLP(16, 32)


def of_transformer_engine(block: Block, extra: Any) -> dict[str, Any]:
    """The keys that Transformer Engine's modules write."""
    state: dict[str, Any] = {name: torch.randn_like(value) for name, value in block.state_dict().items()}
    for kind in ("weight", "bias"):
        state |= {f"experts.{kind}{g}": value for g, value in enumerate(state.pop(f"experts.{kind}"))}
    return state | {f"{name}._extra_state": extra for name, _ in block.named_children()}


@pytest.mark.parametrize(
    "extra", [None, torch.empty(0, dtype=torch.uint8), io.BytesIO()], ids=["none", "tensor", "file"]
)
def test_state_dicts_with_empty_extra_state_load(extra: Any) -> None:
    block = Block()
    state = of_transformer_engine(block, extra)
    block.load_state_dict(state)
    assert torch.equal(block.experts.weight[1], state["experts.weight1"])
    assert torch.equal(block.mlp.fc2_bias, state["mlp.fc2_bias"])


def test_states_of_operations_load() -> None:
    """There every operation has such a key, also one without parameters."""
    model = te.ops.Sequential(te.ops.LayerNorm(8), te.ops.Linear(8, 8), te.ops.GELU(), te.ops.Quantize())
    state = {name: torch.randn_like(value) for name, value in model.state_dict().items()}
    extra = {f"{name}._extra_state": torch.empty(0, dtype=torch.uint8) for name, _ in model.named_modules() if name}
    model.load_state_dict(state | extra)
    assert torch.equal(model[1].linear.weight, state["1.linear.weight"])


class Opened:
    def __reduce__(self) -> Any:
        return pytest.fail, ("a pickle was opened",)


def test_pickled_extra_state_is_left_and_said() -> None:
    block = Block()
    pickled = torch.frombuffer(bytearray(pickle.dumps(Opened())), dtype=torch.uint8)
    state = of_transformer_engine(block, None) | {"proj._extra_state": pickled}
    with pytest.warns(UserWarning, match=r"proj\._extra_state, a pickled state .* which is not read") as warned:
        block.load_state_dict(state)
    assert len(warned) == 1 and torch.equal(block.proj.weight, state["proj.weight"])


def test_extra_state_goes_round_without_a_pickle() -> None:
    layer, other = (te.Linear(16, 16) for _ in range(2))
    empty = layer.get_extra_state()
    assert empty.dtype is torch.uint8 and empty.numel() == 0
    for nothing in (empty, None, io.BytesIO()):
        other.set_extra_state(nothing)
    x = torch.randn(16, 16)
    for _ in range(2):
        with te.autocast(recipe=DelayedScaling(amax_history_len=4)):
            layer(x * 3).sum().backward()
    held = layer.get_extra_state()
    assert "_extra_state" not in "".join(layer.state_dict())
    other.set_extra_state(held)
    third = te.Linear(16, 16)
    third.load_state_dict({"weight": layer.weight, "bias": layer.bias, "_extra_state": held})
    for found in (other, third):
        for name, value in layer.recipe_state().items():
            assert torch.equal(found.recipe_state()[name], value), name
    pickled = torch.frombuffer(bytearray(pickle.dumps(Opened())), dtype=torch.uint8)
    damaged = torch.cat((held[:200], pickled))
    for wrong, message in ((pickled, "pass fp8_scale to set_recipe_state"), (damaged, "is damaged"), ({}, "one that")):
        with pytest.raises(ValueError, match=message):
            other.set_extra_state(wrong)
    refused(lambda: te.GroupedLinear(2, 16, 16).set_extra_state(held), "has shape (2, 1); expected (2, 2)")


def test_delayed_scaling_takes_all_arguments_at_their_defaults() -> None:
    given = {"fp8_dpa": False, "fp8_mha": False, "scaling_factor_compute_algo": None}
    made = DelayedScaling(margin=1, **given, override_linear_precision=(False, False, False))
    assert made == DelayedScaling(margin=1) and made.replace(margin=0) == DelayedScaling()
    assert te.Recipe.from_json(made.to_json()) == made
    for name, value in {"fp8_dpa": True, "fp8_mha": True, "override_linear_precision": (False, False, True)}.items():
        with pytest.raises(ValueError, match=f"{name} is .*, which this library does not have"):
            DelayedScaling(**{name: value})


def test_the_clamped_swiglu_and_its_parameters() -> None:
    for given in (None, {"limit": 0.5}, {"limit": 0.7, "alpha": 2.0}):
        mlp = te.LayerNormMLP(16, 32, activation="clamped_swiglu", activation_params=given)
        nn.init.normal_(mlp.fc1_weight)
        limit, alpha = (given or {}).get("limit", 7.0), (given or {}).get("alpha", 1.702)
        x = torch.randn(4, 16)
        gate, up = nn.functional.linear(mlp.normed(x), mlp.fc1_weight, mlp.fc1_bias).chunk(2, -1)
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        hidden = gate * torch.sigmoid(alpha * gate) * (up + 1)
        torch.testing.assert_close(mlp(x), nn.functional.linear(hidden, mlp.fc2_weight, mlp.fc2_bias))
    with pytest.raises(ValueError, match=r"activation_params has 'beta' with activation 'clamped_swiglu'; allowed: \["):
        te.LayerNormMLP(16, 32, activation="clamped_swiglu", activation_params={"beta": 1.0})
    with pytest.raises(ValueError, match="activation_params has 'limit' with activation 'gelu'"):
        te.LayerNormMLP(16, 32, activation_params={"limit": 1.0})


def test_each_weight_of_an_mlp_starts_by_its_own_method() -> None:
    """As in Transformer Engine, init_method is not that of fc2."""
    mlp = te.LayerNormMLP(64, 64, init_method=nn.init.ones_)
    assert bool((mlp.fc1_weight == 1).all()) and 0.02 < mlp.fc2_weight.std() < 0.026
