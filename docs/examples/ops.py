"""Examples of the names of `te_models.layers.ops`. A cell begins with the names that it shows; each runs by itself."""

# %% Sequential, Linear, RMSNorm, LayerNorm, SwiGLU, FusibleOperation
import torch
from te_models.layers import MXFP8BlockScaling, autocast
from te_models.layers.ops import FusibleOperation, LayerNorm, Linear, RMSNorm, Sequential, SwiGLU

mlp = Sequential(RMSNorm(64), Linear(64, 256, bias=False), SwiGLU(), Linear(128, 64), LayerNorm(64))
assert all(isinstance(operation, FusibleOperation) for operation in mlp)
with autocast(recipe=MXFP8BlockScaling()):
    y = mlp(torch.randn(32, 64))  # [32, 64]; norm and activation write the GEMMs' FP8 inputs
y.sum().backward()

# %% BasicLinear, Bias
import torch
from te_models.layers.ops import BasicLinear, Bias, Sequential

print(Sequential(BasicLinear(64, 96), Bias(96))(torch.randn(8, 64)).shape)  # what Linear(64, 96) consists of

# %% GELU, QGELU, ReLU, SReLU, SiLU, ActivationOperation
import torch
from te_models.layers.ops import GELU, QGELU, ActivationOperation, ReLU, SReLU, SiLU

x = torch.randn(8, 64)
for activation in (GELU(), QGELU(), ReLU(), SReLU(), SiLU()):
    assert isinstance(activation, ActivationOperation) and activation(x).shape == (8, 64)

# %% GLU, GEGLU, QGEGLU, ReGLU, SReGLU, ClampedSwiGLU, GatedActivation
import torch
from te_models.layers.ops import GEGLU, GLU, QGEGLU, ClampedSwiGLU, GatedActivation, ReGLU, SReGLU, SwiGLU

x = torch.randn(8, 64)
for gated in (GLU(), GEGLU(), QGEGLU(), ReGLU(), SReGLU(), ClampedSwiGLU()):  # the input holds gate and up side by side
    assert isinstance(gated, GatedActivation) and gated(x).shape == (8, 32)
print(SwiGLU(glu_interleave_size=8)(x).shape)  # or in alternating blocks of eight columns

# %% GroupedLinear, ScaledSwiGLU, ScaledGEGLU, ScaledClampedQGeGLU, ScaledSReLU, ScaledGLU, ScaledActivation
import torch
from te_models.layers.ops import (
    GroupedLinear,
    ScaledActivation,
    ScaledClampedQGeGLU,
    ScaledGEGLU,
    ScaledGLU,
    ScaledSReLU,
    ScaledSwiGLU,
    Sequential,
)

experts = Sequential(GroupedLinear(4, 64, 256, bias=False), ScaledSwiGLU(), GroupedLinear(4, 128, 64, bias=False))
rows, m_splits, probabilities = torch.randn(10, 64), torch.tensor([3, 0, 5, 2]), torch.rand(10)
print(experts(rows, m_splits, probabilities, m_splits).shape)  # extra inputs in the order of the operations
for gated in (ScaledGEGLU(), ScaledClampedQGeGLU(limit=7.0)):
    assert isinstance(gated, ScaledGLU)
assert isinstance(ScaledSReLU(), ScaledActivation)

# %% AddExtraInput, MakeExtraOutput
import torch
from te_models.layers.ops import AddExtraInput, Linear, MakeExtraOutput, Sequential

hidden, residual = Sequential(MakeExtraOutput(), Linear(64, 64))(torch.randn(8, 64))
y = Sequential(Linear(64, 64), AddExtraInput())(hidden, residual)

# %% ConstantScale, Dropout, Identity, L2Norm, Reshape
import torch
from te_models.layers.ops import ConstantScale, Dropout, Identity, L2Norm, Reshape, Sequential

chain = Sequential(ConstantScale(0.5), Dropout(0.1), Identity(), L2Norm(), Reshape(-1, 4, 16))
print(chain(torch.randn(8, 64)).shape)  # [8, 4, 16]

# %% Quantize
import torch
from te_models.layers import MXFP8BlockScaling, MXFP8Tensor, autocast
from te_models.layers.ops import Quantize

with autocast(recipe=MXFP8BlockScaling()):
    x = Quantize()(torch.randn(32, 64))
assert isinstance(x, MXFP8Tensor)

# %% AllGather, AllReduce, ReduceScatter
import torch
import torch.distributed as dist
from te_models.layers.ops import AllGather, AllReduce, ReduceScatter, Sequential

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
group = dist.group.WORLD
print(Sequential(AllGather(group), AllReduce(group), ReduceScatter(group))(torch.randn(8, 64)).shape)
dist.destroy_process_group()

# %% BasicOperation, Computed, Gradients, OperationContext, OperationCall
import torch
from te_models.layers.ops import BasicOperation, Computed, Gradients, OperationCall, OperationContext


class Square(BasicOperation):
    """`y = x^2`."""

    def op_forward(self, ctx: OperationContext, x: torch.Tensor, call: OperationCall) -> Computed:
        ctx.save_for_backward(x)
        return Computed(x * x)

    def op_backward(self, ctx: OperationContext, dy: torch.Tensor, extra_gradients) -> Gradients:
        (x,) = ctx.saved
        return Gradients(2 * x * dy)


x = torch.randn(4, requires_grad=True)
Square()(x).sum().backward()
assert torch.allclose(x.grad, 2 * x)

# %% OperationArguments, Needs
import torch
from te_models.layers.ops import BasicOperation, Computed, Gradients, Needs, OperationArguments


class Gain(BasicOperation):
    """`y = g x` with a learned number g."""

    def __init__(self):
        super().__init__()
        self.gain = torch.nn.Parameter(torch.ones(()))

    def fuser_arguments(self, device_type):
        return OperationArguments(parameters=(self.gain,))

    def op_forward(self, ctx, x, call):
        ctx.save_for_backward(x, call.parameters[0])
        return Computed(call.parameters[0] * x)

    def op_backward(self, ctx, dy, extra_gradients):
        (x, gain), needs = ctx.saved, ctx.needs
        assert isinstance(needs, Needs)
        return Gradients(gain * dy if needs.input else None, ((dy * x).sum() if needs.parameters[0] else None,))


gain = Gain()
gain(torch.randn(4)).sum().backward()
print(gain.gain.grad)

# %% FUSIONS, FusedOperation, OperationFuser
import torch
from te_models.layers.ops import FUSIONS, FusedOperation, Linear, OperationFuser, SiLU

assert all(issubclass(fusion, FusedOperation) for fusion in FUSIONS)
group = OperationFuser([Linear(64, 64), SiLU()])  # Sequential makes one for neighbouring operations
print([type(part).__name__ for part, _, _ in group.forward_parts], group(torch.randn(8, 64)).shape)

# %% QuantizedRows
import torch
from te_models.layers import MXFP8Quantizer, MXFP8TensorStorage
from te_models.layers.ops import QuantizedRows

storage = MXFP8TensorStorage.quantize(torch.randn(32, 64), MXFP8Quantizer())
rows = QuantizedRows(storage, torch.Size((4, 8, 64)))  # an input [4, 8, 64] of an operation that takes quantized data
print(rows.dequantize().shape)
