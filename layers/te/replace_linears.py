"""`replace_linears`: any model of torch or transformers, with our `Linear` in the place of `torch.nn.Linear`."""

import fnmatch
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from torch import Tensor, nn

from te_models.suggestions import shown

from ..module.autocast import quantized_model_init
from ..recipe.base import Recipe
from .module.linear import Linear

OUTPUT_LAYER = ("lm_head", "*.lm_head")
"""What `replace_linears` leaves alone unless told otherwise, beside `model.get_output_embeddings()`."""
_HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)


@dataclass(frozen=True)
class ReplacementReport:
    """replaced: the qualified names of the layers that are a `Linear` now; left: name -> why, of the other layers that
    multiply by a matrix. Layers of other classes than `torch.nn.Linear` and those derived from it are in neither."""

    replaced: tuple[str, ...] = ()
    left: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        lines = [f"{len(self.replaced)} replaced, {len(self.left)} left as they are"]
        return "\n".join(lines + [f"  {name}: {why}" for name, why in self.left.items()])


def replace_linears(
    model: nn.Module,
    recipe: Recipe | None = None,
    *,
    include: str | Sequence[str] = "*",
    exclude: str | Sequence[str] | None = None,
) -> ReplacementReport:
    """Put a `Linear` in the place of every `torch.nn.Linear` of a model, in place, and return what was replaced.

    The new layers hold the very parameters of the old ones: values, dtype, device, `requires_grad`, ties and the names
    in the state dict stay, and so does an optimizer that was built before. In high precision they compute the same
    numbers; under `autocast(recipe=...)` their GEMMs are quantized. They leave the state of recipes out of the state
    dict, so that the model saves and exports as before: `recipe_state(model)` gives it.

    recipe: the one the model is to run under; layers that it leaves in high precision (`PerModuleRecipe`) are not
    replaced. None: any. include, exclude: patterns on qualified names, * for any characters. exclude None: the output
    layer (`model.get_output_embeddings()`, or a layer called lm_head), since its rounding errors go straight into the
    logits, as other libraries leave it; whatever is given stands in its place, so `exclude=()` replaces that layer,
    too. Layers with hooks, of a subclass, without floating-point weights, or already sharded are left, with the reason.
    Raises ValueError for a model that is itself an `nn.Linear`, because nothing is around it, and for a pattern that
    matches none of them.
    """
    if isinstance(model, nn.Linear):
        raise ValueError("the model is itself an nn.Linear; allowed: a module around it")
    layers = {name: m for name, m in model.named_modules(remove_duplicate=False) if isinstance(m, nn.Linear)}
    included = _patterns("include", include, layers)
    excluded = OUTPUT_LAYER if exclude is None else _patterns("exclude", exclude, layers)
    find_output: Any = getattr(model, "get_output_embeddings", None) if exclude is None else None
    output = None if find_output is None else find_output()
    replaced: dict[str, Linear] = {}
    left: dict[str, str] = {}
    shared: dict[int, Linear] = {}
    for name, layer in layers.items():
        why = _reason_against(layer)
        if not _matches(name, included):
            why = "include does not name it"
        elif layer is output or _matches(name, excluded):
            why = "it is the output layer" if exclude is None else "exclude names it"
        elif recipe is not None and recipe.for_module(name) is None:
            why = f"{type(recipe).__name__} leaves it in high precision"
        if why is not None:
            left[name] = why
            continue
        if id(layer) not in shared:
            shared[id(layer)] = _linear_like(layer, name)
        replaced[name] = shared[id(layer)]
    for name, new in replaced.items():
        parent, _, own = name.rpartition(".")
        setattr(model.get_submodule(parent), own, new)
    return ReplacementReport(tuple(replaced), left)


def _patterns(what: str, patterns: str | Sequence[str], layers: dict[str, nn.Linear]) -> tuple[str, ...]:
    found = (patterns,) if isinstance(patterns, str) else tuple(patterns)
    for pattern in found:
        if pattern != "*" and not any(_matches(name, (pattern,)) for name in layers):
            raise ValueError(f"{what} has the pattern {shown(pattern)}, which matches no nn.Linear of the model")
    return found


def _matches(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def _reason_against(layer: nn.Linear) -> str | None:
    """Return why a layer cannot be replaced; None: it can."""
    if type(layer) is not nn.Linear:
        return f"its class is {type(layer).__name__}, derived from nn.Linear"
    if "forward" in vars(layer) or any(getattr(layer, name, None) for name in _HOOKS):
        return "it has hooks, or a forward of its own"
    if not layer.weight.is_floating_point():
        return f"its weight is {layer.weight.dtype}"
    parameters = dict(layer.named_parameters(recurse=False))
    own = [name for name, p in parameters.items() if name in ("weight", "bias") and type(p) in (nn.Parameter, Tensor)]
    if set(parameters) != set(own) or "weight" not in own or len(layer._buffers) or len(layer._modules):
        return "its weight and bias are not plain parameters: replace layers before they are sharded or wrapped"
    return None


def _linear_like(layer: nn.Linear, name: str) -> Linear:
    """Return a `Linear` with the parameters of `layer`."""
    options: dict[str, Any] = {"params_dtype": layer.weight.dtype, "device": "meta", "name": name}
    with quantized_model_init(enabled=False):
        new = Linear(layer.in_features, layer.out_features, layer.bias is not None, **options)
    new.weight, new.bias = cast(nn.Parameter, layer.weight), cast(nn.Parameter | None, layer.bias)
    new.state_in_state_dict = False
    new.place_state(layer.weight.device)
    return new.train(layer.training)
