"""Which parameters are trained, and how: globs over their names, of which the first that matches wins.

A glob that matches no parameter is refused: a misspelt one would train, or freeze, something else without a word.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from te_models.layers import QuantizedTensor
from te_models.layers.tensor.fsdp import local_part

from ...config import ConfigError
from ..config import OptimizerConfig

if TYPE_CHECKING:
    from ...parallel.parts import LocalPart


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
    embedding, the output layer, the routers and the kernels of depthwise convolutions: AdamW updates these as
    everything else."""
    words = name.split(".")
    outside = {"embedding", "output_layer", "router", "conv_weight"} & set(words)
    return is_decayed(name, parameter) and parameter.dim() in (2, 3) and not outside


class BlockRates:
    """The multipliers of `optimizer.lr_mult` of the matrices that a weight joins, such as `linear_qkv.weight.k`.

    The weight's group has the largest rate of its blocks. Of rows with a smaller one, that part of the step is taken
    that is the ratio of the two, which is the step of that rate: rows change by their rate times something else.

    blocks: rows of each matrix of a weight, by the names of both. parts: see `FrozenExperts`.
    """

    def __init__(
        self,
        config: OptimizerConfig,
        parameters: dict[str, nn.Parameter],
        blocks: Mapping[str, Mapping[str, int]],
        parts: Mapping[str, LocalPart] | None = None,
    ) -> None:
        table = config.multipliers("lr_mult")
        self.largest: dict[str, float] = {}
        self._shares: dict[str, Tensor] = {}
        for name, parameter in parameters.items():
            own = {block: _first(table, f"{name}.{block}", name) for block in blocks.get(name, ())}
            if {*own.values()} <= {_first(table, name)}:
                continue
            if config.kind == "schedule_free":
                raise ConfigError(
                    f"optimizer.lr_mult has several rates for {name}; allowed with optimizer.kind = 'schedule_free': "
                    "one for a parameter"
                )
            if isinstance(local_part(parameter), QuantizedTensor):
                raise ConfigError(
                    f"optimizer.lr_mult has several rates for {name}; allowed with precision.quantized_weights: one "
                    "for a parameter"
                )
            self.largest[name] = max(own.values())
            part = None if parts is None else parts[name]
            shape = tuple(parameter.shape) if part is None else tuple(part.shape)
            rows = [
                own[block] / (self.largest[name] or 1.0) for block, size in blocks[name].items() for _ in range(size)
            ]
            share = torch.tensor(rows, dtype=torch.float32, device=parameter.device)[:, None].expand(shape)
            self._shares[name] = share if part is None else part.of_whole(share)

    @contextlib.contextmanager
    def applied(self, parameters: Mapping[str, nn.Parameter], masters: Mapping[str, Tensor]) -> Iterator[None]:
        """Take of the change that is made within what the rates of the rows say."""
        weights = {name: local_part(masters.get(name, parameters[name])).detach() for name in self._shares}
        before = {name: weight.clone() for name, weight in weights.items()}
        yield
        with torch.no_grad():
            for name, weight in weights.items():
                weight.copy_(torch.lerp(before[name].float(), weight.float(), self._shares[name]))
                if name in masters:
                    local_part(parameters[name]).copy_(weight)


def _first(table: dict[str, float], *names: str) -> float:
    return next((v for pattern, v in table.items() if any(fnmatchcase(name, pattern) for name in names)), 1.0)


def optimizer_groups(
    config: OptimizerConfig,
    parameters: dict[str, nn.Parameter],
    everywhere: Iterable[str] | None = None,
    blocks: Mapping[str, Mapping[str, int]] | None = None,
    rates: Mapping[str, float] | None = None,
) -> dict[tuple[str, float, float], list[nn.Parameter]]:
    """Return the parameters by (optimizer, multiplier of the learning rate, weight decay). everywhere: see `freeze`;
    blocks: see `BlockRates`, whose `largest` are `rates`. Raises ConfigError for a pattern that matches none."""
    lr_mult, wd_mult = config.multipliers("lr_mult"), config.multipliers("wd_mult")
    known = list(parameters if everywhere is None else everywhere)
    named = [f"{name}.{block}" for name, its in (blocks or {}).items() for block in its]
    check_patterns("optimizer.lr_mult", lr_mult, known + named)
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
            rate = (rates or {}).get(name, multiplier(lr_mult, name))
            groups.setdefault((kind, 1.0 if rate is None else rate, decay), []).append(parameter)
    return groups
