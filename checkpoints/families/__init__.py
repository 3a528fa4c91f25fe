"""Hugging Face families: one small declarative file each, a configuration map and a weight map.

`model_type` in config.json selects the family. A folder that is labelled as another family than it is does not pass the
plan: its keys and shapes differ from what its configuration implies.
"""

from __future__ import annotations

import re

from te_models.suggestions import did_you_mean

from ..io.errors import CheckpointError
from .afmoe import AFMOE
from .apertus import APERTUS
from .arcee import ARCEE
from .axk1 import AXK1
from .bailing_hybrid import BAILING_HYBRID
from .bamba import BAMBA
from .base.family import Family
from .bloom import BLOOM
from .codegen import CODEGEN
from .cohere import COHERE
from .cohere2 import COHERE2
from .cohere2_moe import COHERE2_MOE
from .cwm import CWM
from .dbrx import DBRX
from .deepseek_v2 import DEEPSEEK_V2
from .deepseek_v3 import DEEPSEEK_V3, KIMI_K2
from .deepseek_v4 import DEEPSEEK_V4
from .deepseek_v32 import DEEPSEEK_V32
from .dots1 import DOTS1
from .ernie4_5 import ERNIE4_5
from .ernie4_5_moe import ERNIE4_5_MOE
from .exaone4 import EXAONE4
from .exaone_moe import EXAONE_MOE
from .falcon import FALCON
from .falcon_h1 import FALCON_H1
from .flex_olmo import FLEX_OLMO
from .flint import FLINT
from .gemma import GEMMA
from .gemma2 import GEMMA2
from .gemma3 import GEMMA3, GEMMA3_TEXT
from .gemma3n import GEMMA3N, GEMMA3N_TEXT
from .gemma4 import GEMMA4, GEMMA4_TEXT
from .glm import GLM
from .glm4 import GLM4
from .glm4_moe import GLM4_MOE
from .glm4_moe_lite import GLM4_MOE_LITE
from .glm5_next import GLM5_NEXT
from .glm_moe_dsa import GLM_MOE_DSA
from .gpt2 import GPT2
from .gpt_bigcode import GPT_BIGCODE
from .gpt_neo import GPT_NEO
from .gpt_neox import GPT_NEOX
from .gpt_oss import GPT_OSS
from .gptj import GPTJ
from .granite import GRANITE
from .granite_swa import GRANITE_SWA, GRANITEMOE_SWA
from .granitemoe import GRANITEMOE, GRANITEMOESHARED
from .granitemoehybrid import GRANITEMOEHYBRID
from .helium import HELIUM
from .hunyuan_v1_dense import HUNYUAN_V1_DENSE
from .hunyuan_v1_moe import HUNYUAN_V1_MOE
from .hy_v3 import HY_V3
from .hyperclovax import HYPERCLOVAX
from .internlm3 import INTERNLM3
from .iquestcoder import IQUESTCODER
from .jais2 import JAIS2
from .jamba import JAMBA
from .kimi_k25 import KIMI_K25
from .kimi_linear import KIMI_LINEAR
from .kolibri1 import KOLIBRI1
from .laguna import LAGUNA
from .lfm2 import LFM2
from .lfm2_moe import LFM2_MOE
from .lfm3 import LFM3
from .llama import LLAMA
from .llama4 import LLAMA4, LLAMA4_TEXT
from .mamba import FALCON_MAMBA, MAMBA
from .mamba2 import MAMBA2
from .mellum import MELLUM
from .mimo_v2_flash import MIMO_V2_FLASH
from .minicpm3 import MINICPM3
from .minimax import MINIMAX
from .minimax_m2 import MINIMAX_M2
from .ministral import MINISTRAL
from .ministral3 import MINISTRAL3
from .missing import missing_element
from .mistral import MISTRAL
from .mistral3 import MISTRAL3
from .mistral4 import MISTRAL4
from .mixtral import MIXTRAL
from .mpt import MPT
from .nanochat import NANOCHAT
from .nemotron import NEMOTRON
from .nemotron_h import NEMOTRON_H
from .olmo import OLMO
from .olmo2 import OLMO2
from .olmo3 import OLMO3
from .olmo_hybrid import OLMO_HYBRID
from .olmoe import OLMOE
from .opt import OPT
from .persimmon import PERSIMMON
from .phi import PHI
from .phi3 import PHI3
from .qwen2 import QWEN2
from .qwen2_5_vl import QWEN2_5_VL
from .qwen2_moe import QWEN2_MOE
from .qwen3 import QWEN3
from .qwen3_5 import QWEN3_5, QWEN3_5_MOE, QWEN3_5_MOE_TEXT, QWEN3_5_TEXT
from .qwen3_moe import QWEN3_MOE
from .qwen3_next import QWEN3_NEXT
from .qwen3_vl import QWEN3_VL
from .qwen3_vl_moe import QWEN3_VL_MOE
from .seed_oss import SEED_OSS
from .smollm3 import SMOLLM3
from .solar_open import SOLAR_OPEN
from .stablelm import STABLELM
from .starcoder2 import STARCODER2
from .vaultgemma import VAULTGEMMA
from .xglm import XGLM
from .youtu import YOUTU
from .zamba2 import ZAMBA2

_KNOWN = (
    # A model that was never in a Hugging Face folder is exported as the first that can express it.
    LLAMA,
    MISTRAL,
    QWEN2,
    QWEN3,
    MIXTRAL,
    QWEN3_MOE,
    GEMMA,
    GEMMA2,
    GEMMA3_TEXT,
    PHI3,
    PHI,
    OLMO,
    OLMO2,
    OLMO3,
    GLM4,
    GRANITE,
    SMOLLM3,
    STARCODER2,
    NEMOTRON,
    COHERE2,
    SEED_OSS,
    GPT2,
    GPT_NEOX,
    MINISTRAL3,
    QWEN2_MOE,
    OLMOE,
    GRANITEMOE,
    GRANITEMOESHARED,
    GPT_OSS,
    GLM4_MOE,
    DOTS1,
    ERNIE4_5_MOE,
    HUNYUAN_V1_MOE,
    MINIMAX_M2,
    FLEX_OLMO,
    EXAONE_MOE,
    DEEPSEEK_V2,
    DEEPSEEK_V3,
    KIMI_K2,
    GLM4_MOE_LITE,
    DEEPSEEK_V32,
    DEEPSEEK_V4,
    GLM_MOE_DSA,
    LLAMA4_TEXT,
    HY_V3,
    AFMOE,
    LAGUNA,
    FLINT,
    GRANITE_SWA,
    GRANITEMOE_SWA,
    KOLIBRI1,
    MIMO_V2_FLASH,
    INTERNLM3,
    IQUESTCODER,
    CWM,
    MINISTRAL,
    ARCEE,
    JAIS2,
    ERNIE4_5,
    HUNYUAN_V1_DENSE,
    COHERE,
    GLM,
    EXAONE4,
    MELLUM,
    SOLAR_OPEN,
    VAULTGEMMA,
    HYPERCLOVAX,
    YOUTU,
    AXK1,
    QWEN3_NEXT,
    QWEN3_5_TEXT,
    QWEN3_5_MOE_TEXT,
    LFM2,
    LFM2_MOE,
    MAMBA2,
    GRANITEMOEHYBRID,
    BAMBA,
    NEMOTRON_H,
    OLMO_HYBRID,
    KIMI_LINEAR,
    BAILING_HYBRID,
    FALCON_H1,
    ZAMBA2,
    MAMBA,
    FALCON_MAMBA,
    JAMBA,
    MINIMAX,
    GEMMA3N_TEXT,
    GEMMA4_TEXT,
    HELIUM,
    STABLELM,
    PERSIMMON,
    MINICPM3,
    MISTRAL4,
    GPTJ,
    CODEGEN,
    GPT_NEO,
    GPT_BIGCODE,
    NANOCHAT,
    OPT,
    XGLM,
    BLOOM,
    MPT,
    FALCON,
    DBRX,
    APERTUS,
    COHERE2_MOE,
    LFM3,
    QWEN3_5,
    QWEN3_5_MOE,
    GEMMA3,
    GEMMA3N,
    GEMMA4,
    LLAMA4,
    MISTRAL3,
    QWEN3_VL,
    QWEN3_VL_MOE,
    QWEN2_5_VL,
    KIMI_K25,
    GLM5_NEXT,
)
FAMILIES: dict[str, Family] = {f.model_type: f for f in _KNOWN}

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
