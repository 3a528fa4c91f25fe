"""Parameters whose precision a family fixes, whatever dtype a model is loaded in.

A router chooses by scores that differ by less than bfloat16 resolves: rounded, it sends tokens to other experts.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from ..gpt import GPTModel


@torch.no_grad()
def keep_dtypes(gpt: GPTModel, family: str | None, stored: Callable[[str], torch.dtype]) -> None:
    """Widen such parameters of a model that is about to be filled to the dtype that `stored` returns for their names;
    none gets narrower. family: the name of the Hugging Face family; None: there are none."""
    from te_models.checkpoints.families import FAMILIES

    known = FAMILIES.get(family or "")
    patterns = known.keeps_dtype if known is not None else ()
    for name, parameter in gpt.named_parameters():
        if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns):
            parameter.data = parameter.data.to(torch.promote_types(parameter.dtype, stored(name)))
