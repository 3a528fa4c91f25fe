"""What Transformer Engine's GroupedLinear takes besides rows and splits: leading dimensions, buffers, a bias."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import te_models.layers as te
from te_models.layers import ops

SPLITS, ROWS, K, N = [20, 0, 9], 33, 32, 48  # four rows belong to no group


def layer(**options: object) -> te.GroupedLinear:
    """A layer with biases that show."""
    torch.manual_seed(0)
    made = te.GroupedLinear(3, K, N, **options)
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if name.startswith("bias"):
                parameter.normal_()
    return made


def run(experts: te.GroupedLinear, x: Tensor, *arguments: object, fp8: bool = True) -> list[Tensor]:
    """The output and all gradients."""
    experts.zero_grad()
    x = x.clone().requires_grad_()
    with te.autocast(enabled=fp8, recipe=te.MXFP8BlockScaling()):
        y = experts(x, *arguments)
    y.backward(torch.linspace(-1, 1, y.numel()).view(y.shape))
    return [y.detach(), x.grad, *(p.grad for p in experts.parameters())]


@pytest.mark.parametrize("shape", [(3, 11, K), (3, 1, 11, K)])
def test_leading_dimensions_are_rows(shape: tuple[int, ...]) -> None:
    experts, x = layer(), torch.randn(ROWS, K)
    expected = run(experts, x, SPLITS)
    found = run(experts, x.view(shape), SPLITS)
    assert found[0].shape == (*shape[:-1], N) and found[1].shape == shape
    for a, b in zip(expected, found, strict=True):
        assert torch.equal(a, b.view(a.shape))


@pytest.mark.parametrize("compiled", [False, True])
def test_buffers_get_the_output_and_the_gradient(compiled: bool) -> None:
    """Rows past the last group stay as they were."""
    experts, x = layer(), torch.randn(ROWS, K)
    splits = torch.tensor(SPLITS)
    expected = run(experts, x, splits, fp8=not compiled)
    if compiled:
        torch._dynamo.reset()
        experts.forward = torch.compile(experts.forward, fullgraph=True, backend="aot_eager")
    out, dgrad_out = torch.full((ROWS, N), 7.0), torch.full((ROWS, K), 9.0)
    memory = out.data_ptr()
    found = run(experts, x, splits, None, out, dgrad_out, fp8=not compiled)
    assert found[0].data_ptr() == memory and torch.equal(out.detach(), found[0])
    assert torch.equal(dgrad_out, found[1])
    for a, b, left in ((expected[0], found[0], 7.0), (expected[1], dgrad_out, 9.0)):
        assert torch.equal(a[:29], b[:29]) and bool((b[29:] == left).all())
    torch.testing.assert_close(expected[2:], found[2:], rtol=0, atol=0)
    again = run(experts, x, splits, None, out.detach(), None, fp8=not compiled)
    assert torch.equal(again[0], found[0]) and torch.equal(again[1], expected[1])


def test_buffers_that_do_not_fit_are_refused() -> None:
    experts, x = layer(), torch.randn(ROWS, K)
    with pytest.raises(ValueError, match=r"out is torch.float32 \(32, 48\) on cpu; allowed: torch.float32 \(33, 48\)"):
        experts(x, SPLITS, out=torch.zeros(ROWS - 1, N))
    with pytest.raises(ValueError, match=r"dgrad_out is torch.bfloat16 .*; allowed: torch.float32 \(33, 32\) on cpu"):
        experts(x, SPLITS, dgrad_out=torch.zeros(ROWS, K, dtype=torch.bfloat16))
    for buffer in (torch.zeros(N, ROWS).t(), torch.zeros(ROWS, N, requires_grad=True)):
        with pytest.raises(ValueError, match=r"allowed: a contiguous buffer, out\.detach\(\) where it was used before"):
            experts(x, SPLITS, out=buffer)


@pytest.mark.parametrize("options", [{}, {"single_grouped_weight": False}], ids=["grouped", "per_gemm"])
def test_the_biases_are_returned(options: dict[str, bool]) -> None:
    experts, apart = layer(**options), layer(return_bias=True, **options)
    apart.load_state_dict(experts.state_dict())
    x = torch.randn(ROWS, K, dtype=torch.bfloat16)
    y, biases = apart(x, SPLITS)
    assert len(biases) == 3 and all(bias.shape == (N,) and bias.dtype is torch.bfloat16 for bias in biases)
    with_bias = torch.cat([rows + bias for rows, bias in zip(y[:29].split(SPLITS), biases, strict=True)])
    assert torch.equal(with_bias, experts(x, SPLITS)[:29])
    assert layer(bias=False, return_bias=True)(x, SPLITS)[1] is None


@pytest.mark.parametrize(
    "m_splits, message",
    [
        ([20, 13], r"m_splits has shape \(2,\); allowed: \(3,\), one per GEMM"),
        ([], r"m_splits has shape \(0,\); allowed: \(3,\), one per GEMM"),
        ([[20, 0, 13]], r"m_splits has shape \(1, 3\); allowed: \(3,\), one per GEMM"),
        ([20.0, 0.0, 13.0], "m_splits has dtype torch.float32; allowed: an integer dtype"),
        ([True, False, True], "m_splits has dtype torch.bool; allowed: an integer dtype"),
        ([34, -1, 0], r"m_splits is \[34, -1, 0\]; allowed: numbers from 0 on that add up to at most 33"),
        ([20, 10, 4], r"m_splits is \[20, 10, 4\]; allowed: .*, and these add up to 34"),
    ],
)
@pytest.mark.parametrize("as_tensor", [False, True])
def test_wrong_splits_are_named(m_splits: list, message: str, as_tensor: bool) -> None:
    with pytest.raises(ValueError, match=message):
        layer()(torch.randn(ROWS, K), torch.tensor(m_splits) if as_tensor else m_splits)


@pytest.mark.parametrize("strict", [True, False], ids=["strict", "lenient"])
@pytest.mark.parametrize("grouped", [True, False], ids=["grouped", "per-GEMM"])
@pytest.mark.parametrize("make", [te.GroupedLinear, ops.GroupedLinear], ids=["module", "operation"])
def test_each_parameter_is_in_one_layout(make: Callable[..., nn.Module], grouped: bool, strict: bool) -> None:
    one, other = (make(5, 32, 16, single_grouped_weight=layout) for layout in (grouped, not grouped))
    before = {name: value.clone() for name, value in one.state_dict().items()}
    for kind in ("weight", "bias"):
        both = one.state_dict() | {key: value for key, value in other.state_dict().items() if key.startswith(kind)}
        with pytest.raises(RuntimeError, match=rf"has {kind} and {kind}0, \.\.\., {kind}4; allowed: one of the two"):
            one.load_state_dict(both, strict=strict)
    members = make(5, 32, 16, single_grouped_weight=False).state_dict()
    some = make(5, 32, 16).state_dict() | {key: members[key] for key in ("bias1", "bias3")}
    with pytest.raises(RuntimeError, match="has bias and bias1, bias3; allowed: one of the two layouts"):
        nn.ModuleDict({"experts": one})["experts"].load_state_dict(some, strict=strict)
    assert all(torch.equal(value, before[name]) for name, value in one.state_dict().items())
