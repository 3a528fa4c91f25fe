"""What is asked of, or done to, all layers of a model that recipes apply to."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from ..quantizer.state import SEEDS, STREAMS, default_seed
from ..recipe.base import Recipe
from ..tensor.fsdp import sharded
from .autocast import microbatch
from .base import QuantizedModule


def quantized_modules(model: nn.Module) -> Iterator[tuple[str, QuantizedModule]]:
    """Yield the layers of a model that recipes apply to, with their qualified names."""
    return ((name, m) for name, m in model.named_modules() if isinstance(m, QuantizedModule))


def name_modules(model: nn.Module) -> None:
    """Tell every layer its qualified name in `model`, for per-module rules, custom recipes and statistics."""
    for name, module in quantized_modules(model):
        module.name = name


def cache_weights(model: nn.Module, *, noop: Tensor | None = None) -> None:
    """Quantize every weight once, under the recipe in force, for micro-batches that run, compiled or not, under
    `microbatch(first=False)`. Call it inside `autocast`, again after each optimizer step. noop: see `microbatch`.
    ValueError for weights that FSDP2 shards, because they are whole only within a call of their layer."""
    with microbatch(first=True, noop=noop):
        for name, module in quantized_modules(model):
            for gemm, weights in module.gemm_weights().items():
                if sharded(weights):
                    raise ValueError(
                        f"the weights of {name or type(module).__name__} are sharded by FSDP2 here; allowed: "
                        "microbatch(first=True) around the first micro-batch"
                    )
                module.cached_weight(weights, True, gemm)
            use = module.recipe_use.in_thread.now
            use.calibrated |= use.recorded  # an update is due at the exit, also where gradients are off for this call


def set_rounding_seed(model: nn.Module, seed: int) -> None:
    """Seed stochastic rounding: each layer's stream follows from `seed` and its position in the model, and its counter
    starts again, so equal seeds give equal runs. Give ranks that hold the same layers different seeds, as for dropout.

    seed: 0 to 2^42 - 1, else ValueError. A model that is not seeded draws by the state of torch's generator when it was
    built, see `default_rounding_seed`.
    """
    if not 0 <= seed < SEEDS:
        raise ValueError(f"seed is {seed}; allowed: 0 to {SEEDS - 1}")
    _set_streams(model, seed)


def default_rounding_seed(model: nn.Module) -> None:
    """Seed stochastic rounding by the state of torch's CPU generator: after `torch.manual_seed`, the same for a model
    built again, on every device. `GPTModel` does so; a layer on its own does it for itself."""
    _set_streams(model, default_seed())


def _set_streams(model: nn.Module, seed: int) -> None:
    for i, (_, module) in enumerate(quantized_modules(model)):
        module.fp8_rng_state.copy_(torch.tensor([seed * STREAMS + i, 0], device="cpu"))


def recipe_state(model: nn.Module) -> dict[str, Tensor]:
    """Return the state of a model's recipes by qualified name: what a resumed run needs besides the weights.

    fp8_scale [3, G], fp8_history [length, 3, G] and the amaxes are float32, for the roles input, weight and grad_output
    and G scales of each; fp8_rng_state [2] is int64, the seed and counter of stochastic rounding.
    """
    found = {}
    for name, module in quantized_modules(model):
        for key, value in module.recipe_state().items():
            found[f"{name}.{key}" if name else key] = value
    return found


def prepare_recipe_state(model: nn.Module, recipe: Recipe) -> None:
    """Have `state_dict` and `recipe_state` of a model hold what `recipe` needs, before the first step, too.

    For loaders that fill the state dict that they are given, as torch.distributed.checkpoint does: they leave out what
    a new model has not in use yet. Call it before saving and before loading, with the recipe of the run; no number
    changes by it. Rules by name need the layers' names, see `name_modules`.
    """
    for _, module in quantized_modules(model):
        module.prepare_recipe_state(recipe)


def load_recipe_state(model: nn.Module, values: dict[str, Tensor]) -> None:
    """Load what `recipe_state` of an equal model returned, each tensor in its shape and dtype.

    Raises ValueError for a name that the model does not have, and for another shape or dtype.
    """
    modules = dict(quantized_modules(model))
    for name, value in values.items():
        owner, _, key = name.rpartition(".")
        if owner not in modules:
            raise ValueError(f"the recipe state names {name}, which is not a layer of this model")
        modules[owner].set_recipe_state({key: value})
