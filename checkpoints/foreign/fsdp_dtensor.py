"""Megatron-FSDP's checkpoints (`fsdp_dtensor`): torch's DCP with Megatron-Core's names, each layer and expert apart.

The first projection of a gated MLP is two tensors, `weight_w` and `weight_v`, so that either half can be split. Moments
are named by parameter: `optimizer.state.module.module.module.decoder.layers.0.mlp.linear_fc2.weight.exp_avg`.
"""

import re
from collections.abc import Iterator, Mapping

from te_models.config import ModelConfig

from ..families.base.family import HasShape
from ..mapping.blocks import joined
from ..mapping.layout_ops import At, Layout, Stack
from ..mapping.param_shapes import expected_tensors
from .megatron import MEGATRON, check_covered, named_norm, placed
from .system import System

PREFIX = "model.module."
_GATED = re.compile(r"mlp\.(shared_experts\.)?linear_fc1\.(weight|bias)")


def _weights(config: ModelConfig, found: Mapping[str, HasShape] | None) -> Iterator[tuple[str, Layout]]:
    check_covered(config)
    for name, shape in expected_tensors(config).items():
        match = re.fullmatch(r"decoder\.layers\.(\d+)\.(.+)", name)
        if match is None:
            yield name, At(name)
            continue
        rest, at = match[2], f"decoder.layers.{match[1]}."
        if rest.startswith("mlp.experts."):
            yield name, Stack(*(_halves(config, name, n) for n in _experts(rest, at, shape[0], found)))
        elif _GATED.fullmatch(rest):
            yield name, _halves(config, name, at + rest)
        else:
            layout = placed(config, int(match[1]), rest, at)
            yield name, At(named_norm(at, rest, found)) if layout == At(at + rest) else layout


def _halves(config: ModelConfig, ours: str, name: str) -> Layout:
    """Return where a parameter, or an expert's part of it, is stored: gate and up apart. ours: its name."""
    if not config.mlp.gated or ".linear_fc1." not in ours:
        return At(name)
    return joined(config, ours, At(f"{name}_w"), At(f"{name}_v"))


def _experts(rest: str, at: str, count: int, found: Mapping[str, HasShape] | None) -> list[str]:
    """Return the names of an expert's parameter, in modules of all experts or of one."""
    part, _, kind = rest.removeprefix("mlp.experts.").rpartition(".")
    alone = found is not None and any(name.startswith(f"{at}mlp.experts.local_experts.0.") for name in found)
    names = (f"local_experts.{e}.{part}.{kind}" if alone else f"{part}.{kind}{e}" for e in range(count))
    return [f"{at}mlp.experts.{name}" for name in names]


FSDP_DTENSOR = System(
    "Megatron-FSDP",
    _weights,
    lambda name, state: f"optimizer.state.module.module.module.{name}.{state}",
    (),
    MEGATRON.is_other,
    prefix=PREFIX,
)
