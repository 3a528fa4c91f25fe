"""All rules of layouts over ranks, by what has to be known to ask them, and who asks: `check_layout_rules`."""

from collections.abc import Callable, Iterator

from ..config import ConfigError
from . import of_models, of_runs
from .facts import Facts, Rule

GROUPS: tuple[tuple[str, Callable[[Facts], Iterator[Rule]]], ...] = (
    ("", of_runs.choices),
    ("parallel", of_runs.parallel_table),
    ("run", of_runs.rules_of_run),
    ("run", of_runs.rules_of_updates),
    ("dims", of_runs.ranks),
    ("dims filled", of_runs.experts_on_ranks),
    ("stages", of_models.stages),
    ("run stages", of_models.stages_of_run),
    ("stages num_layers", of_models.layers_on_stages),
    ("stages model", of_models.stages_of_shared_blocks),
    ("model", of_models.model),
    ("model", of_models.shared_sequences),
    ("run model", of_models.model_of_run),
    ("run model dims", of_runs.run_on_ranks),
    ("model layers", of_models.layers_of_stage),
    ("dims built", of_models.mesh),
)
"""The facts that have to be known, and the rules that read them."""


def rules(facts: Facts) -> Iterator[Rule]:
    """Yield the rules that can be asked."""
    for needs, group in GROUPS:
        if all(getattr(facts, name) is not None for name in needs.split()):
            yield from group(facts)


def check_layout_rules(facts: Facts) -> None:
    """Raise ConfigError with the sentence of the first rule that a layout breaks, of those that can be asked.

    A sentence about a key of the run says `where`, so that a file's sentence can name its table.
    """
    for rule in rules(facts):
        if sentence := facts.sentence(rule):
            raise ConfigError(sentence, rule.key if facts.is_key(rule.key) else "")
