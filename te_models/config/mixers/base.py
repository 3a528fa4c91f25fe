"""What every kind of mixer says of itself, and how a configuration tells kinds apart."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple, Self

from ..part import ConfigPart, check


class Parameter(NamedTuple):
    """A parameter of a mixer. name: below the mixer's module; shape: of the whole mixer; blocks: where ranks split it,
    the sizes along dimension `dim` of what it joins (q, k and v), each of which ranks share equally, () where every
    rank has all of it."""

    name: str
    shape: tuple[int, ...]
    blocks: tuple[int, ...] = ()
    dim: int = 0


class State(NamedTuple):
    """What a mixer carries from token to token, of one sequence. shape: of all ranks together; heads: the dimension
    that ranks share; dtype: float32, or that of keys and values."""

    name: str
    shape: tuple[int, ...]
    heads: int = 0
    dtype: Literal["float32", "cache"] = "float32"


@dataclass(frozen=True, kw_only=True)
class MixerConfig(ConfigPart):
    """Base of the kinds of token mixers. A configuration names a kind by the key `kind`."""

    kind: ClassVar[str]
    """The word for this kind."""
    recurrent: ClassVar[bool] = True
    """Whether decoding carries `states`, in place of keys and values."""

    def parameters(self, hidden_size: int) -> Iterator[Parameter]:
        """Yield the parameters, in the order of the module, without the norm before the mixer. Attention's are those
        of `checkpoints/mapping/param_shapes.py`, because of the many forms in which files have them."""
        raise NotImplementedError(self.kind)

    def states(self) -> tuple[State, ...]:
        """Return what decoding carries; () for attention, whose keys and values grow."""
        raise NotImplementedError(self.kind)

    def flops(self, length: float) -> float:
        """Return the FLOPs per token of a forward pass over `length` tokens beyond the FLOPs of parameters with two
        dimensions (two per element)."""
        raise NotImplementedError(self.kind)

    def shared_sizes(self) -> dict[str, int]:
        """Return the fields that ranks which split the mixer share: each a multiple of their number."""
        raise NotImplementedError(self.kind)

    def tagged(self) -> dict[str, Any]:
        """Return `to_dict` with the kind."""
        return {"kind": self.kind, **self.to_dict()}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        """Rebuild from `to_dict`, or, called on MixerConfig, from `tagged`."""
        if cls is not MixerConfig:
            return super().from_dict(values)
        from . import KINDS

        check(isinstance(values, dict), "MixerConfig", values, "an object of named fields")
        kind = values.get("kind")
        known = isinstance(kind, str) and kind in KINDS
        check(known, "the kind of a mixer", kind, ", ".join(map(repr, KINDS)))
        fields = {name: value for name, value in values.items() if name != "kind"}
        return KINDS[str(kind)].from_dict(fields)  # type: ignore[return-value]
