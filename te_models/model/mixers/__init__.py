"""Token mixers: what mixes the tokens of a layer, one file a kind.

attention         softmax attention                    latent_attention  softmax attention over a latent
gated_delta       the gated delta rule                 mamba2            a state space with scalar decays
mamba             a state space of each channel        short_convolution a gated convolution
sparse_attention  the indexer of either attention      base              what a layer and a mixer agree on
convolved         what recurrent mixers share          lightning         linear attention with a fixed decay
index_pools       an indexer that chooses pools        shared_sequence   rules of ranks that share sequences
compressed_attention  a window and compressed keys

`mixer_class` says which module computes a kind. To add a kind: its configuration in `te_models/config/mixers/`, its
module here, and an entry below.
"""

from collections.abc import Callable

from ...config import AttentionConfig, ConfigError, MixerConfig
from .attention import SelfAttention
from .base import KeysValues, Mixer, MixerInputs, RecurrentMixer, Selection, TokenInputs
from .compressed_attention import CompressedAttention
from .gated_delta import GatedDelta
from .latent_attention import LatentAttention
from .lightning import Lightning
from .mamba import Mamba
from .mamba2 import Mamba2
from .short_convolution import ShortConvolution
from .sparse_attention import train_indexers

RECURRENT: dict[str, Callable[..., RecurrentMixer]] = {
    "gated_delta": GatedDelta,
    "lightning": Lightning,
    "mamba": Mamba,
    "mamba2": Mamba2,
    "short_convolution": ShortConvolution,
}
"""Kind -> the module that computes it."""

__all__ = [
    "RECURRENT",
    "KeysValues",
    "Mixer",
    "MixerInputs",
    "RecurrentMixer",
    "Selection",
    "TokenInputs",
    "attention_class",
    "recurrent_class",
    "train_indexers",
]


def attention_class(
    attention: AttentionConfig,
) -> type[SelfAttention] | type[LatentAttention] | type[CompressedAttention]:
    """Return the module that computes an attention."""
    if attention.compressed is not None:
        return CompressedAttention
    return SelfAttention if attention.mla is None else LatentAttention


def recurrent_class(mixer: MixerConfig) -> Callable[..., RecurrentMixer]:
    """Return the module that computes a mixer that is no attention; ConfigError for a kind without one."""
    if mixer.kind not in RECURRENT:
        raise ConfigError(f"mixers has the kind {mixer.kind!r}, which GPTModel does not implement")
    return RECURRENT[mixer.kind]
