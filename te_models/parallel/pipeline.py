"""Pipeline stages of a layout: which layers each rank has, and one pass of micro-batches through them.

Stages, their schedules and what they send are `torch.distributed.pipelining`. What is added here: the router losses
travel with the hidden states as a second tensor, so that the last stage has the loss of all layers, and its gradient
reaches every router; weight gradients that a schedule wants later come from the layers' own delayed computation.

B batch, S sequence, H hidden.
"""

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from te_models.layers import gradient_of
from te_models.layers.module.base import GemmModule
from te_models.layers.tensor.fsdp import local_part

from ..config import ConfigError
from ..model import GPTModel
from ..model.stage import embeds_twice, shape_of_part
from .stage_layout import StageLayout

Fields = Mapping[str, Tensor]
"""A micro-batch: `input_ids` [B, S], and where it has them `labels` and what else `Stage` takes, all with B rows."""


class Stage(nn.Module):
    """A pipeline stage: from hidden states [B, S, H] (a rank's part, where ranks share tokens) and, of a mixture of
    experts, the router losses until there, to those after its layers; the last stage returns the loss. number: of the
    stage. context: what a call runs in."""

    def __init__(self, model: GPTModel, number: int) -> None:
        super().__init__()
        self.model, self.number = model, number
        self.routed = model.config.moe is not None
        self.context: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext
        self.dtype: torch.dtype | None = None
        self.losses: list[Tensor] = []

    def forward(
        self,
        x: Tensor,
        aux_loss: Tensor | None = None,
        *,
        labels: Tensor,
        position_ids: Tensor | None = None,
        document_ids: Tensor | None = None,
        weight: Tensor | None = None,
        input_ids: Tensor | None = None,
    ) -> Any:
        """x: [B, S] int64 of the first stage, else [B, S, H]; aux_loss: float32 scalar; labels, position_ids and
        document_ids: [B, S], as of GPTModel. weight: [B], one number, the factor of everything but the router losses;
        None: 1. input_ids: [B, S], for the last stage where layers predict further tokens. Adds (cross entropy, router
        losses, loss of further tokens, z-loss of the logits) of a micro-batch to `losses`, on the last stage."""
        model = self.model
        what: dict[str, Any] = {"input_ids": x} if model.pre_process else {"inputs_embeds": x}
        if position_ids is None and not model.pre_process:  # of a part of the tokens, they say how many there are
            position_ids = torch.arange(labels.shape[1], device=x.device)[None]
        if model.mtp is not None and not model.pre_process:
            what["input_ids"] = input_ids
        what |= {"position_ids": position_ids, "document_ids": document_ids}
        with self.context():
            output = model(**what, labels=labels if model.post_process else None, return_logits=False)
        own = output.aux_loss
        aux = aux_loss if own is None else own if aux_loss is None else aux_loss + own
        if model.post_process:
            loss = output.loss if own is None else output.loss - own
            none = torch.zeros_like(loss)
            aux, further, z_loss = (none if t is None else t for t in (aux, output.mtp_loss, output.logits_z_loss))
            further = further * model.config.mtp_loss_scaling_factor
            if weight is not None:
                loss, further, z_loss = (term * weight[0] for term in (loss, further, z_loss))
            self.losses.append(torch.stack([loss - further - z_loss, aux, further, z_loss]).detach())
            return loss + aux
        x = output.hidden_states[-1]
        if self.dtype is not None and x.dtype != self.dtype:
            raise RuntimeError(f"stage {self.number} returned {x.dtype}; allowed: {self.dtype}, as the parameters have")
        if not self.routed:
            return x
        return x, torch.zeros((), dtype=torch.float32, device=x.device) if aux is None else aux


class Pipeline:
    """Passes of micro-batches through this rank's stages.

    Args:
        model: Of `parallelize`, with its `pipeline_stages`.
        layout: Of the stages.
        group: The ranks that have the other stages of this copy.
        micro_batches: Of a step.
        fewer: Other numbers that steps may have.
        shape: (B, S) of a micro-batch.
        context: What each call of a stage runs in; None: nothing.

    Raises ConfigError for a number of micro-batches that the schedule does not have.
    """

    def __init__(
        self,
        model: GPTModel,
        layout: StageLayout,
        group: dist.ProcessGroup,
        *,
        micro_batches: int,
        shape: tuple[int, int],
        fewer: Iterable[int] = (),
        context: Callable[[], AbstractContextManager[Any]] | None = None,
    ) -> None:
        self.model, self.layout, self.group, self.micro_batches = model, layout, group, micro_batches
        self.stages: tuple[Stage, ...] = model.pipeline_stages
        parameter = next(model.decoder.parameters())
        self.device = parameter.device
        ids = torch.empty(shape, dtype=torch.int64, device="meta")
        options: dict[str, Any] = {"device": "meta", "requires_grad": True}
        hidden = torch.empty(shape_of_part(self.stages[0].model, *shape), dtype=parameter.dtype, **options)
        scalar = torch.empty((), dtype=torch.float32, **options)
        between = (hidden, scalar) if model.config.moe is not None else (hidden,)
        last, stages = layout.stages - 1, []
        for stage in self.stages:
            stage.dtype = parameter.dtype
            stage.context = context or contextlib.nullcontext
            options = {
                "input_args": (ids,) if stage.number == 0 else between,
                "output_args": (scalar,) if stage.number == last else between,
                "dw_builder": _later_gradients(stage) if layout.is_later else None,
            }
            stages.append((stage, options))
        self._schedules = {count: self._schedule(count, stages) for count in sorted({micro_batches, *fewer})}

    def _schedule(self, count: int, stages: Sequence[tuple[Stage, dict[str, Any]]]) -> Any:
        """Return torch's schedule of this many micro-batches, with new stages. stages: this rank's modules, and
        options of torch's stages."""
        layout = self.layout
        own = [
            _stage_class()(stage, stage.number, layout.stages, self.device, group=self.group, **options)
            for stage, options in stages
        ]
        from torch.distributed.pipelining.schedules import get_schedule_class

        options: dict[str, Any] = {"loss_fn": lambda loss, _: loss / count, "scale_grads": False}
        try:
            single = layout.stages_per_rank == 1
            return get_schedule_class(layout.schedule)(own[0] if single else own, count, **options)
        except ValueError as error:
            what = f"data.gradient_accumulation is {count}"
            if count != self.micro_batches:
                what = f"data.rampup_batch_size has steps of {count} micro-batches"
            schedule = f"parallel.pipeline_schedule = {layout.schedule!r}"
            raise ConfigError(f"{what}, with which {schedule} cannot be on {layout.ranks} ranks: {error}") from None

    def forward_backward(self, micro_batches: Sequence[Fields]) -> Tensor:
        """Run micro-batches forward and backward; return [cross entropy, router losses, loss of further tokens, z-loss
        of the logits], means over them, the same on all ranks of `group`. Gradients are those of the mean loss, their
        sum. Raises ValueError where micro-batches have different fields."""
        return self._run(micro_batches, backward=True).mean(0)

    def evaluate(self, batches: Sequence[Fields]) -> Tensor:
        """Return the cross entropy of each batch, times its weight, the same on all ranks of `group`."""
        found = []
        for first in range(0, len(batches), self.micro_batches):
            some = list(batches[first : first + self.micro_batches])
            full = some + [some[-1]] * (self.micro_batches - len(some))  # a schedule has one number of micro-batches
            found.append(self._run(full, backward=False)[: len(some), 0])
        return torch.cat(found)

    def _run(self, micro_batches: Sequence[Fields], *, backward: bool) -> Tensor:
        names = micro_batches[0].keys()
        if other := [sorted(each.keys() ^ names) for each in micro_batches if each.keys() != names]:
            raise ValueError(f"some micro-batches have {other[0][0]!r} and some have not; allowed: the same for all")
        fields = {name: torch.cat([each[name] for each in micro_batches]).to(self.device) for name in names}
        ids = fields.pop("input_ids")
        if self.model.config.mtp_num_layers:
            fields["input_ids"] = ids
        for stage in self.stages:
            stage.losses.clear()
        arguments = (ids,) if any(stage.number == 0 for stage in self.stages) else ()
        schedule = self._schedules[len(micro_batches)]
        run = schedule.step if backward else schedule.eval
        with contextlib.nullcontext() if backward else torch.no_grad():
            try:
                run(*arguments, **{"labels": ids, **fields}, target=ids, return_outputs=False)
            except RuntimeError as error:  # torch lists tensors, and says what went wrong only as the cause
                raise _first_cause(error) from None
        total = torch.zeros(len(micro_batches), 4, dtype=torch.float32, device=self.device)
        for stage in self.stages:
            if stage.losses:
                total += torch.stack(stage.losses[-len(micro_batches) :])
        dist.all_reduce(total, group=self.group)  # of one rank: the others have zeros
        return total

    @property
    def shares_embedding(self) -> bool:
        """Whether the first and the last stage, on two ranks, both have the weight of the embedding."""
        return embeds_twice(self.model.config) and self.layout.ranks > 1 and not self.layout.is_v_shaped

    @torch.no_grad()
    def sum_embedding_gradients(self) -> None:
        """Add up the gradients of weights that several ranks have: of the embedding in the first and the last stage,
        and of blocks that layers share in all."""
        shared = self.model.decoder.shared_blocks
        for parameter in shared.parameters() if shared is not None and self.layout.ranks > 1 else ():
            if parameter.requires_grad:
                gradient = gradient_of(parameter)
                if gradient is None:  # no layer of this rank uses the block
                    gradient = parameter.grad = torch.zeros_like(parameter)
                dist.all_reduce(local_part(gradient), group=self.group)
        rank, last = self.group.rank(), self.layout.ranks - 1
        if not self.shares_embedding or rank not in (0, last):
            return
        weight = self.model.embedding.word_embeddings.weight
        if not weight.requires_grad:  # it is frozen
            return
        gradient = gradient_of(weight)
        assert gradient is not None, "both stages use it"
        own = local_part(gradient)
        theirs, other = torch.empty_like(own), dist.get_global_rank(self.group, last - rank)
        both = [(dist.isend, own.contiguous()), (dist.irecv, theirs)]
        for work in dist.batch_isend_irecv([dist.P2POp(op, tensor, other, self.group) for op, tensor in both]):
            work.wait()
        own.add_(theirs)  # two numbers: the same bits on both ranks


@cache
def _stage_class() -> Any:
    """Return torch's stage, extended to hand gradients on under V-shaped schedules also where an evaluation has
    none."""
    from torch.distributed.pipelining import PipelineStage

    class EvaluatedStage(PipelineStage):
        def get_local_bwd_output(self, mb_index: int) -> Any:
            return super().get_local_bwd_output(mb_index) if self.has_backward else ()

        def set_local_bwd_input(self, next_stage_bwd_outputs: Any, mb_index: int) -> None:
            if self.has_backward:
                super().set_local_bwd_input(next_stage_bwd_outputs, mb_index)

    return EvaluatedStage


def _first_cause(error: BaseException) -> BaseException:
    while error.__cause__ is not None:
        error = error.__cause__
    return error


def _later_gradients(stage: Stage) -> Callable[[], Callable[[], None]]:
    """Have the layers of a stage leave weight gradients out of backward passes, and return what torch calls after each:
    a function that returns the one which computes what that pass left out."""
    queues: list[list[Callable[[], None]]] = []
    for module in stage.modules():
        if isinstance(module, GemmModule):
            module._later = []
            queues.append(module._later)

    def after_backward() -> Callable[[], None]:
        left = [compute for queue in queues for compute in queue]
        for queue in queues:
            queue.clear()

        def run() -> None:
            while left:
                left.pop(0)()

        return run

    return after_backward
