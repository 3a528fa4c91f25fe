"""Hugging Face families: one small declarative file each, a configuration map and a weight map.

`model_type` in config.json selects the family. A folder that is labelled as another family than it is does not pass the
plan: its keys and shapes differ from what its configuration implies.
"""

import re
from collections.abc import Iterator, Mapping
from importlib import import_module

from te_models.suggestions import did_you_mean

from ..io.errors import CheckpointError
from .base.family import Family
from .missing import missing_element

# fmt: off
_KNOWN = (
    "llama", "mistral", "qwen2", "qwen3", "mixtral", "qwen3_moe", "gemma", "gemma2", "gemma3:gemma3_text", "phi3",
    "phi", "olmo", "olmo2", "olmo3", "glm4", "granite", "smollm3", "starcoder2", "nemotron", "cohere2",
    "seed_oss", "gpt2", "gpt_neox", "ministral3", "qwen2_moe", "olmoe", "granitemoe",
    "granitemoe:granitemoeshared", "gpt_oss", "glm4_moe", "dots1", "ernie4_5_moe", "hunyuan_v1_moe", "minimax_m2",
    "flex_olmo", "exaone_moe", "deepseek_v2", "deepseek_v3", "deepseek_v3:kimi_k2", "glm4_moe_lite",
    "deepseek_v32", "deepseek_v4", "glm_moe_dsa", "llama4:llama4_text", "hy_v3", "afmoe", "laguna", "flint",
    "granite_swa", "granite_swa:granitemoe_swa", "kolibri1", "mimo_v2_flash", "internlm3", "iquestcoder", "cwm",
    "ministral", "arcee", "jais2", "ernie4_5", "hunyuan_v1_dense", "cohere", "glm", "exaone4", "mellum",
    "solar_open", "vaultgemma", "hyperclovax", "youtu", "axk1", "qwen3_next", "qwen3_5:qwen3_5_text",
    "qwen3_5:qwen3_5_moe_text", "lfm2", "lfm2_moe", "mamba2", "granitemoehybrid", "bamba", "nemotron_h",
    "olmo_hybrid", "kimi_linear", "bailing_hybrid", "falcon_h1", "zamba2", "mamba", "mamba:falcon_mamba", "jamba",
    "minimax", "gemma3n:gemma3n_text", "gemma4:gemma4_text", "helium", "stablelm", "persimmon", "minicpm3",
    "mistral4", "gptj", "codegen", "gpt_neo", "gpt_bigcode", "nanochat", "opt", "xglm", "biogpt",
    "bloom", "mpt", "falcon", "dbrx", "apertus", "cohere2_moe", "lfm3", "qwen3_5", "qwen3_5:qwen3_5_moe", "gemma3",
    "gemma3n", "gemma4", "llama4", "mistral3", "qwen3_vl", "qwen3_vl_moe", "qwen2_5_vl", "kimi_k25", "glm5_next",
)
# fmt: on
"""Each family in order, as its model_type, or as FILE:model_type where the file has another name. A model that was
never in a Hugging Face folder is exported as the first that can express it."""


class _Families(Mapping[str, Family]):
    """Families by model_type. The file of a family is imported when the family is first asked for: all of them take
    longer than a small model's bytes."""

    def __init__(self) -> None:
        self._files = {model_type: file or model_type for file, _, model_type in (k.rpartition(":") for k in _KNOWN)}

    def __getitem__(self, model_type: str) -> Family:
        found: Family = getattr(import_module(f".{self._files[model_type]}", __name__), model_type.upper())
        return found

    def file_of(self, model_type: str) -> str:
        """Return the name of the file that declares a family."""
        return self._files[model_type]

    def __contains__(self, model_type: object) -> bool:
        return model_type in self._files

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)


FAMILIES = _Families()

__all__ = ["FAMILIES", "Family", "family_of"]


def _near(model_type: object) -> str:
    """Return, in words, the families whose names a model type begins with, or is nearest to."""
    word = re.split(r"[\d_.-]", model_type, maxsplit=1)[0] if isinstance(model_type, str) else ""
    relatives = [name for name in FAMILIES if len(word) > 2 and name.startswith(word)]
    return f"; near: {', '.join(relatives)}" if relatives else did_you_mean(model_type, FAMILIES)


def family_of(model_type: object) -> Family:
    """Return the family of a `model_type`, or raise CheckpointError naming the known ones."""
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        element = missing_element(model_type) if isinstance(model_type, str) else None
        lacks = f": its layers need an element that te_models lacks, {element}" if element else ""
        raise CheckpointError(
            f"model_type {model_type!r} is not supported{lacks}{_near(model_type)}; docs/families.md lists the "
            f"{len(FAMILIES)} families, docs/contributing/family.md shows how to add one"
        )
    return FAMILIES[model_type]
