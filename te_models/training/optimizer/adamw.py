"""The optimizer of a run over named parameters: one or more of the kinds of `optimizer.kind`; clipping, and state by
name for checkpoints.

The arithmetic is `te_models.layers.FusedAdamW`: one pass over parameter, gradient and both moments (5 ms for 8 M
float32 parameters on one core, against 15 ms compiled by Inductor and 34 ms foreach). The learning rate is a tensor
that is filled before each step: its value is data, so nothing that reads it specialises on it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from te_models.layers import FusedAdamW, gradient_of
from te_models.layers.optimizers.moments import MOMENT_KEYS
from te_models.layers.optimizers.norm import tensor_norm
from te_models.layers.tensor.fsdp import local_part

from ...config import ConfigError
from ..checkpoints.checks import check_ranges, check_same_layout
from ..config import OptimizerConfig
from ..host import reads_are_free
from ..ranks.experts import ExpertRanks
from .frozen_experts import FrozenExperts
from .groups import BlockRates, optimizer_groups
from .muon import Muon
from .whole_matrix import DividedMatrix
from .zero import GroupOf, SharedUpdate

if TYPE_CHECKING:
    from ...parallel.parts import LocalPart, ModelParts, ShardOfParameter

SPIKE_AFTER, SPIKE_SHARE = 20, 0.02
"""Steps before a gradient norm can be a spike, and the share of a step in the running average of norms."""


def norm_over(
    groups: Iterable[dist.ProcessGroup | None], norms: Iterable[torch.Tensor], device: torch.device
) -> torch.Tensor:
    """Return the norm of a vector that is divided over the ranks of groups, from the norms of this rank's parts."""
    total = torch.zeros((), dtype=torch.float64, device=device)  # whose squares do not overflow
    for norm in norms:
        total += norm.double().square()
    for group in groups:
        dist.all_reduce(total, group=group)
    return total.sqrt().float()


class ScheduleFreeAdamW:
    """Schedule-free AdamW (A. Defazio et al., arXiv 2405.15682): an average of the weights in place of a decay of lr.

    Passes see y, between the weights z that steps move and their average x: y = (1 - beta1) z + beta1 x. Parameters are
    y while the run trains, and x wherever the model is measured or written, for as long as `averaged` lasts; x is
    computed and not kept, so that there are as many numbers as AdamW has. A checkpoint holds y beside z, since to
    compute it back from x would round. The arithmetic is that of the package schedulefree, of which this differs in
    what it reads and writes: `main_grad`, float32 masters, and a step that a tensor can switch off.

    params: groups with "params", "lr" (a scalar tensor) and "weight_decay" (of y). lr: the scalar tensor that
    the weights of the average follow, as its square. master_weights: keep a float32 y of parameters of fewer bits.

    State per parameter: "z" and "exp_avg_sq" (float32), and y, as "master" or "y": the parameter itself while it
    trains. `counters` [3], float64: finished steps, the largest rate, and the sum of the squares.
    """

    def __init__(
        self,
        params: list[dict[str, Any]],
        *,
        lr: Tensor,
        betas: tuple[float, float],
        eps: float,
        master_weights: bool,
    ) -> None:
        self.param_groups, self.lr, self.betas, self.eps = params, lr, betas, eps
        self.counters = torch.zeros(3, dtype=torch.float64, device=lr.device)
        self.state: dict[Tensor, dict[str, Tensor]] = {}
        for p in (p for group in params for p in group["params"]):
            y = p.detach()
            if master_weights and p.dtype.itemsize < 4:
                y = y.float()
            squares = torch.zeros_like(p, dtype=torch.float32, requires_grad=False)
            self.state[p] = {"z": p.detach().float().clone(), "exp_avg_sq": squares, _name_of(p, y): y}

    @torch.no_grad()
    def step(self, *, noop: Tensor | None = None) -> None:
        """Update the parameters from their gradients. noop: a scalar tensor; where it is nonzero nothing changes."""
        beta1, beta2 = self.betas
        count, largest, total = self.counters.unbind()
        largest = torch.maximum(largest, self.lr.double())
        total = total + largest.square()
        share, correction = largest.square() / total, 1 - beta2 ** (count + 1)
        for group in self.param_groups:
            lr, decay = group["lr"].double(), group["weight_decay"]
            for p in group["params"]:
                gradient = gradient_of(p)
                if gradient is None:
                    continue
                state, gradient = self.state[p], local_part(gradient).float()
                z, squares = local_part(state["z"]), local_part(state["exp_avg_sq"])
                y = local_part(state.get("master", p)).float()  # pyright: ignore[reportArgumentType]
                c, rate, corrected = (value.to(z.device) for value in (share, lr, correction))
                new_squares = squares * beta2 + (1 - beta2) * gradient.square()
                step = gradient / ((new_squares / corrected).sqrt() + self.eps) + decay * y
                new_y = y + c * (z - y) + (rate * (beta1 * (1 - c) - 1)) * step
                new_z = z - rate * step
                if noop is not None:
                    skip = noop.to(z.device).bool()
                    news = (new_squares, squares), (new_y, y), (new_z, z)
                    new_squares, new_y, new_z = (torch.where(skip, old, new) for new, old in news)
                squares.copy_(new_squares)
                z.copy_(new_z)
                if "master" in state:
                    local_part(state["master"]).copy_(new_y)
                local_part(p).copy_(new_y)
        counters = torch.stack([count + 1, largest, total])
        self.counters.copy_(counters if noop is None else torch.where(noop.bool(), self.counters, counters))

    @contextlib.contextmanager
    def averaged(self) -> Iterator[None]:
        """Have the parameters be the average x inside, and then again y, as the state holds it at the end."""
        with torch.no_grad():
            for p, state in self.state.items():
                own = local_part(p)
                y, z = local_part(state.get("master", p)).float(), local_part(state["z"])
                average = y + (1 - 1 / self.betas[0]) * (z - y)
                if "y" in state:
                    state["y"] = p.detach().clone()
                own.copy_(average)
        try:
            yield
        finally:
            with torch.no_grad():
                for p, state in self.state.items():
                    local_part(p).copy_(local_part(state["master"] if "master" in state else state["y"]))
                    if "y" in state:
                        state["y"] = p.detach()


def _name_of(parameter: Tensor, y: Tensor) -> str:
    return "y" if y.dtype == parameter.dtype else "master"


class OtherStages(NamedTuple):
    """The ranks of the other pipeline stages, and the names of parameters that one of them counts in the norm of the
    gradients."""

    group: dist.ProcessGroup
    counts: Collection[str] = ()


class Optimizer:
    """AdamW, Muon with AdamW, or schedule-free AdamW, for a model's trainable parameters.

    Args:
        named_parameters: (FQN, parameter) pairs; the FQNs name the state in checkpoints.
        seed: of the stochastic rounding of moments in fewer bits than 32.
        compile: see `FusedAdamW`.
        experts: how experts are distributed over ranks; None: each rank has all.
        groups: of a parameter by name, the process groups over which its elements are divided; None: none is.
        stages: the ranks that have the other pipeline stages of the model; None: there are none.
        main_grads: give every parameter a float32 `main_grad`, its gradient from then on: `accumulate_gradients`
            follows each backward pass.
        divided: the parameters whose matrices ranks have in parts, by name; None: none.
        blocks: the rows of each matrix that a parameter joins, by the names of both, each with a separate learning rate
        and a separate Muon step; None: none does.
        everywhere: the names of the whole model's parameters, as patterns may mean any of them; None: these.
        own: what part of each parameter this rank has, by name; None: it has all of each.
        held_by: the ranks that hold a parameter, which share its update (`zero`); None: each makes all of it.
    """

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, torch.nn.Parameter]],
        config: OptimizerConfig,
        *,
        seed: int = 0,
        compile: bool = False,
        experts: ExpertRanks | None = None,
        groups: Mapping[str, tuple[dist.ProcessGroup, ...]] | None = None,
        stages: OtherStages | None = None,
        main_grads: bool = False,
        divided: Mapping[str, DividedMatrix] | None = None,
        blocks: Mapping[str, Mapping[str, int]] | None = None,
        everywhere: Iterable[str] | None = None,
        own: Mapping[str, LocalPart] | None = None,
        held_by: GroupOf | None = None,
    ) -> None:
        self.config = config
        self.experts = experts
        self._groups = groups or {}
        self._stages = stages
        self.parameters = {name: p for name, p in named_parameters if p.requires_grad}
        everywhere = None if everywhere is None else list(everywhere)
        self._frozen = FrozenExperts(config, self.parameters, own, everywhere)
        owner: Any
        for owner in self.parameters.values() if main_grads else ():
            owner.main_grad = torch.zeros_like(owner, dtype=torch.float32, requires_grad=False)
        self._shared = None if held_by is None else SharedUpdate(self.parameters, held_by)
        self.stepped = self.parameters if self._shared is None else self._shared.own
        """What this rank updates, by name: the parameters, or its parts of them."""
        devices = [p.device for p in self.parameters.values()]
        # with cpu_offload some parameters are on another device: the host's decisions are made where most are
        device = next((device for device in devices if device.type == "cpu"), devices[0])
        self.lr = torch.zeros((), dtype=torch.float32, device=device)
        self._rates: list[tuple[torch.Tensor, float]] = []
        groups_of: dict[str, list[dict[str, Any]]] = {"adamw": [], "muon": [], "schedule_free": []}
        self._block_rates = BlockRates(config, self.parameters, blocks or {}, own)
        rates = self._block_rates.largest
        if self._shared is not None and (rates or self._frozen.rows):
            key = "optimizer.lr_mult of matrices that a weight joins" if rates else "optimizer.freeze_experts"
            raise ConfigError(f"parallel.use_distributed_optimizer is True; allowed with {key}: False")
        groups_by = optimizer_groups(config, self.stepped, everywhere, blocks, rates)
        for (kind, rate, decay), members in groups_by.items():
            lr = self.lr if rate == 1.0 else torch.zeros_like(self.lr)
            self._rates += [(lr, rate)]
            groups_of[kind].append({"params": members, "weight_decay": decay, "lr": lr})
        beta1, beta2 = config.betas
        self._muon = None
        if groups_of["muon"]:
            self._muon = Muon(
                groups_of["muon"],
                lr=self.lr,
                momentum=config.muon_momentum,
                adjust_lr=config.muon_adjust_lr,
                master_weights=config.master_weights,
                divided=self._by_parameter(divided),
                joined=self._by_parameter(
                    {name: tuple(its.values()) for name, its in (blocks or {}).items() if config.muon_split != "none"}
                ),
            )
        self._schedule_free = None
        if groups_of["schedule_free"]:
            self._schedule_free = ScheduleFreeAdamW(
                groups_of["schedule_free"],
                lr=self.lr,
                betas=(beta1, beta2),
                eps=config.eps,
                master_weights=config.master_weights,
            )
        self._adamw = FusedAdamW(
            groups_of["adamw"] or [{"params": []}],
            lr=self.lr,
            betas=(beta1, beta2),
            eps=config.eps,
            master_weights=config.master_weights,
            moment_dtype=config.moment_dtype,
            seed=seed,
            compile=compile,
        )
        self._adamw.init_state()
        self.averages: dict[str, torch.Tensor] = {}
        """The float32 averages of `ema_decay` of this rank's parts, by name."""
        if config.ema_decay is not None:
            masters = self.masters  # whose values a weight of fewer bits only approximates
            wide = {name: local_part(masters.get(name, p.detach())).float() for name, p in self.stepped.items()}
            self.averages = {name: value.clone() for name, value in wide.items()}
        # what the rule of skip_grad_norm_spike goes by: the running average of the norm, and the steps in it
        self._norms = (
            None if config.skip_grad_norm_spike is None else torch.zeros(2, dtype=torch.float32, device=device)
        )

    def _by_parameter(self, named: Mapping[str, Any] | None) -> dict[torch.Tensor, Any]:
        return {self.parameters[name]: its for name, its in (named or {}).items() if name in self.parameters}

    @property
    def masters(self) -> dict[str, torch.Tensor]:
        """The float32 masters, of the parameters that have one."""
        states = {name: self.entries(name) for name in self.parameters}
        return {name: state["master"] for name, state in states.items() if "master" in state}

    def _optimizers(self) -> list[Any]:
        """Return the optimizers that there are, each of some of the parameters."""
        return [o for o in (self._muon, self._schedule_free, self._adamw) if o is not None]

    def averaged(self) -> contextlib.AbstractContextManager[None]:
        """Have the parameters be the averages inside that schedule-free AdamW makes of them: what is measured, written,
        and read. Of other optimizers they stay as they are."""
        return contextlib.nullcontext() if self._schedule_free is None else self._schedule_free.averaged()

    def entries(self, name: str) -> dict[str, torch.Tensor]:
        """Return the state of a parameter."""
        parameter = self.stepped[name]
        optimizer: Any = next(o for o in self._optimizers() if parameter in o.state)
        average = {"ema": self.averages[name]} if name in self.averages else {}
        return {**optimizer.state[parameter], **average}

    @torch.no_grad()
    def skips(self, norm: torch.Tensor) -> torch.Tensor | None:
        """Return whether the step of this gradient norm is to change nothing, a bool scalar; None: no step ever is.

        A spike is above `skip_grad_norm_spike` times the average of earlier norms, of which there are at least 20. It
        enters the average as the largest norm that is not an outlier, so that a level that lasts is accepted after some
        steps.
        """
        skip = ~torch.isfinite(norm) if self.config.skip_nonfinite else None
        if self._norms is None:
            return skip
        average, count = self._norms.unbind()
        limit = average * float(self.config.skip_grad_norm_spike or 1.0)
        known = count >= SPIKE_AFTER
        spike = known & (norm > limit)
        bounded = torch.where(known, torch.minimum(norm, limit), norm)
        share = torch.clamp(1 / (count + 1), min=SPIKE_SHARE)
        finite = torch.isfinite(norm)
        self._norms.copy_(
            torch.stack([torch.where(finite, average.lerp(bounded, share), average), count + finite.to(count.dtype)])
        )
        return spike & finite if skip is None else skip | spike

    def step(self, lr: float, *, noop: torch.Tensor | None = None) -> None:
        """Update the parameters from their gradients. noop: a scalar tensor; where it is nonzero nothing changes."""
        self.lr.fill_(lr)
        for own, rate in self._rates:
            if own is not self.lr:
                own.fill_(lr * rate)
        if self._shared is not None:
            self._shared.take_gradients()
        masters = self.masters if self._frozen.rows or self._block_rates.largest else {}
        frozen, rates = self._frozen, self._block_rates
        with frozen.unchanged(self.parameters, masters), rates.applied(self.parameters, masters):
            for optimizer in self._optimizers():
                optimizer.step(noop=noop)
        self._update_averages(noop)
        self.gather_parameters()

    @property
    def places(self) -> dict[int, ShardOfParameter] | None:
        """Which part of each parameter this rank updates, by the parameter's id; None: the whole."""
        return None if self._shared is None else self._shared.places

    @property
    def is_shared(self) -> bool:
        """Whether ranks that hold a parameter share its update."""
        return self._shared is not None

    def gather_parameters(self) -> None:
        """Make the parameters whole whose update ranks share; called by all of them."""
        if self._shared is not None:
            self._shared.gather()

    @torch.no_grad()
    def _update_averages(self, noop: torch.Tensor | None) -> None:
        decay = self.config.ema_decay
        for name, average in self.averages.items() if decay is not None else ():
            parameter, state = self.stepped[name], self.entries(name)
            new = average.lerp(local_part(state.get("master", parameter)).float(), 1 - float(decay or 0))
            average.copy_(new if noop is None else torch.where(noop.to(average.device).bool(), average, new))

    def zero_grad(self) -> None:
        """Drop the gradients."""
        for parameter in self.parameters.values() if self._shared is not None else ():
            parameter.grad = None
            sums = getattr(parameter, "main_grad", None)
            if sums is not None:  # whole: what is stepped here is a view of some rows
                sums.zero_()
        self._adamw.zero_grad()
        for optimizer in self._optimizers()[:-1]:
            for parameter in (p for group in optimizer.param_groups for p in group["params"]):
                if getattr(parameter, "main_grad", None) is not None:
                    parameter.main_grad.zero_()
                parameter.grad = None

    @torch.no_grad()
    def accumulate_gradients(self) -> None:
        """Add what a backward pass left in `.grad` to the parameters' `main_grad`, where they have one: layers that
        fuse accumulation into their weight gradients have left nothing there."""
        for parameter in self.parameters.values():
            gradient_of(parameter)

    @torch.no_grad()
    def clip_gradients(self) -> torch.Tensor:
        """Scale the gradients to a 2-norm of at most `clip_grad_norm`; return the norm before, a float32 scalar.

        It is the whole model's norm: what is divided among ranks counts once, whoever has it."""
        self._frozen.zero_gradients(self.parameters)
        gradients: list[torch.Tensor] = []
        norms: list[torch.Tensor] = []  # of what this rank has whole
        divided: dict[tuple[dist.ProcessGroup | None, ...], list[torch.Tensor]] = {}
        if self._shared is not None:
            self._shared.take_gradients()
        for name, parameter in self.stepped.items():
            groups, gradient = self._groups.get(name, ()), gradient_of(parameter)
            if self._shared is not None:
                groups = (*groups, *self._shared.groups(name))
            if groups:
                divided.setdefault(groups, [])  # also where this rank has none: its ranks add up together
            if gradient is not None:
                gradients.append(local_part(gradient))
                if self._stages is not None and name in self._stages.counts:
                    continue
                own = tensor_norm(gradients[-1]).to(self.lr.device)  # with cpu_offload some gradients are elsewhere
                (divided[groups] if groups else norms).append(own)
        norms += [norm_over(groups, parts, self.lr.device) for groups, parts in divided.items()]
        if self._stages is not None:  # each with different parameters
            norms = [norm_over([self._stages.group], norms, self.lr.device)]
        norm = torch.linalg.vector_norm(torch.stack(norms))
        limit = self.config.clip_grad_norm
        if limit is None or (reads_are_free(norm.device) and not norm > limit):
            return norm
        scale = torch.clamp(limit / norm, max=1.0)
        for own in gradients:
            own.mul_(scale.to(own.device))
        return norm

    def state_tensors(self) -> dict[str, torch.Tensor]:
        """Return moments, step counts and masters by name, ready for safetensors; of experts this rank's."""
        return {key: value for _, key, value in self._state()} | self._shared_state()

    def whole_state_tensors(self) -> dict[str, torch.Tensor]:
        """Return `state_tensors` of the whole model on the first rank; called by all that share its copy of experts."""
        experts = self.experts
        if experts is None:
            return self.state_tensors()
        found = {key: experts.whole(value) if experts.owns(p) else value for p, key, value in self._state()}
        return found | self._shared_state()

    @torch.no_grad()
    def load_state_tensors(self, tensors: dict[str, torch.Tensor]) -> None:
        """Undo `whole_state_tensors`; tensors of other names than "optimizer.*" do not count.

        Raises TrainingCheckpointError, before anything is taken over, unless they are exactly the state of these
        parameters, in shapes, dtypes and ranges of values.
        """
        experts = self.experts
        found = {name: value for name, value in tensors.items() if name.startswith("optimizer.")}
        layout = {key: self._whole_layout(p, value) for p, key, value in self._state()}
        layout |= {key: (tuple(value.shape), value.dtype) for key, value in self._shared_state().items()}
        check_same_layout(found, layout, "optimizer")
        check_ranges(found)
        for key, value in self._shared_state().items():
            value.copy_(found[key])
        for parameter, key, value in self._state():
            whole = found[key]
            value.copy_(experts.own(whole) if experts is not None and experts.owns(parameter) else whole)

    def parts(self, own: ModelParts) -> dict[str, LocalPart]:
        """Return this rank's parts of the state, by the names of `state_tensors`, but for moments in FP8, whose blocks
        are of a rank's own elements: see `checkpoints.fp8_moments`."""
        from ...parallel.parts import LocalPart

        found = {key: LocalPart.undivided(value) for key, value in self._shared_state().items()}
        for name, parameter in self.stepped.items():
            in_blocks = self.fp8_moments(name)
            for key, value in self.entries(name).items():
                if key in in_blocks:
                    continue
                tensor = local_part(value)
                undivided = tensor.dim() == 0
                part = LocalPart.undivided(tensor) if undivided else own.like(name, parameter, tensor)
                found[f"optimizer.{name}.{key}"] = part
        return found

    @torch.no_grad()
    def load_whole_state(self, tensors: Mapping[str, torch.Tensor], own: ModelParts) -> None:
        """Take this rank's parts of the state of a whole model, as `whole_state_tensors` gives it, but for moments in
        FP8; errors as for `load_state_tensors`."""
        parts = self.parts(own)
        found = {name: value for name, value in tensors.items() if name.startswith("optimizer.")}
        others = tuple(f"optimizer.{name}." for name in own.elsewhere())
        others += tuple(f"optimizer.{name}.{key}" for name in self.parameters for key in self.fp8_moments(name))
        found = {name: value for name, value in found.items() if not name.startswith(others)}
        check_same_layout(found, {key: (p.shape, p.tensor.dtype) for key, p in parts.items()}, "optimizer")
        check_ranges(found)
        for key, part in parts.items():
            part.tensor.copy_(part.of_whole(found[key]))

    def fp8_moments(self, name: str) -> dict[str, torch.Tensor]:
        """Return the fields of a parameter's moments in FP8; nothing where they are wider."""
        state = self.entries(name)
        return {key: state[key] for key in MOMENT_KEYS["float8"]} if "exp_avg_scale_inv" in state else {}

    def _shared_state(self) -> dict[str, torch.Tensor]:
        """Return the state that belongs to no parameter, the same on all ranks."""
        found = {} if self._norms is None else {"optimizer.grad_norm_average": self._norms}
        counters = {} if self._schedule_free is None else {"optimizer.schedule_free": self._schedule_free.counters}
        return found | counters

    def _whole_layout(self, parameter: torch.Tensor, value: torch.Tensor) -> tuple[tuple[int, ...], torch.dtype]:
        """Return shape and dtype of an entry of state where the experts of all ranks are together."""
        shape = tuple(value.shape)
        if self.experts is not None and self.experts.owns(parameter) and shape:
            shape = (shape[0] * self.experts.group.size(), *shape[1:])
        return shape, value.dtype

    def _state(self) -> Iterator[tuple[torch.Tensor, str, torch.Tensor]]:
        """Yield (parameter, name, tensor) of the state."""
        for name, parameter in self.parameters.items():
            for key, value in self.entries(name).items():
                yield parameter, f"optimizer.{name}.{key}", value
