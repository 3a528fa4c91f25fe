"""`te.optimizers` as scripts use it: torch's numbers for parameters of any dtype, states in few bits, remainders."""

import copy
import io
import math
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import te_models.layers as te
from te_models.layers.optimizers import FusedAdam, FusedSGD
from te_models.layers.te.optimizers.stored_state import split_master, whole_master
from tests.build import weight_quantizers
from tests.compare import refused, same_bits

OPTIONS: dict[str, Any] = {"lr": 0.02, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.3}


def values(dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.linspace(-1, 1, 600).view(20, 30).to(dtype)


def gradients(steps: int, shape: tuple[int, ...] = (20, 30)) -> list[Tensor]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randn(shape, generator=generator) for _ in range(steps)]


def train(parameter: nn.Parameter, optimizer: torch.optim.Optimizer, steps: Iterable[Tensor], **step: Any) -> Tensor:
    for gradient in steps:
        parameter.grad = gradient.to(parameter.dtype)
        optimizer.step(**step)
    return parameter.detach()


def adam(g: list[Tensor], weight: Tensor, w_mode: bool, correction: bool) -> Tensor:
    """The formula in float64: arXiv 1412.6980, algorithm 1, and the decoupled decay of 1711.05101."""
    p, m, v = weight.double(), torch.zeros(weight.shape).double(), torch.zeros(weight.shape).double()
    (beta1, beta2), lr, decay = OPTIONS["betas"], OPTIONS["lr"], OPTIONS["weight_decay"]
    for t, gradient in enumerate(g, 1):
        gradient = gradient.double() + (0 if w_mode else decay * p)
        m, v = beta1 * m + (1 - beta1) * gradient, beta2 * v + (1 - beta2) * gradient**2
        one, two = (1 - beta1**t, 1 - beta2**t) if correction else (1, 1)
        p = p - lr * ((m / one) / ((v / two).sqrt() + OPTIONS["eps"]) + (decay * p if w_mode else 0))
    return p


@pytest.mark.parametrize("correction", [True, False])
@pytest.mark.parametrize("w_mode", [True, False])
def test_adam_and_adamw(w_mode: bool, correction: bool) -> None:
    parameter = nn.Parameter(values())
    optimizer = te.optimizers.FusedAdam([parameter], adam_w_mode=w_mode, bias_correction=correction, **OPTIONS)
    found = train(parameter, optimizer, gradients(5))
    expected = adam(gradients(5), values(), w_mode, correction)
    torch.testing.assert_close(found.double(), expected, rtol=1e-6, atol=2e-6)
    if correction:
        kind = torch.optim.AdamW if w_mode else torch.optim.Adam
        same = nn.Parameter(values())
        assert torch.equal(train(same, kind([same], fused=True, **OPTIONS), gradients(5)), found)
    assert optimizer.param_groups[0]["step"] == 5 and set(optimizer.state[parameter]) == {"exp_avg", "exp_avg_sq"}
    assert te.optimizers.FusedAdam([parameter]).defaults["weight_decay"] == 0.0  # as there


@pytest.mark.parametrize("name", [*sorted(weight_quantizers().keys() - {"identity"}), "bf16", "fp16"])
def test_a_parameter_is_the_rounding_of_its_master(name: str) -> None:
    quantizers = weight_quantizers()
    dtype = torch.float16 if name == "fp16" else torch.bfloat16
    start = torch.randn(32, 64, generator=torch.Generator().manual_seed(1)).to(dtype)
    parameter = nn.Parameter(quantizers[name].quantize(start) if name in quantizers else start)
    before = parameter.detach().float()
    optimizer = FusedAdam([parameter], master_weights=name not in quantizers, **OPTIONS)
    train(parameter, optimizer, gradients(3, (32, 64)))
    master = optimizer.state[parameter]["master_param"]
    reference = nn.Parameter(before)
    rounded = [gradient.to(parameter.dtype).float() for gradient in gradients(3, (32, 64))]
    assert torch.equal(master, train(reference, torch.optim.AdamW([reference], fused=True, **OPTIONS), rounded))
    if name in quantizers:
        assert same_bits(parameter, parameter.quantizer.quantize_fields(master))
    else:
        assert torch.equal(parameter, master.to(dtype))


def test_a_master_starts_from_the_preserved_value() -> None:
    with te.quantized_model_init(recipe=te.recipe("mxfp8"), preserve_high_precision_init_val=True):
        layer = te.Linear(64, 64, bias=False)
    value = layer.weight.get_high_precision_init_val().clone()
    for optimizer in [FusedAdam(copy.deepcopy(layer).parameters()), FusedSGD(layer.parameters(), lr=0.1)]:
        optimizer.init_state()
        ((weight, state),) = optimizer.state.items()
        assert torch.equal(state["master_param"], value) and weight.get_high_precision_init_val() is None


def test_a_weight_and_its_remainder_are_the_master_bit_for_bit() -> None:
    """The weight is the master rounded to the nearer bfloat16, with the carry that a remainder of 2^15 makes."""
    words = torch.randint(-(2**31), 2**31, (4096,), generator=torch.Generator().manual_seed(0))
    edges = torch.tensor([0x3F807FFF, 0x3F808000, 0x3FFFFFFF, 0x7F7F7FFF, 0, -(2**31), 0x00008000, 0x007FFFFF])
    master = torch.cat([words, edges]).to(torch.int32)
    master = master[master.view(torch.float32).isfinite()].view(torch.float32)
    weight, remainder = split_master(master)
    assert weight.dtype is torch.bfloat16 and remainder.dtype is torch.int16
    assert torch.equal(whole_master(weight, remainder).view(torch.int32), master.view(torch.int32))
    ties = master.view(torch.int32) & 0xFFFF == 0x8000
    assert torch.equal(weight[~ties], master[~ties].bfloat16())
    assert split_master(torch.tensor([1.0 + 2**-8]))[0].item() == 1.0 + 2**-7  # a tie, away from zero


def test_remainders_train_as_whole_masters_do() -> None:
    results, optimizers = [], []
    for remainders in (False, True):
        parameter = nn.Parameter(values(torch.bfloat16))
        optimizer = FusedAdam([parameter], master_weights=True, store_param_remainders=remainders, **OPTIONS)
        train(parameter, optimizer, gradients(20))
        master = optimizer.state[parameter]["master_param"]
        results.append(whole_master(parameter.detach(), master) if remainders else master)
        optimizers.append(optimizer)
    assert torch.equal(*results) and master.dtype is torch.int16 and bool((master < 0).any())
    assert torch.equal(optimizers[1].get_unscaled_state(parameter, "master_param"), master)
    with pytest.raises(ValueError, match=r"holds master_param of shape .* and torch.float32 .* torch.int16"):
        optimizers[1].load_state_dict(optimizers[0].state_dict())
    plain = nn.Parameter(values())  # no remainder of a float32 parameter
    other = FusedAdam([plain], master_weights=True, store_param_remainders=True)
    train(plain, other, gradients(1))
    assert set(other.state[plain]) == {"exp_avg", "exp_avg_sq"}


DTYPES = {
    "fp16": {"exp_avg_dtype": torch.float16, "exp_avg_sq_dtype": torch.float16},
    "bf16": {"exp_avg_dtype": torch.bfloat16},
    "fp8": {"exp_avg_dtype": torch.uint8, "exp_avg_sq_dtype": torch.float16},
    "fp8 roots": {"exp_avg_sq_dtype": torch.uint8},
    "fp16 master": {"master_weights": True, "master_weight_dtype": torch.float16},
    "remainders": {"master_weights": True, "store_param_remainders": True},
}


HALF_STEP = {torch.float32: 0.0, torch.bfloat16: 2**-8, torch.float16: 2**-11, torch.float8_e4m3fn: 16 / 448}
"""The largest error of a rounding in units of the amax, where that has become the largest number in use."""


@pytest.mark.parametrize("kind", DTYPES)
def test_states_in_few_bits_resume_bitwise_and_are_saved_in_float32(kind: str) -> None:
    """Their scales bring the amax to the format's range, so what a step reads is off by its rounding and no more."""

    def fresh() -> tuple[nn.Parameter, FusedAdam]:
        parameter = nn.Parameter(values(torch.bfloat16))
        return parameter, FusedAdam([parameter], **DTYPES[kind], **OPTIONS)

    parameter, optimizer = fresh()
    train(parameter, optimizer, gradients(4)[:1])
    exact = nn.Parameter(values(torch.bfloat16))
    reference = FusedAdam([exact], **OPTIONS)
    train(exact, reference, gradients(4)[:1])
    for name in ("exp_avg", "exp_avg_sq"):
        moment = reference.state[exact][name]
        error = (optimizer.get_unscaled_state(parameter, name) - moment).abs().amax() / moment.abs().amax()
        assert error <= HALF_STEP[optimizer.state[parameter][name].dtype]
    train(parameter, optimizer, gradients(4)[1:2])
    file = io.BytesIO()
    torch.save({"optimizer": optimizer.state_dict(), "weight": parameter.detach().clone()}, file)
    train(parameter, optimizer, gradients(4)[2:])
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    kinds = {name: value.dtype for name, value in saved["optimizer"]["state"][0].items()}
    assert set(kinds.values()) <= {torch.float32, torch.int16}
    other, resumed = fresh()
    with torch.no_grad():
        other.copy_(saved["weight"])
    resumed.load_state_dict(saved["optimizer"])
    train(other, resumed, gradients(4)[2:])
    assert torch.equal(other, parameter) and resumed.param_groups[0]["step"] == 4
    for name in kinds:
        assert resumed.state[other][name].dtype is optimizer.state[parameter][name].dtype
        assert torch.equal(*(o.get_unscaled_state(p, name) for o, p in ((resumed, other), (optimizer, parameter))))


def test_gradients_of_another_dtype_are_read_from_decoupled_grad() -> None:
    parameter, reference = nn.Parameter(values(torch.bfloat16)), nn.Parameter(values(torch.bfloat16).float())
    optimizer = FusedAdam([parameter], use_decoupled_grad=True, master_weights=True, **OPTIONS)
    for gradient in gradients(3):
        parameter.decoupled_grad = gradient  # float32
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        assert not parameter.decoupled_grad.any()
    train(reference, torch.optim.AdamW([reference], fused=True, **OPTIONS), gradients(3))
    assert torch.equal(optimizer.state[parameter]["master_param"], reference)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.zeros(()))
    refused(lambda: scaler.step(optimizer), "what is in decoupled_grad scaled; allowed: te_models.layers.GradScaler")
    optimizer.zero_grad()
    assert parameter.decoupled_grad is None and parameter.grad is None


def test_main_gradients_are_not_read() -> None:
    """Scripts move them to `.grad` or `.decoupled_grad` themselves; they were counted twice."""
    parameter = nn.Parameter(values())
    parameter.main_grad = gradients(1)[0]
    same = nn.Parameter(values())
    expected = train(same, FusedAdam([same], **OPTIONS), gradients(1))
    assert torch.equal(train(parameter, FusedAdam([parameter], **OPTIONS), gradients(1)), expected)
    assert torch.equal(parameter.main_grad, gradients(1)[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_capturable_step_divides_by_the_scale_and_skips_overflows(dtype: torch.dtype) -> None:
    parameter, reference = nn.Parameter(values(dtype)), nn.Parameter(values(dtype))
    optimizer = FusedAdam([parameter], capturable=True, master_weights=True, **OPTIONS)
    scaler = te.GradScaler("cpu", init_scale=2.0**10)
    scaler.scale(torch.zeros(()))
    before = parameter.detach().clone()
    train(parameter, optimizer, [torch.full((20, 30), float("inf"))], grad_scaler=scaler)
    assert torch.equal(parameter, before) and optimizer.param_groups[0]["step"].item() == 0
    assert not any(optimizer.state[parameter][name].any() for name in ("exp_avg", "exp_avg_sq"))
    train(parameter, optimizer, [g * 2.0**10 for g in gradients(2)], grad_scaler=scaler)
    train(reference, FusedAdam([reference], master_weights=True, **OPTIONS), gradients(2))
    assert torch.equal(parameter, reference) and isinstance(optimizer.param_groups[0]["lr"], Tensor)
    refused(lambda: FusedAdam([parameter]).step(grad_scaler=scaler), "grad_scaler is given, and capturable is False")


def test_what_adam_does_not_have_is_refused() -> None:
    weight = nn.Parameter(values())
    for options, message in {
        ("amsgrad", True): "amsgrad is True; allowed: False",
        ("exp_avg_dtype", torch.int8): "exp_avg_dtype is torch.int8; allowed: torch.float32, torch.float16",
        ("lr", -1.0): "lr is -1.0; allowed",
    }.items():
        with pytest.raises(ValueError, match=message):
            FusedAdam([weight], **dict([options]))
    with pytest.raises(ValueError, match=r"exp_avg_dtype is torch.float16; allowed with capturable=True: torch.f"):
        FusedAdam([weight], capturable=True, exp_avg_dtype=torch.float16)
    with pytest.raises(ValueError, match=r"master_weight_dtype is torch.bfloat16; allowed: torch.float32, torch.f"):
        FusedAdam([weight], master_weights=True, master_weight_dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="set_to_none is True; allowed with set_grad_none=False: False"):
        FusedAdam([weight], set_grad_none=False).zero_grad(set_to_none=True)
    double = nn.Parameter(values().double())
    refused(lambda: train(double, FusedAdam([double]), gradients(1)), "was given a parameter of torch.float64")
    optimizer = FusedAdam([weight])
    with pytest.raises(ValueError, match="state_name is 'step'; allowed for this parameter: exp_avg, exp_avg_sq"):
        optimizer.set_scaled_state(weight, "step", values())
    optimizer.set_scaled_state(weight, "exp_avg", values())
    assert torch.equal(optimizer.get_unscaled_state(weight, "exp_avg"), values())


SGD: dict[str, dict[str, Any]] = {
    "plain": {"weight_decay": 0.1},
    "momentum": {"momentum": 0.9, "dampening": 0.3},
    "nesterov": {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
}


@pytest.mark.parametrize("kind", SGD)
def test_sgd_is_that_of_torch(kind: str) -> None:
    ours, theirs = nn.Parameter(values()), nn.Parameter(values())
    found = train(ours, te.optimizers.FusedSGD([ours], 0.1, **SGD[kind]), gradients(4))
    reference = torch.optim.SGD([theirs], lr=0.1, foreach=False, fused=False, **SGD[kind])
    assert torch.equal(found, train(theirs, reference, gradients(4)))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kind", SGD)
def test_sgd_rounds_the_step_of_16_bit_weights(kind: str, dtype: torch.dtype) -> None:
    """Transformer Engine's kernel: all in float32, the step rounded to 16 bits, then the sum."""
    # powers of two, so that a product and a sum in one instruction round as they do in two
    chosen = {name: value if value is True else 2.0 ** round(math.log2(value)) for name, value in SGD[kind].items()}
    options = {"momentum": 0.0, "dampening": 0.0, "weight_decay": 0.0, "nesterov": False} | chosen
    ours = nn.Parameter(values().to(dtype))
    optimizer = FusedSGD([ours], lr=0.25, **chosen)
    weight, buffer = ours.detach().clone(), None
    for gradient in gradients(6):
        train(ours, optimizer, [gradient.to(dtype)])
        step = gradient.to(dtype).float() + options["weight_decay"] * weight.float()
        if options["momentum"]:
            moved = step if buffer is None else buffer.float() * options["momentum"] + (1 - options["dampening"]) * step
            buffer = moved.to(dtype)
            step = step + options["momentum"] * moved if options["nesterov"] else moved
        weight = weight + (-0.25 * step).to(dtype)
        assert torch.equal(ours, weight)


def test_sgd_passes_the_test_of_transformer_engine_in_float16() -> None:
    torch.manual_seed(9876)
    start = torch.rand(20_000, dtype=torch.float16)
    ours, theirs = nn.Parameter(start.clone()), nn.Parameter(start.clone())
    optimizers = [FusedSGD([ours], lr=0.25, momentum=0.125), torch.optim.SGD([theirs], lr=0.25, momentum=0.125)]
    for _ in range(7):
        ours.grad = theirs.grad = torch.rand_like(start)
        for optimizer in optimizers:
            optimizer.step()
        torch.testing.assert_close(ours, theirs)


def test_weight_decay_after_momentum() -> None:
    parameter = nn.Parameter(values())
    optimizer = FusedSGD([parameter], lr=0.1, momentum=0.5, weight_decay=0.2, wd_after_momentum=True)
    p, v = values(), torch.zeros(20, 30)
    for gradient in gradients(3):
        v = 0.5 * v + gradient
        p = p - 0.1 * (v + 0.2 * p)
    torch.testing.assert_close(train(parameter, optimizer, gradients(3)), p)
    assert torch.equal(optimizer.state[parameter]["momentum_buffer"], v)


@pytest.mark.parametrize("name", ["mxfp8", "nvfp4", "bf16"])
def test_sgd_over_few_bits_resumes_bitwise(name: str) -> None:
    def fresh() -> tuple[nn.Parameter, FusedSGD]:
        quantizers = weight_quantizers()
        start = torch.randn(32, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
        parameter = nn.Parameter(quantizers[name].quantize(start) if name in quantizers else start)
        return parameter, FusedSGD([parameter], lr=0.1, momentum=0.9)

    steps = gradients(4, (32, 64))
    parameter, optimizer = fresh()
    train(parameter, optimizer, steps[:2])
    saved = copy.deepcopy(optimizer.state_dict())
    other, resumed = fresh()
    with torch.no_grad():
        other.copy_(parameter)
    resumed.load_state_dict(saved)
    for p, o in ((parameter, optimizer), (other, resumed)):
        train(p, o, steps[2:])
    assert same_bits(parameter, other) if name != "bf16" else torch.equal(parameter, other)
    for key, value in optimizer.state[parameter].items():
        assert torch.equal(value, resumed.state[other][key]) and value.dtype is resumed.state[other][key].dtype
    if name != "bf16":
        master = nn.Parameter(fresh()[0].detach().float())
        rounded = [gradient.bfloat16().float() for gradient in steps]
        train(master, torch.optim.SGD([master], lr=0.1, momentum=0.9, foreach=False, fused=False), rounded)
        assert torch.equal(optimizer.state[parameter]["master_param"], master)


def test_what_sgd_does_not_have_is_refused() -> None:
    weight = nn.Parameter(values())
    with pytest.raises(ValueError, match=r"nesterov needs momentum above 0 and dampening 0; got 0\.0 and 0\.0"):
        FusedSGD([weight], lr=0.1, nesterov=True)
    refused(lambda: FusedSGD([weight], lr=0.1, momentum=-1), "momentum is -1; allowed: zero or a positive number")
    refused(lambda: FusedSGD([weight]), "lr")
    FusedSGD([{"params": [weight], "lr": 0.1}], materialize_master_grads=False, set_grad_none=True).zero_grad()


@pytest.fixture
def mesh() -> Iterator[Any]:
    if not torch.distributed.is_available():
        pytest.skip("this torch is built without distributed")
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
    torch.distributed.destroy_process_group()


def test_sharded_parameters_have_sharded_states(mesh: Any) -> None:
    """On one rank, where a shard is the whole: the same numbers as of a plain parameter, resumed once."""
    from torch.distributed.tensor import DTensor, Shard, distribute_tensor

    def run(parameter: nn.Parameter, options: dict[str, Any]) -> Tensor:
        saved: dict[str, Any] = {}
        for i, gradient in enumerate(gradients(3)):
            if i != 1:
                optimizer = FusedAdam([parameter], **options, **OPTIONS)
            if i == 2:
                optimizer.load_state_dict(saved)
            sharded = isinstance(parameter, DTensor)
            gradient = gradient.bfloat16()
            parameter.grad = distribute_tensor(gradient, mesh, [Shard(0)]) if sharded else gradient
            optimizer.step()
            saved = optimizer.state_dict()
        assert all(isinstance(value, DTensor) == sharded for value in saved["state"][0].values())
        return parameter.detach().full_tensor() if sharded else parameter.detach()

    for kind in ("fp8", "remainders", "fp16 master"):
        plain = nn.Parameter(values(torch.bfloat16))
        sharded = nn.Parameter(distribute_tensor(values(torch.bfloat16), mesh, [Shard(0)]))
        assert torch.equal(run(sharded, DTYPES[kind]), run(plain, DTYPES[kind])), kind


def test_gradients_are_clipped_with_lists_of_tensors() -> None:
    tensors, flag = [torch.full((3,), 2.0).bfloat16(), torch.full((2, 2), 3.0)], torch.zeros(1, dtype=torch.int)
    apply = te.optimizers.multi_tensor_applier
    norm, each = apply(te.optimizers.multi_tensor_l2norm, flag, [tensors], True)
    assert torch.equal(norm, torch.tensor([48.0]).sqrt()) and torch.equal(each, torch.tensor([12.0, 36.0]).sqrt())
    apply(te.optimizers.multi_tensor_scale, flag, [tensors, tensors], 0.5)
    assert tensors[0].tolist() == [1.0] * 3 and tensors[1].tolist() == [[1.5] * 2] * 2 and not flag.any()
    tensors[1][0, 0] = float("nan")
    apply(te.optimizers.multi_tensor_scale, flag, [tensors, tensors], 0.5)
    assert flag.item() == 1
