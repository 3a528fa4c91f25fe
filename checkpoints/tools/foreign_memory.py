"""State dicts of other systems' modules to ours and back, in memory."""

from __future__ import annotations

from collections.abc import Mapping

from te_models.config import ModelConfig
from te_models.lazy import torch

from ..foreign.transformer_engine import transformer_engine
from ..io.boxes import full
from ..io.errors import CheckpointError
from ..io.store import MemoryStore
from ..mapping.param_shapes import ExpertLayout, check_layout
from ..mapping.plan import make_plan
from ..mapping.stream import carry_out
from ..mapping.te_namespace import te_namespace
from ..mapping.tensor_map import Namespace
from .foreign import Opened, read_modules

_WHERE = "the state dict"


def import_state_dict(
    state_dict: Mapping[str, torch.Tensor],
    config: ModelConfig,
    *,
    system: str | None = None,
    layout: ExpertLayout = "grouped",
    qkv_weight_interleaved: bool = True,
) -> dict[str, torch.Tensor]:
    """Return a state dict of another system's modules as one that `GPTModel.load_state_dict` takes.

    Arguments:
        state_dict: plain tensors; Transformer Engine's `_extra_state` is left out, and nothing in it is read.
        system: "transformer_engine", "megatron" (all layers on one rank), "te_models" or "transformers"; None: told by
            the names.
        layout: of experts, as the model has it.
        qkv_weight_interleaved: as for `import_checkpoint`.

    Raises CheckpointError for tensors that the model does not have.
    """
    check_layout(layout)
    found = read_modules(_in_memory(state_dict), _WHERE, config, system, interleaved=qkv_weight_interleaved)
    return _carried(found, te_namespace(config, layout))


def export_state_dict(
    state_dict: Mapping[str, torch.Tensor],
    config: ModelConfig,
    *,
    layout: ExpertLayout = "per-gemm",
    qkv_weight_interleaved: bool = True,
) -> dict[str, torch.Tensor]:
    """Return the state dict of a `GPTModel` with the names of Transformer Engine's modules: what
    `export_checkpoint(..., to="transformer_engine")` writes. state_dict: of plain tensors, in either expert layout.

    Raises CheckpointError for a model that those modules cannot express."""
    grouped = check_layout(layout) == "grouped"
    found = read_modules(_in_memory(state_dict), _WHERE, config, "te_models")
    return _carried(found, transformer_engine(grouped=grouped, interleaved=qkv_weight_interleaved).namespace(config))


def _in_memory(state_dict: Mapping[str, torch.Tensor]) -> MemoryStore:
    plain = {name: value for name, value in state_dict.items() if isinstance(value, torch.Tensor)}
    for name, value in plain.items():
        if type(value) not in (torch.Tensor, torch.nn.Parameter):
            raise CheckpointError(f"{name!r} is a {type(value).__name__}; allowed: plain tensors")
    return MemoryStore(plain)


def _carried(found: Opened, target: Namespace) -> dict[str, torch.Tensor]:
    """Views of what is in memory, and new tensors of what is put together."""
    held = found.store.tensors
    memory = MemoryStore({name: found.store.read(name, full(info.shape)) for name, info in held.items()})
    return carry_out(make_plan(held, found.namespace, target, where=_WHERE, unused=found.unused), memory)
