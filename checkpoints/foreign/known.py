"""Which training system a checkpoint is of: told by the names that it has."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

from te_models.config import ModelConfig

from ..families import FAMILIES
from ..families.base.family import HasShape, first_that_expresses
from ..io.errors import CheckpointError, shorten
from ..plan.layout_ops import At, Layout
from ..plan.param_shapes import expected_tensors
from .megatron import MEGATRON
from .system import System, is_optimizer
from .torchtitan import TORCHTITAN


def _own(config: ModelConfig, found: Mapping[str, HasShape] | None) -> Iterator[tuple[str, Layout]]:
    for name in expected_tensors(config):
        yield name, At(name)


def _hugging_face(config: ModelConfig, found: Mapping[str, HasShape] | None) -> Iterator[tuple[str, Layout]]:
    family = first_that_expresses(FAMILIES.values(), config)
    names = list(family.forms.values())
    if found is not None:
        names = [FAMILIES[family.model_type].forms[family.best_form(config, found)[0] or family.names.form]]
    yield from names[0].weights(config)


def _moment(name: str, state: str) -> str:
    return f"optimizer.state.{name}.{state}"


OWN = System("te_models", _own, _moment, None, is_optimizer)
HUGGING_FACE = System("transformers", _hugging_face, _moment, None, is_optimizer)
SYSTEMS = {"torchtitan": TORCHTITAN, "torch_dist": MEGATRON, "te_models": OWN, "transformers": HUGGING_FACE}
"""By the words of options."""


def find_system(folder: Path, names: Collection[str]) -> System:
    """Return the system that wrote a distributed checkpoint with these names. Raises CheckpointError for none."""
    if any(name.endswith("tok_embeddings.weight") for name in names):
        return TORCHTITAN
    if any(name.endswith("embedding.word_embeddings.weight") for name in names):
        megatron = (folder / "common.pt").exists() or any(n.startswith("decoder.layers.self_attention.") for n in names)
        return MEGATRON if megatron else OWN
    if any(name.endswith("embed_tokens.weight") for name in names):
        return HUGGING_FACE
    raise CheckpointError(
        f"{folder} has tensors of no system that is known here ({shorten(sorted(names), 3)}); known are "
        f"{', '.join(SYSTEMS)}"
    )
