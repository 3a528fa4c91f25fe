"""What of a model a run trains, told by names alone: for what a step costs, of models that are not there."""

import re
from collections.abc import Iterable, Sequence

from te_models.checkpoints import expected_tensors
from te_models.checkpoints.mapping.blocks import joined_blocks
from te_models.checkpoints.mapping.param_shapes import ExpertLayout, is_linear_weight

from ..config import ConfigError, ModelConfig
from ..lora.model import blocks_of_layers, targeted_layers
from ..model.flops import training_flops_per_token
from .config import TrainConfig
from .optimizer.groups import check_patterns, matches_any


def adapted_layers(config: TrainConfig, model: ModelConfig) -> set[str]:
    """Return the names of the layers with adapters; none without LoRA. Raises ConfigError for a target that means
    none."""
    if not config.lora.rank:
        return set()
    weights = filter(is_linear_weight, expected_tensors(model, "grouped"))
    layers = {name.rpartition(".")[0] for name in weights if not _in_untrained_indexer(name, model)}
    blocks = blocks_of_layers(model, "grouped")
    try:
        return {*targeted_layers(layers, config.lora.targets, blocks)}
    except ValueError as error:
        raise ConfigError(f"lora.targets is {list(config.lora.targets)!r}: {error}") from None


def _in_untrained_indexer(name: str, model: ModelConfig) -> bool:
    """Whether a weight is an indexer's that no loss trains, so that `add_lora` leaves it out."""
    if ".indexer." not in name:
        return False
    layer = _LAYER.match(name)
    attention = model.attention if layer is None else model.attention_of(int(layer[1]))
    return attention is None or attention.indexer is None or not attention.indexer.loss_coeff


def is_frozen(config: TrainConfig, name: str) -> bool:
    """Whether a parameter of the model is not trained."""
    return config.lora.rank > 0 or matches_any(name, config.optimizer.freeze)


def step_flops_per_token(config: TrainConfig, model: ModelConfig) -> float:
    """Return the model FLOPs of a training step of this run, divided by its tokens."""
    return training_flops_per_token(
        model,
        config.data.sequence_length,
        frozen=lambda name: is_frozen(config, name),
        lora={f"{layer}.weight": config.lora.rank for layer in adapted_layers(config, model)},
    )


def blocks_of(model: ModelConfig, layout: ExpertLayout) -> dict[str, dict[str, int]]:
    """Return the rows of each matrix that a weight joins, by its name and theirs, of the weights that join several."""
    shapes = expected_tensors(model, layout)
    found = {name: joined_blocks(model, name, shape) for name, shape in shapes.items()}
    return {name: blocks for name, blocks in found.items() if blocks}


def check_globs(config: TrainConfig, model: ModelConfig) -> None:
    """Raise ConfigError for a glob of the run that means no parameter, or no layer, of the model."""
    names, optimizer = list(expected_tensors(model, config.model.expert_layout)), config.optimizer
    adapted_layers(config, model)
    blocks = [f"{name}.{own}" for name, its in blocks_of(model, config.model.expert_layout).items() for own in its]
    for key in ("lr_mult", "wd_mult") if not config.lora.rank else ():
        check_patterns(f"optimizer.{key}", optimizer.multipliers(key), names + (blocks if key == "lr_mult" else []))
    check_patterns("optimizer.freeze", optimizer.freeze, names)
    check_patterns("optimizer.freeze_experts", optimizer.frozen_experts(), names)


def trained_by_layer(config: TrainConfig, model: ModelConfig) -> list[frozenset[str]]:
    """Return what tells each layer from others of its kind: the names within it of its parameters that are frozen, and
    of its layers with adapters."""
    found: list[set[str]] = [set() for _ in range(model.num_layers)]
    frozen = (name for name in expected_tensors(model, config.model.expert_layout) if is_frozen(config, name))
    for name in (*frozen, *adapted_layers(config, model)):
        layer = _LAYER.match(name)
        if layer is not None:
            found[int(layer[1])].add(name[layer.end() :])
    return [frozenset(names) for names in found]


def with_layers_alone(config: TrainConfig, model: ModelConfig, layers: Sequence[int]) -> TrainConfig:
    """Return the configuration of the same run of a model that has these layers of `model` alone, in their order: what
    is frozen or adapted is told by names, and multipliers are gone, because they cost nothing."""
    numbers = {layer: str(number) for number, layer in enumerate(layers)}

    def there(names: Iterable[str]) -> tuple[str, ...]:
        found = []
        for name in names:
            layer = _LAYER.match(name)
            if layer is None:
                found.append(name)
            elif int(layer[1]) in numbers:
                found.append(f"decoder.layers.{numbers[int(layer[1])]}.{name[layer.end() :]}")
        return tuple(sorted(found))

    names = expected_tensors(model, config.model.expert_layout)
    freeze = there(name for name in names if config.optimizer.freeze and is_frozen(config, name))
    optimizer = config.optimizer.replace(freeze=freeze, lr_mult=(), wd_mult=(), freeze_experts=())
    targets = there(adapted_layers(config, model)) or config.lora.targets
    return config.replace(optimizer=optimizer, lora=config.lora.replace(targets=targets))


_LAYER = re.compile(r"decoder\.layers\.(\d+)\.")
