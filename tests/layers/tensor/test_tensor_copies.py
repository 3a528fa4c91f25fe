"""Copies, moves, files and state dicts keep the quantized form, its bits and what users have set on a parameter."""

import copy
import io
import pickle
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import nn

import te_models.layers as te
from te_models.checkpoints import plain_state_dict
from te_models.layers.tensor.formats import rebuild_quantized
from tests.build import weight_quantizers
from tests.compare import in_dtype, refused, same_bits

FORMATS = weight_quantizers()


@pytest.fixture(params=[(n, g) for n in FORMATS for g in (False, True)], ids=lambda p: f"{p[0]}-{'grouped' * p[1]}")
def quantized(request: pytest.FixtureRequest) -> te.QuantizedTensor:
    name, grouped = request.param
    torch.manual_seed(0)
    quantizer = FORMATS[name]
    return quantizer.quantize_grouped(torch.randn(3, 40, 72)) if grouped else quantizer.quantize(torch.randn(40, 72))


def pointers(x: te.QuantizedTensor) -> list[int]:
    return [field.data_ptr() for field in x.fields.values()]


# --- copy_ and quantize_ ----------------------------------------------------------------------------------------------


def test_plain_and_quantized_take_each_other(quantized: te.QuantizedTensor) -> None:
    plain = torch.empty(quantized.shape, dtype=torch.bfloat16)
    plain.copy_(quantized)
    assert type(plain) is torch.Tensor and torch.equal(plain, quantized.dequantize().bfloat16())
    x, before = torch.randn(quantized.shape, dtype=torch.bfloat16), pointers(quantized)
    assert quantized.copy_(x) is quantized
    assert same_bits(quantized, quantized.quantizer.quantize_fields(x.float()))
    assert pointers(quantized) == before
    source = quantized.clone().mul_(3.0)  # its like, bit for bit
    quantized.copy_(source)
    assert same_bits(quantized, source)
    refused(lambda: quantized.copy_(torch.ones(7)), "cannot quantize shape")


@pytest.mark.parametrize("name", ["float8_block_1d", "mxfp8", "nvfp4_1d"])
def test_quantized_takes_its_like_with_fewer_copies(name: str) -> None:
    """The copy that the source lacks is made from the values of the one it has."""
    target, source = (FORMATS[name].quantize(torch.randn(40, 72)) for _ in range(2))
    source.update_usage(columnwise=False)
    target.copy_(source)
    assert same_bits(target, FORMATS[name].quantize_fields(source.dequantize(torch.float32)))


def test_quantized_takes_another_format(quantized: te.QuantizedTensor) -> None:
    other = te.Float8BlockQuantizer(block_scaling_dim=1, amax_epsilon=0.25)
    x = torch.randn(quantized.shape)
    source = other.quantize(x) if x.dim() == 2 else other.quantize_grouped(x)
    quantized.copy_(source)
    assert same_bits(quantized, quantized.quantizer.quantize_fields(source.dequantize(torch.float32)))


@pytest.mark.parametrize("flag", [torch.tensor(0), torch.tensor([2.0]), torch.tensor(1, dtype=torch.int32)])
def test_a_noop_flag_decides_whether_anything_changes(quantized: te.QuantizedTensor, flag: torch.Tensor) -> None:
    before, x, places = quantized.clone(), torch.randn(quantized.shape), pointers(quantized)
    quantized.quantize_(x, noop=flag)
    assert same_bits(quantized, before if flag.item() else quantized.quantizer.quantize_fields(x))
    assert pointers(quantized) == places


def test_the_noop_flag_is_never_read_on_the_host() -> None:
    """On the meta device reading a value raises."""
    meta = te.MXFP8Quantizer().quantize_grouped(torch.randn(2, 32, 32)).to("meta")
    meta.quantize_(torch.empty(2, 32, 32, device="meta"), noop=torch.empty((), device="meta"))


def test_out_arguments_are_requantized(quantized: te.QuantizedTensor) -> None:
    """Written by keyword, where an in-place method writes to its first argument."""
    x, before = torch.randn(quantized.shape), pointers(quantized)
    assert torch.add(x, 1, out=quantized) is quantized
    assert same_bits(quantized, quantized.quantizer.quantize_fields(x + 1))
    assert pointers(quantized) == before


@pytest.mark.parametrize("write", ["quantize_", "data", "copy_"])
def test_a_backward_pass_after_its_weight_was_written_to_is_an_error(quantized: te.QuantizedTensor, write: str) -> None:
    """As for a plain weight: gradients of other values than those of the forward pass are no gradients."""
    parameter, values = nn.Parameter(quantized), torch.ones(quantized.shape)
    y = parameter * torch.randn(quantized.shape, requires_grad=True)
    with torch.no_grad():
        if write == "data":
            parameter.data = values
        else:
            getattr(parameter, write)(values)
    refused(lambda: y.sum().backward(), "modified by an inplace operation", error=RuntimeError)


# --- copies and moves -------------------------------------------------------------------------------------------------


def test_clone_detach_and_deepcopy(quantized: te.QuantizedTensor) -> None:
    parameter = nn.Parameter(quantized)
    for new, shared in ((quantized.clone(), False), (quantized.detach(), True), (copy.deepcopy(parameter), False)):
        assert type(new) is type(quantized) and same_bits(new, quantized)
        assert (pointers(new) == pointers(quantized)) == shared
    copied = copy.deepcopy(nn.ParameterList([parameter, parameter]))
    assert copied[0] is copied[1] and copied[0].requires_grad
    copied[0].data.zero_()
    assert quantized.dequantize().any()
    assert repr(quantized).startswith(f"{type(quantized).__name__}(shape=")


def test_assigned_data_is_quantized(quantized: te.QuantizedTensor) -> None:
    parameter, fields = nn.Parameter(quantized), pointers(quantized)
    parameter.data = values = torch.ones(quantized.shape)
    assert pointers(parameter) == fields and torch.equal(parameter.dequantize(torch.float32), values)
    nn.utils.vector_to_parameters(torch.zeros(quantized.numel()), [parameter])
    assert not parameter.dequantize().any()
    with pytest.raises(ValueError, match="cannot quantize shape"):
        parameter.data = torch.ones(3)


def test_empty_like_is_quantized_and_zeros_like_is_what_moments_are_made_of(quantized: te.QuantizedTensor) -> None:
    empty = torch.empty_like(quantized)
    assert type(empty) is type(quantized) and not set(pointers(empty)) & set(pointers(quantized))
    assert torch.equal(empty.zero_().dequantize(), torch.zeros(quantized.shape))
    zeros = torch.zeros_like(quantized, memory_format=torch.preserve_format)
    assert type(zeros) is torch.Tensor and zeros.shape == quantized.shape and not zeros.any()
    assert type(quantized.new_zeros(quantized.shape)) is type(quantized)
    assert type(quantized.new_empty(5)) is torch.Tensor and type(torch.ones_like(quantized)) is torch.Tensor


def test_another_dtype_is_that_of_the_values(quantized: te.QuantizedTensor) -> None:
    values = quantized.dequantize(torch.float64)
    float64, float16 = torch.float64, torch.float16
    for plain in (
        *(quantized.half(), quantized.to(float16), quantized.type(float16), quantized.to("cpu", float16)),
        *(quantized.type_as(torch.ones((), dtype=float16)), quantized.double(), quantized.to(float64)),
        *(quantized.bfloat16(), quantized.float(), quantized.detach().clone().float()),
        *(nn.Parameter(quantized).detach().float(), quantized.to(torch.int32)),
    ):
        assert type(plain) is torch.Tensor and torch.equal(plain, values.to(plain.dtype))
    assert quantized.half().dtype is float16 and quantized.double().dtype is float64
    meta = quantized.to("meta", float16)
    assert type(meta) is torch.Tensor and (meta.dtype, meta.shape, meta.is_meta) == (float16, quantized.shape, True)


def test_the_same_dtype_is_no_conversion(quantized: te.QuantizedTensor) -> None:
    for same in (quantized.to(torch.float32), quantized.to("cpu", copy=True), quantized.to(torch.float32, copy=True)):
        assert type(same) is type(quantized) and same_bits(same, quantized)


def test_new_tensors_of_another_dtype_are_plain(quantized: te.QuantizedTensor) -> None:
    """What a float32 master of a bfloat16 weight is allocated with."""
    half = in_dtype(quantized, torch.bfloat16)
    options = {"dtype": torch.float32}
    empty, zeros = half.new_empty(half.shape, **options), half.new_zeros(half.shape, **options)
    meta = torch.empty_like(half, device="meta", **options)
    for new in (empty, zeros, meta, torch.empty_like(half, **options), torch.zeros_like(half, **options)):
        assert type(new) is torch.Tensor and new.dtype is torch.float32 and new.shape == half.shape
    assert type(torch.empty_like(half)) is type(torch.empty_like(half, dtype=torch.bfloat16)) is type(half)
    assert torch.equal(torch.empty_like(half, dtype=torch.float32).copy_(half), half.dequantize(torch.float32))


def test_gradients_pass_a_conversion(quantized: te.QuantizedTensor) -> None:
    parameter = nn.Parameter(quantized)
    for convert in (parameter.float, parameter.double, lambda: parameter.to(torch.bfloat16)):
        parameter.grad = None
        (convert() * 2).sum().backward()
        assert type(parameter.grad) is torch.Tensor and parameter.grad.eq(2).all()
        assert parameter.grad.dtype is torch.float32


def test_lists_are_copied_bit_for_bit(quantized: te.QuantizedTensor) -> None:
    into = [torch.empty_like(quantized), torch.zeros(quantized.shape), torch.empty_like(quantized)]
    plain = torch.ones(quantized.shape)
    torch._foreach_copy_(into, [quantized, quantized, plain])
    assert same_bits(into[0], quantized) and torch.equal(into[1], quantized.dequantize())
    assert same_bits(into[2], torch.empty_like(quantized).copy_(plain))


def test_a_device_move_moves_every_field(quantized: te.QuantizedTensor) -> None:
    meta = quantized.to("meta")
    assert type(meta) is type(quantized) and meta.device.type == "meta"
    assert {field.device.type for field in meta.fields.values()} == {"meta"}
    back = torch.empty_like(meta, device="cpu")
    assert type(back) is type(quantized)
    assert {field.device.type for field in back.fields.values()} == {"cpu"}
    back.copy_(quantized)
    assert same_bits(back, quantized)


def test_pinned_memory_is_of_every_field(quantized: te.QuantizedTensor, monkeypatch: pytest.MonkeyPatch) -> None:
    """As `CPUOffloadPolicy` of FSDP2 asks for, which went on with plain values."""
    pinned: set[int] = set()

    def pin(field: torch.Tensor) -> torch.Tensor:  # where there is no accelerator, torch pins nothing
        pinned.add(id(copied := field.clone()))
        return copied

    monkeypatch.setattr(torch.Tensor, "pin_memory", pin)
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda field: id(field) in pinned)
    quantized.tensor_model_parallel = True
    new = torch.ops.aten._pin_memory.default(quantized)
    assert type(new) is type(quantized) and same_bits(new, quantized) and new.tensor_model_parallel
    assert torch.ops.aten.is_pinned.default(new) and not torch.ops.aten.is_pinned.default(quantized)


# --- files ------------------------------------------------------------------------------------------------------------


def test_pickle_keeps_bits_and_torch_save_is_read_with_weights_only(quantized: te.QuantizedTensor) -> None:
    assert same_bits(pickle.loads(pickle.dumps(quantized)), quantized)
    file = io.BytesIO()
    torch.save({"w": quantized, "p": nn.Parameter(in_dtype(quantized, torch.bfloat16)), "plain": torch.ones(2)}, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    assert type(loaded["w"]) is type(quantized) and same_bits(loaded["w"], quantized)
    assert not loaded["w"].requires_grad and not isinstance(loaded["w"], nn.Parameter)
    assert isinstance(loaded["p"], nn.Parameter) and loaded["p"].requires_grad
    assert loaded["p"].dtype is torch.bfloat16 and same_bits(loaded["p"], quantized)


def test_a_parameter_is_pickled_with_what_users_have_set(quantized: te.QuantizedTensor) -> None:
    """As a plain one is; the entries of a state dict, which are no parameters, have none."""
    parameter = nn.Parameter(quantized)
    parameter.partition_dim, parameter.hook = 1, print
    file = io.BytesIO()
    torch.save([parameter, parameter.detach()], file)
    file.seek(0)
    for again in (pickle.loads(pickle.dumps(parameter)), torch.load(file, weights_only=True)[0]):
        assert again.partition_dim == 1 and not hasattr(again, "hook") and same_bits(again, quantized)
    file.seek(0)
    assert not hasattr(torch.load(file, weights_only=True)[1], "partition_dim")


def test_shared_memory_holds_every_field(quantized: te.QuantizedTensor) -> None:
    """torch's own way reaches for a storage that the wrapper does not have, and the process dies."""
    before = quantized.clone()
    assert not quantized.is_shared() and quantized.share_memory_() is quantized
    assert quantized.is_shared() and all(field.is_shared() for field in quantized.fields.values())
    assert same_bits(quantized, before)


def test_a_view_is_not_saved_with_half_of_its_meaning() -> None:
    view = te.MXFP8Quantizer().quantize(torch.randn(32, 32)).view(-1)
    refused(lambda: torch.save(view, io.BytesIO()), "cannot be saved")


@dataclass(frozen=True, kw_only=True)
class Louder(te.MXFP8Quantizer):
    """A user's own, with a field that no file knows."""

    factor: float = 2.0


def test_what_no_file_could_be_read_back_from_is_not_saved() -> None:
    x = Louder().quantize(torch.randn(32, 32))
    for save in (lambda: torch.save({"x": x}, io.BytesIO()), lambda: plain_state_dict({"x": x})):
        with pytest.raises(ValueError, match=r"by Louder cannot be saved: files of .* do not know factor"):
            save()
    assert copy.deepcopy(x).quantizer == Louder()


def test_files_that_contradict_themselves_are_refused() -> None:
    x = te.MXFP8Quantizer().quantize(torch.randn(32, 32))
    _, (name, quantizer, shape, dtype, fields, flags) = x.__reduce_ex__(2)
    refused(lambda: rebuild_quantized("os.system", quantizer, shape, dtype, fields, flags), "class 'os.system'")
    with pytest.raises(ValueError, match=r"the field rowwise_data is .*\(32, 32\); expected: .*\(64, 32\)"):
        rebuild_quantized(name, quantizer, (64, 32), dtype, fields, flags)
    with pytest.raises(ValueError, match="the field columnwise_data is nothing"):
        missing = {n: f for n, f in fields.items() if n != "columnwise_data"}
        rebuild_quantized(name, quantizer, shape, dtype, missing, flags)
    with pytest.raises(ValueError, match="quantized format is 'evil'"):
        rebuild_quantized(name, '{"format": "evil"}', shape, dtype, fields, flags)


# --- modules ----------------------------------------------------------------------------------------------------------

RECIPES = ["current", "block", "mxfp8"]


def build(name: str, grouped: bool) -> nn.Module:
    with te.quantized_model_init(recipe=te.recipe(name)):
        return te.GroupedLinear(2, 64, 32, bias=False) if grouped else te.Linear(64, 32)


@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("name", [*RECIPES, "delayed", "nvfp4"])
def test_module_moves_keep_class_bits_and_attributes(name: str, grouped: bool) -> None:
    module = build(name, grouped)
    parameter, before = module.weight, module.weight.clone()
    parameter.partition_dim = 1
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        module.to(dtype)
        assert module.weight is parameter and isinstance(parameter, nn.Parameter)
        assert type(parameter) is type(before) and same_bits(parameter, before) and parameter.dtype is dtype
        assert parameter.requires_grad and parameter.partition_dim == 1
    module.to("meta")
    assert type(module.weight) is type(before) and module.weight.partition_dim == 1
    assert {field.device.type for field in module.weight.fields.values()} == {"meta"}


@pytest.mark.parametrize("name", [None, *RECIPES])
def test_parameters_that_leave_the_meta_device_keep_attributes(name: str | None) -> None:
    with te.quantized_model_init(enabled=name is not None, recipe=name and te.recipe(name)):
        module = te.Linear(64, 32, device="meta")
    module.weight.partition_dim = 0
    module.to_empty(device="cpu")
    assert module.weight.device.type == "cpu" and module.weight.partition_dim == 0


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("name", RECIPES)
def test_meta_init_then_load(name: str, grouped: bool, assign: bool, tmp_path: Path) -> None:
    source = build(name, grouped)
    torch.save(source.state_dict(), tmp_path / "state.pt")
    with torch.device("meta"):
        module = build(name, grouped)
    assert isinstance(module.weight, te.QuantizedTensor) and module.weight.is_meta
    assert isinstance(module.weight, te.GroupedTensor) == grouped
    if not assign:
        module.to_empty(device="cpu")
    module.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True), assign=assign)
    assert type(module.weight) is type(source.weight) and isinstance(module.weight, nn.Parameter)
    assert same_bits(module.weight, source.weight) and module.weight.requires_grad


def test_meta_init_then_initialise_anew() -> None:
    with torch.device("meta"):
        module = build("block", False)
    module.to_empty(device="cpu").reset_parameters()
    assert isinstance(module.weight, te.QuantizedTensor) and 0.01 < module.weight.dequantize().std() < 0.03


@pytest.mark.parametrize("name", RECIPES)
def test_plain_values_load_into_quantized_weights_and_back(name: str) -> None:
    quantized, plain = build(name, False), te.Linear(64, 32)
    quantized.load_state_dict(plain.state_dict())
    assert same_bits(quantized.weight, quantized.weight.quantizer.quantize_fields(plain.weight.detach()))
    plain.load_state_dict(quantized.state_dict())
    assert type(plain.weight) is nn.Parameter and torch.equal(plain.weight, quantized.weight.dequantize())


@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("name", RECIPES)
def test_clipping_and_adamw_in_a_training_step(name: str, grouped: bool) -> None:
    module = build(name, grouped)
    before = module.weight.detach().dequantize()
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
    x = torch.randn(8, 64)
    with te.autocast(recipe=te.recipe(name)):
        y = module(x, [3, 5]) if grouped else module(x)
    (100 * y.square().mean()).backward()
    assert type(module.weight.grad) is torch.Tensor and module.weight.grad.shape == module.weight.shape
    assert torch.nn.utils.clip_grad_norm_(module.parameters(), 0.5) > 0.5
    norms = [p.grad.norm() for p in module.parameters()]
    assert torch.stack(norms).norm().item() == pytest.approx(0.5, rel=1e-3)
    optimizer.step()
    moved = (module.weight.detach().dequantize() - before).abs().mean()
    assert moved > 0.05 and isinstance(module.weight, te.QuantizedTensor)
    state = optimizer.state[module.weight]
    assert type(state["exp_avg"]) is type(state["exp_avg_sq"]) is torch.Tensor


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("name", RECIPES)
def test_compiled_steps_see_updates_of_the_storage(name: str, grouped: bool, backend: str) -> None:
    module = build(name, grouped)
    compiled = torch.compile(module, fullgraph=True, dynamic=False, backend=backend)
    x = torch.randn(8, 64)
    splits = torch.tensor([3, 5])
    outputs = []
    for _ in range(2):
        with te.autocast(recipe=te.recipe(name)):
            y = compiled(x, splits) if grouped else compiled(x)
            eager = module(x, splits) if grouped else module(x)
        torch.testing.assert_close(y, eager, rtol=1e-3, atol=1e-3)
        outputs.append(y)
        y.sum().backward()
        with torch.no_grad():
            module.weight.mul_(2.0)
    assert not torch.allclose(outputs[0], outputs[1])


def test_weights_of_delayed_scaling_are_restored_bit_for_bit_from_a_file() -> None:
    """The file knows their format, which is that of current scaling."""
    with te.quantized_model_init(recipe=te.DelayedScaling()):
        source, target = te.Linear(33, 50), te.Linear(33, 50)
    file = io.BytesIO()
    torch.save(source.state_dict(), file)
    file.seek(0)
    target.load_state_dict(torch.load(file, weights_only=True))
    assert same_bits(target.weight, source.weight)
