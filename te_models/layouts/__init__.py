"""Which layouts over ranks there are: one table of rules, with one sentence each, for all that divide a run or a model.

facts   what is known of a layout by the one who asks     of_runs     rules of configurations and numbers of ranks
rule    what a rule is, and `check_layout_rules`          of_models   rules of models, pipeline stages and meshes

May import: the model's configuration. Nothing here imports torch.
"""

from .facts import REST, ExpertDispatch, ExpertLayout, Facts
from .rule import GROUPS, Rule, check_layout_rules

__all__ = ["GROUPS", "REST", "ExpertDispatch", "ExpertLayout", "Facts", "Rule", "check_layout_rules"]
