"""What runs in every step asks no device for a number and copies none to it: either makes the host wait.

On a CPU nothing waits, but the operations that would are the same: `lift_fresh` is what makes a tensor of numbers of
the host, `_local_scalar_dense` what reads one. test_fake_gpu has whole passes."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from te_models import RopeConfig
from te_models.layers import DelayedScaling, FusedAdamW, Linear, autocast
from te_models.layers.module.delayed_scaling import update_delayed_scaling
from te_models.layers.recipe.base import Format
from te_models.model.build import Build
from te_models.model.embedding import Embedding
from te_models.model.rotary import RotaryEmbedding
from tests.build import VARIANTS

WAITS = (torch.ops.aten.lift_fresh.default, torch.ops.aten._local_scalar_dense.default)


class Refused(TorchDispatchMode):
    """Makes an error of what would wait for a device."""

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict | None = None) -> Any:
        assert func not in WAITS, f"{func} makes the host wait for a device"
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("wait", [lambda: torch.tensor([1.0]), lambda: torch.ones(()).item()])
def test_what_waits_is_found(wait) -> None:
    with pytest.raises(AssertionError, match="makes the host wait"), Refused():
        wait()


@pytest.mark.parametrize("fp8_format", [Format.HYBRID, Format.E4M3])
def test_update_of_delayed_scaling(fp8_format: Format) -> None:
    layer, x = Linear(32, 16), torch.ones(4, 32, requires_grad=True)
    with autocast(recipe=DelayedScaling(fp8_format=fp8_format)):
        y = layer(x)
    y.sum().backward()
    with Refused():
        update_delayed_scaling([layer])
    largest = [448.0, 448.0, 57344.0 if fp8_format is Format.HYBRID else 448.0]
    # of the inputs and of the gradients, all ones
    assert layer.fp8_scale[::2, 0].tolist() == largest[::2]


def test_embedding_multiplied_by_a_rounded_root() -> None:
    embedding = Embedding(VARIANTS["softcaps"], Build(params_dtype=torch.bfloat16))
    ids = torch.zeros(1, 3, dtype=torch.int64)
    with Refused():
        embedding(ids, torch.arange(3)[None])


def test_rotary_embedding_that_depends_on_the_length() -> None:
    factors = {"short_factor": (1.0, 2.0), "long_factor": (3.0, 4.5)}
    rope = RopeConfig(scaling="longrope", original_max_position_embeddings=8, **factors)
    rotary = RotaryEmbedding(rope, 4, 64)
    for length, divisors in ((8, (1.0, 2.0)), (9, (3.0, 4.5))):
        positions = torch.arange(length)[None]
        with Refused():
            cos, sin = rotary(positions)
        angles = positions[..., None] / (torch.tensor(divisors) * torch.tensor([1.0, 100.0]))
        expected = torch.stack((angles.cos(), angles.sin())) * rotary.attention_factor
        torch.testing.assert_close(torch.stack((cos, sin)), expected)


@pytest.mark.parametrize("moment_dtype", ["float32", "bfloat16", "float8"])
def test_optimizer_step_with_a_flag(moment_dtype: str) -> None:
    """Steps are counted but where the flag is set."""
    layers = nn.ModuleList(Linear(32, 64, params_dtype=torch.bfloat16) for _ in range(2))
    optimizer = FusedAdamW(layers.parameters(), master_weights=True, moment_dtype=moment_dtype)
    optimizer.init_state()
    for parameter in layers.parameters():
        parameter.grad = torch.ones_like(parameter)
    on, off = torch.ones(()), torch.zeros(())
    with Refused():
        for noop in (None, off, on):
            optimizer.step(noop=noop)
    assert [state["step"].item() for state in optimizer.state.values()] == [2.0] * 4
