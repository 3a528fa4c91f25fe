"""What the adapters of all our layers have in common: their factors, scaling, merging and unmerging.

An adapter of rank r adds `scaling * B A` to a weight W [out, in], with A [r, in] and B [out, r], without forming the
product: y = W x + scaling * B (A x). It computes in the dtype of A and B (float32, unless peft is told otherwise). The
GEMM with W stays what the recipe in force makes it; W may be stored quantized, and only `merge` writes to it. Merging
adds in float32 and rounds once, to the dtype of W. It replaces a weight stored quantized by its values plus the
product, for this sum has no exact quantized form; unmerging puts the stored weight back.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from te_models.layers import QuantizedTensor
from te_models.layers.module.base import QuantizedModule
from te_models.layers.module.weight_cache import forget_cached_weights

from ...extras import require
from ...lora.layers import FIRST, AdaptedLayer, check_layer, plus
from .support import check_config

if TYPE_CHECKING:
    from peft import LoraConfig
    from peft.tuners.lora import LoraLayer
    from peft.tuners.tuners_utils import check_adapters_to_merge
else:
    LoraLayer = require("peft.tuners.lora", "peft", feature="te_models.hf.lora").LoraLayer
    check_adapters_to_merge = require("peft.tuners.tuners_utils", "peft").check_adapters_to_merge


class LoraAdapter(AdaptedLayer, LoraLayer):
    """One of our layers with any number of adapters, by name; PAIRS names the attributes that hold the factors by
    adapter."""

    def __init__(
        self,
        base_layer: nn.Module,
        adapter_name: str,
        config: LoraConfig,
        r: int = 0,
        lora_alpha: int = 1,
        **options: Any,
    ) -> None:
        super().__init__()
        check_layer(base_layer, options.get("target_name", ""))
        LoraLayer.__init__(self, base_layer, **options)
        for name in (name for pair in self.PAIRS if pair != FIRST for name in pair):
            setattr(self, name, nn.ModuleDict())
        self._active_adapter = adapter_name
        self._stored: dict[str, nn.Parameter] = {}  # weights stored quantized, while an adapter is merged
        self.update_layer(adapter_name, r, lora_alpha, config)

    # --- adapters ----------------------------------------------------------------------------------------------------

    def _get_in_out_features(self, module: nn.Module) -> tuple[int, int]:
        return self.sizes()[0]

    def _get_base_layer_device_and_dtype(self, base_layer: QuantizedModule) -> tuple[torch.device, torch.dtype]:
        weight = getattr(base_layer, base_layer.weight_names()[0])
        return weight.device, weight.dtype

    def update_layer(self, adapter_name: str, r: int, lora_alpha: int, config: LoraConfig, **options: Any) -> None:
        """Add an adapter, or replace the one of this name. Raises ValueError for what `config` asks and no layer here
        can do."""
        check_config(config)
        if r <= 0:
            raise ValueError(f"r is {r}; allowed: a positive integer")
        self.r[adapter_name], self.lora_alpha[adapter_name] = r, lora_alpha
        self.scaling[adapter_name] = lora_alpha / (math.sqrt(r) if config.use_rslora else r)
        self.use_rslora[adapter_name], self.use_dora[adapter_name] = config.use_rslora, False
        self.lora_bias[adapter_name] = False
        dropout = config.lora_dropout
        self.lora_dropout[adapter_name] = nn.Dropout(p=dropout) if dropout > 0 else nn.Identity()
        for (a, b), (inputs, outputs) in zip(self.PAIRS, self.sizes(), strict=True):
            getattr(self, a)[adapter_name] = self.factor(inputs, r)
            getattr(self, b)[adapter_name] = self.factor(r, outputs)
        self.reset_lora_parameters(adapter_name, config.init_lora_weights)
        self._move_adapter_to_device_of_base_layer(adapter_name)
        self.set_adapter(self.active_adapters, inference_mode=config.inference_mode)

    @torch.no_grad()
    def reset_lora_parameters(self, adapter_name: str, init_lora_weights: bool | str) -> None:
        """Start an adapter again. True: A as torch starts a linear layer, "gaussian": A from N(0, 1 / r^2), and B zero;
        False: both as torch starts a linear layer, so that the adapter changes the result at once (for tests)."""
        for name_a, name_b in self.PAIRS:
            a, b = getattr(self, name_a)[adapter_name].weight, getattr(self, name_b)[adapter_name].weight
            for factor in (a, b):
                nn.init.uniform_(factor, -(factor.shape[-1] ** -0.5), factor.shape[-1] ** -0.5)
            if init_lora_weights == "gaussian":
                nn.init.normal_(a, std=1 / self.r[adapter_name])
            if init_lora_weights is not False:
                nn.init.zeros_(b)

    # --- computing ---------------------------------------------------------------------------------------------------

    def applied(self, options: dict[str, Any]) -> list[str]:
        """Return the adapters that a call with these options adds to what the layer computes."""
        for name in ("adapter_names", "alora_offsets"):
            if options.pop(name, None) is not None:
                raise ValueError(
                    f"{name} was given, and {type(self.base_layer).__name__} applies the same adapters to all texts of "
                    "a batch; allowed: one call for each adapter, chosen with set_adapter"
                )
        if self.disable_adapters:
            if self.merged:
                self.unmerge()
            return []
        return [] if self.merged else [name for name in self.active_adapters if name in self.lora_A]

    def delta(self, x: Tensor, adapters: list[str], pair: tuple[str, str] = FIRST, *more: Any) -> Tensor:
        """Return the sum of `scaling * B A x` of these adapters, at least one. x: [..., in] -> [..., out]."""
        sums: Tensor | None = None
        for name in adapters:
            a, b = (getattr(self, factor)[name] for factor in pair)
            rows = self.lora_dropout[name](self._cast_input_dtype(x, a.weight.dtype))
            y = b(a(rows, *more), *more) * self.scaling[name]
            sums = y if sums is None else sums + y
        assert sums is not None, "the caller has looked"
        return sums

    def changed(
        self, result: Any, x: Tensor, adapters: list[str], pair: tuple[str, str] = FIRST, m_splits: Tensor | None = None
    ) -> Any:
        return plus(result, self.delta(x, adapters, pair, *(() if m_splits is None else (m_splits,))))

    # --- merging -----------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def get_delta_weight(self, adapter: str, pair: tuple[str, str] = FIRST) -> Tensor:
        """Return `scaling * B A`, [out, in] or a stack of such, in float32 or wider."""
        a, b = (getattr(self, factor)[adapter].weight for factor in pair)
        wide = torch.promote_types(a.dtype, torch.float32)
        return b.to(wide) @ a.to(wide) * self.scaling[adapter]

    @torch.no_grad()
    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        """Add adapters (None: the active ones) to the weights. safe_merge: raise ValueError, and change nothing, where
        a result is not finite."""
        for adapter in check_adapters_to_merge(self, adapter_names):
            if adapter not in self.lora_A:
                continue
            merged = self._weights_plus(adapter, 1)
            broken = [name for name, weight in merged.items() if safe_merge and not bool(weight.isfinite().all())]
            if broken:
                raise ValueError(f"{broken[0]} with the adapter {adapter!r} has values that are not finite")
            for name, weight in merged.items():
                own = getattr(self.base_layer, name)
                if isinstance(own, QuantizedTensor):
                    self._stored[name] = own  # type: ignore[assignment]  # a parameter that is a QuantizedTensor
                    setattr(self.base_layer, name, nn.Parameter(weight, requires_grad=False))
                else:
                    own.copy_(weight)
            self.merged_adapters.append(adapter)
            forget_cached_weights(self.base_layer)

    @torch.no_grad()
    def unmerge(self) -> None:
        """Take all merged adapters out of the weights again: to rounding, and of weights stored quantized exactly."""
        while self.merged_adapters:
            adapter = self.merged_adapters.pop()
            for name, weight in self._weights_plus(adapter, -1).items() if adapter in self.lora_A else ():
                if name not in self._stored:
                    getattr(self.base_layer, name).copy_(weight)
        for name, stored in self._stored.items():
            device = getattr(self.base_layer, name).device
            setattr(self.base_layer, name, stored if stored.device == device else nn.Parameter(stored.to(device)))
        self._stored.clear()
        forget_cached_weights(self.base_layer)

    def _weights_plus(self, adapter: str, sign: int) -> dict[str, Tensor]:
        """Return each adapted parameter plus, or minus, an adapter's product: summed in float32, rounded once."""
        found: dict[str, Tensor] = {}
        for pair, names in zip(self.PAIRS, self.weights(), strict=True):
            change = self.get_delta_weight(adapter, pair)
            for name, part in zip(names, change.unbind(0) if len(names) > 1 else (change,), strict=True):
                weight = getattr(self.base_layer, name)
                plain = weight.dequantize(part.dtype) if isinstance(weight, QuantizedTensor) else weight
                found[name] = (plain.to(part) + sign * part).to(plain.device, weight.dtype)
        return found

    def __repr__(self) -> str:
        return "te_models." + super().__repr__()
