"""Entries that say what each layer's attention is: its window, and whether it rotates."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

from te_models.config import LayerType, ModelConfig

from ...io.errors import CheckpointError
from .fields import REQUIRED, HFConfig, Only, OwnEntry, Values, read_typed, shorten_value


def check_names(values: list[Any], what: str, allowed: Iterable[str]) -> list[str]:
    """Return `values` if each is one of `allowed`, else raise CheckpointError naming the first other one."""
    names = list(allowed)
    for value in values:
        if value not in names:
            raise CheckpointError(
                f"config.json has the {what} {shorten_value(value)}; supported: {', '.join(map(str, names))}"
            )
    return values


@dataclass(frozen=True)
class OnlyInEachLayer(Only):
    """A list with an item for each layer, of which every one must be `value`."""

    def read(self, hf: HFConfig) -> Values:
        items = read_typed(hf, self.hf, list, None)
        others = [x for x in items or () if x != self.value or type(x) is not type(self.value)]
        if others:
            raise CheckpointError(
                f"config.json has {shorten_value(others[0])} in {self.hf}; supported: {self.value!r} in each layer"
            )
        return {}

    def write(self, config: ModelConfig) -> Values:
        return {self.hf: [self.value] * config.num_layers}


@dataclass(frozen=True)
class AllLayersWindow:
    """`sliding_window` (Mistral): every layer sees that many positions; null means full attention."""

    default: int | None
    enabled_by: str | None = None
    names: tuple[str, ...] = field(default=("sliding_window", "use_sliding_window"))

    def read(self, hf: HFConfig) -> Values:
        if self.enabled_by is not None and not read_typed(hf, self.enabled_by, bool, False):
            return {}
        window = hf.get("sliding_window", self.default)
        if window is None:
            return {}
        return {"attention.window_size": read_typed(hf, "sliding_window", int, self.default)}

    def write(self, config: ModelConfig) -> Values:
        window = config.attention.window_size
        return {"sliding_window": window} | ({self.enabled_by: window is not None} if self.enabled_by else {})


_LAYER_TYPES = {"full_attention": "full", "sliding_attention": "sliding"}
_WITHOUT_WINDOW = "config.json has sliding_attention layers, but use_sliding_window is not true with a sliding_window"


@dataclass(frozen=True)
class PerLayerWindow:
    """Qwen's window: used when `use_sliding_window`, in the layers that `layer_types` or `max_window_layers` say.

    Without `layer_types` those from number `max_window_layers` on; `alternating`: every other one before it.
    """

    default: int = 4096
    default_full_layers: int = 28
    alternating: bool = False
    names: tuple[str, ...] = ("sliding_window", "use_sliding_window", "max_window_layers", "layer_types")

    def read(self, hf: HFConfig) -> Values:
        used = read_typed(hf, "use_sliding_window", bool, False) and hf.get("sliding_window", self.default) is not None
        window = read_typed(hf, "sliding_window", int, self.default) if used else None
        types = read_typed(hf, "layer_types", list, None)
        if types is None:
            full_layers = read_typed(hf, "max_window_layers", int, self.default_full_layers)
            layers = read_typed(hf, "num_hidden_layers", int, REQUIRED)
            windowed = range(0, min(full_layers, layers), 2) if self.alternating else range(max(full_layers, 0), layers)
            kinds = ["sliding" if used and i in windowed else "full" for i in range(layers)]
        else:
            kinds = [_LAYER_TYPES[t] for t in check_names(types, "layer type", _LAYER_TYPES)]
        if "sliding" in kinds and window is None:
            raise CheckpointError(_WITHOUT_WINDOW)
        return {"layer_types": kinds} | ({} if window is None else {"attention.window_size": window})

    def write(self, config: ModelConfig) -> Values:
        inverse = {ours: theirs for theirs, ours in _LAYER_TYPES.items()}
        kinds = config.layer_types or ()
        window = config.attention.window_size
        full_layers = next((i for i, kind in enumerate(kinds) if kind == "sliding"), config.num_layers)
        return {
            "use_sliding_window": window is not None,
            "sliding_window": window,
            "max_window_layers": config.num_layers if self.alternating else full_layers,
            "layer_types": [inverse.get(kind, kind) for kind in kinds],
        }


@dataclass(frozen=True)
class WindowedFrom:
    """`layer_types`; without them layers from number `max_window_layers` on have the window, if there is one."""

    window: int
    first: int
    names: tuple[str, ...] = ("sliding_window", "max_window_layers", "layer_types")

    def read(self, hf: HFConfig) -> Values:
        pattern = LayerPattern(self.window, 1)
        if hf.get("layer_types") is None and hf.get("sliding_window", self.window) is not None:
            first = read_typed(hf, "max_window_layers", int, self.first)
            layers = range(read_typed(hf, "num_hidden_layers", int, REQUIRED))
            hf = {**hf, "layer_types": ["sliding_attention" if i >= first else "full_attention" for i in layers]}
        return pattern.read(hf)

    def write(self, config: ModelConfig) -> Values:
        return LayerPattern(self.window, 1).write(config)


@dataclass(frozen=True)
class LayerPattern:
    """`layer_types`; without them every `period`-th layer is full, the others have the window; None: all have it.

    pattern: `sliding_window_pattern`, or a field of another name that the family's files may have, is the period;
        with `letters` also a text such as "LLLG", a letter for each layer of a period, L local and G global, where the
        last layer is global.
    full_first: the first layer of each period is the full one, not the last.
    full: whether a layer is full where the file does not say, in place of a period: of its number, from 0, and theirs.
    unrotated: full layers have no position encoding; "beside windows": unless the family's window is null.
    """

    window: int | None
    period: int | None
    pattern: bool | str = False
    letters: bool = False
    full_first: bool = False
    unrotated: bool | Literal["beside windows"] = False
    full: Callable[[int, int], bool] | None = None

    @property
    def names(self) -> tuple[str, ...]:
        return ("sliding_window", "layer_types") + ((self._pattern,) if self.pattern else ())

    @property
    def _pattern(self) -> str:
        return self.pattern if isinstance(self.pattern, str) else "sliding_window_pattern"

    def read(self, hf: HFConfig) -> Values:
        window = hf.get("sliding_window", self.window)
        if window is not None:
            window = read_typed(hf, "sliding_window", int, self.window)
        types = read_typed(hf, "layer_types", list, None)
        if types is None:
            types = self._types(hf, window)
        unrotated = window is not None if self.unrotated == "beside windows" else self.unrotated
        full: LayerType = "nope" if unrotated else "full"
        kinds = [
            "sliding" if t == "sliding_attention" else full for t in check_names(types, "layer type", _LAYER_TYPES)
        ]
        if "sliding" in kinds and window is None:
            raise CheckpointError("config.json has sliding_attention layers, but sliding_window is null")
        return {"layer_types": kinds} | ({} if window is None else {"attention.window_size": window})

    def _types(self, hf: HFConfig, window: int | None) -> list[str]:
        layers = range(read_typed(hf, "num_hidden_layers", int, REQUIRED))
        period = hf.get(self._pattern, self.period) if self.pattern else self.period
        if window is None and (period is None or self.letters):
            return ["full_attention" for _ in layers]
        if self.letters and isinstance(period, str) and period and set(period) <= set("LG"):
            full = [period[i % len(period)] == "G" or i == layers[-1] for i in layers]
        elif self.full is not None:
            full = [self.full(i, len(layers)) for i in layers]
        elif period is None and not self.pattern:
            full = [False for _ in layers]
        elif not isinstance(period, int) or isinstance(period, bool) or period < 1:
            raise CheckpointError(
                f"config.json has {self._pattern} = {shorten_value(period)}; allowed: a positive integer"
                + (", or letters L and G" if self.letters else "")
            )
        else:
            full = [i % period == (0 if self.full_first else period - 1) for i in layers]
        return ["full_attention" if window is None or f else "sliding_attention" for f in full]

    def write(self, config: ModelConfig) -> Values:
        sliding = (kind == "sliding" for kind in config.layer_types or ())
        return {
            "sliding_window": config.attention.window_size,
            "layer_types": ["sliding_attention" if s else "full_attention" for s in sliding],
        }


class UnrotatedLayers(OwnEntry):
    """`no_rope_layers` holds 0 for layers without position encoding; else every `no_rope_layer_interval`-th is one."""

    names = ("no_rope_layers", "no_rope_layer_interval", "layer_types", "sliding_window", "use_sliding_window")

    def read(self, hf: HFConfig) -> Values:
        rotating = read_rotating(hf)
        used = read_typed(hf, "use_sliding_window", bool, False) and hf.get("sliding_window") is not None
        types = read_typed(hf, "layer_types", list, None)
        if types is None:
            types = ["full_attention" if rotates or not used else "sliding_attention" for rotates in rotating]
        if len(types) != len(rotating):
            raise CheckpointError(f"config.json has {len(types)} layer_types and {len(rotating)} no_rope_layers")
        seen = [_LAYER_TYPES[t] for t in check_names(types, "layer type", _LAYER_TYPES)]
        if "sliding" in seen and not used:
            raise CheckpointError(_WITHOUT_WINDOW)
        kinds = [layer_type(*layer) for layer in zip(seen, rotating)]
        window = {"attention.window_size": read_typed(hf, "sliding_window", int, REQUIRED)} if used else {}
        return {"layer_types": kinds} | window

    def write(self, config: ModelConfig) -> Values:
        layers, window = range(config.num_layers), config.attention.window_size
        return {
            "no_rope_layers": [int(config.rotates(i)) for i in layers],
            "layer_types": ["sliding_attention" if config.window_size(i) else "full_attention" for i in layers],
            "use_sliding_window": window is not None,
            "sliding_window": window,
        }


def layer_type(seen: str, rotates: bool) -> LayerType:
    """Return the kind of a layer whose queries see "full", "sliding" or "chunked"."""
    found: LayerType = seen if rotates else "nope" if seen == "full" else f"{seen}_nope"  # type: ignore[assignment]
    return found


def read_rotating(hf: HFConfig) -> list[Any]:
    """Return, for each layer, whether it rotates: `no_rope_layers` or what `no_rope_layer_interval` implies."""
    rotating = read_typed(hf, "no_rope_layers", list, None)
    if rotating:
        if any(type(r) is not int or r not in (0, 1) for r in rotating):
            raise CheckpointError(
                f"config.json has no_rope_layers = {shorten_value(rotating)}; allowed: zeros and ones"
            )
        return rotating
    interval = read_typed(hf, "no_rope_layer_interval", int, 4)
    if interval < 1:
        raise CheckpointError(f"config.json has no_rope_layer_interval = {interval}; allowed: a positive integer")
    return [int(i % interval != 0) for i in range(1, read_typed(hf, "num_hidden_layers", int, REQUIRED) + 1)]
