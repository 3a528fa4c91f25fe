"""Adapters of peft over transformers' model, in our layers' names."""

from collections import defaultdict

from torch import Tensor

from te_models.checkpoints import CheckpointError
from te_models.checkpoints.families.base.text_part import text_family
from te_models.checkpoints.folder.hf_config import choose_family
from te_models.checkpoints.folder.tied_weights import shared_copies
from te_models.checkpoints.io.errors import shorten
from te_models.checkpoints.mapping.tensor_map import Namespace, Piece, compose, identity_namespace

from ..model import GPTModel
from .factors import (
    Factors,
    WeightRows,
    filled_columns,
    filled_tensors,
    is_transposed,
    links_by_stored,
    moved_adapter,
    rows_of_link,
)
from .peft_folders import WEIGHTS, PeftFolder


def in_names_of_transformers(model: GPTModel, folder: PeftFolder) -> tuple[dict[str, Factors], dict[str, Tensor]]:
    """Return adapters by the names of our layers, or of the parameter where that is no layer's `weight`, and the whole
    weights by the names of our parameters. Raises CheckpointError for modules that the family does not have."""
    namespace, weights = _namespace(model, folder)
    links = links_by_stored(namespace)
    sources = {
        stored: folder.factors(stored, key, namespace.stored[stored].shape, transposed=is_transposed(links[stored][0]))
        for stored, key in weights.items()
    }
    moves: dict[str, list[WeightRows]] = defaultdict(list)
    for stored in sources:
        for link in links[stored]:
            moves[link.name].append(rows_of_link(link, namespace, to_stored=False))
    shared = filled_columns(sources)
    found: dict[str, Factors] = {}
    for name, own in moves.items():
        factors = moved_adapter(own, sources, namespace.canonical[name], shared)
        if factors is not None:
            found[name.removesuffix(".weight")] = factors
    return found, _values(folder, namespace)


def _namespace(model: GPTModel, folder: PeftFolder) -> tuple[Namespace, dict[str, tuple[str, int]]]:
    """Return how the family stores the model in the form whose names the folder has, and where each adapted weight's
    factors are."""
    family = text_family(choose_family(model.config, model.origin, None), model.config)
    folder = folder.without_copies(shared_copies(model.config, family))
    why: CheckpointError | None = None
    for form in family.forms:
        namespace = family.namespace(model.config, form)
        try:
            weights = folder.weights({name: its.shape for name, its in namespace.stored.items()})
        except CheckpointError as error:
            why = why or error
            continue
        other = [name for name in folder.values if name not in namespace.stored]
        if not other:
            return namespace, weights
        why = CheckpointError(
            f"{folder.path / WEIGHTS} has whole weights that the family {family.model_type!r} does not have in this "
            f"model: {shorten(sorted(other))}"
        )
    assert why is not None, "a family has a form"
    raise why


def _values(folder: PeftFolder, namespace: Namespace) -> dict[str, Tensor]:
    """Return the whole weights by our names. Raises CheckpointError where a parameter has other parts, too."""
    found: dict[str, Tensor] = {}
    whole: dict[str, list[Piece]] = {}
    partly = []
    for name, pieces in compose(namespace, identity_namespace(namespace.canonical)).items():
        held = [piece.source for piece in pieces if piece.source in folder.values]
        wrong = next((n for n in held if folder.values[n].shape != namespace.stored[n].shape), None)
        if wrong is not None:
            found[name] = folder.values[wrong]  # whose shape is told
        elif held and len(held) < len(pieces):
            partly.append(name)
        elif held:
            whole[name] = pieces
    if partly:
        raise CheckpointError(
            f"{folder.path / WEIGHTS} replaces some of what {shorten(sorted(partly))} joins; allowed: all parts of a "
            "parameter"
        )
    return found | filled_tensors(folder.values, whole, namespace.canonical)
