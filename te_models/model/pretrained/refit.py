"""Refit in memory: the weights of a model that is trained pushed into a serving copy of another format or layout."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from te_models.layers import QuantizedTensor
from te_models.layers.tensor.fsdp import sharded

from ..parallel import shard_place

if TYPE_CHECKING:
    from te_models.checkpoints.folder.load import ParameterLoad
    from te_models.checkpoints.io.store import Store
    from te_models.checkpoints.mapping.quantized_format import Description

    from ..gpt import GPTModel


class ModelRefit:
    """Pushes weights into a serving copy that may store them quantized, lay experts out otherwise, or split them.

    serving: a `GPTModel` of the same configuration, or this rank's part of one (`tp_group`, `ep_group`). The way of
    each weight is worked out at the first push. Later pushes write the parameters alone whose source, or whose own
    values, have another SHA-256 digest than after the last one. The result has the bits of a fresh conversion. The
    folder's counterpart is `te_models.checkpoints.refit`.

    Example:
        served = GPTModel.from_pretrained("start", recipe=MXFP8BlockScaling())
        refit = ModelRefit(served)
        refit.push(model)  # after each step, or some
    """

    def __init__(self, serving: GPTModel) -> None:
        self._serving = serving
        self._params = dict(serving.stored_tensors())
        _require_whole(self._params.values(), "the serving model")
        self._load: ParameterLoad | None = None
        self._described: object = None
        self._sources: dict[str, list[str]] = {}
        self._seen: dict[str, tuple[bytes, bytes]] = {}

    @torch.no_grad()
    def push(self, model: GPTModel | Mapping[str, Tensor], *, check: bool = True) -> tuple[str, ...]:
        """Take over the weights of `model`, and return the names of the serving model's parameters that were written.

        model: a whole `GPTModel`, or its tensors by name in either expert layout, on any device, as
        `torch.distributed.checkpoint.state_dict.get_model_state_dict` gathers them from shards. check: read each plain
        parameter again after it was written.

        Raises CheckpointError, before anything is written, for tensors that are not the model's, and for shards.
        """
        from te_models.checkpoints import CheckpointError
        from te_models.checkpoints.io.store import MemoryStore
        from te_models.checkpoints.tools.save import stored_entries

        tensors = model if isinstance(model, Mapping) else dict(model.stored_tensors())
        _require_whole(tensors.values(), "the model")
        entries, described = stored_entries(tensors)
        store = MemoryStore(entries)
        signature = (described, store.tensors)
        if self._load is None or self._described != signature:
            self._load, self._seen, self._described = self._worked_out(tensors, store, described), {}, signature
            self._sources = {name: sorted(self._load.sources(name)) for name in self._params}
        self._load.read_from(store)
        digests = {name: _digest([tensor]) for name, tensor in entries.items()}
        written = []
        for name, param in self._params.items():
            source = b"".join(digests[of] for of in self._sources[name])
            if self._seen.get(name) == (source, _digest_of(param)):
                continue
            self._seen.pop(name, None)
            self._load.fill(name)
            holds = _digest_of(param)
            if check and not isinstance(param, QuantizedTensor) and holds != _digest([self._load.value(name)]):
                raise CheckpointError(f"{name} of the serving model does not hold what was written to it")
            self._seen[name] = (source, holds)
            written.append(name)
        return tuple(written)

    def _worked_out(
        self, tensors: Mapping[str, Tensor], store: Store, described: Mapping[str, Description]
    ) -> ParameterLoad:
        from te_models.checkpoints.folder.load import ParameterLoad, check_shapes, layout_of_names
        from te_models.checkpoints.mapping.param_shapes import expected_tensors
        from te_models.checkpoints.mapping.te_namespace import grouped_formats, te_namespace

        config = self._serving.config
        layout = layout_of_names(tensors, config, "the names of the model's tensors")
        check_shapes(tensors, expected_tensors(config, layout))
        formats = grouped_formats(config, layout, described)
        source = te_namespace(config, layout, formats)
        return ParameterLoad(store, source, config, formats, self._params, shard_place(self._serving))


def _require_whole(tensors: Iterable[Tensor], what: str) -> None:
    from te_models.checkpoints import CheckpointError

    if sharded(tensors):
        raise CheckpointError(f"{what} is stored in shards; allowed: whole tensors, as get_model_state_dict returns")


def _digest_of(param: Tensor) -> bytes:
    return _digest(param.fields.values() if isinstance(param, QuantizedTensor) else [param])


def _digest(tensors: Iterable[Tensor]) -> bytes:
    """Return the SHA-256 digest of tensors' bytes."""
    from te_models.checkpoints.io.box_reads import bytes_of

    digest = hashlib.sha256()
    for tensor in tensors:
        memory = tensor.detach().to("cpu").contiguous()
        digest.update(bytes_of(memory))
    return digest.digest()
