"""Results handed out as FP8, on CPU: the two definitions one after the other, which the compiler sees and fuses."""

import pytest
import torch

from te_models.kernels.activation import activation, activation_quantized, gated_activation, gated_activation_quantized
from te_models.kernels.norm import layer_norm, layer_norm_quantized, rms_norm, rms_norm_quantized
from te_models.kernels.permute import permute, permute_quantized, sort_by_expert
from te_models.kernels.quantize import QuantizedOutput, amax, quantize_blockwise_both, quantize_per_tensor
from tests.kernels.triton.quantize.quantize_cases import assert_bitwise

BLOCKS = QuantizedOutput(block=32, scale_kind="e8m0", columnwise=True)
ONE_SCALE = QuantizedOutput()
E4M3 = torch.float8_e4m3fn


def check(got: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    for a, b in zip(got, expected, strict=True):
        assert_bitwise(a, b)


def by_two_steps(y: torch.Tensor, output: QuantizedOutput, scale: torch.Tensor | None) -> list[torch.Tensor]:
    y = y.flatten(0, -2)
    if scale is not None:
        return [quantize_per_tensor(y, scale, E4M3), amax(y)]
    return list(quantize_blockwise_both(y, (1, 32), E4M3, "e8m0"))


@pytest.mark.parametrize("output", [BLOCKS, ONE_SCALE])
def test_equals_the_two_steps(output) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3, 7, 40, generator=generator).bfloat16()
    weight, bias = torch.randn(2, 40, generator=generator).bfloat16()
    scale = torch.tensor(3.7) if output.block == 0 else None
    *copies, rstd = rms_norm_quantized(x, weight, 1e-5, output, scale)
    check(copies, by_two_steps(rms_norm(x, weight, 1e-5), output, scale))
    assert torch.allclose(rstd, (x.float().square().mean(-1) + 1e-5).rsqrt())
    *copies, mean, rstd = layer_norm_quantized(x, weight, bias, 1e-5, output, scale, zero_centered=True)
    check(copies, by_two_steps(layer_norm(x, weight, bias, 1e-5, zero_centered=True), output, scale))
    assert torch.allclose(mean, x.float().mean(-1), atol=1e-6)
    assert torch.allclose(rstd, (x.float().var(-1, correction=0) + 1e-5).rsqrt())
    p = torch.rand(3, 7, generator=generator)
    got = activation_quantized(x, "gelu", output, scale, probabilities=p)
    check(got, by_two_steps(activation(x, "gelu", probabilities=p), output, scale))
    got = gated_activation_quantized(x, "silu", output, scale, clamp=0.7, alpha=1.7, up_offset=1.0)
    check(got, by_two_steps(gated_activation(x, "silu", clamp=0.7, alpha=1.7, up_offset=1.0), output, scale))
    indices = torch.rand(7, 4, generator=generator).argsort(-1)[:, :2]
    for align in (32,) if output.columnwise else (1, 32):
        order = sort_by_expert(indices, 4, align=align)
        got = permute_quantized(x[0], order, output, scale)
        check(got, by_two_steps(permute(x[0], order), output, scale))


@pytest.mark.slow
def test_the_compiler_sees_the_definition() -> None:
    """No opaque op: one graph of torch operators, which Inductor fuses."""
    seen: list[str] = []

    def backend(graph: torch.fx.GraphModule, _):
        seen.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return graph

    def run(x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor) -> list[torch.Tensor]:
        return rms_norm_quantized(x, weight, 1e-5, BLOCKS) + activation_quantized(x, "silu", ONE_SCALE, scale)

    x, weight, scale = torch.randn(4, 64).bfloat16(), torch.ones(64), torch.tensor(2.0)
    check(torch.compile(run, fullgraph=True, backend=backend)(x, weight, scale), run(x, weight, scale))
    assert seen and not [name for name in seen if "te_models" in name]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"block": 64}, "block is 64"),
        ({"fp8_dtype": torch.bfloat16}, "fp8_dtype is torch.bfloat16"),
        ({"scale_kind": "e4m3"}, "scale_kind is 'e4m3'"),
        ({"rowwise": False}, "rowwise and columnwise are False"),
    ],
)
def test_impossible_outputs_are_refused(options, says) -> None:
    with pytest.raises(ValueError, match=says):
        QuantizedOutput(**options)


def test_a_scale_is_given_where_one_is_used() -> None:
    for output, scale in ((ONE_SCALE, None), (BLOCKS, torch.ones(()))):
        with pytest.raises(ValueError, match=f"block is {output.block}"):
            rms_norm_quantized(torch.ones(2, 4), None, 1e-5, output, scale)


def test_blocks_that_would_span_two_experts_are_refused() -> None:
    order = sort_by_expert(torch.tensor([[0], [1]]), 2)
    with pytest.raises(ValueError, match=r"span two experts; allowed: .*align=32"):
        permute_quantized(torch.ones(2, 4), order, BLOCKS)
