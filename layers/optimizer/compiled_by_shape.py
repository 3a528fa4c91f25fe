"""Functions that are compiled once for each shape of their arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from te_models.kernels.compiling import compiling

_SHAPES = 64  # more run eagerly


def compiled_by_shape(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return `function` compiled, once per shape: with symbolic shapes quantizations run several times slower on CPU.

    Inside a region that is being compiled, `function` itself is called.
    """
    compiled = torch.compile(function, dynamic=False)

    def run(*args: Any) -> Any:
        if compiling():
            return function(*args)
        # a model has more shapes of weights than the compiler expects of one function
        with torch._dynamo.config.patch(recompile_limit=_SHAPES):
            return compiled(*args)

    return run
