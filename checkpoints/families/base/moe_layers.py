"""Entries that say which layers have experts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from te_models.config import ModelConfig

from ...io.errors import CheckpointError
from .fields import REQUIRED, Values, read_typed
from .layer_fields import check_names


@dataclass(frozen=True)
class SparseLayers:
    """A layer has experts if its number from 1 is a multiple of `decoder_sparse_step` and not in `mlp_only_layers`."""

    names: tuple[str, ...] = ("decoder_sparse_step", "mlp_only_layers")

    def read(self, hf: Mapping[str, Any]) -> Values:
        step = read_typed(hf, "decoder_sparse_step", int, 1)
        dense = read_typed(hf, "mlp_only_layers", list, None) or []
        layers = read_typed(hf, "num_hidden_layers", int, REQUIRED)
        if step < 1:
            raise CheckpointError(f"config.json has decoder_sparse_step = {step}; allowed: a positive integer")
        return {"moe.layers": [i for i in range(layers) if (i + 1) % step == 0 and i not in dense]}

    def write(self, config: ModelConfig) -> Values:
        return {
            "decoder_sparse_step": 1,
            "mlp_only_layers": [i for i in range(config.num_layers) if not config.is_moe_layer(i)],
        }


@dataclass(frozen=True)
class FirstDense:
    """`first_k_dense_replace`: so many layers come before the first with experts."""

    default: int
    names: tuple[str, ...] = ("first_k_dense_replace",)

    def read(self, hf: Mapping[str, Any]) -> Values:
        dense = read_typed(hf, "first_k_dense_replace", int, self.default)
        return {"moe.layers": list(range(max(dense, 0), read_typed(hf, "num_hidden_layers", int, REQUIRED)))}

    def write(self, config: ModelConfig) -> Values:
        return {"first_k_dense_replace": leading_dense(config)}


@dataclass(frozen=True)
class LayerKinds:
    """`mlp_layer_types`, "dense" or "sparse" for each layer; without it, all but the first ones are sparse."""

    names: tuple[str, ...] = ("mlp_layer_types", "first_k_dense_replace")

    def read(self, hf: Mapping[str, Any]) -> Values:
        kinds = read_typed(hf, "mlp_layer_types", list, None)
        if kinds is None:
            return FirstDense(1).read(hf)
        return {"moe.layers": [i for i, kind in enumerate(check_names(kinds, "MLP kind", _MLPS)) if kind == "sparse"]}

    def write(self, config: ModelConfig) -> Values:
        kinds = ["sparse" if config.is_moe_layer(i) else "dense" for i in range(config.num_layers)]
        return {"mlp_layer_types": kinds, "first_k_dense_replace": leading_dense(config)}


_MLPS = ("dense", "sparse")


def leading_dense(config: ModelConfig) -> int:
    """Return how many layers come before the first with experts."""
    return next((i for i in range(config.num_layers) if config.is_moe_layer(i)), config.num_layers)
