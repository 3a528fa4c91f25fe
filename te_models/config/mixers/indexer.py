"""The indexer of sparse attention (DeepSeek-V3.2, arXiv 2512.02556): it chooses the keys that each query sees."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from ..part import ConfigPart, check


@dataclass(frozen=True, kw_only=True)
class IndexerConfig(ConfigPart):
    """A small attention without values, whose scores say which `topk` keys a query sees. It reads the normed input, and
    for its queries the latent of attention's queries where there is one; no gradient goes back there."""

    n_heads: int = 64
    """Number of index heads."""
    head_dim: int = 128
    """Channels of each index head, and of the one index key of a token."""
    topk: int = 2048
    """Keys that a query sees; of this many tokens or fewer it sees all."""
    rotated: Literal["first", "last", "none"] = "first"
    """Which channels of an index head the rotary embedding rotates, as many as it rotates of attention's heads."""
    rope_style: Literal["half", "interleaved"] = "half"
    """Channels that are rotated together, as rope.style of attention's heads."""
    layernorm_epsilon: float = 1e-6
    """Epsilon of the LayerNorm of the index key."""
    pool_size: int | None = None
    """Tokens whose index keys are one, a sum of them with learned weights: the indexer chooses all tokens of a pool,
    and a query sees those behind the last whole pool, too; unset means that each token has a key."""
    shared: bool = False
    """Whether the layer has no indexer and sees what the last layer before it chose."""
    loss_coeff: float = 0.0
    """Weight of the indexer's loss of training, KL(attention's distribution || distribution of the index scores), the
    only loss that trains it; 0 means that it stays as it is."""
    warmup: bool = False
    """Whether training sees all keys, and the loss compares all of them (the report's dense warm-up)."""

    _LATER: ClassVar[frozenset[str]] = frozenset({"pool_size"})

    def _validate(self) -> None:
        for name in ("n_heads", "head_dim", "topk"):
            check(getattr(self, name) > 0, f"indexer.{name}", getattr(self, name), "a positive integer")
        check(self.layernorm_epsilon > 0, "indexer.layernorm_epsilon", self.layernorm_epsilon, "a positive number")
        check(self.loss_coeff >= 0, "indexer.loss_coeff", self.loss_coeff, "zero or a positive number")
        trained = self.loss_coeff > 0 or self.warmup
        check(not (self.shared and trained), "indexer.shared", True, "false with loss_coeff or warmup")
        pool = self.pool_size
        if pool is not None:
            divides = pool > 0 and self.topk % pool == 0
            check(divides, "indexer.pool_size", pool, f"a divisor of topk = {self.topk}, or null")
            check(not (self.shared or trained), "indexer.pool_size", pool, "null with shared, loss_coeff or warmup")

    @property
    def key_channels(self) -> int:
        """Channels that a token has for the indexer: of its key, and, in a pool, of the logits of its weight."""
        return self.head_dim * (1 if self.pool_size is None else 2)

    @property
    def choices(self) -> int:
        """Keys that a query sees at most where it does not see all."""
        return self.topk + (0 if self.pool_size is None else self.pool_size - 1)
