"""Which parameters are trained, and how: globs over their names, of which the first that matches wins.

A glob that matches no parameter is refused: a misspelt one would train, or freeze, something else without a word.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

from torch import nn

from ...config import ConfigError
from ..config import OptimizerConfig


def freeze(model: nn.Module, patterns: Sequence[str], everywhere: Iterable[str] | None = None) -> None:
    """Exclude the parameters whose names match from training. everywhere: the names of the whole model's parameters, of
    which this may be a pipeline stage; None: the model's. Raises ConfigError where a pattern matches none, or nothing
    is left to train."""
    if not patterns:
        return
    names = dict(model.named_parameters())
    check_patterns("optimizer.freeze", patterns, names if everywhere is None else everywhere)
    for name, parameter in names.items():
        if matches_any(name, patterns):
            parameter.requires_grad_(False)
    if not any(parameter.requires_grad for parameter in names.values()):
        allowed = "patterns that leave something to train, in every pipeline stage"
        raise ConfigError(f"optimizer.freeze is {list(patterns)!r}; allowed: {allowed}")


def matches_any(name: str, patterns: Iterable[str]) -> bool:
    """Whether one of the globs means this name."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def check_patterns(key: str, patterns: Iterable[str], names: Iterable[str]) -> None:
    """Raise ConfigError for a pattern that matches no name."""
    known = list(names)
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in known):
            shown = ", ".join(known[:4])
            raise ConfigError(f"{key} has {pattern!r}, which matches no parameter; they are called {shown}, ...")


def multiplier(table: dict[str, float], name: str) -> float | None:
    """Return the value of the first pattern that matches a name; None: none does."""
    return next((value for pattern, value in table.items() if fnmatchcase(name, pattern)), None)


def is_decayed(name: str, parameter: nn.Parameter) -> bool:
    """Whether weight decay applies: to matrices, not to norms, biases (stacked expert biases are told by name) and the
    decays of state spaces."""
    return parameter.ndim >= 2 and not name.rpartition(".")[2].startswith(("bias", "A_log"))


def uses_muon(name: str, parameter: nn.Parameter) -> bool:
    """Whether optimizer.kind = "muon" updates a parameter by Muon: the matrices of the layers and the experts, not the
    embedding, the output layer, the routers and the kernels of depthwise convolutions, which AdamW updates as
    everything else."""
    words = name.split(".")
    outside = {"embedding", "output_layer", "router", "conv_weight"} & set(words)
    return is_decayed(name, parameter) and parameter.dim() in (2, 3) and not outside


def optimizer_groups(
    config: OptimizerConfig, parameters: dict[str, nn.Parameter], everywhere: Iterable[str] | None = None
) -> dict[tuple[str, float, float], list[nn.Parameter]]:
    """Return the parameters by (optimizer, multiplier of the learning rate, weight decay). everywhere: see `freeze`.
    Raises ConfigError for a pattern that matches none."""
    lr_mult, wd_mult = config.multipliers("lr_mult"), config.multipliers("wd_mult")
    known = list(parameters if everywhere is None else everywhere)
    check_patterns("optimizer.lr_mult", lr_mult, known)
    check_patterns("optimizer.wd_mult", wd_mult, known)
    # decayed parameters first, as state is in this order
    groups: dict[tuple[str, float, float], list[nn.Parameter]] = {}
    for decays in (True, False):
        for name, parameter in parameters.items():
            if is_decayed(name, parameter) != decays:
                continue
            kind = "adamw" if config.kind == "muon" and not uses_muon(name, parameter) else config.kind
            decay = multiplier(wd_mult, name)
            decay = config.weight_decay * (float(decays) if decay is None else decay)
            rate = multiplier(lr_mult, name)
            groups.setdefault((kind, 1.0 if rate is None else rate, decay), []).append(parameter)
    return groups
