"""What every recipe is: a frozen value that says which format each operand of fprop, dgrad and wgrad gets.

Nothing else decides numerics. Not a recipe's business:
where scales live, which kernel runs, when weights are cached. The recipes themselves: `recipes`.
"""

from __future__ import annotations

import dataclasses
import enum
import inspect
import json
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple, Self, get_args

import torch

from te_models.suggestions import did_you_mean, shown

from ..quantizer import IdentityQuantizer, Quantizer, Usage

BackwardOverride = Literal["high_precision", "dequantized"]
Role = Literal["input", "weight", "grad_output"]
"""What a tensor is to a linear layer: x, w or dy."""
RECIPES: dict[str, type[Recipe]] = {}
"""Short name -> class."""


_ALLOWED = {"bool": "True or False", "int": "an integer", "float": "a finite number"}


def _is_a(kind: str, value: object) -> bool:
    if kind == "bool" or isinstance(value, bool):
        return kind == "bool" and isinstance(value, bool)
    return isinstance(value, int) or (kind == "float" and isinstance(value, float) and math.isfinite(value))


class FormatMax(NamedTuple):
    """The largest magnitudes of a format, in the forward and in the backward pass: `Format.HYBRID.value.max_bwd`."""

    max_fwd: float
    max_bwd: float


class Format(enum.Enum):
    """Number formats; the value has the largest magnitudes, see `FormatMax`.

    Recipes take E4M3 (everywhere) and HYBRID (E4M3 in the forward pass, E5M2 for gradients); E2M1 is NVFP4's, and E5M2
    everywhere is in no recipe.
    """

    E2M1 = FormatMax(6.0, 6.0)
    E4M3 = FormatMax(448.0, 448.0)
    E5M2 = FormatMax(57344.0, 57344.0)
    HYBRID = FormatMax(448.0, 57344.0)

    def __repr__(self) -> str:
        return str(self)

    def dtype(self, role: Role) -> torch.dtype:
        """Return the dtype of a tensor of this role."""
        hybrid_gradient = self is Format.HYBRID and role == "grad_output"
        return torch.float8_e5m2 if hybrid_gradient else torch.float8_e4m3fn


FP8_FORMATS = (Format.E4M3, Format.HYBRID)
"""What `fp8_format` of a recipe may be."""


@dataclass(frozen=True)
class QuantizerRole:
    """Which tensor a quantizer is for. module_type: "linear", or "grouped_linear" of a layer with several GEMMs of a
    kind; tensor_type: "input", "weight" or "grad_output"; name: the module's qualified name, "" where it has none;
    module: the class name of the layer, such as "LayerNormMLP"."""

    module_type: str = ""
    tensor_type: str = ""
    name: str = ""
    module: str = ""


@dataclass(frozen=True)
class GemmQuantizers:
    """The quantizers of one module's operands, and what its backward pass does instead of quantizing, if anything.

    Raises ValueError where a GEMM would have to multiply 128x128 blocks by 128x128 blocks, and where it would multiply
    an operand with the random Hadamard transform by one without, whose product means nothing.
    """

    input: Quantizer
    weight: Quantizer
    grad_output: Quantizer
    backward_override: BackwardOverride | None = None
    # derived from the fields, once
    needs_key: ClassVar[bool]
    """Whether the backward pass draws random bits."""
    row_align: ClassVar[int]
    """The multiple of rows at which groups begin in the operands of wgrad."""

    def __post_init__(self) -> None:
        x, w, dy = self.input, self.weight, self.grad_output
        align = 1 if self.backward_override else max(dy.row_block("columnwise"), x.row_block("columnwise"))
        object.__setattr__(self, "needs_key", dy.needs_key())
        object.__setattr__(self, "row_align", align)
        refuse_two_dimensional(x, w, "input", "weight", "rowwise", "rowwise")
        if self.backward_override is None:
            refuse_two_dimensional(dy, w, "grad_output", "weight", "rowwise", "columnwise")
            refuse_two_dimensional(dy, x, "grad_output", "input", "columnwise", "columnwise")
            refuse_transformed(w, "weight")
            if dy.transformed != x.transformed:
                roles = ("grad_output", "input") if dy.transformed else ("input", "grad_output")
                raise ValueError(
                    f"{roles[0]} has the random Hadamard transform and {roles[1]} has not, but in wgrad it cancels "
                    "only against itself; allowed: with_rht alike for the two"
                )
            if dy.transformed and dy.random_signs != x.random_signs:
                raise ValueError(
                    "input and grad_output have different signs in the random Hadamard transform, so it would not "
                    "cancel in wgrad; allowed: with_random_sign_mask alike for the two"
                )


def refuse_two_dimensional(
    left: Quantizer, right: Quantizer, left_role: str, right_role: str, left_usage: Usage, right_usage: Usage
) -> None:
    """Raise ValueError where both operands of a GEMM have 128x128 blocks, because no GEMM takes that."""
    if left.square_blocks(left_usage) and right.square_blocks(right_usage):
        raise ValueError(
            f"{left_role} and {right_role} both have 128x128 blocks, and no GEMM multiplies those by each other; "
            "allowed: block_scaling_dim=1 for one of the two"
        )


def refuse_transformed(weight: Quantizer, role: str) -> None:
    """Raise ValueError where dgrad would take a transformed weight, against which no other operand is."""
    if weight.transformed:
        raise ValueError(
            f"{role} has the random Hadamard transform, which grad_output has not in dgrad, so it would not "
            "cancel; allowed: with_rht=False for weights"
        )


HIGH_PRECISION = GemmQuantizers(
    IdentityQuantizer(), IdentityQuantizer(), IdentityQuantizer(), backward_override="high_precision"
)
"""Of a layer that no recipe is in force for, where its gradients ask for the path of the quantized ones."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Base of all recipes: value equality, hash, JSON round trip. A subclass names a quantizer for each operand.

    backward_override: None computes dgrad and wgrad from quantized operands. "high_precision" saves the original
    operands and computes them unquantized; "dequantized" computes them, unquantized too, from what fprop's quantized
    operands stand for.
    """

    NAME: ClassVar[str]
    PLAIN_FIELDS: ClassVar[tuple[tuple[str, str], ...]] = ()  # the fields that are checked, and what each may be
    LATER_FIELDS: ClassVar[tuple[str, ...]] = ()  # that JSON names only where they are not at their defaults
    by_name: ClassVar[bool] = False  # whether `for_module` or `quantizers` look at the module's name
    stands_for: ClassVar[Callable[[], Recipe] | None] = None  # of an object in whose place regions take another value

    backward_override: BackwardOverride | None = None

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        own = inspect.get_annotations(cls).items()
        kinds = ((name, hint if isinstance(hint, str) else getattr(hint, "__name__", "")) for name, hint in own)
        cls.PLAIN_FIELDS += tuple((name, kind) for name, kind in kinds if kind in _ALLOWED)
        if "NAME" in cls.__dict__:
            RECIPES[cls.NAME] = cls

    def __post_init__(self) -> None:
        for name, kind in self.PLAIN_FIELDS:
            if not _is_a(kind, getattr(self, name)):
                raise ValueError(f"{name} is {shown(getattr(self, name))}; allowed: {_ALLOWED[kind]}")
        if self.backward_override is not None and self.backward_override not in get_args(BackwardOverride):
            allowed = ", ".join(map(repr, get_args(BackwardOverride)))
            raise ValueError(f"backward_override is {shown(self.backward_override)}; allowed: None, {allowed}")
        fp8_format = getattr(self, "fp8_format", Format.HYBRID)
        if fp8_format not in FP8_FORMATS:
            raise ValueError(f"fp8_format is {shown(fp8_format)}; allowed: {', '.join(map(str, FP8_FORMATS))}")
        if not self.by_name:
            # built once and not where they are asked for: inside a compiled region the fields need not be constants
            quantizers = (self._quantizer("input"), self._quantizer("weight"), self._quantizer("grad_output"))
            object.__setattr__(self, "_quantizers", GemmQuantizers(*quantizers, self.backward_override))

    def _quantizer(self, role: Role) -> Quantizer:
        """Return a new quantizer for one role."""
        raise NotImplementedError

    def value(self) -> Recipe:
        """Return what a region takes where it is entered under this object: itself, but for `stands_for`."""
        return self if self.stands_for is None else self.stands_for()

    def weight_quantizer(self) -> Quantizer:
        """Return the quantizer of weights w: [out, in] of a layer without a name."""
        return self.quantizers("", "").weight

    def for_module(self, name: str) -> Recipe | None:
        """Return the recipe of the module with this qualified name; None: high precision."""
        return self

    def check_names(self, names: Callable[[], list[str]]) -> None:
        """Warn of what this recipe says of layers by name where none of `names()` is meant."""

    def quantizers(self, module: str, name: str) -> GemmQuantizers:
        """Return the quantizers of one module. module: its class name; name: its qualified name."""
        return self._quantizers  # type: ignore[attr-defined]

    def to_dict(self) -> dict[str, Any]:
        """Return {"recipe": name, field: plain JSON value}."""
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        defaults = {f.name: f.default for f in dataclasses.fields(self) if f.name in self.LATER_FIELDS}
        values = {k: v for k, v in values.items() if k not in defaults or v != defaults[k]}
        return {"recipe": self.NAME} | {k: v.name if isinstance(v, enum.Enum) else v for k, v in values.items()}

    @classmethod
    def _from_fields(cls, values: dict[str, Any]) -> Self:
        """Rebuild from the fields of `to_dict`."""
        if values.get("fp8_format") in [member.name for member in Format]:
            values["fp8_format"] = Format[values["fp8_format"]]
        return cls(**values)

    @staticmethod
    def from_dict(values: dict[str, Any]) -> Recipe:
        """Rebuild from `to_dict`; an unknown recipe or field raises ValueError by name."""
        if not isinstance(values, dict):
            raise ValueError(f"a recipe is {shown(values)}; allowed: an object with its name and fields")
        values = dict(values)
        cls = _named(values.pop("recipe", None))
        _require_fields(cls, values)
        return cls._from_fields(values)

    def to_json(self) -> str:
        """Return `to_dict` as one line of JSON."""
        return json.dumps(self.to_dict(), sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> Recipe:
        """Rebuild from `to_json`."""
        return cls.from_dict(json.loads(text))

    def replace(self, **changes: Any) -> Self:
        """Return a copy with the named fields changed."""
        return dataclasses.replace(self, **changes)


def _named(name: object) -> type[Recipe]:
    if not isinstance(name, str) or name not in RECIPES:
        allowed = ", ".join(map(repr, RECIPES))
        raise ValueError(f"recipe is {shown(name)}; allowed: {allowed}{did_you_mean(name, RECIPES)}")
    return RECIPES[name]  # type: ignore[index]


def _require_fields(cls: type[Recipe], names: Iterable[str]) -> None:
    """Raise ValueError for a name that is not a field of a recipe."""
    known = {f.name for f in dataclasses.fields(cls)}
    for name in names:
        if name not in known:
            raise ValueError(
                f"{cls.__name__} has no field {shown(name)}; its fields are: {', '.join(sorted(known))}"
                f"{did_you_mean(name, known)}"
            )


def recipe(name: str, **fields: Any) -> Recipe:
    """Return a recipe by its short name, a key of RECIPES ("delayed", "current", "block", "mxfp8", "nvfp4"); fields as
    for its class. ValueError for another name, and for a field that is missing or that its class does not have."""
    cls = _named(name)
    try:  # the fields are looked at only where this fails: the compiler traces the call, but not dataclasses.fields
        return cls(**fields)
    except TypeError:
        _require_fields(cls, fields)
        missing = [
            f.name
            for f in dataclasses.fields(cls)
            if f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING and f.name not in fields
        ]
        if not missing:
            raise
    raise ValueError(f"the recipe {shown(name)} needs {', '.join(missing)}; use {cls.__name__}({missing[0]}=...)")
