"""What a format does to the loss: the teacher-forced KL to high precision, and the loss after some steps of training.

The KL is measured in float32, where nothing but the format rounds: in bf16 a change of one layer is drowned in what the
rounding of all later ones makes of it. B batch, S sequence, V vocabulary.
"""

from __future__ import annotations

import contextlib
import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from te_models.layers import PerModuleRecipe, Recipe, autocast, set_rounding_seed

from ..eval_mode import in_eval_mode
from ..memory import return_freed_memory
from ..model import GPTModel
from ..training.build import build_model, build_optimizer
from ..training.config import PrecisionConfig, TrainConfig
from ..training.data.windows import Batch
from ..training.loop import balance_experts, evaluate_model
from ..training.optimizer.learning_rate import LearningRate
from ..training.ranks.layout import ONE_RANK
from ..training.seeding import derive_seed, rounding_seed, seed_all
from ..training.setup import set_loss_options, with_loss_chunk
from ..training.step import TrainingError, make_loss_function, train_step

_ROWS = 256
"""Positions whose distributions are in memory at a time."""
_INFINITE = 1e6
"""What stands for a KL that is not finite."""
_T_95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131)
"""Student's t of a two-sided 95 % interval, for 1, 2, ... degrees of freedom."""


def student(freedom: int) -> float:
    """Return Student's t of a two-sided 95 % interval; from 16 degrees on to within half a percent."""
    return _T_95[freedom - 1] if freedom <= len(_T_95) else 1.96 + 2.55 / freedom


@dataclass(frozen=True)
class Interval:
    """A mean over seeds and the half width of its 95 % interval (Student's)."""

    mean: float
    half_width: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Interval:
        """values: one per seed, at least two."""
        half = student(len(values) - 1) * statistics.stdev(values) / math.sqrt(len(values))
        return cls(statistics.fmean(values), half)

    @property
    def low(self) -> float:
        return self.mean - self.half_width

    @property
    def high(self) -> float:
        return self.mean + self.half_width

    def holds(self, value: float) -> bool:
        """Whether a value lies within."""
        return self.low <= value <= self.high

    def to_dict(self) -> dict[str, float]:
        """Return mean, low and high."""
        return {"mean": self.mean, "low": self.low, "high": self.high}


class Teacher:
    """A model in float32, what it predicts of held-out windows in high precision, and what its layers returned there.

    Layers before the one that a format is put on return again what they returned, where that gives the same bits.
    """

    def __init__(self, model: GPTModel, batch: Batch) -> None:
        self.model, self.batch = model.eval(), batch
        self.layers = dict(model.decoder.layers.named_children())
        self._returned: dict[str, Any] = {}
        with contextlib.ExitStack() as opened:
            for name, layer in self.layers.items():
                opened.callback(layer.register_forward_hook(self._keeper(name)).remove)
            self._logits = self._predicted()
        self._replays = len(self.layers) > 1 and self._is_replayed()

    def _keeper(self, name: str) -> Callable[..., None]:
        def called(_: Any, arguments: Any, found: Any) -> None:
            self._returned[name] = found

        return called

    def _is_replayed(self) -> bool:
        with self._replaying([*self.layers][len(self.layers) // 2]):
            return torch.equal(self._predicted(), self._logits)

    @contextlib.contextmanager
    def _replaying(self, first: str) -> Iterator[None]:
        """Have the layers before `first` return what they returned, while the block runs."""
        replaced: list[Any] = []
        try:
            for name, layer in self.layers.items():
                if name == first:
                    break
                found = self._returned[name]
                layer.forward = lambda *_, found=found, **__: found  # pyright: ignore[reportAttributeAccessIssue]
                replaced.append(layer)
            yield
        finally:
            for layer in replaced:
                del layer.forward

    def _predicted(self) -> Tensor:
        """Return logits [rows, V] of what is not padding."""
        ids, _, positions, documents = self.batch
        with torch.no_grad():
            logits = self.model(ids, position_ids=positions, document_ids=documents).logits
        return logits[documents >= 0] if documents is not None else logits.flatten(0, 1)

    def warm(self, recipe: Recipe, batch: Batch) -> None:
        """Let delayed scaling see a batch, whose amaxes are what its next pass scales by."""
        self.model.train()
        with torch.no_grad(), autocast(recipe=recipe):
            self.model(batch.input_ids, position_ids=batch.position_ids, document_ids=batch.documents)
        self.model.eval()

    def divergence(self, recipe: Recipe | None, group: str | None = None) -> tuple[float, float]:
        """Return (the mean KL to high precision in nats per token, its standard error over tokens).

        group: the one that is under the recipe, by the beginning of its layers' names; None: all. recipe: None
        computes in bfloat16.
        """
        set_rounding_seed(self.model, 0)
        number = group.rpartition(".")[2] if group is not None and group.startswith("decoder.layers.") else None
        with contextlib.ExitStack() as opened:
            if self._replays and number is not None:
                opened.enter_context(self._replaying(number))
            if recipe is None:
                opened.enter_context(torch.amp.autocast(self.batch.input_ids.device.type, dtype=torch.bfloat16))
            else:
                opened.enter_context(autocast(recipe=recipe if group is None else only(recipe, group)))
            logits = self._predicted()
        each = torch.cat(
            [_divergence(a, b) for a, b in zip(self._logits.split(_ROWS), logits.split(_ROWS), strict=True)]
        )
        if not bool(each.isfinite().all()):
            return _INFINITE, 0.0
        return float(each.mean()), float(each.std() / math.sqrt(len(each))) if len(each) > 1 else 0.0


def only(recipe: Recipe, group: str) -> PerModuleRecipe:
    """Return the recipe of one group of layers, with all others in high precision."""
    pattern = f"{group}.*" if group.rpartition(".")[2].isdigit() else group
    return PerModuleRecipe(default=recipe, rules=((pattern, recipe), ("*", "bf16")))


def _divergence(teacher: Tensor, of: Tensor) -> Tensor:
    p, q = (logits.float().log_softmax(-1).double() for logits in (teacher, of))
    return (p.exp() * (p - q)).sum(-1)


def train_briefly(
    config: TrainConfig,
    precision: PrecisionConfig,
    batches: Callable[[int], Batch],
    held_out: list[Batch],
    device: str,
    after: Callable[[GPTModel], None] | None = None,
) -> dict[str, Any] | None:
    """Train `config.steps` steps under `precision`, from the seed of the configuration, and return {"loss": the
    held-out loss under it afterwards, "losses": of each step}; None where one of them is not finite.

    batches: of a step, by its number; after: called with the model at the end.
    """
    config = config.replace(precision=precision)
    model = build_model(config, device, None)
    config = with_loss_chunk(config, None, model.config.vocab_size)
    set_loss_options(model, config.model)
    optimizer = build_optimizer(config, model)
    function = make_loss_function(model, precision, device, compiled=False)
    set_rounding_seed(model, rounding_seed(config.seed, 0))
    curve, losses = LearningRate.of(config), []
    has_experts = any(map(model.config.is_moe_layer, range(model.config.num_layers)))
    model.train()
    for step in range(config.steps):
        seed_all(derive_seed(config.seed, "step", step, 0))
        batch = batches(step).to(device)
        try:
            result = train_step(function, optimizer, [batch], curve.at(step), step=step + 1, ranks=ONE_RANK.gradients)
        except TrainingError:
            return None
        if has_experts:
            balance_experts(model, config.optimizer.moe_router_bias_update_rate, ONE_RANK)
        losses.append(result.loss)
        return_freed_memory()
    with in_eval_mode(model):
        loss = evaluate_model(model, function, held_out, device, ONE_RANK.gradients)
    if not math.isfinite(loss):
        return None
    if after is not None:
        after(model)
    return {"loss": loss, "losses": losses}
