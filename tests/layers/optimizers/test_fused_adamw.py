"""FusedAdamW: equal to torch's AdamW on plain parameters, masters under quantized ones, state that resumes bitwise."""

import copy
import io

import pytest
import torch
from torch import nn

from te_models.kernels.torch_versions import SPLITS_LOOPS
from te_models.layers import FusedAdamW, GroupedLinear, Linear, QuantizedTensor, quantized_model_init, recipe
from tests.build import weight_quantizers
from tests.compare import raw, refused, same_bits

OPTIONS = {"lr": 0.02, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.3}
NOT_COMPILED = pytest.mark.xfail(
    SPLITS_LOOPS,
    raises=torch._inductor.exc.InductorError,
    reason="the C++ backend of torch 2.11 and 2.12 ends in an assertion",
)


def parameter_of(name: str, grouped: bool = False) -> nn.Parameter:
    """Plain, in float32 or bfloat16, or quantized by this name."""
    torch.manual_seed(0)
    if name in ("plain", "bf16"):
        return nn.Parameter(torch.randn(33, 10).to(torch.bfloat16 if name == "bf16" else torch.float32))
    quantizer = weight_quantizers()[name]
    x = torch.randn(3, 32, 64) if grouped else torch.randn(32, 64)
    return nn.Parameter(quantizer.quantize_grouped(x) if grouped else quantizer.quantize(x))


def train(parameters: list[nn.Parameter], optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        torch.manual_seed(step)
        for parameter in parameters:
            parameter.grad = torch.randn(parameter.shape).to(parameter.dtype)
        optimizer.step()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_plain_parameters_equal_torch_bitwise(dtype: torch.dtype) -> None:
    ours, theirs = ([nn.Parameter(torch.linspace(-1, 1, 60, dtype=dtype).view(6, 10))] for _ in range(2))
    train(ours, FusedAdamW(ours, **OPTIONS), range(5))
    train(theirs, torch.optim.AdamW(theirs, fused=True, **OPTIONS), range(5))
    assert torch.equal(ours[0], theirs[0])


@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("name", weight_quantizers())
def test_quantized_parameters_are_the_requantized_master(name: str, grouped: bool) -> None:
    """The master is trained by torch's AdamW on the same gradients, and the parameter is its quantization, in place."""
    parameter = parameter_of(name, grouped)
    reference = nn.Parameter(parameter.detach().dequantize())
    pointers = [field.data_ptr() for field in parameter.fields.values()]
    optimizer = FusedAdamW([parameter], **OPTIONS)
    train([parameter], optimizer, range(3))
    train([reference], torch.optim.AdamW([reference], fused=True, **OPTIONS), range(3))
    assert torch.equal(optimizer.state[parameter]["master"], reference)
    assert same_bits(parameter, parameter.quantizer.quantize_fields(reference.detach()))
    assert [field.data_ptr() for field in parameter.fields.values()] == pointers
    assert all(type(value) is torch.Tensor for value in optimizer.state[parameter].values())


@pytest.mark.parametrize("shape", [(3, 8), (64, 64)])
def test_a_view_of_some_columns_is_updated_and_nothing_beside_it(shape: tuple[int, int]) -> None:
    """The fused kernel goes through memory as if it were contiguous: the view's neighbours were what it moved."""
    whole, gradient = torch.randn(shape), torch.randn(shape)
    view = nn.Parameter(whole.narrow(1, 2, 4))
    alone = nn.Parameter(view.detach().clone())
    beside = whole.clone()
    for parameter in (view, alone):
        parameter.grad = gradient.narrow(1, 2, 4)
        FusedAdamW([parameter], **OPTIONS).step()
    assert torch.equal(view, alone)
    beside[:, 2:6] = alone.detach()
    assert torch.equal(whole, beside)


@pytest.mark.parametrize("moments", ["float32", "bfloat16", "float8"])
@pytest.mark.parametrize("name", ["plain", "bf16", "float8", "nvfp4"])
def test_a_state_dict_resumes_bitwise(name: str, moments: str) -> None:
    def fresh() -> tuple[nn.Parameter, FusedAdamW]:
        parameter = parameter_of(name)
        return parameter, FusedAdamW([parameter], master_weights=True, moment_dtype=moments, seed=3, **OPTIONS)

    one, optimizer = fresh()
    train([one], optimizer, range(2))
    file = io.BytesIO()
    torch.save({"optimizer": optimizer.state_dict(), "weight": one.detach().clone()}, file)
    train([one], optimizer, range(2, 5))
    two, resumed = fresh()
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    with torch.no_grad():
        two.copy_(saved["weight"])
    resumed.load_state_dict(saved["optimizer"])
    train([two], resumed, range(2, 5))
    for ours, theirs in zip(bits_of(one, optimizer), bits_of(two, resumed), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("name", ["bf16", "mxfp8"])
def test_a_state_that_was_saved_without_masters_gets_them(name: str) -> None:
    """Of a run whose weights were plain: without one, a small update would be rounded away in every step."""
    parameter = parameter_of(name)
    plain = nn.Parameter(torch.ones(parameter.shape, dtype=torch.bfloat16))
    saved = FusedAdamW([plain], **OPTIONS)
    train([plain], saved, range(1))
    optimizer = FusedAdamW([parameter], master_weights=True, **OPTIONS)
    optimizer.load_state_dict(saved.state_dict())
    with torch.no_grad():
        parameter.fill_(2.0)  # the weights may be loaded after the optimizer
    assert "master" not in optimizer.state[parameter]
    parameter.grad = torch.zeros(parameter.shape, dtype=parameter.dtype)
    optimizer.param_groups[0]["lr"] = 0.0
    optimizer.step()
    assert torch.equal(optimizer.state[parameter]["master"], torch.full(parameter.shape, 2.0))
    assert optimizer.state[parameter]["step"] == 2 and optimizer.param_groups[0]["master_weights"]


@pytest.mark.parametrize("name", ["bf16", "mxfp8"])
def test_weights_that_were_loaded_stay_once_the_masters_know_them(name: str) -> None:
    parameter = parameter_of(name)
    optimizer = FusedAdamW([parameter], lr=1e-4, master_weights=True)
    train([parameter], optimizer, range(1))
    with torch.no_grad():
        parameter.zero_()
    optimizer.reload_model_params()
    train([parameter], optimizer, range(1, 2))
    assert parameter.detach().float().abs().max() < 1e-3


@pytest.mark.sentinels("float8")
@pytest.mark.parametrize("moments", ["bfloat16", "float8"])
def test_moments_in_few_bits_train_as_well(moments: str) -> None:
    """Least squares in 64 unknowns: the loss after 400 steps is within 10 % of what float32 moments reach."""
    torch.manual_seed(1)
    inputs = torch.randn(256, 64)
    targets = inputs @ torch.randn(64, 8) + 0.5 * torch.randn(256, 8)
    losses = {}
    for kind in ("float32", moments):
        weight = nn.Parameter(torch.zeros(64, 8))
        optimizer = FusedAdamW([weight], lr=0.03, weight_decay=0.0, moment_dtype=kind)
        for _ in range(400):
            loss = (inputs @ weight - targets).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        losses[kind] = loss.item()
    assert losses[moments] < 1.1 * losses["float32"]
    dtype = torch.bfloat16 if moments == "bfloat16" else torch.float8_e4m3fn
    assert optimizer.state[weight]["exp_avg"].dtype is optimizer.state[weight]["exp_avg_sq"].dtype is dtype


@pytest.mark.slow
@pytest.mark.parametrize("name", ["float8", pytest.param("mxfp8", marks=NOT_COMPILED)])
def test_compiled_requantization_has_the_same_bits(name: str) -> None:
    results = []
    for compiled in (False, True):
        parameters = [parameter_of(name), parameter_of(name, grouped=True)]
        train(parameters, FusedAdamW(parameters, compile=compiled, **OPTIONS), range(3))
        results.append(parameters)
    for eager, compiled in zip(*results, strict=True):
        assert same_bits(eager, compiled)


@pytest.mark.slow
def test_more_shapes_than_the_compilers_limit_stay_compiled() -> None:
    quantizer = weight_quantizers()["identity"]
    parameters = [nn.Parameter(quantizer.quantize(torch.ones(rows, 4))) for rows in range(1, 10) for _ in range(2)]
    train(parameters, FusedAdamW(parameters, compile=True, **OPTIONS), range(2))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 9


@pytest.mark.parametrize(
    ("name", "moments"),
    [
        pytest.param("plain", "float32", marks=pytest.mark.slow),
        pytest.param("plain", "bfloat16", marks=pytest.mark.costs(25)),  # 17 s in torch 2.11
        pytest.param("bf16", "float32", marks=pytest.mark.slow),
        pytest.param("mxfp8", "float8", marks=[NOT_COMPILED, pytest.mark.slow]),
        pytest.param("nvfp4", "float32", marks=pytest.mark.slow),
    ],
)
def test_a_step_compiled_whole_equals_eager(name: str, moments: str) -> None:
    """One graph for all steps, learning rates and flags. A step's terms are rounded a handful of times in float32."""

    def fresh() -> tuple[nn.Parameter, FusedAdamW]:
        parameter, options = parameter_of(name), OPTIONS | {"lr": torch.tensor(0.02)}
        optimizer = FusedAdamW([parameter], master_weights=True, moment_dtype=moments, **options)
        optimizer.init_state()
        return parameter, optimizer

    (one, eager), (two, whole) = fresh(), fresh()
    compiled = torch.compile(lambda noop: whole.step(noop=noop), fullgraph=True)
    u, steps = 2.0**-24, 4
    for step in range(steps):
        noop = torch.tensor(step == 2)
        for parameter, optimizer in ((one, eager), (two, whole)):
            torch.manual_seed(step)
            parameter.grad = torch.randn(parameter.shape).to(parameter.dtype)
            optimizer.param_groups[0]["lr"].fill_(0.02 + 0.01 * step)
        eager.step(noop=noop)
        compiled(noop)
        if moments != "float32":  # a rounding apart may be stored a whole step of its format apart: start alike
            for key, value in eager.state[one].items():
                whole.state[two][key].copy_(value)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    weights = [o.state[p].get("master", p).detach() for o, p in ((eager, one), (whole, two))]
    # |update| <= lr / (1 - beta2) ** 0.5 or so; every step rounds weight and update fewer than 16 times
    bound = steps * 16 * u * (weights[0].abs() + 0.05 / (1 - OPTIONS["betas"][1]) ** 0.5)
    assert ((weights[0] - weights[1]).abs() <= bound).all()
    if isinstance(two, QuantizedTensor) and moments == "float32":
        assert same_bits(two, two.quantizer.quantize_fields(weights[1]))


def bits_of(parameter: nn.Parameter, optimizer: FusedAdamW) -> list[torch.Tensor]:
    own = list(parameter.fields.values()) if isinstance(parameter, QuantizedTensor) else [parameter]
    return [raw(value).clone() for value in (*own, *optimizer.state[parameter].values())]


@pytest.mark.parametrize("moments", ["float32", "bfloat16", "float8"])
@pytest.mark.parametrize("name", ["plain", "bf16", *weight_quantizers()])
def test_a_flagged_step_changes_nothing(name: str, moments: str) -> None:
    """Not even where weight and master, or a moment and what it would be rounded to again, are not the same numbers."""
    parameter = parameter_of(name)
    optimizer = FusedAdamW([parameter], master_weights=True, moment_dtype=moments, **OPTIONS)
    train([parameter], optimizer, range(2))
    if "master" in optimizer.state[parameter]:
        optimizer.state[parameter]["master"].add_(0.5)
    before = bits_of(parameter, optimizer)
    parameter.grad.fill_(float("inf"))
    optimizer.step(noop=~torch.isfinite(parameter.grad).all())
    after = bits_of(parameter, optimizer)
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    parameter.grad.fill_(1.0)
    optimizer.step(noop=~torch.isfinite(parameter.grad).all())
    assert not all(torch.equal(a, b) for a, b in zip(after, bits_of(parameter, optimizer), strict=True))
    assert optimizer.state[parameter]["step"] == 3


@pytest.mark.sentinels("float8")
@pytest.mark.parametrize("kind", ["float8", "float8_block", "mxfp8", "nvfp4", "mxfp8 and float8 moments"])
def test_a_classifier_converges_as_with_float32_weights(kind: str) -> None:
    """Two layers separate three interleaved spirals, which no linear map does; all data, the same start and batches.

    Training with quantized weights ends within 5 % (FP8) or 10 % (FP4) of the accuracy of float32 AdamW."""

    def spirals() -> tuple[torch.Tensor, torch.Tensor]:
        r = torch.linspace(0.15, 1, 200)
        rings = [torch.stack((r * (5 * r + a).sin(), r * (5 * r + a).cos()), 1) for a in (0.0, 2.1, 4.2)]
        return torch.cat(rings), torch.arange(3).repeat_interleave(200)

    points, labels = spirals()
    features = torch.cat([(points @ torch.randn(2, 32, generator=torch.Generator().manual_seed(7)) * 4).sin()], 1)
    name, _, moments = kind.partition(" and ")
    accuracy = {}
    for quantized in (False, True):
        torch.manual_seed(3)
        values = [torch.randn(64, 32) / 32**0.5, torch.randn(16, 64) / 8]
        quantizer = weight_quantizers()[name]
        weights = [nn.Parameter(quantizer.quantize(v) if quantized else v) for v in values]
        if quantized:
            optimizer = FusedAdamW(weights, lr=3e-3, moment_dtype="float8" if moments else "float32")
        else:
            optimizer = torch.optim.AdamW(weights, lr=3e-3)
        for _ in range(250):
            dense = [w.dequantize() if quantized else w for w in weights]
            logits = torch.relu(features @ dense[0].t()) @ dense[1].t()
            loss = torch.nn.functional.cross_entropy(logits, labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        accuracy[quantized] = (logits.argmax(1) == labels).float().mean().item()
    assert accuracy[False] > 0.97 and accuracy[True] >= accuracy[False] - (0.1 if name == "nvfp4" else 0.05)


def test_moments_are_rounded_anew_by_seed_step_and_parameter() -> None:
    """Equal values, so that a difference in what is stored is one of random bits."""

    def stored(seed: int) -> list[torch.Tensor]:
        parameters = [nn.Parameter(torch.ones(256)) for _ in range(2)]
        optimizer = FusedAdamW(parameters, lr=0.0, betas=(0.5, 0.5), moment_dtype="bfloat16", seed=seed)
        optimizer.init_state()
        found = []
        for _ in range(2):
            for parameter in parameters:
                parameter.grad = torch.full((256,), 1.001)
                optimizer.state[parameter]["exp_avg"].fill_(1.0)
            optimizer.step()
            found += [optimizer.state[p]["exp_avg"] == 1.0 for p in parameters]
        return found

    again = stored(0)
    assert all(torch.equal(a, b) for a, b in zip(stored(0), again, strict=True))
    for other in (again[1], again[2], stored(1)[0]):  # another parameter, another step, another seed
        assert not torch.equal(again[0], other)


def test_main_grad_is_used_and_zeroed() -> None:
    one, two = (nn.Parameter(torch.ones(4, 4)) for _ in range(2))
    one.grad = torch.full((4, 4), 3.0)
    two.main_grad = torch.full((4, 4), 2.0)
    two.grad = torch.ones(4, 4)
    optimizers = [FusedAdamW([p], **OPTIONS) for p in (one, two)]
    for optimizer in optimizers:
        optimizer.step()
    assert torch.equal(one, two)
    buffer = two.main_grad
    optimizers[1].zero_grad()
    assert two.main_grad is buffer and not buffer.any() and two.grad is None


def test_a_parameter_without_a_gradient_stays() -> None:
    parameters = [nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))]
    parameters[0].grad = torch.ones(3)
    FusedAdamW(parameters, lr=0.1).step()
    assert parameters[0][0] < 1 and parameters[1][0] == 1


def built_with_initial_values(name: str, kind: str = "dense") -> nn.Module:
    torch.manual_seed(4)
    with quantized_model_init(recipe=recipe(name), preserve_high_precision_init_val=True):
        if kind == "dense":
            return Linear(64, 48, bias=False)
        return GroupedLinear(3, 64, 48, bias=False, single_grouped_weight=kind == "grouped")


@pytest.mark.parametrize("kind", ["dense", "grouped", "per GEMM"])
@pytest.mark.parametrize("name", ["delayed", "current", "block", "mxfp8", "nvfp4"])
def test_a_master_starts_from_the_preserved_value(name: str, kind: str) -> None:
    """It is what torch's AdamW makes of the values before quantization, which are freed."""
    parameters = list(built_with_initial_values(name, kind).parameters())
    references = [nn.Parameter(p.get_high_precision_init_val().clone()) for p in parameters]
    assert all(not torch.equal(p.dequantize(), r) for p, r in zip(parameters, references, strict=True))
    optimizer = FusedAdamW(parameters, **OPTIONS)
    train(parameters, optimizer, range(2))
    train(references, torch.optim.AdamW(references, fused=True, **OPTIONS), range(2))
    for parameter, reference in zip(parameters, references, strict=True):
        assert torch.equal(optimizer.state[parameter]["master"], reference)
        assert parameter.get_high_precision_init_val() is None


@pytest.mark.parametrize("change", ["bfloat16", "copy of the layer"])
def test_the_preserved_value_goes_with_the_weight(change: str) -> None:
    layer = built_with_initial_values("nvfp4")
    value = layer.weight.get_high_precision_init_val().clone()
    other = layer.to(torch.bfloat16) if change == "bfloat16" else copy.deepcopy(layer)
    for module in (layer, other):
        optimizer = FusedAdamW(module.parameters())
        optimizer.init_state()
        assert torch.equal(optimizer.state[module.weight]["master"], value)
        if other is layer:
            break


@pytest.mark.parametrize("way", ["load_state_dict", "copy_", "data"])
def test_values_written_since_win_over_the_preserved_one(way: str) -> None:
    layer, source = built_with_initial_values("mxfp8"), Linear(64, 48, bias=False)
    with torch.no_grad():
        if way == "load_state_dict":
            layer.load_state_dict(source.state_dict())
        elif way == "copy_":
            layer.weight.copy_(source.weight)
        else:
            layer.weight.data.copy_(source.weight.data)
    optimizer = FusedAdamW(layer.parameters())
    optimizer.init_state()
    assert torch.equal(optimizer.state[layer.weight]["master"], layer.weight.detach().dequantize())
    assert layer.weight.get_high_precision_init_val() is None


def test_a_loaded_master_frees_the_preserved_value() -> None:
    first, second = built_with_initial_values("block"), built_with_initial_values("block")
    optimizers = [FusedAdamW(layer.parameters(), **OPTIONS) for layer in (first, second)]
    train([first.weight], optimizers[0], range(1))
    optimizers[1].load_state_dict(optimizers[0].state_dict())
    assert second.weight.get_high_precision_init_val() is None
    assert torch.equal(optimizers[1].state[second.weight]["master"], optimizers[0].state[first.weight]["master"])


def test_wrong_arguments_are_named() -> None:
    weight = [nn.Parameter(torch.ones(2))]
    refused(lambda: FusedAdamW(weight, moment_dtype="int8"), "moment_dtype is 'int8'")
    refused(lambda: FusedAdamW(weight, lr=-1.0), "lr is -1")
    refused(lambda: FusedAdamW(weight, betas=(0.9, 1.0)), "betas are")
    optimizer = FusedAdamW(weight)
    weight[0].grad = torch.ones(2)
    optimizer.step()
    other = FusedAdamW([nn.Parameter(torch.ones(2))], moment_dtype="bfloat16")
    refused(lambda: other.load_state_dict(copy.deepcopy(optimizer.state_dict())), "moment_dtype='bfloat16'")


@pytest.mark.parametrize("moments", ["float32", "bfloat16", "float8"])
def test_a_state_that_does_not_fit_is_refused(moments: str) -> None:
    """The update writes as many elements as the weight has; a moment of another dtype would be copied and not move."""
    weight = nn.Parameter(torch.ones(4, 64, dtype=torch.bfloat16))
    optimizer = FusedAdamW([weight], master_weights=True, moment_dtype=moments)
    train([weight], optimizer, range(1))
    good = optimizer.state_dict()
    fresh = nn.Parameter(torch.ones(4, 64, dtype=torch.bfloat16))
    other = FusedAdamW([fresh], master_weights=True, moment_dtype=moments)
    for name, value in good["state"][0].items():
        for wrong, message in (
            (value[None].clone(), r"allowed: \(|in blocks \(1, "),
            (value.reshape(-1)[:1].repeat(3), r"allowed: \(|in blocks \(3,\)"),
            (value.to(torch.float16), f"holds {name} of shape .* and torch.float16"),
            (value.double(), f"holds {name} of shape .* and torch.float64"),
            (value.tolist(), f"holds '{name}' as (list|float); allowed: tensors"),
            (None, f"lacks '{name}' for a parameter|moments of moment_dtype"),
        ):
            if (wrong is None and name == "master") or (name == "exp_avg" and moments == "bfloat16"):
                continue
            bad = copy.deepcopy(good)
            bad["state"][0][name] = wrong
            if wrong is None:
                del bad["state"][0][name]
            with pytest.raises(ValueError, match=message) as error:
                other.load_state_dict(bad)
            assert "\n" not in str(error.value)
            assert not other.state, "nothing was taken over"
    renamed = copy.deepcopy(good)
    renamed["state"][0]["master_param"] = renamed["state"][0].pop("master")
    refused(lambda: other.load_state_dict(renamed), "holds 'master_param' for a parameter; its entries are exp_avg")
    other.load_state_dict(good)
    train([weight], optimizer, range(1, 2))
    with torch.no_grad():
        fresh.copy_(weight)
    train([fresh], other, range(1, 2))
    for name, value in optimizer.state[weight].items():
        assert torch.equal(value.float(), other.state[fresh][name].float()), name


def test_working_copies_of_few_parameters_exist_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step's float32 copies are bounded, whatever the size of the model."""
    parameters = [torch.nn.Parameter(torch.ones(size, dtype=torch.bfloat16)) for size in (40, 30, 50, 120, 10, 60)]
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer = FusedAdamW(parameters, lr=0.1, moment_dtype="bfloat16")
    together = []
    finish = optimizer._finish

    def noted(work: list, *rest: object) -> None:
        together.append([update.weight.numel() for update in work])
        finish(work, *rest)

    monkeypatch.setattr("te_models.layers.optimizers.master_weights._CHUNK", {"cpu": 100})
    monkeypatch.setattr(optimizer, "_finish", noted)
    optimizer.step()
    assert together == [[40, 30], [50], [100], [20, 10, 60]]
    assert [state["step"].item() for state in optimizer.state.values()] == [1] * 6
    assert all((parameter != 1).all() for parameter in parameters)


@pytest.mark.parametrize("moments", ["float32", "bfloat16"])
@pytest.mark.parametrize("master", [False, True])
def test_pieces_are_updated_as_a_whole_parameter(master: bool, moments: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Random bits included: they are those of the element, not of its place in a piece."""
    results = []
    for chunk in (1 << 20, 64, 128):  # whole vectors: the update's own kernel rounds otherwise past the last one
        monkeypatch.setattr("te_models.layers.optimizers.master_weights._CHUNK", {"cpu": chunk})
        torch.manual_seed(0)
        parameter = torch.nn.Parameter(torch.randn(30, 11, dtype=torch.bfloat16))
        optimizer = FusedAdamW([parameter], lr=0.1, weight_decay=0.3, master_weights=master, moment_dtype=moments)
        for _ in range(3):
            parameter.grad = torch.randn(30, 11, dtype=torch.bfloat16)
            optimizer.step()
        results.append([parameter.detach(), *optimizer.state[parameter].values()])
    for whole, *others in zip(*results, strict=True):
        assert all(torch.equal(whole, pieces) for pieces in others)
