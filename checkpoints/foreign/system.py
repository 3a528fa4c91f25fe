"""What a training system's checkpoint is, as far as its tensors go: the names and layouts of weights and moments."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from te_models.config import ModelConfig

from ..families.base.family import HasShape
from ..io.errors import CheckpointError, shorten
from ..mapping.layout_ops import Layout
from ..mapping.param_shapes import expected_tensors
from ..mapping.tensor_map import Link, Namespace, TensorSpec

MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class System:
    """A way in which a training system stores a model.

    Attributes:
        name: what it is called, in options and errors.
        weights: canonical parameter name -> where its parts are stored, for a configuration and the names that a
            checkpoint has, or the default form where these are None.
        moment: the name of a parameter's optimizer state, by the stored name and the state's ("exp_avg").
        masters: what that may call the float32 copy of a weight; none where weights are float32 themselves.
        is_other: whether a stored name is of something that is no weight: random states, steps, scales.
        prefix: what the names of weights begin with in a distributed checkpoint that is written.
    """

    name: str
    weights: Callable[[ModelConfig, Mapping[str, HasShape] | None], Iterable[tuple[str, Layout]]]
    moment: Callable[[str, str], str]
    masters: tuple[str, ...]
    is_other: Callable[[str], bool]
    prefix: str = ""

    def namespace(
        self, config: ModelConfig, found: Mapping[str, HasShape] | None = None, state: str | None = None
    ) -> Namespace:
        """Return how a checkpoint stores the weights, or a state of the optimizer. Raises CheckpointError for a model
        that the system's names do not cover."""
        canonical = expected_tensors(config)
        stored: dict[str, TensorSpec] = {}
        links: list[Link] = []
        for name, layout in self.weights(config, found):
            if name not in canonical:
                raise CheckpointError(f"{self.name} has {name}, which this model does not have")
            for p in layout.place(canonical[name]):
                place = p.stored if state is None else self.moment(p.stored, state)
                stored[place] = TensorSpec(p.stored_shape, convertible=not name.endswith(".expert_bias"))
                links.append(Link(name, p.box, place, p.stored_box, p.axes))
        absent = sorted(canonical.keys() - {link.name for link in links})
        if absent:
            raise CheckpointError(f"{self.name} has no names that are known here for {shorten(absent)}")
        return Namespace(canonical, stored, tuple(links))


def is_optimizer(name: str) -> bool:
    """Whether a stored name is of an optimizer, as all of these systems say it."""
    return name.startswith(("optimizer.", "optim."))
