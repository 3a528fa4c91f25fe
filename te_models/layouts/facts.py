"""What is known of a layout over ranks by the one who asks whether it can be.

Whoever divides something knows a part: a configuration its keys, `ParallelDims` the number of ranks, `Build` a model
and its groups, a run and a plan all of it. Rules about something unknown are not asked, so one table serves them all.
"""

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Self

from ..config import ModelConfig

ExpertLayout = Literal["grouped", "per-gemm"]
ExpertDispatch = Literal["all_to_all", "all_to_all_quantized", "all_gather", "deepep"]
REST = -1
"""A size that is what the other sizes leave of the ranks."""


class Rule(NamedTuple):
    """Something that a layout has to fulfil, and whether it does.

    The sentence is "KEY is VALUE; allowed WHERE: ALLOWED", and a key's default is always allowed; or it is the key and
    what the rule `says`.
    """

    key: str
    holds: object
    allowed: str = ""
    where: str = ""
    says: str = ""


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What is known of a layout; None, or the default, where it is not.

    run, parallel: a TrainConfig and its table. dims: a ParallelDims. stages: a StageLayout. model: a ModelConfig.
    num_layers: its layers. layers: those of one pipeline stage. built: over how many ranks a model was built, by the
    names of sizes. tp, ep, etp, cp: over how many ranks layers are split, experts distributed, each expert split and
    sequences shared. distributed, apart: whether experts are distributed, and split over other ranks than the layers.
    cp_comm_type: how attention reaches the keys of ranks that share sequences.
    """

    run: Any = None
    parallel: Any = None
    dims: Any = None
    stages: Any = None
    model: Any = None
    num_layers: Any = None
    layers: Any = None
    built: Any = None
    tp: int = 1
    ep: int = 1
    etp: int = 1
    cp: int = 1
    distributed: bool = False
    apart: bool = False
    sequence_parallel: bool = False
    expert_layout: str = "grouped"
    expert_dispatch: str = "all_to_all"
    cp_comm_type: str = "all_gather"

    @classmethod
    def of_table(cls, parallel: Any, **known: Any) -> Self:
        """Return what the table [parallel] of a configuration says, and what else is known."""
        over = known.get("dims") or parallel  # of a known number of ranks, or as the table has them
        tp, ep = over.tensor_model_parallel_size, over.expert_model_parallel_size
        etp = tp if over.expert_tensor_parallel_size is None else over.expert_tensor_parallel_size
        sizes: dict[str, Any] = {"tp": tp, "ep": ep, "etp": etp, "cp": over.context_parallel_size}
        sizes |= {"distributed": ep > 1, "apart": etp != tp, "sequence_parallel": parallel.sequence_parallel}
        sizes |= {"expert_dispatch": parallel.expert_dispatch, "cp_comm_type": parallel.cp_comm_type}
        return cls(parallel=parallel, **sizes, **known)

    @classmethod
    def of_run(cls, run: Any, model: ModelConfig | None, **known: Any) -> Self:
        """Return what the configuration of a run says, and what else is known."""
        known |= {"run": run, "model": model, "num_layers": None if model is None else model.num_layers}
        return cls.of_table(run.parallel, expert_layout=run.model.expert_layout, **known)

    @property
    def is_sharded(self) -> bool:
        """Whether FSDP2 shards parameters."""
        if self.dims is not None:
            return self.dims.is_sharded
        return self.parallel is not None and self.parallel.data_parallel_shard_size != 1

    @property
    def filled(self) -> Any:
        """The sizes of `dims`, once those that were left open are filled in."""
        return None if self.dims is None or not self.dims.is_complete else self.dims

    @property
    def uses_deepep(self) -> bool:
        """Whether tokens travel by deep_ep."""
        return self.expert_dispatch == "deepep" and self.ep > 1

    @property
    def shares_tokens(self) -> bool:
        """Whether ranks that split layers have a part of the tokens each between these."""
        return self.sequence_parallel and self.tp > 1

    def part_with(self, key: str) -> tuple[Any, str]:
        """Return what has a key, of these facts, the run and the model, and the key's last name."""
        *outer, name = key.split(".")
        for part in (self, self.run, self.model):
            for word in outer:
                part = getattr(part, word, None)
            if hasattr(part, name):
                return part, name
        raise KeyError(key)

    def is_key(self, key: str) -> bool:
        """Whether a run, if one is known, has a key of this name."""
        part = self.run
        for word in key.split(".") if part is not None else ():
            part = getattr(part, word, None)
        return " " not in key and (self.run is None or part is not None)

    def sentence(self, rule: Rule) -> str | None:
        """Return what is wrong with a layout that breaks a rule; None where it holds."""
        if rule.holds or rule.says:
            return None if rule.holds else rule.key + rule.says
        part, name = self.part_with(rule.key)
        value = getattr(part, name)
        if value == part.__dataclass_fields__[name].default:
            return None
        within = f"allowed {rule.where}" if rule.where else "allowed"
        return f"{rule.key} is {list(value) if isinstance(value, tuple) else value!r}; {within}: {rule.allowed}"
