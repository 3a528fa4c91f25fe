"""Adapters as peft writes them: what a folder holds, by the names of the weights that are adapted.

`adapter_config.json` says scalings and what is not in the tensors; `adapter_model.safetensors` has, for each module,
lora_A [r, in] and lora_B [out, r], of stacks of experts [E * r, in] and [out, r * E], of tables lora_embedding_A
[r, words] and lora_embedding_B [H, r], and whole tensors of what `modules_to_save` names.
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from te_models.checkpoints import CheckpointError
from te_models.checkpoints.io.errors import shorten
from te_models.checkpoints.io.store import read_tensors
from te_models.checkpoints.io.strict_json import read_object

from .factors import Factors

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
_PART = re.compile(r"(.+)\.(lora_A\.weight|lora_B\.weight|lora_embedding_A|lora_embedding_B|lora_magnitude_vector)")
_INSIDE = re.compile(r"\.base_layer(?=\.|$)")
_UNEXPRESSED = (
    "layer_replication",
    "trainable_token_indices",
    "lora_bias",
    "use_qalora",
    "use_bdlora",
    "kasa_config",
    "alora_invocation_tokens",
    "arrow_config",
    "monteclora_config",
    "velora_config",
)
"""Fields whose values, if there are any, change what an adapter computes in a way that no layer here does."""
_CHANGED_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Beginnings of kinds of initial values that are taken out of the base weights; these must have changed with them."""


@dataclass(frozen=True)
class PeftFolder:
    """What a folder says. modules: by module name, without `base_layer`, and how many wrappers are around it;
    values: whole tensors by name."""

    path: Path
    config: Mapping[str, Any]
    modules: Mapping[tuple[str, int], Mapping[str, Tensor]]
    values: Mapping[str, Tensor]

    @classmethod
    def read(cls, path: Path) -> PeftFolder:
        """Read a folder. Raises CheckpointError for one of another method than LoRA, one with options that no layer
        here has, and tensors that are none of an adapter."""
        config = read_object(path / CONFIG)
        _check(config, path / CONFIG)
        tensors, _ = read_tensors(path / WEIGHTS)
        modules: dict[tuple[str, int], dict[str, Tensor]] = defaultdict(dict)
        values: dict[str, Tensor] = {}
        for full, tensor in tensors.items():
            name = full.removeprefix(PREFIX)
            found = _PART.fullmatch(name.replace("lora_magnitude_vector.weight", "lora_magnitude_vector"))
            if found is not None:
                plain, depth = _INSIDE.subn("", found[1])
                modules[plain, depth][found[2]] = tensor
            elif ".lora_" in name or name == full:
                raise CheckpointError(f"{path / WEIGHTS} has {full}, which is no part of an adapter that peft writes")
            else:
                values[_INSIDE.sub("", name).replace(".modules_to_save.", ".")] = tensor
        for (plain, _), its in modules.items():
            kinds = {name for name in its if name != "lora_magnitude_vector"}
            if kinds not in ({"lora_A.weight", "lora_B.weight"}, {"lora_embedding_A", "lora_embedding_B"}):
                raise CheckpointError(f"{path / WEIGHTS} has not both factors of {plain}: {shorten(sorted(kinds))}")
        return cls(path, config, modules, values)

    def weights(self, stored: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[str, int]]:
        """Return the adapted weights of a model with these stored shapes, each with its module and wrappers. Raises
        CheckpointError for what the model does not have."""
        apart: dict[str, list[str]] = defaultdict(list)
        for name in stored:
            if self._is_parameter(name):
                apart[name.rpartition(".")[0]].append(name)
        found = {}
        for module, depth in self.modules:
            # peft wraps the parameters of a module in their order, the first one innermost
            names = [f"{module}.weight"] if f"{module}.weight" in stored else apart[module]
            if depth >= len(names):
                raise CheckpointError(f"{self.path / WEIGHTS} has an adapter of {module}, which is no layer here")
            found[names[len(names) - 1 - depth]] = module, depth
        return found

    def without_copies(self, copies: Mapping[str, str]) -> PeftFolder:
        """Return the folder without what it says of copies, copy -> original, of weights that layers share. Raises
        CheckpointError where it does not say the same of an original and all its copies."""
        modules, values = dict(self.modules), dict(self.values)
        for copy, original in copies.items():
            module, first = copy.rpartition(".")[0], original.rpartition(".")[0]
            depths = [depth for name, depth in self.modules if name in (module, first)]
            said = [[self.modules.get((name, depth), {}) for depth in depths] for name in (module, first)]
            whole = [self.values.get(name) for name in (copy, original)]
            if not all(map(_same, *said)) or not _same(*({} if t is None else {"": t} for t in whole)):
                raise CheckpointError(
                    f"{self.path / WEIGHTS} changes {first} and {module} in different ways, and they share "
                    "weights here; allowed: the same adapter for both"
                )
            values.pop(copy, None)
            for depth in depths:
                modules.pop((module, depth), None)
        return replace(self, modules=modules, values=values)

    def _is_parameter(self, weight: str) -> bool:
        """Whether peft adapts a weight as a parameter of its module."""
        targets = self.config.get("target_parameters") or ()
        return any(weight == target or weight.endswith(f".{target}") for target in targets)

    def factors(self, weight: str, key: tuple[str, int], shape: tuple[int, ...], *, transposed: bool) -> Factors:
        """Return the adapter of a stored weight. transposed: whether it is [in, out]. Raises CheckpointError for
        factors of another shape."""
        its = self.modules[key]
        out, columns = (shape[-1], shape[-2]) if transposed else shape[-2:]
        if "lora_embedding_A" in its:
            a, b = its["lora_embedding_B"].T, its["lora_embedding_A"].T
        else:
            a, b = its["lora_A.weight"], its["lora_B.weight"]
        if len(shape) == 3:
            experts = shape[0]
            if a.dim() == 2 and b.dim() == 2 and a.shape[0] % experts == 0 and b.shape[1] % experts == 0:
                a, b = a.unflatten(0, (experts, -1)), b.unflatten(1, (-1, experts)).permute(2, 0, 1)
                if (a.shape[-1], b.shape[-2]) == (out, columns) != (columns, out):
                    a, b = b.transpose(-2, -1), a.transpose(-2, -1)  # releases of peft before is_transposed
        rank = a.shape[-2]
        if tuple(a.shape) != (*shape[:-2], rank, columns) or tuple(b.shape) != (*shape[:-2], out, rank):
            raise CheckpointError(
                f"{self.path / WEIGHTS} has factors {list(a.shape)} and {list(b.shape)} of {weight}, which is "
                f"{list(shape)} in this model"
            )
        lengths = its.get("lora_magnitude_vector")
        if lengths is not None and lengths.numel() != out:
            raise CheckpointError(f"{self.path / WEIGHTS} has {lengths.numel()} lengths of {weight}, not {out}")
        if (lengths is None) == bool(self.config.get("use_dora")):
            has = "no lengths" if lengths is None else "lengths"
            raise CheckpointError(f"{self.path} has {has} of {weight}, and use_dora says otherwise")
        wide = torch.promote_types(a.dtype, torch.float32)
        name = weight if self._is_parameter(weight) else key[0]
        return Factors(
            a.to(wide), b.to(wide), self.scaling(name, rank), None if lengths is None else lengths.to(wide).flatten()
        )

    def own_factors(self, layer: str) -> Factors:
        """Return the adapter of a layer of ours, whose factors are stored as they are."""
        its = self.modules[layer, 0]
        a, b = (its.get(name) for name in ("lora_A.weight", "lora_B.weight"))
        if a is None or b is None or a.dim() < 2:
            raise CheckpointError(f"{self.path / WEIGHTS} has no lora_A and lora_B of {layer}")
        return Factors(a, b, self.scaling(layer, a.shape[-2]), its.get("lora_magnitude_vector"))

    def scaling(self, name: str, rank: int) -> float:
        """Return what multiplies the adapter of a module or a parameter. Raises CheckpointError for a rank other than
        the configuration's."""
        alpha = _of_pattern(self.config, "alpha_pattern", name, self.config.get("lora_alpha", 8))
        r = _of_pattern(self.config, "rank_pattern", name, self.config.get("r", 8))
        if r != rank:
            raise CheckpointError(f"{self.path / CONFIG} gives {name} rank {r}, and {WEIGHTS} has {rank}")
        return float(alpha / (math.sqrt(r) if self.config.get("use_rslora") else r))


def _of_pattern(config: Mapping[str, Any], field: str, name: str, default: Any) -> Any:
    """Return a number of a module as peft does: of the first pattern that its name, or its end, matches."""
    for pattern, value in (config.get(field) or {}).items():
        try:
            if re.match(rf"(.*\.)?({pattern})$", name):
                return value
        except re.error as error:
            raise CheckpointError(f"{field} has {pattern!r}, which is no regular expression: {error}") from None
    return default


def _check(config: Mapping[str, Any], path: Path) -> None:
    if config.get("peft_type", "LORA") != "LORA":
        raise CheckpointError(f"{path} is of the method {config['peft_type']!r}; allowed: 'LORA'")
    for field in _UNEXPRESSED:
        if config.get(field):
            raise CheckpointError(f"{path} has {field}, which no layer here can do; allowed: adapters without")
    start = config.get("init_lora_weights", True)
    if isinstance(start, str) and start.startswith(_CHANGED_BASE):
        raise CheckpointError(
            f"{path} has init_lora_weights {start!r}, which also changes the base weights; allowed: adapters that peft "
            "has converted (save_pretrained with path_initial_model_for_weight_conversion)"
        )
    for field in ("r", "lora_alpha"):
        if not isinstance(config.get(field, 8), (int, float)) or not config.get(field, 8) > 0:
            raise CheckpointError(f"{path} has {field} {config[field]!r}; allowed: a positive number")


def _same(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def rank_fields(ranks: Mapping[str, tuple[int, float]]) -> dict[str, Any]:
    """Return the fields of adapter_config.json that say each module's rank and alpha, by its name."""
    (r, alpha), _ = Counter(ranks.values()).most_common(1)[0]
    config: dict[str, Any] = {"r": r, "lora_alpha": _plain(alpha)}
    rank_pattern = {re.escape(name): its for name, (its, _) in ranks.items() if its != r}
    alpha_pattern = {re.escape(name): _plain(its) for name, (_, its) in ranks.items() if its != alpha}
    return config | {
        key: value for key, value in (("rank_pattern", rank_pattern), ("alpha_pattern", alpha_pattern)) if value
    }


def _plain(alpha: float) -> float:
    return int(alpha) if alpha == int(alpha) else alpha
