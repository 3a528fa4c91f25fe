"""codegen: gptj with one projection for q, k and v, whose rows lie in four blocks (arXiv 2203.13474)."""

from dataclasses import replace

from .base.family import Family
from .gptj import FORM, GPTJ, MASKS

CODEGEN = Family(
    model_type="codegen",
    architecture="CodeGenForCausalLM",
    fields=GPTJ.fields,
    names=replace(FORM, qkv=("attn.qkv_proj",), qkv_blocks=4),
    unused=MASKS,
)
