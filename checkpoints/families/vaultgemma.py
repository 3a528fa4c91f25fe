"""vaultgemma: gemma2 without the norms after the sublayers (arXiv 2510.15001)."""

from .base.family import Family
from .base.fields import Fixed
from .base.names import Names
from .gemma2 import GEMMA2

VAULTGEMMA = Family(
    model_type="vaultgemma",
    architecture="VaultGemmaForCausalLM",
    fields=tuple(Fixed("block", "pre") if entry == Fixed("block", "sandwich") else entry for entry in GEMMA2.fields),
    names=Names(norms=("input_layernorm", None, "pre_feedforward_layernorm", None)),
)
