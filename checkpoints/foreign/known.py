"""Which training system a checkpoint is of: told by the names that it has."""

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

from te_models.config import ModelConfig

from ..families import FAMILIES
from ..families.base.family import HasShape, first_that_expresses
from ..io.errors import CheckpointError, shorten
from ..mapping.layout_ops import At, Layout, Stack
from ..mapping.param_shapes import expected_tensors
from .fsdp_dtensor import FSDP_DTENSOR
from .megatron import MEGATRON
from .system import System, is_optimizer
from .torchtitan import TORCHTITAN
from .transformer_engine import is_transformer_engine, transformer_engine


def _own(config: ModelConfig, found: Mapping[str, HasShape] | None) -> Iterator[tuple[str, Layout]]:
    for name, shape in expected_tensors(config).items():
        apart = found is not None and name not in found and f"{name}0" in found
        yield name, Stack(*(At(f"{name}{expert}") for expert in range(shape[0]))) if apart else At(name)


def _hugging_face(config: ModelConfig, found: Mapping[str, HasShape] | None) -> Iterator[tuple[str, Layout]]:
    family = first_that_expresses(FAMILIES.values(), config)
    names = list(family.forms.values())
    if found is not None:
        names = [FAMILIES[family.model_type].forms[family.best_form(config, found)[0] or family.names.form]]
    yield from names[0].weights(config)


def _moment(name: str, state: str) -> str:
    return f"optimizer.state.{name}.{state}"


OWN = System("te_models", _own, _moment, (), is_optimizer)
HUGGING_FACE = System("transformers", _hugging_face, _moment, (), is_optimizer)
SYSTEMS = {
    "torchtitan": TORCHTITAN,
    "torch_dist": MEGATRON,
    "fsdp_dtensor": FSDP_DTENSOR,
    "te_models": OWN,
    "transformers": HUGGING_FACE,
}
"""Of distributed checkpoints, by the words of options."""
RANKS = "megatron"
"""The word for files of Megatron's ranks."""
MODULES = "transformer_engine"
"""The word for a state dict of Transformer Engine's modules."""
STATE_DICTS = {MODULES: transformer_engine(), "te_models": OWN, "transformers": HUGGING_FACE}
"""Of state dicts in one piece; with RANKS; it names its modules as in the file of a rank that has all of them."""


def find_system(folder: Path, names: Collection[str]) -> System:
    """Return the system that wrote a distributed checkpoint with these names. Raises CheckpointError for none."""
    if any(name.endswith("tok_embeddings.weight") for name in names):
        return TORCHTITAN
    if any(name.endswith("embedding.word_embeddings.weight") for name in names):
        if any(".linear_fc1.weight" in name and name.endswith("_w") for name in names):
            return FSDP_DTENSOR if not any(".experts.experts." in name for name in names) else MEGATRON
        megatron = (folder / "common.pt").exists() or any(n.startswith("decoder.layers.self_attention.") for n in names)
        return MEGATRON if megatron else OWN
    if any(name.endswith("embed_tokens.weight") for name in names):
        return HUGGING_FACE
    raise CheckpointError(
        f"{folder} has tensors of no system that is known here ({shorten(sorted(names), 3)}); known are "
        f"{', '.join(SYSTEMS)}"
    )


def name_of_state_dict(where: str, names: Collection[str]) -> str:
    """Return whose names a state dict has, a key of STATE_DICTS or RANKS. Raises CheckpointError where they do not tell
    it: Megatron's modules are called as ours, and hold q, k and v in another order."""
    if any(map(is_transformer_engine, names)):
        return MODULES
    if any(name.endswith("embedding.word_embeddings.weight") for name in names):
        if any("._extra_state" in name or name.endswith(".input_layernorm.weight") for name in names):
            return RANKS
        raise CheckpointError(
            f"{where} has names that Megatron's modules and ours share, and q, k and v are in another order there; "
            f"--from says whose they are: {RANKS} or te_models"
        )
    if any(name.endswith("embed_tokens.weight") for name in names):
        return "transformers"
    raise CheckpointError(
        f"{where} has tensors of no system that is known here ({shorten(sorted(names), 3)}); known are "
        f"{', '.join((*STATE_DICTS, RANKS))}"
    )
