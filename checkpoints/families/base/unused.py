"""Tensors that files of a family may hold and the model does not use.

Two kinds: constants that can be computed again, and the parts that predict further tokens (multi-token prediction,
MTP). Anything else that a model does not use is an error.
"""

import fnmatch
import re
from dataclasses import dataclass

from .additions import first_shared
from .fields import REQUIRED, HFConfig, read_typed

COUNTS = ("num_nextn_predict_layers", "num_mtp_layers", "num_mtp_modules")
_KEYS = re.compile(r"layers\.(0|[1-9][0-9]{0,8})\.self_attn\.(k_proj|v_proj|k_norm|v_norm)\.")
_LAYER = re.compile(r"model\.layers\.(0|[1-9][0-9]{0,8})\.")


@dataclass(frozen=True)
class Unused:
    """Which tensors these are.

    Arguments:
        patterns: of their names, with `*` wildcards.
        layers_behind: also all of `model.layers.{i}` for the layers behind the last one of the model, as many as
            config.json says under one of the names that families have for it, 1 where it says nothing.
        beside: patterns of the tensors of models beside this one; they do not count in its size.
        shared_keys: also the keys and values of layers that `num_kv_shared_layers` has read another layer's.
    """

    patterns: tuple[str, ...] = ("*.rotary_emb.inv_freq",)
    layers_behind: bool = False
    beside: tuple[str, ...] = ()
    shared_keys: bool = False

    def holds(self, name: str, hf: HFConfig) -> bool:
        """Whether a tensor of this name is one, in a folder whose config.json is `hf`."""
        if any(fnmatch.fnmatchcase(name, pattern) for pattern in self.patterns) or self.is_beside(name):
            return True
        match = _KEYS.search(name) if self.shared_keys else None
        if match is not None and int(match[1]) >= first_shared(hf):
            return True
        match = _LAYER.match(name) if self.layers_behind else None
        if match is None:
            return False
        layers = read_typed(hf, "num_hidden_layers", int, REQUIRED)
        return layers <= int(match[1]) < layers + layers_behind(hf)

    def is_beside(self, name: str) -> bool:
        """Whether a tensor of this name is of a model beside this one."""
        return any(fnmatch.fnmatchcase(name, pattern) for pattern in self.beside)


def layers_behind(hf: HFConfig) -> int:
    """Return how many layers that predict further tokens config.json counts, 1 where it says nothing."""
    said = next((count for count in COUNTS if hf.get(count) is not None), COUNTS[0])
    return 1 if hf.get(said) is None else read_typed(hf, said, int, 1)


CONSTANTS = Unused()
LAYERS_BEHIND = Unused(layers_behind=True)
