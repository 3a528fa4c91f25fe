"""What an objective takes of a model that is not trained: a starting point, or a teacher."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor

from te_models.layers import autocast, microbatch

from ...compile.cache import backend_for
from ...compile.compile_model import Mode, compile_model, with_room
from ...eval_mode import in_eval_mode
from ...lora.model import without_adapters
from ...model import GPTModel
from ..data.windows import Batch


def frozen_runner(
    model: GPTModel,
    function: Callable[..., Tensor],
    *,
    trained: bool,
    compiled: bool,
    mode: Mode = "whole",
    with_recipe: bool = True,
) -> Callable[[Batch], Tensor]:
    """Return what computes `function(input_ids, labels, position_ids, documents)` of a batch with a model as it began:
    in eval mode, without gradients, adapters and weights that were quantized for a step.

    trained: whether it is the model that the run trains, without its adapters. compiled, mode: as for
    `make_loss_function`; that compiles the layers of the trained model with the mode "block". with_recipe: whether the
    recipe of the run is active.
    """
    run: Any = function
    if compiled and mode == "block" and not trained:
        compile_model(model, "block", dynamic=False)
    elif compiled and mode == "whole":
        run = with_room(torch.compile(function, fullgraph=True, dynamic=False, backend=backend_for(model)))

    def of_batch(batch: Batch) -> Tensor:
        with torch.no_grad(), _as_begun(model, adapted=trained, with_recipe=with_recipe):
            found: Tensor = run(*batch)
        return found

    return of_batch


@contextmanager
def _as_begun(model: GPTModel, *, adapted: bool, with_recipe: bool) -> Iterator[None]:
    with ExitStack() as stack:
        stack.enter_context(in_eval_mode(model))
        stack.enter_context(microbatch(first=None))
        if not with_recipe:
            stack.enter_context(autocast(enabled=False))
        if adapted:
            stack.enter_context(without_adapters(model))
        yield
