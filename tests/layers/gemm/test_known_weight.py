"""A stored weight that a token was multiplied by: the next one asks less, and gets the same bits or the same error."""

import copy
import io
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

import te_models.layers.quantizer as quantizers
from te_models.kernels.backend import using_backend
from te_models.kernels.gemm import few_rows
from te_models.kernels.gemm.backends import gemm_counts, reset_gemm_counts
from te_models.layers import Linear, MXFP8BlockScaling, QuantizedTensor, autocast
from te_models.layers.gemm import plain
from te_models.layers.gemm.plain import stored_linear
from tests.compare import Operations

FORMATS: list[quantizers.Quantizer] = [
    quantizers.Float8CurrentScalingQuantizer(),
    quantizers.Float8BlockQuantizer(),
    quantizers.Float8BlockQuantizer(block_scaling_dim=1, force_pow_2_scales=False),
    quantizers.MXFP8Quantizer(),
    quantizers.NVFP4Quantizer(),
    quantizers.Int4Quantizer(),
    quantizers.Int4Quantizer(group_size=128, zero_points=True),
    quantizers.Int8Quantizer(),
]
OUT, IN = 272, 512


def weight_in(form: quantizers.Quantizer) -> QuantizedTensor:
    values = torch.randn(OUT, IN, generator=torch.Generator().manual_seed(3)).bfloat16()
    return form.quantize(values)


def rows(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(*shape, IN, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def asked(x: Tensor, weight: QuantizedTensor, bias: Tensor | None = None) -> Tensor:
    """Return the product with every question asked."""
    before, weight.few_rows = weight.few_rows, None
    try:
        return stored_linear(x, weight, bias)
    finally:
        weight.few_rows = before


@pytest.fixture(autouse=True)
def no_gradients() -> Iterator[None]:
    with torch.no_grad(), using_backend("compiled" if few_rows.library.STORED.against() == "" else "definition"):
        yield


@pytest.fixture
def unasked(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Return what makes the questions an error."""

    def refuse(*_: object) -> None:
        raise AssertionError("asked again")

    return lambda: monkeypatch.setattr(plain, "stored_for_few_rows", refuse)


needs_library = pytest.mark.skipif(few_rows.library.STORED.against() != "", reason="no library on this CPU")


@needs_library
@pytest.mark.parametrize("form", FORMATS, ids=str)
def test_the_next_token_has_the_bits_and_asks_nothing(form: quantizers.Quantizer, unasked: Callable[[], None]) -> None:
    weight, bias = weight_in(form), torch.randn(OUT).bfloat16()
    several = [rows(1, 1), rows(4, 1), rows(1), rows(16)]
    expected = [(asked(x, weight), asked(x, weight, bias)) for x in several]
    stored_linear(several[0], weight, None)
    unasked()
    for x, (plainly, biased) in zip(several, expected, strict=True):
        assert torch.equal(stored_linear(x, weight, None), plainly)
        assert torch.equal(stored_linear(x, weight, bias), biased)
        assert torch.equal(stored_linear(x.mT.contiguous().mT if x.dim() > 1 else x, weight, bias), biased)


@needs_library
@pytest.mark.parametrize("form", FORMATS, ids=str)
def test_a_weight_that_changes_in_place_is_the_new_one(form: quantizers.Quantizer, unasked: Callable[[], None]) -> None:
    weight, x = weight_in(form), rows(1, 1)
    first = stored_linear(x, weight, None)
    weight.quantize_(torch.randn(OUT, IN, generator=torch.Generator().manual_seed(5)))
    expected = asked(x, weight)
    unasked()
    assert torch.equal(stored_linear(x, weight, None), expected) and not torch.equal(first, expected)


@needs_library
@pytest.mark.parametrize("form", FORMATS, ids=str)
@pytest.mark.parametrize("how", ["another", "set_", "transposed"])
def test_fields_that_are_replaced_are_found_out(form: quantizers.Quantizer, how: str) -> None:
    weight, other, x = weight_in(form), form.quantize(rows(OUT)), rows(1, 1)
    stored_linear(x, weight, None)
    for name, field in other.fields.items():
        if how == "set_":
            getattr(weight, name).data = field
        else:
            field = field.mT.contiguous().mT if how == "transposed" and field.dim() == 2 else field
            setattr(weight, name, field)
    assert torch.equal(stored_linear(x, weight, None), asked(x, weight))
    if how == "transposed":  # rows that do not lie side by side are dequantized, and summed in another order
        torch.testing.assert_close(stored_linear(x, weight, None), asked(x, other), rtol=2**-6, atol=2**-2)
    else:
        assert torch.equal(stored_linear(x, weight, None), asked(x, other))


@needs_library
def test_a_weight_without_the_copy_that_was_read_is_dequantized() -> None:
    weight, x = weight_in(quantizers.MXFP8Quantizer()), rows(1, 1)
    stored_linear(x, weight, None)
    weight.update_usage(rowwise=False)
    assert torch.equal(stored_linear(x, weight, None), asked(x, weight))


@needs_library
@pytest.mark.parametrize("threads", [1, 2])
def test_threads_are_those_of_the_call(threads: int, unasked: Callable[[], None]) -> None:
    weight, x, before = weight_in(quantizers.MXFP8Quantizer()), rows(16), torch.get_num_threads()
    expected = stored_linear(x, weight, None)
    unasked()
    try:
        torch.set_num_threads(threads)
        assert torch.equal(stored_linear(x, weight, None), expected)
    finally:
        torch.set_num_threads(before)


@needs_library
@pytest.mark.parametrize(
    "region",
    [
        lambda: using_backend("definition"),
        lambda: torch.autocast("cpu", torch.bfloat16),
        torch.enable_grad,
        torch.inference_mode,
        Operations,
        nullcontext,
    ],
    ids=["definition", "autocast", "gradients", "inference", "mode", "nothing"],
)
def test_in_every_region_it_is_what_the_questions_lead_to(region: Callable[[], AbstractContextManager[object]]) -> None:
    weight, x = weight_in(quantizers.NVFP4Quantizer()), rows(2, 1)
    stored_linear(x, weight, None)
    with region() as seen:
        found = stored_linear(x, weight, None)
    with region():
        expected = asked(x, weight)
    assert torch.equal(found, expected)
    if isinstance(seen, Operations):
        assert any("stored_linear" in str(op) for op in seen.found), "a mode sees the operation"


@needs_library
def test_derivatives_are_not_lost() -> None:
    weight = weight_in(quantizers.MXFP8Quantizer())
    x = rows(1, dtype=torch.float32)
    stored_linear(x, weight, None)
    with torch.enable_grad():
        wanted = x.clone().requires_grad_()
        stored_linear(wanted, weight, None).sum().backward()
    assert wanted.grad.abs().sum() > 0
    assert weight.few_rows is not None
    _, known = weight.few_rows
    with forward_ad.dual_level():  # which no_grad does not end
        assert known.multiply(x, vars(weight), None) is None
    assert known.multiply(x, vars(weight), None) is not None


@needs_library
def test_what_does_not_fit_is_the_same_error() -> None:
    weight, x = weight_in(quantizers.MXFP8Quantizer()), rows(1, 1)
    stored_linear(x, weight, None)
    for wrong, bias in ((x[..., :-1], None), (x, torch.zeros(OUT - 1).bfloat16())):
        with pytest.raises(RuntimeError) as found:
            stored_linear(wrong, weight, bias)
        with pytest.raises(RuntimeError) as expected:
            asked(wrong, weight, bias)
        assert str(found.value) == str(expected.value)
    many, empty = rows(17), rows(1)[:0]
    for other in (many, empty, x.float(), x.half(), x.double()):
        assert torch.equal(stored_linear(other, weight, None), asked(other, weight))
    assert torch.equal(stored_linear(x, weight, torch.ones(OUT)), asked(x, weight, torch.ones(OUT)))


@needs_library
def test_copies_and_files_know_nothing_and_compute_the_same() -> None:
    layer = Linear(IN, OUT, bias=False)
    layer.weight = torch.nn.Parameter(weight_in(quantizers.MXFP8Quantizer()), requires_grad=False)
    x = rows(1, 1)
    expected = layer(x)
    layer.weight.marked = 7
    copied = copy.deepcopy(layer)
    file = io.BytesIO()
    torch.save(layer.weight, file)
    file.seek(0)
    read = torch.load(file, weights_only=True)
    assert layer.weight.user_attributes() == {"marked": 7}
    with torch.no_grad():
        copied.weight.quantize_(torch.zeros(OUT, IN))
    assert not copied(x).any()
    assert torch.equal(layer(x), expected) and torch.equal(stored_linear(x, read, None), expected)


@needs_library
def test_every_product_is_counted_and_recipes_come_first() -> None:
    layer = Linear(IN, OUT, bias=False)
    layer.weight = torch.nn.Parameter(weight_in(quantizers.MXFP8Quantizer()), requires_grad=False)
    x = rows(1, 1)
    reset_gemm_counts()
    for _ in range(3):
        layer(x)
    assert gemm_counts()["stored_linear", "few_rows"] == 3
    with autocast(recipe=MXFP8BlockScaling()):
        under = layer(x)
    layer.weight.few_rows = None
    with autocast(recipe=MXFP8BlockScaling()):
        assert torch.equal(layer(x), under)
