"""What a layer and a mixer agree on: what a mixer is built from, what it reads, and what it remembers.

B batch, S sequence, L keys (cached ones included), H hidden.
"""

from typing import Any, NamedTuple, Protocol

from torch import Tensor, nn

from te_models.layers.distributed.context_parallel import ContextShard

from ..rotary import Rotary

KeysValues = tuple[Tensor, Tensor]
"""Keys [B, L, G, D] and values [B, L, G, Dv] that a layer attends with, a cache's included."""


class TokenInputs(NamedTuple):
    """What some layers read of the tokens. positions: [B or 1, S]; ids: [B, S] int64; embedded: [B, S, H], what the
    first layer reads; norm_weight: [C], of the norm that the embeddings of all layers share."""

    positions: Tensor
    ids: Tensor | None = None
    embedded: Tensor | None = None
    norm_weight: Tensor | None = None


class MixerInputs(NamedTuple):
    """What a mixer reads beside the hidden states.

    rotary: tables of the positions; None: no rotation. hidden_keys: [B, 1, 1 or S, L] bool, True where a key is
    padding, or hidden from a query; or, where an attention `packs`, the document numbers [B, S] int64. query_scale: [B
    or 1, S, 1, 1] float32, what queries are multiplied by. batch_size: B, where x and the result are this rank's part
    of the tokens, [B S / ranks, H]; None: they are all. token_mask: [B, S] bool, False for padding; None: the layer has
    none. documents: [B, S] int64, of the whole sequences: neighbours with the same number are a document, at whose
    beginning a recurrent mixer starts again; negative for padding; None: every row is one document. keys_values: what
    an earlier layer attended with, where this one has no keys and values. choice: which keys the last sparse attention
    before chose, see `Selection`. positions: [B or 1, S], of layers with compressed keys.
    """

    rotary: Rotary | None = None
    hidden_keys: Tensor | None = None
    query_scale: Tensor | None = None
    batch_size: int | None = None
    token_mask: Tensor | None = None
    documents: Tensor | None = None
    keys_values: KeysValues | None = None
    choice: Tensor | None = None
    positions: Tensor | None = None


class Selection(NamedTuple):
    """What sparse attention returns beside its result. choice: int32 [B, S, K], the keys that each query sees, negative
    for none; None: all. loss: the indexer's own loss, weighted; None where nothing trains it."""

    choice: Tensor | None
    loss: Tensor | None


class Mixer(Protocol):
    """A token mixer, as a layer calls it."""

    context_shard: ContextShard | None

    def __call__(self, x: Tensor, inputs: MixerInputs, cache: Any = None) -> Tensor | tuple[Tensor, Selection]:
        """x: [B, S, H] -> [B, S, H], without residual connection; sparse attention also returns a Selection. cache:
        this layer's memory."""
        ...


class RecurrentMixer(nn.Module):
    """Base of the mixers that carry a state of fixed size from token to token.

    A module is built as `Module(config, mixer, layer, build)`, mixer being its configuration. A subclass builds its
    projections of `make_input_linear` and `make_output_linear`, so that recipes, stored weights, LoRA and tensor
    parallelism apply. Its parameters have the names in its configuration's `parameters`, whose `blocks` say
    what a rank has. Its input is normed already: the layer's `input_layernorm` does it. `forward` reads `cache.read()`,
    one tensor [B, *shape] for each of the configuration's `states`, goes on from there, and gives the states behind its
    last token to `cache.write`; it changes nothing in place that it read. Tokens that `inputs.token_mask` calls padding
    change no state, and documents begin with a state of zeros.
    """

    def __init__(self) -> None:
        super().__init__()
        self.context_shard: ContextShard | None = None
        """The ranks that share sequences; None: each has whole ones."""

    def forward(self, x: Tensor, inputs: MixerInputs, cache: Any = None) -> Tensor:
        """As `Mixer`."""
        raise NotImplementedError(type(self).__name__)
